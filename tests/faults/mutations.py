"""Mutation testing: plants one bug at a time in a copy of the project, and checks that a test fails.

`python tests/faults/mutations.py [WORD…]` tries the bugs whose description contains a WORD. Without a WORD, it tries
all bugs, and writes the table tests/faults/MUTATIONS.md. If no test notices a bug, a test is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
TABLE = Path(__file__).with_name("MUTATIONS.md")
COPIED = ("runner", "models", "conf", "tests", "pyproject.toml", "constraints.txt", "Makefile")
TIMEOUT_SECONDS = 900.0
"""Timeout of a test run in seconds. A bug that makes the tests hang counts as noticed."""

POWER = "tests/faults/test_power_loss.py"
CORRUPTION = "tests/faults/test_corruption.py"
HOSTILE = "tests/faults/test_hostile.py"
DISK = "tests/faults/test_disk.py"
SIGNALS = "tests/system/test_signals.py"
RESUMED = f"{CORRUPTION}::test_a_damaged_run_that_is_resumed_ends_like_the_undisturbed_one"


class Mutation(NamedTuple):
    """A bug: `old`, which occurs exactly once in `file`, is replaced by `new`. One of `tests` must fail."""

    bug: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTATIONS = [
    Mutation(
        "the files of a checkpoint are not synced",
        "runner/storage/checkpoint.py",
        "splitlines()[0]) from error\n    sync(path)\n",
        "splitlines()[0]) from error\n",
        (POWER,),
    ),
    Mutation(
        "the directory of a checkpoint is not synced before it is renamed",
        "runner/storage/checkpoint.py",
        "        sync(part)\n",
        "",
        (POWER,),
    ),
    Mutation(
        "the rename of a checkpoint is not synced",
        "runner/storage/checkpoint.py",
        "        os.replace(part, final)\n        sync(self.root)\n",
        "        os.replace(part, final)\n",
        (POWER,),
    ),
    Mutation(
        "a checkpoint is renamed before its manifest is written",
        "runner/storage/checkpoint.py",
        '        _write_synced(part / MANIFEST, lambda path: path.write_text(manifest, encoding="utf-8"))\n'
        "        sync(part)\n",
        "        final = self.root / step_name(checkpoint.step)\n        os.replace(part, final)\n"
        "        _write_synced(final / MANIFEST, lambda path: path.write_text(manifest))\n"
        "        sync(final)\n        sync(self.root)\n        return\n",
        (POWER, "tests/storage/test_checkpoint.py"),
    ),
    Mutation(
        "old checkpoints are deleted before the new one is there",
        "runner/storage/checkpoint.py",
        "        weights = {_MODEL: checkpoint.tensors}",
        "        delete(self.root, self.steps())\n        weights = {_MODEL: checkpoint.tensors}",
        (POWER, DISK),
    ),
    Mutation(
        "small files are not synced before they are renamed",
        "runner/storage/durable_write.py",
        "        os.fsync(file.fileno())\n",
        "",
        (POWER,),
    ),
    Mutation(
        "a run directory is not synced into its parents",
        "runner/storage/run_directory.py",
        "                sync(folder)\n",
        "                pass\n",
        (POWER,),
    ),
    Mutation(
        "a superseded checkpoint is not synced before the new config is there",
        "runner/resume/claimed_directory.py",
        "            sync(superseded[-1].parent)\n",
        "            pass\n",
        (POWER,),
    ),
    Mutation(
        "curves are not synced before a checkpoint",
        "runner/training.py",
        "                recorder.flush()  # a run",
        "                pass  # a run",
        (POWER,),
    ),
    Mutation(
        "keep=0 deletes the checkpoints before the result is written",
        "runner/api/run_job.py",
        "    try:\n        write_json(directory / run_directory.RESULT",
        "    if run.keep == 0:\n        delete_all(directory)\n"
        "    try:\n        write_json(directory / run_directory.RESULT",
        (POWER,),
    ),
    Mutation(
        "the random state is not restored",
        "runner/state.py",
        '            _load_random_state(local["random"], devices)\n',
        "            pass\n",
        (RESUMED,),
    ),
    Mutation(
        "the optimizer state is not restored",
        "runner/parallel/full_state.py",
        "    optimizer.load_state_dict(packed)\n",
        "",
        (RESUMED,),
    ),
    Mutation(
        "the metric sums since the last log are not restored",
        "runner/state.py",
        '        self.metric_buffer.load(self.session.collectives.local_share(shared["window"]), self.step)\n',
        "",
        (RESUMED,),
    ),
    Mutation(
        "the best evaluation is not restored",
        "runner/state.py",
        'shared["metrics"], shared["best"]',
        'shared["metrics"], {}',
        (RESUMED,),
    ),
    Mutation(
        "the order of the samples begins anew at a resume",
        "runner/training.py",
        "session.batches(model, state.step)\n    model.train()",
        "session.batches(model, 0)\n    model.train()",
        (RESUMED,),
    ),
    Mutation(
        "the points of an earlier session are not dropped at a resume",
        "runner/tracking/event_file.py",
        "        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))\n",
        "",
        (RESUMED, DISK),
    ),
    Mutation(
        "the hashes of a checkpoint are not verified",
        "runner/storage/manifest.py",
        "    if sha256 != wanted:\n",
        "    if not sha256:\n",
        (CORRUPTION,),
    ),
    Mutation(
        "the hash of a saved config is not verified",
        "runner/storage/saved_config.py",
        "if not seal or sha256.strip() != _sha256(text):",
        "if not seal or not sha256:",
        (CORRUPTION,),
    ),
    Mutation(
        "the config of another run is accepted",
        "runner/resume/claimed_directory.py",
        "            check_newest(path, run)\n",
        "            pass\n",
        (CORRUPTION,),
    ),
    Mutation(
        "a run without an intact checkpoint begins anew",
        "runner/storage/checkpoint.py",
        '        check(found is not None or not names, "resume", str(self.root.parent), why, remedy)\n',
        "",
        (CORRUPTION,),
    ),
    Mutation(
        "pickles are loaded with weights_only=False",
        "runner/storage/safe_torch_load.py",
        "(file, weights_only=True",
        "(file, weights_only=False",
        (HOSTILE,),
    ),
    Mutation(
        "archives that claim more than their file has are loaded",
        "runner/storage/safe_torch_load.py",
        "if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):\n"
        '                raise UnusualFileError("it is compressed")\n'
        "            if sum(entry.file_size for entry in entries) > path.stat().st_size:",
        "if not entries:",
        (HOSTILE, "tests/storage/test_safe_torch_load.py"),
    ),
    Mutation(
        "symbolic links are followed",
        "runner/storage/regular_file.py",
        "    _check_regular(path, os.lstat(path))",
        "    path = path.resolve()\n    _check_regular(path, os.lstat(path))",
        (HOSTILE,),
    ),
    Mutation(
        "references in a saved config are resolved",
        "runner/api/saved_defaults.py",
        'reference = "${" in value or value == "???"',
        "reference = False",
        (HOSTILE,),
    ),
    Mutation(
        "references in a saved config are looked for in no list",
        "runner/api/saved_defaults.py",
        "        return [_plain(element, key, set()) for element in value]\n",
        "        return value\n",
        ("tests/api/test_saved_defaults.py",),
    ),
    Mutation(
        "a saved config decides where the run is sent",
        "runner/tracking/remote.py",
        "            check(value == defaults[key], key, value, why, remedy)\n",
        "            pass\n",
        ("tests/api/test_saved_defaults.py",),
    ),
    Mutation(
        "the command in somebody else's sweep.json is run",
        "runner/commands/sweep.py",
        "    ledger, words = read_ledger(path), remembered_command(path)\n",
        '    ledger = read_ledger(path)\n    words = ledger["command"]\n',
        ("tests/commands/test_sweep_tool.py",),
    ),
    Mutation(
        "tags in a saved config are accepted",
        "runner/config/yaml_file.py",
        "    if short not in _PLAIN:\n",
        "    if False:\n",
        (HOSTILE, "tests/storage/test_saved_config.py"),
    ),
    Mutation(
        "a run directory may contain links and pipes",
        "runner/resume/earlier_run.py",
        "        run_directory.check_regular(path)\n",
        "",
        (HOSTILE,),
    ),
    Mutation(
        "a full disk ends the run with a traceback",
        "runner/storage/checkpoint.py",
        "            raise StorageError(part, error.strerror or str(error)) from error\n",
        "            raise\n",
        (DISK,),
    ),
    Mutation(
        "a failed checkpoint leaves its temporary directory behind",
        "runner/storage/checkpoint.py",
        "                    path.unlink(missing_ok=True)\n",
        "                    pass\n",
        (DISK, "tests/storage/test_checkpoint.py"),
    ),
    Mutation(
        "a resumed run does not write the index of its checkpoints again",
        "runner/storage/checkpoint.py",
        "        self._index(newest)\n",
        "",
        ("tests/storage/test_checkpoint.py",),
    ),
    Mutation(
        "a run does not wait for the end of the thread that writes its last checkpoint",
        "runner/storage/checkpoint.py",
        "        self.thread.join()\n",
        "",
        ("tests/storage/test_background_saving.py",),
    ),
    Mutation(
        "the lock of a run directory is not taken",
        "runner/storage/run_directory.py",
        "        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
        "        pass\n",
        ("tests/storage/test_run_directory.py",),
    ),
    Mutation(
        "SIGTERM is not handled",
        "runner/system/signals.py",
        "STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, ",
        "STOP_SIGNALS = (signal.SIGINT, ",
        (f"{SIGNALS}::test_a_signal_before_training_ends_the_command",),
    ),
    Mutation(
        "a run that was stopped exits with 0",
        "runner/result.py",
        '"stopped": STOPPED',
        '"stopped": DONE',
        (f"{SIGNALS}::test_resume_after_a_signal_is_bitwise_exact",),
    ),
    Mutation(
        "a rank that died is not noticed",
        "runner/parallel/launch/supervisor.py",
        "        return [rank for rank in ended if self.reports[rank] is None]\n",
        "        return []\n",
        ("tests/parallel/launch/test_faults.py::test_one_killed_rank_of_three_ends_the_run",),
    ),
]


class Outcome(NamedTuple):
    """The result of trying a bug.

    Args:
        bug: its description.
        file: the file in which it was planted.
        test: the first test that failed; empty if none did.
        only_in_make_faults: whether only `make faults` notices it.
    """

    bug: str
    file: str
    test: str
    only_in_make_faults: bool


def copy_of_project(to: Path) -> Path:
    """Copy the files that the tests need to the directory `to`, and return `to`."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to / name)
    return to


