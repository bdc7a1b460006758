"""Weights & Biases: on by default, asks nothing, and plots everything against FLOPs."""

from __future__ import annotations

import os
import secrets
import sys
from pathlib import Path
from typing import Any, Literal

from hydra.utils import instantiate
from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from omegaconf import DictConfig, OmegaConf

from mlframe.errors import ConfigError

Mode = Literal["auto", "online", "offline", "disabled"]


def wandb_logger(mode: Mode = "auto", resume: str = "auto", dir: str | None = None, **kwargs: Any) -> WandbLogger:
    """Lightning's WandbLogger in the asked mode; "auto" is WANDB_MODE if set, else online with a key, else offline.

    resume: auto goes on in the W&B run that `dir`/wandb_run_id names, never begins a new one. `kwargs` go to wandb.init
    (project, name, group, job_type, tags). The x axis of train/*, val/* and test/* is `total_flops`. Raises ConfigError
    when "online" is asked for and there is no key.
    """
    import wandb  # slow to import, and not needed by `logger=none`

    mode = os.environ.get("WANDB_MODE", "auto") if mode == "auto" else mode  # type: ignore[assignment]
    if mode not in ("auto", "online", "offline", "disabled", "dryrun"):
        raise ConfigError(f"logger.wandb.mode={mode}: one of auto, online, offline, disabled")
    has_key = mode in ("auto", "online") and wandb.login(prompt=False, verify=False)
    if mode == "online" and not has_key:
        raise ConfigError(
            "W&B online needs a key and there is none: set WANDB_API_KEY or run `wandb login`, "
            "or stay offline with logger.wandb.mode=offline (`wandb sync` uploads it later)"
        )
    run = None
    if rank_zero_only.rank == 0:
        chosen: Literal["online", "offline", "disabled"]
        chosen = "online" if has_key else "disabled" if mode == "disabled" else "offline"
        if dir is not None:
            kwargs = {"id": _run_id(Path(dir), anew=resume == "never"), "dir": dir, **kwargs}
        # Offline the id alone says it: `wandb sync` joins the parts.
        goes_on: Literal["allow"] | None = "allow" if chosen == "online" else None
        run = wandb.init(mode=chosen, settings=wandb.Settings(silent=True), resume=goes_on, **kwargs)
        run.define_metric("total_flops")
        for group in ("train/*", "val/*", "test/*"):
            run.define_metric(group, step_metric="total_flops", step_sync=True)
    return WandbLogger(experiment=run)


def _run_id(folder: Path, anew: bool) -> str:
    path = folder / "wandb_run_id"
    if anew or not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        path.write_text(secrets.token_hex(4))
    return path.read_text()


def log_failure(config: DictConfig) -> None:
    """A run in W&B, marked as failed, of a job that broke before its logger was opened. Without W&B, nothing."""
    for logger in config.logger.values():
        if logger and str(logger.get("_target_")).endswith("wandb_logger"):
            try:
                instantiate(logger).log_hyperparams(OmegaConf.to_container(config, resolve=True))
            except Exception as error:  # the job's own failure is what matters
                print(f"No run in W&B: {error}", file=sys.stderr)
    finish(failed=True)


def opened() -> bool:
    return (wandb := sys.modules.get("wandb")) is not None and wandb.run is not None


def finish(failed: bool) -> None:
    """Close the run, if there is one, so that the next of this process is a run of its own."""
    if opened():
        sys.modules["wandb"].finish(exit_code=int(failed))
