"""The memory of a transition on each process under trainer=fsdp2, for Llama 2 at 7B and 70B (docs/many_nodes.md).

python benchmarks/transition_memory.py [PROCESSES]        (default: 8 and 64)

Nothing is allocated: the real operators run on the meta device, and every tensor that is alive is counted.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from mlframe import LLAMA, make_levels
from mlframe.operators import merging, resized, splitting

GIB = 2**30
SHARED = {"vocab_size": 32000, "tie_word_embeddings": False, "max_position_embeddings": 4096, "head_dim": 128}
NETWORKS = {
    "7B": {"hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 32},
    "70B": {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
            "num_key_value_heads": 8},
}  # fmt: skip


class Alive(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are still there, and the most that ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.now, self.most, self.known = 0, 0, set[int]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_iter(out):
            if isinstance(x, Tensor) and x.is_meta:
                self.add(x.untyped_storage())
        return out

    def add(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self.known:
            self.known.add(key)
            self.now += storage.nbytes()
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self.drop, key, storage.nbytes())

    def drop(self, key: int, size: int) -> None:
        self.known.discard(key)
        self.now -= size


class Gathered(Mapping[str, Tensor]):
    """As mlframe.sharding.Whole: each tensor becomes whole when it is asked for."""

    def __init__(self, state: Mapping[str, Tensor]) -> None:
        self.state = state

    def __getitem__(self, name: str) -> Tensor:
        return torch.empty_like(self.state[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.state)

    def __len__(self) -> int:
        return len(self.state)


def most(state: Mapping[str, Tensor], sizes: Any, maps: Any) -> int:
    with Alive() as alive:
        for _ in resized(Gathered(state), LLAMA, sizes, maps, {}):
            pass
    return alive.most


def row(*cells: str) -> None:
    print("| " + " | ".join(cells) + " |")


def main(counts: list[int]) -> None:
    row("network", "processes", "training: weights, gradients, moments", "transition: new weights",
        "and at most, for a moment", "parked, on the CPU")  # fmt: skip
    row(*["---"] * 6)
    for name, config in NETWORKS.items():
        above, below = make_levels(LLAMA, {**SHARED, **config}, sample={"tokens": 4096, "predictions": 4096})
        with torch.device("meta"):
            large, small = above.build().state_dict(), below.build().state_dict()
        down = most(large, above.sizes, merging(below.scheme))
        up = most(small, below.sizes, splitting(below.scheme))
        for count in counts:
            weights = 4 * above.parameters / count / GIB
            row(f"{name}, {above.parameters:,} parameters", str(count), f"{4 * weights:.1f} GiB", f"{weights:.1f} GiB",
                f"{max(down, up) / GIB:.1f} GiB", f"{weights:.1f} GiB")  # fmt: skip


if __name__ == "__main__":
    main([int(count) for count in sys.argv[1:]] or [8, 64])
