"""What messages, help texts, pages and files suggest to type is accepted as it stands there."""

import ast
import contextlib
import importlib
import io
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.command import ROOT, run_command
from helpers.compose import TINY_CPU
from omegaconf import OmegaConf

from runner.commands import COMMANDS
from runner.config.options import option_files, option_keys, root_keys
from runner.config.other_names import NAMES
from runner.config.overrides import text_override

TEXTS = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("conf/**/*.yaml"), *ROOT.glob("runner/**/*.py")]
AWKWARD = "a b,c=d'e\"f$g"
"""A directory whose name a shell and Hydra's grammar read differently, unless it is quoted for both."""


def messages() -> dict[str, list[str]]:
    """Return the string constants of each module of the package, without docstrings and keys of dictionaries."""
    found = {}
    for path in ROOT.glob("runner/**/*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        left_out = {id(node.value) for node in nodes if isinstance(node, ast.Expr)}
        left_out |= {id(key) for node in nodes if isinstance(node, ast.Dict) for key in node.keys}
        constants = (node for node in nodes if isinstance(node, ast.Constant) and id(node) not in left_out)
        found[str(path.relative_to(ROOT))] = [node.value for node in constants if isinstance(node.value, str)]
    return found


def test_pip_installs_packages_that_are_extras_of_this_one():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    known = {re.split("[<>=!]", text)[0] for texts in extras.values() for text in texts}
    texts = "\n".join(path.read_text() for path in TEXTS)
    hints = [
        re.split(r", or |; | to | installs", hint)[0]
        for hint in re.findall(r"pip install ((?!-[ce] )[^`):#\n\"]*)", texts)
    ]
    named = {re.split("[<>=!]", re.sub(r"[',;]|\.$", "", word))[0] for hint in hints for word in hint.split()}
    assert named - known == {"{self.package}"}  # those of trackers
    assert {"optuna", "submitit", "ray", "timm", "seaborn"} <= named


def test_messages_name_keys_and_options_that_exist():
    wrong = []
    known = {group: set().union(*option_keys(group).values()) for group in option_files()}
    for group in ("workload", "data"):
        of_files: Any = OmegaConf.load(ROOT / "conf" / group / "_user.yaml")  # of workload=FILE.py
        known[group] |= {*of_files.get(group, of_files)}
    for path, texts in {**messages(), "names of other libraries": list(NAMES)}.items():
        for group, key, value in re.findall(
            r"(?<![\w./-])([a-z_]+)((?:\.[a-z_]+)*)=([\w\[]*(?:\.py)?)", "\n".join(texts)
        ):
            options = option_files().get(group, {})
            if key and options:
                is_wrong = key[1:].partition(".")[0] not in known[group]
            else:
                is_option = bool(options) and group in root_keys() and value.isidentifier() and value.islower()
                is_wrong = not key and is_option and value not in (*options, "_user")
            wrong += [(path, f"{group}{key}={value}")] * is_wrong
    assert wrong == []


def words_of(line: str) -> list[str]:
    """Return the words that bash makes of a line."""
    printed = subprocess.run(["bash", "-c", f"printf '%s\\0' {line}"], check=True, capture_output=True, text=True)
    return printed.stdout.split("\0")[:-1]


def commands_in(console: str) -> list[list[str]]:
    """Return the words of each command in what was printed."""
    lines = re.findall(r"^(?:\w+:)?\s*(python -m runner.*|tensorboard .*)$", console, re.MULTILINE)
    return [words_of(line) for line in lines]


def run_here(cwd: Path, *words: str) -> str:
    code, console = run_command(*words, cwd=cwd)
    assert code in (0, 75), console
    return console


def accepted(cwd: Path, words: list[str]) -> str:
    """Run a command, and return what it prints; of TensorBoard's, check that its directory has event files."""
    if words[0] == "tensorboard":
        assert words[1] == "--logdir"
        assert list((cwd / words[2]).glob("**/events.out.tfevents.*"))
        return ""
    assert words[:3] == ["python", "-m", "runner"]
    if words[3] not in COMMANDS:
        return run_here(cwd, *words[3:])
    with contextlib.chdir(cwd), contextlib.redirect_stdout(io.StringIO()) as printed:
        assert importlib.import_module(f"runner.commands.{words[3]}").main(words[4:]) in (0, None)
    return printed.getvalue()


SMALL = (*TINY_CPU, "steps=4", "batch_size=32")


def test_commands_at_the_end_of_a_run_work(tmp_path):
    (tmp_path / AWKWARD).mkdir()
    root = text_override("output_root", AWKWARD)
    console = run_here(tmp_path, *words_of(root), *SMALL, "stop.max_time=1e-6")
    resume, look = commands_in(console)
    accepted(tmp_path, look)
    assert "stopped after step 2/4" in accepted(tmp_path, resume)
    [run] = (tmp_path / AWKWARD).glob("*/*/")
    weights = tmp_path / AWKWARD / "-w.safetensors"
    console = accepted(tmp_path, ["python", "-m", "runner", "convert", str(run), str(weights), "--checkpoint=last"])
    [override] = words_of(console.partition("start from it: ")[2])
    run_here(tmp_path, override, *SMALL, "--cfg", "job")


def test_commands_of_a_sweep_and_its_search_work(tmp_path, monkeypatch):
    drawing = SimpleNamespace(NAMES=(), pictures=lambda compared: {})  # whose libraries take seconds to import
    monkeypatch.setitem(sys.modules, "runner.analysis.figures", drawing)
    (tmp_path / AWKWARD).mkdir()
    root = text_override("output_root", AWKWARD)
    search = ("-m", *words_of(root), *SMALL, "sweep.search=random", "optimizer.lr=0.1,0.01", "sweep.trials=2")
    train, *others = commands_in(run_here(tmp_path, *search))
    assert "done after step 4/4" in accepted(tmp_path, train)
    assert {words[0] if words[0] == "tensorboard" else words[3] for words in others} == {
        "tensorboard",
        "compare",
        "plot",
    }
    for words in others:
        accepted(tmp_path, words)


@pytest.mark.parametrize("name", COMMANDS)
def test_flags_of_subcommands_on_the_pages_exist(name, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(f"runner.commands.{name}").main(["--help"])
    known = set(re.findall(r"--[a-z-]+", capsys.readouterr().out))
    pages = "\n".join(path.read_text() for path in TEXTS if path.suffix == ".md")
    used = {
        flag for words in re.findall(rf"runner {name}\b([^\n`#]*)", pages) for flag in re.findall("--[a-z-]+", words)
    }
    assert used <= known
