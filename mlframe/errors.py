"""What the command line turns into one clear line instead of a traceback."""

import signal


class ConfigError(ValueError):
    """What was asked for cannot be: the message names what is wrong and what to do."""


class Interrupted(Exception):
    """A signal has ended training between two steps, and the last one is saved. `code`: the process's exit code."""

    def __init__(self, signum: int) -> None:
        super().__init__(f"Stopped by {signal.Signals(signum).name}; the same command goes on from here")
        self.code = 128 + signum
