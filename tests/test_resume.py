"""Tests of resume: a run that was killed, stopped or crashed, and is resumed, equals an uninterrupted run bitwise."""

import gc
import json
import logging
import math
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_edits import read_checkpoint_file, rewrite_manifest, write_checkpoint_file
from helpers.command import Command
from helpers.compose import TINY_CPU, TrainedRun, build_composed_run, prepare_session, train_in
from helpers.dry_run import run_in_this_process
from helpers.events import scalar_curves
from helpers.plain_loop import weights_at
from helpers.runs import assert_bitwise_equal, only_run, run_outcome

import runner.resume.starting_point
import runner.training
from runner.device import Device
from runner.parallel.collectives import ProcessGroup
from runner.parallel.pipelining import partition
from runner.result import CrashedError
from runner.resume.changed_options import check_resumable
from runner.storage.saved_run import saved_config
from runner.training import prepare

HARD = ("data.crop=2", "model.dropout=0.2", "accumulation=2", "batch_size=32")
"""Options that make an exact resume harder: random augmentation, dropout, and several micro-batches per step."""


class CrashError(Exception):
    """Stands for any error in the middle of a run."""


def train(directory: Path, *overrides: str, signalled: int = 0, crashed: int = 0) -> TrainedRun:
    """Train a run in `directory`, which gets SIGTERM or crashes at the given steps."""
    run = build_composed_run(*TINY_CPU, *HARD, *overrides)

    def after_step(model: torch.nn.Module, step: int) -> None:
        if step == signalled:
            signal.raise_signal(signal.SIGTERM)
        if step == crashed:
            raise CrashError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(run.workload, "after_step", after_step)
        for owner, what in ((run.workload, "images"), (runner.training, "environment"), (gc, "collect")):
            patched.setattr(owner, what, lambda *_: {})  # they would take most of the time
        return train_in(directory, run)


STEPS = 14
SHORT = (f"steps={STEPS}", "save_every=5", "log_every=3", "eval_every=7")


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, Any]:
    """The outcome of the uninterrupted run of `SHORT`."""
    return run_outcome(train(tmp_path_factory.mktemp("whole"), *SHORT).directory)


@pytest.mark.cases(
    (("optimizer=sgd",), range(1, STEPS)),
    (("optimizer=adamw", "max_grad_norm=0.5"), (1, 6, 13)),
    (("optimizer=adam", "optimizer.fused=false", "channels_last=false"), (3,)),
    (("optimizer=sgd", "optimizer.momentum=0"), (4,)),
    (("precision=bf16",), (2, 8)),
    (("precision=16",), (7,)),
    (("precision=64",), (9,)),
    (("deterministic=true", "schedule=cosine", "schedule.warmup=0.3"), (2, 11)),
    ids=lambda value: "-".join(value) if isinstance(value, tuple) and isinstance(value[0], str) else "",
)
def test_resume_after_stops_is_bitwise_exact(overrides, steps, tmp_path):
    wanted = run_outcome(train(tmp_path / "whole", *SHORT, *overrides).directory)
    for step in steps:
        stopped = train(tmp_path / "stopped", *SHORT, *overrides, signalled=step)
        assert (stopped.result.status, stopped.result.steps) == ("stopped", step)
    resumed = train(tmp_path / "stopped", *SHORT, *overrides)
    assert resumed.result.status == "done"
    assert_bitwise_equal(run_outcome(resumed.directory), wanted)


def test_resume_after_a_crash_at_each_step_is_bitwise_exact(whole, tmp_path):
    for step in (4, *range(1, STEPS + 1), 11, 14):
        with pytest.raises(CrashedError) as crash:
            train(tmp_path, *SHORT, crashed=step)
        assert isinstance(crash.value.__cause__, CrashError)
        assert crash.value.result.steps == step - 1
        assert crash.value.result.metrics.keys() >= ({"train/loss"} if step > 3 else set())
    assert_bitwise_equal(run_outcome(train(tmp_path, *SHORT).directory), whole)


def test_resume_after_a_truncated_event_is_bitwise_exact(whole, tmp_path):
    with pytest.raises(CrashedError):
        train(tmp_path, *SHORT, crashed=13)
    [file] = tmp_path.glob("events*")
    os.truncate(file, file.stat().st_size - 7)  # in the last record, the point of step 12, which is computed again
    assert_bitwise_equal(run_outcome(train(tmp_path, *SHORT).directory), whole)


