"""Turns YAML options into validated components. Hydra's errors, with suggestions, are in hydra_errors.py."""
