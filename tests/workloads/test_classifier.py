"""Tests of the classifier: loss and metrics, evaluation in shards, votes and images."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, prepare_session, prepared_workload
from PIL import Image
from torch.nn.functional import cross_entropy

import runner.workloads.classifier
from runner.batching import Plan
from runner.config.errors import ConfigError
from runner.data.base import DataError
from runner.training import train
from runner.workloads.base import Workload
from runner.workloads.classifier import Classifier

CPU = torch.device("cpu")


def classifier(*overrides: str) -> Any:
    return prepared_workload(*TINY_CPU, *overrides)


def fixed(outputs: torch.Tensor) -> Any:
    """Return an `infer` function that returns the next rows of `outputs`."""
    rows = iter(outputs)
    return lambda inputs: torch.stack([next(rows) for _ in inputs])


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_and_metric_sums(smoothing):
    workload = classifier(f"workload.label_smoothing={smoothing}")
    outputs, targets = torch.randn(6, 10, requires_grad=True), torch.tensor([0, 1, 2, 3, 4, 5])
    loss, sums = workload.loss_of(outputs, targets)
    wanted = cross_entropy(outputs, targets, label_smoothing=smoothing)
    correct = float((outputs.argmax(1) == targets).sum())
    assert torch.equal(loss, wanted)
    assert sums[0].tolist() == pytest.approx([6 * wanted.item(), correct])
    assert sums[1].tolist() == [6, 6]
    assert (sums.dtype, sums.requires_grad) == (torch.float64, False)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("size", [1000, 50])
def test_shards_of_an_evaluation_add_up_to_the_whole(count, size):
    workload = classifier(f"workload.eval_batch_size={size}")
    held_out = workload.held_out
    outputs = torch.randn(len(held_out), 10)
    shards, start = [], 0
    for index in range(count):
        stop = len(held_out) * (index + 1) // count
        shards.append(workload.evaluate(fixed(outputs[start:stop]), (index, count), CPU))
        start = stop
    sums = {name: sum(shard[name] for shard in shards) for name in shards[0]}
    metrics = workload.summarize(sums)
    predicted = outputs.argmax(1)
    assert len(predicted) == len(held_out) == 359
    assert metrics["loss"] == pytest.approx(float(cross_entropy(outputs, held_out.targets)), rel=1e-5)
    assert metrics["accuracy"] == float((predicted == held_out.targets).double().mean())
    assert torch.equal(sums["predictions"] - 1, predicted)
    assert torch.equal(sums["targets"] - 1, held_out.targets)
    confusion = torch.zeros(10, 10, dtype=torch.int64)
    confusion.index_put_((held_out.targets, predicted), torch.tensor(1), accumulate=True)
    assert workload.details(sums)["confusion"] == confusion.tolist()


def test_an_evaluation_without_a_sample_is_an_error():
    workload = classifier()
    with pytest.raises(DataError, match="none of them can be read"):
        workload.summarize({name: torch.zeros(1) for name in ("loss", "top5", "predictions", "targets")})


def test_several_models_vote_by_their_mean_probability():
    outputs = torch.randn(3, 5, 10)
    torch.testing.assert_close(classifier().vote(outputs).exp(), outputs.softmax(-1).mean(0))


def test_pictures_are_of_evenly_spaced_samples_and_of_the_most_confident_mistakes(monkeypatch):
    workload, outputs, shown = classifier(), torch.randn(359, 10), []
    sums = workload.evaluate(fixed(outputs), (0, 1), CPU)
    pictures = torch.zeros(36, 1, 8, 8, dtype=torch.uint8)
    monkeypatch.setattr(type(workload.held_out), "display_images", lambda _, rows: shown.append(rows) or pictures)
    workload.images(sums)
    samples, mistakes = shown
    assert {after - before for before, after in pairwise(samples)} == {10, 11}
    assert (samples[0], samples[-1], len(samples)) == (0, 358, 36)
    confidence, wrong = outputs.softmax(1).amax(1), outputs.argmax(1) != workload.held_out.targets
    wanted = confidence[wrong].sort(descending=True).values[:36]
    torch.testing.assert_close(confidence[mistakes], wanted, rtol=0, atol=1e-3)  # rounded to 1/1000
    assert wrong[mistakes].all()


def test_overfitting_repeats_the_first_batches():
    workload = classifier("workload.overfit_batches=2", "data.crop=0")
    stream = workload.batches(workload.build_model(), Plan(16, 2), 0, CPU)
    batches = [next(stream) for _ in range(12)]  # two micro-batches per step
    for number in range(4, 12):
        assert torch.equal(batches[number].inputs, batches[number - 4].inputs)
        assert torch.equal(batches[number].targets, batches[number - 4].targets)
    assert not torch.equal(batches[0].targets, batches[2].targets)
    other = classifier("data.crop=0")
    first = other.batches(other.build_model(), Plan(16, 2), 0, CPU)
    assert all(torch.equal(next(first).inputs, batches[number].inputs) for number in range(4))


@pytest.mark.parametrize("damaged", [1, 6])
def test_pictures_match_their_samples_if_a_process_has_skipped_a_file(tmp_path, monkeypatch, damaged):
    """Two processes evaluate half of the images each, and know only which of their own files cannot be read."""
    for split, count in (("train", 1), ("val", 4)):
        for number in range(2 * count):
            path = tmp_path / split / "ab"[number // count] / f"{number}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (20 * number,) * 3).save(path)
    (tmp_path / "val" / "ab"[damaged // 4] / f"{damaged}.png").write_bytes(b"no image")
    options = ("data=imagefolder", f"data.root={tmp_path}", "data.on_error=skip", "data.workers=0")
    first, second = classifier(*options), classifier(*options)
    shards = [
        workload.evaluate(lambda inputs: torch.tensor([[2.0, 0.0]]).expand(len(inputs), 2), (rank, 2), CPU)
        for rank, workload in enumerate((first, second))
    ]
    sums = {name: shards[0][name] + shards[1][name] for name in shards[0]}
    shown: list[tuple[list[int], list[bool]]] = []

    def noted(images: torch.Tensor, captions: list[str], good: list[bool]) -> torch.Tensor:
        shown.append(((images[:, 0, 0, 0] // 20).tolist(), good))
        return torch.zeros(3, 1, 1, dtype=torch.uint8)

    monkeypatch.setattr(runner.workloads.classifier, "grid", noted)
    first.images(sums)
    left = [number for number in range(8) if number != damaged]
    assert (sums["targets"] - 1).tolist() == [-1 if number == damaged else number // 4 for number in range(8)]
    (samples, good), (mistakes, _) = shown
    assert sorted(samples) == left
    assert good == [number < 4 for number in samples]
    assert sorted(mistakes) == [number for number in left if number >= 4]


@pytest.mark.parametrize("overrides", [(), ("workload.mixup=1",)])
def test_the_diverged_batch_is_that_of_its_step(overrides):
    workload, plan = classifier(*overrides), Plan(16, 2, (1, 2), seed=3)
    stream = workload.batches(workload.build_model(), plan, 4, CPU)
    wanted = [next(stream) for _ in range(2)]
    found = workload.diverged_batch(plan, 5, CPU)
    assert torch.equal(found["inputs"], torch.cat([batch.inputs for batch in wanted]))
    assert torch.equal(found["targets"], torch.cat([batch.targets for batch in wanted]))


@dataclass
class TooManyMetrics(Classifier):
    train_metrics = ("loss",)


@dataclass
class NotMeasured(Classifier):
    best = ("recall", "max")
    eval_metrics = Workload.eval_metrics


FAULTS: dict[type[Classifier], str] = {
    NotMeasured: "NotMeasured lists recall, but its evaluations measure loss, accuracy",
    TooManyMetrics: "its metric sums have the shape [2, 2], but its metrics are loss",
}


@pytest.mark.parametrize("workload", FAULTS)
def test_metrics_that_do_not_fit_are_refused_in_words(workload, tmp_path, monkeypatch):
    """As soon as they are measured: those of an evaluation, after the first step here."""
    steps: list[int] = []
    monkeypatch.setattr(Classifier, "after_step", lambda workload, model, step: steps.append(step))
    run = build_composed_run(*TINY_CPU, "steps=4", "eval_every=1")
    run.workload.__class__ = workload
    session = prepare_session(run)
    with pytest.raises(ConfigError) as refusal:
        train(run, session, tmp_path)
    assert (refusal.value.key, refusal.value.why) == ("workload", FAULTS[workload])
    assert steps == ([1] if workload is NotMeasured else [])


@pytest.mark.parametrize("best", [("accuracy", "maximum"), ("accuracy", "min"), ("recall", "max")])
def test_a_goal_that_is_not_min_or_max_or_not_listed_is_refused_before_the_run(best, monkeypatch):
    """By a misspelled goal, the worst checkpoint would be kept as the best one."""
    monkeypatch.setattr(Classifier, "best", best)
    with pytest.raises(ConfigError, match="best of Classifier is") as refusal:
        prepare_session(build_composed_run(*TINY_CPU))
    assert refusal.value.key == "workload"
