"""`mlframe-train`: the Hydra entry point. From config to levels, plan, loop and results."""

from __future__ import annotations

import hashlib
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import hydra
import lightning.pytorch as pl
import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from hydra.utils import get_object, instantiate
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from mlframe import checks, run_folder, status, sweep, wandb_logger
from mlframe.checkpoint import AtomicCheckpointIO, save_network
from mlframe.checks import flat, one_line
from mlframe.data.tokenizer import check_tokenizer
from mlframe.divergence import Divergence
from mlframe.errors import ConfigError, Interrupted
from mlframe.interruption import Interruption
from mlframe.ledger import Ledger
from mlframe.levels import make_levels
from mlframe.loop import VCycleLoop
from mlframe.module import LevelModule
from mlframe.plan import Plan, control, describe
from mlframe.results import report
from mlframe.resume import starting_point
from mlframe.rows import Rows
from mlframe.sharding import FSDP2

_PACKAGED = Path(__file__).parent / "conf"
CONF = _PACKAGED if _PACKAGED.exists() else Path(__file__).parents[1] / "conf"
console = Console(highlight=False, soft_wrap=True, quiet=rank_zero_only.rank != 0)


def run_name(overrides: str) -> str:
    """A folder name for Hydra's override_dirname: readable, safe, and unlike any other's."""
    name = re.sub(r"[^\w.,=+\[\]-]+", "_", overrides).strip("_.")  # no "..", either
    if len(name) > 120 or name != overrides:
        name = f"{name[:120]}-{hashlib.sha256(overrides.encode()).hexdigest()[:8]}" if overrides else "default"
    return name or "default"


OmegaConf.register_new_resolver("run_name", run_name, replace=True)


def train(config: DictConfig) -> dict[str, Any]:
    """One run: everything that can be wrong is found before the first step. Returns the results (results.json)."""
    folder = Path(config.run_dir)
    if config.resume not in ("auto", "never"):
        raise ConfigError(f"resume={config.resume}: auto goes on with an unfinished run, never begins again")
    if config.resume == "auto":
        run_folder.check_same(folder, config)
    if config.resume == "auto" and (results := run_folder.read_results(folder)):
        console.print(f"This run is finished; to repeat it, add resume=never or remove {folder}")
        report(console, folder, results)
        return results
    with status.recorded(config) as record, Interruption() as interruption:
        return _run(config, folder, record, interruption)


def _run(config: DictConfig, folder: Path, record: status.Record, interruption: Interruption) -> dict[str, Any]:
    with one_line():
        checks.check(config)
        pl.seed_everything(config.seed, workers=True, verbose=False)
        plan, data, module = build(config)
        record.trainer = trainer = build_trainer(config, plan)
        VCycleLoop.attach(trainer, module, interruption)
        data.trainer = trainer  # as Lightning does at the start of a fit
        data.setup("fit")
        # What these refuse, they refuse here and not in the middle of a fit.
        checks.check_epoch(trainer, len(data.train_dataloader()))
        data.val_dataloader()
        samples = config.data.batch_size * trainer.accumulate_grad_batches * trainer.world_size
        auto = config.resume == "auto" and not trainer.fast_dev_run
        start = starting_point(folder, config.ckpt_path, auto, plan, samples)
        if start is not None:
            if start.is_dir() and not isinstance(trainer.strategy, FSDP2):
                raise ConfigError(f"{start} is in shards: trainer=fsdp2 reads it, also with trainer.devices=1")
            module.start_at(start)
        elif config.init_from is not None and (tokenizer := data.about().get("tokenizer")) is not None:
            check_tokenizer(config.init_from, tokenizer)
        if config.compile:
            _check_compiler(trainer.strategy.root_device)
        if not isinstance(trainer.strategy, FSDP2):  # which can only build once all its processes run
            module.configure_model()
            module.configure_optimizers()
        if not trainer.fast_dev_run:
            run_folder.check_room(folder, plan)
            open_run(config, trainer, plan, samples)
    console.print(describe(plan, samples))
    if start is not None:
        gone = start.is_relative_to(folder) and not (folder / "metrics.csv").exists()
        console.print(f"Going on from {start}" + ("; metrics.csv is gone, so its rows begin here" if gone else ""))
    trainer.fit(module, datamodule=data, ckpt_path=start, weights_only=True)
    if signum := interruption.agreed(trainer):
        raise Interrupted(signum)
    if trainer.fast_dev_run:
        console.print(f"fast_dev_run: all {len(plan.phases)} phases ran; nothing was written")
        return {}
    return finish(config, trainer, module, data, samples)


def build(config: DictConfig) -> tuple[Plan, Any, LevelModule]:
    """The plan, the data module and the LightningModule that a configuration describes."""
    model = OmegaConf.to_container(config.model, resolve=True)
    assert isinstance(model, dict)
    data = instantiate(config.data)
    architecture = get_object(model["architecture"])
    levels = make_levels(architecture, model["config"], **_plain(config.levels), sample=data.sample)
    plan = instantiate(config.plan)(levels=levels)
    if config.control is not None:
        plan = control(plan, config.control)
    if config.trainer.fast_dev_run:
        plan = plan.shortened(int(config.trainer.fast_dev_run))
    schedule = instantiate(config.schedule)
    if model["task"].get("mixup") and config.data.batch_size % 2:
        raise ConfigError(f"data.batch_size={config.data.batch_size}: mixup takes images in pairs, so an even number")
    optimizer = instantiate(config.optimizer, _convert_="all")
    module = instantiate(config.model.task)(
        plan=plan,
        optimizer=optimizer,
        schedule=schedule,
        seed=config.seed,
        init_from=config.init_from,
        compile=config.compile,
    )
    _check_fit(data, module)
    return plan, data, module


