"""Tests of the language model against attention, rotations and norms that are written out in plain torch."""

import math
from typing import Any

import pytest
import torch
from torch import nn

from runner.models.blocks import blocks_of
from runner.models.gpt import GPT, linear_layout

VOCABULARY, CONTEXT, LAYERS, WIDTH, HEADS = 11, 9, 2, 16, 4
FORMS = {
    "default": {},
    "grouped": {"kv_heads": 2},
    "one head of keys": {"kv_heads": 1, "bias": True},
    "untied": {"tied": False, "norm": "layer"},
    "gpt2": {"norm": "layer", "positions": "learned", "bias": True},
}


def network(**options: object) -> GPT:
    """A network whose parameters are all far from their initial values, in float64."""
    made = GPT(VOCABULARY, CONTEXT, LAYERS, WIDTH, HEADS, **options).double()  # pyright: ignore
    generator = torch.Generator().manual_seed(0)
    for parameter in made.parameters():
        nn.init.normal_(parameter, 0.1, 0.5, generator)
    return made


def reference(weights: dict[str, torch.Tensor], ids: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """The logits of one text [t], head by head and token by token."""

    def linear(name: str, x: torch.Tensor) -> torch.Tensor:
        return x @ weights[f"{name}.weight"].T + weights.get(f"{name}.bias", 0)

    def norm(name: str, x: torch.Tensor) -> torch.Tensor:
        if norm_is_layer:
            x = x - x.mean(-1, keepdim=True)
        x = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()
        return x * weights[f"{name}.weight"] + weights.get(f"{name}.bias", 0)

    def rotated(x: torch.Tensor, position: int) -> torch.Tensor:
        """Each pair of components is a complex number, which is multiplied by exp(i·angle)."""
        half = len(x) // 2
        angles = torch.tensor([position / 10_000 ** (pair / half) for pair in range(half)], dtype=torch.float64)
        turned = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((turned.real, turned.imag))

    norm_is_layer, is_learned = "ln_f.bias" in weights or "lm_head.weight" in weights, "wpe.weight" in weights
    size, count = WIDTH // HEADS, len(ids)
    x = weights["wte.weight"][ids]
    if is_learned:
        x = x + weights["wpe.weight"][:count]
    for layer in range(LAYERS):
        all_of_layer = linear(f"h.{layer}.attn.c_attn", norm(f"h.{layer}.ln_1", x))
        queries, keys, values = all_of_layer.split((WIDTH, kv_heads * size, kv_heads * size), dim=1)
        rows = []
        for position in range(count):
            heads = []
            for head in range(HEADS):
                of_query, of_key = (slice(i * size, (i + 1) * size) for i in (head, head * kv_heads // HEADS))
                query, past = queries[position, of_query], keys[: position + 1, of_key]
                if not is_learned:
                    query = rotated(query, position)
                    past = torch.stack([rotated(key, place) for place, key in enumerate(past)])
                shares = torch.softmax(past @ query / math.sqrt(size), dim=0)
                heads.append(shares @ values[: position + 1, of_key])
            rows.append(torch.cat(heads))
        x = x + linear(f"h.{layer}.attn.c_proj", torch.stack(rows))
        y = linear(f"h.{layer}.mlp.c_fc", norm(f"h.{layer}.ln_2", x))
        y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
        x = x + linear(f"h.{layer}.mlp.c_proj", y)
    return norm("ln_f", x) @ weights.get("lm_head.weight", weights["wte.weight"]).T


@pytest.mark.parametrize("form", FORMS)
def test_logits_and_gradients_are_those_of_the_formulas(form):
    model = network(**FORMS[form])
    ids = torch.randint(VOCABULARY, (2, 7), generator=torch.Generator().manual_seed(1))
    weights = {name: tensor.detach().clone().requires_grad_() for name, tensor in model.state_dict().items()}
    expected = torch.stack([reference(weights, text, FORMS[form].get("kv_heads", HEADS)) for text in ids])
    logits = model(ids)
    torch.testing.assert_close(logits, expected, rtol=1e-12, atol=1e-12)
    logits.log_softmax(-1).square().mean().backward()
    expected.log_softmax(-1).square().mean().backward()
    assert {name for name, _ in model.named_parameters()} == weights.keys(), "a tied weight is saved once"
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_blocks_one_after_another_are_the_network_also_with_activations_recomputed(form):
    model, again = network(**FORMS[form]), network(**FORMS[form], checkpoint_activations=True)
    ids = torch.randint(VOCABULARY, (2, CONTEXT))
    x = ids
    for _, block in blocks_of(model):
        x = block(x)
    x.square().sum().backward()
    again(ids).square().sum().backward()
    assert [name for name, _ in blocks_of(model)] == ["stem", "h.0", "h.1", "head"]
    for (name, ours), theirs in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(ours.grad, theirs.grad), name  # pyright: ignore


def test_no_token_depends_on_those_after_it():
    model = network(kv_heads=2)
    ids = torch.randint(VOCABULARY, (1, CONTEXT))
    changed = ids.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % VOCABULARY
    one, other = model(ids), model(changed)
    torch.testing.assert_close(one[:, :5], other[:, :5], rtol=0, atol=0)
    assert not torch.isclose(one[:, 5:], other[:, 5:]).all(-1).any()


def test_initial_weights_depend_on_the_depth():
    layers = 8
    model = GPT(100, 64, layers, 64, 4, norm="layer", positions="learned", bias=True)
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.dim() == 1:
            assert (parameter == 1).all(), name
        else:
            expected = 0.02 / math.sqrt(2 * layers) if name.endswith("c_proj.weight") else 0.02
            assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.06), name
            assert abs(float(parameter.detach().mean())) < expected / 10, name


def test_dropout_concerns_attention_and_layers_in_training_alone():
    model = network(dropout=0.5)
    ids = torch.randint(VOCABULARY, (2, CONTEXT))
    assert not torch.equal(model(ids), model(ids))
    plain = network()
    assert torch.equal(model.eval()(ids), plain(ids))
    attention: Any = model.get_submodule("h.0.attn").train()
    attention.dropout.p = 0.0
    x = torch.randn(1, CONTEXT, WIDTH, dtype=torch.float64)
    assert not torch.equal(attention(x), attention(x)), "the weights of attention have dropout, too"


def test_weights_with_inputs_before_outputs_are_transposed_and_others_are_not():
    model = network(**FORMS["gpt2"])
    ours = model.state_dict()
    theirs = {f"transformer.{name}": tensor for name, tensor in ours.items()}
    for name, tensor in ours.items():
        if ".c_" in name and tensor.dim() == 2:
            theirs[f"transformer.{name}"] = tensor.t().contiguous()
    theirs |= {"transformer.h.0.attn.bias": torch.ones(1, 1, 9, 9), "lm_head.weight": ours["wte.weight"].clone()}
    for converted in (linear_layout(theirs), linear_layout(ours)):
        assert converted.keys() == ours.keys()
        assert all(torch.equal(converted[name], ours[name]) for name in ours)
    assert linear_layout(ours) is ours, "with the versions of modules that it may have"
    head = {"lm_head.weight": torch.zeros(VOCABULARY, WIDTH)}
    assert "lm_head.weight" in linear_layout(theirs | head), "it is another one than the embeddings"
