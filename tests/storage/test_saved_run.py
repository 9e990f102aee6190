"""Tests of `runner.storage.saved_run`: reading configs and overrides of runs, also damaged or malicious ones."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.permissions import enforced_permissions

from runner.config.errors import ConfigError
from runner.storage.saved_run import (
    UnreadableConfigError,
    checkpoints,
    config_text,
    directory_of,
    saved_config,
    saved_overrides,
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with checkpoints at steps 10 and 20; the run and each checkpoint have different learning rates."""
    path = tmp_path / "run"
    for step in (10, 20):
        checkpoint = path / "checkpoints" / f"step_{step:08d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "config.yaml").write_text(config_text({"lr": step}))
    (path / "config.yaml").write_text(config_text({"lr": 30}))
    return path


def test_a_run_directory_and_each_checkpoint_have_their_own_config(run: Path) -> None:
    assert saved_config(run) == ({"lr": 30}, run / "config.yaml", [])
    for step, checkpoint in zip((10, 20), checkpoints(run), strict=True):
        assert saved_config(checkpoint) == ({"lr": step}, checkpoint / "config.yaml", [])
        assert directory_of(checkpoint) == directory_of(run) == run


def test_a_damaged_config_is_replaced_by_the_newest_copy(run: Path) -> None:
    (run / "config.yaml").write_text("")
    values, file, [reason] = saved_config(run)
    assert (values, file) == ({"lr": 20}, checkpoints(run)[1] / "config.yaml")
    assert reason.startswith("config.yaml: ")
    file.write_bytes(b"\xff")
    assert saved_config(run).values == {"lr": 10}
    (checkpoints(run)[0] / "config.yaml").unlink()
    with pytest.raises(UnreadableConfigError):
        saved_config(run)


def test_checkpoints_are_in_the_order_of_their_steps_and_not_of_their_names(run: Path) -> None:
    steps = (99_999_999, 100_000_000)
    for step in steps:
        path = run / "checkpoints" / f"step_{step}"
        path.mkdir()
        (path / "config.yaml").write_text(config_text({"lr": step}))
    assert [path.name for path in checkpoints(run)[-2:]] == [f"step_{step}" for step in steps]
    (run / "config.yaml").write_text("")
    assert saved_config(run).values == {"lr": 100_000_000}


def test_a_checkpoint_without_a_config_has_that_of_its_run(run: Path) -> None:
    checkpoint = checkpoints(run)[0]
    (checkpoint / "config.yaml").unlink()
    assert saved_config(checkpoint).values == {"lr": 30}


def link_file(run: Path) -> None:
    (run / "config.yaml").rename(run.parent / "elsewhere")
    (run / "config.yaml").symlink_to(run.parent / "elsewhere")


def link_run(run: Path) -> None:
    run.rename(run.parent / "elsewhere")
    run.symlink_to(run.parent / "elsewhere")


def pipe(run: Path) -> None:
    (run / "config.yaml").unlink()
    os.mkfifo(run / "config.yaml")


def device(run: Path) -> None:
    (run / "config.yaml").unlink()
    (run / "config.yaml").symlink_to("/dev/zero")


def large(run: Path) -> None:
    with (run / "config.yaml").open("ab") as file:
        file.truncate(2_000_000_000)


@pytest.mark.parametrize("spoil", [link_file, pipe, device, large])
def test_only_regular_files_are_read(spoil: Callable[[Path], None], run: Path) -> None:
    spoil(run)
    assert saved_config(run).values == {"lr": 20}


def test_a_linked_folder_of_checkpoints_is_not_followed(run: Path) -> None:
    (run / "checkpoints").rename(run.parent / "elsewhere")
    (run / "checkpoints").symlink_to(run.parent / "elsewhere")
    (run / "config.yaml").unlink()
    with pytest.raises(UnreadableConfigError):
        saved_config(run)


@pytest.mark.parametrize("secret", ["", "checkpoints"])
def test_checkpoints_that_cannot_be_read_are_not_treated_as_missing(secret: str, run: Path) -> None:
    with enforced_permissions(run / secret, 0):
        with pytest.raises(ConfigError) as refused:
            checkpoints(run)
        assert (refused.value.key, refused.value.got) == ("checkpoint", str(run / "checkpoints"))
        assert "Permission denied" in refused.value.why
        if secret:
            assert saved_config(run) == ({"lr": 30}, run / "config.yaml", []), "they are not needed"
    if secret:
        (run / "config.yaml").write_text("")
    with (
        enforced_permissions(run / secret, 0),
        pytest.raises(UnreadableConfigError, match=r"checkpoints: .*Permission denied"),
    ):
        saved_config(run)
    assert saved_config(run).values == {"lr": 20 if secret else 30}


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"- seed=1\n- ~model", ["seed=1", "~model"]),
        (b"- a=${oc.env:HOME}", ["a=${oc.env:HOME}"]),
        (b"", []),
        (b"a: 1", []),
        (b"- [", []),
        (b"\xff", []),
        (b"[" * 5_000, []),
        (b"- !!python/object/apply:os.system [true]", []),
        (b"- 0x" + b"f" * 5_000, []),
        (b"- " + b"59:" * 1_000 + b"59.5", []),
        (b"- &a [x, x]\n- &b [*a, *a]\n", []),
    ],
)
def test_overrides_are_shown_as_they_were_typed(content: bytes, wanted: list[str], tmp_path: Path) -> None:
    (tmp_path / "overrides.yaml").write_bytes(content)
    assert saved_overrides(tmp_path) == wanted


def test_a_missing_file_of_overrides_is_read_as_empty(tmp_path: Path) -> None:
    assert saved_overrides(tmp_path) == []
