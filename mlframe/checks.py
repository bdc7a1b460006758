"""What is wrong with a configuration as such, found before anything is trained.

What belongs to a thing is checked where the thing is: levels, plan, schedule, data, architectures.
"""

from __future__ import annotations

import difflib
import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as pl
import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationKeyError

from mlframe.errors import ConfigError, check_whole
from mlframe.levels import make_levels

_SET_BY_TRAIN = {
    "max_steps": "set `steps`", "min_steps": "set `steps`", "max_epochs": "set `steps`", "min_epochs": "set `steps`",
    "callbacks": "use the group `callbacks`", "logger": "use the group `logger`", "default_root_dir": "set `run_dir`",
    "plugins": "leave it out", "use_distributed_sampler": "leave it out", "enable_model_summary": "leave it out",
}  # fmt: skip

_WHOLE = {
    "seed": (0, 2**32 - 1), "data.seed": (0, 2**32 - 1), "callbacks.last.every": (1, None),
    "trainer.accumulate_grad_batches": (1, None), "trainer.log_every_n_steps": (0, None),
    "trainer.num_sanity_val_steps": (-1, None),
}  # fmt: skip
"""The least and the most; whole numbers that are checked nowhere else."""


def _number(low: float, high: float = math.inf, above: bool = False) -> Callable[[Any], bool]:
    """Whether a value is a finite number of at least (or `above`) `low`, and below `high`."""

    def fits(value: Any) -> bool:
        number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        return number and (value > low if above else value >= low) and value < high

    return fits


def _betas(value: Any) -> bool:
    return isinstance(value, list) and len(value) in (2, 3) and all(map(_number(0, 1), value))


_VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "optimizer.lr": (_number(0, above=True), "the peak rate is a number above 0, such as 1e-3"),
    "optimizer.weight_decay": (_number(0), "a number, 0 or more"),
    "optimizer.betas": (_betas, "two numbers of 0 to below 1, such as [0.9,0.999]"),
    "model.task.label_smoothing": (_number(0, 1), "a number from 0 to below 1"),
    "trainer.devices": (
        lambda x: x == "auto" or isinstance(x, list) or (isinstance(x, str) and x[:1].isdigit())
        or (type(x) is int and (x == -1 or x > 0)),
        "a number of processes, 1 or more, a list of GPUs, or -1 or auto for all",
    ),
    "trainer.gradient_clip_val": (lambda x: x is None or isinstance(x, str) or _number(0)(x),
                                  "a number, 0 or more, or null for none"),
    "trainer.limit_train_batches": (lambda x: x != 0, "no batch is no training: 1.0 for all, or a number of batches"),
    "trainer.val_check_interval": (lambda x: x != 0, "batches from one validation to the next, 1 or more"),
    "trainer.check_val_every_n_epoch": (
        lambda x: x is None or (type(x) is int and x > 0), "null (validate by batches), or a whole number, 1 or more"),
    "trainer.fast_dev_run": (lambda x: type(x) is bool or (type(x) is int and x >= 0),
                             "true, false, or so many steps in every phase"),
    "trainer.deterministic": (lambda x: x in (None, True, False, "warn"), "true, false or warn"),
}  # fmt: skip
"""What has to hold of a value, and how that is said."""


def check(config: DictConfig) -> None:
    """Raise ConfigError, of one line, for the first thing that is wrong."""
    plain: dict[str, Any] = OmegaConf.to_container(config, resolve=True)  # type: ignore[assignment]
    flat = dict(_flat(plain))
    for key, value in flat.items():
        if value == "???":
            raise ConfigError(f"{key} has no value yet: set {key}=...")
    for key, (least, most) in _WHOLE.items():
        if key in flat:
            check_whole(key, flat[key], least, most)
    for key, (fits, said) in _VALUES.items():
        if key in flat and not fits(flat[key]):
            raise ConfigError(f"{key}={flat[key]}: {said}")
    _check_keys(flat, plain)
    _check_trainer(plain["trainer"])
    _check_callbacks(plain)


def check_epoch(trainer: pl.Trainer, batches: int) -> None:
    """Raise ConfigError where validation would never fall into an epoch of so many batches."""
    limit, every = trainer.limit_train_batches, trainer.val_check_interval
    epoch = min(batches, limit) if isinstance(limit, int) else int(batches * limit)
    if trainer.check_val_every_n_epoch is not None and isinstance(every, int) and every > epoch:
        raise ConfigError(f"trainer.val_check_interval={every}: an epoch has {epoch} batches; set it to {epoch} or "
                          "less, or trainer.check_val_every_n_epoch=null to count across epochs")  # fmt: skip


