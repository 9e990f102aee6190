"""Text that Python holds, but UTF-8 does not."""

from __future__ import annotations

import os

import pytest

from runner.system.utf8 import printable


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("plain", "plain"),
        ("Größe → 🙂\n", "Größe → 🙂\n"),
        (os.fsdecode(b"a\xff\xc3.png"), r"a\xff\xc3.png"),
        (os.fsdecode("ü".encode() + b"\x80"), r"ü\x80"),
        ("\ud800", r"\ud800"),  # from JSON, of no file name
    ],
)
def test_bytes_that_are_not_utf_8_are_spelled_out(text: str, expected: str) -> None:
    assert printable(text) == expected
