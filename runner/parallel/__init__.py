"""How one training step is spread over devices and processes: `base.py` is the single-device mode, and one file a mode."""
