"""Whether a config computes what a single device computes."""
