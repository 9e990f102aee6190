"""What a run leaves to look at, read back as TensorBoard reads it, against numbers computed here."""

from __future__ import annotations

import errno
import hashlib
import io
import json
import logging
import os
import resource
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml
from helpers.compose import FAST, built
from helpers.events import curves, events
from PIL import Image
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups
from torch.utils.tensorboard.summary import scalar

import runner.system.section_timer
import runner.tracking.metrics
from runner.run import CrashedError, Run
from runner.seeds import derive
from runner.storage import run_directory as directory
from runner.storage.run_directory import StorageError
from runner.system.section_timer import Clock
from runner.tracking.log_file import LogFile
from runner.tracking.metrics import DivergedError, Stopwatch, Window, quantiles
from runner.tracking.recorder import Record, flatten
from runner.tracking.tensorboard import EventFile
from runner.train import train

PLAIN = ("data.crop=0", "batch_size=32", "schedule=constant", "optimizer.lr=0.05")
TIMES = {"time/samples_per_second", "time/step_seconds", "time/data_share"}


def plain_loop(run: Run, steps: int) -> tuple[list[float], list[float], list[float], list[float]]:
    """Loss, accuracy and gradient norm of each step, and the evaluation's (loss, accuracy) after the last."""
    samples, held_out = run.workload.data.load()  # pyright: ignore[reportAttributeAccessIssue]
    torch.manual_seed(derive(run.seed, "weights"))
    model = run.workload.model.build(samples.shape, 10)  # pyright: ignore[reportAttributeAccessIssue]
    update = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(derive(run.seed, "order", 0)))
    losses, accuracies, norms = [], [], []
    for indices in order.split(32)[:steps]:
        outputs = model(samples.inputs[indices])
        loss = torch.nn.functional.cross_entropy(outputs, samples.targets[indices])
        update.zero_grad()
        loss.backward()
        update.step()
        losses.append(loss.item())
        accuracies.append((outputs.argmax(1) == samples.targets[indices]).double().mean().item())
        norms.append(sum(p.grad.square().sum().item() for p in model.parameters()) ** 0.5)
    with torch.no_grad():
        outputs = model(held_out.inputs)
    loss = torch.nn.functional.cross_entropy(outputs, held_out.targets).item()
    return losses, accuracies, norms, [loss, (outputs.argmax(1) == held_out.targets).double().mean().item()]


# ---------------------------------------------------------------------------------------------------------------------
# Curves, pictures and texts


@pytest.mark.parametrize("accumulation", [1, 4])
def test_each_point_is_the_mean_of_its_window(trained: Callable[..., Run], accumulation: int) -> None:
    run = trained(*PLAIN, "steps=10", "log_every=4", "eval_every=0", f"accumulation={accumulation}")
    losses, accuracies, norms, (eval_loss, eval_accuracy) = plain_loop(run, 10)
    read = curves(run.directory)
    windows = {4: slice(0, 4), 8: slice(4, 8), 10: slice(8, 10)}
    for tag, values in (("train/loss", losses), ("train/accuracy", accuracies)):
        means = [sum(values[window]) / len(values[window]) for window in windows.values()]
        assert [step for step, _ in read[tag]] == list(windows)
        assert [value for _, value in read[tag]] == pytest.approx(means, rel=1e-5)
    assert read["train/gradient_norm"] == [(step, pytest.approx(norms[step - 1], rel=1e-4)) for step in windows]
    assert read["lr"] == [(step, pytest.approx(0.05)) for step in windows]
    assert read["eval/loss"] == [(10, pytest.approx(eval_loss, rel=1e-5))]
    assert read["eval/accuracy"] == [(10, pytest.approx(eval_accuracy))]


def test_the_tags_are_these(trained: Callable[..., Run]) -> None:
    run = trained("steps=6", "log_every=2", "eval_every=3")
    training = {"train/loss", "train/accuracy", "train/gradient_norm", "lr", "memory/allocated", "memory/peak", *TIMES}
    read = curves(run.directory)
    assert set(read) == training | {"eval/loss", "eval/accuracy"}
    assert all([step for step, _ in read[tag]] == [2, 4, 6] for tag in training)
    assert all([step for step, _ in read[tag]] == [3, 6] for tag in ("eval/loss", "eval/accuracy"))
    assert all(value > 0 for tag in TIMES for _, value in read[tag])
    assert all(value < 1 for _, value in read["time/data_share"])
    steps_per_second = [value / 64 for _, value in read["time/samples_per_second"]]
    assert [1 / value for _, value in read["time/step_seconds"]] == pytest.approx(steps_per_second, rel=1e-5)


