"""Tests of `runner.api.caller_settings`: training from Python leaves the caller's process as it was."""

from __future__ import annotations

import gc
import json
import logging
import signal
import subprocess
import sys
from pathlib import Path

from helpers.command import child_environment
from PIL import Image

from runner.api.caller_settings import settings_kept
from runner.planning.fake_step import _quiet


def test_imports_and_runs_in_a_notebook_leave_the_process_as_it_was(tmp_path: Path) -> None:
    for name in ("apple", "berry"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "photos" / name / f"{number}.png")
    code = "import helpers.process_settings; helpers.process_settings.main()"
    words = [sys.executable, "-c", code, str(tmp_path / "photos")]
    ran = subprocess.run(words, cwd=tmp_path, env=child_environment(), capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
    *results, exitcode, changed = map(json.loads, ran.stdout.splitlines()[-5:])
    assert results == [["diverged", 1], ["done", 1], ["done", 2]]
    assert exitcode == -signal.SIGTERM
    assert len(changed) == 6
    assert {step: names for step, names in changed.items() if names} == {}


def test_garbage_of_the_caller_is_collected_after_a_run_has_loaded_the_compiler() -> None:
    gc.unfreeze()
    with settings_kept():
        gc.freeze()  # as when the compiler is loaded
    assert gc.get_freeze_count() == 0


def test_a_plan_keeps_the_level_below_which_the_caller_disables_logging() -> None:
    logging.disable(logging.INFO)
    try:
        with _quiet():
            assert not logging.getLogger("torch").isEnabledFor(logging.WARNING)
        assert logging.root.manager.disable == logging.INFO
    finally:
        logging.disable(logging.NOTSET)
