"""The one error that the command line turns into one clear line instead of a traceback."""


class ConfigError(ValueError):
    """What was asked for cannot be: the message names what is wrong and what to do."""
