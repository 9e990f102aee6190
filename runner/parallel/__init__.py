"""Parallel modes: `base.py` defines the interface and the single-device mode; every other mode has its own file."""
