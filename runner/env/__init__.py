"""Gymnasium environments: their options, vectorized stepping, and saving their state."""


class EnvironmentBrokenError(Exception):
    """Raised when an environment raises an error or returns values that are not finite."""
