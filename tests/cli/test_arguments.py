"""Tests of `runner.cli.arguments`, which checks, reorders and quotes the command line before Hydra parses it."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.command import ROOT
from hydra.core.override_parser.overrides_parser import OverridesParser

from runner.cli import arguments
from runner.config.errors import ABSENT, ConfigError
from runner.config.options import CONF, groups


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("precision=16", "precision='16'"),
        ("tracking=-5.0e+16", "tracking='-5.0e+16'"),
        ("tracking=true,.5", "tracking='true','.5'"),
        ("precision=bf16", "precision=bf16"),
        ("precision=16,32,bf16", "precision='16','32',bf16"),
        ("+accumulation=4", "+accumulation='4'"),
        ("accumulation.steps=4", "accumulation.steps=4"),
        ("debug=null", "~debug"),
        ("seed=1", "seed=1"),
        ("name=a b", "name='a b'"),
        ("name=it's", r"name='it\'s'"),
        ("name=${seed}-x", "name=${seed}-x"),
        ("name='a,b'", "name='a,b'"),
        ("output_root=/a b/ü=,c", "output_root='/a b/ü=,c'"),
        ("resume=outputs/a/000-seed=1,lr=2", "resume='outputs/a/000-seed=1,lr=2'"),
        ("schedule.milestones=[0.5,0.7]", "schedule.milestones=[0.5,0.7]"),
        ("data.inputs=[1_0, 1.10 ,on,null,'007',a b]", "data.inputs=['1_0', '1.10' ,on,'null','007',a b]"),
        ("data.file=my table (1).csv", "data.file='my table (1).csv'"),
        ("~seed", "~seed"),
        ("-m", "-m"),
    ],
)
def test_values_are_quoted_for_hydra(typed: str, wanted: str) -> None:
    assert arguments.quoted(typed, sweep=False) == wanted


def test_a_comma_separates_values_in_a_sweep_and_is_text_in_a_single_run() -> None:
    assert arguments.quoted("name=a b,c", sweep=True) == "name='a b',c"
    assert arguments.quoted("model.weights=ü.pt,null", sweep=True) == "model.weights='ü.pt',null"
    assert arguments.quoted("optimizer.lr=0.1,0.2", sweep=True) == "optimizer.lr=0.1,0.2"
    assert arguments.quoted("data.inputs=[1_0],[10]", sweep=True) == "data.inputs=['1_0'],['10']"
    assert arguments.quoted("name=a b,c", sweep=False) == "name='a b,c'"


@pytest.mark.parametrize(
    ("typed", "values"),
    [
        ("model.weights=choice(a.pt,b.pt)", ["a.pt", "b.pt"]),
        ("data.root=sort(y,x)", ["x", "y"]),
        ("output_root=sort(choice(b,a),reverse=true)", ["b", "a"]),
        ("name=range(1,3)", ["1", "2"]),
    ],
)
def test_hydra_functions_expand_to_the_values_of_a_sweep(typed: str, values: list[str]) -> None:
    [override] = OverridesParser.create().parse_overrides([arguments.quoted(typed, sweep=True)])
    assert list(override.sweep_string_iterator()) == values


def test_a_hydra_function_is_quoted_as_text_in_a_single_run() -> None:
    assert arguments.quoted("data.root=sort(y,x)", sweep=False) == "data.root='sort(y,x)'"


def test_a_tilde_at_the_beginning_of_a_path_is_expanded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/me")
    assert arguments.quoted("output_root=~/runs", sweep=False) == "output_root=/me/runs"
    assert arguments.quoted("name=~", sweep=False) == "name='~'"


@pytest.mark.parametrize(
    ("typed", "ordered"),
    [
        (["seed=1", "-m", "a=1"], ["seed=1", "a=1", "-m"]),
        (["--cfg", "job", "seed=1"], ["seed=1", "--cfg", "job"]),
        (["--info", "seed=1"], ["seed=1", "--info"]),
        (["--config-dir", "x=y", "a=1"], ["a=1", "--config-dir", "x=y"]),
        (["--config-dir", "x", "a=1", "-m"], ["a=1", "--config-dir", "x", "-m"]),
    ],
)
def test_overrides_are_moved_before_flags(typed: list[str], ordered: list[str]) -> None:
    assert arguments.overrides_first(typed) == ordered


def test_overridden_keys_and_override_value() -> None:
    words = ["seed=1", "++optimizer.lr=2", "~debug", "precision=16", "-m", "--cfg", "job"]
    assert arguments.overridden_keys(words) == {"seed", "optimizer.lr", "debug", "precision"}
    assert arguments.override_value(["resume=a", "seed=1", "resume='b c'"], "resume") == "b c"
    assert arguments.override_value(["seed=1"], "resume") is None


@pytest.mark.parametrize("value", ["1.10", "1e-3", "016", "1_000", "0x10", "true", "False", "inf", "nan", "-0", ".5"])
def test_text_options_keep_exactly_what_was_typed(value: str) -> None:
    for key in ("name", "output_root", "data.root"):
        [override] = OverridesParser.create().parse_overrides([arguments.quoted(f"{key}={value}", sweep=False)])
        assert (override.value(), type(override.value())) == (value, str)
    [override] = OverridesParser.create().parse_overrides([arguments.quoted(f"name={value},x", sweep=True)])
    assert list(override.sweep_string_iterator()) == [f"'{value}'", "x"] or value in ("016", "0x10")


def test_null_and_interpolations_are_not_quoted() -> None:
    assert arguments.quoted("model.weights=null", sweep=False) == "model.weights=null"
    assert arguments.quoted("name=${seed}", sweep=False) == "name=${seed}"


@pytest.mark.parametrize(
    "word",
    [
        "model.weights=~nobody-of-this-name/x.pt",
        "output_root=~nobody-of-this-name",
        "model.weights=" + "x" * 300 + ".pt",
        "data.root=/a/" + "ü" * 128,
        "output_root=" + "a/" * 2100,
    ],
)
def test_an_invalid_path_is_refused_with_its_key(word: str) -> None:
    key, _, value = word.partition("=")
    with pytest.raises(ConfigError) as refusal:
        arguments.quoted(word, sweep=False)
    assert (refusal.value.key, refusal.value.got) == (key, value)


@pytest.mark.parametrize("value", ["~nobody-of-this-name", "x" * 300, "a\0b"])
def test_an_invalid_path_to_resume_is_refused_with_its_key(value: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        arguments.resumed([f"resume={value}"])
    assert (refusal.value.key, refusal.value.got) == ("resume", value)


@pytest.mark.parametrize(
    "word",
    [
        "model.channels=" + "[" * 21 + "]" * 21,
        "seed=" + "9" * 301,
        "optimizer.lr=1" + "0" * 4400,
        "model.channels=[1," + "7" * 400 + "]",
        "foo=" + "x" * 100_001,
        "model=../x",
        "model=/etc/passwd",
        "+optimizer=~/x",
        "workload=a/../b",
    ],
)
def test_oversized_values_and_paths_as_option_names_are_refused_with_their_key(word: str) -> None:
    key, _, value = word.partition("=")
    with pytest.raises(ConfigError) as refusal:
        arguments.overrides_first(["seed=1", word])
    assert (refusal.value.key, refusal.value.got) == (key, value)
    assert max(map(len, str(refusal.value).splitlines())) <= 200


def test_values_just_within_the_limits_are_accepted() -> None:
    words = ["model.channels=" + "[" * 20 + "]" * 20, "seed=" + "9" * 300, "name=" + "9" * 500, "model=sub/mine"]
    assert arguments.overrides_first(words) == words


def test_groups_are_the_folders_of_conf_with_numeric_options_in_order() -> None:
    assert groups()["accumulation"] == ["1", "2", "4", "8", "16", "auto"]
    assert set(groups()) == {path.parent.name for path in CONF.glob("*/*.yaml")}


@pytest.mark.parametrize(
    ("typed", "value"),
    [
        (["--config-dir", "x", "a=1"], "x"),
        (["a=1", "--config-dir=y"], "y"),
        (["-cd", "z"], "z"),
        (["--config-dir"], None),
        (["--config-dir=x", "-cd", "y"], "y"),
        (["config-dir=x"], None),
    ],
)
def test_the_value_of_a_flag(typed: list[str], value: str | None) -> None:
    assert arguments.flag_value(typed, "--config-dir", "-cd") == value


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_resumed_returns_the_directory_that_resume_names(prefix: str, tmp_path: Path) -> None:
    assert arguments.resumed(["seed=1"]) is None
    assert arguments.resumed([f"{prefix}resume=auto"]) is None
    assert arguments.resumed([f"{prefix}resume={tmp_path}"]) == tmp_path
    assert arguments.resumed(["resume=auto", f"{prefix}resume={tmp_path}"]) == tmp_path, "the last one counts"
    assert arguments.resumed([f"~resume={tmp_path}"]) is None, "it deletes the key"
    with pytest.raises(ConfigError) as refusal:
        arguments.run_directory([f"--run-directory={tmp_path}/new", f"{prefix}resume={tmp_path}"], is_sweep=False)
    assert refusal.value.key == "--run-directory"
    with pytest.raises(ConfigError) as refusal:
        arguments.resumed([f"resume={tmp_path}/absent"])
    assert (refusal.value.key, refusal.value.got) == ("resume", f"{tmp_path}/absent")


def test_a_misspelled_flag_suggests_the_nearest_one() -> None:
    with pytest.raises(ConfigError) as refusal:
        arguments.overrides_first(["--run-directry=x"])
    assert (refusal.value.key, refusal.value.remedy) == ("--run-directry", "did you mean --run-directory?")


def test_flags_are_checked_but_not_values_that_look_like_flags() -> None:
    with pytest.raises(ConfigError) as refusal:
        arguments.overrides_first(["--nope=3"])
    assert (refusal.value.key, refusal.value.got) == ("--nope", ABSENT)
    assert arguments.overrides_first(["name=--nope"]) == ["name=--nope"]
    assert CONF == ROOT / "conf"
