"""Tests with forged checkpoints, whose hashes are correct but whose content is not: they are refused with an error."""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import checkpoint_edits
from helpers.compose import TINY_CPU, build_composed_run, prepare_session, train_in

from runner.config.errors import ConfigError
from runner.training import prepare, train_step

AGENT = ("device=cpu", "device.threads=1", "workload=dqn", "env.num_envs=2", "workload.replay_size=64")
AGENT += ("workload.warm_up=40", "workload.env_steps=80", "workload.eval_episodes=1", "batch_size=8")
AGENT += ("workload.epsilon_repeat=4",)
RUNS = {"sgd": (*TINY_CPU, "optimizer=sgd"), "adamw": (*TINY_CPU, "optimizer=adamw", "precision=16"), "agent": AGENT}
STEPS = ("steps=3", "save_every=2", "eval_every=2", "log_every=5")


def nested(depth: int) -> list:
    value: list = []
    for _ in range(depth):
        value = [value]
    return value


VALUES: tuple[Any, ...] = ("1", None, float("nan"), -5, 10**400, True, [1], {"a": 1}, nested(150))
VALUES += (torch.zeros(7),)

TENSORS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    lambda t: t.flatten()[:-1].clone() if t.dim() else torch.zeros(0, dtype=t.dtype),
    lambda t: torch.cat((t.flatten(), t.flatten()[:1])),
    lambda t: t[None].clone(),
    lambda t: t.half() if t.is_floating_point() else t.float(),
    lambda t: t.to(torch.complex64),
    lambda t: torch.full_like(t, float("inf")) if t.is_floating_point() else t[None].clone(),
    lambda t: torch.zeros(1, dtype=t.dtype).expand(t.shape if t.numel() > 1 else 2),
    lambda t: t.to_sparse() if t.dim() else t[None].to_sparse(),
    lambda t: t.clone().requires_grad_() if t.is_floating_point() else t[None].clone(),
    lambda t: torch.empty_like(t, device="meta"),
)


class Forger:
    """Resumes a run from checkpoints with changed content."""

    def __init__(self, name: str, root: Path):
        trained = train_in(root / "original", build_composed_run(*RUNS[name], *STEPS))
        self.original, self.directory = trained.directory / "checkpoints/step_00000002", root / "run"
        self.path = self.directory / "checkpoints" / self.original.name
        self.run = build_composed_run(*RUNS[name], *STEPS)
        self.session = prepare_session(self.run)

    def restore(self) -> Forger:
        shutil.rmtree(self.directory, ignore_errors=True)
        shutil.copytree(self.original, self.path)
        return self

    def outcome(self) -> str:
        """Resume and train one step; return `resumed`, `refused`, or the message of an unexpected `ConfigError`."""
        session = self.session
        try:
            state = prepare(self.run, session, self.directory)
            batches = session.workload.batches(state.model, session.plan, state.step, session.device)
            train_step(state, batches, next(session.plan.steps(state.step, session.num_steps)), log_due=True)
            return "resumed"
        except ConfigError as refusal:
            return "refused" if refusal.key in ("resume", "checkpoint") and len(str(refusal)) < 1000 else str(refusal)

    def with_content(self, file: str, content: Any) -> str:
        self.restore()
        checkpoint_edits.write_checkpoint_file(self.path / file, content)
        return self.outcome()


@pytest.fixture(scope="module")
def forger(tmp_path_factory) -> Callable[[str], Forger]:
    """Return a function that trains the run `RUNS[name]`, once, and restores its checkpoint."""
    known = functools.cache(lambda name: Forger(name, tmp_path_factory.mktemp(name)))
    return lambda name: known(name).restore()


def chosen(content: Any) -> Iterator[tuple[checkpoint_edits.Keys, Any]]:
    """Yield (keys, value) for the values that a test changes: those of one parameter, and of a few attributes."""
    kept = {next(iter(content.get("optimizer", [""])))}
    for keys, value in checkpoint_edits.nested_values(content):
        is_other_parameter = keys[0] == "optimizer" and len(keys) > 1 and keys[1] not in kept
        attribute = keys[4] if keys[:3] == ENVS and len(keys) > 4 else "state"
        if not is_other_parameter and attribute in ("state", "steps", "num_envs", "_np_random"):
            yield keys, value


ENVS = ("workload", "environments", "envs")


def may_be(keys: checkpoint_edits.Keys, value: Any, forged: Any) -> bool:
    """Whether a run may have saved `forged` in place of `value`."""
    if (
        forged is checkpoint_edits.REMOVE_KEY
    ):  # a run without evaluation, a parameter without gradient, an element of a list
        is_optional = keys[0] in ("metrics", "optimizer") and len(keys) == 2
        return (
            isinstance(keys[-1], int)
            or is_optional
            or keys in (("num_steps",), ("attributes",), ("workload",), ("schedule",), ("code",), ("options",))
        )  # an older one has none
    if forged is None and keys == ("workload", "environments"):  # of environments whose state cannot be saved
        return True
    return type(forged) is type(value) or (type(forged) is int and isinstance(value, float))


