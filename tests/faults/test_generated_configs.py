"""Tests with generated commands and option files (`RUNNER_FAULTS=all`: thousands): each builds a run, or is refused."""

import io
import re
import string
import sys
import tempfile
import unicodedata
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import yaml
from helpers.dry_run import globals_restored
from helpers.faults import RUN_ALL_FAULTS as ALL
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from runner.commands.train import main as run_command
from runner.config.errors import WIDTH
from runner.config.options import groups_in_defaults, option_files, option_keys, root_keys
from runner.result import Result
from runner.system.secrets import printable

COMMANDS, FILES = (2000, 1000) if ALL else (8, 6)


def generated(count: int) -> settings:
    """Return Hypothesis settings for `count` examples: random ones with `RUNNER_FAULTS=all`, otherwise fixed ones."""
    phases = (Phase.explicit, Phase.generate, Phase.shrink) if ALL else (Phase.explicit, Phase.generate)
    checks = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]
    fixed: Any = {"max_examples": count, "derandomize": not ALL, "phases": phases, "suppress_health_check": checks}
    return settings(database=None, deadline=None, **fixed)


class Outcome(NamedTuple):
    code: int
    num_runs: int
    err: str
    left: set[Path]


def outcome(words: list[str], option_file: bytes = b"") -> Outcome:
    """Run the command, up to training, in a new directory with the option file `mine/local/default.yaml`."""
    built: list[Any] = []

    def train(run: Any, *rest: Any, **more: Any) -> Result:
        built.append(run)
        return Result("done")

    out, err = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as directory, chdir(directory), globals_restored():
        Path("mine/local").mkdir(parents=True)
        Path("mine/local/default.yaml").write_bytes(option_file)
        before = set(Path().rglob("*"))
        with (
            redirect_stdout(out),
            redirect_stderr(err),
            mock.patch("runner.api.run_job.run_one", train),
            mock.patch.object(sys, "argv", ["runner"]),
        ):
            code = run_command(words)
        return Outcome(code, len(built), err.getvalue(), set(Path().rglob("*")) - before)


DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def assert_built_or_refused(result: Outcome, keys: set[str]) -> None:
    """Assert that the config was built, or refused with a few printable lines that name one of `keys`."""
    assert result.left == set(), "something is left behind"
    assert "Traceback" not in result.err, result.err
    assert result.code in (0, 2), result.err
    lines = result.err.strip().splitlines()
    assert len(lines) <= 10, result.err
    characters = set("".join(lines))
    assert not {unicodedata.category(c) for c in characters} & {"Cc", "Cs", "Zl", "Zp"}, "they control a terminal"
    assert not {unicodedata.bidirectional(c) for c in characters} & DIRECTIONS, "they change the text direction"
    assert all(len(line) <= WIDTH for line in lines), result.err
    if result.code == 2:
        parts = [part for key in keys for part in (*re.split("[.@]", key), key)]
        named = [f"{key}{end}" for key in keys for end in ":="]
        named += [printable(part[:60]) for part in parts if len(part) > 1]
        assert any(part in result.err for part in named), f"none of {keys}: {result.err}"


GROUPS = {group: [*files] for group, files in option_files().items()}
OPTIONS = [f"{group}={option}" for group, options in GROUPS.items() for option in options]
ROOT_KEYS = sorted(root_keys() - groups_in_defaults())
OPTION_OF = {f"{g}.{key}": f"{g}={o}" for g in GROUPS for o, keys in option_keys(g).items() for key in keys}
KEYS = sorted(OPTION_OF)
"""For each key of an option, an option that has it."""

