"""Time and peak memory of one coalesce + decoalesce + interpolate of DeiT-B (86 M parameters) on one thread.

python benchmarks/operators.py
"""

from __future__ import annotations

import resource
import time
from itertools import pairwise

import torch

from mlframe import architectures, maps, operators


def main() -> None:
    torch.set_num_threads(1)
    vit = architectures.VIT
    network = vit.build({"model_name": "deit_base_patch16_224"})
    large, sizes = network.state_dict(), vit.sizes(network)
    halves = {axis: maps.adjacent(sizes[axis], sizes[axis] // 2) for axis in ("heads", "embed", "mlp", "layers")}
    small_sizes = sizes | {axis: len(groups) for axis, groups in halves.items()}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for run in range(5):
        times = [time.perf_counter()]
        small = operators.coalesce(large, vit, sizes, halves)
        times.append(time.perf_counter())
        grown = operators.decoalesce(small, vit, small_sizes, halves)
        times.append(time.perf_counter())
        operators.interpolate(large, grown, 0.5)
        times.append(time.perf_counter())
        steps = ", ".join(f"{b - a:.3f}" for a, b in pairwise(times))
        print(f"run {run}: {times[-1] - times[0]:.3f} s (coalesce, decoalesce, interpolate: {steps})")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    megabytes = sum(x.numel() * x.element_size() for x in large.values()) / 2**20
    print(
        f"peak memory beyond the network itself: {(peak - before) / 2**10:.0f} MiB (its weights: {megabytes:.0f} MiB)"
    )


if __name__ == "__main__":
    main()
