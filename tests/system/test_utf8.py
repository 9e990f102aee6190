"""Tests of `printable`, which escapes text that UTF-8 cannot encode or that would control a terminal."""

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
        ("\ud800", r"\ud800"),  # JSON can contain it, but no file name
        ("\x1b]0;title\x07", r"\x1b]0;title\x07"),
        ("a\x9b31m\x7f\0", r"a\x9b31m\x7f\x00"),  # \x9b alone starts an escape sequence (C1)
        ("a\rb\vc\x85\u2028d", r"a\rb\x0bc\x85\u2028d"),
        ("\u202egnp.exe", r"\u202egnp.exe"),
        (os.fsdecode(b"\xff\x1b"), r"\xff\x1b"),
        ("a\tb\nc \xa0\u3000", "a\tb\nc \xa0\u3000"),
    ],
)
def test_bytes_that_are_not_utf_8_and_control_characters_are_escaped(text: str, expected: str) -> None:
    assert printable(text) == expected
