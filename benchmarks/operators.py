"""Time and peak memory of one coalesce + decoalesce + interpolate on one thread.

python benchmarks/operators.py [DeiT-B | BERT-Large]        (default: both, each in a process of its own)
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time
from itertools import pairwise

import torch

from mlframe import BERT, VIT, coalesce, decoalesce, interpolate, make_levels
from mlframe.operators import ties

BERT_LARGE = {
    "vocab_size": 30522, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096,
}  # fmt: skip
NETWORKS = {
    "DeiT-B": (VIT, {"model_name": "deit_base_patch16_224"}, {}),
    "BERT-Large": (BERT, BERT_LARGE, {"tokens": 128, "predictions": 19}),
}


def size(state: dict[str, torch.Tensor]) -> float:
    """GiB of the weights, tied ones once."""
    tied = ties(state)
    return sum(x.numel() * x.element_size() for name, x in state.items() if name not in tied) / 2**30


def peak() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def measure(name: str) -> None:
    torch.set_num_threads(1)
    architecture, config, sample = NETWORKS[name]
    above, below = make_levels(architecture, config, sample=sample)
    large = above.build().state_dict()
    before = peak()
    for run in range(5):
        times = [time.perf_counter()]
        small = coalesce(large, architecture, above.sizes, below.scheme)
        times.append(time.perf_counter())
        grown = decoalesce(small, architecture, below.sizes, below.scheme)
        times.append(time.perf_counter())
        mixed = interpolate(large, grown, 0.5)
        times.append(time.perf_counter())
        steps = ", ".join(f"{b - a:.2f}" for a, b in pairwise(times))
        print(f"{name}, run {run}: {times[-1] - times[0]:.2f} s (coalesce, decoalesce, interpolate: {steps})")
        models = sum(map(size, (large, small, grown, mixed)))
        beyond = peak() - before + size(large)
        print(
            f"  peak {beyond:.2f} GiB, {beyond / models:.2f} x the large, small, grown and mixed weights ({models:.2f})"
        )
        del small, grown, mixed


def main() -> None:
    if len(sys.argv) > 1:
        measure(sys.argv[1])
        return
    for name in NETWORKS:
        subprocess.run([sys.executable, __file__, name], check=True)


if __name__ == "__main__":
    main()
