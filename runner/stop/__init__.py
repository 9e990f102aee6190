"""When a run ends before its last step."""
