"""Tests of `runner.config.yaml_file`: it reads plain values, and refuses all other values."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from runner.config.errors import ABSENT, ConfigError
from runner.config.options import CONF
from runner.config.yaml_file import plain_values, read_config, yaml_text


def read(directory: Path, content: str | bytes) -> dict:
    path = directory / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return OmegaConf.to_container(read_config(path))  # pyright: ignore[reportReturnType]


@pytest.mark.cases(
    ("0", 0),
    ("-3", -3),
    ("1_000", 1000),
    ("0.5", 0.5),
    ("1e3", 1000.0),
    ("1.5e-3", 0.0015),
    ("-.5", -0.5),
    (".inf", float("inf")),
    ("true", True),
    ("null", None),
    ("'016'", "016"),
    ("2020-01-01", "2020-01-01"),
    ("${seed}", "${seed}"),
    ("[1, [a, 0.5]]", [1, ["a", 0.5]]),
    ("{a: {b: 1}}", {"a": {"b": 1}}),
    *((text, text) for text in ("016", "-016", "00", "12:30", "1:30:00", "0x10", "0b11", "01.5", "1:30.5", "0_1")),
)
def test_plain_values_are_read_with_the_numbers_of_the_command_line(text, value, tmp_path):
    assert read(tmp_path, f"# a comment\nseed: {text}\n") == {"seed": value}


@pytest.mark.cases(
    *("seed: [", "\tseed: 1", "seed: 1\nseed: 2", "a: *x", "- 1", "text", "3", "!!set {a}", "---\n---\n", "? [a]"),
    *(b"seed: \xff", b"seed: \x00", "a: " + "[" * 3000, "a: ${", "a: ${b", "seed: !!set {x, y}", "seed: &x [*x]"),
    *("seed: !!binary aGk=", "name: !!python/object/apply:os.system [ls]", "a: {b: !own 1}", "a: &x [1]\nb: *x"),
    *("a: {1: 2}", "a: {'': 2}", "a: {? [x] : 2}"),
)
def test_a_file_with_anything_but_plain_values_is_refused_by_its_path(content, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        read(tmp_path, content)
    assert (refusal.value.key, refusal.value.got) == ("mine.yaml", ABSENT)
    assert len(str(refusal.value).splitlines()) == 2
    with pytest.raises(ConfigError) as refusal:
        read_config(tmp_path)
    assert refusal.value.key == "."


def test_an_empty_file_and_all_of_conf_are_read(tmp_path):
    assert read(tmp_path, "# nothing\n") == {}
    for path in CONF.rglob("*.yaml"):
        assert read_config(path) == OmegaConf.load(path), path


@pytest.mark.parametrize("text", ["1e-3", "016", "on", "null", "12:30", "1_0", "2020-01-01", "a: b", "#a", "'", "${a}"])
def test_a_text_is_read_as_it_was_written(text):
    values = {"key": text, "list": [text, [1, 2.5e-7, None, True]]}
    assert plain_values(yaml_text(values), "file") == values
    assert OmegaConf.to_container(OmegaConf.create(yaml_text(values))) == values
