"""Tests of what a run determines before it begins: its length, when evaluations are due, and the hash of its config."""

import copy
import dataclasses
import json
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import compose
from helpers.dry_run import run_in_this_process
from helpers.events import scalar_curves
from helpers.runs import only_run

from runner.config.errors import ConfigError
from runner.parallel.session import Session
from runner.run import Run, build_run, check_used, config_hash
from runner.system.cpu import cpu_model

SAMPLES = 1438  # of the 1,797 digits, without the fifth that is held out


def session_of(*overrides: str) -> Session:
    """Return the session of a fast run with `overrides`."""
    return compose.prepare_session(compose.build_composed_run(*compose.TINY_CPU, *overrides))


@pytest.mark.cases(
    (["epochs=1", "batch_size=64"], 23),  # 22.47 batches see every sample
    (["epochs=2", "batch_size=64"], 45),  # 44.94 batches: a batch may span two epochs, so that all are full
    (["epochs=20", "batch_size=64"], 450),
    (["epochs=0.5", "batch_size=64"], 12),
    (["epochs=0.0001", "batch_size=64"], 1),
    (["epochs=3", "batch_size=719"], 6),  # exactly two batches per epoch
    (["epochs=1", "batch_size=1438"], 1),
    (["epochs=0.1", "batch_size=1"], 144),
    (["epochs=20", "steps=7"], 7),  # `steps` overrides `epochs`
    (["epochs=null", "steps=7"], 7),
)
def test_steps_follow_from_epochs(overrides, steps):
    assert session_of(*overrides).num_steps == steps


def test_rounding_errors_in_epochs_add_no_step():
    """0.1 · 3 · 10 is 3.0000000000000004 in floating point, and must not be rounded up to 4."""
    run = dataclasses.replace(compose.build_composed_run(*compose.TINY_CPU), epochs=0.1 * 3, workload=endless(10.0))
    assert compose.prepare_session(run).num_steps == 3


def endless(epoch: float | None) -> Any:
    """Return a workload with `epoch` steps per epoch. If `epoch` is None, the workload has no epochs."""
    return SimpleNamespace(
        num_steps=lambda _: None,
        check_plan=lambda plan: None,
        prepare=lambda: None,
        steps_per_epoch=lambda batch_size: epoch,
        selection=("loss", "min"),
        best_possible={},
        other_metrics="",
        eval_metrics=lambda: {"loss": "min"},
    )


def test_a_workload_without_epochs_needs_steps():
    run = dataclasses.replace(compose.build_composed_run(*compose.TINY_CPU), workload=endless(None))
    with pytest.raises(ConfigError) as refusal:
        compose.prepare_session(run)
    assert (refusal.value.key, refusal.value.got) == ("steps", None)
    assert "steps=N" in refusal.value.remedy
    session = compose.prepare_session(dataclasses.replace(run, steps=205))
    every = (session.num_steps, session.eval_every, session.save_every)
    assert every == (205, 20, 20), "ten times in a run, in place of epochs"
    assert compose.prepare_session(dataclasses.replace(run, steps=5)).eval_every == 1


@pytest.mark.cases(
    (["batch_size=64"], 23),
    (["batch_size=719"], 2),
    (["batch_size=64", "steps=1000"], 23),  # an epoch of the data, however long the run is
    (["eval_every=0", "save_every=0"], 0),
    (["eval_every=5", "save_every=5"], 5),
)
def test_evaluations_and_checkpoints_come_once_an_epoch_by_default(overrides, every):
    session = session_of(*overrides)
    assert (session.eval_every, session.save_every) == (every, every)


def test_a_batch_larger_than_the_data_is_refused():
    with pytest.raises(ConfigError) as refusal:
        session_of("batch_size=1439")
    assert (refusal.value.key, refusal.value.got) == ("batch_size", 1439)
    assert f"{SAMPLES} training samples" in refusal.value.why
    assert f"batch_size={SAMPLES}" in refusal.value.remedy
    assert session_of(f"batch_size={SAMPLES}", "epochs=4").num_steps == 4


@pytest.mark.cases(
    *("optimizer=[adam,adamw]", "workload=[classifier,classifier]", "env=acrobot", "++env.num_envs=4"),
    *("workload=dqn data=synthetic", "workload=dqn data.crop=2"),
)
def test_an_option_that_would_be_ignored_is_refused(typed):
    """Hydra would merge several options of a group, and accept those of a group that the workload does not use."""
    words = typed.split()
    run = compose.build_composed_run(*words)
    with pytest.raises(ConfigError) as refusal:
        check_used(run, words)
    assert (refusal.value.key, refusal.value.got) == tuple(words[-1].lstrip("+").split("="))


def test_checkpoints_are_saved_when_they_are_due(trained):
    run = trained("steps=7", "eval_every=3", "save_every=2", "keep=9")
    saved = {int(path.name.removeprefix("step_")) for path in (run.directory / "checkpoints").glob("step_*")}
    assert {2, 4, 6, 7} <= saved <= {2, 3, 4, 6, 7}, "when it is due, and after an evaluation that is the best so far"


