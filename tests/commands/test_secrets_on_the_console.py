"""Tests that secrets are removed from error messages, which end up in the logs of clusters and CI."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.command import run_command
from helpers.compose import TINY_CPU

from runner.commands.arguments import report_error
from runner.config.errors import ConfigError


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (ConfigError("data.token", "s3cret", "it is too short", "data.token=TOKEN"), 2, "data.token: got '***': it is"),
        (OSError("https://ann:s3cret@host/x: no answer"), 1, "OSError: https://ann:***@host/x: no answer"),
    ],
)
def test_secrets_in_errors_are_masked(
    error: Exception, code: int, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_error(error) == code
    said = capsys.readouterr().err
    assert words in said
    assert "s3cret" not in said


def test_secrets_in_the_overrides_of_a_sweep_are_neither_printed_nor_written(tmp_path: Path) -> None:
    secret = ("data=synthetic", "+data.token=s3cret", "seed=1,2", "steps=1")
    code, console = run_command(*TINY_CPU, "-m", *secret, "name=https://ann:s3cret@host", cwd=tmp_path)
    assert code == 2, console  # there is no such option
    assert "***" in console
    assert "s3cret" not in console
    for path in tmp_path.rglob("*"):
        assert "s3cret" not in path.name
        assert path.name == "console.txt" or not path.is_file() or b"s3cret" not in path.read_bytes(), path
