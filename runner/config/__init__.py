"""Turns YAML options into validated components."""
