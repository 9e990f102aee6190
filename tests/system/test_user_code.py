"""Tests of finding the user's code in a traceback."""

from __future__ import annotations

import json

import pytest
import torch

from runner.config.errors import check
from runner.system.user_code import last_user_frame


def ends_in_python() -> None:
    json.loads("{")


def ends_in_torch() -> None:
    torch.nn.Linear(2, 3)(torch.zeros(5))


def ends_in_this_project() -> None:
    check(False, "key", 1, "why", "remedy")


@pytest.mark.parametrize("call", [ends_in_python, ends_in_torch, ends_in_this_project])
def test_the_last_frame_is_where_the_user_called_others(call) -> None:
    with pytest.raises(Exception) as caught:
        call()
    where, _ = last_user_frame(caught.value).splitlines()[:2]
    assert where == f'  File "{__file__}", line {call.__code__.co_firstlineno + 1}, in {call.__name__}'


def test_no_frame_is_that_of_the_user() -> None:
    with pytest.raises(Exception) as caught:
        json.loads("{")
    caught.value.__traceback__ = caught.value.__traceback__.tb_next  # pyright: ignore
    assert last_user_frame(caught.value) == ""
