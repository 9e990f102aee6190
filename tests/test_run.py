"""What a run resolves before it begins: its length, what is due when, and what makes two configs the same run."""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from helpers.compose import FAST, built, composed

from runner.config.errors import ConfigError
from runner.run import Result, Run, build_run, check_used, config_hash

SAMPLES = 1438  # of the digits, 1,797, less the fifth that is held out


def prepared(*overrides: str) -> Run:
    run = built(*FAST, *overrides)
    run.prepare()
    return run


# ---------------------------------------------------------------------------------------------------------------------
# Length


@pytest.mark.parametrize(
    ("overrides", "steps"),
    [
        (["epochs=1", "batch_size=64"], 23),  # 22.47 batches see every sample
        (["epochs=2", "batch_size=64"], 45),  # 44.94: the stream has no ragged last batch
        (["epochs=20", "batch_size=64"], 450),
        (["epochs=0.5", "batch_size=64"], 12),
        (["epochs=0.0001", "batch_size=64"], 1),
        (["epochs=3", "batch_size=719"], 6),  # exactly two batches an epoch
        (["epochs=1", "batch_size=1438"], 1),
        (["epochs=0.1", "batch_size=1"], 144),
        (["epochs=20", "steps=7"], 7),  # steps stand in place of epochs
        (["epochs=null", "steps=7"], 7),
    ],
)
def test_steps_follow_from_epochs(overrides: list[str], steps: int) -> None:
    assert prepared(*overrides).num_steps == steps


def test_a_tenth_ten_times_is_one_epoch() -> None:
    """0.1 · 3 · 10 is 3.0000000000000004: what is too much by a rounding error is no step."""
    run = built(*FAST)
    run.epochs, run.workload = 0.1 * 3, endless(10.0)
    run.prepare()
    assert run.num_steps == 3


def endless(epoch: float | None) -> Any:
    """A workload whose epoch has so many steps; None: it has none."""
    return SimpleNamespace(
        num_steps=lambda _: None,
        check_plan=lambda plan: None,
        prepare=lambda: None,
        steps_per_epoch=lambda batch_size: epoch,
    )


def test_a_workload_without_epochs_wants_steps() -> None:
    run = built(*FAST)
    run.workload = endless(None)
    with pytest.raises(ConfigError, match=r"epochs: got .*: this workload has no epochs\n  set steps=N"):
        run.prepare()
    run.steps = 205
    run.prepare()
    assert (run.num_steps, run.eval_every, run.save_every) == (205, 20, 20), "ten times in a run, in place of epochs"
    run.steps, run.eval_every = 5, None
    run.prepare()
    assert run.eval_every == 1


@pytest.mark.parametrize(
    ("overrides", "every"),
    [
        (["batch_size=64"], 23),
        (["batch_size=719"], 2),
        (["batch_size=64", "steps=1000"], 23),  # of the data, however long the run is
        (["eval_every=0", "save_every=0"], 0),
        (["eval_every=5", "save_every=5"], 5),
    ],
)
def test_evaluations_and_checkpoints_come_once_an_epoch_unless_said(overrides: list[str], every: int) -> None:
    run = prepared(*overrides)
    assert (run.eval_every, run.save_every) == (every, every)


def test_preparing_twice_changes_nothing() -> None:
    run = prepared("epochs=2")
    run.prepare()
    assert (run.num_steps, run.eval_every) == (45, 23)


def test_a_batch_larger_than_the_data_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=f"batch_size: got 1439: the data has {SAMPLES}.*\n  at most batch_size={SAMPLES}"
    ):
        prepared("batch_size=1439")
    assert prepared(f"batch_size={SAMPLES}", "epochs=4").num_steps == 4


@pytest.mark.parametrize(
    ("typed", "key"),
    [
        (["env=acrobot"], "env"),
        (["++env.num_envs=4"], "env.num_envs"),
        (["workload=dqn", "data=synthetic"], "data"),
        (["workload=dqn", "data.crop=2"], "data.crop"),
    ],
)
def test_what_the_workload_is_not_made_from_is_refused(typed: list[str], key: str) -> None:
    """It would train something else than was meant, without a word."""
    with pytest.raises(ConfigError, match=rf"^{key}: got '.*is not made from any {key.partition('.')[0]}\n"):
        check_used(built(*typed), typed)