def _flat(node: Mapping[str, Any], key: str = "") -> Iterator[tuple[str, Any]]:
    """(key with dots, value) of all values, and of the mappings that hold them."""
    for name, value in node.items():
        below = f"{key}.{name}".lstrip(".")
        yield below, value
        if isinstance(value, dict):
            yield from _flat(value, below)


def _check_keys(flat: Mapping[str, Any], plain: Mapping[str, Any]) -> None:
    """Every key that goes to a function is an argument of it: a library says so too, but not where to look."""
    called = {key: get_object(value["_target_"]) for key, value in flat.items() if _has_target(value)}
    for key, target in {**called, "levels": make_levels}.items():
        known = _arguments(target)
        for name in flat[key]:
            if known is None or name in known or (name.startswith("_") and name.endswith("_")):
                continue
            near = difflib.get_close_matches(name, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"it takes {', '.join(sorted(known))}"
            raise ConfigError(f"{key}.{name}: {getattr(target, '__name__', target)} takes no {name}; {hint}")


def _has_target(value: Any) -> bool:
    return isinstance(value, dict) and "_target_" in value


def _arguments(target: Any) -> set[str] | None:
    """The names that a function or class takes; None where it takes any. A class may hand them on to its bases."""
    known: set[str] = set()
    classes = target.__mro__ if isinstance(target, type) else ()
    for function in [vars(base)["__init__"] for base in classes if "__init__" in vars(base)] or [target]:
        try:
            parameters = inspect.signature(function).parameters.values()
        except ValueError:  # of C, and without one
            return None
        known |= {p.name for p in parameters if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)} - {"self"}
        if not any(p.kind is p.VAR_KEYWORD for p in parameters):
            return known
    return None


def _check_trainer(trainer: Mapping[str, Any]) -> None:
    for name, instead in _SET_BY_TRAIN.items():
        if name in trainer:
            raise ConfigError(f"trainer.{name} is set by the run itself: {instead}")
    accelerator, strategy, precision = (str(trainer.get(key)) for key in ("accelerator", "strategy", "precision"))
    on_gpu = accelerator != "cpu" and torch.accelerator.is_available()
    if accelerator in ("gpu", "cuda") and not on_gpu:
        raise ConfigError(f"trainer.accelerator={accelerator}: no GPU is found here; use auto or cpu")
    if precision.split("-")[0] == "16" and not on_gpu:
        raise ConfigError(f"trainer.precision={precision}: float16 needs a GPU; use bf16-mixed or 32-true")
    if strategy.startswith(("ddp_spawn", "ddp_fork", "ddp_notebook", "deepspeed")):
        raise ConfigError(f"trainer.strategy={strategy} is not supported, as the network changes size between phases "
                          "and processes are commands of their own: use auto or ddp")  # fmt: skip


def _check_callbacks(plain: Mapping[str, Any]) -> None:
    unmeasured = plain["trainer"].get("limit_val_batches") == 0
    for name, callback in plain["callbacks"].items():
        if callback and not _has_target(callback):
            raise ConfigError(f"callbacks.{name}={callback}: a mapping with the class in _target_, or null for none")
        if not callback:
            continue
        if get_object(callback["_target_"]) is GradientAccumulationScheduler:
            raise ConfigError(f"callbacks.{name}: the samples of a step, and with them the plan's FLOPs, would change "
                              "on the way; use trainer.accumulate_grad_batches=N")  # fmt: skip
        if unmeasured and str(callback.get("monitor")).startswith("val/"):
            raise ConfigError(f"trainer.limit_val_batches=0: callbacks.{name} monitors {callback['monitor']}, which "
                              f"is then never measured; add callbacks.{name}=null")  # fmt: skip


@contextmanager
def one_line() -> Iterator[None]:
    """Whatever is wrong with what was asked for becomes a ConfigError of one line."""
    try:
        yield
    except ConfigError:
        raise
    except InstantiationException as error:
        cause = error.__cause__ or error
        raise ConfigError(f"{error.full_key}: {flat(cause)}" if hasattr(error, "full_key") else flat(cause)) from error
    except InterpolationKeyError as error:
        raise ConfigError(
            f"{str(error).splitlines()[0]}: choose a model and data that fit each other, such as model=gpt_docs "
            "data=docs"
        ) from error
    except Exception as error:  # libraries raise all sorts
        raise ConfigError(flat(error)) from error


def flat(error: BaseException) -> str:
    """Its message in one line."""
    return " ".join(str(error).split()) or type(error).__name__
