"""Fits of two processes, each this script: `two_processes.py FOLDER`, started by `launch`. Results lie in FOLDER."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from small_fit import PLAN, QUIET, Indexed, SaveAtValidation, fit, loader
from test_interruption import Send, SendInValidation
from torch.utils.data import DataLoader

from mlframe.checkpoint import AtomicCheckpointIO
from mlframe.errors import Interrupted
from mlframe.plan import Plan
from mlframe.sharding import FSDP2, local, whole_state

STEPS = (5, 12, 19)  # phases begin at steps 5, 9, 15 and 18, epochs every 6
HALF = {"accumulate_grad_batches": 2, "precision": "bf16-mixed"}


def launch(folder: Path, *cases: str, world: int = 2) -> None:
    """Run `cases` of this script in some processes, as torchrun starts them."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(world), "GROUP_RANK": "0",
              "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "test", "OMP_NUM_THREADS": "1"}  # fmt: skip
    command = [sys.executable, __file__, str(folder), *cases]
    running = [subprocess.Popen(command, env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
               for rank in range(world)]  # fmt: skip
    for process in running:
        out, _ = process.communicate(timeout=400)
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
        more: tuple[pl.Callback, ...] = (), **settings: Any) -> None:  # fmt: skip
    rank, world, synced = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), Synced()
    callbacks: list[Any] = [synced, *more]
    if every:
        callbacks.append(ModelCheckpoint(folder / name, "{step}", every_n_train_steps=every, save_top_k=-1))
    data = loader(batch=4 // world if plan is QUIET else 4, rank=rank, world=world)
    module, trainer = fit(
        plan, data, ckpt, callbacks=tuple(callbacks), strategy=strategy, devices=world,
        enable_checkpointing=bool(every), plugins=[AtomicCheckpointIO()], **settings,
    )  # fmt: skip
    assert module.network is not None
    states = trainer.optimizers[0].state.values()
    moments = {f"{i}.{key}": value for i, state in enumerate(states) for key, value in state.items()}
    weights, moments = whole_state(module.network.state_dict()), whole_state(moments)
    if strategy == "ddp":  # of which every process has all
        weights = module.network.state_dict()
    result = {"weights": weights, "moments": moments, "steps": synced.steps, "parts": sorted(synced.parts),
              "seen": module.seen}  # fmt: skip
    torch.save(result, folder / f"{name}.{rank}.pt")


def ddp(folder: Path) -> None:
    """The whole run, with what dropout and mixup draw; then from some of its steps; then without such noise."""
    run(folder, "ddp", "ddp", every=1, **HALF)
    for step in STEPS:
        run(folder, f"ddp from {step}", "ddp", ckpt=folder / "ddp" / f"step={step}.ckpt", **HALF)
    run(folder, "quiet ddp", "ddp", QUIET, every=13)
    # Validations every 7 batches cut windows of 2: these checkpoints have the gradients of each process.
    at = SaveAtValidation(folder / "window")
    run(folder, "window", "ddp", more=(at,), **HALF)
    for path in sorted((folder / "window").glob("*.ckpt"))[2:5:2]:
        run(folder, f"window from {path.stem}", "ddp", ckpt=path, **HALF)


def fsdp2(folder: Path) -> None:
    """With checkpoints in shards and in one file."""
    for name, steps in (("shards", (6, 18)), ("file", (12,))):
        strategy = partial(FSDP2, sharded_checkpoints=name == "shards")
        run(folder, name, strategy(), every=6, **HALF)
        for step in steps:
            run(folder, f"{name} from {step}", strategy(), ckpt=folder / name / f"step={step}.ckpt", **HALF)
    run(folder, "quiet fsdp2", FSDP2(), QUIET, every=13)
    other = FSDP2(sharded_checkpoints=False)
    run(folder, "quiet fsdp2 from ddp", other, QUIET, ckpt=folder / "quiet ddp" / "step=13.ckpt", every=20)


def fewer(folder: Path) -> None:
    """One process reads the shards of two."""
    run(folder, "fewer", FSDP2(), QUIET, ckpt=folder / "quiet fsdp2" / "step=13.ckpt")


def stale(folder: Path) -> None:
    """A transition that keeps the wrapper of the network before, as a control of `Synced`."""
    set_up = DDPStrategy.setup

    def only_first(strategy: DDPStrategy, trainer: pl.Trainer) -> None:
        if trainer.global_step == 0:
            set_up(strategy, trainer)
        else:
            strategy.setup_optimizers(trainer)

    DDPStrategy.setup = only_first  # type: ignore[method-assign]
    run(folder, "stale", "ddp")


def signals(folder: Path) -> None:
    """SIGTERM to the second process alone: in the sanity check, in a step, in the last step, in a validation after."""
    second = os.environ["RANK"] == "1"
    ends = []
    for send in (SendInValidation(True), Send(8), Send(25), SendInValidation(False)):
        send.signals = (signal.SIGTERM,) if second else ()
        try:
            module, trainer = fit(
                QUIET, loader(batch=2, rank=int(second), world=2), callbacks=(send,), strategy="ddp", devices=2
            )
            signum = trainer.fit_loop.interruption.agreed(trainer)
            ends.append((trainer.global_step, module.phase_index, signum))
            if not signum:
                trainer.validate(module, DataLoader(Indexed(16), batch_size=8), verbose=False)
        except Interrupted as error:
            ends.append(str(error))
    torch.save(ends, folder / f"signals.{int(second)}.pt")


if __name__ == "__main__":
    where = Path(sys.argv[1])
    torch.set_num_threads(1)
    for case in sys.argv[2:]:
        {"ddp": ddp, "fsdp2": fsdp2, "fewer": fewer, "stale": stale, "signals": signals}[case](where)
