"""What the command line turns into one clear line instead of a traceback."""

from __future__ import annotations

import signal


class ConfigError(ValueError):
    """What was asked for cannot be: the message names what is wrong and what to do."""


class Diverged(ArithmeticError):
    """A loss or a weight is not finite. The message names the step (counted from 1), the phase and the rate."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step


class Interrupted(BaseException):
    """A signal, whose name is the message, has ended the run: after a step, which is saved, or outside of training.

    Not an Exception, as KeyboardInterrupt is not: nobody who catches all sorts shall take it for an error.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)


def check_whole(key: str, value: object, least: int, most: int | None = None) -> None:
    """Raise ConfigError where the value of `key` is not a whole number of at least `least` and at most `most`."""
    if type(value) is not int or value < least or (most is not None and value > most):
        upper = " or more" if most is None else f" to {most}"
        raise ConfigError(f"{key}={value}: a whole number, {least}{upper}")
