"""Networks' options and weights; their layers are in `models/`."""
