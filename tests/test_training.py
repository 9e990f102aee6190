"""Tests of the training loop: values that are not finite, the result, and no synchronization with the device."""

import hashlib
import itertools
import json
import resource
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from helpers.compose import TINY_CPU, build_composed_run, compose_config, train_in
from helpers.dry_run import run_in_this_process
from helpers.events import scalar_curves
from helpers.plain_loop import PlainSettings, plain_loop
from torch.utils._python_dispatch import TorchDispatchMode

import runner.failures
import runner.training
from runner.batching import SampleOrder
from runner.parallel.session import Session
from runner.run import Run
from runner.state import State
from runner.storage.checkpoints import Checkpoints
from runner.storage.run_directory import saved_steps
from runner.workloads.classifier import Classifier

DIVERGING = ("data.crop=0", "schedule=constant", "optimizer.lr=900", "batch_size=32", "steps=40")
NAN, INF = float("nan"), float("inf")


def all_finite(value: Any) -> bool:
    if isinstance(value, dict):
        return all(map(all_finite, value.values()))
    if isinstance(value, torch.Tensor):
        return bool(value.isfinite().all())
    return not isinstance(value, float) or abs(value) < INF


def assert_whole_and_finite(directory: Path, steps: list[int]) -> None:
    """Check that the checkpoints are those of `steps`, and contain only finite numbers."""
    checkpoints = Checkpoints(directory, keep=9)
    assert saved_steps(checkpoints.root) == steps
    for path in (directory / "checkpoints").glob("step_*"):
        assert all_finite(dict(safetensors.torch.load_file(path / "model.safetensors")))
        assert all_finite(torch.load(path / "state.pt", weights_only=True))
    newest = checkpoints.latest()
    assert (newest.step if newest else None) == (steps[-1] if steps else None)


def test_the_first_step_that_diverges_is_named_and_its_batch_saved(trained):
    run = trained(*DIVERGING, "log_every=40", "save_every=2", "keep=99", "accumulation=4")
    losses = plain_loop(run.run, partial(torch.optim.SGD, lr=900, momentum=0.9), PlainSettings(40)).losses
    first = next(step for step, loss in enumerate(losses, start=1) if not abs(loss) < INF)
    assert first > 3, "it does not begin with it"
    assert (run.result.status, run.result.error) == ("diverged", f"the loss is not finite at step {first}")
    [path] = run.directory.glob("diverged_*")
    assert path.name == f"diverged_step_{first:08d}_rank_0.pt"
    saved = torch.load(path, weights_only=True)
    samples = run.run.workload.train  # pyright: ignore[reportAttributeAccessIssue]
    indices = SampleOrder(len(samples), run.run.seed).indices(32 * (first - 1), 32 * first)
    assert saved["step"] == first
    assert saved["inputs"].equal(samples.inputs[indices])
    assert saved["targets"].equal(samples.targets[indices])
    steps = saved_steps(run.directory / "checkpoints")
    assert_whole_and_finite(run.directory, steps)
    assert steps[-1] in (first - 1, first - 2), "the last one before it"
    assert all(value < INF for points in scalar_curves(run.directory).values() for _, value in points)
    assert all_finite(run.result.as_dict())


@pytest.mark.parametrize(
    ("bad", "at", "log_every", "save_every"),
    [(NAN, 7, 5, 3), (INF, 7, 100, 4), (INF, 1, 1, 1), (NAN, 12, 100, 100), (INF, 6, 6, 6)],
)
def test_a_loss_that_is_not_finite_is_found_at_the_next_log_or_checkpoint(
    trained, monkeypatch, bad, at, log_every, save_every
):
    calls = iter(range(1, 100))
    criterion = Classifier.criterion
    monkeypatch.setattr(Classifier, "criterion", lambda *a: criterion(*a) * (bad if next(calls) == at else 1))
    run = trained("steps=12", f"log_every={log_every}", f"save_every={save_every}", "eval_every=0", "keep=9")
    due = [step for step in range(at, 13) if step % log_every == 0 or step % save_every == 0 or step == 12]
    assert run.result.error == f"the loss is not finite at step {at}"
    assert run.result.steps == due[0]
    assert_whole_and_finite(run.directory, list(range(save_every, at, save_every)))


def test_a_run_that_diverges_on_a_full_disk_is_reported_as_diverged(trained, monkeypatch, caplog):
    """The batch cannot be saved, and no incomplete file is left."""

    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    criterion = Classifier.criterion
    monkeypatch.setattr(runner.failures, "write_bytes", full)
    monkeypatch.setattr(Classifier, "criterion", lambda *a: criterion(*a) * NAN)
    run = trained("steps=3", "log_every=1")
    assert (run.result.status, run.result.error) == ("diverged", "the loss is not finite at step 1")
    assert not list(run.directory.glob("*diverged_step*"))
    assert "the batch of step 1 cannot be saved" in caplog.text


