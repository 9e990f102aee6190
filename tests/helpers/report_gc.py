"""Imported by a fork server: reports the state of the garbage collector during imports and in child processes."""

import gc
import json
from pathlib import Path

WHILE_IMPORTING = gc.isenabled()


def report_gc_state(path: str) -> None:
    found = {"while importing": WHILE_IMPORTING, "enabled": gc.isenabled(), "frozen": gc.get_freeze_count()}
    Path(path).write_text(json.dumps(found))
