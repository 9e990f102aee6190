"""Functions for the process and its machine: time, memory, CPU cores, signals and imports."""
