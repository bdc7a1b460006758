// Draws the figures of report.html from the JSON in the page, again whenever a choice or the colour scheme changes.
"use strict";
const tasks = JSON.parse(document.getElementById("data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const clear = (colour, alpha) => "rgba(" + [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16)).join() + "," + alpha + ")";
const colourOf = method => method.colours[dark.matches ? 1 : 0];

const tickformats = { total_flops: ".3~e", wall_time: "", tokens: "~s", images: "~s", samples: "~s" };

function layout(cost, x, y, log) {
  const style = getComputedStyle(document.documentElement), css = name => style.getPropertyValue(name).trim();
  const axis = { gridcolor: css("--line"), linecolor: css("--line"), zeroline: false, automargin: true };
  return {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", showlegend: false, hovermode: "closest",
    font: { color: css("--ink"), size: 13, family: getComputedStyle(document.body).fontFamily },
    hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), font: { color: css("--ink") }, align: "left", namelength: -1 },
    modebar: { bgcolor: "rgba(0,0,0,0)", color: css("--soft"), activecolor: css("--ink") },
    margin: { l: 8, r: 14, t: 14, b: 8 }, dragmode: innerWidth > 720 ? "zoom" : false,
    xaxis: { ...axis, title: { text: x, standoff: 12 }, tickformat: tickformats[cost], nticks: innerWidth > 720 ? 10 : 5,
             ...(log ? { type: "log", dtick: "D2" } : {}) },
    yaxis: { ...axis, title: { text: y, standoff: 10 } },
  };
}

// The course of training: a band from the least to the most seed, the median, and a ring at each change of phase.
function course(task, state) {
  const traces = [], about = (method, line) => method.label + ", " + line.steps.toLocaleString("en") + " steps";
  for (const line of task.lines.filter(line => line.metric === state.metric && !state.hidden.has(line.method))) {
    const method = task.methods[line.method], colour = colourOf(method), x = line.x[state.cost];
    const last = Math.max(...task.lines.filter(other => other.method === line.method).map(other => other.steps));
    const band = { x: [...x, ...[...x].reverse()], y: [...line.high, ...[...line.low].reverse()], fill: "toself",
                   fillcolor: clear(colour, 0.16), line: { width: 0 }, hoverinfo: "skip", mode: "lines" };
    const hover = "%{y:.4f} at %{x:.4s}<br>%{text}<extra>" + about(method, line) + "</extra>";
    const text = line.phase.map(phase => line.phases[phase] ?? "");
    const opacity = line.steps === last ? 1 : 0.5;
    traces.push(band, { x, y: line.median, text, hovertemplate: hover, mode: "lines", opacity,
                        line: { color: colour, width: line.steps === last ? 2.2 : 1.4, dash: method.kind === "control" ? "dash" : "solid" } });
    const at = line.turns;
    if (at.length) traces.push({ x: at.map(i => x[i]), y: at.map(i => line.median[i]), text: at.map(i => "begins: " + text[i]),
                                 hovertemplate: hover, mode: "markers", opacity,
                                 marker: { symbol: "circle-open", size: 10, color: colour, line: { width: 2 } } });
  }
  const bottom = layout(state.cost, task.costs[state.cost], state.metric, state.log);
  bottom.yaxis.range = task.windows[state.metric];
  return [traces, bottom];
}

// Finished runs alone: a dot a run, a line through the medians of a method's budgets.
function finished(task, state) {
  const traces = [];
  task.methods.forEach((method, index) => {
    if (state.hidden.has(index)) return;
    const colour = colourOf(method), hover = "%{y:.4f} at %{x:.4s}<br>%{text}<extra>" + method.label + "</extra>";
    const runs = method.points.flatMap(point => point.runs.map(run => ({ ...run, steps: point.steps })));
    traces.push({ x: method.points.map(point => point.median[state.cost]), y: method.points.map(point => point.median[state.metric]),
                  mode: "lines", hoverinfo: "skip", line: { color: colour, width: 2, dash: method.kind === "control" ? "dash" : "solid" } });
    traces.push({ x: runs.map(run => run[state.cost]), y: runs.map(run => run[state.metric]), mode: "markers", hovertemplate: hover,
                  text: runs.map(run => "seed " + run.seed + ", " + run.steps.toLocaleString("en") + " steps, rate " + run.rate),
                  marker: { color: colour, size: 9, symbol: method.symbol, line: { color: clear(colour, 0.3), width: 3 } } });
  });
  return [traces, layout(state.cost, task.costs[state.cost], "final " + state.metric, true)];
}

function show(task, index) {
  const root = document.getElementById("task" + index);
  const state = { metric: task.metrics[0], cost: "total_flops", log: false, hidden: new Set() };
  const config = { displaylogo: false, responsive: true, modeBarButtonsToRemove: ["select2d", "lasso2d", "autoScale2d"],
                   displayModeBar: innerWidth > 720 ? "hover" : false };
  const draw = () => {
    for (const [name, figure] of [["course", course], ["finished", finished]]) {
      const place = root.querySelector("." + name);
      if (place) Plotly.react(place, ...figure(task, state), config);
    }
    root.querySelectorAll("[data-method]").forEach(mark => { mark.style.color = colourOf(task.methods[mark.dataset.method]); });
  };
  root.querySelectorAll("select").forEach(select => select.addEventListener("change", () => {
    state[select.name] = select.name === "log" ? select.value === "log" : select.value;
    root.querySelectorAll("select[name=" + select.name + "]").forEach(other => { other.value = select.value; });
    draw();
  }));
  root.querySelectorAll(".legend button").forEach(button => button.addEventListener("click", () => {
    const method = Number(button.value), shown = state.hidden.delete(method);
    if (!shown) state.hidden.add(method);
    root.querySelectorAll(".legend button[value='" + method + "']").forEach(b => b.setAttribute("aria-pressed", shown));
    draw();
  }));
  dark.addEventListener("change", draw);
  draw();
}
tasks.forEach(show);
