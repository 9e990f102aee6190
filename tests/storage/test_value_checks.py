"""Tests of `runner.storage.value_checks`: values from a checkpoint must have the expected form."""

from typing import Any

import pytest
import torch

from runner.storage.value_checks import COUNT, TensorSpec, UnexpectedContentError, check_like

ROWS = TensorSpec(torch.float32, (None, 2))

GOOD: list[tuple[Any, Any]] = [
    (1, int),
    (1, float),
    (float("-inf"), float),
    ("a", str),
    ([], object),
    (0, COUNT),
    (3, range(4)),
    ({}, {str: int}),
    ({"a": 1, "b": 2}, {str: int}),
    ({"a": 1}, {"a": int}),
    ([], [int]),
    ([1, 2], [int]),
    ([(1.0, 2)], [(float, int)]),
    (torch.zeros(0, 2), ROWS),
    (torch.zeros(3, 2).double(), ROWS),
    (torch.zeros(3, dtype=torch.uint8), torch.ones(3, dtype=torch.uint8)),
]

BAD: list[tuple[Any, Any]] = [
    *((value, range(4)) for value in (-1, 4, 1.0, True, "1", None, 10**5000)),
    (True, int),
    (2**256, int),
    (1.0, int),
    (float("nan"), float),
    (True, float),
    (None, str),
    ({1: 1}, {str: int}),
    ({"a": "b"}, {str: int}),
    ({}, {"a": int}),
    ({"a": 1, "b": 1}, {"a": int}),
    ([], {"a": int}),
    ((1,), [int]),
    ([1, "a"], [int]),
    ((1.0,), (float, int)),
    ([1.0], torch.zeros(1)),
    (torch.zeros(2), ROWS),
    (torch.zeros(2, 3), ROWS),
    (torch.zeros(2, 2).half(), ROWS),
    (torch.zeros(2, 2, dtype=torch.int32), ROWS),
    (torch.zeros(2, 2).T[:, :1].expand(2, 2), ROWS),
    (torch.full((1, 2), float("nan")), ROWS),
    (torch.zeros(1, 2, device="meta"), ROWS),
    (torch.zeros(1, 2).requires_grad_(), ROWS),
    (torch.nn.Parameter(torch.zeros(1, 2)), ROWS),
    (torch.zeros(1, 2).to_sparse(), ROWS),
    (torch.ones(2, 2, dtype=torch.complex64).conj().imag, ROWS),
]


@pytest.mark.parametrize(("value", "like"), GOOD, ids=range(len(GOOD)))
def test_a_value_of_the_same_form_is_valid(value, like):
    check_like(value, like, "it")


@pytest.mark.parametrize(("value", "like"), BAD, ids=range(len(BAD)))
def test_a_value_of_another_form_is_refused(value, like):
    with pytest.raises(UnexpectedContentError, match=r"^it"):
        check_like(value, like, "it")


def test_the_error_names_the_value_and_the_difference():
    with pytest.raises(UnexpectedContentError, match=r"^state, 'w', 'step': torch.float32 \[2\] instead of .* \[\]$"):
        check_like({"w": {"step": torch.zeros(2)}}, {str: {"step": torch.zeros(())}}, "state")
    with pytest.raises(UnexpectedContentError, match=r"^state: other keys \('a', 'x'\)"):
        check_like({"x": 1}, {"a": int}, "state")


def test_only_what_the_form_describes_is_examined():
    value: list = []
    for _ in range(10_000):
        value = [value] * 2
    check_like({"a": value}, {"a": object}, "it")
    for form in (int, [int], {str: int}):
        with pytest.raises(UnexpectedContentError):
            check_like({"a": value}, {"a": form}, "it")