def first_failure(project: Path, test: str, faults: str) -> str:
    """Run a test or a test file in a copy of the project, and return the first test that failed; empty if none did.

    Args:
        faults: value of RUNNER_FAULTS: `all` to run what `make faults` runs, empty for the selection of `make test`.
    """
    path = os.pathsep.join([str(project), str(project / "tests")])
    variables = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "RUNNER_FAULTS": faults}
    where = [sys.executable, "-c", "import runner; print(runner.__file__)"]
    found = subprocess.run(where, cwd=project, env=variables, capture_output=True, text=True, check=True).stdout
    assert Path(found.strip()).is_relative_to(project), f"the copy is not what is tested, but {found}"
    words = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=no", test]
    try:
        done = subprocess.run(
            words, cwd=project, env=variables, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"{test}, which hangs"
    if done.returncode == 0:
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)", done.stdout, re.MULTILINE)
    return failed[1] if failed else f"{test}, which ends pytest itself with {done.returncode}"


def try_out(mutation: Mutation) -> Outcome:
    """Plant a bug in a copy of the project, and run the tests that should notice it."""
    with tempfile.TemporaryDirectory() as directory:
        project = copy_of_project(Path(directory))
        file = project / mutation.file
        text = file.read_text(encoding="utf-8")
        assert text.count(mutation.old) == 1, f"{mutation.bug}: not once in {mutation.file}"
        file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
        for faults in ("", "all"):
            for test in mutation.tests:
                if failed := first_failure(project, test, faults):
                    return Outcome(mutation.bug, mutation.file, failed, bool(faults))
    return Outcome(mutation.bug, mutation.file, "", False)


