"""Weights & Biases: on by default, asks nothing, and plots everything against FLOPs."""

from __future__ import annotations

import os
import sys
from typing import Any, Literal

from lightning.pytorch.loggers import WandbLogger
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from mlframe.errors import ConfigError

Mode = Literal["auto", "online", "offline", "disabled"]


def wandb_logger(mode: Mode = "auto", **kwargs: Any) -> WandbLogger:
    """Lightning's WandbLogger in the asked mode; "auto" is WANDB_MODE if set, else online with a key, else offline.

    `kwargs` go to wandb.init (project, name, group, job_type, tags, dir). The x axis of train/*, val/* and
    test/* is `total_flops`. Raises ConfigError when "online" is asked for and there is no key.
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
        run = wandb.init(mode=chosen, settings=wandb.Settings(silent=True), **kwargs)
        run.define_metric("total_flops")
        for group in ("train/*", "val/*", "test/*"):
            run.define_metric(group, step_metric="total_flops", step_sync=True)
    return WandbLogger(experiment=run)


def finish(failed: bool) -> None:
    """Close the run, if there is one, so that the next of this process is a run of its own."""
    if (wandb := sys.modules.get("wandb")) is not None and wandb.run is not None:
        wandb.finish(exit_code=int(failed))
