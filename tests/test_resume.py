"""Tests of resume: a run that was killed, stopped or crashed, and is resumed, equals an uninterrupted run bitwise."""

from __future__ import annotations

import errno
import fcntl
import gc
import json
import logging
import os
import re
import shutil
import signal
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import IO, Any

import pytest
import safetensors.torch
import torch
from helpers.command import Command, names_left_in, run_command, run_successfully
from helpers.compose import TINY_CPU, TrainedRun, build_composed_run, compose_config, prepare_session, train_in
from helpers.events import scalar_curves
from helpers.permissions import enforced_permissions
from helpers.plain_loop import weights_at
from helpers.runs import assert_bitwise_equal, only_run, run_outcome

import runner.resume.claimed_directory
import runner.training
from runner.config.errors import ConfigError
from runner.config.overrides import resumed, text_override
from runner.parallel.collectives import ProcessGroup
from runner.result import CrashedError, Result
from runner.resume.changed_options import check_resumable
from runner.resume.claimed_directory import claimed_directory
from runner.run import config_hash
from runner.storage import run_directory
from runner.storage.files import write_json
from runner.storage.saved_config import config_text
from runner.storage.saved_run import checkpoints, saved_config
from runner.training import prepare

HARD = ("data.crop=2", "model.dropout=0.2", "accumulation=2", "batch_size=32")
"""Options that make an exact resume harder: random augmentation, dropout, and several micro-batches per step."""


# ---------------------------------------------------------------------------------------------------------------------
# Stopped or crashed at each step


class CrashError(Exception):
    """Stands for any error in the middle of a run."""


@pytest.fixture
def session(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., TrainedRun]:
    """Return a function that trains a run in `tmp_path / name`, which gets SIGTERM or crashes at the given steps."""

    def train_it(name: str, *overrides: str, signalled: int = 0, crashed: int = 0) -> TrainedRun:
        run = build_composed_run(*TINY_CPU, *HARD, *overrides)

        def after_step(model: torch.nn.Module, step: int) -> None:
            if step == signalled:
                signal.raise_signal(signal.SIGTERM)
            if step == crashed:
                raise CrashError

        monkeypatch.setattr(run.workload, "after_step", after_step)
        for owner, what in ((run.workload, "images"), (runner.training, "environment"), (gc, "collect")):
            monkeypatch.setattr(owner, what, lambda *_: {})  # they would take most of the time
        return train_in(tmp_path / name, run)

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
def test_resume_after_a_stop_is_bitwise_exact(
    session: Callable[..., TrainedRun], overrides: tuple[str, ...], steps: Any
) -> None:
    wanted = run_outcome(session("whole", *SHORT, *overrides).directory)
    for step in steps:
        stopped = session(f"stopped_{step}", *SHORT, *overrides, signalled=step)
        assert (stopped.result.status, stopped.result.steps) == ("stopped", step)
        resumed = session(f"stopped_{step}", *SHORT, *overrides)
        assert resumed.result.status == "done"
        assert_bitwise_equal(run_outcome(resumed.directory), wanted)


def test_resume_after_a_crash_at_any_step_is_bitwise_exact(session: Callable[..., TrainedRun]) -> None:
    wanted = run_outcome(session("whole", *SHORT).directory)
    for step in range(1, STEPS + 1):
        with pytest.raises(CrashedError) as crash:
            session(f"crashed_{step}", *SHORT, crashed=step)
        assert isinstance(crash.value.__cause__, CrashError)
        assert crash.value.result.steps == step - 1
        assert crash.value.result.metrics.keys() >= ({"train/loss"} if step > 3 else set())
        assert_bitwise_equal(run_outcome(session(f"crashed_{step}", *SHORT).directory), wanted)


def test_resume_after_several_crashes_is_bitwise_exact(session: Callable[..., TrainedRun]) -> None:
    wanted = run_outcome(session("whole", *SHORT).directory)
    for step in (4, 4, 6, 9, 13, 11, 14):
        with pytest.raises(CrashedError):
            session("crashed", *SHORT, crashed=step)
    assert_bitwise_equal(run_outcome(session("crashed", *SHORT).directory), wanted)


def test_resume_after_a_truncated_event_is_bitwise_exact(session: Callable[..., TrainedRun]) -> None:
    wanted = run_outcome(session("whole", *SHORT).directory)
    with pytest.raises(CrashedError):
        session("torn", *SHORT, crashed=13)
    path = session("whole", *SHORT).directory.with_name("torn")
    [file] = path.glob("events*")
    os.truncate(file, file.stat().st_size - 7)  # in the last record, the point of step 12, which is computed again
    assert_bitwise_equal(run_outcome(session("torn", *SHORT).directory), wanted)


