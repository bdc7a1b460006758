"""The errors that the command line turns into one clear line instead of a traceback."""


class ConfigError(ValueError):
    """What was asked for cannot be: the message names what is wrong and what to do."""


class Diverged(ArithmeticError):
    """A loss or a weight is not finite. The message names the step (counted from 1), the phase and the rate."""

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message)
        self.step = step
