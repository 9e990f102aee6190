"""Data sets: `base.py` defines the interface; `memory.py` and `image_files.py` implement it."""
