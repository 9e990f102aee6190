"""Tests of what Python imports: one copy of the project in all processes and optional packages."""

import importlib
import subprocess
import sys

from helpers.command import ROOT, child_environment

from runner.system.import_path import is_installed

SCRIPT = """import sys
sys.path.insert(0, {root!r})
from runner.storage.files import sync
from runner.system.forkserver import run_in_child
run_in_child(sync, {root!r})
"""


def test_child_processes_import_the_copy_of_the_project_that_a_script_imports(tmp_path):
    """Another copy is in the working directory and on PYTHONPATH, and prints a line when it is imported."""
    other = tmp_path / "other" / "runner"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("print('the other copy')\n")
    (tmp_path / "script.py").write_text(SCRIPT.format(root=str(ROOT)))
    variables = child_environment(PYTHONPATH=str(other.parent))
    variables.pop("PYTHONSAFEPATH", None)
    words = [sys.executable, str(tmp_path / "script.py")]
    done = subprocess.run(words, cwd=other.parent, env=variables, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_directory_without_init_file_is_not_an_installed_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "some_folder").mkdir()
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "__init__.py").touch()
    importlib.invalidate_caches()
    names = ("some_folder", "some_package", "nothing_of_this_name", "torch")
    assert [is_installed(name) for name in names] == [False, True, False, True]
