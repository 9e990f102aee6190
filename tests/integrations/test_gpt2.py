"""The weights of a GPT-2 of transformers: the same logits, from its files."""

import pytest
import torch
from helpers.compose import option_content
from helpers.extras import require

from runner.config.schema import build
from runner.model.base import Model

SIZES = {"layers": 3, "width": 24, "heads": 4, "context": 16}


@pytest.mark.parametrize("file", ["model.safetensors", "head.pt", "without_head.pt"])
def test_logits_are_those_of_transformers(file, tmp_path):
    require("transformers")
    from transformers import GPT2Config, GPT2LMHeadModel  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    config = GPT2Config(vocab_size=50, n_positions=16, n_embd=24, n_layer=3, n_head=4)
    theirs = GPT2LMHeadModel(config)
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, 0.1, 0.3)  # biases and norms, too
    theirs.save_pretrained(tmp_path)
    torch.save(theirs.state_dict(), tmp_path / "head.pt")
    torch.save(theirs.transformer.state_dict(), tmp_path / "without_head.pt")
    options = option_content("model", "gpt2") | SIZES | {"weights": str(tmp_path / file)}
    ours = build(options, Model, "model").build((16,), 50).double().eval()
    ids = torch.randint(50, (2, 16))
    with torch.no_grad():
        expected = theirs.double().eval()(ids).logits
        torch.testing.assert_close(ours(ids), expected, rtol=1e-10, atol=1e-10)
    assert float(expected.std()) > 0.1
