"""The head's loss without the matrix of logits: the same numbers as the plain way, and no such matrix kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from mlframe import linear_cross_entropy as module
from mlframe.linear_cross_entropy import linear_cross_entropy, token_scores

EMBED, VOCAB = 8, 21


def plain(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    return functional.cross_entropy(functional.linear(hidden, weight, bias), targets)


def inputs(n: int, bias: bool = True, dtype: torch.dtype = torch.float64) -> tuple[Any, ...]:
    draw = torch.Generator().manual_seed(n)
    hidden, weight, offset = (
        torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype).requires_grad_()
        for shape in ((n, EMBED), (VOCAB, EMBED), (VOCAB,))
    )
    return hidden, weight, offset if bias else None, torch.randint(0, VOCAB, (n,), generator=draw)


def gradients(loss: Callable[..., Tensor], given: tuple[Any, ...], scale: float = 1.0) -> list[Tensor]:
    wanted = [x for x in given[:3] if x is not None and x.requires_grad]
    return list(torch.autograd.grad(loss(*given) * scale, wanted))


@pytest.mark.parametrize("n", [1, 7, module.CHUNK, module.CHUNK + 1, 2 * module.CHUNK + 300])
@pytest.mark.parametrize("bias", [True, False])
def test_value_and_gradients_are_those_of_the_plain_way(n: int, bias: bool) -> None:
    given = inputs(n, bias)
    torch.testing.assert_close(linear_cross_entropy(*given), plain(*given), rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients(linear_cross_entropy, given), gradients(plain, given), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


@pytest.mark.parametrize("frozen", [0, 1, 2])
def test_what_is_frozen_gets_no_gradient_and_the_others_keep_theirs(frozen: int) -> None:
    given = inputs(9)
    given[frozen].requires_grad_(False)
    linear_cross_entropy(*given).backward()
    assert given[frozen].grad is None
    for x, theirs in zip([x for x in given[:3] if x.requires_grad], gradients(plain, given), strict=True):
        torch.testing.assert_close(x.grad, theirs, rtol=0, atol=1e-12)


def test_gradcheck() -> None:
    *given, targets = inputs(5)
    assert torch.autograd.gradcheck(lambda *x: linear_cross_entropy(*x, targets), given)


def test_a_scaled_loss_has_scaled_gradients() -> None:
    given = inputs(9)
    for ours, theirs in zip(gradients(linear_cross_entropy, given, 0.25), gradients(plain, given), strict=True):
        torch.testing.assert_close(ours, theirs / 4, rtol=0, atol=1e-12)


def test_the_inputs_stay_as_they_were() -> None:
    given = inputs(9)
    before = [x.detach().clone() for x in given]
    linear_cross_entropy(*given).backward()
    assert all(torch.equal(x, y) for x, y in zip(given, before, strict=True))


def test_under_autocast_it_is_close_to_the_plain_way_and_the_loss_is_in_float32() -> None:
    given = inputs(700, dtype=torch.float32)
    exact = gradients(plain, given)
    with torch.autocast("cpu", torch.bfloat16):
        loss, ours, theirs = (
            linear_cross_entropy(*given),
            gradients(linear_cross_entropy, given),
            gradients(plain, given),
        )
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, plain(*given), rtol=1e-2, atol=0)
    for a, b, x in zip(ours, theirs, exact, strict=True):
        assert a.dtype == x.dtype
        assert (a - x).norm() < max(1.5 * (b - x).norm(), 1e-2 * x.norm())


def test_of_bfloat16_weights_the_loss_is_in_float32_and_gradients_in_bfloat16() -> None:
    given = inputs(700, dtype=torch.bfloat16)
    wide = tuple(x.detach().float().requires_grad_() if x.is_floating_point() else x for x in given)
    assert linear_cross_entropy(*given).dtype == torch.float32
    for ours, exact in zip(gradients(linear_cross_entropy, given), gradients(plain, wide), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.float() - exact).norm() < 2e-2 * exact.norm()


class Largest(TorchDispatchMode):
    """Notes the most entries that any tensor made inside has, the backward's included."""

    def __init__(self) -> None:
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            self.entries = max(self.entries, x.numel() if isinstance(x, Tensor) else 0)
        return out


@pytest.mark.parametrize(("loss", "whole"), [(linear_cross_entropy, False), (plain, True)])
def test_the_matrix_of_logits_is_neither_made_nor_kept(loss: Callable[..., Tensor], whole: bool) -> None:
    n = 3 * module.CHUNK
    given, kept = inputs(n), []

    def keep(x: Tensor) -> Tensor:
        kept.append(x.numel())
        return x

    with Largest() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        loss(*given).backward()
    assert (largest.entries >= n * VOCAB) == whole
    assert (max(kept) >= n * VOCAB) == whole
    assert whole or largest.entries <= max(module.CHUNK * VOCAB, n * EMBED)


@pytest.mark.parametrize("bias", [True, False])
def test_scores_of_tokens_are_the_plain_ones(bias: bool) -> None:
    given = inputs(module.CHUNK + 5, bias)
    losses, best = token_scores(*given)
    logits = functional.linear(*given[:3])
    torch.testing.assert_close(losses, functional.cross_entropy(logits, given[3], reduction="none").detach())
    assert torch.equal(best, logits.argmax(1))
    assert not losses.requires_grad