def test_resume_after_a_damaged_checkpoint_is_bitwise_exact(session: Callable[..., TrainedRun]) -> None:
    wanted = run_outcome(session("whole", *SHORT).directory)
    path = session("damaged", *SHORT, signalled=12).directory
    (path / "checkpoints/step_00000012/state.pt").write_bytes(b"")
    assert_bitwise_equal(run_outcome(session("damaged", *SHORT).directory), wanted)
    assert (path / "checkpoints/step_00000012.corrupt").is_dir()


def test_random_states_are_restored(session: Callable[..., TrainedRun]) -> None:
    path = session("whole", *SHORT).directory
    saved = torch.load(path / "checkpoints/step_00000014/rank_0.pt", weights_only=True)["random"]["cpu"]
    torch.manual_seed(123)
    session("whole", *SHORT)
    assert torch.get_rng_state().equal(saved)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize(
    "mode",
    ["dp", "model parallel.cuts=[hidden]", "pipeline parallel.engine=streams parallel.cuts=[hidden]"],
)
def test_random_states_of_all_gpus_are_restored(session: Callable[..., TrainedRun], mode: str) -> None:
    options = (*SHORT, "device=cuda", "deterministic=true", "model.dropout=0.5", *f"parallel={mode}".split())
    wanted = weights_at(session("whole", *options).directory, STEPS)
    session("stopped", *options, signalled=4)
    torch.manual_seed(123)
    assert_bitwise_equal(weights_at(session("stopped", *options).directory, STEPS), wanted)


class OneOfTwo(ProcessGroup):
    """The process group of `rank`, one of two ranks; the other rank does not exist."""

    def __init__(self, rank: int):
        super(ProcessGroup, self).__init__([torch.device("cpu")], rank, 2)

    def from_rank_0(self, make: Callable[[], Any]) -> Any:
        return make()


def test_metric_sums_not_logged_yet_are_restored_on_rank_0_only(
    session: Callable[..., TrainedRun], caplog: pytest.LogCaptureFixture
) -> None:
    """The next log all-reduces the metric sums, so only one rank may hold what a single process has saved."""
    directory = session("ranks", *SHORT, signalled=5).directory  # steps 4 and 5 are not logged yet
    rows = {}
    for rank in (0, 1):
        run = build_composed_run(*TINY_CPU, *HARD, *SHORT)
        alone = prepare_session(run)
        with caplog.at_level(logging.INFO, logger="runner"):
            state = prepare(run, replace(alone, collectives=OneOfTwo(rank)), directory)
        rows[rank] = state.metric_buffer.peek(lambda sums: sums)
    saved = torch.load(directory / "checkpoints/step_00000005/state.pt", weights_only=True)["window"]
    assert saved.shape == (2, 2)
    assert rows[0].equal(saved)
    assert rows[1].equal(torch.zeros(2, 2))
    assert "rank 1 saved nothing" in caplog.text
    assert "rank 0 saved nothing" not in caplog.text


@pytest.mark.parametrize("optimizer", ["sgd", "adam", "adamw", "nadam", "rmsprop", "muon"])
def test_optimizer_state_gets_the_memory_format_of_its_parameters(optimizer: str) -> None:
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


# ---------------------------------------------------------------------------------------------------------------------
# Changed options


@pytest.mark.parametrize(
    ("change", "tolerance"),
    [
        *[("log_every=2", 0), ("eval_every=4", 0), ("save_every=3", 0), ("keep=1", 0), ("profiler=simple", 0)],
        *[("channels_last=false", 1e-5), ("accumulation=4", 1e-5), ("optimizer.fused=false", 1e-5)],
        *[("precision=64", 1e-4), ("precision=bf16", 0.2), ("precision=16", 0.2)],
    ],
)
def test_resume_with_changed_options_stays_within_tolerance(
    session: Callable[..., TrainedRun], change: str, tolerance: float
) -> None:
    plain = (*SHORT, "model.dropout=0", "optimizer=sgd")  # dropout masks depend on the micro-batches
    whole = run_outcome(session("whole", *plain).directory)["weights"]
    stopped = session("changed", *plain, signalled=6)
    resumed = session("changed", *plain, change)
    check_resumable(stopped.run.config, resumed.run.config, "PATH")
    assert resumed.result.steps == STEPS
    for name, tensor in run_outcome(resumed.directory)["weights"].items():
        difference = (tensor - whole[name]).norm() / whole[name].norm()
        assert difference <= tolerance, (name, difference)


