"""Imported by a fork server: says what its garbage collector does while it imports, and in its children."""

import gc
import json
from pathlib import Path

WHILE_IMPORTING = gc.isenabled()


def report(path: str) -> None:
    """Write what the collector of this process does to the file at `path`."""
    found = {"while importing": WHILE_IMPORTING, "enabled": gc.isenabled(), "frozen": gc.get_freeze_count()}
    Path(path).write_text(json.dumps(found))
