"""Mutation testing: plants one bug at a time in a copy of the project, and checks that a test fails.

`python tests/faults/mutations.py [WORD…]` tries the bugs whose description contains a WORD, or all. If no test notices
a bug, a test is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent.parent
COPIED = ("runner", "models", "conf", "tests", "pyproject.toml", "constraints.txt", "Makefile")
TIMEOUT_SECONDS = 900.0
"""Timeout of a test run in seconds. A bug that makes the tests hang counts as noticed."""

POWER = "tests/faults/test_power_loss.py"
CORRUPTION = "tests/faults/test_corruption.py"
HOSTILE = "tests/faults/test_hostile.py"
DISK = "tests/faults/test_disk.py"
RESUMED = f"{CORRUPTION}::test_a_damaged_run_that_is_resumed_ends_like_the_undisturbed_one"


class Mutation(NamedTuple):
    """A bug: `old`, which occurs exactly once in the package, in any file, is replaced by `new`. A test must fail."""

    tests: tuple[str, ...]
    bug: str
    old: str
    new: str


def noticed_by(*tests: str) -> Callable[..., list[Mutation]]:
    return lambda *bugs: [Mutation(tests, *each) for each in bugs]


MUTATIONS = [
    *noticed_by(POWER)(
        (
            "the files of a checkpoint are not synced",
            "splitlines()[0]) from error\n    sync(path)\n",
            "splitlines()[0]) from error\n",
        ),
        ("the directory of a checkpoint is not synced before it is renamed", "        sync(part)\n", ""),
        (
            "the rename of a checkpoint is not synced",
            "        os.replace(part, final)\n        sync(self.root)\n",
            "        os.replace(part, final)\n",
        ),
        ("small files are not synced before they are renamed", "                os.fsync(file.fileno())\n", ""),
        (
            "a run directory is not synced into its parents",
            "                sync(folder)\n            if folder == existing",
            "                pass\n            if folder == existing",
        ),
        (
            "a superseded checkpoint is not synced before the new config is there",
            "                sync(folder)  # a power loss must",
            "                pass  # a power loss must",
        ),
        (
            "curves are not synced before a checkpoint",
            "                recorder.flush()  # a run",
            "                pass  # a run",
        ),
        (
            "keep=0 deletes the checkpoints before the result is written",
            "    try:\n        write_json(directory / run_directory.RESULT",
            "    if run.keep == 0:\n"
            '        prune(directory / "checkpoints", keep=0)\n'
            "    try:\n"
            "        write_json(directory / run_directory.RESULT",
        ),
    ),
    *noticed_by(POWER, "tests/storage/test_checkpoint.py")(
        (
            "a checkpoint is renamed before its manifest is written",
            '        _write_synced(part / MANIFEST, lambda path: path.write_text(manifest, encoding="utf-8"))\n'
            "        sync(part)\n",
            "        final = self.root / step_name(checkpoint.step)\n"
            "        os.replace(part, final)\n"
            "        _write_synced(final / MANIFEST, lambda path: path.write_text(manifest))\n"
            "        sync(final)\n"
            "        sync(self.root)\n"
            "        return\n",
        ),
    ),
    *noticed_by(POWER, DISK)(
        (
            "old checkpoints are deleted before the new one is there",
            "        weights = {MODEL: checkpoint.tensors}",
            "        prune(self.root, keep=0)\n        weights = {MODEL: checkpoint.tensors}",
        ),
    ),
    *noticed_by(RESUMED)(
        (
            "the random state is not restored",
            '            _load_random_state(local["random"], devices)\n',
            "            pass\n",
        ),
        ("the optimizer state is not restored", "    optimizer.load_state_dict(packed)\n", ""),
        (
            "the metric sums since the last log are not restored",
            '        self.metric_buffer.load(self.session.collectives.local_share(shared["window"]), self.step)\n',
            "",
        ),
        ("the best evaluation is not restored", 'shared["metrics"], shared["best"]', 'shared["metrics"], {}'),
        (
            "the order of the samples begins anew at a resume",
            "session.batches(model, state.step)\n    model.train()",
            "session.batches(model, 0)\n    model.train()",
        ),
    ),
    *noticed_by(RESUMED, DISK)(
        (
            "the points of an earlier session are not dropped at a resume",
            "        self._write(step=first_step, session_log=SessionLog(status=SessionLog.START))\n",
            "",
        ),
    ),
    *noticed_by(CORRUPTION)(
        ("the hashes of a checkpoint are not verified", "    if sha256 != wanted:\n", "    if not sha256:\n"),
        (
            "the hash of a saved config is not verified",
            "if not seal or sha256.strip() != _sha256(text):",
            "if not seal or not sha256:",
        ),
        ("the config of another run is accepted", "        check_resumable(saved, run.config, str(checkpoint))\n", ""),
        (
            "a run without an intact checkpoint begins anew",
            "        if found is None and names:\n",
            "        if found is None and not names:\n",
        ),
    ),
    *noticed_by(HOSTILE)(
        (
            "pickles are loaded with weights_only=False",
            ", weights_only=True, map_location",
            ", weights_only=False, map_location",
        ),
        (
            "symbolic links are followed",
            "    _check_regular(path, os.lstat(path))",
            "    path = path.resolve()\n    _check_regular(path, os.lstat(path))",
        ),
        (
            "references in a saved config are resolved",
            'reference = "${" in value or value == "???"',
            "reference = False",
        ),
        ("a run directory may contain links and pipes", "        run_directory.check_regular(path)\n", ""),
    ),
    *noticed_by(HOSTILE, "tests/storage/test_safe_torch_load.py")(
        (
            "archives that claim more than their file has are loaded",
            "if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):\n"
            '                    raise UnusualFileError("it is compressed")\n'
            "                if sum(entry.file_size for entry in entries) > path.stat().st_size:",
            "if not entries:",
        ),
    ),
    *noticed_by("tests/api/test_saved_defaults.py")(
        (
            "references in a saved config are looked for in no list",
            "        return [_plain(element, key, set()) for element in value]\n",
            "        return value\n",
        ),
        (
            "a saved config decides where the run is sent",
            "            check(value == defaults[key], key, value, why, remedy)\n",
            "            pass\n",
        ),
    ),
    *noticed_by(HOSTILE, "tests/storage/test_saved_config.py")(
        ("tags in a saved config are accepted", "    if short not in _PLAIN:\n", "    if False:\n"),
    ),
    *noticed_by(DISK)(
        (
            "a full disk ends the run with a traceback",
            "            raise StorageError(part, error.strerror or str(error)) from error\n",
            "            raise\n",
        ),
    ),
    *noticed_by(DISK, "tests/storage/test_checkpoint.py")(
        (
            "a failed checkpoint leaves its temporary directory behind",
            "                    (part / name).unlink(missing_ok=True)\n",
            "                    pass\n",
        ),
    ),
    *noticed_by("tests/storage/test_background_saving.py")(
        (
            "a run does not wait for the end of the thread that writes its last checkpoint",
            "            writing.result()\n",
            "            time.sleep(0.05)\n",
        ),
    ),
    *noticed_by("tests/storage/test_run_directory.py")(
        (
            "the lock of a run directory is not taken",
            "        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)\n",
            "        pass\n",
        ),
    ),
    *noticed_by("tests/system/test_signals.py::test_a_signal_before_training_ends_the_command")(
        (
            "SIGTERM is not handled",
            "STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, ",
            "STOP_SIGNALS = (signal.SIGINT, ",
        ),
    ),
    *noticed_by("tests/system/test_signals.py::test_resume_after_a_signal_is_bitwise_exact")(
        ("a run that was stopped exits with 0", '"stopped": STOPPED', '"stopped": DONE'),
    ),
    *noticed_by("tests/parallel/launch/test_faults.py::test_a_killed_rank_ends_the_run")(
        (
            "a rank that died is not noticed",
            "        return [rank for rank in ended if self.reports[rank] is None]\n",
            "        return []\n",
        ),
    ),
    *noticed_by("tests/test_resume.py::test_a_resume_that_is_refused_while_the_model_is_built_changes_nothing")(
        (
            "a resume that a rank refuses has already replaced the config of the run",
            "            result = trained(run, session, launcher, directory, begin)\n",
            "            begin()\n            result = trained(run, session, launcher, directory, begin)\n",
        ),
    ),
    *noticed_by("tests/test_resume.py::test_resuming_an_earlier_checkpoint_renames_later_ones")(
        (
            "a run resumed from an earlier checkpoint continues from the newest",
            "last_step = math.inf if named is None else step_of(named) or 0",
            "last_step = math.inf",
        ),
    ),
    *noticed_by("tests/storage/test_forged.py")(
        (
            "the types and shapes of a saved state are not compared",
            "    if not ok:\n        raise UnexpectedContentError(",
            "    if ok is None:\n        raise UnexpectedContentError(",
        ),
    ),
    *noticed_by("tests/storage/test_safe_torch_load.py")(
        (
            "tensors that are far larger than their file are loaded",
            "    _check_sizes(content, path.stat().st_size)\n",
            "",
        ),
    ),
    *noticed_by("tests/test_batching.py")(
        (
            "every rank trains on the samples of the first",
            "        index, count = self.data_shard\n        size",
            "        index, count = 0, self.data_shard[1]\n        size",
        ),
    ),
]


def copy_of_project(to: Path) -> Path:
    """Copy the files that the tests need to the directory `to`, and return `to`."""
    for name in COPIED:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(ROOT / name, to / name)
    return to


def first_failure(project: Path, test: str, faults: str) -> str:
    """Run a test or a file, with RUNNER_FAULTS=`faults`, and return the first test that failed; empty if none did."""
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


def plant(mutation: Mutation, project: Path) -> Path:
    """Plant a bug in a copy of the project, and return the path of the changed file, relative to `project`."""
    texts = {file: file.read_text(encoding="utf-8") for file in (project / "runner").rglob("*.py")}
    [file] = [file for file, text in texts.items() for _ in range(text.count(mutation.old))]
    file.write_text(texts[file].replace(mutation.old, mutation.new), encoding="utf-8")
    return file.relative_to(project)


def try_out(mutation: Mutation) -> str:
    """Plant a bug in a copy of the project, and return the first test that notices it; empty if none does."""
    with tempfile.TemporaryDirectory() as directory:
        project = copy_of_project(Path(directory))
        file = plant(mutation, project)
        for faults in ("", "all"):
            for test in mutation.tests:
                if failed := first_failure(project, test, faults):
                    return f"{file}: {failed}" + ", in `make faults`" * bool(faults)
    return ""


def main(words: list[str]) -> int:
    """Try the bugs whose description contains one of `words`, or all; return 0 if the tests noticed each, else 1."""
    chosen = [mutation for mutation in MUTATIONS if not words or any(word in mutation.bug for word in words)]
    noticed = 0
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        for mutation, failed in zip(chosen, pool.map(try_out, chosen), strict=True):
            print(f"{mutation.bug}: {failed or 'NOT NOTICED'}", flush=True)
            noticed += bool(failed)
    print(f"{noticed} of {len(chosen)} are noticed")
    return int(noticed < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
