"""Networks, data sets and collators of Hugging Face train in every mode as in a plain loop on whole batches."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import ROOT
from helpers.compose import compose_config
from helpers.extras import require
from helpers.plain_loop import weights_at
from helpers.strange_networks import PLAIN, trained_with

from runner.config import user_code
from runner.seeds import derive

STEPS, BATCH = 3, 16
LIMITS = {"bert": 1e-12, "gpt2": 1e-7}
"""Transformers computes the loss of a language model in float32, whatever the network's dtype."""

MODES = ("parallel=single", "parallel=ddp", "parallel=fsdp accumulation=2")


def plain(file: Path) -> dict[str, torch.Tensor]:
    """Train in float64 on whole batches, with the loss that transformers computes for them."""
    module = user_code.executed(str(file))
    samples, _ = module.data()
    torch.manual_seed(derive(0, "weights"))
    model = module.model().double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(derive(0, "order", 0)))
    for rows in order[: STEPS * BATCH].split(BATCH):
        optimizer.zero_grad()
        model(**module.collate([samples[row] for row in rows.tolist()])).loss.backward()
        optimizer.step()
    return model.state_dict()


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_network_of_transformers_trains_as_in_a_plain_loop(name, ranks, tmp_path):
    require("transformers")
    require("datasets")
    file = ROOT / "docs" / "examples" / f"{name}.py"
    expected = plain(file)
    for mode in MODES:
        directory = tmp_path / mode.replace(" ", "_")
        directory.mkdir()
        result: Any = train(file, mode, ranks, directory)
        assert not isinstance(result, str), result
        weights = weights_at(directory, STEPS)
        # Not relative: the gradient of the keys' biases is zero but for rounding.
        assert max(float((weights[key] - expected[key]).abs().max()) for key in weights) < LIMITS[name]


def train(file: Path, mode: str, ranks: Any, directory: Path) -> Any:
    words = [f"workload={file}", "device=cpu", "device.threads=1", f"batch_size={BATCH}", f"steps={STEPS}"]
    config = compose_config(*words, "eval_every=0", *PLAIN, *mode.split())
    return ranks(1 if "single" in mode else 2).call_on_all(trained_with, {}, config, directory, words[:1])[0]
