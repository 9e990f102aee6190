"""Networks whose outputs are dicts, tuples, named tuples and dataclasses, and that return more in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers import structured
from helpers.plain_loop import largest_difference, weights_at
from helpers.structured import NETWORKS
from helpers.user_objects import TENSORS, Net
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.nn.functional import binary_cross_entropy, cross_entropy

import runner
from runner.config.errors import ConfigError
from runner.seeds import derive
from runner.workloads.supervised import comparable

CPU = ["device=cpu", "device.threads=1", "optimizer=sgd", "optimizer.lr=0.05", "batch_size=12", "log_every=1"]
SHORT = [*CPU, "steps=2", "eval_every=1", "save_every=0", "workload.eval_batch_size=4", "tracking=none"]
METRICS = {"accuracy": structured.accuracy, "squares": structured.squares}


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


def train(words: list[str], model: Any, **code: Any) -> Any:
    return runner.train([*SHORT, *words], **{"data": TENSORS, "model": model, **code})


def measured(result: Any, network: Any) -> dict[str, float]:
    """Return the loss and the metrics of all held-out samples at once, with the weights of a run."""
    model, (inputs, targets) = network(), TENSORS[1].tensors
    model.load_state_dict(weights_at(result.directory, result.steps))
    with torch.no_grad():
        outputs = model.eval()(inputs)
        values = {name: metric(outputs, targets).double().mean() for name, metric in METRICS.items()}
        loss = torch.stack([structured.loss(model(inputs[rows]), targets[rows]) for rows in torch.arange(21).split(1)])
    return {"loss": float(loss.mean())} | {name: float(value) for name, value in values.items()}


@pytest.mark.parametrize("network", [structured.OfDict, structured.OfFrozen])
def test_verify_compares_outputs_of_any_structure(network):
    found = runner.verify(["accumulation=2", *CPU], model=network, data=TENSORS, loss=structured.loss)
    assert found.verdict == 0, str(found)


@pytest.mark.cases(
    *((network, []) for network in NETWORKS),
    (structured.OfFrozen, ["parallel=ddp"]),
    (structured.OfMixed, ["parallel=fsdp"]),
    (structured.OfNamed, ["parallel=ensemble"]),
    ids=lambda value: "-".join(value) or "single" if isinstance(value, list) else value.__name__,
)
def test_loss_and_metrics_get_what_the_network_returned(network, mode):
    if torch.__version__ < "2.14" and mode == ["parallel=fsdp"]:
        pytest.skip("before torch 2.14, the proof finds and refuses other gradients of such outputs under FSDP")
    result = train(mode, network, loss=structured.loss, metrics=METRICS)
    prefix = "eval/member_0/" if "parallel=ensemble" in mode else "eval/"
    found = {name: result.evaluation[prefix + name] for name in ("loss", *METRICS)}
    assert found == pytest.approx(measured(result, network), rel=1e-5)


def test_an_evaluation_of_a_saved_run_has_the_same_outputs():
    given = {"loss": structured.loss, "metrics": METRICS}
    result = train([], structured.OfMixed, **given)
    run = runner.load(result.directory, model=structured.OfMixed, data=TENSORS, **given)
    assert run.evaluate("last") == pytest.approx(result.evaluation)
    assert type(run.model("last")(TENSORS[1].tensors[0])) is structured.Mixed


@pytest.mark.parametrize("engine", ["processes", "streams"])
def test_a_pipeline_refuses_outputs_that_are_no_tensor(engine):
    network = nn.Sequential(nn.Linear(5, 5), structured.OfDict())
    with pytest.raises(ConfigError) as refused:
        train(["parallel=pipeline", f"parallel.engine={engine}"], network, loss=structured.loss)
    assert refused.value.key == "parallel"
    assert "returns a dict" in refused.value.why


class Autoencoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(5, 4), nn.Linear(2, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        mean, log_variance = self.encoder(x).chunk(2, 1)
        return self.decoder(mean).sigmoid(), mean, log_variance


def evidence(outputs: Any, inputs: torch.Tensor) -> torch.Tensor:
    """The loss of a variational autoencoder, as its authors write it: a sum."""
    reconstructed, mean, log_variance = outputs
    divergence = -0.5 * torch.sum(1 + log_variance - mean.pow(2) - log_variance.exp())
    return binary_cross_entropy(reconstructed, inputs, reduction="sum") + divergence


evidence.reduction = "sum"  # type: ignore[attr-defined]


def of_step(model: nn.Module, batch: Any) -> torch.Tensor:
    return evidence(model(batch[0]), batch[1])


of_step.reduction = "sum"  # type: ignore[attr-defined]


@pytest.mark.parametrize("code", [{"loss": evidence}, {"training_step": of_step}], ids=lambda code: next(iter(code)))
@pytest.mark.parametrize("words", [["accumulation.steps=3"], ["parallel=ddp", "workload.eval_batch_size=5"]])
def test_a_loss_that_is_a_sum_adds_up_over_the_parts_of_a_batch(code, words):
    """The targets, in float32, are compared with outputs in float64."""
    inputs = torch.rand(24, 5, generator=torch.Generator().manual_seed(1))
    words = [*words, "precision=64", "optimizer.momentum=0", "optimizer.weight_decay=0", "schedule=constant"]
    result = train(words, Autoencoder, data=((inputs, inputs), (inputs, inputs)), **code)
    torch.manual_seed(derive(0, "weights"))
    model, x = Autoencoder().double(), inputs.double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for rows in torch.randperm(24, generator=torch.Generator().manual_seed(derive(0, "order", 0))).split(12):
        optimizer.zero_grad()
        evidence(model(x[rows]), x[rows]).backward()
        optimizer.step()
    assert largest_difference(weights_at(result.directory, 2), model.state_dict()) < 1e-12
    of_a_batch = evidence(model(x), x).item() / 2
    assert result.evaluation["eval/loss"] == pytest.approx(of_a_batch)


class Auxiliary(Net):
    """Two heads in training, one in evaluations; its forward pass leaves traces everywhere."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))
        self.passes = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.calls, self.passes, self.cached = self.calls + 1, self.passes + 1, x
        outputs = super().forward(x) + torch.rand(()) * 0
        return (outputs, outputs * 2) if self.training else outputs


