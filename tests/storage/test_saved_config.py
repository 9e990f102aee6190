"""Tests of `runner.storage.saved_run`: a config is read as it was written, and only plain values are accepted."""

from __future__ import annotations

import hashlib
import time
from typing import Any

import pytest

from runner.storage.saved_run import UnreadableConfigError, config_text, parse_config

STRINGS = ["1e-3", "016", "on", "12:30", "a: b", "- a", "", " a ", "ü", "x\ty", "a\nb", "#a", '"', "\\"]
CONTROLS = ["\x85\u2028", "a\udcffb", "\x1b[31m", "\ufeffa", "\x00"]


@pytest.mark.parametrize("text", [*STRINGS, *CONTROLS])
def test_a_string_is_read_as_it_was_written(text: str) -> None:
    config = {"key": text, "node": {"list": [text, 1, None]}}
    assert parse_config(config_text(config).encode()) == config


@pytest.mark.parametrize("value", [0, -3, 2**63, 1e-3, 1e300, float("inf"), True, None, [], [1, [2.5]], {"a": {}}])
def test_a_value_is_read_as_it_was_written_with_its_type(value: Any) -> None:
    saved = parse_config(config_text({"key": value}).encode())["key"]
    assert (saved, type(saved)) == (value, type(value))


@pytest.mark.parametrize("change", [("0.2", "0.3"), ("steps: 60\n", ""), ("60", "61")])
def test_any_change_is_found(change: tuple[str, str]) -> None:
    text = config_text({"optimizer": {"lr": 0.2}, "steps": 60})
    assert change[0] in text
    with pytest.raises(UnreadableConfigError, match="SHA-256"):
        parse_config(text.replace(*change).encode())


def test_a_truncated_file_is_refused() -> None:
    text = config_text({"optimizer": {"lr": 0.2}, "steps": 60})
    for length in range(len(text) - 1):
        with pytest.raises(UnreadableConfigError):
            parse_config(text[:length].encode())


def sealed(content: bytes) -> bytes:
    return content + b"\n# sha256 of the lines above: " + hashlib.sha256(content + b"\n").hexdigest().encode()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[]",
        b"a: 1\na: 2",
        b"\xff\xfe",
        b"a: !!python/object/apply:os.system [true]",
        b"a: &x [*x]",
        b"[" * 100_000,
        b"a: " + b"{b: " * 5_000,
        b"a: " + b"9" * 5_000,
        b"a: " + b"59:" * 300 + b"59.5",
    ],
    ids=lambda content: content[:20].decode(errors="replace"),
)
def test_anything_but_plain_values_is_refused(content: bytes) -> None:
    with pytest.raises(UnreadableConfigError):
        parse_config(content if content == b"\xff\xfe" else sealed(content))


@pytest.mark.parametrize(
    "content",
    [b"a: " + b"59:" * 330_000 + b"59", b"a: " + b"{b: 1, " * 140_000, b"a: &x [1]\nb: [" + b"*x, " * 200_000 + b"]"],
    ids=["sexagesimal", "deep", "repeated"],
)
def test_a_file_of_a_megabyte_is_refused_in_seconds(content: bytes) -> None:
    begun = time.process_time()
    with pytest.raises(UnreadableConfigError):
        parse_config(sealed(content))
    assert time.process_time() - begun < 5  # the first two took a minute


def test_a_config_may_have_long_texts_and_lists() -> None:
    config = {"a": "5" * 5_000, "b": ":".join(["59"] * 1_000), "c": 10**300, "d": list(range(5_000))}
    assert parse_config(config_text(config).encode()) == config


def test_an_error_has_no_escape_codes_of_the_file() -> None:
    with pytest.raises(UnreadableConfigError) as error:
        parse_config(sealed(b"a: !<tag:%1b]0;title%07> b"))
    assert "!!tag:\\x1b]0;title\\x07" in str(error.value)
