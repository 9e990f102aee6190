"""Measurement, logging and display of what happens in a run."""
