"""SIGKILL at random moments, again and again, in whole runs of DeiT, BERT and GPT-2: nothing may be lost.

python benchmarks/chaos.py [KILLS]        (of each family; default: 50, under ten minutes on one core)

A run that dies goes on in its folder until it is finished, and has to leave what a run leaves that nothing killed: the
weights, the checkpoints with the optimizer's state and the rows, to the bit. Half of each family's runs accumulate
gradients and load in processes of their own. Writes benchmarks/results/chaos.csv, a row for each kill; the exit status
is 1 if any was lost. How it works: tests/kills.py, tests/moments.py.
"""

from __future__ import annotations

import csv
import statistics
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from kills import ANY_TIME, PART_FILE, Case, Death, draw_kills
from moments import MOMENTS
from small_runs import FAMILIES, WAYS

RESULTS = Path(__file__).parent / "results" / "chaos.csv"


def torment(family: str, kills: int, seed: int, folder: Path) -> list[Death]:
    """Runs of a family, one after the other in its two ways, until all the kills have met one."""
    cases = [Case(family, way, folder / f"{family}_{way}") for way in WAYS]
    queue, deaths, run = draw_kills(cases[0].counts, kills, seed), list[Death](), 0
    while queue:
        deaths += cases[run % len(cases)].endure(f"run_{run}", queue)
        run += 1
    print(f"{family}, seed {seed}: {len(deaths)} kills in {run} runs, {_lost(deaths)} lost", flush=True)
    return deaths


def _lost(deaths: list[Death]) -> int:
    return sum(bool(death.lost) for death in deaths)


def report(deaths: list[Death]) -> None:
    RESULTS.parent.mkdir(exist_ok=True)
    with RESULTS.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(asdict(deaths[0])))
        writer.writeheader()
        writer.writerows(map(asdict, deaths))
    print(f"\n{'moment':32}" + "".join(f"{family:>12}" for family in FAMILIES) + "        lost")
    for moment in [*MOMENTS, ANY_TIME, PART_FILE]:
        mine = [death for death in deaths if death.moment == moment]
        met = Counter(death.family for death in mine)
        print(f"{moment:32}" + "".join(f"{met[family]:12}" for family in FAMILIES) + f"{_lost(mine):12}")
    phases = Counter(death.phase or "before the first row" for death in deaths)
    print("in phase: " + ", ".join(f"{phase} {number}" for phase, number in sorted(phases.items())))
    seconds = [death.first_row for death in deaths if death.first_row is not None]
    print(f"from a fork to the first new row: median {statistics.median(seconds):.2f} s of {len(seconds)}")
    print(f"in all {len(deaths)} kills, {_lost(deaths)} lost")
    for reason in dict.fromkeys(f"{d.family}_{d.way}/{d.run}: {d.lost}" for d in deaths if d.lost):
        print(reason)


def main() -> None:
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 50
    deaths: list[Death] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed, family in enumerate(FAMILIES):
            deaths += torment(family, kills, seed, Path(folder))
    report(deaths)
    sys.exit(bool(_lost(deaths)))


if __name__ == "__main__":
    main()
