"""The rules that end a run before its last step."""
