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

from mlframe.axes import Sizes


def blocks(sizes: Sizes, tokens: int) -> int:
    """Forward FLOPs of the transformer blocks on one sequence of `tokens` tokens.

    A block: qkv and output projection, the two matmuls of full attention, a two-layer MLP.
    """
    embed, inner = sizes["embed"], sizes["heads"] * sizes["head_dim"]
    projections = 2 * tokens * embed * inner * 4
    attention = 2 * tokens * tokens * inner * 2
    mlp = 2 * tokens * embed * sizes["mlp"] * 2
    return sizes["layers"] * (projections + attention + mlp)


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