@pytest.mark.parametrize("schedule", ["onecycle", "cosine", "constant"])
def test_a_longer_resume_says_that_the_schedule_is_stretched(
    schedule: str, session: Callable[..., TrainedRun], caplog: pytest.LogCaptureFixture
) -> None:
    session("longer", "steps=6", f"schedule={schedule}")
    with caplog.at_level(logging.INFO, logger="runner"):
        session("longer", "steps=14", f"schedule={schedule}")
    said = [text for text in caplog.messages if "instead of" in text]
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    torchs = {
        "onecycle": partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=14),
        "cosine": partial(torch.optim.lr_scheduler.CosineAnnealingLR, T_max=14),
    }
    if schedule in torchs:
        scheduler = torchs[schedule](optimizer)
        for _ in range(6):
            optimizer.step()
            scheduler.step()
        wanted = "the run has 14 steps instead of 6: the learning rate schedule is stretched to them, and goes on at "
        assert said == [f"{wanted}{scheduler.get_last_lr()[0]:.3g} × optimizer.lr"]
    else:
        assert not said


# ---------------------------------------------------------------------------------------------------------------------
# Choice of the run directory


def claiming(cwd: Path, *overrides: str, name: str | None = None) -> Any:
    """A context that claims a run directory in `cwd / "test"`, with the given name or a new one."""
    run = build_composed_run(*TINY_CPU, "steps=4", *overrides)
    return claimed_directory(run, prepare_session(run), cwd / "test", name, list(overrides))


def claim(cwd: Path, *overrides: str, name: str | None = None) -> Path:
    """Claim a run directory, end the run before its first step, and return the directory."""
    with claiming(cwd, *overrides, name=name) as claimed:
        claimed.begin()
        return claimed.path


def refusal(cwd: Path, *overrides: str, name: str | None = None) -> ConfigError:
    """Return the error of a run that cannot claim its directory."""
    with pytest.raises(ConfigError) as refused:
        claim(cwd, *overrides, name=name)
    return refused.value


def refused_by_a_rank(cwd: Path, *overrides: str, name: str | None = None) -> None:
    """Claim a run directory, and let another rank refuse the run."""
    with pytest.raises(ConfigError, match="a rank refused it"), claiming(cwd, *overrides, name=name) as claimed:
        raise ConfigError("resume", str(claimed.path), "a rank refused it", "nothing")


def content_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def ended_early(cwd: Path) -> Path:
    """Return the directory of a run that was stopped after step 3, with a checkpoint of each step."""
    path = claim(cwd, "optimizer.lr=0.2")
    write_result(path, "stopped", 3)
    for step in (1, 2, 3):
        make_checkpoint(path, run_directory.step_name(step))
    return path


def locked(path: Path) -> IO[Any]:
    """A context in which another process seems to train the run."""
    lock = run_directory.lock(path)
    assert lock is not None
    return lock


def write_result(path: Path, status: str, steps: int = 4) -> None:
    write_json(path / "result.json", Result(status, steps).as_dict())


def make_checkpoint(path: Path, name: str) -> None:
    (path / "checkpoints" / name).mkdir(parents=True)


def test_auto_resumes_the_newest_unfinished_run_of_the_same_config(tmp_path: Path) -> None:
    first, second, other = claim(tmp_path), claim(tmp_path), claim(tmp_path, "optimizer.lr=0.2")
    assert len({first, second, other}) == 3
    for status in ("", "stopped", "crashed"):
        if status:
            write_result(second, status, 2)
        assert claim(tmp_path, "resume=auto") == second
    assert claim(tmp_path, "resume=auto", "optimizer.lr=0.2") == other
    assert claim(tmp_path, "resume=auto", "seed=5") not in (first, second, other), "there is none: a new one"