@pytest.mark.parametrize(
    ("part", "named"),
    [("weight", "conv2.conv.weight"), ("moment", "exp_avg_sq of head.fc.bias"), ("metric", "eval/loss")],
)
def test_no_checkpoint_holds_a_number_that_is_not_finite(trained, monkeypatch, part, named):
    save, evaluate = runner.training.save, runner.training.evaluate

    def broken_save(state: State) -> None:
        if state.step == 6 and part == "weight":
            dict(state.model.named_parameters())["conv2.conv.weight"].data[0, 0, 0, 0] = INF
        if state.step == 6 and part == "moment":
            state.optimizer.state[dict(state.model.named_parameters())["head.fc.bias"]]["exp_avg_sq"][3] = INF
        save(state)

    def broken_evaluation(state: State, *others: Any) -> bool:
        if state.step == 6 and part == "metric":
            monkeypatch.setattr(state.session.workload, "summarize", lambda sums: {"loss": NAN, "accuracy": 0.5})
        return evaluate(state, *others)

    monkeypatch.setattr(runner.training, "save", broken_save)
    monkeypatch.setattr(runner.training, "evaluate", broken_evaluation)
    run = trained("optimizer=adam", "steps=9", "save_every=3", "eval_every=3", "log_every=2", "keep=9")
    assert (run.result.status, run.result.steps) == ("diverged", 6)
    assert run.result.error == f"{named} is not finite at step 6"
    assert_whole_and_finite(run.directory, [3])
    assert all_finite(run.result.as_dict())
    assert run.result.best["step"] == 3


def test_a_diverged_run_exits_with_3_and_resumes_with_a_smaller_rate(tmp_path):
    code, said = run_in_this_process([*TINY_CPU, *DIVERGING, "log_every=10", "save_every=1", "keep=9"], tmp_path)
    assert code == 3, said
    [path] = tmp_path.glob("outputs/*/*")
    result = json.loads((path / "result.json").read_text(), parse_constant=pytest.fail)
    assert result["status"] == "diverged"
    assert result["error"] in said
    step = int(result["error"].rpartition(" ")[2])
    assert f"diverged_step_{step:08d}_rank_0.pt" in said
    assert str(path / f"diverged_step_{step:08d}_rank_0.pt") in (path / "log.txt").read_text()
    assert saved_steps(path / "checkpoints") == list(range(1, step))
    named = f"resume={path}/checkpoints/step_00000001"
    code, said = run_in_this_process([named, "optimizer.lr=1e-6", "log_every=1"], tmp_path)
    assert code == 0, said
    assert "resumed after step 1" in said
    read = scalar_curves(path)
    assert [step for step, _ in read["train/loss"]] == list(range(2, 41))
    assert all(abs(value) < INF for points in read.values() for _, value in points)


def test_large_finite_values_are_saved_although_their_sum_overflows(trained, monkeypatch):
    save = runner.training.save

    def large(state: State) -> None:
        dict(state.model.named_parameters())["head.fc.bias"].data.fill_(3e38)
        save(state)

    monkeypatch.setattr(runner.training, "save", large)
    run = trained("steps=1", "eval_every=0", "save_every=1")
    assert_whole_and_finite(run.directory, [1])


def test_the_result_agrees_with_the_curves(trained):
    before = time.perf_counter()
    run = trained("steps=30", "log_every=5", "eval_every=10", "optimizer.lr=0.02")
    took = time.perf_counter() - before
    result, read = run.result.as_dict(), scalar_curves(run.directory)
    assert (result["status"], result["steps"], result["world_size"], result["error"]) == ("done", 30, 1, "")
    for tag in ("train/loss", "train/accuracy", "eval/loss", "eval/accuracy"):
        assert result["metrics"][tag] == pytest.approx(read[tag][-1][1], rel=1e-6)
    assert set(result["metrics"]) == {"train/loss", "train/accuracy", "eval/loss", "eval/accuracy"}
    step, best = max(read["eval/accuracy"], key=lambda point: (point[1], -point[0]))
    assert result["best"] == {"metric": "eval/accuracy", "value": pytest.approx(best), "step": step}
    training = sum(5 * seconds for _, seconds in read["time/step_seconds"])
    assert result["samples_per_second"] == pytest.approx(64 / result["step_seconds"]["median"])
    assert training < result["seconds"] < took
    assert 0 < result["step_seconds"]["median"] <= result["step_seconds"]["p90"] < training
    assert 50e6 < result["peak_memory_bytes"] < 1.05 * 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    where = ("name", "output_root", "resume", "tracking")
    hashed = {key: value for key, value in run.run.config.items() if key not in where}
    assert result["config_hash"] == hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:12]
    assert json.loads(json.dumps(result)) == result, "plain values"


