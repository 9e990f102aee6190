"""Functions for the process and its machine: time, memory, CPU cores, signals and imports."""

__version__ = "0.1.0"
