"""How a step is spread over devices and processes: `base.py` is the single-device mode, then comes one file a mode."""
