"""Benchmarks against plain PyTorch and other trainers; `results/` has the measurements with hardware and command."""
