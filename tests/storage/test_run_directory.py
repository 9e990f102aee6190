"""Tests of `runner.storage.run_directory`: unique directories and names, no writes elsewhere, results, and locks."""

import multiprocessing
import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest
from helpers.command import ROOT, TIMEOUT_SECONDS, child_environment, run_command
from helpers.compose import TINY_CPU
from helpers.permissions import enforced_permissions
from helpers.programs import FIXED_TIME, create_run_directories, hold_lock

from runner.config.errors import ConfigError
from runner.storage import run_directory as directory
from runner.storage.files import UnsafeFileError

NAME = re.compile(r"\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d-[0-9a-f]{6}")


def tree(root: Path, *without: str) -> dict[str, tuple[int, int]]:
    """Return size and modification time of everything below `root`, except what the tests and Python itself write."""
    skipped = {"__pycache__", "console.txt", "code", *without}
    found = {}
    for path, folders, files in os.walk(root):
        folders[:] = [folder for folder in folders if folder not in skipped]
        for name in {*folders, *files} - skipped:
            about = (Path(path) / name).stat()
            found[os.path.relpath(Path(path) / name, root)] = (about.st_size if name in files else 0, about.st_mtime_ns)
    return found


def test_ten_processes_in_the_same_second_make_fifty_directories(tmp_path):
    begin = time.time() + 1.0  # when all processes have started
    with ProcessPoolExecutor(10, multiprocessing.get_context("forkserver")) as pool:
        made = [path for paths in pool.map(create_run_directories, [tmp_path] * 10, [begin] * 10) for path in paths]
    assert len(set(made)) == len(made) == 50
    assert all(NAME.fullmatch(Path(path).name) and Path(path).is_dir() for path in made)
    assert {Path(path).name[:19] for path in made} == {FIXED_TIME}


def test_another_name_is_drawn_if_the_first_is_taken_and_a_given_name_is_refused(tmp_path, monkeypatch):
    names = iter(["a", "a", "a", "b"])
    monkeypatch.setattr(directory, "unique_name", lambda _: next(names))
    assert [directory.create(tmp_path), directory.create(tmp_path)] == [tmp_path / "a", tmp_path / "b"]
    with pytest.raises(ConfigError) as refusal:
        directory.create(tmp_path, "b", key="--run-directory")
    assert (refusal.value.key, refusal.value.got) == ("--run-directory", str(tmp_path / "b"))
    assert "File exists" in refusal.value.why


@pytest.mark.parametrize("parent", ["file/below", "/proc/nobody/writes/here"])
def test_a_root_where_no_directory_can_be_made_is_refused_by_key(parent, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError) as refusal:
        directory.create(tmp_path / parent)
    assert refusal.value.key == "output_root"
    assert parent in str(refusal.value.got)


def test_newest_step_is_0_if_the_checkpoints_cannot_be_read(tmp_path):
    (tmp_path / "checkpoints" / "step_00000002").mkdir(parents=True)
    assert directory.newest_step(tmp_path) == 2
    for path in (tmp_path, tmp_path / "checkpoints"):
        with enforced_permissions(path, 0):
            assert directory.newest_step(tmp_path) == 0


def test_a_run_writes_to_its_directory_of_any_name_and_nowhere_else(tmp_path):
    """The run starts in one directory, and writes to another beside it. The paths that it prints can be typed."""
    name = "größe-µ-日本 a=1,b=2 it's [1] {2} $HOME ~ %41 #"
    here, there = tmp_path / name, tmp_path / f"runs {name}"
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "other").write_text("as it was")
    before = tree(tmp_path, here.name, there.name)
    code, output = run_command(*TINY_CPU, "debug=smoke", "profiler=simple", f"output_root=../runs {name}", cwd=here)
    assert code == 0, output
    assert (tree(tmp_path, here.name, there.name), tree(here)) == (before, {})
    [run] = there.glob("*/*")
    assert run.parent.name == "smoke"
    names = {"config.yaml", "overrides.yaml", "environment.json", "result.json", "log.txt", "checkpoints", "profile"}
    left = {path.name for path in run.iterdir()}
    assert names <= left
    assert all(name in names or name.startswith(("events.", ".lock")) for name in left), left
    [shown, look] = re.findall(r"^(?:run:|look: tensorboard --logdir) (.*)$", output, re.MULTILINE)
    assert [(here / shlex.split(text)[0]).resolve() for text in (shown, look)] == [run, there]
    code, output = run_command(f"resume={shlex.split(shown)[0]}", "steps=3", cwd=here)
    assert code == 0, output
    assert directory.read_result(run)["steps"] == 3
    assert [path.name for path in there.glob("*/*")] == [run.name]


