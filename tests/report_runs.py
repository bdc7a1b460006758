"""Run folders as mlframe-train leaves them, with chosen results: for the tests of the report."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

FULL = {"layers": 4, "heads": 4, "embed": 64, "tokens": 32}
SMALL = {"layers": 2, "heads": 2, "embed": 32, "tokens": 32}
SIZES = {0: FULL, 1: SMALL}

SCRATCH = {"_target_": "mlframe.plan.scratch", "level": 0}
VCYCLE = {"_target_": "mlframe.plan.vcycle", "e_a": 0.05, "e_small": 0.5, "alpha": 0.25}
PHASES = {"scratch": [(0, 1.0)], "control": [(1, 1.0)], "vcycle": [(0, 0.05), (1, 0.5), (0, 0.45)]}
"""(level, share of the steps) of each phase."""


def write_run(
    folder: Path,
    way: str,
    cost: int,
    loss: float,
    steps: int = 100,
    seed: int = 0,
    lr: float = 1e-3,
    seconds: float | None = None,
    acc: float = 0.5,
    status: str = "finished",
    reason: str = "",
    course: Sequence[tuple[float, float]] = ((0.5, 6.0),),
    **changes: Any,
) -> Path:
    """A run of `cost` FLOPs that ends at `loss`. course: (share of the cost, val/loss) before its end.

    changes: further keys of the configuration, with __ for a dot (plan__alpha=0.5).
    """  # fmt: skip
    folder.mkdir(parents=True)
    seconds = cost / 10 if seconds is None else seconds
    plan = {**(SCRATCH if way == "scratch" else VCYCLE), "steps": steps}
    config: dict[str, Any] = {
        "name": "small", "seed": seed, "steps": steps, "control": 1 if way == "control" else None, "data_dir": "data",
        "run_dir": str(folder), "plan": plan, "optimizer": {"lr": lr, "weight_decay": 0.05},
        "model": {"architecture": "mlframe.architectures.GPT2", "config": {"n_embd": 64}, "task": {}},
        "data": {"_target_": "mlframe.data.text.TextData", "folder": "data/tokens", "seed": seed, "batch_size": 8},
        "levels": {"count": 2},
    }  # fmt: skip
    for key, value in changes.items():
        *above, last = key.split("__")
        place = config
        for name in above:
            place = place[name]
        place[last] = value
    phases = [
        {"name": f"{way} {i}", "level": level, "steps": round(share * steps), "sizes": SIZES[level],
         "parameters": 1000 if level == 0 else 200, "share": share}
        for i, (level, share) in enumerate(PHASES[way])
    ]  # fmt: skip
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    (folder / "plan.json").write_text(json.dumps({"steps": steps, "samples_per_step": 8, "phases": phases}))
    (folder / "status.json").write_text(json.dumps({"status": status, "reason": reason, "step": steps}))
    rows = ["step,val/loss,val/acc,total_flops,tokens,wall_time,phase"]
    for share, value in (*course, (1.0, loss)):
        ends = [sum(phase["share"] for phase in phases[: i + 1]) for i in range(len(phases))]  # type: ignore[misc]
        phase = next(i for i, end in enumerate(ends) if share <= end + 1e-9)
        rows.append(
            f"{round(share * steps)},{value},{acc},{share * cost},{share * steps * 256},{share * seconds},{phase}"
        )
    (folder / "metrics.csv").write_text("".join(f"{row}\r\n" for row in rows), newline="")
    if status == "finished":
        results: Mapping[str, Any] = {
            "val/loss": loss, "val/acc": acc, "test/loss": loss + 0.01, "steps": steps, "tokens": steps * 256,
            "total_flops": cost, "share_of_scratch": 1.0, "wall_time": seconds, "parameters": 1000, "levels": {},
        }  # fmt: skip
        (folder / "results.json").write_text(json.dumps(results))
    return folder
