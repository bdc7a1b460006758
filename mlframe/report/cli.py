"""`mlframe-report RUNS... [--out FOLDER]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from mlframe.errors import ConfigError
from mlframe.report import curves, figures
from mlframe.report.methods import grouped
from mlframe.report.page import page
from mlframe.report.runs import read_all
from mlframe.report.tables import counts, results_csv, results_md
from mlframe.run_folder import write


def report(paths: Sequence[str | Path], out: Path) -> str:
    """Write results.csv, results.md, report.html and figures/ of the runs below `paths`. Returns what they are of.

    The same runs give the same bytes. Raises ConfigError where there is no run or a file cannot be written.
    """
    runs = read_all(paths)
    tasks, left = grouped(runs)
    lines = [curves.lines(task) for task in tasks]
    try:
        (out / "figures").mkdir(parents=True, exist_ok=True)
        write(out / "results.csv", results_csv(runs, tasks, left))
        write(out / "results.md", results_md(tasks, left))
        write(out / "report.html", page(tasks, lines, left))
        for task, drawn in zip(tasks, lines, strict=True):
            figures.draw(task, drawn, out / "figures")
    except OSError as error:
        raise ConfigError(f"--out={out} cannot be written ({error.strerror}): choose another folder") from error
    return counts(tasks, left)


def main() -> None:
    """The console script `mlframe-report`."""
    parser = argparse.ArgumentParser("mlframe-report", description="Compare runs: tables, figures and a page.")
    parser.add_argument("runs", nargs="+", help="run folders, or folders above them, such as a sweep's")
    parser.add_argument("--out", type=Path, default=Path("report"), help="the folder to write to (report)")
    chosen = parser.parse_args()
    try:
        said = report(chosen.runs, chosen.out)
    except ConfigError as error:
        sys.exit(f"mlframe-report: {error}")
    print(f"{said}\nin {chosen.out}: report.html, results.md, results.csv, figures/")


if __name__ == "__main__":
    main()
