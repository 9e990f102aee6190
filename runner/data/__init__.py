"""Data sets as streams of batches: `base.py` is the contract, `memory.py` and `files.py` its two kinds of stream."""
