"""From one phase to the next: park or interpolate the weights, and give the trainer the network of the next level."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

from mlframe.module import LevelModule
from mlframe.operators import interpolate, merging, resized, splitting
from mlframe.sharding import Whole, local, part, tied_names


def transition(trainer: pl.Trainer, module: LevelModule, configure: Callable[[], None]) -> None:
    """Replace the module's network by that of the next phase, in the middle of a fit.

    Down: coalesce, and park the larger network's weights. Up: decoalesce, and interpolate with the parked weights.
    The optimizer and its schedule start afresh. `configure` is Lightning's call of `module.configure_model` inside
    the strategy's and precision's contexts. Callbacks with a method `on_phase_end(trainer, module)` are told before,
    those with `on_phase_start(trainer, module)` after. The new weights are made one tensor at a time; of a sharded
    network no process ever holds more than the tensors that one new tensor is made of.
    """
    _tell("on_phase_end", trainer, module)
    old, strategy = module.level, trainer.strategy
    weights = weights_of(module)

    # The wrapper and the optimizer hold the old parameters: dropped first, so that both networks are never in memory.
    strategy.model = module
    strategy.optimizers, strategy.lr_scheduler_configs = [], []
    module.network = None
    module.phase_index += 1

    parked = module.parked.pop(str(module.level.index), None)
    if module.level.index > old.index:
        module.parked[str(old.index)] = weights

    configure()
    assert module.network is not None
    load(module.network, next_weights(module, old.index, weights, strategy.root_device), parked, module.phase.alpha)
    strategy.setup(trainer)  # what Trainer.fit itself calls: to the device, wrap, configure_optimizers
    module.train()
    _tell("on_phase_start", trainer, module)


def _tell(hook: str, trainer: pl.Trainer, module: LevelModule) -> None:
    for callback in trainer.callbacks:
        if (told := getattr(callback, hook, None)) is not None:
            told(trainer, module)


def weights_of(module: LevelModule) -> dict[str, Tensor]:
    """The network's weights, or this process's shards of them, on the CPU. Of tied names the first one only."""
    assert module.network is not None
    tied = tied_names(module.network)
    return {name: x.detach().cpu() for name, x in module.network.state_dict().items() if name not in tied}


def next_weights(
    module: LevelModule, old: int, weights: Mapping[str, Tensor], device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """What the network of the module's current level is made of `weights`, those of level `old`, computed on `device`.

    One tensor at a time, whole also where `weights` are shards. Before it is mixed with what was parked.
    """
    plan, new, below = module.plan, module.level, module.plan.levels[old]
    if new.index > old:
        maps = merging(new.scheme, plan.new_layers)
    else:
        maps = splitting(below.scheme, plan.new_layers, plan.split_noise, module.seed)
    return resized(Whole(weights, device), new.architecture, below.sizes, maps, {})


@torch.no_grad()
def load(
    network: nn.Module, tensors: Iterable[tuple[str, Tensor]], parked: Mapping[str, Tensor] | None, alpha: float
) -> None:
    """Fill the network with (1 - alpha) * parked + alpha * tensors, or with `tensors` where nothing was parked."""
    state = network.state_dict()
    left = state.keys() - tied_names(network)
    for name, whole in tensors:
        target = state[name]
        if whole.shape != target.shape:
            raise ValueError(f"{name}: the network has {tuple(target.shape)}, its new weights {tuple(whole.shape)}")
        mine = part(whole, target)
        if parked is not None:
            mine = interpolate({name: local(parked[name]).to(mine.device)}, {name: mine}, alpha)[name]
        local(target).copy_(mine)
        left.remove(name)
    if left:
        raise ValueError(f"no new weights for {sorted(left)}")
