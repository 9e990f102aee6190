"""The process and the machine: time, memory, cores, signals, imports."""
