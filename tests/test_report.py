"""Methods by their configurations, rows, and what mlframe-report writes."""

from __future__ import annotations

import csv
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from report_runs import write_run

from mlframe.errors import ConfigError
from mlframe.report import curves
from mlframe.report.cli import report
from mlframe.report.methods import grouped
from mlframe.report.runs import read_all, rows
from mlframe.rows import read_rows


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """Two tasks; in the first scratch, two V-cycles and their control, and one that diverged."""
    top = tmp_path / "runs"
    for seed in range(2):
        for steps, cost in ((100, 10**6), (1000, 10**7)):
            write_run(top / f"s{steps}_{seed}", "scratch", cost, 4.0 - steps / 1000 + seed / 100, steps, seed)
        for alpha in (0.25, 0.5):
            write_run(top / f"v{alpha}_{seed}", "vcycle", 2 * 10**6, 3.5 + alpha / 10, 300, seed, plan__alpha=alpha)
    write_run(top / "c", "control", 2 * 10**6, 3.7, 900)
    write_run(top / "bad", "vcycle", 10**6, 1.0, status="diverged", reason="not <b>finite</b>", seed=5)
    write_run(top / "other", "scratch", 10**6, 0.4, model__config={"n_embd": 128})
    return top


def test_methods_are_named_by_what_differs(runs: Path) -> None:
    """Not by seed, steps or rate; scratch and a control not by the plan and levels that they were cut out of."""
    write_run(runs / "s_in_levels", "scratch", 10**6, 3.9, seed=9, levels={"count": 2, "heads": 2})
    tasks, left = grouped(read_all([runs]))
    assert [task.label for task in tasks] == ["small, n_embd=128", "small, n_embd=64"]
    assert [method.label for method in tasks[1].methods] == [
        "scratch", "vcycle, alpha=0.25", "vcycle, alpha=0.5", "control: level 1 alone (2 layers, width 32)",
    ]  # fmt: skip
    assert [len(point.runs) for point in tasks[1].methods[0].points] == [3, 2]
    assert [run.status for run in left] == ["diverged"]


def test_the_same_runs_give_the_same_bytes(runs: Path, tmp_path: Path) -> None:
    written = []
    for out in (tmp_path / "a", tmp_path / "b"):
        report([runs] if out.name == "a" else sorted(runs.iterdir(), reverse=True), out)
        written.append({path.relative_to(out): path.read_bytes() for path in out.rglob("*") if path.is_file()})
    assert written[0] == written[1]
    assert {path.suffix for path in written[0]} == {".csv", ".md", ".html", ".png", ".svg"}


def test_results_csv_has_every_run_once(runs: Path, tmp_path: Path) -> None:
    report([runs, runs / "c"], tmp_path / "out")
    with (tmp_path / "out" / "results.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert sorted(row["folder"] for row in table) == sorted(path.as_posix() for path in runs.iterdir())
    first = next(row for row in table if row["folder"].endswith("/v0.25_1"))
    assert (first["total_flops"], first["val/loss"], first["seed"], first["compared"]) == (
        "2000000",
        "3.525",
        "1",
        "yes",
    )
    bad = next(row for row in table if row["folder"].endswith("bad"))
    assert (bad["status"], bad["reason"], bad["compared"]) == ("diverged", "not <b>finite</b>", "no")


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.found += [value or "" for name, value in attrs if name in ("src", "href", "action", "data", "poster")]


def test_the_page_needs_no_network_and_escapes_what_it_shows(runs: Path, tmp_path: Path) -> None:
    report([runs], tmp_path)
    html = (tmp_path / "report.html").read_text()
    links = _Links()
    links.feed(html)
    assert links.found
    assert all(link.startswith("#") for link in links.found)
    assert "default-src 'none'" in html
    assert "b" not in links.tags[: links.tags.index("footer")]
    assert "not &lt;b&gt;finite" in html
    assert "link" not in links.tags


def test_rows_are_those_of_read_rows(tmp_path: Path) -> None:
    """Columns that come and go, empty values, nan, a row that is cut off, and FLOPs beyond 64 bits."""
    path = tmp_path / "metrics.csv"
    path.write_text(
        f'step,"val/loss",total_flops,other\r\n1,,{10**21},x\r\n2,0.5,{2 * 10**21},\r\n3,nan,3,\r\n4,0.2', newline=""
    )
    read = rows(str(tmp_path), ["step", "val/loss", "total_flops", "absent"])
    assert sorted(read) == ["step", "total_flops", "val/loss"]
    for name, values in read.items():
        np.testing.assert_array_equal(values, [float(row[name] or "nan") for row in read_rows(path)])
    path.write_text("step,val/loss\r\n1,0.5\r\n2\r\n3,0.25\r\n", newline="")
    assert rows(str(tmp_path), ["step"])["step"].tolist() == [1, 3]
    path.write_text("step,val/loss\r\n1,high\r\n", newline="")
    with pytest.raises(ConfigError, match="is damaged"):
        rows(str(tmp_path), ["val/loss"])
    assert rows(str(tmp_path / "none"), ["step"]) == {}


def test_a_line_is_the_median_of_the_seeds_and_keeps_its_turns(tmp_path: Path) -> None:
    course = [(i / 2000, 5 - i / 1000) for i in range(1, 2000)]
    for seed in range(3):
        shifted = [(share, loss + seed**2) for share, loss in course]
        write_run(tmp_path / f"v{seed}", "vcycle", 10**6, 3.0, 4000, seed, course=shifted)
    (task,), _ = grouped(read_all([tmp_path]))
    line = next(line for line in curves.lines(task) if line.metric == "val/loss")
    assert len(line.median) <= curves.DRAWN + 4
    assert (line.median[0], line.low[0], line.high[0]) == pytest.approx((5.999, 4.999, 8.999))
    turns = curves.turns(line)
    assert line.x["total_flops"][turns - 1].tolist() == [0.05 * 10**6, 0.55 * 10**6]
    assert line.x["total_flops"][-1] == 10**6


@pytest.mark.parametrize(("path", "message"), [("nothing", "is no folder"), ("", "no run in")])
def test_what_is_no_run_is_one_line(tmp_path: Path, path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        report([tmp_path / path], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_command_starts_without_torch() -> None:
    code = "import sys, mlframe.report.cli; sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
