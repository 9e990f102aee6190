"""Tests that pyproject.toml lists all packages and no unused dependency, and that constraints pin what is tested."""

import os
import re
import tomllib
from importlib.metadata import version
from pathlib import Path

from helpers.command import ROOT
from packaging.version import Version

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_pyproject_lists_every_package():
    here = {".".join(init.parent.relative_to(ROOT).parts) for init in (ROOT / "runner").rglob("__init__.py")}
    listed = set(PROJECT["tool"]["setuptools"]["packages"])
    assert listed == here | {"runner.conf", "runner.models"}
    assert PROJECT["tool"]["setuptools"]["package-dir"] == {"runner.conf": "conf"}


def test_every_dependency_is_imported():
    names = {"scikit-learn": "sklearn", "hydra-core": "hydra", "google-crc32c": "google_crc32c"}
    wanted = {re.split(r"[<>=]", text)[0] for text in PROJECT["project"]["dependencies"]}
    sources = "\n".join(
        path.read_text(encoding="utf-8") for top in ("runner", "models") for path in (ROOT / top).rglob("*.py")
    )
    unused = {name for name in wanted if not re.search(rf"\b{names.get(name, name)}\b", sources)}
    assert unused <= {"gymnasium"}, "the reinforcement learning workloads will need gymnasium; nothing else is unused"


def test_the_constraints_pin_what_is_tested_here():
    # `make test-all` also sets up environments with other constraints, and names them
    path = Path(os.environ.get("RUNNER_CONSTRAINTS", ROOT / "constraints.txt"))
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", path.read_text(encoding="utf-8"), re.MULTILINE))
    for name in ("torch", "torchvision", "hydra-core", "omegaconf", "tensorboard", "safetensors", "pytest"):
        assert Version(Version(version(name)).public) == Version(pins[name]), name


def test_the_integration_tests_are_where_make_looks_for_them():
    names = re.findall(r"tests/[a-z_/]+\.py", (ROOT / "Makefile").read_text(encoding="utf-8"))
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []
