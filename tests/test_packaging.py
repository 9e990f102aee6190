"""What is installed is what is here: every package, every option file, the command, the versions."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import version

from helpers.command import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_every_package_is_installed():
    here = {
        ".".join(init.parent.relative_to(ROOT).parts)
        for top in ("runner", "models")
        for init in (ROOT / top).rglob("__init__.py")
    }
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == here | {"runner.conf"}
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {"runner.conf": "conf"}


def test_every_dependency_is_imported_and_every_import_is_a_dependency():
    names = {"scikit-learn": "sklearn", "hydra-core": "hydra"}
    wanted = {re.split(r"[<>=]", text)[0] for text in PROJECT["project"]["dependencies"]}
    sources = "\n".join(
        path.read_text(encoding="utf-8") for top in ("runner", "models") for path in (ROOT / top).rglob("*.py")
    )
    unused = {name for name in wanted if not re.search(rf"\b{names.get(name, name)}\b", sources)}
    assert unused <= {"gymnasium"}, "the reinforcement learning workloads will need gymnasium; nothing else is unused"


def test_the_constraints_pin_what_is_tested_here():
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE))
    for name in ("torch", "torchvision", "hydra-core", "omegaconf", "tensorboard", "safetensors", "pytest"):
        assert version(name).partition("+")[0] == pins[name], name
