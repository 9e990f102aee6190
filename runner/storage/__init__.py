"""The files of a run: its directory and its checkpoints, written atomically."""
