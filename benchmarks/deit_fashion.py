"""The default experiment against scratch and the small model alone, at equal FLOPs, over seeds.

python benchmarks/deit_fashion.py [SEED ...]        (default: 0 1 2; an hour on two cores)

Runs `mlframe-train experiment=deit_fashion` and its two controls under runs/ (the small model alone for the first seed
only), skips what is finished there, and writes benchmarks/results/deit_fashion.csv, the table and the figure
docs/deit_fashion.png from the runs' own files.
"""

from __future__ import annotations

import csv
import json
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from mlframe.rows import read_rows

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results" / "deit_fashion.csv"
# Steps of the controls: as many as the V-cycle's FLOPs pay for (see "FLOPs" in the table).
METHODS = {
    "V-cycle": [],
    "scratch": ["plan=scratch", "steps=2832"],
    "small model alone": ["plan=scratch", "plan.level=1", "steps=21341"],
}
COLOURS = {"V-cycle": "#c2410c", "scratch": "#1d4ed8", "small model alone": "#6b7280"}


def run(method: str, seed: int) -> Path:
    folder = ROOT / "runs" / "benchmark_deit_fashion" / f"{method.replace(' ', '_')}_{seed}"
    command = [sys.executable, "-m", "mlframe.train", "experiment=deit_fashion", *METHODS[method], f"seed={seed}"]
    command += [f"hydra.run.dir={folder}", "logger=none", "trainer.val_check_interval=250"]
    subprocess.run(command, check=True, cwd=ROOT)
    return folder


def summarise(runs: dict[tuple[str, int], Path]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    rows = []
    for (method, seed), folder in runs.items():
        results = json.loads((folder / "results.json").read_text())
        # No wall_time: runs of this table may share the machine with others.
        kept = {key: value for key, value in results.items() if key not in ("levels", "wall_time")}
        rows.append({"method": method, "seed": seed, **kept})
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    print("\n| method | FLOPs | test accuracy (median) | of the seeds |\n|---|---|---|---|")
    for method in METHODS:
        mine = [row for row in rows if row["method"] == method]
        accuracies = [row["test/acc"] for row in mine]
        spread = ", ".join(f"{100 * accuracy:.2f}" for accuracy in accuracies)
        print(f"| {method} | {mine[0]['total_flops']:.4g} | {100 * statistics.median(accuracies):.2f} % | {spread} |")


def draw(runs: dict[tuple[str, int], Path]) -> None:
    figure, axes = plt.subplots(figsize=(7.2, 4.2), dpi=150)
    for (method, seed), folder in runs.items():
        rows = [row for row in read_rows(folder / "metrics.csv") if row.get("val/acc")]
        flops, accuracy = ([float(row[key]) for row in rows] for key in ("total_flops", "val/acc"))
        label = method if seed == min(s for _, s in runs) else None
        axes.plot(flops, [100 * a for a in accuracy], color=COLOURS[method], alpha=0.8, linewidth=1.3, label=label)
        if method == "V-cycle":
            phases = [row["phase"] for row in rows]
            ends = [i for i in range(1, len(rows)) if phases[i] != phases[i - 1]]
            axes.plot([flops[i] for i in ends], [100 * accuracy[i] for i in ends], "o", color=COLOURS[method], ms=3)
    axes.set(xlabel="total training FLOPs", ylabel="validation accuracy, %", ylim=(70, 92))
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    axes.set_title("DeiT on Fashion-MNIST: one line a seed; dots: first validation after a transition", fontsize=9)
    figure.tight_layout()
    figure.savefig(ROOT / "docs" / "deit_fashion.png")


def main() -> None:
    seeds = [int(seed) for seed in sys.argv[1:]] or [0, 1, 2]
    wanted = [(method, seed) for method in METHODS for seed in (seeds[:1] if "alone" in method else seeds)]
    runs = {(method, seed): run(method, seed) for method, seed in wanted}
    summarise(runs)
    draw(runs)


if __name__ == "__main__":
    main()