def test_the_source_may_be_read_only_and_modules_in_the_current_directory_are_not_imported(tmp_path):
    """Nor do the ranks of a job of a sweep import them, which is forked from a server started by `python -c`."""
    source, here = tmp_path / "source", tmp_path / "here"
    for room in ("runner", "models", "conf"):
        shutil.copytree(ROOT / room, source / room, ignore=shutil.ignore_patterns("*.pyc.*"))  # being written
    paths = [source, *source.rglob("*")]
    for path in paths:
        path.chmod(path.stat().st_mode & ~(stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH))
    before = tree(source)
    for name in ("conf/optimizer", "models"):
        (here / name).mkdir(parents=True)
    names = ("models", "secrets", "logging", "torch", "omegaconf", "hydra", "typing", "tensorboard", "yaml", "socket")
    for name in (*names, "selectors", "pickle", "tempfile", "models/__init__"):
        (here / f"{name}.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')\nraise SystemExit('{name}.py')")
    (here / "conf" / "config.yaml").write_text("seed: not ours")
    (here / "conf" / "optimizer" / "sgd.yaml").write_text("lr: not ours")
    # Root may write to read-only files; if the tests run as root, only the comparison below detects changes.
    variables = child_environment() | {"PYTHONPATH": str(source), "PYTHONDONTWRITEBYTECODE": "1"}
    program = [sys.executable, "-m", "runner", *TINY_CPU, "-m", "seed=1", "parallel=ddp", "steps=2"]
    process = subprocess.run(program, cwd=here, env=variables, capture_output=True, text=True, check=False)
    for path in paths:
        path.chmod(path.stat().st_mode | stat.S_IWUSR)
    assert process.returncode == 0, process.stderr
    assert tree(source) == before
    assert not (tmp_path / "imported").exists()
    [run] = here.glob("outputs/sweeps/*/*/0*")
    assert directory.read_result(run)["status"] == "done"
    assert "not ours" not in (run / "config.yaml").read_text()


def test_a_refusal_removes_the_directories_that_were_made_for_it(tmp_path):
    """The run directory is created before the model is refused; `outputs` existed before the command."""
    too_small = (*TINY_CPU, "model=convnet", "model.kernel_size=31")
    (tmp_path / "outputs").mkdir()
    code, output = run_command(*too_small, cwd=tmp_path)
    assert (code, output.startswith("model.kernel_size: got 31:")) == (2, True), output
    assert tree(tmp_path).keys() == {"outputs"}
    code, output = run_command(*too_small, "-m", "seed=1,2", "output_root=new/er", cwd=tmp_path)
    assert (code, output.count("model.kernel_size: got 31")) == (2, 1), output
    assert "0 of 2 jobs done, 2 refused" in output
    assert tree(tmp_path).keys() == {"outputs"}


@pytest.mark.cases(
    (["seed=1", "precision='16'"], "007-seed=1,precision=16"),
    (["name='a b'", "output_root='/tmp/x'"], "007-name=a_b,output_root=_tmp_x"),
    ([], "007-defaults"),
    (["name=größe"], "007-name=größe"),
    (["a=..."], "007-a="),
    (["optimizer.lr=0.1", "swept=1", "device=cpu"], "007-swept=1"),  # what differs between the jobs of a sweep
    ([f"name={'x' * 55}", f"experiment={'y' * 40}", "seed=1"], f"007-name={'x' * 55},experiment={'y' * 40}"),
    ([f"name={'x' * 80}", f"experiment={'y' * 40}", "seed=1"], f"007-name={'x' * 80}"),
)
def test_the_name_of_a_job_contains_its_overrides(overrides, name):
    assert directory.job_name(7, overrides, {"swept"}) == name


@pytest.mark.parametrize("letter", ["x", "😀"])
def test_the_name_of_a_job_fits_into_a_directory(letter, tmp_path):
    name = directory.job_name(7, [f"name={letter * 500}"])
    assert 100 < len(name.encode()) <= 120
    assert directory.create(tmp_path, name).is_dir()


def test_names_sort_by_time():
    names = [directory.unique_name(words) for words in (["seed=1"], [], ["a=1"]) * 5]
    assert all(NAME.match(name) for name in names)
    assert sorted(names) == names, "also those of the same second"


STAMP = "2026-01-02_03-04-05-a1b2c3"


@pytest.mark.cases(
    ([], STAMP),
    (["parallel=ddp", "precision='16'"], f"{STAMP}-parallel=ddp+precision=16"),
    (["output_root=/tmp/x", "resume=auto", "name='a b'", "hydra.verbose=true", "seed=1"], f"{STAMP}-seed=1"),
    (["data.token=s3cret", "data.url='https://ann:s3cret@host/x'", "seed=1"], f"{STAMP}-seed=1"),
    (["seed=1", "seed=2", "+seed=3", "~schedule"], f"{STAMP}-seed=3"),
    (["schedule.milestones=[0.5,0.7]", "a='../b c'"], f"{STAMP}-schedule.milestones=_0.5_0.7+a=.._b_c"),
    (["seed=1", f"data.root={'x' * 60}", "steps=3"], f"{STAMP}-seed=1"),
    (
        ["workload=dqn", "device=cpu", "log_every=5", "steps=3", "precision=bf16", "optimizer.lr=0.1"],
        f"{STAMP}-precision=bf16+optimizer.lr=0.1+workload=dqn+steps=3",
    ),
    ([f"data.root={'日' * 100}"], f"{STAMP}-data.root={'日' * 16}"),
)
def test_the_name_of_a_run_contains_its_overrides(overrides, name, monkeypatch):
    monkeypatch.setattr(time, "strftime", lambda *_: FIXED_TIME)
    monkeypatch.setattr(time, "time_ns", lambda: 0xA1B2C * 1000)
    monkeypatch.setattr(directory.secrets, "token_hex", lambda _: "3f")
    assert directory.unique_name(overrides) == name


