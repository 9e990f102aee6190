"""A run that is killed, stopped or crashes at any moment, and is resumed, ends bitwise where one left in peace ends."""

from __future__ import annotations

import gc
import json
import logging
import os
import random
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.command import run_command
from helpers.compose import FAST, built, composed
from helpers.events import curves, events
from omegaconf import OmegaConf
from PIL import Image

import runner.train
from runner.config.errors import ConfigError
from runner.resume import check_resumable, claimed_directory
from runner.run import CrashedError, Result, Run, config_hash
from runner.storage import run_directory as directory
from runner.train import train

HARD = ("data.crop=2", "model.dropout=0.2", "accumulation=2", "batch_size=32")
"""What makes a resume hard: random augmentation, dropout, a step in parts."""


def outcome(path: Path) -> dict[str, Any]:
    """All that the run at `path` computed: weights, moments, random states, curves, pictures; no times, no memory."""
    newest = sorted((path / "checkpoints").glob("step_*[0-9]"))[-1]
    state = torch.load(newest / "state.pt", weights_only=True)
    read = events(path)
    return {
        "name": newest.name,
        "weights": safetensors.torch.load_file(newest / "model.safetensors"),
        "state": {key: state[key] for key in ("optimizer", "precision", "metrics", "best", "window")},
        "local": torch.load(newest / "rank_0.pt", weights_only=True),
        "curves": {tag: points for tag, points in curves(path).items() if not tag.startswith(("time/", "memory/"))},
        "pictures": {t: [(i.step, i.encoded_image_string) for i in read.Images(t)] for t in read.Tags()["images"]},
    }


def assert_same(got: Any, wanted: Any, where: str = "") -> None:
    """Bitwise equality of nested values."""
    assert type(got) is type(wanted), where
    if isinstance(got, dict):
        assert set(got) == set(wanted), where
        for key, value in got.items():
            assert_same(value, wanted[key], f"{where}/{key}")
    elif isinstance(got, torch.Tensor):
        assert (got.dtype, got.shape) == (wanted.dtype, wanted.shape), where
        bits, wanted_bits = (t.contiguous().flatten().view(torch.uint8) for t in (got, wanted))
        assert bits.equal(wanted_bits), where
    elif isinstance(got, list | tuple):
        assert len(got) == len(wanted), where
        for index, value in enumerate(got):
            assert_same(value, wanted[index], f"{where}/{index}")
    else:
        assert got == wanted, where


def only_run(cwd: Path) -> Path:
    [path] = cwd.glob("outputs/*/*")
    return path


# ---------------------------------------------------------------------------------------------------------------------
# Killed


def train_with_kills(cwd: Path, arguments: list[str], kills: int, seconds: float) -> int:
    """Run the command to its end, killed up to `kills` times and resumed; returns how often it was killed."""
    killed = 0
    while True:
        runs = [path.parent for path in cwd.glob("outputs/*/*/config.yaml")]
        sessions = len(list(cwd.glob("outputs/*/*/events*")))
        pid = Command(*([f"resume={runs[0]}"] if runs else arguments), cwd=cwd)
        # Most kills hit the loop; some the start, where the directory is claimed and the config written.
        early = time.monotonic() + random.choice([0.3, 60, 60, 60, 60])
        while forks.code(cwd) is None and len(list(cwd.glob("outputs/*/*/events*"))) == sessions:
            if time.monotonic() > early:
                break
            time.sleep(0.002)
        time.sleep(random.uniform(0, seconds))
        while (code := forks.code(cwd)) is None:
            if killed < kills:
                with suppress(ProcessLookupError):  # it has just ended
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.005)
        if code == 0:
            return killed
        assert code == -signal.SIGKILL, (cwd / "console.txt").read_text()
        killed += 1


