"""Tests of class weights, mixup, CutMix and top-5 accuracy; training in every mode equals a plain PyTorch loop."""

import functools
from typing import Any

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, compose_config, prepare_session, prepared_workload
from helpers.plain_loop import PlainSettings, largest_difference, plain_loop, weights_at

from runner.batching import Plan
from runner.config.errors import ConfigError
from runner.data.augment import Mixing
from runner.seeds import derive

CPU = torch.device("cpu")
STEPS, BATCH = 6, 24
COMMON = ("data.crop=0", "schedule=constant", f"steps={STEPS}", f"batch_size={BATCH}", "eval_every=0", "precision=64")
SGD = ("optimizer.lr=0.05", "optimizer.momentum=0")
WEIGHTS = [0.5, 1, 2, 0, 1, 1, 3, 1, 1, 0.25]
CASES = {
    "class weights": (f"workload.class_weights={WEIGHTS}".replace(" ", ""), "workload.label_smoothing=0.1"),
    "balanced": ("workload.balance_classes=true",),
    "mixup": ("workload.mixup=0.4", "workload.label_smoothing=0.1"),
    "cutmix": ("workload.cutmix=1",),
    "both, weighted": ("workload.mixup=0.2", "workload.cutmix=1", "workload.balance_classes=true"),
}


def classifier(*overrides: str) -> Any:
    return prepared_workload(*TINY_CPU, *overrides)


def plain_loss(
    outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor, smoothing: float, mixed: bool
) -> torch.Tensor:
    """Return torch's cross-entropy of the whole batch: of classes, a mean over the weights of the samples."""
    targets = targets if mixed else targets.argmax(1)
    return torch.nn.functional.cross_entropy(outputs, targets, weights, label_smoothing=smoothing)


