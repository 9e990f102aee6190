"""Predicts what a run will take, and chooses the fastest way to train it on this machine."""