def leaves(config: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Return the path of every value in a config."""
    paths = [leaves(v, (*above, k)) if isinstance(v, dict) else [(*above, k)] for k, v in config.items()]
    return [path for found in paths for path in found]


def changed(config: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    """Return `config` with another value at `path`."""
    new = copy.deepcopy(config)
    node = new
    for key in path[:-1]:
        node = node[key]
    node[path[-1]] = f"not {node[path[-1]]}"
    return new


def test_the_hash_covers_what_is_computed():
    config = compose.compose_config()
    before = config_hash(config)
    same = {path[0] for path in leaves(config) if config_hash(changed(config, path)) == before}
    assert same == {"name", "output_root", "resume", "tracking"}
    changes = {path[0] for path in leaves(config) if config_hash(changed(config, path)) != before}
    assert not same & changes, "all of a group, or nothing of it"
    assert len(leaves(config)) > 40
    assert re.fullmatch("[0-9a-f]{12}", before)


def test_the_hash_does_not_depend_on_order_or_spelling():
    config = compose.compose_config()
    spelled = compose.compose_config(f"optimizer.lr={config['optimizer']['lr']:.9f}", "precision=32")
    assert config_hash(dict(reversed(config.items()))) == config_hash(spelled) == config_hash(config)


def test_building_needs_neither_the_device_nor_the_data():
    build_run(compose.compose_config("device=cuda", "data=mnist"))
    with pytest.raises(ConfigError) as refusal:
        compose.prepare_session(
            compose.build_composed_run(
                "device=cuda" if torch.cuda.is_available() else "device=cpu", "data=mnist", "data.root=/nowhere"
            )
        )
    assert (refusal.value.key, refusal.value.got) == ("data.root", "/nowhere")


def test_options_never_change_during_a_run(tmp_path):
    """`train_in` checks this in each test that trains with it; here, that the check notices a change."""
    run = compose.build_composed_run(
        *compose.TINY_CPU, "epochs=0.1", "precision=tf32", "save_every=null", "profiler=trace"
    )
    assert {"seed", "steps", "save_every", "workload.model", "optimizer.lr"} <= compose.options_of(run).keys()
    assert compose.train_in(tmp_path / "unchanged", run).result.status == "done"

    def change(run: Run, session: Session) -> None:
        session.workload.after_step = lambda model, step: vars(run).update(seed=9)

    with pytest.raises(AssertionError, match="an option of the run has changed"):
        compose.train_in(tmp_path / "changed", run, change)


def test_the_default_run_learns_the_digits_writes_its_directory_and_prints_where_it_is(tmp_path):
    code, console = run_in_this_process([], tmp_path)
    assert code == 0, console
    directory = only_run(tmp_path)
    names = {path.name for path in directory.iterdir()}
    assert {"config.yaml", "overrides.yaml", "environment.json", "checkpoints", "log.txt", "result.json"} <= names
    result = json.loads((directory / "result.json").read_text())
    assert (result["status"], result["steps"]) == ("done", 450)  # 20 epochs of 1,438 samples, 64 per step
    assert result["best"]["value"] >= result["metrics"]["eval/accuracy"] >= 0.98
    losses = [value for _, value in scalar_curves(directory)["train/loss"]]
    assert len(losses) == 9
    assert losses[-1] < 0.2 < losses[0]
    steps = {path.name for path in (directory / "checkpoints").iterdir()}
    assert {"step_00000450", f"step_{result['best']['step']:08d}"} <= steps
    assert len(steps) <= 3, "two of the latest, and the best"
    assert "tensorboard --logdir outputs" in console.replace("'", "")
    assert str(directory.relative_to(tmp_path)) in console
    assert "best eval/accuracy" in console


def test_the_first_lines_say_what_is_trained(tmp_path):
    words = [*compose.TINY_CPU, "steps=3", "precision=bf16", "accumulation=4", "name=first"]
    code, console = run_in_this_process(words, tmp_path)
    assert code == 0, console
    [directory] = tmp_path.glob("outputs/first/*")
    keys = "model|data|env|replay|device|precision|parallel|batch|length|directory"
    lines = dict(re.findall(rf"^({keys}) +(\S.*)$", console, re.MULTILINE))
    # model=tiny: two 3×3 convolutions of 16 and 32 channels, and two linear layers on 32·2·2 features.
    parameters = (9 * 1 * 16 + 16) + (9 * 16 * 32 + 32) + (128 * 64 + 64) + (64 * 10 + 10)
    assert lines == {
        "model": f"ConvNet, {parameters:,} trainable parameters, {4 * parameters / 1e6:.2f} MB",
        "data": "Digits, 1,438 training and 359 held-out samples of 1×8×8, 10 classes",
        "device": f"cpu ({cpu_model()}), 1 CPU thread per process",
        "precision": "bfloat16 autocast, float32 weights",
        "parallel": "single device, 1 process",
        "batch": "64 samples = 1 process × 4 micro-batches × 16",
        "length": "3 steps, 192 samples",
        "directory": f"outputs/first/{directory.name}",
    }
    assert "optimizer:\n" in (directory / "log.txt").read_text().partition("step 3:")[0], "the config is in the log"
