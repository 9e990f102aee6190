"""Batches in forms of a user's own: training and evaluations are those of a plain loop, however they are divided."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.batches_of_users import CASES, NUMBERS, Graphs, Stream, data
from helpers.compose import compose_config
from helpers.plain_loop import largest_difference, weights_at
from helpers.strange_networks import CPU, PLAIN, trained_with
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import default_collate

import runner
from runner.config import user_code
from runner.seeds import derive
from runner.system.trees import call, map_tensors

STEPS, BATCH = 4, 12
MODES = ["", "accumulation=2", "data.workers=1", "parallel=ddp", "parallel=fsdp"]
OPTIONS = [*CPU, *PLAIN, f"steps={STEPS}", f"eval_every={STEPS}", "workload.eval_batch_size=5", "save_every=0"]


def doubled(tree: Any) -> Any:
    wide = {torch.float32: torch.float64, torch.complex64: torch.complex128}
    return map_tensors(lambda each: each.to(wide.get(each.dtype, each.dtype)), tree)


def loss_of(case: dict[str, Any], model: nn.Module, samples: list[Any]) -> Any:
    """Return the loss of samples in one batch, in plain PyTorch: a tensor of one number, or (sum, count)."""
    batch = doubled(case.get("collate", default_collate)(samples))
    if step := case.get("training_step"):
        found = step(model, batch)
        return found["loss"] if isinstance(found, dict) else found
    inputs, targets = batch
    outputs = model(*inputs) if case["collate"].__name__ == "sparse" else model(inputs)
    return case.get("loss", cross_entropy)(outputs, targets)


def plain(case: dict[str, Any]) -> tuple[dict[str, torch.Tensor], float]:
    """Return the weights after a plain loop, and the mean loss of all held-out samples."""
    train, held_out = case.get("data", data)()
    torch.manual_seed(derive(0, "weights"))
    model: nn.Module = case["model"]().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(derive(0, "order", 0)))
    for rows in order.split(BATCH):
        optimizer.zero_grad()
        found = loss_of(case, model, [train[int(row)] for row in rows])
        (found[0] / int(found[1]) if isinstance(found, tuple) else found).backward()
        optimizer.step()
    with torch.no_grad():
        each = [loss_of(case, model, [held_out[row]]) for row in range(len(held_out))]
    pairs = [found if isinstance(found, tuple) else (found, 1) for found in each]
    return model.state_dict(), float(sum(total for total, _ in pairs)) / sum(int(count) for _, count in pairs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", CASES)
def test_training_and_evaluations_are_those_of_a_plain_loop(name, mode, ranks, tmp_path):
    parts = {"data": data, **CASES[name]}
    config = compose_config(*user_code.passed(**parts).added_to([*OPTIONS, *mode.split()]))
    result = ranks(1 + mode.startswith("parallel")).call_on_all(trained_with, parts, config, tmp_path)[0]
    assert not isinstance(result, str), result
    weights, loss = plain(CASES[name])
    assert largest_difference(weights_at(tmp_path, STEPS), weights) < 1e-12
    assert result.metrics["eval/loss"] == pytest.approx(loss, rel=1e-6)


def test_an_object_is_a_tree_of_its_attributes_and_is_not_changed():
    batch = Graphs([data()[0][0]])
    nodes, store = batch.nodes, batch.store
    other = map_tensors(lambda each: each + 1, batch)
    assert other.nodes.equal(nodes + 1)
    assert other.store["of"].equal(store["of"] + 1)
    assert other.num_graphs == 1
    assert (batch.nodes is nodes, batch.store is store) == (True, True)


def test_a_network_is_called_with_one_argument_only_if_it_takes_no_more():
    class One(nn.Module):
        def forward(self, both: Any, scale: float = 1.0) -> Any:
            return both

    class Two(nn.Module):
        def forward(self, first: Any, second: Any = None) -> Any:
            return first, second

    class Named(nn.Module):
        def forward(self, first: Any) -> Any:
            return first

    assert call(One(), (1, 2, 3)) == (1, 2, 3)
    assert call(One(), {"first": 1}) == {"first": 1}
    assert call(Two(), (1, 2)) == (1, 2)
    assert call(Two(), [1]) == (1, None)
    assert call(Named(), {"first": 1}) == 1
    assert call(lambda *inputs: inputs, (1, 2)) == (1, 2)


FORMS = {"arrays": tuple, "samples": lambda samples: [*zip(*samples, strict=True)], "stream": Stream}


@pytest.mark.parametrize(
    ("name", "form", "mode"),
    [
        *((n, f, mode) for n in ("times", "waves") for f in FORMS for mode in ("accumulation=2", "parallel=ddp")),
        *((n, f, "precision=64") for n in ("times", "tenths", "waves") for f in FORMS),
    ],
)
def test_numbers_that_are_no_float32_are_those_of_a_plain_loop(name, form, mode, ranks, tmp_path):
    """Times in seconds keep their digits, as in plain PyTorch, and complex targets their imaginary part."""
    case = NUMBERS[name]
    inputs, targets = case["samples"]()
    samples = FORMS[form]((inputs, targets))
    parts = {"model": case["model"], "data": (samples, samples), "loss": case["loss"]}
    options = [each for each in OPTIONS if not each.startswith("precision=")]
    config = compose_config(*user_code.passed(**parts).added_to([*options, "optimizer.lr=0.05", *mode.split()]))
    result = ranks(1 + mode.startswith("parallel")).call_on_all(trained_with, parts, config, tmp_path)[0]
    assert not isinstance(result, str), result
    torch.manual_seed(derive(0, "weights"))
    model: nn.Module = case["model"]()
    beginning = copy.deepcopy(model.state_dict())
    is_double, loss = mode == "precision=64", copy.deepcopy(case["loss"])
    if is_double:
        model = nn.Linear(3, 1, dtype=torch.complex128) if name == "waves" else model.double()
        model.load_state_dict(beginning)
        inputs, loss = doubled(inputs), loss.double() if isinstance(loss, nn.Module) else loss
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    order = torch.randperm(48, generator=torch.Generator().manual_seed(derive(0, "order", 0)))
    order = torch.arange(48) if form == "stream" else order
    for rows in order.split(BATCH):
        optimizer.zero_grad()
        loss(model(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    got, wanted = (
        map_tensors(lambda each: torch.view_as_real(each) if each.is_complex() else each, dict(weights))
        for weights in (weights_at(tmp_path, STEPS), model.state_dict())
    )
    assert largest_difference(got, wanted) < (1e-13 if is_double else 1e-6)
    with torch.no_grad():
        assert result.metrics["eval/loss"] == pytest.approx(float(loss(model(inputs), targets)), rel=1e-5)


class Texts(nn.Module):
    """A classifier of texts of any length, which what they are padded with does not change."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.linear = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3, bias=False)
        self.total, self.head = Total(), nn.Linear(3, 3)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        return [*self.named_children()]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.total(self.linear(self.embedding(x))))