def _check_fit(data: Any, module: LevelModule) -> None:
    """The data makes what the task and its network take."""
    if (made := getattr(data, "objective", None)) != module.objective:
        raise ConfigError(
            f"the data is {made or 'not text'} and the task {type(module).__name__} takes "
            f"{module.objective or 'no text'}: choose a model and data that fit each other"
        )
    vocab = module.plan.levels[0].sizes.get("vocab", 0)
    if module.objective and data.vocab_size > vocab:
        raise ConfigError(f"data.vocab_size={data.vocab_size}: the network has {vocab} (model.config.vocab_size)")


def _check_compiler(device: torch.device) -> None:
    try:
        torch.compile(lambda x: x + 1)(torch.ones(1, device=device))
    except Exception as error:
        raise ConfigError(f"compile=true: torch.compile does not work here ({flat(error)[:200]})") from error


def build_trainer(config: DictConfig, plan: Plan) -> pl.Trainer:
    callbacks = [instantiate(callback) for callback in config.callbacks.values() if callback]
    return instantiate(
        config.trainer,
        callbacks=[Ledger(), Divergence(), *callbacks],
        logger=False,  # `open_run` adds them, once nothing can be wrong any more
        plugins=[AtomicCheckpointIO()],
        max_epochs=-1,
        max_steps=plan.steps,
        default_root_dir=config.run_dir,
        use_distributed_sampler=False,  # the data module splits over processes itself
        enable_model_summary=False,  # the plan lists every level
        _convert_="all",
    )


def open_run(config: DictConfig, trainer: pl.Trainer, plan: Plan, samples: int) -> None:
    """The run's folder and its loggers."""
    folder = Path(config.run_dir)
    trainer.loggers = [Rows(folder), *(instantiate(logger) for logger in config.logger.values() if logger)]
    if trainer.is_global_zero:
        run_folder.begin(folder, config)
        run_folder.write_plan(folder, plan, samples)
    for logger in trainer.loggers:
        logger.log_hyperparams(_plain(config))


def finish(config: DictConfig, trainer: pl.Trainer, module: LevelModule, data: Any, samples: int) -> dict[str, Any]:
    """Evaluate the trained network, save it, and say what it can do and what it cost."""
    folder, plan = Path(config.run_dir), module.plan
    if _stopped_short(trainer, module):
        more = " with a larger trainer.max_time" if _out_of_time(trainer) else ""
        console.print(
            f"Stopped in phase {module.phase_index + 1}/{len(plan.phases)}, step {trainer.global_step:,} of "
            f"{plan.steps:,}; the same command{more} goes on from there"
        )
        return {}
    ledger = next(callback for callback in trainer.callbacks if isinstance(callback, Ledger))
    results: dict[str, Any] = {}
    for metrics in trainer.validate(module, datamodule=data, verbose=False):  # may still find that it diverged
        results |= metrics
    save_network(trainer, module, folder / "final")
    for metrics in trainer.test(module, datamodule=data, verbose=False):
        results |= metrics
    results |= {
        "steps": trainer.global_step,
        module.unit: ledger.samples * module.units,
        "total_flops": ledger.total_flops,
        "share_of_scratch": ledger.total_flops / plan.scratch_flops(samples),
        "wall_time": ledger.wall_time,
        "parameters": module.level.parameters,
        "levels": {
            level: {
                "parameters": plan.levels[level].parameters,
                module.unit: cost.samples * module.units,
                "flops": cost.flops,
                "seconds": cost.seconds,
            }
            for level, cost in sorted(ledger.by_level.items())
        },
    }
    if trainer.is_global_zero:
        run_folder.write_results(folder, results)
        report(console, folder, results)
    return results


def _stopped_short(trainer: pl.Trainer, module: LevelModule) -> bool:
    """Out of time, or stopped before the last phase; early stopping in the last phase is an end."""
    if trainer.global_step >= module.plan.steps:
        return False
    return _out_of_time(trainer) or module.phase_index < len(module.plan.phases) - 1


def _out_of_time(trainer: pl.Trainer) -> bool:
    return any(isinstance(c, Timer) and (c.time_remaining() or 0) <= 0 for c in trainer.callbacks)


def _plain(config: DictConfig) -> dict[str, Any]:
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}


@hydra.main(version_base="1.3", config_path=str(CONF), config_name="train")
def _hydra_main(config: DictConfig) -> float | None:
    if HydraConfig.get().mode == RunMode.MULTIRUN:
        return sweep.job(config)
    ended = status.attempt(train, config)
    wandb_logger.finish(failed=status.exit_code(ended) != 0)
    if status.exit_code(ended):
        sys.exit(status.exit_code(ended))
    return None


def quiet() -> None:
    """Lightning announces absent GPUs, defaults and its own products; of it only a profiler's report stays."""
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch.profilers").setLevel(logging.INFO)
    warnings.filterwarnings("ignore", "`isinstance\\(treespec, LeafSpec\\)`")  # Lightning's own call of torch
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")  # that is how a run goes on


def main() -> None:
    """The console script `mlframe-train`."""
    quiet()
    sweep.command(_hydra_main)


if __name__ == "__main__":
    from mlframe.train import main as main_by_name  # the workers of a parallel sweep find the task by its module

    main_by_name()
