"""Optimizers of a user's file: they train as in a plain loop, in every mode and when resumed, or are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers import own_optimizers
from helpers.compose import compose_config
from helpers.plain_loop import largest_difference, weights_at
from helpers.strange_networks import CPU, trained_with
from torch.nn.functional import cross_entropy

import runner
from runner.config import user_code
from runner.config.errors import ConfigError
from runner.seeds import derive

FILE = f"workload={own_optimizers.__file__}"
WORDS = [FILE, *CPU, "precision=64", "optimizer=torch", "optimizer.lr=0.1", "save_every=2"]


def plain_weights(name: str) -> dict[str, torch.Tensor]:
    """Train for four steps in plain PyTorch, in float64."""
    inputs, targets = own_optimizers.numbers()
    torch.manual_seed(derive(0, "weights"))
    model = own_optimizers.model().double()
    optimizer = getattr(own_optimizers, name, getattr(torch.optim, name, None))(model.parameters(), lr=0.1)
    stream = torch.randperm(48, generator=torch.Generator().manual_seed(derive(0, "order", 0)))
    torch.manual_seed(derive(0, "rank", 0))
    for rows in stream.split(12):
        optimizer.zero_grad()
        cross_entropy(model(inputs[rows].double()), targets[rows]).backward()
        optimizer.step()
    return model.state_dict()


RIGHT = {
    "Lookahead": ["parallel=single", "accumulation=2", "parallel=ddp", "parallel=fsdp", "parallel=pipeline"],
    "Normalized": ["parallel=pipeline", "parallel=fsdp"],
    "OfAll": ["parallel=ddp", "parallel=fsdp", "parallel=pipeline parallel.engine=streams"],
    "Adapts": ["parallel=fsdp"],
    "Adafactor": ["parallel=fsdp"],
    "Rprop": ["parallel=fsdp"],
    "Langevin": ["accumulation=2"],
    "decayed": ["parallel=single"],
}


@pytest.mark.parametrize(("name", "mode"), [(name, mode) for name, modes in RIGHT.items() for mode in modes])
def test_an_optimizer_of_a_file_trains_to_the_weights_of_a_plain_loop(name, mode, ranks, tmp_path):
    with user_code.using(user_code.passed([FILE])):
        config = compose_config(*WORDS, f"optimizer.name={name}", *mode.split())
    is_alone = mode.startswith(("parallel=single", "accumulation")) or "streams" in mode
    result = ranks(1 if is_alone else 2).call_on_all(trained_with, {}, config, tmp_path, [FILE])[0]
    assert not isinstance(result, str), result
    assert largest_difference(weights_at(tmp_path, 4), plain_weights(name)) < 1e-12


@pytest.mark.parametrize(
    ("name", "precision", "limit"),
    [
        *(("Lookahead", 64, 0), ("Langevin", 64, 0), ("Lookahead", 32, 1e-6)),
        ("Adafactor", 64, 1e-15),  # a run has torch's implementation for many tensors at once
    ],
)
def test_a_resumed_run_goes_on_with_the_state_of_such_an_optimizer(name, precision, limit, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    half = runner.train([*WORDS, f"optimizer.name={name}", "steps=2"])
    done = runner.train([f"resume={half.directory}", FILE, "steps=4", f"precision={precision}"])
    directory = Path(str(done.directory))
    assert largest_difference(weights_at(directory, 4), plain_weights(name)) <= limit


def test_an_optimizer_that_is_named_may_be_called_as_the_option(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = "import torch\nfrom helpers.own_optimizers import data, model\n\nclass Optim(torch.optim.SGD): ..."
    Path("own.py").write_text(text)
    words = ["workload=own.py", *CPU, "optimizer=torch", "steps=1"]
    assert runner.train([*words, "optimizer.name=Optim"]).status == "done"
    with pytest.raises(ConfigError, match="nothing uses Optim"):
        runner.train([*words, "optimizer.name=Adagrad"])


REFUSED = {
    "Remembers": "a run that is resumed would go on otherwise",
    "OwnRate": "although the learning rate in its groups is 0",
    "NeedsClosure": "raises TypeError",
    "WithoutRate": "it has no argument lr",
    "twice": "it changes the learning rate",
    "network": "it makes a Linear",
    "OfAll parallel=pipeline parallel.processes=2": "it needs all parameters, which a process of pipeline has not",
    "Langevin parallel=ddp parallel.processes=2": "it needs random numbers that are the same in all processes",
    "Slows compile=step": "it may count steps in Python",
    "Slow": "nor the file of workload",
}


@pytest.mark.parametrize("words", REFUSED)
def test_an_optimizer_with_which_a_run_would_compute_something_else_is_refused(words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name, *more = words.split()
    with pytest.raises(ConfigError, match=REFUSED[words]):
        runner.train([*WORDS, f"optimizer.name={name}", *more])
    assert not [*tmp_path.glob("outputs/*/*/checkpoints/*")]