def test_auto_says_in_what_the_nearest_unfinished_run_differs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A run without a checkpoint, one that is running and one that is done are not worth mentioning."""
    near, far, held, empty, done = (claim(tmp_path, f"optimizer.lr=0.{i}", *["seed=9"] * (i == 2)) for i in range(1, 6))
    for path in (near, far, held, done):
        make_checkpoint(path, "step_00000002")
    write_result(done, "done")
    with locked(held):
        new = claim(tmp_path, "resume=auto", "optimizer.lr=0.7")
        assert new not in (near, far, held, empty, done)
        [said] = caplog.messages
        assert f"has optimizer.lr: 0.1 then, 0.7 now: {text_override('resume', near)} continues it" in said
        assert claim(tmp_path, f"resume={near}", "optimizer.lr=0.7") == near
        make_checkpoint(new, "step_00000002")
        caplog.clear()
        claim(tmp_path, "resume=auto", "optimizer.lr=0.7", "seed=5", "stop.max_time=60")
        [said] = caplog.messages
        assert said.endswith(f"has seed: 0 then, 5 now: {new}"), "it cannot be resumed with another seed"


def test_auto_skips_runs_that_are_done_or_in_use(tmp_path: Path) -> None:
    older, newer = claim(tmp_path), claim(tmp_path)
    with locked(newer):
        assert claim(tmp_path, "resume=auto") == older
    write_result(newer, "done")
    assert claim(tmp_path, "resume=auto") == older
    write_result(older, "done")
    assert claim(tmp_path, "resume=auto") not in (older, newer)


BROKEN = {
    "an empty config": {"config.yaml": b""},
    "bytes": {"config.yaml": b"\xff\xfe"},
    "tags": {"config.yaml": b"a: !!python/object/apply:os.system [true]"},
    "deep nesting": {"config.yaml": b"[" * 100_000, "result.json": b"[" * 100_000},
    "a result of other types": {"config.yaml": b"seed: 5", "result.json": b'{"status": [], "steps": "x"}'},
    "no config": {"result.json": b"{}"},
}


@pytest.mark.parametrize("content", BROKEN.values(), ids=BROKEN.keys())
def test_auto_ignores_broken_files_of_another_run(content: dict[str, bytes], tmp_path: Path) -> None:
    ours = claim(tmp_path)
    for name, data in content.items():
        (tmp_path / "test" / "9999-broken").mkdir(exist_ok=True)
        (tmp_path / "test" / "9999-broken" / name).write_bytes(data)
    (tmp_path / "test" / "9999-file").touch()
    os.mkfifo(tmp_path / "test" / "9999-pipe")
    assert claim(tmp_path, "resume=auto") == ours


def test_auto_skips_a_run_of_a_package_that_has_been_removed(tmp_path: Path) -> None:
    path = claim(tmp_path)
    config = saved_config(path).values
    run_directory.write_config(path, config | {"optimizer": {"_target_": "removed_package.optimizers.Own"}}, [])
    assert claim(tmp_path, "resume=auto") != path


def test_auto_does_not_follow_links(tmp_path: Path) -> None:
    """The directory that `resume=auto` searches contains a run and a link `latest` to this run."""
    path = claim(tmp_path)
    (path.parent / "latest").symlink_to(path.name)
    assert claim(tmp_path, "resume=auto") == path
    assert claim(tmp_path, "resume=auto", "optimizer.lr=0.3") != path


def test_auto_is_refused_if_checkpoints_have_no_readable_config(tmp_path: Path) -> None:
    """The checkpoints may be those of the run to resume. If they were ignored, the run would begin again."""
    ours = claim(tmp_path)
    make_checkpoint(ours, "step_00000002")
    (ours / "config.yaml").write_text("")
    error = refusal(tmp_path, "resume=auto")
    assert (error.key, error.got) == ("resume", "auto")
    assert str(ours) in error.why
    saved = config_text(compose_config(*TINY_CPU, "steps=4"))
    (ours / "checkpoints" / "step_00000002" / "config.yaml").write_text(saved)
    assert claim(tmp_path, "resume=auto") == ours
    assert saved_config(ours).unreadable == [], "it is written again"


def test_a_refused_resume_leaves_all_files_unchanged(tmp_path: Path) -> None:
    path = ended_early(tmp_path)
    before = content_of(path)
    for source in (path, path / "checkpoints" / "step_00000001"):
        refused_by_a_rank(tmp_path, f"resume={source}", "optimizer.lr=0.3")
        assert content_of(path) == before
        assert len(checkpoints(path)) == 3


@pytest.mark.parametrize("resumed", [False, True])
def test_a_stop_while_the_first_files_are_written_undoes_all_changes(
    resumed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = claim(tmp_path) if resumed else "never"
    before = content_of(tmp_path)

    def stopped() -> None:
        raise SystemExit(75)  # as the handler of a signal does

    monkeypatch.setattr(runner.resume.claimed_directory, "environment", stopped)
    with pytest.raises(SystemExit):
        claim(tmp_path, "optimizer.lr=0.3", f"resume={source}")
    assert content_of(tmp_path) == before


def test_credentials_are_in_no_file_of_a_run(tmp_path: Path) -> None:
    run = build_composed_run(*TINY_CPU, "steps=4")
    session = prepare_session(run)
    run.config["model"]["weights"] = "https://me:hunter2@example.org/w.pt"
    with claimed_directory(run, session, tmp_path / "test", None, ["x.token=hf_abcdefghijklmnopqrstuvwx"]) as claimed:
        path = claimed.path
        found = b"".join(file.read_bytes() for file in path.rglob("*") if file.is_file())
    assert b"example.org" in found
    assert b"hunter2" not in found
    assert b"hf_abc" not in found
    assert config_hash(saved_config(path).values) == config_hash(run.config)


def test_runs_that_start_at_the_same_time_get_different_directories(tmp_path: Path) -> None:
    claim(tmp_path)
    with ExitStack() as stack:
        assert len({stack.enter_context(claiming(tmp_path, "resume=auto")).path for _ in range(3)}) == 3


def test_a_new_directory_that_another_process_has_locked_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create, path, held = run_directory.create, tmp_path / "test" / "here", []

    def created(*arguments: Any) -> Path:
        create(*arguments)
        held.append(run_directory.lock(path))
        return path

    monkeypatch.setattr(run_directory, "create", created)
    error = refusal(tmp_path, "resume=auto", name="here")
    assert (error.key, error.got) == ("--run-directory", str(path))
    assert [file.name for file in path.iterdir()] == [".lock"]
    held[0].close()


@pytest.mark.parametrize("names", [(), (".lock",), (".lock", "overrides.yaml", ".config.yaml.part")])
def test_a_run_begins_in_a_directory_in_which_no_run_has_begun(names: tuple[str, ...], tmp_path: Path) -> None:
    """Nobody may write to its parent, so it can be neither replaced nor renamed."""
    path = tmp_path / "test" / "here"
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_text("")
    with enforced_permissions(tmp_path / "test", 0o555):
        refused_by_a_rank(tmp_path, "resume=auto", name="here")
        assert not list(path.iterdir()), "a refused run leaves nothing"
        with claiming(tmp_path, "resume=auto", name="here") as claimed:
            assert claimed.path == path
            assert run_directory.lock(path) is None
        assert content_of(path).keys() == {".lock", "config.yaml", "overrides.yaml", "environment.json"}


STRANGERS: dict[str, tuple[str, ...]] = {
    "a file called *.part": ("movie.mkv.part",),
    "a folder called *.part": ("book.part/chapter.txt",),
    "overrides of a run, and another file": (".lock", "overrides.yaml", "thesis.tex"),
    "a config and overrides of Hydra": ("config.yaml", "hydra.yaml", "overrides.yaml"),
    "checkpoints of another program": ("checkpoints/epoch=1.ckpt",),
    "checkpoints of another program in folders": ("checkpoints/step_100/weights.pt", "config.yaml"),
    "a result": ("result.json", ".lock"),
}


@pytest.mark.parametrize("names", STRANGERS.values(), ids=STRANGERS.keys())
def test_a_directory_that_no_run_has_written_is_refused_and_not_changed(names: tuple[str, ...], tmp_path: Path) -> None:
    path = tmp_path / "test" / "here"
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("seed: 5\nname: mine\n")
    before = content_of(path)
    error = refusal(tmp_path, "resume=auto", name="here")
    assert (error.key, error.got) == ("--run-directory", str(path))
    assert "not a run directory" in error.why
    assert content_of(path) == before
    assert list(path.parent.iterdir()) == [path]


def test_a_run_in_use_is_refused_and_not_changed(tmp_path: Path) -> None:
    path = claim(tmp_path)
    for step in (2, 4):
        make_checkpoint(path, run_directory.step_name(step))
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.name != ".lock"}
    with locked(path):
        for source in (path, path / "checkpoints/step_00000002"):
            error = refusal(tmp_path, f"resume={source}")
            assert (error.key, error.got) == ("resume", str(path))
            assert "another process" in error.why
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.name != ".lock"} == before


@pytest.mark.parametrize("resume", ["auto", "never"])
@pytest.mark.parametrize("secret", ["", "test"])
def test_a_new_run_in_an_unreadable_directory_is_refused(secret: str, resume: str, tmp_path: Path) -> None:
    (tmp_path / secret).mkdir(exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    with enforced_permissions(tmp_path / secret, 0):
        error = refusal(tmp_path, f"resume={resume}")
    assert (error.key, error.got) == ("output_root", str(tmp_path / "test"))
    assert "Permission denied" in error.why
    assert sorted(tmp_path.rglob("*")) == before


def test_auto_is_refused_if_a_run_directory_cannot_be_read(tmp_path: Path) -> None:
    """The directory may be that of the run to resume. If it were ignored, the run would begin again."""
    with enforced_permissions(claim(tmp_path), 0) as ours:
        error = refusal(tmp_path, "resume=auto")
    assert (error.key, error.got) == ("resume", "auto")
    assert str(ours) in error.why
    assert "Permission denied" in error.why
    assert list(ours.parent.iterdir()) == [ours]


def test_a_named_directory_that_cannot_be_created_is_refused_by_its_own_key(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    with enforced_permissions(tmp_path / "test", 0o555):
        error = refusal(tmp_path, name="here")
    assert (error.key, error.got) == ("--run-directory", str(tmp_path / "test" / "here"))
    assert "Permission denied" in error.why


@pytest.mark.parametrize("bits", [0, 0o444])
def test_a_named_directory_that_cannot_be_read_is_refused(bits: int, tmp_path: Path) -> None:
    claim(tmp_path).rename(tmp_path / "test" / "here")
    with enforced_permissions(tmp_path / "test" / "here", bits):
        error = refusal(tmp_path, "resume=auto", name="here")
    assert error.key == "--run-directory"
    assert "Permission denied" in error.why


def test_a_file_system_without_locks_is_refused_and_no_directory_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unsupported(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", unsupported)
    error = refusal(tmp_path)
    assert error.key == "output_root"
    assert "No locks available" in error.why
    assert list(tmp_path.iterdir()) == []


def test_a_named_directory_that_cannot_be_renamed_is_refused(tmp_path: Path) -> None:
    path = claim(tmp_path).rename(tmp_path / "test" / "here")
    before = content_of(path)
    with enforced_permissions(tmp_path / "test", 0o555):
        error = refusal(tmp_path, "steps=5", "seed=1", "resume=auto", name="here")
    assert (error.key, error.got) == ("--run-directory", str(path))
    assert "Permission denied" in error.why
    assert content_of(path) == before


@pytest.mark.parametrize("missing", ["", "result.json", "config.yaml", "environment.json"])
@pytest.mark.parametrize("protected", ["", "checkpoints"])
def test_a_run_that_is_not_writable_is_refused_and_not_changed(
    protected: str, missing: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = ended_early(tmp_path)
    if missing == "config.yaml":
        shutil.copy(path / missing, path / "checkpoints" / "step_00000001")
    if missing:
        (path / missing).unlink()
    before = content_of(path)
    with enforced_permissions(path / protected, 0o555):
        error = refusal(tmp_path, f"resume={path}/checkpoints/step_00000001", "optimizer.lr=0.3")
    assert (error.key, error.got) == ("resume", str(path))
    assert "Permission denied" in error.why
    assert "output_root" not in error.remedy
    assert content_of(path) == before
    assert len(checkpoints(path)) == 3
    assert not caplog.records, "everything was restored"


@pytest.mark.parametrize("name", ["overrides.yaml", "config.yaml", "environment.json"])
def test_if_there_is_no_room_for_a_file_nothing_is_changed(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, fsync = ended_early(tmp_path), os.fsync
    before = content_of(path)

    def full(descriptor: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    error = refusal(tmp_path, f"resume={path}/checkpoints/step_00000001", "optimizer.lr=0.3")
    assert (error.key, error.got) == ("resume", str(path))
    assert "No space left" in error.why
    assert content_of(path) == before
    assert len(checkpoints(path)) == 3


def test_the_result_of_every_session_is_kept(tmp_path: Path) -> None:
    path = claim(tmp_path)
    for steps in (1, 2, 3):
        write_result(path, "stopped", steps)
        before = content_of(path)
        refused_by_a_rank(tmp_path, f"resume={path}")
        assert content_of(path) == before, "a refused session keeps them, too"
        assert claim(tmp_path, f"resume={path}") == path
    names = [f"result.json.superseded{number}" for number in ("", 2, 3)]
    assert [json.loads((path / name).read_text())["steps"] for name in names] == [1, 2, 3]
    assert not (path / "result.json").exists()


def test_a_resume_path_that_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    path = claim(tmp_path)
    for name in ("step_00000002", "step_00000003.superseded"):
        make_checkpoint(path, name)
    for name in ("step_00000009", "step_00000003.superseded", "tmp.step_00000003"):
        error = refusal(tmp_path, f"resume={path}/checkpoints/{name}")
        assert (error.key, error.got) == ("resume", f"{path}/checkpoints/{name}")
        assert "no such checkpoint" in error.why
        assert "step_00000002" in error.remedy
    with pytest.raises(ConfigError) as refused:
        resumed([text_override("resume", path / "checkpoints" / "step_00000001")])
    assert (refused.value.why, refused.value.remedy) == ("there is no step_00000001", "choose from: step_00000002")
    error = refusal(tmp_path, f"resume={claim(tmp_path)}/checkpoints/step_00000009")
    assert "the run has no checkpoints" in error.remedy
    error = refusal(tmp_path, f"resume={tmp_path}")
    assert (error.key, error.got) == ("resume", str(tmp_path))
    assert "no run" in error.why


def test_fewer_steps_than_are_done_are_refused(tmp_path: Path) -> None:
    """Otherwise, the run would be done after more steps than configured, without an evaluation at its end."""
    path = claim(tmp_path)
    for step in (4, 9):
        make_checkpoint(path, run_directory.step_name(step))
    error = refusal(tmp_path, f"resume={path}", "steps=8")
    assert (error.key, error.got) == ("steps", 8)
    assert error.why.startswith("9 ")
    assert "steps=10" in error.remedy
    assert claim(tmp_path, f"resume={path}", "steps=9") == path
    assert claim(tmp_path, f"resume={path}/checkpoints/step_00000004", "steps=8") == path


# ---------------------------------------------------------------------------------------------------------------------
# From the command line


@pytest.mark.parametrize("resume", ["auto", "never"])
def test_a_directory_that_is_not_a_run_is_refused_and_not_changed(resume: str, tmp_path: Path) -> None:
    cwd, mine, empty = (tmp_path / name for name in ("here", "mine", "empty"))
    for path in (cwd, mine, empty):
        path.mkdir()
    (mine / "notes.txt").write_text("mine")
    for path in (".", "..", "../mine", "../mine/notes.txt", *(["../empty"] if resume == "never" else [])):
        code, output = run_command(*TINY_CPU, "steps=1", f"--run-directory={path}", f"resume={resume}", cwd=cwd)
        assert code == 2, output
        assert output.startswith("--run-directory: got '/"), output
        assert "it exists" in output
        assert [file.name for file in mine.iterdir()] == ["notes.txt"]
        assert names_left_in(cwd) == set()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "here", "mine"]
    assert not list(empty.iterdir())


def test_the_run_in_a_named_directory_is_resumed_or_renamed(tmp_path: Path) -> None:
    words = (*TINY_CPU, "steps=4", "--run-directory=here/run", "resume=auto")
    for wanted in ("done after step 4/4", "all 4 steps are done: nothing is left to do"):
        code, output = run_command(*words, cwd=tmp_path)
        assert (code, wanted in output) == (0, True), output
    assert "look: tensorboard --logdir here/run\n" in output
    code, output = run_command("resume=here/run", "--run-directory=there", cwd=tmp_path)
    assert (code, output.startswith("--run-directory: got 'there': resume=RUN continues")) == (2, True), output
    code, output = run_command(*words, "seed=1", cwd=tmp_path)
    assert code == 0, output
    said = "here/run has another config: it is now in run.superseded (seed: 0 then, 1 now)"
    assert said in output.replace(f"{tmp_path}/", "")
    assert sorted(path.name for path in (tmp_path / "here").iterdir()) == ["run", "run.superseded"]
    assert saved_config(tmp_path / "here/run").values["seed"] == 1
    assert saved_config(tmp_path / "here/run.superseded").values["seed"] == 0


def test_a_run_that_was_killed_before_it_wrote_its_config_leaves_nothing(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    for names in ((), (".lock",), (".lock", "overrides.yaml", ".config.yaml.part")):
        directory.mkdir()
        for name in names:
            (directory / name).write_text("[]")
        code, output = run_command(*TINY_CPU, "steps=2", "--run-directory=run", "resume=auto", cwd=tmp_path)
        assert code == 0, output
        assert [path.name for path in tmp_path.glob("run*")] == ["run"]
        assert not list(directory.glob(".*.part"))
        shutil.rmtree(directory)


def test_a_finished_run_cannot_become_shorter_or_continue_without_checkpoints(tmp_path: Path) -> None:
    for keep in (0, 1):
        code, output = run_command(*TINY_CPU, "steps=4", f"keep={keep}", f"--run-directory=run{keep}", cwd=tmp_path)
        assert code == 0, output
    shutil.rmtree(tmp_path / "run1" / "checkpoints")
    for run in (tmp_path / "run0", tmp_path / "run1"):
        before = files(run)
        code, output = run_command(f"resume={run}", "steps=3", cwd=tmp_path)
        assert (code, output.startswith("steps: got 3: 4 are done already")) == (2, True), output
        code, output = run_command(f"resume={run}", "steps=9", cwd=tmp_path)
        assert (code, "checkpoints to continue from have been deleted" in output) == (2, True), output
        assert files(run) == before


@pytest.mark.parametrize(
    ("change", "mode"), [("removed", "single"), ("renamed", "single"), ("replaced", "single"), ("replaced", "ddp")]
)
def test_a_run_whose_directory_is_removed_or_renamed_stops(change: str, mode: str, tmp_path: Path) -> None:
    """It writes nothing where it was: another run may be in its place."""
    command = Command(tmp_path, *TINY_CPU, "steps=1000000", "save_every=4", "log_every=2", f"parallel={mode}")
    path = command.wait_for_checkpoint(8).single_run_directory
    path.rename(tmp_path / "moved")
    if change == "removed":
        shutil.rmtree(tmp_path / "moved")
    elif change == "replaced":
        path.mkdir()
    code, console = command.wait_for_all_processes()
    assert (code, f"{path} has been removed or renamed" in console) == (1, True), console
    assert "resume: python" not in console
    assert path.exists() == (change == "replaced")
    assert not list(path.parent.glob("*/*"))
    if change != "removed":
        code, console = run_command("resume=moved", "stop.max_time=0.1", "parallel=single", cwd=tmp_path)
        assert (code, "resumed after step" in console) == (75, True), console


def files(path: Path) -> dict[str, bytes]:
    """Return all files of a run except those that every command writes: the log and the lock."""
    found = [file for file in path.rglob("*") if file.is_file() and file.name not in (".lock", "log.txt")]
    return {str(file.relative_to(path)): file.read_bytes() for file in found}


def test_a_finished_run_is_not_changed_and_continues_with_more_epochs(tmp_path: Path) -> None:
    code, console = run_command(*TINY_CPU, "epochs=1", "save_every=10", "eval_every=10", cwd=tmp_path)
    assert code == 0, console
    path = only_run(tmp_path)
    before = files(path)
    code, console = run_command(f"resume={path}", "epochs=0.5", cwd=tmp_path)
    assert (code, "steps: got 12: 23 are done already, and epochs ask for 12\n" in console) == (2, True), console
    code, console = run_command(f"resume={path}", cwd=tmp_path)
    assert code == 0
    assert "all 23 steps are done: nothing is left to do" in console
    assert files(path) == before
    code, console = run_command(f"resume={path}", "epochs=2", cwd=tmp_path)
    assert code == 0, console
    assert "resumed after step 23" in console
    result = json.loads((path / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", 45)
    assert [step for step, _ in scalar_curves(path)["eval/loss"]] == [10, 20, 23, 30, 40, 45]


def test_a_resume_that_is_refused_while_the_model_is_built_changes_nothing(tmp_path: Path) -> None:
    run_successfully(tmp_path, *TINY_CPU, "steps=4", "save_every=2", "keep=2")
    path = only_run(tmp_path)
    before = files(path)
    safetensors.torch.save_file({"other": torch.zeros(1)}, tmp_path / "other.safetensors")
    for source in (path, path / "checkpoints/step_00000002"):
        code, console = run_command(f"resume={source}", "steps=9", "model.weights=other.safetensors", cwd=tmp_path)
        assert (code, console.startswith("model.weights: got ")) == (2, True), console
        assert files(path) == before


def test_resuming_an_earlier_checkpoint_renames_later_ones(tmp_path: Path) -> None:
    schedule = ("steps=12", "save_every=3", "log_every=3", "eval_every=0", "keep=9")
    assert run_command(*TINY_CPU, *HARD, *schedule, cwd=tmp_path)[0] == 0
    path = only_run(tmp_path)
    before = run_outcome(path)
    code, console = run_command(f"resume={path}/checkpoints/step_00000006", cwd=tmp_path)
    assert code == 0, console
    assert "resumed after step 6" in console
    names = {f"step_{step:08d}" for step in (3, 6, 9, 12)} | {f"step_{step:08d}.superseded" for step in (9, 12)}
    assert {checkpoint.name for checkpoint in (path / "checkpoints").iterdir()} == names
    assert json.loads((path / "result.json.superseded").read_text())["status"] == "done"
    assert_bitwise_equal(run_outcome(path), before)


def test_another_config_exits_with_2_and_shows_the_difference(tmp_path: Path) -> None:
    assert run_command(*TINY_CPU, "steps=2", cwd=tmp_path)[0] == 0
    path = only_run(tmp_path)
    before = files(path)
    code, console = run_command(f"resume={path}", "seed=7", "steps=9", "optimizer=adam", cwd=tmp_path)
    assert code == 2
    assert re.search(r"^resume: .*seed: 0 .*7 .*optimizer: runner.optimizer.SGD .*runner.optimizer.Adam ", console)
    assert len(console.splitlines()) <= 10
    assert files(path) == before


def test_a_finished_run_with_a_damaged_checkpoint_redoes_its_last_steps(tmp_path: Path) -> None:
    code, console = run_command(*TINY_CPU, "steps=23", "save_every=10", "eval_every=0", cwd=tmp_path)
    assert code == 0, console
    path = only_run(tmp_path)
    weights = path / "checkpoints/step_00000023/model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:2000] + bytes([whole[2000] ^ 1]) + whole[2001:])
    code, console = run_command(f"resume={path}", cwd=tmp_path)
    assert code == 0, console
    assert "resumed after step 20" in console
    assert weights.read_bytes() == whole
    assert (path / "checkpoints/step_00000023.corrupt").is_dir()
