"""Tests of `is_installed`."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from runner.system.installed import is_installed


def test_a_directory_without_init_file_is_not_an_installed_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "some_folder").mkdir()
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "__init__.py").touch()
    importlib.invalidate_caches()
    names = ("some_folder", "some_package", "nothing_of_this_name", "torch")
    assert [is_installed(name) for name in names] == [False, True, False, True]
