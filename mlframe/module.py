"""The LightningModule around the current level's network, and the first task: image classification."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.types import OptimizerLRScheduler
from timm.data import Mixup
from timm.optim import param_groups_weight_decay
from torch import Tensor, nn
from torch.nn import functional
from torch.optim.lr_scheduler import LambdaLR
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from mlframe.errors import ConfigError
from mlframe.levels import Level
from mlframe.plan import Phase, Plan
from mlframe.schedule import Schedule
from mlframe.sharding import FSDP2


class LevelModule(pl.LightningModule):
    """Holds the network of the current phase's level as `network`, and the weights of larger ones in `parked`.

    optimizer: parameter groups -> optimizer, with its peak rate; `schedule` multiplies that. Norms, biases, tokens and
    whatever the network's `no_weight_decay()` names are not decayed.
    init_from: where the first phase takes its weights from (`Architecture.load`) instead of a random init.
    compile: torch.compile each level's network.
    A subclass is a task: `training_step`, `validation_step`, `test_step`, and what a batch counts as (`unit`, `units`,
    `amount`).
    """

    unit = "samples"
    units = 1
    """How many of `unit` a sample has."""
    objective: str | None = None
    """What of text the batches must be: "causal" or "masked"; None for other data."""
    logged: tuple[str, ...] = ()
    """The metrics that a callback may monitor; empty: not checked."""

    def __init__(
        self,
        plan: Plan,
        optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        schedule: Schedule,
        seed: int = 0,
        init_from: str | None = None,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.plan, self.seed, self.init_from, self.compiles = plan, seed, init_from, compile
        self._make_optimizer, self._schedule = optimizer, schedule
        self.phase_index = 0
        self.network: nn.Module | None = None
        self.goes_on = False
        """Whether a checkpoint will fill the network, so that it needs no first weights."""
        # Plain CPU tensors, not submodules: DDP would broadcast them, the optimizer and the summary would count them.
        self.parked: dict[str, dict[str, Tensor]] = {}

    @property
    def phase(self) -> Phase:
        return self.plan.phases[self.phase_index]

    @property
    def level(self) -> Level:
        return self.plan.levels[self.phase.level]

    def amount(self, batch: Any) -> int:
        """How many samples a batch holds."""
        return len(batch[0])

    def configure_model(self) -> None:
        """Build the network, where there is none, as the trainer's strategy needs it."""
        if self.network is not None:
            return
        strategy = self._trainer.strategy if self._trainer is not None else None
        fresh = self.phase_index == 0 and not self.goes_on
        self.network = strategy.build(self, fresh) if isinstance(strategy, FSDP2) else self.built()
        if self.compiles:
            torch.compiler.reset()  # the last level's graphs: torch would recompile them up to a limit, then give up
            self.computes().compile(dynamic=False)  # in place, so that the weights keep their names

    def built(self) -> nn.Module:
        """The network with its first weights: random ones depend on the seed and the level only."""
        with torch.random.fork_rng():
            torch.manual_seed(self.seed + 1_000 * self.phase.level)
            network = self.level.build()
        if self.phase_index == 0 and self.init_from is not None:
            self.level.architecture.load(network, self.init_from)
        return network

    def computes(self) -> nn.Module:
        """The part of the network that is compiled: what a step calls."""
        assert self.network is not None
        return self.network

    def configure_optimizers(self) -> OptimizerLRScheduler:
        assert self.network is not None
        kept: set[str] = getattr(self.network, "no_weight_decay", set)()
        groups = param_groups_weight_decay(self.network, no_weight_decay_list=kept)
        for group in groups:
            if group["weight_decay"]:
                del group["weight_decay"]  # timm's default; these take the optimizer's own
        optimizer = self._make_optimizer(groups)
        start = self.plan.start(self.phase_index)
        scheduler = LambdaLR(optimizer, lambda step: self._schedule.factor(self.plan, start + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    def on_fit_start(self) -> None:
        if len(self.plan.phases) > 1 and not hasattr(self.trainer.fit_loop, "finish_phases"):
            raise ConfigError("a plan of several phases needs VCycleLoop.attach(trainer, module) before trainer.fit")

    def log_rate(self) -> None:
        self.log("train/lr", self.trainer.optimizers[0].param_groups[0]["lr"])

    def start_at(self, checkpoint: Path) -> None:
        """Make the module ready to go on from a checkpoint: in its phase, and without weights of its own.

        A sharded strategy fills the network before any hook of Lightning's could rebuild it.
        """
        self.phase_index, self.init_from, self.goes_on = peek(checkpoint)["vcycle"]["phase"], None, True

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        sizes = dict(self.level.sizes)
        checkpoint["vcycle"] = {"phase": self.phase_index, "sizes": sizes, "parked": dict(self.parked)}
        if not isinstance(self.trainer.strategy, FSDP2):
            checkpoint["optimizer_states"] = [
                _numbered_as(self, optimizer, state)
                for optimizer, state in zip(self.trainer.optimizers, checkpoint["optimizer_states"], strict=True)
            ]

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Rebuild the checkpoint's level; this is the last hook before Lightning loads the weights into it."""
        state = checkpoint["vcycle"]
        self.parked = state["parked"]
        if state["phase"] != self.phase_index:
            self.phase_index, self.network = state["phase"], None
        self.configure_model()


def _numbered_as(module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
    """The optimizer's state with its parameters numbered as those of the module, where torch numbers them group by
    group: so that a sharded strategy, which goes by the module, can read it too. Order alone counts to the others."""
    number = {parameter: i for i, parameter in enumerate(module.parameters())}
    ids = [number[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    groups = [{**group, "params": [ids[i] for i in group["params"]]} for group in state["param_groups"]]
    return {"state": {ids[i]: moments for i, moments in state["state"].items()}, "param_groups": groups}


def peek(path: Path) -> dict[str, Any]:
    """What a checkpoint says of itself. The tensors of a file are mapped, and not read; those of a folder absent."""
    file = path / "meta.pt" if path.is_dir() else path
    peeked: dict[str, Any] = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    return peeked


class ImageClassification(LevelModule):
    """Cross-entropy on images, with timm's mixup and cutmix. Batches are (images [B, C, H, W], labels [B]).

    mixup: the arguments of timm.data.Mixup; empty or None trains on the images as they are.
    """

    unit = "images"
    logged = ("val/loss", "val/acc", "train/loss", "train/lr")

    def __init__(
        self, *args: Any, label_smoothing: float = 0.1, mixup: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        classes = self.plan.levels[0].sizes["classes"]
        self.label_smoothing = label_smoothing
        self.mixup = Mixup(**mixup, label_smoothing=label_smoothing, num_classes=classes) if mixup else None
        self.losses = nn.ModuleDict({stage: MeanMetric() for stage in ("val", "test")})
        self.accuracies = nn.ModuleDict(
            {stage: MulticlassAccuracy(classes, average="micro") for stage in ("val", "test")}
        )

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        assert self.network is not None
        if self.mixup is not None:
            images, targets = self.mixup(images, labels)  # labels smoothed and mixed: [B, classes]
            loss = functional.cross_entropy(self.network(images), targets)
        else:
            loss = functional.cross_entropy(self.network(images), labels, label_smoothing=self.label_smoothing)
        self.log("train/loss", loss.detach(), prog_bar=True)
        self.log_rate()
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("val", batch)

    def test_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self._evaluate("test", batch)

    def _evaluate(self, stage: str, batch: tuple[Tensor, Tensor]) -> None:
        images, labels = batch
        assert self.network is not None
        logits = self.network(images)
        loss, accuracy = self.losses[stage], self.accuracies[stage]
        loss(functional.cross_entropy(logits, labels, reduction="none"))
        accuracy(logits, labels)
        self.log_dict({f"{stage}/loss": loss, f"{stage}/acc": accuracy}, on_step=False, on_epoch=True)