def test_rank_0_decides_which_evaluation_is_the_best(ranks, tmp_path):
    """The saving of the best model is collective: a rank that alone saw an improvement would wait for the others."""
    config = compose_config(*TINY_CPU, "parallel=ddp", "steps=8", "eval_every=2", "save_every=0", "keep=9")
    result = ranks(2).train(config, tmp_path, improve_on_other_ranks)
    assert (result.status, result.best["value"], result.best["step"]) == ("done", 0.5, 2)
    assert sorted(path.name for path in tmp_path.glob("checkpoints/step_*")) == ["step_00000002", "step_00000008"]


def improve_on_other_ranks(run: Run, session: Session) -> None:
    accuracies = itertools.count(0.5, 1e-7 * session.rank)
    session.workload.summarize = lambda sums: {"loss": 1.0, "accuracy": next(accuracies)}


SYNC_METHODS = ("item", "tolist", "cpu", "numpy", "__bool__", "__float__", "__int__", "__index__", "__array__")
SYNC_OPS = {
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.is_nonzero.default,
    torch.ops.aten.nonzero.default,
    torch.ops.aten.masked_select.default,
    torch.ops.aten.allclose.default,
}


class SyncDetector(TorchDispatchMode):
    """Collects the operations that would synchronize with a device."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.seen = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen += 1
        if func in SYNC_OPS:
            self.found.append(str(func))
        return func(*args, **(kwargs or {}))


def between_logs(run: Run, session: Session, monkeypatch: pytest.MonkeyPatch, begin: Callable, end: Callable) -> None:
    """Patch the run of `session` so that it calls `begin` and `end`, between which nothing is logged.

    At the end of each step except the last, the run calls `begin`. In each step that logs, it calls `end` after the
    optimizer step and before the log.
    """
    after_step = run.workload.after_step

    def log_follows(model: torch.nn.Module, step: int) -> None:
        after_step(model, step)
        if session.is_due(run.log_every, step):
            end()

    monkeypatch.setattr(run.workload, "after_step", log_follows)
    monkeypatch.setattr(run.profiler, "after_step", lambda step: begin() if step < session.num_steps else None)


SYNC_CASES = [
    ("optimizer=sgd",),
    ("optimizer=adam", "max_grad_norm=1"),
    ("optimizer=adamw",),
    ("precision=bf16", "accumulation=4"),
    ("precision=16",),
    ("data.crop=2", "model.dropout=0.1", "batch_size=200"),
]


@pytest.mark.parametrize("overrides", SYNC_CASES)
def test_no_tensor_value_is_read_between_logs(tmp_path, monkeypatch, overrides):
    run = build_composed_run(*TINY_CPU, "steps=12", "log_every=4", "eval_every=0", "save_every=0", *overrides)
    detector, active = SyncDetector(), []

    def spied(name: str) -> None:
        method = getattr(torch.Tensor, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            if active:
                detector.found.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(torch.Tensor, name, call)

    for name in SYNC_METHODS:
        spied(name)

    def begin() -> None:
        if not active:
            active.append(detector.__enter__())

    def end() -> None:
        if active:
            active.pop().__exit__(None, None, None)

    change = partial(between_logs, monkeypatch=monkeypatch, begin=begin, end=end)
    assert train_in(tmp_path, run, change).result.status == "done"
    assert detector.seen > 100
    assert detector.found == []


def test_operations_that_synchronize_are_detected():
    with SyncDetector() as detector:
        tensor = torch.ones(1)
        _ = tensor.item(), float(tensor), bool(tensor), torch.equal(tensor, tensor), tensor.nonzero()
    assert len(detector.found) == 5


@pytest.mark.gpu
@pytest.mark.parametrize("overrides", SYNC_CASES)
def test_no_step_synchronizes_with_cuda_between_logs(tmp_path, monkeypatch, overrides):
    run = build_composed_run(
        *TINY_CPU, "device=cuda", "data.crop=2", "steps=60", "log_every=20", "eval_every=0", "save_every=0", *overrides
    )
    begin, end = (partial(torch.cuda.set_sync_debug_mode, mode) for mode in ("error", "default"))
    change = partial(between_logs, monkeypatch=monkeypatch, begin=begin, end=end)
    try:
        assert train_in(tmp_path, run, change).result.status == "done"
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    "mode", [("batch_size=1",), ("parallel=pipeline", "parallel.engine=streams", "parallel.split_size=1")]
)
def test_batch_normalization_of_a_single_value_is_refused(tmp_path, mode):
    """On one device, a step fails; a pipeline fails earlier, when it measures the blocks of the model."""
    small = ("model=resnet18", "data=synthetic", "data.size=32", "device=cpu", "batch_size=4", "steps=1")
    code, said = run_in_this_process([*small, *mode], tmp_path)
    assert (code, "which has no variance\n" in said, "Traceback" in said) == (2, True, False), said
