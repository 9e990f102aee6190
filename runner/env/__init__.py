"""Gymnasium environments: their options, vectorized stepping, and saving their state."""

MAX_ENVS = 4096
"""A larger number is most likely a typing error; the seeds of some environments are the first one plus their index."""


class EnvironmentBrokenError(Exception):
    """Raised when an environment raises an error or returns values that are not finite."""
