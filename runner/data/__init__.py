"""Data sets: `base.py` defines the interface; `arrays.py`, `memory.py` and `image_files.py` implement it."""
