"""Options and initial weights of networks. The layers of networks are defined in `models/`."""
