"""Engines, which run the jobs of a sweep: on this machine, or through SLURM or Ray."""
