"""Tests of `runner.config.unused_names`: misspelt names in a file of the user's, and names that are options here."""

from __future__ import annotations

import ast
import logging
from types import SimpleNamespace

import pytest

import runner
from runner.config.errors import ConfigError
from runner.config.unused_names import check_names
from runner.config.user_code import PARTS

USUAL = """
import torch
from torch.utils.data import Dataset
from torch.optim import lr_scheduler as scheduler

WIDTH, transform = 8, lambda x: 2 * x


class Model(torch.nn.Linear):
    pass


class Rows(Dataset):
    def __getitem__(self, index):
        return transform(index), index


def criterion(outputs, targets):
    return (outputs - targets).square().mean()


def loss(outputs, targets):
    return criterion(outputs, targets)


def model():
    optimizer = "a local name"
    return Model(WIDTH, 1)


def data():
    return Rows(), Rows()


def plot_curves():
    pass


_metric = 3
other_model = model2 = Model
if __name__ == "__main__":
    optimizer = torch.optim.SGD(model().parameters())
"""


def test_helpers_imports_and_names_of_a_script_are_no_mistakes(caplog):
    values = {node.name: print for node in ast.parse(USUAL).body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    values |= dict.fromkeys(("WIDTH", "transform", "_metric", "other_model", "model2", "scheduler"), print)
    check_names("/mine.py", USUAL.encode(), values, [part for part in PARTS if part not in values])
    assert not caplog.messages


@pytest.mark.cases(
    ("metric = {'f1': print}", "name it metrics"),
    ("metric = metrics_of()", "name it metrics"),
    ("def after_steps(state): pass", "name it after_step"),
    ("def afterStep(state): pass", "name it after_step"),
    ("def before_saving(state): pass", "name it before_save"),
    ("def on_train_epoch_end(state): pass", "after_evaluation(state, metrics)"),
    ("callbacks = [print]", "after_evaluation(state, metrics)"),
    ("def lossfn(o, t): return o", "name it loss"),
    ("criterion = CrossEntropyLoss()", "name it loss"),
    ("async def Loss(o, t): return o", "name it loss"),
    ("class Model: pass", "name it model"),
    ("def network(): return network()", "name it model"),
    ("dataset = Rows()", "name it data"),
    ("train_loader, test_loader = loaders()", "name it data"),
    ("optimizer = Adam()", "type optimizer="),
    ("def lr_scheduler(o): return o", "type schedule="),
    ("def collate_fn(samples): return samples", "name it collate"),
    ("try:\n  optimizer: list = Adam()\nfinally:\n  pass", "type optimizer="),
)
def test_what_looks_like_a_part_and_is_none_is_refused(text, remedy):
    values = {each.id: print for each in ast.walk(ast.parse(text)) if isinstance(each, ast.Name)}
    values |= {each.name: print for each in ast.parse(text).body if hasattr(each, "name")}
    with pytest.raises(ConfigError) as refused:
        check_names("/mine.py", text.encode(), values, PARTS)
    assert (refused.value.key, refused.value.got) == ("workload", "/mine.py")
    assert "line" in refused.value.why
    assert remedy in refused.value.remedy


@pytest.mark.cases(
    ("lr = 0.1", 1, "type optimizer.lr="),
    ("EPOCHS = 10", 1, "type epochs="),
    ("batch_size: int = 4", 4, "type batch_size="),
    ("optimizer = 'adam'", "adam", "type optimizer="),
    ("class FocalLoss: pass", print, "name it loss"),
)
def test_what_may_be_meant_for_the_run_is_said(text, value, remedy, caplog):
    name = next(each for each in ("lr", "EPOCHS", "batch_size", "optimizer", "FocalLoss") if each in text)
    with caplog.at_level(logging.WARNING):
        check_names("/mine.py", text.encode(), {name: value}, ["loss"])
    [said] = caplog.messages
    assert said.startswith(f"/mine.py:1: {name} has no effect")
    assert remedy in said


def test_a_name_is_not_misspelt_if_the_part_is_there():
    values = SimpleNamespace(model2=print, Model=print, losses=print, criterion=print, after_step=print)
    text = "\n".join(f"{name} = print" for name in vars(values))
    check_names("/mine.py", text.encode(), vars(values), ["metrics"])


@pytest.mark.cases(
    ("metric", "name it metrics"),
    ("criterion", "name it loss"),
    ("optimizer", "type optimizer="),
    ("epochs", "type epochs="),
    ("max_epochs", "type epochs="),
    ("callbacks", "after_step(state)"),
    ("modell", "name it model"),
)
def test_an_argument_of_another_name_says_what_to_pass_or_type(name, remedy):
    with pytest.raises(runner.ConfigError) as refused:
        runner.train(["steps=1"], **{name: print})
    assert refused.value.key == name
    assert remedy in refused.value.remedy