@pytest.mark.parametrize("tries", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("file", ["state.pt", "rank_0.pt"])
@pytest.mark.parametrize("name", RUNS)
def test_a_value_of_another_form_is_refused(forger, name, file, tries):
    """Each value is replaced by the next of `VALUES` or `TENSORS`, in several tries, and then removed."""
    run = forger(name)
    assert run.outcome() == "resumed", "the original"
    content, values, tensors = checkpoint_edits.read_checkpoint_file(run.original / file), cycle(VALUES), cycle(TENSORS)
    for keys, value in chosen(content):
        is_tensor = isinstance(value, torch.Tensor)
        is_free = keys[:3] == ENVS  # nothing is raised: one trial is enough
        forgeries = [next(tensors)(value) if is_tensor else next(values) for _ in range(1 if is_free else tries)]
        for forged in forgeries if is_free else [*forgeries, checkpoint_edits.REMOVE_KEY]:
            if is_tensor or not may_be(keys, value, forged):
                outcome = run.with_content(
                    file, checkpoint_edits.with_value_changed(content, keys, lambda _, forged=forged: forged)
                )
                assert outcome == "refused" or is_free, (keys, type(forged), outcome)


def test_weights_of_another_form_are_refused(forger):
    run = forger("sgd")
    content = checkpoint_edits.read_checkpoint_file(run.original / "model.safetensors")
    (key, value), *_ = content.items()
    for form in (TENSORS[0], TENSORS[1], TENSORS[2], TENSORS[3], TENSORS[5]):
        assert run.with_content("model.safetensors", {**content, key: form(value).contiguous()}) == "refused"
    assert run.with_content("model.safetensors", {**content, "more": torch.zeros(1)}) == "refused"
    assert run.with_content("model.safetensors", {k: t for k, t in content.items() if k != key}) == "refused"


def test_a_file_of_another_format_or_with_unrelated_content_is_refused(forger):
    run = forger("sgd")
    for file in ("model.safetensors", "state.pt", "rank_0.pt"):
        for content in (b"", b"PK\5\6" + bytes(18), b"[]", b"\x80\x02]."):
            run.restore()
            (run.path / file).write_bytes(content)
            checkpoint_edits.rewrite_manifest(run.path)
            assert run.outcome() == "refused", (file, content)
    for value in (None, 3, [], {}):
        assert run.with_content("state.pt", value) == "refused"
        assert run.with_content("rank_0.pt", value) == "refused" or value == {}  # {} means that there is no state


def test_deep_content_is_refused(forger):
    """The pickle is written by hand, because `torch.save` cannot write lists that are nested so deeply."""
    run, depth = forger("sgd"), 200_000
    file, nest = run.path / "state.pt", b"\x80\x02}X\t\0\0\0optimizer" + b"]" * depth + b"a" * (depth - 1) + b"s."
    change = lambda name, data: nest if ".pkl" in name else data  # noqa: E731
    checkpoint_edits.rewrite_archive(run.original / "state.pt", file, change)
    checkpoint_edits.rewrite_manifest(run.path)
    assert run.outcome() == "refused"


MANIFESTS: tuple[dict[str, Any], ...] = (
    *({"files": ["state.pt"]}, {"files": checkpoint_edits.REMOVE_KEY}, {"files": {}}, {"files": {"..": "0" * 64}}),
    *({"files": {"../../../secret": "0" * 64}}, {"files": {"/dev/zero": "0" * 64}}, {"files": {"a" * 5000: "0" * 64}}),
    *({"files": {"a\0b": "0" * 64}}, {"files": {"\udcff": "0" * 64}}, {"files": {"state.pt": 1}}),
    *({"step": "2"}, {"step": True}, {"step": -2}, {"step": 3}, {"step": checkpoint_edits.REMOVE_KEY}),
    *({"world_size": "1"}, {"world_size": 0}, {"schema": "x" * 100_000}),
)


def test_a_manifest_with_invalid_values_and_correct_hashes_is_refused(forger):
    run = forger("sgd")
    for changes in MANIFESTS:
        run.restore()
        checkpoint_edits.rewrite_manifest(run.path, **changes)
        assert run.outcome() == "refused", changes
    os.truncate(run.path / "manifest.json", 10**12)  # a sparse file, which takes no space on the disk
    assert run.outcome() == "refused"


@pytest.mark.parametrize("file", ["model.safetensors", "state.pt", "config.yaml", "manifest.json"])
def test_a_link_or_pipe_in_place_of_a_file_is_refused(forger, file):
    run = forger("sgd")
    shutil.move(run.path / file, run.directory / "elsewhere")
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero"), lambda path: path.symlink_to("../../elsewhere")):
        make(run.path / file)
        assert run.outcome() == "refused"
        (run.path / file).unlink()
