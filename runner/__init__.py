"""A declarative experiment runner: config options compose into one training loop."""

__version__ = "0.1.0"
