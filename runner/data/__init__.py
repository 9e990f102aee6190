"""Data sets: `base.py` defines the interface; `memory.py` and `files.py` implement it."""
