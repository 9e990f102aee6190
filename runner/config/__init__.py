"""From YAML to validated components."""
