"""Paired values of a sweep: `pairs=zip(optimizer=[sgd,adam],optimizer.lr=[0.1,0.001])` gives two jobs, not four.

The syntax is the one that Hydra has proposed for a later version (docs/design/zipped_sweeps.md in its repository).
"""

from __future__ import annotations

import re

from runner.config.errors import check

_ZIP = re.compile(r"(?P<name>[\w.-]+)=zip\((?P<members>.*)\)", re.DOTALL)
_MEMBER = re.compile(r"(?P<key>[+]{0,2}[\w./@-]+)=(?P<value>.*)", re.DOTALL)
_LIST = re.compile(r"(?:\[|choice\()(?P<values>.*)[\])]", re.DOTALL)
_OPEN, _CLOSE, _QUOTES = "([{", ")]}", "'\""
_EXAMPLE = "'pairs=zip(optimizer=[sgd,adam],optimizer.lr=[0.1,0.001])'"


def parse_zip(word: str) -> tuple[str, list[str]] | None:
    """Parse `NAME=zip(…)`: `pairs=zip(a=[1,2],b=choice(3,4))` gives `("pairs", ["a=1,2", "b=3,4"])`, others None.

    Raises:
        ConfigError: if fewer than two keys are paired, a key is paired twice, or a value is not a list.
    """
    found = _ZIP.fullmatch(word)
    if found is None:
        return None
    members, value = [], word.partition("=")[2]
    for text in _split(found["members"]):
        member = _MEMBER.fullmatch(text.strip())
        check(
            member is not None, found["name"], value, f"'{text.strip()}' is not of the form KEY=[VALUE,VALUE]", _EXAMPLE
        )
        assert member is not None
        values = _LIST.fullmatch(member["value"])
        listed = member["value"] if values is None else values["values"]
        nested = "zip(" in listed
        is_list = not nested and (values is not None or listed.startswith(("range(", "sort(")))
        check(is_list, found["name"], value, f"{member['key']} has no list of values", _EXAMPLE)
        members.append((member["key"], listed))
    check(len(members) > 1, found["name"], value, "it pairs fewer than two keys", _EXAMPLE)
    keys = [key.lstrip("+") for key, _ in members]
    check(len(set(keys)) == len(keys), found["name"], value, "a key is in it twice", _EXAMPLE)
    return found["name"], [f"{key}={values}" for key, values in members]


def _split(text: str) -> list[str]:
    """Split `text` at the commas that are not inside brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in _QUOTES:
            quote = character
        depth += (character in _OPEN) - (character in _CLOSE) if not quote else 0
        if character == "," and not depth and not quote:
            parts.append("")
        else:
            parts[-1] += character
    return parts