def assert_kills_change_nothing(tmp_path: Path, arguments: list[str], kills: int) -> None:
    code, said = run_command(*arguments, cwd=tmp_path / "whole")
    assert code == 0, said
    result = json.loads((only_run(tmp_path / "whole") / "result.json").read_text())
    wanted = outcome(only_run(tmp_path / "whole"))
    left = kills
    while left:
        cwd = tmp_path / f"killed_{left}"
        left -= train_with_kills(forks, cwd, arguments, left, result["seconds"] / 2)
        path = only_run(cwd)
        assert_same(outcome(path), wanted)
        again = json.loads((path / "result.json").read_text())
        assert {k: again[k] for k in ("status", "steps", "metrics", "best", "config_hash")} == {
            k: result[k] for k in ("status", "steps", "metrics", "best", "config_hash")
        }
        assert not list(path.glob("checkpoints/*.corrupt*"))
        assert not list(path.glob("checkpoints/tmp.*"))


@pytest.mark.parametrize("kills", [10, pytest.param(100, marks=pytest.mark.slow)])
def test_killed_at_any_moment(tmp_path: Path, kills: int) -> None:
    schedule = ["steps=100", "save_every=4", "log_every=3", "eval_every=25", "optimizer=adamw"]
    assert_kills_change_nothing(forks, tmp_path, [*FAST, *HARD, *schedule], kills)


def pictures(root: Path) -> None:
    """Two classes of random pictures as PNG files."""
    generator = torch.Generator().manual_seed(0)
    for split, count in (("train", 20), ("val", 4)):
        for name in ("cat", "dog"):
            (root / split / name).mkdir(parents=True)
            for i in range(count):
                pixels = torch.randint(256, (12, 16, 3), generator=generator, dtype=torch.uint8)
                Image.frombytes("RGB", (16, 12), pixels.numpy().tobytes()).save(root / split / name / f"{i}.png")


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_with_data_workers(tmp_path: Path, kills: int) -> None:
    pictures(tmp_path / "pictures")
    data = ["data=imagefolder", f"data.root={tmp_path}/pictures", "data.size=8", "data.workers=1"]
    schedule = ["steps=60", "save_every=4", "log_every=3", "eval_every=30", "batch_size=8", "accumulation=2"]
    arguments = ["model=tiny", "model.dropout=0.2", "device=cpu", "device.threads=1", *data, *schedule]
    assert_kills_change_nothing(forks, tmp_path, arguments, kills)


# ---------------------------------------------------------------------------------------------------------------------
# Stopped, and crashed, at each step


class CrashError(Exception):
    """In place of any error in the middle of a run."""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Run]:
    """Train a command line in `tmp_path / name`, up to a SIGTERM at the step `signalled`, or an error at `crashed`."""

    def train_it(name: str, *overrides: str, signalled: int = 0, crashed: int = 0) -> Run:
        run = built(*FAST, *HARD, *overrides)
        run.prepare()
        run.directory = tmp_path / name
        run.directory.mkdir(exist_ok=True)

        def after_step(model: torch.nn.Module, step: int) -> None:
            if step == signalled:
                signal.raise_signal(signal.SIGTERM)
            if step == crashed:
                raise CrashError

        monkeypatch.setattr(run.workload, "after_step", after_step)
        for owner, what, result in (
            (run.workload, "pictures", {}),
            (runner.train, "environment", {}),
            (gc, "collect", 0),
        ):
            monkeypatch.setattr(owner, what, lambda *_, result=result: result)  # they would take most of the time
        run.result = train(run)  # pyright: ignore[reportAttributeAccessIssue]
        return run

    return train_it


