"""Options and initial weights of networks; their layers are defined in `models/`."""
