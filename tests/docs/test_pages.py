"""Tests of README.md and docs/: the files that they quote, their links, their commands and their Python code."""

import re
import shlex
import shutil
from pathlib import Path

import pytest
from helpers.command import ROOT
from helpers.compose import build_composed_run

import runner
from runner.commands import COMMANDS as SUBCOMMANDS
from runner.config.composition import Composer
from runner.config.overrides import quoted
from runner.run import build_run
from runner.sweeps.sweep_jobs import SweepJobs

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}

QUOTE = re.compile(r"^`(docs/\S+)`:\n\n```\w*\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


def anchors(text: str) -> set[str]:
    """Return the anchors of the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(text: str) -> list[list[str]]:
    """Return the arguments of each `python -m runner` command of a page that is a run and needs no further files."""
    blocks = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line for block in blocks for line in block.splitlines() if line.startswith("python -m runner ")]
    words = [shlex.split(line, comments=True)[3:] for line in lines]
    left_out = ("resume=o", "model.weights=", "--config-dir", "--help", "--version", "--summary", "[")
    runs = [line for line in words if not {*line[:1]} & {*SUBCOMMANDS}]
    return [line for line in runs if not any(word.startswith(left_out) for word in line)]


COMMANDS = sorted({" ".join(line) for text in TEXTS.values() for line in commands(text)})


@pytest.mark.parametrize("line", COMMANDS)
def test_commands_are_runs_that_can_be_built(line, monkeypatch):
    monkeypatch.chdir(ROOT / "docs" / "examples")  # where mine.py is
    words = line.removesuffix(" --cfg job").split()
    if words and words[0] == "-m":
        jobs = SweepJobs(Composer(), [quoted(word, sweep=True) for word in words[1:]])
        build_run(jobs.compose(0, next(iter(jobs))).config)
    else:
        build_composed_run(*words)


def test_every_example_is_quoted_in_full():
    quotes = dict(quote for text in TEXTS.values() for quote in QUOTE.findall(text))
    files = [*(ROOT / "docs" / "examples").rglob("*.*")]
    examples = [file for file in files if file.suffix in (".py", ".yaml", ".toml") and file.name != "__init__.py"]
    assert quotes == {str(file.relative_to(ROOT)): file.read_text(encoding="utf-8") for file in examples}


@pytest.mark.parametrize("page", TEXTS)
def test_targets_and_anchors_of_links_exist(page):
    for target, anchor in LINK.findall(TEXTS[page]):
        path = (ROOT / page).parent / target if target else ROOT / page
        assert path.exists(), f"{page} links to {target}"
        if anchor:
            assert anchor in anchors(path.read_text(encoding="utf-8")), f"{page} links to {target}#{anchor}"


def test_the_readme_is_short_and_its_pictures_are_small():
    assert len(TEXTS["README.md"].splitlines()) <= 120
    pictures = list((ROOT / "docs" / "images").iterdir())
    assert {path.name for path in pictures} >= {"terminal.png", "compare.png", "verify.png"}
    assert all(path.stat().st_size < 150_000 for path in pictures)


def test_the_file_of_the_readme_trains(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    [code] = re.findall(r"^```python\n(.*?)^```$", TEXTS["README.md"], re.MULTILINE | re.DOTALL)
    Path("mine.py").write_text(code)
    result = runner.train(["workload=mine.py", "device=cpu", "device.threads=1", "epochs=40"])
    assert result.status == "done"
    assert result.evaluation["eval/accuracy"] > 0.9


def test_the_python_code_runs_from_top_to_bottom(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(ROOT / "docs" / "examples")
    shutil.copy(ROOT / "docs" / "examples" / "mine.py", tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", TEXTS["docs/python.md"], re.MULTILINE | re.DOTALL):
        exec(block.replace("seed=0,1", "seed=0"), names)  # two jobs show as much as four
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "optimizer.lr see the comments in conf/optimizer/sgd.yaml"
    assert re.fullmatch(r"image\.png \d [01]\.\d+ ", printed[-1])
    assert list(names["table"]["status"]) == ["done"] * 2  # pyright: ignore[reportIndexIssue]
