"""`python -m mlframe.job CONFIG`: one job of a sweep, in a process of its own.

CONFIG is the job's whole configuration, resolved. Beside it, as .json, lies how the job ended. DDP starts the same
command again for its other processes.
"""

from __future__ import annotations

import logging
import sys
from contextlib import suppress
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from mlframe import status, wandb_logger
from mlframe.train import quiet, train


def main() -> None:
    quiet()
    path = Path(sys.argv[1])
    config = OmegaConf.load(path)
    assert isinstance(config, DictConfig)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    ended = status.attempt(train, config)
    if status.first_process():
        with suppress(OSError):  # no room: the exit code has to do
            status.write(path.with_suffix(".json"), ended)
        if ended.status == "failed" and not wandb_logger.opened() and status.of(Path(config.run_dir)) == ended:
            wandb_logger.log_failure(config)
    wandb_logger.finish(failed=status.exit_code(ended) != 0)
    sys.exit(status.exit_code(ended))


if __name__ == "__main__":
    main()