def test_the_learning_rate_is_that_of_the_step(trained: Callable[..., Run]) -> None:
    run = trained("steps=9", "log_every=3", "schedule=cosine", "optimizer.lr=0.4")
    rates = [0.4 * (1 + torch.tensor(torch.pi * (step - 1) / 9).cos().item()) / 2 for step in (3, 6, 9)]
    assert curves(run.directory)["lr"] == [
        (s, pytest.approx(r, rel=1e-5)) for s, r in zip((3, 6, 9), rates, strict=True)
    ]


def test_pictures_are_pictures(trained: Callable[..., Run]) -> None:
    run = trained("steps=4", "eval_every=2")
    read = events(run.directory)
    assert set(read.Tags()["images"]) == {"eval/samples", "eval/misclassified", "eval/confusion"}
    for tag in read.Tags()["images"]:
        assert [point.step for point in read.Images(tag)] == [2, 4]
        for point in read.Images(tag):
            with Image.open(io.BytesIO(point.encoded_image_string)) as image:
                assert image.size == (point.width, point.height)
                assert len(image.convert("L").getcolors()) > 2, "not empty"


def test_without_mistakes_none_are_shown(trained: Callable[..., Run]) -> None:
    run = trained("steps=1")
    right = run.workload.held_out.targets + 1  # pyright: ignore[reportAttributeAccessIssue]
    sums = {"confusion": torch.zeros(0), "predictions": right, "targets": right}
    assert set(run.workload.pictures(sums)) == {"eval/samples"}


def text(directory: Path, tag: str) -> list[tuple[int, str]]:
    """(step, content without its fence) of a text."""
    points = events(directory).Tensors(f"{tag}/text_summary")
    contents = [point.tensor_proto.string_val[0].decode() for point in points]
    assert all(content.startswith("```\n") and content.endswith("\n```") for content in contents)
    return [(p.step, content[4:-4]) for p, content in zip(points, contents, strict=True)]


def test_texts_are_the_config_and_the_environment(trained: Callable[..., Run]) -> None:
    run = trained("steps=2", "optimizer.lr=0.07")
    [(step, config)] = text(run.directory, "config")
    assert step == 1
    assert yaml.safe_load(config) == run.config
    assert run.config["optimizer"]["lr"] == 0.07
    [(_, environment)] = text(run.directory, "environment")
    assert json.loads(environment)["versions"]["torch"] == torch.__version__


def test_a_session_tells_its_own_config_once(trained: Callable[..., Run]) -> None:
    trained("steps=4", "save_every=2")
    run = trained("steps=8", "save_every=2")
    told = [(step, yaml.safe_load(config)["steps"]) for step, config in text(run.directory, "config")]
    assert told == [(1, 4), (5, 8)]
    assert trained("steps=8", "save_every=2").result.steps == 8  # nothing was left to do
    assert [step for step, _ in text(run.directory, "config")] == [1, 5, 9]


