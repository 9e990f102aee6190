"""A declarative experiment runner: the config selects the components of a single training loop."""

__version__ = "0.1.0"