STEPS = 14
SHORT = (f"steps={STEPS}", "save_every=5", "log_every=3", "eval_every=7")


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (("optimizer=sgd",), range(1, STEPS)),
        (("optimizer=adamw", "max_grad_norm=0.5"), (1, 6, 13)),
        (("optimizer=adam", "optimizer.fused=false", "channels_last=false"), (3,)),
        (("optimizer=sgd", "optimizer.momentum=0"), (4,)),
        (("precision=bf16",), (2, 8)),
        (("precision=16",), (7,)),
        (("precision=64",), (9,)),
        (("deterministic=true", "schedule=cosine", "schedule.warmup=0.3"), (2, 11)),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, tuple) and isinstance(value[0], str) else "",
)
def test_stopped_at_a_step(session: Callable[..., Run], overrides: tuple[str, ...], steps: Any) -> None:
    wanted = outcome(session("whole", *SHORT, *overrides).directory)
    for step in steps:
        stopped = session(f"stopped_{step}", *SHORT, *overrides, signalled=step)
        assert (stopped.result.status, stopped.result.steps) == ("stopped", step)
        resumed = session(f"stopped_{step}", *SHORT, *overrides)
        assert resumed.result.status == "done"
        assert_same(outcome(resumed.directory), wanted)


def test_crashed_at_each_step(session: Callable[..., Run]) -> None:
    wanted = outcome(session("whole", *SHORT).directory)
    for step in range(1, STEPS + 1):
        with pytest.raises(CrashedError) as crash:
            session(f"crashed_{step}", *SHORT, crashed=step)
        assert isinstance(crash.value.__cause__, CrashError)
        assert crash.value.result.steps == step - 1
        assert crash.value.result.metrics.keys() >= ({"train/loss"} if step > 3 else set())
        assert_same(outcome(session(f"crashed_{step}", *SHORT).directory), wanted)


def test_crashed_again_and_again(session: Callable[..., Run]) -> None:
    wanted = outcome(session("whole", *SHORT).directory)
    for step in (4, 4, 6, 9, 13, 11, 14):
        with pytest.raises(CrashedError):
            session("crashed", *SHORT, crashed=step)
    assert_same(outcome(session("crashed", *SHORT).directory), wanted)


def test_a_torn_event_at_the_end_of_a_session_hides_nothing(session: Callable[..., Run]) -> None:
    wanted = outcome(session("whole", *SHORT).directory)
    with pytest.raises(CrashedError):
        session("torn", *SHORT, crashed=13)
    path = session("whole", *SHORT).directory.with_name("torn")
    [file] = path.glob("events*")
    os.truncate(file, file.stat().st_size - 7)  # the last record: the point of step 12, which is computed again
    assert_same(outcome(session("torn", *SHORT).directory), wanted)


def test_with_the_newest_damaged_the_end_is_the_same(session: Callable[..., Run]) -> None:
    wanted = outcome(session("whole", *SHORT).directory)
    path = session("damaged", *SHORT, signalled=12).directory
    (path / "checkpoints/step_00000012/state.pt").write_bytes(b"")
    assert_same(outcome(session("damaged", *SHORT).directory), wanted)
    assert (path / "checkpoints/step_00000012.corrupt").is_dir()


def test_random_states_are_put_back(session: Callable[..., Run]) -> None:
    path = session("whole", *SHORT).directory
    saved = torch.load(path / "checkpoints/step_00000014/rank_0.pt", weights_only=True)["random"]["cpu"]
    torch.manual_seed(123)
    session("whole", *SHORT)
    assert torch.get_rng_state().equal(saved)