def table(outcomes: list[Outcome]) -> str:
    """Return the results as a Markdown document."""
    noticed = sum(bool(outcome.test) for outcome in outcomes)
    lines = [
        "# Planted bugs",
        "",
        "Written by `python tests/faults/mutations.py`, which plants each bug in a copy of the project and runs tests.",
        f"{noticed} of {len(outcomes)} are noticed.",
        "",
        "| bug | in | noticed by |",
        "|---|---|---|",
    ]
    for bug, file, test, only_in_make_faults in outcomes:
        shown = test.replace("|", "\\|") + ", in `make faults`" * only_in_make_faults
        lines.append(f"| {bug} | `{file}` | {shown or '**nothing**'} |")
    return "\n".join([*lines, ""])


def main(words: list[str]) -> int:
    """Try all bugs whose description contains one of `words`, or every bug if `words` is empty.

    Returns:
        The exit code: 0 if the tests noticed every bug that was tried, otherwise 1.
    """
    chosen = [mutation for mutation in MUTATIONS if not words or any(word in mutation.bug for word in words)]
    outcomes = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for outcome in pool.map(try_out, chosen):
            outcomes.append(outcome)
            print(f"{outcome.bug}: {outcome.test or 'NOT NOTICED'}", flush=True)
    if not words:
        TABLE.write_text(table(outcomes), encoding="utf-8")
    return int(not all(outcome.test for outcome in outcomes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