def test_a_loss_scale_is_logged_where_there_is_one(
    trained: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for precision in ("32", "bf16", "16"):  # on the CPU, 16 is bfloat16, which needs none
        assert "train/loss_scale" not in curves(
            trained("steps=2", f"precision={precision}", directory=precision).directory
        )
    run = built(*FAST, "steps=2")
    run.prepare()
    run.directory = tmp_path
    monkeypatch.setattr(run.precision, "scalars", lambda: {"train/loss_scale": torch.tensor(512.0)})
    train(run)
    assert curves(tmp_path)["train/loss_scale"] == [(2, 512.0)]


@pytest.mark.gpu
def test_a_loss_scale_is_logged_on_cuda(tmp_path: Path) -> None:
    run = built(*FAST, "device=cuda", "steps=4", "log_every=2", "precision=16")
    run.prepare()
    run.directory = tmp_path
    train(run)
    assert [step for step, _ in curves(tmp_path)["train/loss_scale"]] == [2, 4]


# ---------------------------------------------------------------------------------------------------------------------
# The HPARAMS tab


def table(root: Path) -> tuple[list[dict[str, Any]], dict[str, bool]]:
    """The rows of the HPARAMS tab as the plugin reads them, and for each column whether it differs."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(root)).Reload()
    plugin = base_plugin.TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(root)))
    backend, request = backend_context.Context(plugin), context.RequestContext()
    asked = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=100, allowed_statuses=[0, 1, 2, 3])
    groups = list_session_groups.Handler(request, backend, "", asked).run().session_groups
    experiment = get_experiment.Handler(request, backend, "", api_pb2.GetExperimentRequest()).run()
    rows = [
        {
            "status": [api_pb2.Status.Name(session.status) for session in group.sessions],
            "hparams": {name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()},
            "metrics": {metric.name.tag: (metric.training_step, metric.value) for metric in group.metric_values},
        }
        for group in groups
    ]
    return rows, {info.name: info.differs for info in experiment.hparam_infos}


def test_one_row_with_the_final_metric(trained: Callable[..., Run]) -> None:
    run = trained("steps=6", "eval_every=3", "optimizer.lr=0.07")
    [row], _ = table(run.directory.parent)
    assert row["status"] == ["STATUS_SUCCESS"]
    assert row["metrics"]["eval/accuracy"] == (6, pytest.approx(run.result.metrics["eval/accuracy"]))
    wanted = {key: value for key, value in flatten(run.config).items() if value is not None}
    assert row["hparams"] == wanted
    assert wanted["optimizer.lr"] == 0.07
    assert row["hparams"]["deterministic"] is False, "a truth value, not a number"
    assert row["hparams"]["model.channels"] == "[16, 32]"


def test_one_row_after_a_resume_and_after_a_crash(
    trained: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ("steps=9", "eval_every=3", "save_every=3")
    with monkeypatch.context() as patched:

        def crash(workload: Any, model: torch.nn.Module, step: int) -> None:
            if step == 5:
                raise ZeroDivisionError

        patched.setattr("runner.workloads.base.Workload.after_step", crash)
        with pytest.raises(CrashedError):
            trained(*steps)
    [row], _ = table(tmp_path)
    assert row["status"] == ["STATUS_UNKNOWN"]
    assert row["metrics"]["eval/accuracy"][0] == 3
    run = trained(*steps)
    [row], _ = table(tmp_path)
    assert row["status"] == ["STATUS_SUCCESS"]
    assert row["metrics"]["eval/accuracy"] == (9, pytest.approx(run.result.metrics["eval/accuracy"]))


def test_runs_with_different_parts_share_a_table(trained: Callable[..., Run]) -> None:
    runs = [
        trained("steps=2", "optimizer=sgd", directory="first"),
        trained("steps=2", "optimizer=adam", directory="second"),
    ]
    rows, columns = table(runs[0].directory.parent)
    assert len(rows) == 2
    assert {"optimizer.momentum", "optimizer.beta1"} <= set(columns), "those of both"
    assert [name for name, differs in columns.items() if differs] == ["optimizer", "optimizer.lr"]


# ---------------------------------------------------------------------------------------------------------------------
# The event file


def test_sessions_are_read_in_their_order_whatever_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for first_step, now in ((1, 2e9), (3, 2e9), (5, 1e9), (6, 2e9 + 7)):  # at once, and with the clock set back
        monkeypatch.setattr(time, "time", lambda now=now: now)
        record = Record(tmp_path, after_step=first_step - 1)
        for step in range(first_step, 9):
            record.scalars({"a": first_step}, step)
        record.__exit__()
    assert curves(tmp_path)["a"] == [(1, 1), (2, 1), (3, 3), (4, 3), (5, 5), (6, 6), (7, 6), (8, 6)]


def test_what_was_added_survives_the_process(tmp_path: Path) -> None:
    file = EventFile(tmp_path, 1)
    file.add(scalar("a", 3.0), 2)
    assert curves(tmp_path)["a"] == [(2, 3.0)]
    file.close()


def test_a_disk_that_takes_no_events_is_told(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("only Linux has a device that is always full")
    file = EventFile(tmp_path, 1)
    os.dup2(os.open("/dev/full", os.O_WRONLY), file._file.fileno())
    with pytest.raises(StorageError, match="No space left on device"):
        file.add(scalar("a", 3.0), 2)
    file.close()  # tells it no second time


def test_off_rank_0_nothing_is_written(tmp_path: Path) -> None:
    with Record(tmp_path, 0, visible=False) as record:
        record.scalars({"a": 1.0}, 1)
        record.pictures({"b": torch.zeros(3, 4, 4, dtype=torch.uint8)}, 1)
        record.texts({"c": "d"})
        record.open_row({"e": 1})
        record.close_row()
        record.sync()
    assert not list(tmp_path.iterdir())


# ---------------------------------------------------------------------------------------------------------------------
# The window and the stopwatch


def test_a_window_adds_micro_batches_and_keeps_steps_apart() -> None:
    window = Window(torch.zeros(2))
    for sums, is_last in (((1.0, 2.0), False), ((3.0, 4.0), True), ((5.0, 6.0), True)):
        window.add(torch.tensor(sums))
        if is_last:
            window.end_step()
    doubled = lambda sums: {name: 2 * tensor for name, tensor in sums.items()}  # noqa: E731
    assert window.peek(doubled, 2).tolist() == [[8, 12], [10, 12]]
    assert window.take(doubled, 2).tolist() == [[8, 12], [10, 12]]
    assert window.peek(doubled, 2).shape == (0, 2)
    window.add(torch.tensor((7.0, 8.0)))
    window.end_step()
    assert window.take(lambda sums: sums, 3).tolist() == [[7, 8]]


def test_a_window_goes_on_with_earlier_rows() -> None:
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    window = Window(torch.zeros(2), list(rows.unbind()))
    window.add(torch.tensor((5.0, 6.0)))
    window.end_step()
    assert window.take(lambda sums: sums, 9).tolist() == [[1, 2], [3, 4], [5, 6]]


def test_a_step_without_a_micro_batch_adds_nothing() -> None:
    window = Window(torch.zeros(2))
    window.end_step()
    assert window.take(lambda sums: sums, 1).tolist() == [[0, 0]]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("at", [0, 2, 4])
def test_a_window_names_the_first_bad_step(bad: float, at: int) -> None:
    window = Window(torch.zeros(2))
    for i in range(5):
        window.add(torch.tensor((bad if i >= at else 1.0, 0.0)))
        window.end_step()
    with pytest.raises(DivergedError) as caught:
        window.peek(lambda sums: sums, 20)
    assert caught.value.step == 16 + at
    assert str(caught.value) == f"the loss is not finite at step {16 + at}"


class Hand(SimpleNamespace):
    """A clock that moves only when told."""

    now = 100.0

    def perf_counter(self) -> float:
        return self.now


def test_a_stopwatch_leaves_pauses_out(monkeypatch: pytest.MonkeyPatch) -> None:
    hand = Hand()
    monkeypatch.setattr(runner.system.section_timer, "time", hand)
    monkeypatch.setattr(runner.tracking.metrics, "time", hand)
    clock = Clock()
    monkeypatch.setattr(runner.tracking.metrics, "clock", clock)

    def spend(name: str, seconds: float) -> None:
        with clock.section(name):
            hand.now += seconds

    spend("data", 50)  # before the first step: not counted
    spend("log", 50)
    watch = Stopwatch(torch.device("cpu"))
    hand.now += 7
    watch.start()
    spend("data", 1)
    hand.now += 2
    watch.lap(pausing=False)
    spend("data", 0.5)
    hand.now += 0.5
    watch.lap(pausing=True)
    assert watch.rates(8) == {
        "time/samples_per_second": 16 / 4,
        "time/step_seconds": 2,
        "time/data_share": 1.5 / 4,
    }
    for name in ("log", "evaluate", "checkpoint"):
        spend(name, 1000)
    hand.now += 5
    watch.lap(pausing=True)
    assert watch.rates(8)["time/samples_per_second"] == 8 / 5
    assert list(watch.seconds) == [3, 1, 5]
    assert watch.elapsed() == 3009


def test_the_device_is_waited_for_before_a_pause_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a device still computes is the time of the steps, not of the log that waits for it."""
    waited = []
    monkeypatch.setattr(runner.tracking.metrics, "synchronize", waited.append)
    watch = Stopwatch(torch.device("meta"))
    watch.lap(pausing=False)
    assert not waited
    watch.lap(pausing=True)
    assert waited == [torch.device("meta")]


def test_a_pause_is_what_a_log_an_evaluation_or_a_checkpoint_makes(
    trained: Callable[..., Run], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = []
    monkeypatch.setattr(Stopwatch, "lap", lambda watch, pausing: said.append(pausing) or watch.seconds.append(1))
    trained("steps=13", "log_every=4", "eval_every=5", "save_every=6")
    assert [step for step, pausing in enumerate(said, start=1) if pausing] == [4, 5, 6, 8, 10, 12, 13]


@pytest.mark.parametrize(("count", "left_out"), [(0, 0), (4, 0), (5, 1), (20, 4), (50, 10), (1000, 10)])
def test_the_warm_up_is_left_out(count: int, left_out: int) -> None:
    watch = Stopwatch(torch.device("cpu"))
    watch.seconds.extend(map(float, range(count)))
    assert watch.steady() == list(map(float, range(left_out, count)))


def test_quantiles() -> None:
    assert quantiles([]) == {}
    assert quantiles([3.0]) == {"median": 3, "p90": 3}
    assert quantiles([float(n) for n in range(10, 0, -1)]) == {"median": 5.5, "p90": 9}
    assert quantiles([float(n) for n in range(1, 101)]) == {"median": 50.5, "p90": 90}


# ---------------------------------------------------------------------------------------------------------------------
# result.json


def test_the_result_tells_what_the_curves_tell(trained: Callable[..., Run]) -> None:
    before = time.perf_counter()
    run = trained("steps=30", "log_every=5", "eval_every=10", "optimizer.lr=0.02")
    took = time.perf_counter() - before
    result, read = run.result.as_dict(), curves(run.directory)
    assert (result["status"], result["steps"], result["world_size"], result["error"]) == ("done", 30, 1, "")
    for tag in ("train/loss", "train/accuracy", "eval/loss", "eval/accuracy"):
        assert result["metrics"][tag] == pytest.approx(read[tag][-1][1], rel=1e-6)
    assert set(result["metrics"]) == {"train/loss", "train/accuracy", "eval/loss", "eval/accuracy"}
    step, best = max(read["eval/accuracy"], key=lambda point: (point[1], -point[0]))
    assert result["best"] == {"metric": "eval/accuracy", "value": pytest.approx(best), "step": step}
    training = sum(5 * seconds for _, seconds in read["time/step_seconds"])
    assert result["samples_per_second"] == pytest.approx(30 * 64 / training, rel=1e-4)
    assert training < result["seconds"] < took
    assert 0 < result["step_seconds"]["median"] <= result["step_seconds"]["p90"] < training
    assert 50e6 < result["peak_memory_bytes"] < 1.05 * 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    hashed = {key: value for key, value in run.config.items() if key not in ("name", "output_root", "resume")}
    assert result["config_hash"] == hashlib.sha256(json.dumps(hashed, sort_keys=True).encode()).hexdigest()[:12]
    assert json.loads(json.dumps(result)) == result, "plain values"


# ---------------------------------------------------------------------------------------------------------------------
# The log


def test_the_log_file_has_all_and_the_console_what_matters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("runner.anything")
    with LogFile(tmp_path), warnings.catch_warnings():
        warnings.simplefilter("always")
        log.debug("a detail")
        log.warning("something")
        warnings.warn("a library's", stacklevel=1)
    log.warning("afterwards")
    written = (tmp_path / "log.txt").read_text()
    assert "DEBUG runner.anything: a detail" in written
    assert "WARNING runner.anything: something" in written
    assert "a library's" in written
    assert "afterwards" not in written
    said = capsys.readouterr().err
    assert "something\n" in said
    assert "a detail" not in said


def test_a_log_that_cannot_be_written_ends_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("only Linux has a device that is always full")
    (tmp_path / "log.txt").symlink_to("/dev/full")
    with LogFile(tmp_path):
        logging.getLogger("runner.anything").warning("something")
    assert capsys.readouterr().err == "something\n"


def test_a_result_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    directory.write_json(tmp_path / "result.json", {"a": 1})

    def full(path: Path, *_: object, **__: object) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(OSError, match="No space"):
        directory.write_json(tmp_path / "result.json", {"a": 2})
    assert directory.read_result(tmp_path) == {"a": 1}
