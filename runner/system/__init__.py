"""This process and this machine: time, memory, cores, signals, imports."""