def test_one_rank_takes_over_the_sums_that_were_of_all(
    session: Callable[..., Run], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """They are summed over the ranks again at the next log; and a rank that was not there draws from its own seed."""
    run = session("ranks", *SHORT, signalled=5)  # the steps 4 and 5 are not logged yet
    windows = {}
    for rank in (0, 1):
        monkeypatch.setattr(type(run.parallel), "rank", property(lambda _, rank=rank: rank))
        with caplog.at_level(logging.INFO, logger="runner"):
            state = runner.train.prepare(run, torch.device("cpu"))
        windows[rank] = state.window.peek(lambda sums: sums, 5)
    saved = torch.load(run.directory / "checkpoints/step_00000005/state.pt", weights_only=True)["window"]
    assert saved.shape == (2, 2)
    assert windows[0].equal(saved)
    assert windows[1].equal(torch.zeros(2, 2))
    assert "rank 1 was not there" in caplog.text
    assert "rank 0 was not there" not in caplog.text


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw"])
def test_moments_get_the_layout_of_their_parameters(optimizer: str) -> None:
    """torch's fused kernels on the CPU pair the numbers of two layouts wrongly, without a word."""
    run = built(*FAST, f"optimizer={optimizer}")
    run.workload.prepare()
    images = run.workload.held_out.inputs[:16]  # pyright: ignore[reportAttributeAccessIssue]

    def placed() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = run.parallel.place(run.workload.build_model(), torch.device("cpu"), run)
        return model, run.optimizer.build(model)

    def step(model: torch.nn.Module, update: torch.optim.Optimizer) -> None:
        model(images).square().mean().backward()
        update.step()
        update.zero_grad()

    whole, resumed = placed(), placed()
    step(*whole)
    run.parallel.load_full_state(*resumed, *run.parallel.full_state(*whole))
    for parameter, state in resumed[1].state.items():
        assert all(t.stride() == parameter.stride() for t in state.values() if t.shape == parameter.shape)
    assert any(not p.is_contiguous() for p in resumed[0].parameters()), "channels_last is another layout here"
    step(*whole)
    step(*resumed)
    assert_same(resumed[0].state_dict(), whole[0].state_dict())


# ---------------------------------------------------------------------------------------------------------------------
# What may change on a resume, and what may not


@pytest.mark.parametrize(
    ("change", "tolerance"),
    [
        *[("log_every=2", 0), ("eval_every=4", 0), ("save_every=3", 0), ("keep=1", 0), ("profiler=simple", 0)],
        *[("channels_last=false", 1e-5), ("accumulation=4", 1e-5), ("optimizer.fused=false", 1e-5)],
        *[("precision=64", 1e-4), ("precision=bf16", 0.2), ("precision=16", 0.2)],
    ],
)
def test_how_it_is_done_may_change(session: Callable[..., Run], change: str, tolerance: float) -> None:
    plain = (*SHORT, "model.dropout=0", "optimizer=sgd")  # dropout draws by micro-batch
    whole = outcome(session("whole", *plain).directory)["weights"]
    stopped = session("changed", *plain, signalled=6)
    resumed = session("changed", *plain, change)
    check_resumable(stopped.config, resumed.config, "PATH")
    assert resumed.result.steps == STEPS
    for name, tensor in outcome(resumed.directory)["weights"].items():
        difference = (tensor - whole[name]).norm() / whole[name].norm()
        assert difference <= tolerance, (name, difference)


@pytest.mark.parametrize(
    ("change", "shown"),
    [
        ("seed=1", "seed: 0 then, 1 now"),
        ("batch_size=32", "batch_size: 64 then, 32 now"),
        ("model.hidden=32", "model.hidden: 64 then, 32 now"),
        ("model=convnet", "model.channels: [16, 32] then, [20, 20] now"),
        ("data.size=16", "data.size: 8 then, 16 now"),
        ("data.crop=1", "data.crop: 0 then, 1 now"),
        ("optimizer=adam", "optimizer: runner.optimizer.SGD then, runner.optimizer.Adam now"),
        ("workload.label_smoothing=0.1", "workload.label_smoothing: 0.0 then, 0.1 now"),
    ],
)
def test_what_is_computed_may_not_change(change: str, shown: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_resumable(composed(*FAST, "data.crop=0"), composed(*FAST, "data.crop=0", change), "PATH")
    assert shown in caught.value.why
    assert caught.value.key == "resume"


@pytest.mark.parametrize(
    "change",
    [
        *["optimizer.lr=0.3", "epochs=3", "schedule=cosine", "precision=bf16", "accumulation=4", "device.threads=2"],
        *["workload.eval_batch_size=7", "name=b", "deterministic=true", "model.checkpoint_activations=true", "keep=9"],
    ],
)
def test_how_may_change(change: str) -> None:
    check_resumable(composed(*FAST), composed(*FAST, change), "PATH")


def test_a_config_is_the_same_after_its_file(tmp_path: Path) -> None:
    config = composed(*FAST, "optimizer=adam", "optimizer.eps=1e-12", "max_grad_norm=1e4", "name=on")
    directory.write_config(tmp_path, config, [])
    saved: Any = OmegaConf.to_container(OmegaConf.load(tmp_path / "config.yaml"))
    assert saved == config
    assert config_hash(saved) == config_hash(config)


# ---------------------------------------------------------------------------------------------------------------------
# Which directory


def claim(cwd: Path, *overrides: str) -> Run:
    """A run with its directory under `cwd`, claimed and let go, as one that was killed before its first step."""
    run = built(*FAST, "steps=4", *overrides)
    run.prepare()
    with claimed_directory(run, cwd / "test", None, list(overrides)) as run.directory:
        pass
    return run


def leave(run: Run, status: str, steps: int = 4) -> None:
    directory.write_json(run.directory / "result.json", Result(status, steps).as_dict())


def test_auto_goes_on_with_the_newest_unfinished(tmp_path: Path) -> None:
    first, second, other = claim(tmp_path), claim(tmp_path), claim(tmp_path, "optimizer.lr=0.2")
    names = sorted(run.directory for run in (first, second, other))
    assert len(set(names)) == 3
    newest = max(first.directory, second.directory)
    for status in ("stopped", "crashed", ""):
        if status:
            leave(next(run for run in (first, second) if run.directory == newest), status, 2)
        assert claim(tmp_path, "resume=auto").directory == newest
    assert claim(tmp_path, "resume=auto", "optimizer.lr=0.2").directory == other.directory
    assert claim(tmp_path, "resume=auto", "seed=5").directory not in names, "anew where there is none"


def test_auto_passes_by_what_is_done_or_worked_on(tmp_path: Path) -> None:
    older = claim(tmp_path)
    time.sleep(1.1)  # directories sort by their second
    newer = claim(tmp_path)
    held = directory.lock(newer.directory)
    assert held is not None
    with held:
        assert claim(tmp_path, "resume=auto").directory == older.directory
    leave(newer, "done")
    assert claim(tmp_path, "resume=auto").directory == older.directory
    leave(older, "done")
    assert claim(tmp_path, "resume=auto").directory not in (older.directory, newer.directory)


def test_two_at_once_get_two_directories(tmp_path: Path) -> None:
    claim(tmp_path)
    runs = [built(*FAST, "steps=4", "resume=auto") for _ in range(3)]
    for run in runs:
        run.prepare()
    with (
        claimed_directory(runs[0], tmp_path / "test", None, []) as first,
        claimed_directory(runs[1], tmp_path / "test", None, []) as second,
        claimed_directory(runs[2], tmp_path / "test", None, []) as third,
    ):
        assert len({first, second, third}) == 3


def test_a_run_in_use_is_refused_and_left_alone(tmp_path: Path) -> None:
    run = claim(tmp_path)
    for step in (2, 4):
        (run.directory / "checkpoints" / directory.step_name(step)).mkdir(parents=True)
    before = {path: path.stat().st_mtime_ns for path in run.directory.rglob("*") if path.name != ".lock"}
    held = directory.lock(run.directory)
    assert held is not None
    with held:
        for source in (run.directory, run.directory / "checkpoints/step_00000002"):
            with pytest.raises(ConfigError, match="another process is at work in it"):
                claim(tmp_path, f"resume={source}")
    assert {path: path.stat().st_mtime_ns for path in run.directory.rglob("*") if path.name != ".lock"} == before


def test_a_name_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    run = claim(tmp_path)
    for name in ("step_00000002", "step_00000003.superseded"):
        (run.directory / "checkpoints" / name).mkdir(parents=True)
    for name in ("step_00000009", "step_00000003.superseded", "tmp.step_00000003"):
        with pytest.raises(ConfigError, match="there is no such checkpoint") as caught:
            claim(tmp_path, f"resume={run.directory}/checkpoints/{name}")
        assert "step_00000002" in caught.value.remedy
    with pytest.raises(ConfigError, match="there is no run"):
        claim(tmp_path, f"resume={tmp_path}")


def test_fewer_steps_than_are_done_are_refused(tmp_path: Path) -> None:
    """It would be done with another length than its own, without an evaluation at its end."""
    run = claim(tmp_path)
    for step in (4, 9):
        (run.directory / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
    with pytest.raises(ConfigError, match=r"^steps: got 8: 9 are done already\n  steps=10 or more"):
        claim(tmp_path, f"resume={run.directory}", "steps=8")
    assert claim(tmp_path, f"resume={run.directory}", "steps=9").directory == run.directory
    assert claim(tmp_path, f"resume={run.directory}/checkpoints/step_00000004", "steps=8").directory == run.directory


# ---------------------------------------------------------------------------------------------------------------------
# From the command line


def files(path: Path) -> dict[str, bytes]:
    """All files of a run but those that every command writes: the log and the lock."""
    found = [file for file in path.rglob("*") if file.is_file() and file.name not in (".lock", "log.txt")]
    return {str(file.relative_to(path)): file.read_bytes() for file in found}


def test_resuming_what_is_done_says_so_and_more_epochs_go_on(tmp_path: Path) -> None:
    code, said = run_command(*FAST, "epochs=1", "save_every=10", "eval_every=10", cwd=tmp_path)
    assert code == 0, said
    path = only_run(tmp_path)
    before = files(path)
    code, said = run_command(f"resume={path}", cwd=tmp_path)
    assert code == 0
    assert "all 23 steps are done: nothing is left to do" in said
    assert files(path) == before
    code, said = run_command(f"resume={path}", "epochs=2", cwd=tmp_path)
    assert code == 0, said
    assert "resumed after step 23" in said
    result = json.loads((path / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", 45)
    assert [step for step, _ in curves(path)["eval/loss"]] == [10, 20, 23, 30, 40, 45]


def test_an_earlier_checkpoint_sets_the_later_ones_aside(tmp_path: Path) -> None:
    schedule = ("steps=12", "save_every=3", "log_every=3", "eval_every=0", "keep=9")
    assert run_command(*FAST, *HARD, *schedule, cwd=tmp_path)[0] == 0
    path = only_run(tmp_path)
    before = outcome(path)
    code, said = run_command(f"resume={path}/checkpoints/step_00000006", cwd=tmp_path)
    assert code == 0, said
    assert "resumed after step 6" in said
    names = {f"step_{step:08d}" for step in (3, 6, 9, 12)} | {f"step_{step:08d}.superseded" for step in (9, 12)}
    assert {checkpoint.name for checkpoint in (path / "checkpoints").iterdir()} == names
    assert json.loads((path / "result.json.superseded").read_text())["status"] == "done"
    assert_same(outcome(path), before)


def test_what_cannot_be_resumed_exits_with_2_and_shows_the_difference(tmp_path: Path) -> None:
    assert run_command(*FAST, "steps=2", cwd=tmp_path)[0] == 0
    path = only_run(tmp_path)
    before = files(path)
    code, said = run_command(f"resume={path}", "seed=7", "steps=9", "optimizer=adam", cwd=tmp_path)
    assert code == 2
    assert "seed: 0 then, 7 now" in said
    assert "optimizer: runner.optimizer.SGD then, runner.optimizer.Adam now" in said
    assert len(said.splitlines()) <= 10
    assert files(path) == before


def test_a_finished_run_whose_last_checkpoint_is_damaged_does_its_steps_again(tmp_path: Path) -> None:
    code, said = run_command(*FAST, "steps=23", "save_every=10", "eval_every=0", cwd=tmp_path)
    assert code == 0, said
    [path] = (tmp_path / "outputs/classifier").iterdir()
    weights = path / "checkpoints/step_00000023/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    code, said = run_command(f"resume={path}", cwd=tmp_path)
    assert code == 0, said
    assert "resumed after step 20" in said
    assert weights.read_bytes() == whole
    assert (path / "checkpoints/step_00000023.corrupt").is_dir()
