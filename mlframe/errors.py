"""What the command line turns into one clear line instead of a traceback."""

from __future__ import annotations

import signal


class ConfigError(ValueError):
    """What was asked for cannot be: the message names what is wrong and what to do."""


class Interrupted(Exception):
    """A signal has ended training between two steps, and the last one is saved. `code`: the process's exit code."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"Stopped by {signal.Signals(signum).name}; the same command goes on from here")
        self.code = 128 + signum


def check_whole(key: str, value: object, least: int, most: int | None = None) -> None:
    """Raise ConfigError where the value of `key` is not a whole number of at least `least` and at most `most`."""
    if type(value) is not int or value < least or (most is not None and value > most):
        upper = " or more" if most is None else f" to {most}"
        raise ConfigError(f"{key}={value}: a whole number, {least}{upper}")
