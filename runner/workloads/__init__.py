"""Workloads: the model that is trained, its batches, loss and evaluation. `base.py` defines the interface."""