UNKNOWN = [
    *("hydra.run.dir", "hydra.job.env_set.X", "hydra/launcher", "hydra", "hydra/x@y", "hydra.launcher._target_"),
    *("sed", "seed.x", "optimizer.lrr", "optimizer..lr", "model@x", "0seed", "é", "optimizer/lr"),
]
FLAGS = [
    *("--cfg job", "--cfg=hydra", "--cfg all", "--cfg", "--info", "--info searchpath", "--resolve", "-p optimizer"),
    *("--cfg job --resolve", "--config-dir=nowhere", "--config-dir=", "-cn x", "-cp x", "--experimental-rerun x"),
    *("-r", "--nope", "-", "--", "-x=1", "--seed=1", "--cfg job -p nope"),
]
TEXTS = st.text(
    st.one_of(
        st.sampled_from("'\"[]{}(),:=${}\\~+@/.- \t\n\r\x00\x1b\x07\u202e#%&*!?|<>^`"),
        st.sampled_from(string.ascii_letters + string.digits),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=12,
)
NUMBERS = st.one_of(
    st.integers(-3, 100).map(str),
    st.integers(-(10**30), 10**30).map(str),
    st.floats().map(str),
    st.sampled_from(["016", "12:30", "1_000", "0x10", "1e3", "1.10", "+5", "-0", ".5", "5.", "1e400", "0b1"]),
)
UNUSUAL_VALUES = [
    *("", "null", "None", "true", "'5'", '"5"', "???", "~nouser/x", "../x", "/", "x" * 300, "/x/" + "y" * 300),
    *("${seed}", "${nope}", "${oc.env:HOME}", "${oc.env:NOPE}", "${now:%Y}", "${hydra:job.name}", "${a", "${}"),
    *("${.}", "[]", "{}", "[16]", "[[1]]", "{a:1}", "{a: {b: 1}}", "[1,a,null]", "[" * 30, "[" * 15 + "]" * 15, "()"),
    *("a()", "range(3)", "interval(0,1)", "choice(1,2)", "glob(*)", "shuffle(1,2)", "int(3)", "str(3)", "tag(a,1)"),
    *("sort(3,1)", "\x1b[31mred", "a\nb", "a b", "a,b", "1,2", "a=b", "it's", 'a"b', "ü", "日本", "\\", "\\'", "'a"),
    *("a'", "%s", "{0}", "os.system", "runner.optimizer.SGD", "torch.load", "__import__('os')", "y" * 5000),
]
VALUES = st.one_of(TEXTS, NUMBERS, st.sampled_from(UNUSUAL_VALUES))
PREFIXES = st.sampled_from(["", "", "", "", "+", "++", "~"])


@st.composite
def command_lines(draw: st.DrawFn) -> list[str]:
    """Draw a few arguments: options, keys with all kinds of values, misspelled keys, keys of Hydra, and flags."""
    words: list[str] = []
    for _ in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        kind = draw(st.integers(0, 9))
        if kind <= 3:
            key = draw(st.sampled_from(KEYS))
            if draw(st.integers(0, 3)) and not any(word.startswith(f"{key.partition('.')[0]}=") for word in words):
                words.append(OPTION_OF[key])
            words.append(f"{draw(PREFIXES)}{key}={draw(VALUES)}")
        elif kind <= 5:
            words.append(f"{draw(PREFIXES)}{draw(st.sampled_from(ROOT_KEYS))}={draw(VALUES)}")
        elif kind == 6:
            group = draw(st.sampled_from(sorted(GROUPS)))
            values = st.one_of(st.sampled_from(GROUPS[group]), VALUES)
            words.append(f"{draw(PREFIXES)}{group}={draw(values)}")
        elif kind == 7:
            words.append(f"{draw(PREFIXES)}{draw(st.sampled_from(UNKNOWN))}={draw(VALUES)}")
        elif kind == 8:
            words.append(draw(st.sampled_from(OPTIONS)))
        else:
            words += draw(st.sampled_from(FLAGS)).split(" ")
    return words


def keys_of(words: list[str]) -> set[str]:
    """Return the keys and flags in `words`, one of which an error message must name."""
    keys = {re.split("[=\n]", word)[0].lstrip("+~").partition("@")[0] for word in words}
    return {key for key in keys if key} | {word.partition("\n")[0] for word in words}


@generated(COMMANDS)
@given(command_lines())
def test_a_command_line_builds_a_run_or_is_refused_by_its_key(words):
    assert_built_or_refused(outcome(words), keys_of(words))


def test_the_check_distinguishes_valid_and_invalid_command_lines():
    """The test above relies on this: valid runs are built, and invalid ones are refused with the right key."""
    assert outcome(["seed=3"])[:2] == (0, 1)
    assert outcome(["seed=x"])[:2] == (2, 0)
    with pytest.raises(AssertionError):
        assert_built_or_refused(outcome(["seed=x"]), {"steps"})


SNIPPETS = [
    *("seed: 016", "seed: 12:30", "name: yes", "name: 2020-01-01", "seed: !!binary aGk=", "seed: &a [*a]", "seed: ["),
    *("name: !!python/object/apply:os.system [ls]", "!!set {seed}", "seed: 1\nseed: 2", "\tseed: 1", "- a", "5", ""),
    *("---\n---\n", "? [a]\n: 1", "hydra: 3", "hydra: {callbacks: {a: {_target_: os.system}}}", "defaults: 3"),
    *("defaults:\n  - override /hydra/job_logging: default", "defaults: [nope]", "defaults: [/model: tiny]", "1: 2"),
    *("defaults: [{a: {b: c}}]", "optimizer: 3", "optimizer: {lrr: 1}", "model: null", 'name: "\\e[31m"', "a.b: 1"),
    *("seed: " + "[" * 2000, "seed: " + "9" * 5000, "seed: ${nope}", "<<: 3", "seed: ${", "# @package a b c d"),
]
NUMBERS_AND_LISTS = (st.booleans(), st.integers(), st.floats(), st.lists(st.integers(), max_size=3))
PLAIN = st.one_of(st.none(), TEXTS.filter(str.isprintable), *NUMBERS_AND_LISTS)


@st.composite
def yaml_files(draw: st.DrawFn) -> bytes:
    """Draw the content of the option file `local/default.yaml`."""
    if draw(st.booleans()):
        content = draw(st.sampled_from(SNIPPETS)).encode()
    elif draw(st.booleans()):
        content = draw(st.binary(max_size=40))
    else:
        nested: dict[str, Any] = {}
        for key in draw(st.lists(st.sampled_from([*KEYS, *ROOT_KEYS]), min_size=1, max_size=3)):
            group, _, name = key.rpartition(".")
            (nested.setdefault(group, {}) if group else nested)[name] = draw(PLAIN)
        content = yaml.safe_dump(nested, allow_unicode=True).encode()
    return b"# @package _global_\n" * draw(st.booleans()) + content


@generated(FILES)
@given(yaml_files())
def test_an_option_file_builds_a_run_or_is_refused_by_its_key_or_name(content):
    words = re.findall(r"[\w.]+|<<", content.decode(errors="ignore"))
    assert_built_or_refused(outcome(["--config-dir=mine"], content), {"local", *words})
