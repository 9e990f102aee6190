"""The files of a run: its directory and its checkpoints (checkpoints.py has the latest), written atomically."""
