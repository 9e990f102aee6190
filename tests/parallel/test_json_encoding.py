"""Tests of the encoding of values that are sent to other ranks: decoding restores them, and executes no code."""

from __future__ import annotations

import json
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from runner.config.errors import ABSENT, ConfigError
from runner.parallel.json_encoding import decode, encode
from runner.parallel.launch.cluster import RankInfo
from runner.run import Result


@pytest.mark.parametrize(
    "value",
    [
        None,
        [True, 1, 0.1, "ü\n", []],
        {"optimizer": {"lr": 1e-300, "betas": [0.9, 0.999]}},
        (1, (2,), {"a": ()}),
        {("weight", "step"): 3, 4: "four", None: 5},
        {"$": ["path", "/etc"], "a": 1},
        Path("/runs/1"),
        torch.bfloat16,
        Result("done", 3, {"train/loss": 0.5}),
        [RankInfo(1, 2, host="gpu07")],
        ABSENT,
        math.inf,
    ],
    ids=str,
)
def test_decoding_restores_values_and_their_types(value: Any) -> None:
    got = decode(encode(value))
    assert got == value
    assert type(got) is type(value)
    json.loads(encode(value))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_decoding_restores_tensors_bitwise(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    got = decode(encode(tensor))
    assert (got.dtype, got.shape) == (dtype, tensor.shape)
    assert torch.equal(got, tensor)
    assert torch.equal(decode(encode(tensor.reshape(-1).flip(0))), tensor.reshape(-1).flip(0))


def test_decoding_restores_nan() -> None:
    assert math.isnan(decode(encode(math.nan)))


@pytest.mark.parametrize("got", [3, ABSENT, [1, "two"]])
def test_decoding_restores_a_config_error(got: object) -> None:
    error = decode(encode(ConfigError("steps", got, "why", "remedy")))
    assert isinstance(error, ConfigError)
    assert (error.key, error.got, error.why, error.remedy) == ("steps", got, "why", "remedy")


def test_a_config_error_shows_a_value_that_cannot_be_encoded() -> None:
    assert "steps: got " in str(decode(encode(ConfigError("steps", {1, 2}, "why", "remedy"))))


@pytest.mark.parametrize("value", [{1, 2}, object(), print, torch.nn.Linear, pytest.raises, b"bytes"])
def test_other_values_are_refused(value: Any) -> None:
    with pytest.raises(TypeError, match="cannot be sent"):
        encode([value])


@pytest.mark.parametrize(
    "message",
    [
        pickle.dumps(print),
        b'{"$": ["object", ["os:system", "true"]]}',
        b'{"$": ["object", ["runner.system.signals:StopRequest"]]}',
        b'{"$": ["object", ["runner.parallel.json_encoding:encode", 1]]}',
        b'{"$": ["object", ["runner.nothing:Nothing"]]}',
        b'{"$": ["dtype", "load"]}',
        b'{"$": ["dtype", "float33"]}',
        b'{"$": ["tensor", ["float32", [2], "AAAA"]]}',
        b'{"$": ["tensor", null]}',
        b'{"$": 1}',
        b'{"$": ["config error", ["steps"]]}',
        b'{"$": ["eval", "1"]}',
    ],
)
def test_messages_not_made_by_encode_are_refused(message: bytes) -> None:
    with pytest.raises(ValueError):
        decode(message)
