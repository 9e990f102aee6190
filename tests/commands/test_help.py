"""Tests of `--help` and `--version`, which do not import torch."""

import re
from pathlib import Path

from helpers.command import run_command

from runner import __version__
from runner.commands.help import help_text
from runner.config.options import description, option_files, root_keys


def test_help_lists_every_option_and_every_key_with_its_description() -> None:
    lines = help_text().splitlines()
    for group, files in option_files().items():
        assert f"{group}=" in lines
        for option, path in files.items():
            assert description(path)
            assert any(line.split(maxsplit=1) == [option, description(path)] for line in lines), (group, option)
    for key in root_keys() - option_files().keys():
        assert re.search(rf"^  {key}: .*# \w", help_text(), re.MULTILINE), key
    assert max(map(len, lines)) <= 160


def test_help_lists_the_options_of_a_config_dir(tmp_path: Path) -> None:
    more = tmp_path / "more"
    (more / "model").mkdir(parents=True)
    (more / "model" / "mine.yaml").write_text("# python -m runner model=mine\n# A network of my own.\n")
    (more / "model" / "_shared.yaml").write_text("# Inherited.\n")
    code, text = run_command("--help", "-cd", str(more), cwd=tmp_path / "run", kind="no-torch")
    assert code == 0, text
    assert re.search(r"^  mine +A network of my own\.$", text, re.MULTILINE)
    assert "_shared" not in text


def test_help_lists_the_keys_of_the_chosen_options_with_those_that_they_inherit() -> None:
    text = help_text(words=["parallel=ddp", "seed=1"])
    assert "\n  processes: auto " in text
    assert "\n  bucket_mb: 25.0 " in text
    assert "bucket_mb" not in help_text()


def test_version_prints_the_version_of_this_project(tmp_path: Path) -> None:
    assert run_command("--version", cwd=tmp_path, kind="no-torch") == (0, f"runner {__version__}\n")
