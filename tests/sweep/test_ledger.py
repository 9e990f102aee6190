"""A sweep that is stopped and started again does only what is missing."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.command import Command, run_command, until
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
    other.write_text(other.read_text().replace("keep: 2", "keep: 3"))
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


def test_a_sweep_cannot_be_resumed_in_the_directory_of_one_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        Sweep(["seed=1,2"]).job_directory(job_config(tmp_path, resume="outputs/x"), 0, [])
    assert (refusal.value.key, refusal.value.got) == ("resume", "outputs/x")
    assert "resume=auto" in refusal.value.remedy


def test_a_job_has_a_labelled_directory_in_the_sweep(tmp_path: Path) -> None:
    sweep = Sweep(["seed=1,2"])
    first, second = (sweep.job_directory(job_config(tmp_path), n, [f"seed={n + 1}"]) for n in (0, 1))
    assert (first.name, second.name) == ("000-seed=1", "001-seed=2")
    assert first.parent == second.parent
    assert first.parent.parent == tmp_path / "sweeps" / "a"
    other = sweep.job_directory(job_config(tmp_path, name="b"), 2, [])
    assert (other.parent.parent.name, other.parent.name) == ("b", first.parent.name), "one name in every parent"
    assert not list(tmp_path.iterdir()), "nothing is made before a job runs"


def test_overrides_are_compared_without_order_output_root_and_resume(tmp_path: Path) -> None:
    typed = ["seed=1,2", "resume=auto", "output_root=x", "epochs=1"]
    assert Sweep(typed).typed == Sweep(["epochs=1", "seed=1,2"]).typed == ["epochs=1", "seed=1,2"]
    before = tmp_path / "sweeps" / "a" / "before"
    before.mkdir(parents=True)
    ledger = {"typed": ["epochs=1", "seed=1,2"], "complete": False, "jobs": {"0": {"code": 3, "config_hash": "a"}}}
    (before / "sweep.json").write_text(json.dumps(ledger))
    sweep = Sweep(typed)
    path = sweep.job_directory(job_config(tmp_path), 0, ["seed=1"]).parent
    assert path == before
    assert sweep.settled(path, 0, "a") == 3, "diverged is a result"
    assert sweep.settled(path, 0, "b") is None
    assert sweep.settled(path, 1, "a") is None
    assert Sweep(["epochs=2"]).job_directory(job_config(tmp_path), 0, []).parent.name != "before"
    assert Sweep(typed).job_directory(job_config(tmp_path, resume="never"), 0, []).parent.name != "before"


@pytest.mark.parametrize(
    ("codes", "complete"), [([0, 0], True), ([0, 3], True), ([0, 1], False), ([2, 0], False), ([0, 75], False)]
)
def test_a_sweep_is_complete_when_no_job_has_to_be_repeated(codes: list[int], complete: bool, tmp_path: Path) -> None:
    sweep = Sweep(["seed=1,2"])
    for number, code in enumerate(codes):
        path = sweep.job_directory(job_config(tmp_path), number, [f"seed={number}"])
        path.mkdir(parents=True)
        sweep.record(path.parent, number, code=code, config_hash="a")
        assert read_ledger(path.parent)["jobs"][str(number)] == {"code": code, "config_hash": "a"}
        assert not read_ledger(path.parent)["complete"]
    sweep.end()
    assert read_ledger(path.parent)["complete"] == complete
    again = Sweep(["seed=1,2"]).job_directory(job_config(tmp_path), 0, ["seed=0"]).parent
    assert (again == path.parent) == (not complete)


def test_no_ledger_or_half_of_one_is_empty(tmp_path: Path) -> None:
    assert read_ledger(tmp_path) == {}
    (tmp_path / "sweep.json").write_text('{"typed": [')
    assert read_ledger(tmp_path) == {}
