"""How long `mlframe-report` takes on many long runs.

python benchmarks/report_speed.py [RUNS] [ROWS]        (default: 1000 10000; the rows take 1 GB of a temporary folder)

Writes finished runs of a task (scratch and nine V-cycles, at 20 budgets, five seeds each: every run's rows are read),
then starts the command in a process of its own and prints its seconds, and the largest memory it held.
"""

from __future__ import annotations

import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from mlframe.train import CONF

LIMIT = 30.0
SEEDS, BUDGETS = 5, 20


def write(folder: Path, config: dict[str, Any], number: int, rows: int, body: list[str]) -> None:
    seed, rest = number % SEEDS, number // SEEDS
    budget, method = rest % BUDGETS, rest // BUDGETS
    steps, vcycle = 10_000 * (budget + 1), method > 0
    config = {**config, "seed": seed, "steps": steps, "run_dir": str(folder)}
    config["plan"] = {"_target_": "mlframe.plan.vcycle", "steps": steps, "alpha": method / 10} if vcycle else {
        "_target_": "mlframe.plan.scratch", "steps": steps, "level": 0}  # fmt: skip
    folder.mkdir()
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(config)))
    sizes = [{"layers": 6 // (k + 1), "embed": 64 // (k + 1)} for k in range(2)]
    levels = (0, 1, 0) if vcycle else (0,)
    each = {"steps": steps // len(levels), "parameters": 439_296}
    phases = [{"name": f"phase {i}", "level": k, "sizes": sizes[k], **each} for i, k in enumerate(levels)]
    (folder / "plan.json").write_text(json.dumps({"steps": steps, "samples_per_step": 8, "phases": phases}))
    (folder / "status.json").write_text(json.dumps({"status": "finished", "reason": "", "step": steps}))
    loss, flops = 3 + math.exp(-budget / 5) + seed / 1000 - method / 500, steps * 10**9
    results = {"val/loss": loss, "val/acc": 0.5, "total_flops": flops, "share_of_scratch": 1.0, "tokens": steps * 1024,
               "wall_time": steps / 20, "parameters": 439_296, "levels": {}}  # fmt: skip
    (folder / "results.json").write_text(json.dumps(results))
    header = "step,train/loss,train/lr,total_flops,tokens,wall_time,level,phase,parameters,val/loss,val/acc,val/ppl\r\n"
    (folder / "metrics.csv").write_text(header + "".join(body[:rows]), newline="")


def body(rows: int) -> list[str]:
    """Rows as mlframe.rows writes them: nine of training for one of validation."""
    noise = np.random.default_rng(0).normal(0, 0.05, rows)
    out = []
    for i, extra in enumerate(noise):
        loss = 3 + 4 * math.exp(-5 * i / rows) + extra
        costs = f"{(i + 1) * 10**9},{(i + 1) * 1024},{(i + 1) / 20},0,{3 * i // rows},439296"
        out.append(
            f"{i},,,{costs},{loss},{0.5},{math.exp(loss)}\r\n" if i % 10 == 9 else f"{i},{loss},0.006,{costs},,,\r\n"
        )
    return out


def main() -> None:
    runs, rows = (int(text) for text in (sys.argv[1:] + ["1000", "10000"][len(sys.argv) - 1 :])[:2])
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("train", ["experiment=gpt_docs", "logger=none", "run_dir=runs/x"])
    plain: Any = OmegaConf.to_container(config, resolve=True)
    with tempfile.TemporaryDirectory() as top:
        (Path(top) / "runs").mkdir()
        shared = body(rows)
        for number in range(runs):
            write(Path(top) / "runs" / f"run_{number:04}", plain, number, rows, shared)
        command = [sys.executable, "-m", "mlframe.report.cli", f"{top}/runs", "--out", f"{top}/report"]
        began = time.monotonic()
        subprocess.run(command, check=True)
        seconds = time.monotonic() - began
        size = (Path(top) / "report" / "report.html").stat().st_size / 1e6
    memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    print(f"{runs:,} runs of {rows:,} rows: {seconds:.1f} s ({seconds / LIMIT:.2f} of {LIMIT:.0f} s), "
          f"{memory:.2f} GB of memory, a page of {size:.1f} MB")  # fmt: skip


if __name__ == "__main__":
    main()
