"""FLOPs of a training step, in closed form.

Convention (docs/design.md): forward + backward matmul and convolution FLOPs, a multiply-add is 2; the backward costs
twice the forward, less the input gradients that nothing needs; attention's two matmuls in full; embedding lookups,
norms, softmax and the optimizer are free. The closed forms equal `count`, torch's own counter on the meta device, to
the last FLOP.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.utils.flop_counter import FlopCounterMode

from mlframe.axes import Sizes, query_heads


def blocks(sizes: Sizes, tokens: int, mlp_matrices: int = 2) -> int:
    """Forward FLOPs of the transformer blocks on one sequence of `tokens` tokens.

    A block: query, key, value and output projections (fewer keys and values with grouped queries), the two matmuls of
    full attention, an MLP of two matrices, or of three where it is gated.
    """
    embed, heads = sizes["embed"], query_heads(sizes)
    inner, kv = heads * sizes["head_dim"], sizes.get("kv_heads", heads) * sizes["head_dim"]
    projections = 2 * tokens * embed * (2 * inner + 2 * kv)
    attention = 2 * tokens * tokens * inner * 2
    mlp = 2 * tokens * embed * sizes["mlp"] * mlp_matrices
    return sizes["layers"] * (projections + attention + mlp)


def bert(sizes: Sizes) -> int:
    """Training FLOPs of a sequence of `tokens`, whose head works on `predictions` of them: the masked ones."""
    head = 2 * sizes["predictions"] * sizes["embed"] * (sizes["embed"] + sizes["vocab"])
    return 3 * (blocks(sizes, sizes["tokens"]) + head)


def causal(sizes: Sizes, mlp_matrices: int = 2) -> int:
    """Training FLOPs of a sequence of `tokens`, each of which predicts the next; the head counts once, tied or not."""
    head = 2 * sizes["predictions"] * sizes["embed"] * sizes["vocab"]
    return 3 * (blocks(sizes, sizes["tokens"], mlp_matrices) + head)


def six_nd(parameters: int, tokens: int) -> int:
    """The rule of thumb 6 N D (Kaplan et al., 2020, arXiv 2001.08361): 6 FLOPs for each parameter and token."""
    return 6 * parameters * tokens


def vit(sizes: Sizes) -> int:
    """Training FLOPs of one image: patches -> blocks -> the classifier (on one or, distilled, on two tokens).

    Pixels need no gradient, so the patch convolution's backward costs as much as its forward.
    """
    patches = 2 * sizes["patches"] * sizes["pixels"] * sizes["embed"]
    classifier = 2 * sizes["embed"] * sizes["classes"] * sizes["classifiers"]
    return 3 * (blocks(sizes, sizes["tokens"]) + classifier) + 2 * patches


def count(network: torch.nn.Module, loss: Callable[[torch.nn.Module], torch.Tensor]) -> int:
    """FLOPs of `loss(network).backward()` as torch counts them. Give it a network on the meta device:
    on the CPU torch does not count scaled-dot-product attention, on CUDA it counts a recomputation in the backward.
    """
    with FlopCounterMode(display=False) as counter:
        loss(network).backward()
    return counter.get_total_flops()


def short(flops: float) -> str:
    """As a table has room for it: 8.51e12."""
    return f"{flops:.3g}".replace("e+", "e")