@pytest.mark.parametrize("mode", ["pipeline parallel.engine=streams parallel.num_micro_batches=2", "model"])
def test_measured_stages_are_those_of_the_first_session(mode, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    options = (*SHORT, *f"parallel={mode} parallel.stages=2".split())
    monkeypatch.setattr(Device, "resolve_all", lambda self: [torch.device("cpu")] * 2)

    def train_with_other_times(directory: str, signalled: int, *seconds: float) -> Path:
        times = iter(seconds)
        monkeypatch.setattr(partition, "_median_seconds", lambda *_: next(times))
        return train(tmp_path / directory, *options, signalled=signalled).directory

    whole = train_with_other_times("whole", 0, 1, 1, 1, 1)
    for step in (3, 8, 0):
        stopped = train_with_other_times("stopped", step, 1, 1, 1, 1 if step == 3 else 9)
    assert_bitwise_equal(weights_at(stopped, STEPS), weights_at(whole, STEPS))
    stages = [text for text in caplog.messages if text.startswith("stages: ")]
    assert stages == ["stages: conv1 … conv2 | hidden … head"] * 4


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "mode", ["dp", "model parallel.cuts=[hidden]", "pipeline parallel.engine=streams parallel.cuts=[hidden]"]
)
def test_random_states_of_all_gpus_are_restored(mode, tmp_path):
    options = (*SHORT, "device=cuda", "deterministic=true", "model.dropout=0.5", *f"parallel={mode}".split())
    wanted = weights_at(train(tmp_path / "whole", *options).directory, STEPS)
    train(tmp_path / "stopped", *options, signalled=4)
    torch.manual_seed(123)
    assert_bitwise_equal(weights_at(train(tmp_path / "stopped", *options).directory, STEPS), wanted)


class OneOfTwo(ProcessGroup):
    """The process group of `rank`, one of two ranks; the other rank does not exist."""

    def __init__(self, rank: int):
        super(ProcessGroup, self).__init__([torch.device("cpu")], rank, 2)
        self.reduced: dict[str, Any] = {}

    def all_reduce(self, sums: dict[str, Any]) -> dict[str, Any]:
        self.reduced = sums
        return {name: torch.ones_like(each) for name, each in sums.items()}

    def from_rank_0(self, make: Callable[[], Any]) -> Any:
        return make()


def test_metric_sums_not_logged_yet_are_restored_on_rank_0_only(tmp_path, caplog):
    """The next log all-reduces the metric sums, so only one rank may hold what a single process has saved."""
    train(tmp_path, *SHORT, signalled=5)  # steps 4 and 5 are not logged yet
    rows = {}
    for rank in (0, 1):
        run = build_composed_run(*TINY_CPU, *HARD, *SHORT)
        alone = prepare_session(run)
        with caplog.at_level(logging.INFO, logger="runner"):
            state = prepare(run, replace(alone, collectives=OneOfTwo(rank)), tmp_path)
            state.step_metrics.peek()
        rows[rank] = state.session.collectives.reduced["train"]
    saved = torch.load(tmp_path / "checkpoints/step_00000005/state.pt", weights_only=True)["window"]
    assert saved.shape == (2, 2, 2)
    assert rows[0].equal(saved)
    assert rows[1].equal(torch.zeros(2, 2, 2))
    assert "rank 1 saved nothing" in caplog.text
    assert "rank 0 saved nothing" not in caplog.text


def test_metric_sums_of_a_checkpoint_without_counts_are_means_over_its_samples(tmp_path):
    """As older checkpoints have them, in float32, with the step of the last log in place of the counts."""
    curves = []
    for directory in (tmp_path / "now", tmp_path / "older"):
        train(directory, *SHORT, signalled=5)
        if directory.name == "older":
            checkpoint = directory / "checkpoints/step_00000005"
            state = read_checkpoint_file(checkpoint / "state.pt")
            state |= {"window": state["window"][:, 0].float(), "logged": 3}
            write_checkpoint_file(checkpoint / "state.pt", state)
            rewrite_manifest(checkpoint)
        train(directory, *SHORT, "resume=auto")
        curves.append(scalar_curves(directory)["train/loss"])
    assert [step for step, _ in curves[1]] == [3, 6, 9, 12, 14]
    assert curves[1] == [(step, pytest.approx(value, rel=1e-6)) for step, value in curves[0]]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "rmsprop", "muon"])
def test_optimizer_state_gets_the_memory_format_of_its_parameters(optimizer):
    """If the formats differ, torch's fused CPU kernels combine the wrong elements, without an error."""
    run = build_composed_run(*TINY_CPU, f"optimizer={optimizer}")
    session = prepare_session(run)
    images = run.workload.held_out.inputs[:16]  # pyright: ignore[reportAttributeAccessIssue]

    def placed() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        model = run.parallel.place(run.workload.build_model(), session)
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
    assert_bitwise_equal(resumed[0].state_dict(), whole[0].state_dict())