NUMBERS = ["-" + "9" * 400, "9" * 5_000, "true", '"1"', "null", "[1]"]
DAMAGED_RESULTS = [
    *('{"status": "do', "[]", "null", "[" * 100_000, "{}", '{"status": 1, "steps": 1}'),
    *('{"status": "done"}', '{"status": "done", "steps": "3"}', '{"status": "done", "steps": true}'),
    *('{"status": "done", "steps": -1}', '{"status": "done", "steps": 1.5}', '{"status": ["done"], "steps": 1}'),
    *(f'{{"status": "done", "steps": {number}}}' for number in NUMBERS),
    *(f'{{"status": "done", "steps": 1, "seconds": {number}}}' for number in NUMBERS),
    *(f'{{"status": "done", "steps": 1, "samples_per_second": {number}}}' for number in NUMBERS),
    *(f'{{"status": "done", "steps": 1, "best": {{"metric": "a", "step": 1, "value": {n}}}}}' for n in NUMBERS),
]


@pytest.mark.parametrize("text", DAMAGED_RESULTS, ids=range(len(DAMAGED_RESULTS)))
def test_a_damaged_result_is_empty(text, tmp_path):
    path = tmp_path / directory.RESULT
    path.write_text('{"status": "done", "steps": 1, "seconds": 2, "best": {"metric": "a", "step": 1, "value": 0.5}}')
    assert directory.read_result(tmp_path)["steps"] == 1
    path.write_text(text)
    assert directory.read_result(tmp_path) == {}


PLACES = (directory.RESULT, "log.txt", ".lock", "checkpoints", "checkpoints/x/y", "wandb", "checkpoints/wandb/x")


def test_links_are_accepted_where_wandb_makes_them_and_directories_that_are_nested_too_deeply_are_not(tmp_path):
    logs = tmp_path / "wandb" / "offline-run-20260131_120000-abc" / "logs"
    logs.mkdir(parents=True)
    (logs / "debug-core.log").symlink_to("/dev/null")
    (tmp_path / "wandb" / "latest-run").symlink_to(logs.parent.name)
    deep = tmp_path.joinpath(*["d"] * 50)
    deep.mkdir(parents=True)
    directory.check_regular(tmp_path)
    (deep / "d").mkdir()
    with pytest.raises(UnsafeFileError, match="nested too deeply"):
        directory.check_regular(tmp_path)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("make", [lambda path: path.symlink_to("/dev/null"), os.mkfifo], ids=["link", "pipe"])
def test_a_run_directory_has_only_regular_files(make, place, tmp_path):
    directory.check_regular(tmp_path)
    path = tmp_path / place
    path.parent.mkdir(parents=True, exist_ok=True)
    make(path)
    with pytest.raises(UnsafeFileError) as refusal:
        directory.check_regular(tmp_path)
    assert refusal.value.filename == str(path)


@pytest.mark.parametrize("name", ["log.txt", "profile/simple.txt", ".lock"])
def test_files_that_a_run_writes_to_have_no_other_hard_link(name, tmp_path):
    """A checkpoint is replaced and never written to: programs that find equal files may have linked its files."""
    (tmp_path / "elsewhere").touch()
    run, checkpoint = tmp_path / "run", tmp_path / "run" / "checkpoints" / "step_00000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "config.yaml").hardlink_to(tmp_path / "elsewhere")
    directory.check_regular(run)
    (run / name).parent.mkdir(exist_ok=True)
    (run / name).hardlink_to(tmp_path / "elsewhere")
    with pytest.raises(UnsafeFileError) as refusal:
        directory.check_regular(run)
    assert refusal.value.filename == str(run / name)


def test_lock_does_not_follow_a_link(tmp_path):
    (tmp_path / "victim").write_text("mine")
    (tmp_path / ".lock").symlink_to(tmp_path / "victim")
    with pytest.raises(OSError):
        directory.lock(tmp_path)
    assert (tmp_path / "victim").read_text() == "mine"


def test_a_directory_is_locked_until_its_process_ends_however_it_ends(tmp_path):
    context = multiprocessing.get_context("forkserver")
    locked = context.Event()
    holder = context.Process(target=hold_lock, args=(tmp_path, locked))
    holder.start()
    try:
        assert locked.wait(TIMEOUT_SECONDS)
        assert directory.lock(tmp_path) is None
    finally:
        holder.kill()  # it would keep the process of the tests from its end
    holder.join()
    held = directory.lock(tmp_path)
    assert held is not None
    assert directory.lock(tmp_path) is None, "in one process too"
    held.close()
    again = directory.lock(tmp_path)
    assert again is not None
    again.close()
