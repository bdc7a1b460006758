"""Fits of two processes, each this script: `two_processes.py FOLDER`, started by `launch`. Results lie in FOLDER."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from small_fit import PLAN, QUIET, fit, loader

from mlframe.checkpoint import AtomicCheckpointIO
from mlframe.module import peek
from mlframe.plan import Plan
from mlframe.sharding import FSDP2, local, whole_state

STEPS = (3, 5, 7, 9, 13, 18, 21)  # phase boundaries 5, 9, 15, 18; epochs of 6 batches


def launch(folder: Path, *arguments: str) -> None:
    """Run this script in two processes, as torchrun would."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2",
              "GROUP_RANK": "0", "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, __file__, str(folder), *arguments]
    running = [subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
               for rank in range(2)]  # fmt: skip
    for process in running:
        out, _ = process.communicate(timeout=240)
        assert process.returncode == 0, out


class Synced(pl.Callback):
    """Whether gradients and weights of the processes were the same bits before every optimizer step."""

    def __init__(self) -> None:
        self.steps: list[tuple[int, int, bool]] = []
        self.parts: set[tuple[int, int]] = set()

    def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
        parameters = list(module.network.parameters())
        self.parts.add((module.phase_index, sum(local(p).numel() for p in parameters)))
        if isinstance(trainer.strategy, FSDP2):
            return
        mine = torch.cat([x.flatten() for p in parameters for x in (p.detach(), p.grad)])
        everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, mine)
        self.steps.append((trainer.global_step, module.phase_index, all(torch.equal(x, mine) for x in everyone)))


def run(folder: Path, name: str, strategy: Any, plan: Plan = PLAN, ckpt: Path | None = None, every: int = 0,
        **settings: Any) -> None:  # fmt: skip
    rank, synced = int(os.environ["RANK"]), Synced()
    callbacks: list[Any] = [synced]
    if every:
        callbacks.append(ModelCheckpoint(folder / name, "{step}", every_n_train_steps=every, save_top_k=-1))
    module, trainer = fit(
        plan, loader(batch=2 if plan is QUIET else 4, rank=rank, world=2), ckpt, callbacks=tuple(callbacks),
        phase=peek(ckpt)["vcycle"]["phase"] if ckpt else 0, strategy=strategy, devices=2,
        enable_checkpointing=bool(every), plugins=[AtomicCheckpointIO()], **settings,
    )  # fmt: skip
    assert module.network is not None
    moments = {
        f"{i}.{key}": value
        for i, state in enumerate(trainer.optimizers[0].state.values())
        for key, value in state.items()
    }
    whole = [whole_state(module.network.state_dict()), whole_state(moments)]
    ddp = strategy == "ddp"
    result = {"weights": module.network.state_dict() if ddp else whole[0], "moments": whole[1],
              "steps": synced.steps, "parts": sorted(synced.parts), "seen": module.seen}  # fmt: skip
    torch.save(result, folder / f"{name}.{rank}.pt")


def ddp(folder: Path) -> None:
    """Every step of the whole run, with what dropout and mixup draw; from some of its steps on; and without noise."""
    run(folder, "ddp", "ddp", every=1, accumulate_grad_batches=2, precision="bf16-mixed")
    for step in STEPS:
        ckpt = folder / "ddp" / f"step={step}.ckpt"
        run(folder, f"ddp from {step}", "ddp", ckpt=ckpt, accumulate_grad_batches=2, precision="bf16-mixed")
    run(folder, "quiet ddp", "ddp", QUIET, every=13)


def fsdp2(folder: Path) -> None:
    for sharded in (True, False):
        name = "shards" if sharded else "whole"
        run(folder, name, FSDP2(sharded_checkpoints=sharded), every=1, accumulate_grad_batches=2)
        for step in STEPS[:: 1 if sharded else 3]:
            ckpt = folder / name / f"step={step}.ckpt"
            run(folder, f"{name} from {step}", FSDP2(sharded), ckpt=ckpt, accumulate_grad_batches=2)
    run(folder, "quiet fsdp2", FSDP2(), QUIET, every=13)


if __name__ == "__main__":
    where = Path(sys.argv[1])
    torch.set_num_threads(1)
    for case in sys.argv[2:]:
        globals()[case](where)
