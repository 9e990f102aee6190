"""Predicts the time and memory that a run needs, and chooses the fastest way to train it on this machine."""
