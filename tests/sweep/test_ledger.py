"""A sweep that is stopped and started again does only what is missing."""

from __future__ import annotations

import errno
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.command import Command, run_command, until
from helpers.compose import FAST

from runner.config.errors import ConfigError
from runner.storage.run_directory import StorageError
from runner.storage.saved_config import config_text, parse_config
from runner.sweep.ledger import Sweep
from runner.sweep.ledger_file import read_ledger

TYPED = (*FAST, "steps=400", "save_every=20", "eval_every=0", "log_every=100", "-m", "seed=1,2,3", "resume=auto")


def only_sweep(cwd: Path) -> Path:
    [path] = cwd.glob("outputs/sweeps/*/*")
    return path


def jobs(sweep: Path) -> dict[str, Path]:
    """The directories of a sweep's jobs by number."""
    return {path.name[:3]: path for path in sorted(sweep.glob("0*"))}


def weights(run: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(max((run / "checkpoints").glob("step_*")) / "model.safetensors")


def written(path: Path) -> dict[str, int]:
    """When each file below `path` was written, in nanoseconds."""
    return {str(file.relative_to(path)): file.stat().st_mtime_ns for file in path.rglob("*") if file.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep that nothing ended early."""
    cwd = tmp_path_factory.mktemp("whole")
    assert run_command(*TYPED, cwd=cwd)[0] == 0
    return only_sweep(cwd)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_sweep_resumes_where_it_was_ended(number: signal.Signals, whole: Path, tmp_path: Path) -> None:
    cwd = tmp_path / "ended"
    command = Command(cwd, *TYPED, kind="torch")
    until(lambda: command.code is not None or list(cwd.glob("outputs/sweeps/*/*/001-*/checkpoints/step_????????")))
    command.kill(number)
    assert command.wait()[0] == (75 if number == signal.SIGTERM else -number)
    first = jobs(only_sweep(cwd))["000"]
    before = written(first)

    code, told = run_command(*TYPED, cwd=cwd)
    assert code == 0, told
    assert f"{first.relative_to(cwd)}" in told, "it is named as done"
    assert written(first) == before, "what is done is left alone"
    wanted = jobs(whole)
    assert list(jobs(only_sweep(cwd))) == list(wanted) == ["000", "001", "002"]
    for job, path in jobs(only_sweep(cwd)).items():
        ours, theirs = weights(path), weights(wanted[job])
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs), job
    ledger = read_ledger(only_sweep(cwd))
    assert ledger["complete"]
    assert [entry["code"] for entry in ledger["jobs"].values()] == [0, 0, 0]

    assert run_command(*TYPED, cwd=cwd)[0] == 0
    assert len(list(cwd.glob("outputs/sweeps/*/*"))) == 2, "a complete sweep is not gone on with"


def test_a_refused_job_is_in_the_ledger_and_repeated(tmp_path: Path) -> None:
    typed = (*FAST, "-m", "batch_size=64,7", "accumulation.steps=2", "steps=2", "resume=auto")
    assert run_command(*typed, cwd=tmp_path)[0] == 2
    ledger = read_ledger(only_sweep(tmp_path))
    assert [entry["code"] for entry in ledger["jobs"].values()] == [0, 2]
    assert ledger["jobs"]["1"]["error"].startswith("batch_size: got 7:")
    assert not ledger["complete"]
    code, told = run_command(*typed, cwd=tmp_path)
    assert code == 2
    assert str(jobs(only_sweep(tmp_path))["000"].relative_to(tmp_path)) in told, "it is named as done"
    assert told.count("batch_size: got 7:") == 1


def test_another_config_under_the_same_name_is_set_aside(tmp_path: Path) -> None:
    typed = (*FAST, "-m", "seed=1,2", "steps=2", "resume=auto")
    assert run_command(*typed, cwd=tmp_path)[0] == 0
    sweep = only_sweep(tmp_path)
    ledger = read_ledger(sweep)
    ledger["complete"] = False
    ledger["jobs"]["1"]["config_hash"] = "of another"
    (sweep / "sweep.json").write_text(json.dumps(ledger))
    other = jobs(sweep)["001"] / "config.yaml"
    other.write_text(config_text(parse_config(other.read_bytes()) | {"keep": 3}))
    assert run_command(*typed, cwd=tmp_path)[0] == 0
    assert [path.name[:3] for path in sweep.iterdir() if path.name.endswith(".superseded")] == ["001"]
    assert len(list(sweep.glob("0*"))) == 3
    assert read_ledger(sweep)["complete"]


def test_without_auto_every_sweep_is_a_new_one(tmp_path: Path) -> None:
    for _ in range(2):
        assert run_command(*FAST, "-m", "seed=1,2", "steps=1", cwd=tmp_path)[0] == 0
    assert len(list(tmp_path.glob("outputs/sweeps/*/*"))) == 2


def job_config(root: Path, name: str = "a", resume: str = "auto") -> dict[str, Any]:
    return {"output_root": str(root), "name": name, "resume": resume}


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., Sweep]]:
    """Opens sweeps, which the end of the test closes."""
    with ExitStack() as stack:
        yield lambda *arguments: stack.enter_context(Sweep(*arguments))


def test_a_sweep_cannot_be_resumed_in_the_directory_of_one_run(opened: Callable[..., Sweep], tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        opened(["seed=1,2"]).job_directory(job_config(tmp_path, resume="outputs/x"), 0, [])
    assert (refusal.value.key, refusal.value.got) == ("resume", "outputs/x")
    assert "resume=auto" in refusal.value.remedy


def test_a_job_has_a_labelled_directory_in_the_sweep(opened: Callable[..., Sweep], tmp_path: Path) -> None:
    sweep = opened(["seed=1,2"])
    first, second = (sweep.job_directory(job_config(tmp_path), n, [f"seed={n + 1}"]) for n in (0, 1))
    assert (first.name, second.name) == ("000-seed=1", "001-seed=2")
    assert first.parent == second.parent
    assert first.parent.parent == tmp_path / "sweeps" / "a"
    other = sweep.job_directory(job_config(tmp_path, name="b"), 2, [])
    assert (other.parent.parent.name, other.parent.name) == ("b", first.parent.name), "one name in every parent"
    assert read_ledger(first.parent) == {"typed": ["seed=1,2"], "complete": False, "jobs": {}}
    sweep.end()
    sweep.close()
    assert not list(tmp_path.iterdir()), "without a job that ran, nothing is left"


def test_the_swept_keys_come_first_in_the_names_of_jobs(opened: Callable[..., Sweep], tmp_path: Path) -> None:
    constants = [f"model.option_{number}=constant" for number in range(10)]
    sweep = opened([*constants, "lr=1,2", "seed=1,2"], ["lr", "seed"])
    names = [
        sweep.job_directory(job_config(tmp_path), n, [*constants, f"lr={lr}", f"seed={seed}"]).name
        for n, (lr, seed) in enumerate(((1, 1), (1, 2), (2, 1)))
    ]
    first = "model.option_0=constant,model.option_1=constant,model.option_2=constant,model.option_3=constant"
    assert names == [f"000-lr=1,seed=1,{first}", f"001-lr=1,seed=2,{first}", f"002-lr=2,seed=1,{first}"]
    unswept = opened([]).job_directory(job_config(tmp_path), 0, ["a=1", "lr=1"])
    assert unswept.name == "000-a=1,lr=1", "as typed"


def test_secrets_are_neither_in_names_nor_in_the_ledger(opened: Callable[..., Sweep], tmp_path: Path) -> None:
    sweep = opened(["data.token=s3cret", "seed=1,2"], ["seed"])
    path = sweep.job_directory(job_config(tmp_path), 0, ["data.token=s3cret", "seed=1"])
    assert path.name == "000-seed=1,data.token=___"
    overrides, error = ["data.token=s3cret", "seed=1"], "https://ann:s3cret@host/x cannot be read"
    sweep.record(path.parent, 0, code=1, config_hash="a", overrides=overrides, error=error)
    ledger = read_ledger(path.parent)
    assert ledger["typed"] == ["data.token=***", "seed=1,2"]
    assert ledger["jobs"]["0"]["overrides"] == ["data.token=***", "seed=1"]
    assert ledger["jobs"]["0"]["error"] == "https://ann:***@host/x cannot be read"
    assert overrides[0] == "data.token=s3cret"
    for _ in range(2):  # it is found again with the secret, by the process that ended it or another
        again = opened(["data.token=s3cret", "seed=1,2"])
        path.mkdir(exist_ok=True)
        sweep.close()
        assert again.job_directory(job_config(tmp_path), 0, []).parent == path.parent
        sweep = again


def test_names_that_are_not_utf_8_can_be_recorded(opened: Callable[..., Sweep], tmp_path: Path) -> None:
    root = os.fsdecode(b"data.root=a\xff")
    sweep = opened([root, "seed=1,2"])
    path = sweep.job_directory(job_config(tmp_path), 0, [root, "seed=1"])
    sweep.record(path.parent, 0, code=1, config_hash="a", overrides=[root, "seed=1"], error=f"{root} is missing")
    ledger = read_ledger(path.parent)
    assert ledger["typed"] == ["data.root=a\\xff", "seed=1,2"]
    assert ledger["jobs"]["0"]["error"] == "data.root=a\\xff is missing"


def test_overrides_are_compared_without_order_output_root_and_resume(
    opened: Callable[..., Sweep], tmp_path: Path
) -> None:
    typed = ["seed=1,2", "resume=auto", "output_root=x", "epochs=1"]
    assert opened(typed).typed == opened(["epochs=1", "seed=1,2"]).typed == ["epochs=1", "seed=1,2"]
    before = tmp_path / "sweeps" / "a" / "before"
    before.mkdir(parents=True)
    ledger = {"typed": ["epochs=1", "seed=1,2"], "complete": False, "jobs": {"0": {"code": 3, "config_hash": "a"}}}
    (before / "sweep.json").write_text(json.dumps(ledger))
    sweep = opened(typed)
    path = sweep.job_directory(job_config(tmp_path), 0, ["seed=1"]).parent
    assert path == before
    assert sweep.settled(path, 0, "a") == 3, "diverged is a result"
    assert sweep.settled(path, 0, "b") is None
    assert sweep.settled(path, 1, "a") is None
    assert opened(["epochs=2"]).job_directory(job_config(tmp_path), 0, []).parent.name != "before"
    assert opened(typed).job_directory(job_config(tmp_path, resume="never"), 0, []).parent.name != "before"


@pytest.mark.parametrize(
    ("codes", "complete"), [([0, 0], True), ([0, 3], True), ([0, 1], False), ([2, 0], False), ([0, 75], False)]
)
def test_a_sweep_is_complete_when_no_job_has_to_be_repeated(
    opened: Callable[..., Sweep], codes: list[int], complete: bool, tmp_path: Path
) -> None:
    sweep = opened(["seed=1,2"])
    for number, code in enumerate(codes):
        path = sweep.job_directory(job_config(tmp_path), number, [f"seed={number}"])
        path.mkdir(parents=True)
        sweep.record(path.parent, number, code=code, config_hash="a")
        assert read_ledger(path.parent)["jobs"][str(number)] == {"code": code, "config_hash": "a"}
        assert not read_ledger(path.parent)["complete"]
    sweep.end()
    sweep.close()
    path = next(tmp_path.glob("sweeps/a/*/000*"))
    assert read_ledger(path.parent)["complete"] == complete
    again = opened(["seed=1,2"]).job_directory(job_config(tmp_path), 0, ["seed=0"]).parent
    assert (again == path.parent) == (not complete)


# ---------------------------------------------------------------------------------------------------------------------
# Two processes


def test_a_sweep_that_another_process_runs_is_refused_and_left_alone(
    opened: Callable[..., Sweep], tmp_path: Path
) -> None:
    first = opened(["seed=1,2"])
    path = first.job_directory(job_config(tmp_path), 0, ["seed=1"])
    path.mkdir()
    first.record(path.parent, 0, code=0, config_hash="a")
    before = (path.parent / "sweep.json").read_bytes()
    second = opened(["seed=1,2"])
    for number in (0, 1):
        with pytest.raises(ConfigError) as refusal:
            second.job_directory(job_config(tmp_path), number, ["seed=1"])
        assert (refusal.value.key, refusal.value.got) == ("resume", "auto")
        assert refusal.value.why == f"another process (pid {os.getpid()}) runs this sweep, {path.parent}"
    second.end()
    assert (path.parent / "sweep.json").read_bytes() == before
    others = [opened(["seed=1,3"]), opened(["seed=1,2"])]
    configs = [job_config(tmp_path), job_config(tmp_path, resume="never")]
    for other, config in zip(others, configs, strict=True):
        assert other.job_directory(config, 0, []).parent != path.parent, "another sweep is not waited for"
        other.close()
    first.close()
    assert second.job_directory(job_config(tmp_path), 1, ["seed=2"]).parent == path.parent, "it is free again"


def test_one_sweep_typed_twice_at_once_runs_once(tmp_path: Path) -> None:
    typed = (*TYPED, "steps=100000")
    commands = [Command(tmp_path / name, *typed, f"output_root={tmp_path}", kind="torch") for name in ("a", "b")]
    until(lambda: any(command.code is not None for command in commands))
    ended, running = sorted(commands, key=lambda command: command.code is None)
    assert ended.wait()[0] == 2, ended.console
    assert f"another process (pid {running.pid}) runs this sweep" in ended.console
    until(lambda: running.code is not None or list(tmp_path.glob("sweeps/*/*/000-*/checkpoints/step_????????")))
    running.kill(signal.SIGTERM)
    assert running.wait()[0] == 75, running.console
    [sweep] = tmp_path.glob("sweeps/*/*")
    assert {number: entry["code"] for number, entry in read_ledger(sweep)["jobs"].items()} == {"0": 75}


def test_other_ranks_write_nothing(
    opened: Callable[..., Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = opened(["seed=1,2"])
    path = first.job_directory(job_config(tmp_path), 0, ["seed=1"])
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "29500")
    before = (path.parent / "sweep.json").read_bytes()
    for resume in ("auto", "never"):
        rank = opened(["seed=1,2"])
        directory = rank.job_directory(job_config(tmp_path, resume=resume), 0, ["seed=1"])
        assert (directory.parent == path.parent) == (resume == "auto")
        rank.record(directory.parent, 0, code=0, config_hash="a")
        rank.end()
        rank.close()
    assert (path.parent / "sweep.json").read_bytes() == before
    assert list((tmp_path / "sweeps" / "a").iterdir()) == [path.parent]


# ---------------------------------------------------------------------------------------------------------------------
# Damaged ledgers and disks

GOOD: dict[str, Any] = {"typed": ["seed=1,2"], "complete": False, "jobs": {"0": {"code": 0, "config_hash": "a"}}}
DAMAGED: dict[str, bytes] = {
    "half of it": json.dumps(GOOD).encode()[:30],
    "nothing": b"",
    "bytes": bytes(range(256)),
    "YAML": b"typed: [seed=1]\ncomplete: false\n",
    "a list": b"[]",
    "a number": b"1e999",
    "nested deeply": b"[" * 100_000,
    "a key twice": b'{"typed": [], "complete": true, "complete": false, "jobs": {}}',
    "a number of many digits": b'{"typed": ' + b"9" * 5000 + b"}",
}
OTHER_TYPES: dict[str, dict[str, Any]] = {
    "complete": {"complete": "no"},
    "jobs a list": {"jobs": [1]},
    "jobs missing": {"jobs": None},
    "an entry": {"jobs": {"0": 3}},
    "no code": {"jobs": {"0": {"config_hash": "a"}}},
    "a code": {"jobs": {"0": {"code": "0", "config_hash": "a"}}},
    "a code of truth": {"jobs": {"0": {"code": True, "config_hash": "a"}}},
    "overrides": {"jobs": {"0": {"code": 0, "config_hash": "a", "overrides": "seed=1"}}},
    "a directory": {"jobs": {"0": {"code": 0, "config_hash": "a", "directory": 5}}},
}


def write_ledger(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "sweeps" / "a" / "before"
    path.mkdir(parents=True)
    (path / "sweep.json").write_bytes(content)
    return path


@pytest.mark.parametrize("damage", DAMAGED)
def test_a_damaged_ledger_is_ignored_with_a_warning(
    opened: Callable[..., Sweep], damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_ledger(tmp_path, DAMAGED[damage])
    assert read_ledger(path) == {}
    assert caplog.messages[0].startswith(f"{path}/sweep.json is ignored: ")
    assert opened(["seed=1,2"]).job_directory(job_config(tmp_path), 0, []).parent != path
    assert (path / "sweep.json").read_bytes() == DAMAGED[damage]


@pytest.mark.parametrize("key", OTHER_TYPES)
def test_a_damaged_ledger_of_this_sweep_is_refused_and_of_another_ignored(
    opened: Callable[..., Sweep], key: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_ledger(tmp_path, json.dumps(GOOD | OTHER_TYPES[key]).encode())
    with pytest.raises(ConfigError) as refusal:
        opened(["seed=1,2"]).job_directory(job_config(tmp_path), 0, [])
    assert (refusal.value.key, refusal.value.got) == ("resume", "auto")
    assert refusal.value.why.startswith(f"{path}/sweep.json is damaged: ")
    assert caplog.messages == []
    assert opened(["seed=5"]).job_directory(job_config(tmp_path), 0, []).parent != path
    assert caplog.messages[0].startswith(f"{path}/sweep.json is ignored: ")
    assert opened(["seed=1,2"]).job_directory(job_config(tmp_path, resume="never"), 0, []).parent != path


@pytest.mark.parametrize("kind", ["pipe", "link", "directory", "large"])
def test_a_ledger_that_is_no_plain_file_is_not_read(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = tmp_path / "sweep.json"
    if kind == "large":
        ledger.touch()
        os.truncate(ledger, 10**9)
    make = {"pipe": os.mkfifo, "link": lambda path: path.symlink_to("/dev/zero"), "directory": Path.mkdir}
    make.get(kind, Path.touch)(ledger)
    assert read_ledger(tmp_path) == {}
    assert len(caplog.messages) == 1


def test_a_ledger_that_cannot_be_written_is_an_error(
    opened: Callable[..., Sweep], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    sweep = opened(["seed=1,2"])
    path = sweep.job_directory(job_config(tmp_path), 0, ["seed=1"]).parent
    monkeypatch.setattr("runner.sweep.ledger.write_json", fail)
    with pytest.raises(StorageError) as caught:
        sweep.record(path, 0, code=0, config_hash="a")
    assert (caught.value.path, caught.value.why) == (path / "sweep.json", "Read-only file system")
    with pytest.raises(ConfigError) as refusal:
        opened(["seed=3"]).job_directory(job_config(tmp_path), 0, ["seed=1"])
    assert refusal.value.key == "output_root"
    assert "Read-only file system" in refusal.value.why


def test_a_good_ledger_is_read_and_none_is_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert read_ledger(tmp_path) == {}
    (tmp_path / "sweep.json").write_text(json.dumps(GOOD))
    assert read_ledger(tmp_path) == GOOD
    assert caplog.messages == []