@functools.cache
def plain(case: str) -> dict[str, torch.Tensor]:
    """Return the weights after a plain PyTorch loop over whole batches."""
    run = build_composed_run(*TINY_CPU, *COMMON, *CASES[case])
    workload: Any = run.workload
    workload.prepare()
    weights, mixed = torch.ones(10, dtype=torch.float64), Mixing(workload.mixup, workload.cutmix)
    if workload.class_weights:
        weights = torch.tensor(WEIGHTS, dtype=torch.float64)
    elif workload.balance_classes:
        weights = len(workload.train) / (10 * workload.train.targets.bincount().double())

    def changed(step: int, inputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        targets = torch.eye(10)[targets]
        return (
            rolled_and_mixed(inputs, targets, mixed, derive(run.seed, "mixing", step)) if mixed else (inputs, targets)
        )

    loss = functools.partial(plain_loss, weights=weights, smoothing=workload.label_smoothing, mixed=bool(mixed))
    settings = PlainSettings(STEPS, torch.float64, loss=loss, metric=loss, changed=changed)
    return plain_loop(run, lambda p: torch.optim.SGD(p, lr=0.05), settings).weights


def rolled_and_mixed(
    inputs: torch.Tensor, targets: torch.Tensor, mixing: Mixing, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mix the whole batch with a copy of itself that is rolled by one, using torchvision's own transforms."""
    import random

    from torchvision.transforms import v2

    draws = random.Random(seed)
    blends = draws.random() < 0.5 if mixing.mixup and mixing.cutmix else mixing.mixup > 0
    alpha = mixing.mixup if blends else mixing.cutmix
    share = draws.betavariate(alpha, alpha)
    if blends:
        params: dict[str, Any] = {"lam": share, "labels": None, "batch_size": BATCH}
        return v2.MixUp(num_classes=10).transform(inputs, params), share * targets + (1 - share) * targets.roll(1, 0)
    height, width = inputs.shape[-2:]
    y, x = draws.randrange(height), draws.randrange(width)
    half = 0.5 * (1 - share) ** 0.5
    y1, y2 = max(0, y - int(half * height)), min(height, y + int(half * height))
    x1, x2 = max(0, x - int(half * width)), min(width, x + int(half * width))
    share = 1 - (y2 - y1) * (x2 - x1) / (height * width)
    images = v2.CutMix(num_classes=10).transform(inputs, {"box": (x1, y1, x2, y2), "labels": None, "batch_size": BATCH})
    return images, share * targets + (1 - share) * targets.roll(1, 0)


MODES = {
    "single": (1, ()),
    "accumulation": (1, ("accumulation=4",)),
    "ddp": (2, ("parallel=ddp", "accumulation=2")),
    "fsdp": (2, ("parallel=fsdp",)),
    "pipeline": (2, ("parallel=pipeline", "parallel.split_size=4")),
}


PAIRS = [
    pytest.param(case, mode, marks=[] if mode == "ddp" or case == "both, weighted" else pytest.mark.slow)
    for case in CASES
    for mode in MODES
]


@pytest.mark.parametrize(("case", "mode"), PAIRS)
def test_every_mode_equals_a_plain_loop(case, mode, ranks, tmp_path):
    processes, options = MODES[mode]
    overrides = (*TINY_CPU, *COMMON, *SGD, *CASES[case], *options)
    ranks(processes).train(compose_config(*overrides), tmp_path)
    assert largest_difference(weights_at(tmp_path, STEPS), plain(case)) <= 1e-6  # targets are float32


@pytest.mark.parametrize("option", ["mixup=0.4", "cutmix=1"])
def test_a_mixed_batch_does_not_depend_on_how_it_is_divided(option):
    """The samples are also augmented; the random numbers for a sample do not depend on the other samples."""
    workload = classifier(f"workload.{option}", "data.crop=2", "data.random_erase=0.5")
    model = workload.build_model()

    def batch(*plans: Plan) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [next(s) for p in plans for s in [workload.batches(model, p, 3, CPU)] for _ in range(p.accumulation)]
        inputs, targets = zip(*parts, strict=True)
        return torch.cat(inputs), torch.cat(targets)

    whole = batch(Plan(16))
    for parts in ([Plan(16, 4)], [Plan(16, 2, (rank, 2)) for rank in (0, 1)], [Plan(16, 16)]):
        inputs, targets = batch(*parts)
        assert inputs.equal(whole[0])
        assert targets.equal(whole[1])
    assert whole[1].sum(1).allclose(torch.ones(16))
    assert (whole[1] > 0).sum() > 16, "most samples have two classes"
    other = next(workload.batches(model, Plan(16), 4, CPU))
    assert not other.targets.max(1).values.unique().equal(whole[1].max(1).values.unique()), "drawn for each batch"


def test_the_accuracy_of_mixed_samples_counts_the_class_with_more_weight():
    workload = classifier("workload.mixup=1")
    outputs, targets = torch.eye(10)[[3, 4]], torch.eye(10)[[3, 3]] * 0.6 + torch.eye(10)[[4, 4]] * 0.4
    assert workload.sample_metrics(outputs, targets).tolist() == [[True], [False]]


def test_the_predicted_class_is_among_the_best_five_where_outputs_are_equal():
    workload = classifier("workload.top5=true")
    sums = workload.evaluate(lambda inputs: torch.zeros(len(inputs), 10), (0, 1), CPU)
    found, targets = workload.summarize(sums), workload.held_out.targets
    assert found["accuracy"] == (targets == 0).double().mean()
    assert found["top5_accuracy"] == (targets < 5).double().mean(), "the first ones, as in argmax"


def test_top5_accuracy_counts_the_five_largest_outputs():
    workload = classifier("workload.top5=true", "stop.metric=eval/top5_accuracy", "stop.target=1")
    outputs = torch.randn(len(workload.held_out), 10)
    rows = iter(outputs)
    sums = workload.evaluate(lambda inputs: torch.stack([next(rows) for _ in inputs]), (0, 1), CPU)
    order = outputs.argsort(1, descending=True)[:, :5].tolist()
    hits = [int(target) in five for target, five in zip(workload.held_out.targets, order, strict=True)]
    assert workload.summarize(sums)["top5_accuracy"] == sum(hits) / len(hits)
    assert "top5_accuracy" in workload.eval_metrics()


@pytest.mark.cases(
    (("workload.top5=true", "data=synthetic", "data.num_classes=5", "data.num_samples=64"), "workload.top5"),
    (("workload.class_weights=[1,2]",), "workload.class_weights"),
    (("workload.class_weights=[1,-2]",), "workload.class_weights"),
    (("workload.class_weights=[1,2]", "workload.balance_classes=true"), "workload.balance_classes"),
)
def test_options_that_do_not_fit_are_refused(overrides, key):
    with pytest.raises(ConfigError) as refusal:
        prepare_session(build_composed_run("model=tiny", "device=cpu", "device.threads=1", *overrides))
    assert refusal.value.key == key


def test_a_single_class_is_said(caplog):
    for count in (1, 2):
        data = ("data=synthetic", "data.size=8", "data.num_samples=64", f"data.num_classes={count}")
        build_composed_run("model=tiny", *data).workload.prepare()
    assert [message.partition(": there")[0] for message in caplog.messages] == ["data: all samples have the class 0"]