class Total(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sum(1)


def padded(samples: list[Any]) -> Any:
    texts, targets = zip(*samples, strict=True)
    return nn.utils.rnn.pad_sequence(texts, batch_first=True), torch.tensor(targets)


def texts() -> Any:
    """Return 48 texts of 7 tokens, and 11 held-out ones of 2 to 6 tokens."""
    tokens = torch.randint(1, 9, (59, 7), generator=torch.Generator().manual_seed(0))
    lengths = [*[7] * 48, *[2 + number % 5 for number in range(11)]]
    samples = [(text[:length], int(text.sum()) % 3) for text, length in zip(tokens, lengths, strict=True)]
    return samples[:48], samples[48:]


TEXTS = {"model": Texts, "collate": padded, "data": texts}


@pytest.mark.parametrize("mode", ["parallel.cuts=[total]", "parallel.cuts=[linear] parallel.engine=streams"])
def test_a_pipeline_evaluates_batches_of_other_shapes_than_it_trains(mode, ranks, tmp_path):
    parts = TEXTS | {"data": texts()}
    config = compose_config(*user_code.passed(**parts).added_to([*OPTIONS, "parallel=pipeline", *mode.split()]))
    result = ranks(1 + ("streams" not in mode)).call_on_all(trained_with, parts, config, tmp_path)[0]
    assert not isinstance(result, str), result
    weights, loss = plain(TEXTS)
    assert largest_difference(weights_at(tmp_path, STEPS), weights) < 1e-12
    assert result.metrics["eval/loss"] == pytest.approx(loss, rel=1e-6)


@pytest.mark.skipif(torch.__version__ < "2.14", reason="torch refuses them before the runner can, in words of its own")
def test_a_pipeline_of_processes_refuses_to_train_batches_of_several_shapes(tmp_path):
    samples = [(text[: 2 + number % 5], target) for number, (text, target) in enumerate(texts()[0])]
    mode = ["parallel=pipeline", "parallel.cuts=[linear]", "batch_size=2", f"output_root={tmp_path}"]
    said = r"returns the shape \[\d, \d, 4\], and \[\d, \d, 4\] in the first"
    with pytest.raises(runner.ConfigError, match=said):
        runner.train([*OPTIONS, *mode], model=Texts, collate=padded, data=(samples, samples))
