"""The language experiments against scratch and the small model alone, at equal FLOPs, over three seeds.

python benchmarks/language.py [gpt_docs|bert_docs [JOBS]]        (default: both; 2 jobs at a time, one thread each)

Tunes the peak rate of the V-cycle and of scratch on one grid, in runs of a part of the steps with their own full decay
(seed 0), then runs each at its best rate with every seed, and the small model alone at the V-cycle's rate once. All lie
under runs/benchmark_NAME and are skipped when finished; the table, the CSV benchmarks/results/NAME.csv and the figure
docs/NAME.png are made from the runs' own files. benchmarks/ngram.py prints what a 3-gram reaches on the same tokens.
"""

from __future__ import annotations

import csv
import json
import os
import statistics
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from mlframe.rows import read_rows

ROOT = Path(__file__).parents[1]
METHODS = {
    "V-cycle": [],
    "scratch": ["control=0"],
    "small model alone": ["control=1"],
}
SEEDS = (0, 1, 2)
RATES = {"gpt_docs": ("3e-3", "6e-3", "1.2e-2"), "bert_docs": ("1.5e-3", "2.5e-3", "4e-3")}
STEPS = {"gpt_docs": (1250, 3000), "bert_docs": (800, 1600)}  # of a V-cycle: in tuning, in the table
COLOURS = {"V-cycle": "#c2410c", "scratch": "#1d4ed8", "small model alone": "#6b7280"}

Run = tuple[str, str, int, int]  # method, rate, seed, steps of the V-cycle whose FLOPs are spent


def folder(name: str, run: Run) -> Path:
    return ROOT / "runs" / f"benchmark_{name}" / "_".join(map(str, run)).replace(" ", "_")


def train(name: str, run: Run) -> None:
    method, rate, seed, steps = run
    command = [sys.executable, "-m", "mlframe.train", f"experiment={name}", *METHODS[method], f"seed={seed}"]
    command += [f"steps={steps}"]
    command += [f"optimizer.lr={rate}", f"hydra.run.dir={folder(name, run)}", "logger=none", "callbacks.progress=null"]
    if steps == STEPS[name][1]:
        command.append("trainer.limit_test_batches=40")  # 2,560 rows: the whole split takes a minute of each run
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"{run} failed:\n{done.stderr}")
    print(f"{run}: test loss {results(name, run)['test/loss']:.4f}", flush=True)


def train_all(name: str, runs: list[Run], jobs: int) -> None:
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda run: train(name, run), runs))


def results(name: str, run: Run) -> dict[str, Any]:
    return json.loads((folder(name, run) / "results.json").read_text())


def best_rate(name: str, method: str) -> str:
    """By the validation split, which is not the one that the table shows."""
    return min(RATES[name], key=lambda rate: results(name, (method, rate, 0, STEPS[name][0]))["val/loss"])


def write(name: str, tuned: list[Run], chosen: list[Run]) -> None:
    rows = []
    for run in dict.fromkeys([*tuned, *chosen]):
        # No wall_time: jobs share the machine.
        kept = {key: value for key, value in results(name, run).items() if key not in ("levels", "wall_time")}
        rows.append({**dict(zip(("method", "rate", "seed", "v_cycle_steps"), run, strict=True)), **kept})
    path = ROOT / "benchmarks" / "results" / f"{name}.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print("\n| method | rate | FLOPs | test loss, median | of the seeds |\n|---|---|---|---|---|")
    for method in METHODS:
        mine = [row for row in rows if row["method"] == method and row["v_cycle_steps"] == STEPS[name][1]]
        losses = [row["test/loss"] for row in mine]
        spread = ", ".join(f"{loss:.3f}" for loss in losses)
        rate, flops = mine[0]["rate"], mine[0]["total_flops"]
        print(f"| {method} | {rate} | {flops:.4g} | {statistics.median(losses):.3f} | {spread} |")


def draw(name: str, chosen: list[Run]) -> None:
    figure, axes = plt.subplots(figsize=(7.2, 4.2), dpi=150)
    labelled: set[str] = set()
    for run in chosen:
        method = run[0]
        rows = [row for row in read_rows(folder(name, run) / "metrics.csv") if row.get("val/loss")]
        flops, loss = ([float(row[key]) for row in rows] for key in ("total_flops", "val/loss"))
        label = None if method in labelled else method
        labelled.add(method)
        axes.plot(flops, loss, color=COLOURS[method], alpha=0.8, linewidth=1.3, label=label)
        if method == "V-cycle":
            ends = [i for i in range(1, len(rows)) if rows[i]["phase"] != rows[i - 1]["phase"]]
            axes.plot([flops[i] for i in ends], [loss[i] for i in ends], "o", color=COLOURS[method], ms=3)
    axes.set(xlabel="total training FLOPs", ylabel="validation loss, nats a token")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    axes.set_title(f"{name}: one line a seed; dots: first validation after a transition", fontsize=9)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / f"{name}.png")


def compare(name: str, jobs: int) -> None:
    short, whole = STEPS[name]
    tuned = [(method, rate, 0, short) for rate in RATES[name] for method in ("V-cycle", "scratch")]
    train_all(name, tuned, jobs)
    rates = {method: best_rate(name, method) for method in ("V-cycle", "scratch")}
    chosen = [(method, rate, seed, whole) for seed in SEEDS for method, rate in rates.items()]
    chosen.insert(2, ("small model alone", rates["V-cycle"], 0, whole))
    train_all(name, chosen, jobs)
    write(name, tuned, chosen)
    draw(name, chosen)


def main() -> None:
    jobs = int(sys.argv[2]) if len(sys.argv) > 2 else 2
    for name in sys.argv[1:2] or STEPS:
        compare(name, jobs)


if __name__ == "__main__":
    main()
