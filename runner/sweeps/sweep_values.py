"""The values of one override of a sweep, as overrides of its jobs.

Paired values, as in `pairs=zip(optimizer=[sgd,adam],optimizer.lr=[0.1,0.001])`, have the syntax that Hydra has proposed
for a later version (docs/design/zipped_sweeps.md in its repository).
"""

from __future__ import annotations

import fnmatch
import glob
import math
import os
import re
from collections.abc import Callable

from hydra.core.override_parser.types import Glob, IntervalSweep, Override, RangeSweep

from runner.config.errors import ConfigError, check
from runner.config.options import groups_in_defaults
from runner.config.overrides import hydra_quoted, override_key, quoted
from runner.config.user_code import is_file
from runner.sweeps.search_space import Interval

_ZIP = re.compile(r"(?P<name>[\w.-]+)=zip\((?P<members>.*)\)", re.DOTALL)
_NEXT_MEMBER = re.compile(r",\s*(?=[+]{0,2}[\w./@-]+=)")
_MEMBER = re.compile(r"(?P<key>[+]{0,2}[\w./@-]+)=\[(?P<values>.*)\]", re.DOTALL)
_ESCAPED_REFERENCE = re.compile(r"\$\\\{.*?\\\}")
_EXAMPLE = "'pairs=zip(optimizer=[sgd,adam],optimizer.lr=[0.1,0.001])'"


def parse_zip(word: str) -> tuple[str, list[str]] | None:
    """Parse `NAME=zip(…)`: `pairs=zip(a=[1,2],b=[3,4])` gives `("pairs", ["a=1,2", "b=3,4"])`, others None.

    Raises:
        ConfigError: if fewer than two keys are paired, or a value is not a list.
    """
    found = _ZIP.fullmatch(word)
    if found is None:
        return None
    name, value = found["name"], word.partition("=")[2]
    members = {}
    for text in _NEXT_MEMBER.split(found["members"]):
        member = _MEMBER.fullmatch(text.strip())
        if member is None:
            raise ConfigError(name, value, f"{text.strip()!r} is not of the form KEY=[VALUE,VALUE]", _EXAMPLE)
        key = member["key"].lstrip("+")
        check(key not in members, name, value, f"{key} is in it twice", "leave one out")
        members[key] = f"{member['key']}={member['values']}"
    check(len(members) > 1, name, value, "it pairs fewer than two keys", _EXAMPLE)
    return name, list(members.values())


def interval_of(key: str, typed: str, value: IntervalSweep) -> Interval:
    """Return the interval that is `typed` for `key`; raise a `ConfigError` if it cannot be searched."""
    low, high, log = value.start, value.end, "log" in value.tags
    remedy = f"{key}=interval(LOW,HIGH) with LOW < HIGH, or {key}=tag(log,interval(1e-4,1))"
    if not (isinstance(low, int | float) and isinstance(high, int | float) and -math.inf < low < high < math.inf):
        raise ConfigError(key, typed, "the interval is empty or not finite", remedy)
    check(value.tags <= {"log"}, key, typed, "the only tag of an interval is log", remedy)
    check(low > 0 or not log, key, typed, "a logarithm needs values above 0", remedy)
    return Interval(low, high, log, isinstance(low, int) and isinstance(high, int))


def words_of(override: Override, has_group: Callable[[str], bool]) -> list[list[str]]:
    """Return a list of one override for each value: `lr=1,2` gives `[["lr=1"], ["lr=2"]]`.

    `has_group` tells whether a key is a config group, of which a glob lists options; of others, it lists files.

    Raises:
        ConfigError: if a range is not one of numbers, or a glob matches no file.
    """
    if not override.is_sweep_override():
        return [[str(override.input_line)]]
    key, value = override.get_key_element(), override.value()
    typed = str(override.input_line).partition("=")[2]
    if isinstance(value, RangeSweep):
        why = "a range needs numbers, and a step that is not 0"
        raise ConfigError(key, typed, why, f"{key}=range(0,10,1)")
    if isinstance(value, Glob) and not has_group(override_key(key)):
        return [[f"{key}={hydra_quoted(path)}"] for path in _files(key, typed, value)]
    words = [
        _ESCAPED_REFERENCE.sub(lambda found: found[0].replace("\\", ""), f"{key}={value}")  # as it was typed
        for value in override.sweep_string_iterator()
    ]
    unescaped = [word.replace("\\:", ":") for word in words]
    # An option may be a number, of which Hydra knows only the name
    return [
        [plain if is_file(plain) else quoted(word, sweep=False) if override_key(word) in groups_in_defaults() else word]
        for plain, word in zip(unescaped, words, strict=True)
    ]


def _files(key: str, typed: str, value: Glob) -> list[str]:
    """Return the sorted paths of the files that match the patterns of `KEY=glob(PATTERN)`."""
    found = {path for pattern in value.include for path in glob.glob(os.path.expanduser(pattern), recursive=True)}
    paths = sorted(path for path in found if not any(fnmatch.fnmatch(path, each) for each in value.exclude))
    check(bool(paths), key, typed, "no file matches it", f"{key}='glob(DIR/*.csv)', relative to the current directory")
    return paths
