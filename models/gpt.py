"""A decoder-only transformer that predicts the next token: GPT-2, or with the norms and positions of later networks."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from functools import partial

import torch
from torch import nn
from torch.nn import functional

from runner.models.layers import recomputable

_EPS = 1e-5  # torch's default for RMSNorm depends on the dtype, and so would what is computed

NORMS: dict[str, Callable[[int, bool], nn.Module]] = {
    "layer": lambda width, bias: nn.LayerNorm(width, _EPS, bias=bias),
    "rms": lambda width, bias: nn.RMSNorm(width, _EPS),
}


class GPT(nn.Module):
    """A language model for token ids [n, t] that returns the logits [n, t, vocabulary] of the tokens that follow.

    Radford et al., Language Models are Unsupervised Multitask Learners (2019): normalization before each layer, GELU,
    and initial weights of a deviation of 0.02, divided by √(2·layers) where a layer is added to its inputs. Parameters
    have the names of GPT-2 in the library transformers.

    With `norm="layer"`, `positions="learned"` and `bias` it is GPT-2; with `norm="rms"` it has root mean square
    normalization (Zhang and Sennrich, 2019), and with `positions="rotary"` rotary positions (Su et al., 2021), which
    have no weights. Several of the `heads` share a head of keys and values if there are fewer `kv_heads` (Ainslie et
    al., GQA, 2023). If `tied`, the logits are products with the embeddings of the tokens. t is at most `context`. With
    `checkpoint_activations`, the activations of each layer are recomputed in the backward pass.
    """

    def __init__(
        self,
        vocabulary: int,
        context: int,
        layers: int = 12,
        width: int = 768,
        heads: int = 12,
        kv_heads: int | None = None,
        dropout: float = 0.0,
        norm: str = "rms",
        positions: str = "rotary",
        bias: bool = False,
        tied: bool = True,
        checkpoint_activations: bool = False,
    ):
        super().__init__()
        normalization = partial(NORMS[norm], width, bias)
        of_attention = width, heads, kv_heads or heads, dropout, bias, positions == "rotary"
        self.wte = nn.Embedding(vocabulary, width)
        self.wpe = nn.Embedding(context, width) if positions == "learned" else None
        self.drop = _dropout(dropout)
        self.h = nn.ModuleList(
            Layer(
                checkpoint_activations,
                ln_1=normalization(),
                attn=Attention(*of_attention),
                ln_2=normalization(),
                mlp=_mlp(width, dropout, bias),
            )
            for _ in range(layers)
        )
        self.ln_f = normalization()
        self.lm_head = None if tied else nn.Linear(width, vocabulary, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                is_added = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if is_added else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def blocks(self) -> list[tuple[str, nn.Module]]:
        """Return the blocks between which the network can be split, in forward order: stem, layers, head.

        The stem and the head are created in each call; if the embeddings are tied, both have them.
        """
        output = self.wte if self.lm_head is None else self.lm_head
        stem, head = Stem(self.wte, self.wpe, self.drop), Head(self.ln_f, output)
        return [("stem", stem), *((f"h.{name}", layer) for name, layer in self.h.named_children()), ("head", head)]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = ids
        for _, block in self.blocks():
            x = block(x)
        return x


class Stem(nn.Module):
    """The embeddings of tokens, and of positions if these are learned: [n, t] → [n, t, width]."""

    def __init__(self, wte: nn.Embedding, wpe: nn.Embedding | None, drop: nn.Module):
        super().__init__()
        self.wte, self.wpe, self.drop = wte, wpe, drop

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.wte(ids)
        return self.drop(x if self.wpe is None else x + self.wpe.weight[: ids.shape[1]])


class Head(nn.Module):
    """The last normalization, and the products with the weight of `output`: [n, t, width] → [n, t, vocabulary]."""

    def __init__(self, ln_f: nn.Module, output: nn.Linear | nn.Embedding):
        super().__init__()
        self.ln_f, self.output = ln_f, output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return functional.linear(self.ln_f(x), self.output.weight)


class Layer(nn.Module):
    """Attention and a multi-layer perceptron, each of which is added to its inputs."""

    def __init__(self, checkpoint_activations: bool, ln_1: nn.Module, attn: nn.Module, ln_2: nn.Module, mlp: nn.Module):
        super().__init__()
        self.checkpoint_activations = checkpoint_activations
        self.ln_1, self.attn, self.ln_2, self.mlp = ln_1, attn, ln_2, mlp

    @recomputable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Attention(nn.Module):
    """Causal self-attention: each token attends to itself and to those before it."""

    def __init__(self, width: int, heads: int, kv_heads: int, dropout: float, bias: bool, rotary: bool):
        super().__init__()
        self.heads, self.kv_heads, self.head_width, self.rotary = heads, kv_heads, width // heads, rotary
        self.c_attn = nn.Linear(width, (heads + 2 * kv_heads) * self.head_width, bias)
        self.c_proj = nn.Linear(width, width, bias)
        self.p, self.dropout = dropout, _dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by_head = self.c_attn(x).unflatten(2, (-1, self.head_width)).transpose(1, 2)
        queries_and_keys, values = by_head.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
        if self.rotary:
            queries_and_keys = _rotated(queries_and_keys)
        queries, keys = queries_and_keys.split((self.heads, self.kv_heads), dim=1)
        attended = functional.scaled_dot_product_attention(
            queries,
            keys,
            values,
            dropout_p=self.p if self.dropout.training else 0.0,
            is_causal=True,
            enable_gqa=self.kv_heads < self.heads,
        )
        return self.dropout(self.c_proj(attended.transpose(1, 2).flatten(2)))


def _mlp(width: int, dropout: float, bias: bool) -> nn.Module:
    expanded, projected = nn.Linear(width, 4 * width, bias), nn.Linear(4 * width, width, bias)
    layers = {"c_fc": expanded, "act": nn.GELU("tanh"), "c_proj": projected, "dropout": _dropout(dropout)}
    return nn.Sequential(OrderedDict(layers))


def _dropout(probability: float) -> nn.Module:
    return nn.Dropout(probability) if probability else nn.Identity()  # with p = 0, it would still draw random numbers


def _rotated(x: torch.Tensor) -> torch.Tensor:
    """Return [n, heads, t, width] in which components i and i + width/2 are rotated by t / 10000^(2i/width)."""
    dtype, half = torch.promote_types(x.dtype, torch.float32), x.shape[3] // 2
    positions, pairs = (torch.arange(count, device=x.device, dtype=dtype) for count in (x.shape[2], half))
    angles = torch.outer(positions, 10_000 ** (-pairs / half))
    cos, sin = angles.cos(), angles.sin()
    first, second = x.chunk(2, dim=3)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=3).to(x.dtype)


def linear_layout(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of a GPT-2 of transformers by the names and in the layout of `GPT`; others unchanged.

    Its weights are [inputs, outputs], those of `torch.nn.Linear` [outputs, inputs]. The masks in old files are left
    out, and so is the head if it is the embeddings.
    """
    names = {name.removeprefix("transformer."): name for name in tensors}
    of_keys = [tensors[names[name]] for name in names if name.endswith(".attn.c_attn.weight")]
    if not of_keys or any(each.shape[0] >= each.shape[1] for each in of_keys):  # there are more outputs than inputs
        return tensors
    found = {}
    for name, original in names.items():
        tensor = tensors[original]
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            continue
        if name == "lm_head.weight" and torch.equal(tensor, tensors[names["wte.weight"]]):
            continue
        is_transposed = name.endswith((".c_attn.weight", ".c_proj.weight", ".c_fc.weight"))
        found[name] = tensor.t() if is_transposed else tensor
    return found
