"""Tests of the choice cache: a choice is found again only on the same machine, and invalid entries are ignored."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from helpers.compose import TINY_CPU, compose_config
from helpers.permissions import enforced_permissions

from runner.planning import choice_cache
from runner.planning.choice_cache import Choice, ChoiceCache, may_be_chosen
from runner.system.user_cache import cache_directory

CHOICE = Choice(["parallel=ddp", "parallel.processes=2"], 1.4, "2026-01-31")


def cache(root: Path, *typed: str) -> ChoiceCache:
    return ChoiceCache(compose_config(*TINY_CPU, *typed), typed, root=root)


def test_a_choice_is_found_again(tmp_path: Path) -> None:
    assert cache(tmp_path).read() == (None, "")
    cache(tmp_path).write(CHOICE)
    assert cache(tmp_path).read() == (CHOICE, "")


@pytest.mark.parametrize("typed", ["seed=7", "epochs=100", "steps=5", "keep=0", "how=auto", "log_every=3"])
def test_options_that_do_not_affect_the_speed_share_a_choice(typed: str, tmp_path: Path) -> None:
    cache(tmp_path).write(CHOICE)
    assert cache(tmp_path, typed).read() == (CHOICE, "")


@pytest.mark.parametrize("typed", ["batch_size=32", "precision=bf16", "parallel=ddp", "compile=false"])
def test_another_config_has_another_choice(typed: str, tmp_path: Path) -> None:
    cache(tmp_path).write(CHOICE)
    assert cache(tmp_path, typed).read() == (None, "")


def test_option_files_of_user_defined_modes_are_part_of_the_cache_key(tmp_path: Path) -> None:
    def with_modes() -> ChoiceCache:
        return ChoiceCache(compose_config(*TINY_CPU), (), str(tmp_path / "own"), tmp_path)

    (tmp_path / "own" / "parallel").mkdir(parents=True)
    cache(tmp_path).write(CHOICE)
    assert with_modes().read() == (CHOICE, "")
    for text in ("a: 1", "a: 2"):
        (tmp_path / "own" / "parallel" / "mine.yaml").write_text(text)
        assert with_modes().read() == (None, "")
        with_modes().write(CHOICE)
        assert with_modes().read() == (CHOICE, "")


@pytest.mark.parametrize(
    ("override", "is_one"),
    [
        ("parallel=my-mode", True),
        ("parallel.split_size=8", True),
        ("device.threads=1", True),
        ("device.kind=cuda", False),
        ("data.download=true", False),
        ("env.id=module:X", False),
        ("parallel=../x", False),
        ("parallelism=ddp", False),
        (3, False),
    ],
)
def test_a_choice_may_contain_only_overrides_that_affect_the_speed(override: object, is_one: bool) -> None:
    assert may_be_chosen(override) == is_one


def test_a_choice_of_another_machine_is_ignored_with_a_reason(tmp_path: Path) -> None:
    cache(tmp_path).write(CHOICE)
    with patch.object(choice_cache, "usable_core_numbers", lambda: [0] * 99):
        choice, why = cache(tmp_path).read()
    assert choice is None
    assert "cores" in why


@pytest.mark.parametrize(
    "content",
    [
        "",
        "[]",
        "{",
        '{"overrides": 3}',
        {"overrides": ["hydra.run.dir=/"]},
        {"overrides": ["output_root=/"]},
        {"overrides": ["parallel=ddp,dp"]},
        {"overrides": ["parallel=${oc.env:HOME}"]},
        {"overrides": [3]},
        {"speedup": "fast"},
        {"speedup": 10**400},
        "[" * 60_000,
    ],
)
def test_a_damaged_or_forged_choice_is_ignored_with_a_reason(content: Any, tmp_path: Path) -> None:
    entry = cache(tmp_path)
    entry.write(CHOICE)
    text = content if isinstance(content, str) else json.dumps(json.loads(entry.path.read_text()) | content)
    entry.path.write_text(text)
    choice, why = entry.read()
    assert choice is None
    assert "cached" in why


def test_an_unreadable_option_file_is_treated_as_empty(tmp_path: Path) -> None:
    file = tmp_path / "parallel" / "own.yaml"
    file.parent.mkdir()

    def path() -> Path:
        return ChoiceCache(compose_config(*TINY_CPU), (), str(tmp_path), tmp_path).path

    file.touch()
    empty = path()
    file.write_text("x: 1\n")
    assert path() != empty
    with enforced_permissions(file, 0):
        assert path() == empty


def test_a_cache_that_cannot_be_written_to_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    entry = cache(tmp_path / "file" / "below")
    with entry.lock():
        entry.write(CHOICE)
    assert entry.read()[0] is None


def test_the_cache_is_in_the_user_s_cache_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_directory("choices") == tmp_path / "runner" / "choices"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # the XDG specification says to ignore relative paths
    assert cache_directory("choices") == Path("~/.cache/runner/choices").expanduser()
