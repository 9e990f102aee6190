"""Environments to act in: which, how many at once, and how they are stepped."""
