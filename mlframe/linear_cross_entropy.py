"""Cross-entropy of a linear head without its matrix of logits, [tokens, vocabulary], which is the largest in training.

Chunk by chunk the logits are made, turned into their own gradient and used up (as in Liger Kernel, Hsu et al., 2024,
arXiv 2410.10989): three matmuls, as many as the plain way takes. The softmax is in float32, also under autocast.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

CHUNK = 512
"""Tokens whose logits exist at a time."""


def linear_cross_entropy(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
    """Mean over n of cross_entropy(hidden @ weight.T + bias, targets), a scalar in float32 (float64 of float64).

    hidden [n, embed], weight [vocab, embed], bias [vocab] or None, targets [n] int64.
    """
    return _LinearCrossEntropy.apply(hidden, weight, bias, targets)


@torch.no_grad()
def token_scores(hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token its loss, float [n], and the prediction, int64 [n]: the argument that has the largest logit."""
    losses, best = [], []
    for rows, logits in _logits(hidden, weight, bias):
        losses.append(functional.cross_entropy(logits, targets[rows], reduction="none"))
        best.append(logits.argmax(1))
    return torch.cat(losses), torch.cat(best)


def _logits(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Iterator[tuple[slice, Tensor]]:
    """The logits of each chunk, in float32 at least."""
    for start in range(0, len(hidden), CHUNK):
        rows = slice(start, start + CHUNK)
        logits = functional.linear(hidden[rows], weight, bias)
        yield rows, logits.to(torch.promote_types(logits.dtype, torch.float32))


class _LinearCrossEntropy(torch.autograd.Function):
    """The gradients are made in the forward, where the logits are; the backward only scales them."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor) -> Tensor:
        wide = torch.promote_types(weight.dtype, torch.float32)
        loss = torch.zeros((), dtype=wide, device=hidden.device)
        wanted = ctx.needs_input_grad
        d_hidden = torch.empty_like(hidden, dtype=wide) if wanted[0] else None
        d_weight = torch.zeros_like(weight, dtype=wide) if wanted[1] else None
        d_bias = torch.zeros_like(bias, dtype=wide) if bias is not None and wanted[2] else None
        for rows, logits in _logits(hidden, weight, bias):
            chosen = targets[rows, None]
            normaliser = logits.logsumexp(1, keepdim=True)
            loss += (normaliser - logits.gather(1, chosen)).sum()
            # From here on `logits` holds its own gradient, softmax - one-hot. Divided by n, much of it would be 0 in
            # half precision: that comes last.
            logits.sub_(normaliser).exp_()
            logits.scatter_add_(1, chosen, logits.new_full(chosen.shape, -1.0))
            narrow = logits.to(weight.dtype)
            if d_hidden is not None:
                d_hidden[rows] = torch.matmul(narrow, weight)
            if d_weight is not None:
                d_weight += torch.matmul(narrow.T, hidden[rows])
            if d_bias is not None:
                d_bias += logits.sum(0)
        ctx.save_for_backward(d_hidden, d_weight, d_bias)
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        ctx.n = len(targets)
        return loss / len(targets)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = grads[0] / ctx.n
        made = zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        return (*(None if d is None else (d * scale).to(dtype) for d, dtype in made), None)
