"""Several processes: the same bits on each, as without a stop, and what one process computes."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from small_fit import QUIET, fit, loader, same, weights
from torch import Tensor
from two_processes import STEPS, launch

TOLERANCE = 1e-6
"""Between numbers of processes: sums of gradients in another order, in float32, over 26 steps."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("processes")
    launch(folder, "ddp", "fsdp2", "stale", "signals")
    launch(folder, "fewer", world=1)
    return folder


def result(folder: Path, name: str, rank: int = 0) -> dict[str, Any]:
    return torch.load(folder / f"{name}.{rank}.pt")


def far(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def test_ddp_has_the_same_gradients_and_weights_on_all_ranks_at_every_step(folder: Path) -> None:
    done = result(folder, "ddp")
    assert [step for step, _, _ in done["steps"]] == list(range(26))
    assert all(synced for _, _, synced in done["steps"])
    assert len({size for _, size in done["parts"]}) == 3, "each phase trained its own network"
    assert same(done["weights"], result(folder, "ddp", 1)["weights"])


def test_a_signal_to_one_process_stops_both_at_the_same_place(folder: Path) -> None:
    ends = torch.load(folder / "signals.0.pt")
    assert ends == ["SIGTERM", (9, 1, signal.SIGTERM), (26, 4, signal.SIGTERM), (26, 4, 0), "SIGTERM"]
    assert torch.load(folder / "signals.1.pt") == ends


def test_a_wrapper_that_is_kept_over_a_transition_is_found(folder: Path) -> None:
    """The control: no error anywhere, but from the first transition on each process trains by itself."""
    steps = result(folder, "stale")["steps"]
    assert all(synced for _, phase, synced in steps if phase == 0)
    assert not any(synced for _, phase, synced in steps if phase > 0)


@pytest.mark.parametrize("kind", ["ddp", "shards", "file", "window"])
def test_a_resume_ends_in_the_same_bits(kind: str, folder: Path) -> None:
    """Weights, moments and data of DDP; of FSDP2 with checkpoints in shards and in a file; inside windows of DDP."""
    whole, other = result(folder, kind), result(folder, kind, 1)
    resumed = sorted(path.name.removesuffix(".0.pt") for path in folder.glob(f"{kind} from *.0.pt"))
    assert len(resumed) == {"ddp": len(STEPS), "shards": 2, "file": 1, "window": 2}[kind]
    for name in resumed:
        again = result(folder, name)
        assert same(again["weights"], whole["weights"]), name
        assert same(again["moments"], whole["moments"]), name
        assert again["seen"] == whole["seen"][-len(again["seen"]) :], name
        assert result(folder, name, 1)["seen"] == other["seen"][-len(again["seen"]) :], name


def test_fsdp2_splits_every_level_and_both_kinds_of_checkpoint_agree(folder: Path) -> None:
    shards = result(folder, "shards")
    for (phase, mine), (_, other) in zip(shards["parts"], result(folder, "shards", 1)["parts"], strict=True):
        whole = dict(result(folder, "ddp")["parts"])[phase]
        assert mine + other == whole
        assert max(mine, other) < 0.55 * whole
    assert same(shards["weights"], result(folder, "file")["weights"])


def test_any_number_of_processes_computes_the_same_on_the_same_data(folder: Path) -> None:
    """One process with the global batch; two by DDP; two by FSDP2; and a stop between one kind and another."""
    single, _ = fit(QUIET)
    ranks = [result(folder, "quiet ddp", rank)["seen"] for rank in (0, 1)]
    for (_, _, _, whole), (_, _, _, one), (_, _, _, two) in zip(single.seen, *ranks, strict=True):
        assert sorted(whole) == sorted(one + two)
    for name in ("quiet ddp", "quiet fsdp2", "quiet fsdp2 from ddp", "fewer"):
        assert far(result(folder, name)["weights"], weights(single)) < TOLERANCE, name

    ckpt = folder / "quiet ddp" / "step=13.ckpt"
    alone, _ = fit(QUIET, ckpt=ckpt)
    accumulated, trainer = fit(QUIET, loader(batch=2), ckpt, accumulate_grad_batches=2, val_check_interval=14)
    assert trainer.global_step == 26
    from_shards, _ = fit(QUIET, ckpt=folder / "quiet fsdp2 from ddp" / "step=20.ckpt")
    for module in (alone, accumulated, from_shards):
        assert far(weights(module), weights(single)) < TOLERANCE
    assert [seen[-1] for seen in alone.seen] == [seen[-1] for seen in single.seen[13:]]
    halves = [seen[-1] for seen in accumulated.seen]
    assert [a + b for a, b in zip(halves[::2], halves[1::2], strict=True)] == [seen[-1] for seen in alone.seen]
