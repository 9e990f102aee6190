"""Tests of `--help` and `--version`, which do not import torch."""

import re
import subprocess
from pathlib import Path

import pytest
from helpers.command import run_command

import runner.commands
from runner import __version__
from runner.commands import COMMANDS
from runner.commands.help import help_text
from runner.config.errors import ConfigError
from runner.config.options import description, option_files, root_keys


def test_help_lists_every_option_and_every_key_with_its_description():
    lines = help_text().splitlines()
    for group, files in option_files().items():
        assert f"{group}=" in lines
        for option, path in files.items():
            assert description(path)
            assert any(line.split(maxsplit=1) == [option, description(path)] for line in lines), (group, option)
    for key in root_keys() - option_files().keys():
        assert re.search(rf"^  {key}: .*# \w", help_text(), re.MULTILINE), key
    assert max(map(len, lines)) <= 160


def test_help_lists_the_options_of_a_config_dir(tmp_path):
    more = tmp_path / "more"
    (more / "model").mkdir(parents=True)
    (more / "model" / "mine.yaml").write_text("# python -m runner model=mine\n# A network of my own.\n")
    (more / "model" / "_shared.yaml").write_text("# Inherited.\n")
    code, text = run_command("--help", "-cd", str(more), cwd=tmp_path / "run", kind="no-torch")
    assert code == 0, text
    assert re.search(r"^  mine +A network of my own\.$", text, re.MULTILINE)
    assert "_shared" not in text


def test_help_lists_the_keys_of_the_chosen_options_with_those_that_they_inherit():
    text = help_text(words=["parallel=ddp", "seed=1"])
    assert "\n  processes: auto " in text
    assert "\n  bucket_mb: 25.0 " in text
    assert "bucket_mb" not in help_text()


def test_help_of_an_option_lists_each_key_once_with_its_value_there():
    lines = [line for line in help_text(words=["optimizer=adamw"]).splitlines() if "weight_decay: " in line]
    assert [line.split()[:2] for line in lines if line.startswith("  weight_decay")] == [["weight_decay:", "0.01"]]


def test_help_of_a_key_or_a_group_explains_nothing_else(tmp_path):
    code, text = run_command("optimizer.lr", "--help", cwd=tmp_path, kind="no-torch")
    assert code == 0, text
    assert re.search(r"^optimizer.lr: 0.05 .*learning rate.*\n  optimizer=sgd$", text, re.MULTILINE)
    assert "batch_size" not in text
    assert "weight_decay" not in text
    assert help_text(words=["batch_size"]).startswith("batch_size: 64")
    assert help_text(words=["optimizer=sgd", "optimizer.lr=1"]).count("optimizer.lr: ") == 1
    assert description(option_files()["optimizer"]["sgd"]) in help_text(words=["optimizer"])
    with pytest.raises(ConfigError) as refused:
        help_text(words=["optimizer.ler"])
    assert (refused.value.key, "optimizer.lr" in refused.value.remedy) == ("optimizer.ler", True)


def test_version_prints_the_version_of_this_project(tmp_path):
    assert run_command("--version", cwd=tmp_path, kind="no-torch") == (0, f"runner {__version__}\n")


def test_bash_completes_subcommands_options_and_leaves_paths_to_bash(tmp_path):
    (tmp_path / "mine" / "model").mkdir(parents=True)
    (tmp_path / "mine" / "model" / "resnet9.yaml").touch()
    cases = {
        "runner ": [*(f"{group}=" for group in option_files()), *COMMANDS],
        "python -m runner mod": ["model="],
        "python -m runner parallel=ddp model=resnet": ["resnet18", "resnet50"],
        "runner -m model=tiny,resnet1": ["tiny,resnet18"],
        "runner --config-dir mine model=resnet": ["resnet18", "resnet50", "resnet9"],
        "runner plan pro": ["profiler="],
        "runner --conf": ["--config-dir"],
        **{paths: [] for paths in ("runner --config-dir mi", "runner compare m", "runner data.root=m", "python mod")},
    }
    file = Path(runner.commands.__file__).with_name("completion.bash")
    script = f"source '{file}'\n" + 'for w; do COMP_LINE=$w COMP_POINT=${#w}; _runner; echo "${COMPREPLY[@]}"; done'
    program = ["bash", "-c", script, "bash", *cases]
    shown = subprocess.run(program, cwd=tmp_path, capture_output=True, text=True, check=True)
    found = [sorted(line.split()) for line in shown.stdout.splitlines()]
    assert dict(zip(cases, found, strict=True)) == {words: sorted(wanted) for words, wanted in cases.items()}
    assert not shown.stderr
