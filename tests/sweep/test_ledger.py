"""A sweep that is stopped and started again does only what is missing."""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path

import pytest
import safetensors.torch
import torch
from helpers.command import run_command
from helpers.compose import FAST

from runner.config.errors import ConfigError
from runner.sweep.ledger import Sweep, read_ledger

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


def until(condition, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come in time"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sweep that nothing ended early."""
    cwd = tmp_path_factory.mktemp("whole")
    assert run_command(*TYPED, cwd=cwd)[0] == 0
    return only_sweep(cwd)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_sweep_goes_on_where_it_was_ended(number: signal.Signals, whole: Path, tmp_path: Path) -> None:
    cwd = tmp_path / "ended"
    process = Command(*TYPED, cwd=cwd)
    until(lambda: list(cwd.glob("outputs/sweeps/*/*/001-*/checkpoints/step_*")))
    os.kill(process, number)
    until(lambda: forks.code(cwd) is not None)
    assert forks.code(cwd) == (75 if number == signal.SIGTERM else -number)
    first = jobs(only_sweep(cwd))["000"]
    before = written(first)

    code, told = run_command(*TYPED, cwd=cwd)
    assert code == 0, told
    assert "done before: outputs" in str(told)
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


def test_what_was_refused_is_in_the_ledger_and_tried_again(tmp_path: Path) -> None:
    typed = (*FAST, "-m", "batch_size=64,7", "accumulation.steps=2", "steps=2", "resume=auto")
    assert run_command(*typed, cwd=tmp_path)[0] == 2
    ledger = read_ledger(only_sweep(tmp_path))
    assert [entry["code"] for entry in ledger["jobs"].values()] == [0, 2]
    assert "batch_size: got 7" in ledger["jobs"]["1"]["error"]
    assert not ledger["complete"]
    code, told = run_command(*typed, cwd=tmp_path)
    assert code == 2
    assert "done before" in str(told)
    assert "batch_size: got 7" in str(told)


def test_another_config_under_the_same_name_is_set_aside(tmp_path: Path) -> None:
    typed = (*FAST, "-m", "seed=1,2", "steps=2", "resume=auto")
    assert run_command(*typed, cwd=tmp_path)[0] == 0
    sweep = only_sweep(tmp_path)
    ledger = read_ledger(sweep)
    ledger["complete"] = False
    ledger["jobs"]["1"]["config_hash"] = "of another"
    (sweep / "sweep.json").write_text(json.dumps(ledger))
    other = jobs(sweep)["001"] / "config.yaml"
    other.write_text(other.read_text().replace("keep: 2", "keep: 3"))
    assert run_command(*typed, cwd=tmp_path)[0] == 0
    assert [path.name[:3] for path in sweep.iterdir() if path.name.endswith(".superseded")] == ["001"]
    assert len(list(sweep.glob("0*"))) == 3
    assert read_ledger(sweep)["complete"]


def test_without_auto_every_sweep_is_a_new_one(tmp_path: Path) -> None:
    for _ in range(2):
        assert run_command(*FAST, "-m", "seed=1,2", "steps=1", cwd=tmp_path)[0] == 0
    assert len(list(tmp_path.glob("outputs/sweeps/*/*"))) == 2


def test_a_sweep_cannot_go_on_in_one_runs_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="resume: got 'outputs/x': a sweep cannot go on in one run's directory"):
        Sweep(["seed=1,2"]).directory(tmp_path, "outputs/x")


def test_what_was_typed_is_compared_without_where_and_whether(tmp_path: Path) -> None:
    typed = ["seed=1,2", "resume=auto", "output_root=x", "epochs=1"]
    assert Sweep(typed).typed == Sweep(["epochs=1", "seed=1,2"]).typed == ["epochs=1", "seed=1,2"]
    (tmp_path / "before").mkdir()
    ledger = {"typed": ["epochs=1", "seed=1,2"], "complete": False, "jobs": {"0": {"code": 3, "config_hash": "a"}}}
    (tmp_path / "before" / "sweep.json").write_text(json.dumps(ledger))
    sweep = Sweep(typed)
    path = sweep.directory(tmp_path, "auto")
    assert path == tmp_path / "before"
    assert sweep.settled(path, 0, "a") == 3, "diverged is a result"
    assert sweep.settled(path, 0, "b") is None
    assert sweep.settled(path, 1, "a") is None
    assert Sweep(["epochs=2"]).directory(tmp_path, "auto").name != "before"
