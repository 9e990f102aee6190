"""Tests of what Python imports: one copy of the project in all processes and optional packages."""

import importlib
import json
import subprocess
import sys

from helpers.command import ROOT, child_environment

from runner.system.import_path import is_installed


def test_ranks_import_the_copy_of_the_project_that_a_script_imports(tmp_path):
    """Another copy is in the working directory and on PYTHONPATH, and ends any process that imports it."""
    other = tmp_path / "other" / "runner"
    other.mkdir(parents=True)
    (other / "__init__.py").write_text("raise SystemExit('the other copy')\n")
    overrides = ["parallel=ddp", "model=tiny", "data.size=8", "steps=2", "device=cpu", f"output_root={tmp_path}/out"]
    script = tmp_path / "script.py"
    script.write_text(f"import sys\nsys.path.insert(0, {str(ROOT)!r})\nimport runner\nrunner.train({overrides!r})\n")
    variables = child_environment(PYTHONPATH=str(other.parent))
    variables.pop("PYTHONSAFEPATH", None)
    words = [sys.executable, str(script)]
    done = subprocess.run(words, cwd=other.parent, env=variables, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    [result] = (tmp_path / "out").glob("*/*/result.json")
    assert json.loads(result.read_text())["world_size"] == 2


def test_a_directory_without_init_file_is_not_an_installed_package(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "some_folder").mkdir()
    (tmp_path / "some_package").mkdir()
    (tmp_path / "some_package" / "__init__.py").touch()
    importlib.invalidate_caches()
    names = ("some_folder", "some_package", "nothing_of_this_name", "torch")
    assert [is_installed(name) for name in names] == [False, True, False, True]