UNCHANGED = (*SHORT, "model.dropout=0", "optimizer=sgd")  # dropout masks depend on the micro-batches


@pytest.fixture(scope="module")
def stopped(tmp_path_factory) -> tuple[TrainedRun, dict[str, torch.Tensor]]:
    """A run of `UNCHANGED` that was stopped after step 6, and the weights after its last step without the stop."""
    root = tmp_path_factory.mktemp("unchanged")
    wanted = weights_at(train(root / "whole", *UNCHANGED).directory, STEPS)
    return train(root / "stopped", *UNCHANGED, signalled=6), wanted


@pytest.mark.cases(
    (("log_every=2", "eval_every=4", "save_every=3", "keep=1", "profiler=simple"), 0),
    *[(("channels_last=false",), 1e-5), (("accumulation=4", "optimizer.fused=false"), 1e-5)],
    *[(("precision=64",), 1e-4), (("precision=bf16",), 0.2), (("precision=16",), 0.2)],
    ids=str,
)
def test_resume_with_changed_options_stays_within_tolerance(changes, tolerance, stopped, tmp_path):
    before, wanted = stopped
    shutil.copytree(before.directory, tmp_path / "run")
    resumed = train(tmp_path / "run", *UNCHANGED, *changes)
    check_resumable(before.run.config, resumed.run.config, "PATH")
    assert resumed.result.steps == STEPS
    for name, tensor in weights_at(resumed.directory, STEPS).items():
        difference = (tensor - wanted[name]).norm() / wanted[name].norm()
        assert difference <= tolerance, (name, difference)


def test_the_rates_of_a_plateau_follow_its_evaluations_and_a_resume(tmp_path):
    """The best accuracy is reached soon: with a patience of one evaluation, the rate then falls several times."""
    words = ("steps=24", "eval_every=2", "log_every=1", "schedule=plateau", "schedule.patience=1", "schedule.gamma=0.5")
    words += ("schedule.metric=eval/accuracy", "schedule.threshold=0.5", "optimizer.lr=0.2")
    whole = train(tmp_path / "whole", *words)
    train(tmp_path / "run", *words, signalled=13)
    resumed = train(tmp_path / "run", *words)
    assert_bitwise_equal(run_outcome(resumed.directory), run_outcome(whole.directory))
    curves = scalar_curves(whole.directory)
    given = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.2)
    torch_schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(given, "max", 0.5, 1, 0.5)
    accuracy, rates = dict(curves["eval/accuracy"]), dict(curves["lr"])
    for step in range(1, 25):
        assert rates[step] == pytest.approx(given.param_groups[0]["lr"])
        if step in accuracy:
            torch_schedule.step(accuracy[step])
    assert rates[24] < 0.06


def test_a_longer_resume_says_that_the_schedule_is_stretched(tmp_path, caplog):
    for schedule in ("cosine", "constant"):
        train(tmp_path / schedule, "steps=6", f"schedule={schedule}")
        with caplog.at_level(logging.INFO, logger="runner"):
            train(tmp_path / schedule, "steps=14", f"schedule={schedule}")
    [said] = [text for text in caplog.messages if "instead of" in text]
    assert said.startswith("the run has 14 steps instead of 6: the learning rate schedule is stretched to them")
    assert said.endswith(f" {(1 + math.cos(math.pi * 6 / 14)) / 2:.3g} × optimizer.lr")


def test_the_run_in_a_named_directory_is_resumed_or_renamed(tmp_path):
    words = (*TINY_CPU, "steps=4", "--run-directory=here/run", "resume=auto")
    for wanted in ("done after step 4/4", "all 4 steps are done: nothing is left to do"):
        code, output = run_in_this_process([*words], tmp_path)
        assert (code, wanted in output) == (0, True), output
    assert "look: tensorboard --logdir here/run\n" in output
    code, output = run_in_this_process(["resume=here/run", "--run-directory=there"], tmp_path)
    assert (code, output.startswith("--run-directory: got 'there': resume=RUN continues")) == (2, True), output
    code, output = run_in_this_process([*words, "seed=1"], tmp_path)
    assert code == 0, output
    said = "here/run has another config: it is now in run.superseded (seed: 0 then, 1 now)"
    assert said in output.replace(f"{tmp_path}/", "")
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["run", "run.superseded"]
    assert saved_config(tmp_path / "here/run").values["seed"] == 1
    assert saved_config(tmp_path / "here/run.superseded").values["seed"] == 0


