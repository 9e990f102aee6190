"""Tests of what a run logs: event files are read back with TensorBoard's own reader, and compared with a plain loop."""

import io
import json
import logging
import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.compose import TINY_CPU, build_composed_run, train_in
from helpers.events import hparams_tab, load_events, scalar_curves
from helpers.handmade_runs import write_config
from helpers.plain_loop import OPTIMIZER_CASES, PLAIN_LOOP_OVERRIDES, plain_evaluation, plain_loop
from PIL import Image

from runner.result import CrashedError
from runner.tracking.base import Tracker
from runner.tracking.recorder import Recorder, typed_values
from runner.tracking.tensorboard import TensorBoard

PICTURES = {"eval/samples", "eval/misclassified", "eval/confusion", "eval/class_accuracy"}
TIMES = {"time/samples_per_second", "time/step_seconds", "time/data_share", "time/tflops"}


def noting_norms(norms: list[float], parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    """Return an optimizer that appends the norm of the gradients to `norms` in every step."""
    optimizer = OPTIMIZER_CASES["sgd"][1](parameters)
    squares = lambda: sum(p.grad.square().sum().item() for p in parameters if p.grad is not None)  # noqa: E731
    optimizer.register_step_pre_hook(lambda *_: norms.append(squares() ** 0.5))
    return optimizer


@pytest.mark.parametrize("accumulation", [1, 4])
def test_each_point_is_the_mean_since_the_last_log(trained, accumulation):
    run, norms = trained(*PLAIN_LOOP_OVERRIDES, "log_every=4", f"accumulation={accumulation}"), []
    plain = plain_loop(run.run, partial(noting_norms, norms))
    read = scalar_curves(run.directory)
    windows = {4: slice(0, 4), 8: slice(4, 8), 10: slice(8, 10)}
    for tag, values in (("train/loss", plain.losses), ("train/accuracy", plain.metrics)):
        means = [sum(values[window]) / len(values[window]) for window in windows.values()]
        assert [step for step, _ in read[tag]] == list(windows)
        assert [value for _, value in read[tag]] == pytest.approx(means, rel=1e-5)
    assert read["train/gradient_norm"] == [(step, pytest.approx(norms[step - 1], rel=1e-4)) for step in windows]
    assert read["lr"] == [(step, pytest.approx(0.05)) for step in windows]
    loss, accuracy = plain_evaluation(run.run, plain.weights)
    assert read["eval/loss"] == [(10, pytest.approx(loss, rel=1e-5))]
    assert read["eval/accuracy"] == [(10, pytest.approx(accuracy))]


def test_the_tags_of_a_run(trained):
    run = trained("steps=6", "log_every=2", "eval_every=3", "schedule=cosine", "optimizer.lr=0.4")
    training = {"train/loss", "train/accuracy", "train/gradient_norm", "lr", "epoch"}
    training |= {"memory/peak", *TIMES}
    read = scalar_curves(run.directory)
    assert set(read) == training | {"eval/loss", "eval/accuracy", "best/accuracy"}
    assert all([step for step, _ in read[tag]] == [2, 4, 6] for tag in training)
    assert all([step for step, _ in read[tag]] == [3, 6] for tag in ("eval/loss", "eval/accuracy", "best/accuracy"))
    assert read["epoch"] == [(step, pytest.approx(64 * step / 1438)) for step in (2, 4, 6)]
    best = [max(value for _, value in read["eval/accuracy"][: number + 1]) for number in range(2)]
    assert [value for _, value in read["best/accuracy"]] == best
    rates = [0.4 * (1 + torch.tensor(torch.pi * (step - 1) / 6).cos().item()) / 2 for step in (2, 4, 6)]
    assert [value for _, value in read["lr"]] == pytest.approx(rates, rel=1e-5)
    assert all(value > 0 for tag in TIMES for _, value in read[tag])
    assert all(value < 1 for _, value in read["time/data_share"])
    steps_per_second = [value / 64 for _, value in read["time/samples_per_second"]]
    assert [1 / value for _, value in read["time/step_seconds"]] == pytest.approx(steps_per_second, rel=1e-5)

    events = load_events(run.directory)
    assert set(events.Tags()["images"]) == PICTURES
    for tag in PICTURES:
        assert [point.step for point in events.Images(tag)] == [3, 6]
        for point in events.Images(tag):
            with Image.open(io.BytesIO(point.encoded_image_string)) as image:
                assert image.size == (point.width, point.height)
                assert len(image.convert("L").getcolors()) > 2, "not empty"


def text(directory: Path, tag: str) -> list[tuple[int, str]]:
    """Return the points of a text, (step, content), without the Markdown code fence."""
    points = load_events(directory).Tensors(f"{tag}/text_summary")
    contents = [point.tensor_proto.string_val[0].decode() for point in points]
    assert all(content.startswith("```\n") and content.endswith("\n```") for content in contents)
    return [(p.step, content[4:-4]) for p, content in zip(points, contents, strict=True)]


def test_the_config_the_environment_and_a_table_of_the_model_are_logged_as_texts(trained, caplog):
    with caplog.at_level(logging.DEBUG, logger="runner"):
        run = trained("steps=1", "optimizer.lr=0.07", "model.freeze=[conv1.*]")
    [(step, config)] = text(run.directory, "config")
    assert step == 1
    assert yaml.safe_load(config) == run.run.config
    assert run.run.config["optimizer"]["lr"] == 0.07
    [(_, environment)] = text(run.directory, "environment")
    assert json.loads(environment)["versions"]["torch"] == torch.__version__
    [(_, table)] = text(run.directory, "network")
    assert table.splitlines() == [
        "block   type                   output  parameters  trained    FLOPs",
        "conv1   Conv2d ReLU MaxPool2d  16×4×4         160        0   18,432",
        "conv2   Conv2d ReLU MaxPool2d  32×2×2       4,640    4,640  147,456",
        "hidden  Flatten Linear ReLU    64           8,256    8,256   16,384",
        "head    Linear                 10             650      650    1,280",
        "total   ConvNet                10          13,706   13,546  183,552",
    ]
    assert f"model:\n{table}" in caplog.messages


def test_each_session_logs_its_own_config_once(trained):
    trained("steps=4", "save_every=2")
    run = trained("steps=8", "save_every=2")
    told = [(step, yaml.safe_load(config)["steps"]) for step, config in text(run.directory, "config")]
    assert told == [(1, 4), (5, 8)]
    assert trained("steps=8", "save_every=2").result.steps == 8  # nothing was left to do
    assert [step for step, _ in text(run.directory, "config")] == [1, 5, 9]


def test_the_loss_scale_is_logged_if_the_precision_has_one(tmp_path, monkeypatch):
    run = build_composed_run(*TINY_CPU, "steps=2")
    monkeypatch.setattr(run.precision, "scalars", lambda: {"train/loss_scale": torch.tensor(512.0)})
    train_in(tmp_path, run)
    assert scalar_curves(tmp_path)["train/loss_scale"] == [(2, 512.0)]


TYPED = ["optimizer.lr=0.07", "schedule=cosine", "+precision='16'", "optimizer.lr=0.08", "seed=3", "deterministic=true"]
VALUES = {"optimizer.lr": 0.08, "schedule": "cosine", "precision": "16", "seed": 3.0, "deterministic": "true"}


def test_an_override_without_a_value_in_the_config_is_shown_as_typed():
    config = {"schedule": {"_target_": "runner.schedule.Cosine", "warmup": 5}, "steps": 7, "token": "***"}
    typed = ["schedule.warmup=5", "data.size=9", "steps.x=1", "token=${oc.env:TOKEN}"]
    wanted = {"schedule.warmup": 5, "data.size": "9", "steps.x": "1", "token": "***"}
    assert typed_values(typed, config) == wanted


def test_hparams_have_one_row_with_the_overrides_after_a_crash_and_after_a_resume(trained, tmp_path, monkeypatch):
    others = ["resume=auto", "output_root=/tmp/x", "name='a'", "~profiler", "hydra.verbose=true", "max_grad_norm=null"]
    (tmp_path / "run").mkdir()
    write_config(tmp_path / "run", {}, [*TYPED, *others, "data.token=***", "model.channels=[16,32]"])
    steps = ("steps=9", "eval_every=3", "save_every=3", "optimizer.lr=0.08", "seed=3", "deterministic=true")

    def crash(workload: Any, model: torch.nn.Module, step: int) -> None:
        if step == 5:
            raise ZeroDivisionError

    with monkeypatch.context() as patched:
        patched.setattr("runner.workloads.base.Workload.after_step", crash)
        with pytest.raises(CrashedError):
            trained(*steps)
    [row] = hparams_tab(tmp_path).rows
    assert row["status"] == ["STATUS_UNKNOWN"]
    assert row["metrics"]["eval/accuracy"][0] == 3
    run = trained(*steps)
    [row] = hparams_tab(tmp_path).rows
    assert row["status"] == ["STATUS_SUCCESS"]
    assert row["metrics"]["eval/accuracy"] == (9, pytest.approx(run.result.metrics["eval/accuracy"]))
    assert row["hparams"] == VALUES | {"model.channels": "[16,32]"}


class Calls(Tracker):
    """A tracker that records the calls of its methods."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getattribute__(self, name: str) -> Any:
        calls = object.__getattribute__(self, "__dict__").get("calls")
        if name == "backends":
            return lambda: [self]
        return calls if name in ("calls", "__dict__") else lambda *arguments: calls.append((name, *arguments))


def record(recorder: Recorder, picture: torch.Tensor) -> None:
    """Call every method of `recorder` once."""
    with recorder:
        recorder.scalars({"a": torch.tensor(1.5)}, 4)
        recorder.images({"b": picture}, 4)
        recorder.texts({"c": "d"})
        recorder.hyperparameters({"e": {"_target_": "package.module.Class", "f": 1, "g": None}, "h": [1, 2]})
        recorder.flush()
        recorder.finish("done")


def test_the_recorder_passes_everything_to_the_tracker(tmp_path):
    tracker, picture = Calls(), torch.zeros(3, 4, 4, dtype=torch.uint8)
    write_config(tmp_path, {}, ["e=class", "e.f=1", "h=[1,2]", "e.g=null"])
    record(Recorder(tracker, tmp_path, 3), picture)
    assert tracker.calls == [
        ("open", tmp_path, 4),
        ("scalars", {"a": 1.5}, 4),
        ("images", {"b": picture}, 4),
        ("texts", {"c": "d"}, 4),
        ("hyperparameters", {"e": "Class", "e.f": 1, "h": "[1,2]"}, {"e": "class", "e.f": 1, "h": "[1,2]"}),
        ("flush",),
        ("close", "done"),
    ]
    assert type(tracker.calls[1][1]["a"]) is float


def test_secrets_are_masked_and_invalid_utf8_is_escaped_for_the_tracker(tmp_path):
    tracker, root = Calls(), os.fsdecode(b"/data/\xff")
    config = {"data": {"_target_": "a.Data", "token": "s3cret", "root": root, "urls": ["https://ann:s3cret@host/x"]}}
    with Recorder(tracker, tmp_path, 0) as recorder:
        recorder.texts({"config": f"token: s3cret\nroot: {root}\n"})
        recorder.hyperparameters(config)
    hidden = {"data": "Data", "data.token": "***", "data.root": "/data/\\xff", "data.urls": "[https://ann:***@host/x]"}
    assert tracker.calls[1:3] == [
        ("texts", {"config": "token: ***\nroot: /data/\\xff\n"}, 1),
        ("hyperparameters", hidden, {}),
    ]
    assert config["data"]["token"] == "s3cret"
    board = TensorBoard()  # accepts the changed values
    board.open(tmp_path, 1)
    for name, *arguments in tracker.calls[1:3]:
        getattr(board, name)(*arguments)
    board.close("done")


def test_nothing_is_written_on_ranks_other_than_0(tmp_path):
    for tracker in (TensorBoard(), tracked := Calls()):
        record(Recorder(tracker, tmp_path, 0, visible=False), torch.zeros(3, 4, 4, dtype=torch.uint8))
    assert not list(tmp_path.glob("events*"))
    assert tracked.calls == []