def test_what_it_is_made_from_is_not() -> None:
    for typed in (["data=synthetic", "data.size=8", "model=tiny"], ["workload=dqn", "env.num_envs=4", "seed=1"], []):
        check_used(built(*typed), typed)


# ---------------------------------------------------------------------------------------------------------------------
# What is due


@pytest.mark.parametrize(
    ("every", "due"),
    [
        (1, [1, 2, 3, 4, 5, 6, 7]),
        (3, [3, 6, 7]),  # and at the end
        (7, [7]),
        (100, [7]),
        (0, [7]),  # only at the end
        (None, [7]),
    ],
)
def test_due(every: int | None, due: list[int]) -> None:
    run = prepared("steps=7")
    assert [step for step in range(1, 8) if run.due(every, step)] == due


def test_what_is_due_is_done(trained) -> None:
    run = trained("steps=7", "eval_every=3", "save_every=2", "keep=9")
    saved = {int(path.name.removeprefix("step_")) for path in (run.directory / "checkpoints").glob("step_*")}
    assert {2, 4, 6, 7} <= saved <= {2, 3, 4, 6, 7}, "when it is due, and after an evaluation that is the best so far"


# ---------------------------------------------------------------------------------------------------------------------
# The config


def leaves(config: dict[str, Any], above: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """The way to every value."""
    ways = [leaves(v, (*above, k)) if isinstance(v, dict) else [(*above, k)] for k, v in config.items()]
    return [way for found in ways for way in found]


def changed(config: dict[str, Any], way: tuple[str, ...]) -> dict[str, Any]:
    """`config` with another value at the end of `way`."""
    new = copy.deepcopy(config)
    node = new
    for key in way[:-1]:
        node = node[key]
    node[way[-1]] = f"not {node[way[-1]]}"
    return new


def test_the_hash_is_of_everything_but_where_it_is_written() -> None:
    config = composed()
    before = config_hash(config)
    same = {".".join(way) for way in leaves(config) if config_hash(changed(config, way)) == before}
    assert same == {"name", "output_root", "resume"}
    assert len(leaves(config)) > 40
    assert len(before) == 12
    assert int(before, 16) >= 0


def test_the_hash_knows_no_order_and_no_spelling() -> None:
    config = composed()
    assert config_hash(dict(reversed(config.items()))) == config_hash(config)
    assert config_hash(composed(f"optimizer.lr={config['optimizer']['lr']:.9f}", "precision=32")) == config_hash(config)
    assert config_hash(composed("optimizer.lr=0.123")) != config_hash(config)


def test_a_run_is_made_of_what_was_chosen_and_remembers_the_config() -> None:
    config = composed("optimizer=adam", "precision=bf16", "accumulation=4", "model=tiny")
    run = build_run(config)
    names = [type(part).__name__ for part in (run.optimizer, run.precision, run.schedule, run.workload, run.profiler)]
    assert names == ["Adam", "BFloat16", "OneCycle", "Classifier", "Profiler"]
    assert run.workload.model.hidden == 64
    assert (run.plan.batch_size, run.plan.accumulation, run.plan.shard) == (64, 4, (0, 1))
    assert run.config == config
    assert run.config is not config
    assert run.directory == Path()


def test_building_does_not_need_what_only_running_needs() -> None:
    build_run(composed("device=cuda", "data=mnist"))
    with pytest.raises(ConfigError):
        build_run(composed("device=cuda", "data=mnist", "data.root=/nowhere")).prepare()


def test_a_result_is_plain() -> None:
    result = Result("done", steps=3, metrics={"eval/loss": 0.5})
    assert result.as_dict() == {
        **{field.name: getattr(result, field.name) for field in dataclasses.fields(Result)},
        "status": "done",
        "steps": 3,
        "metrics": {"eval/loss": 0.5},
    }
