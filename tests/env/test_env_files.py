"""Tests of environments in a file of the user's: `env=grid.py`, `env=grid.py:Grid` and `env=grid.py env.id=Name-v0`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.plain_loop import largest_difference, weights_at

import runner
from runner.config import user_code
from runner.env.user import UserEnv

WORDS = ["workload=dqn", "steps=3", "workload.warm_up=100", "workload.replay_size=500", "batch_size=16"]
SMALL = [*WORDS, "device=cpu", "device.threads=1", "env.num_envs=2", "env.max_episode_steps=20", "model.hidden=[8]"]

pytestmark = pytest.mark.filterwarnings("ignore:.*Overriding environment OfAFile-v0")


@pytest.fixture(autouse=True)
def _beside_a_file(tmp_path, monkeypatch) -> None:
    shutil.copy(Path(__file__).parents[1] / "helpers" / "grid_env.py", tmp_path / "grid.py")
    monkeypatch.chdir(tmp_path)


def test_an_environment_of_a_file_trains_by_its_name_or_its_id_in_every_mode_and_resumes():
    results: list[Any] = [
        runner.train([*SMALL, *words])
        for words in (
            ["env=grid.py"],
            ["env=grid.py:Grid", "parallel=ddp"],
            ["env=./grid.py", "env.id=OfAFile-v0"],
        )
    ]
    first = weights_at(results[0].directory, 3)
    assert largest_difference(weights_at(results[2].directory, 3), first) == 0
    assert results[1].world_size == 2
    path = results[0].directory
    with pytest.raises(runner.ConfigError) as refused:
        runner.train([f"resume={path}", "steps=4"])
    assert "env=grid.py" in refused.value.remedy
    assert runner.train([f"resume={path}", "steps=4", "env=grid.py"]).steps == 4


def test_environments_of_a_file_run_in_processes_of_their_own():
    with user_code.using(user_code.passed(["env=grid.py"])):
        env = UserEnv(num_envs=2, vectorization="async", options={"length": 4}, max_episode_steps=9)
        env.prepare()
        assert (env.shape, env.num_actions, env.longest) == ((1,), 2, 9)
        with env.vector(2) as vector:
            vector.reset(0)
            before = vector.observations
            after = vector.step(np.zeros(2, np.int64)).observations
        assert after.flatten().tolist() == np.maximum(before.flatten() - 0.25, 0).tolist()


@pytest.mark.cases(
    (["env=grid.py:Gird"], "env=grid.py:Grid"),
    (["env=grid.py:NOTHING"], "name one"),
    (["env=gird.py"], "exists"),
    (["env=grid.py", "env.id=OfAFlie-v0"], "correct the name"),
    (["env.id=beside:OfAFile-v0"], "env=beside.py env.id=OfAFile-v0"),
)
def test_what_is_no_environment_says_what_to_type(words, remedy):
    Path("grid.py").rename("beside.py") if "beside" in words[0] else None
    with pytest.raises(runner.ConfigError) as refused:
        runner.train([*SMALL, *words])
    assert refused.value.key.partition(".")[0] == "env"
    assert remedy in refused.value.remedy
    assert not [*Path("outputs").rglob("config.yaml")]
