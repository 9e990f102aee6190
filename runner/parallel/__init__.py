"""Parallel modes: `base.py` is the interface and the single-device mode; each other mode has a file of its own."""
