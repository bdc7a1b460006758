"""From one phase to the next: park or interpolate the weights, and give the trainer the network of the next level."""

from __future__ import annotations

from collections.abc import Callable

import lightning.pytorch as pl
from torch import Tensor

from mlframe.module import LevelModule
from mlframe.operators import coalesce, decoalesce, interpolate, ties


def transition(trainer: pl.Trainer, module: LevelModule, configure: Callable[[], None]) -> None:
    """Replace the module's network by that of the next phase, in the middle of a fit.

    Down: coalesce, and park the larger network's weights. Up: decoalesce, and interpolate with the parked weights.
    The optimizer and its schedule start afresh. `configure` is Lightning's call of `module.configure_model` inside
    the strategy's and precision's contexts. Callbacks with a method `on_phase_end(trainer, module)` are told before,
    those with `on_phase_start(trainer, module)` after.
    """
    _tell("on_phase_end", trainer, module)
    old, strategy = module.level, trainer.strategy
    weights = weights_of(module)

    # The wrapper and the optimizer hold the old parameters: dropped first, so that both networks are never in memory.
    strategy.model = module
    strategy.optimizers, strategy.lr_scheduler_configs = [], []
    module.network = None
    module.phase_index += 1

    weights = next_weights(module, old.index, weights)
    configure()
    assert module.network is not None
    module.network.load_state_dict(weights, strict=True)
    strategy.setup(trainer)  # what Trainer.fit itself calls: to the device, wrap, configure_optimizers
    module.train()
    _tell("on_phase_start", trainer, module)


def _tell(hook: str, trainer: pl.Trainer, module: LevelModule) -> None:
    for callback in trainer.callbacks:
        if (told := getattr(callback, hook, None)) is not None:
            told(trainer, module)


def weights_of(module: LevelModule) -> dict[str, Tensor]:
    """The network's weights on the CPU; names that share a tensor still do."""
    assert module.network is not None
    state = module.network.state_dict()
    tied = ties(state)
    out = {name: x.detach().cpu() for name, x in state.items() if name not in tied}
    return {name: out[tied.get(name, name)] for name in state}


def next_weights(module: LevelModule, old: int, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights that the module's current phase starts from, given those at the end of the phase before."""
    plan, new = module.plan, module.level
    if new.index > old:
        module.parked[str(old)] = weights
        return coalesce(weights, new.architecture, plan.levels[old].sizes, new.scheme, plan.new_layers)
    below = plan.levels[old]
    grown = decoalesce(
        weights, new.architecture, below.sizes, below.scheme, plan.new_layers, plan.split_noise, module.seed
    )
    parked = module.parked.pop(str(new.index), None)
    return grown if parked is None else interpolate(parked, grown, module.phase.alpha)