def auxiliary_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    heads = outputs if isinstance(outputs, tuple) else (outputs,)
    return sum(cross_entropy(each, targets) for each in heads) / len(heads)  # type: ignore[return-value]


def test_metrics_are_tried_on_what_evaluations_return():
    given = {"loss": auxiliary_loss, "metrics": {"accuracy": lambda outputs, targets: outputs.argmax(1) == targets}}
    result = train([], Auxiliary, **given)
    model, (inputs, targets) = Auxiliary(), TENSORS[1].tensors
    model.load_state_dict(weights_at(result.directory, 2))
    right = float((model.eval()(inputs).argmax(1) == targets).double().mean())
    assert result.evaluation["eval/accuracy"] == pytest.approx(right)
    assert weights_at(result.directory, 2)["calls"] == 2  # neither the trial nor evaluations have left a trace


def test_the_trial_of_an_evaluation_leaves_random_numbers_and_attributes_as_they_were():
    seen: list[Any] = []

    class Watched(Auxiliary):
        def forward(self, x: torch.Tensor) -> Any:
            state = self.passes, hasattr(self, "cached"), torch.get_rng_state().clone(), self.calls.clone()
            if self.training:
                seen.append(state)
            return super().forward(x)

    class Untried(Watched):
        """In training only: the evaluation after the last step comes late."""

    for network, data in ((Watched, TENSORS), (Untried, TENSORS)):
        train(["steps=1"], network, loss=auxiliary_loss, data=data)
    (passes, cached, random, calls), (_, _, other, _) = seen
    assert (passes, cached, float(calls)) == (0, False, 0)
    assert torch.equal(random, other)


class Wrong(nn.Module):
    def __call__(self, outputs: Any, targets: Any) -> Any:
        return {"total": cross_entropy(outputs, targets)}


@pytest.mark.cases(
    ("MulticlassAccuracy", {"num_classes": 5}),
    ("BinaryAccuracy", {}),
    ("MultilabelAccuracy", {"num_labels": 3}),
)
def test_objects_of_torchmetrics_for_another_task_are_refused_before_the_first_step(name, arguments):
    of = pytest.importorskip("torchmetrics.classification")
    steps: list[int] = []
    metrics = {"mine": getattr(of, name)(**arguments)}
    with pytest.raises(ConfigError) as refused:
        train([], Net, metrics=metrics, after_step=lambda state: steps.append(state.step))
    assert refused.value.key == "metrics.mine"
    assert "float32 of [4, 3]" in refused.value.why
    assert not steps


@pytest.mark.cases(
    ("metrics", {"mine": lambda outputs, targets: outputs.logits.mean()}, "metrics.mine"),
    ("metrics", {"mine": lambda outputs, targets: {"a": 1}}, "metrics.mine"),
    ("metrics", {"mine": lambda outputs, targets: roc_auc_score(targets, outputs)}, "metrics.mine"),
    ("loss", Wrong(), "loss"),
    ("loss", lambda outputs, targets: {"loss": [1]}, "loss"),
    ("loss", lambda outputs, targets: (outputs - 1).square(), "loss"),
    ids=["attribute", "dict", "value", "module", "function", "no scalar"],
)
def test_what_is_wrong_in_a_loss_or_a_metric_is_said_with_its_line(part, given, key):
    steps: list[int] = []
    with pytest.raises(ConfigError) as refused:
        train([], Net, **{part: given}, after_step=lambda state: steps.append(state.step))
    assert refused.value.key == key
    assert "test_structured_outputs.py:" in refused.value.why
    assert not steps


@pytest.mark.parametrize("sample", [([1.0, 2.0], 0), {"input": [1.0, 2.0], "label": 0}])
def test_lists_of_numbers_that_a_network_does_not_take_are_refused_with_a_remedy(sample):
    with pytest.raises(ConfigError, match="must be Tensor, not list") as refused:
        train([], lambda: nn.Linear(2, 3), data=[sample] * 30)
    assert "with_format('torch')" in refused.value.remedy


def of_all(outputs: torch.Tensor, targets: torch.Tensor) -> int:
    if len(targets) < 21:
        raise ValueError("too few")
    return len(targets)


def test_a_metric_that_needs_more_than_a_few_samples_is_tried_on_all_before_the_first_step():
    result = train([], Net, metrics={"mine": of_all})
    assert result.evaluation["eval/mine"] == 21
    assert "all held-out ones are evaluated" in (result.directory / "log.txt").read_text()


@pytest.mark.parametrize("network", NETWORKS)
def test_outputs_of_any_structure_can_be_compiled_as_a_part_of_a_step(network):
    model, (inputs, targets) = network(), TENSORS[0].tensors

    def loss(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return structured.loss(*comparable(model(inputs), targets))

    compiled: Any = torch.compile(loss, backend="eager", fullgraph=True)
    assert torch.equal(compiled(inputs, targets), loss(inputs, targets))