def test_a_finished_run_without_checkpoints_cannot_continue_or_become_shorter(tmp_path):
    assert run_in_this_process([*TINY_CPU, "steps=4", "keep=0", "--run-directory=run"], tmp_path)[0] == 0
    before = files(tmp_path / "run")
    code, output = run_in_this_process(["resume=run"], tmp_path)
    assert (code, "nothing is left to do" in output) == (0, True), output
    code, output = run_in_this_process(["resume=run", "steps=3"], tmp_path)
    assert (code, output.startswith("steps: got 3: 4 are done already")) == (2, True), output
    code, output = run_in_this_process(["resume=run", "steps=9"], tmp_path)
    assert (code, "checkpoints to continue from have been deleted" in output) == (2, True), output
    assert files(tmp_path / "run") == before


@pytest.mark.parametrize(("change", "mode"), [("removed", "single"), ("renamed", "single"), ("replaced", "ddp")])
def test_a_run_whose_directory_is_removed_or_renamed_stops(change, mode, tmp_path):
    """It writes nothing where it was: another run may be in its place."""
    command = Command(tmp_path, *TINY_CPU, "steps=1000000", "save_every=4", "log_every=2", f"parallel={mode}")
    path = command.wait_for_checkpoint(8).single_run_directory
    path.rename(tmp_path / "moved")
    if change == "removed":
        shutil.rmtree(tmp_path / "moved")
    elif change == "replaced":
        path.mkdir()
    code, console = command.wait_for_all_processes()
    assert (code, f"{path} cannot be written: it has been removed or renamed" in console) == (1, True), console
    assert "resume: python" not in console
    assert path.exists() == (change == "replaced")
    assert not list(path.parent.glob("*/*"))
    if change != "removed":
        code, console = run_in_this_process(["resume=moved", "stop.max_time=0.1", "parallel=single"], tmp_path)
        assert (code, "resumed after step" in console) == (75, True), console


def files(path: Path) -> dict[str, bytes]:
    """Return all files of a run except those that every command writes: the log and the lock."""
    found = [file for file in path.rglob("*") if file.is_file() and file.name not in (".lock", "log.txt")]
    return {str(file.relative_to(path)): file.read_bytes() for file in found}


def test_a_finished_run_is_not_changed_and_continues_with_more_epochs(tmp_path):
    code, console = run_in_this_process([*TINY_CPU, "epochs=1", "save_every=10", "eval_every=10"], tmp_path)
    assert code == 0, console
    path = only_run(tmp_path)
    before = files(path)
    code, console = run_in_this_process([f"resume={path}", "epochs=0.5"], tmp_path)
    assert (code, "steps: got 12: 23 are done already\n" in console) == (2, True), console
    code, console = run_in_this_process([f"resume={path}"], tmp_path)
    assert code == 0
    assert "all 23 steps are done: nothing is left to do" in console
    assert files(path) == before
    code, console = run_in_this_process([f"resume={path}", "epochs=2"], tmp_path)
    assert code == 0, console
    assert "resumed after step 23" in console
    result = json.loads((path / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", 45)
    assert [step for step, _ in scalar_curves(path)["eval/loss"]] == [10, 20, 23, 30, 40, 45]


def test_a_resume_that_is_refused_while_the_model_is_built_changes_nothing(tmp_path):
    assert run_in_this_process([*TINY_CPU, "steps=4", "save_every=2", "keep=2"], tmp_path)[0] == 0
    path = only_run(tmp_path)
    before = files(path)
    words = ["steps=9", "parallel=model", "parallel.cuts=[other]"]
    for source in (path, path / "checkpoints/step_00000002"):
        code, console = run_in_this_process([f"resume={source}", *words], tmp_path)
        assert (code, console.startswith("parallel.cuts: got ")) == (2, True), console
        assert files(path) == before


def test_resuming_an_earlier_checkpoint_renames_later_ones(tmp_path):
    schedule = ("steps=12", "save_every=3", "log_every=3", "eval_every=0", "keep=9")
    assert run_in_this_process([*TINY_CPU, *HARD, *schedule], tmp_path)[0] == 0
    path = only_run(tmp_path)
    before = run_outcome(path)
    code, console = run_in_this_process([f"resume={path}/checkpoints/step_00000006"], tmp_path)
    assert code == 0, console
    assert "resumed after step 6" in console
    names = {f"step_{step:08d}" for step in (3, 6, 9, 12)} | {f"step_{step:08d}.superseded" for step in (9, 12)}
    assert {checkpoint.name for checkpoint in (path / "checkpoints").iterdir()} == names
    assert json.loads((path / "result.json.superseded").read_text())["status"] == "done"
    assert_bitwise_equal(run_outcome(path), before)
