"""Tests of environments: options, equality with gymnasium's single environments, restored states, and errors."""

import os
import signal
from typing import Any, ClassVar

import gymnasium
import numpy as np
import psutil
import pytest
import torch
from gymnasium.envs.registration import EnvSpec
from gymnasium.vector import AsyncVectorEnv
from helpers.command import TIMEOUT_SECONDS

from runner.config.errors import ConfigError
from runner.env import EnvironmentBrokenError
from runner.env.base import Env


def prepared(id: str, **options: Any) -> Env:
    env = Env(id, **options)
    env.prepare()
    return env


@pytest.mark.cases(
    ("CartPole-v1", (4,), 2, 500),
    ("Acrobot-v1", (6,), 3, 500),
    ("MountainCar-v0", (2,), 3, 200),
    ("FrozenLake-v1", (16,), 4, 100),  # the index of a state becomes a one-hot vector
    ("Blackjack-v1", (45,), 2, None),  # three concatenated one-hot vectors: 32 + 11 + 2,
)
def test_the_spaces_of_an_environment_are_known_after_prepare(id, shape, num_actions, longest):
    env = prepared(id)
    assert (env.shape, env.num_actions, env.longest) == (shape, num_actions, longest)
    with env.vector(3) as vector:
        vector.reset(0)
        assert vector.observations.shape == (3, *shape)
        assert vector.observations.dtype == np.float32


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_vector_environments_step_and_reset_like_single_ones(vectorization):
    env = prepared("CartPole-v1", num_envs=2, vectorization=vectorization, max_episode_steps=30)
    singles = [gymnasium.make("CartPole-v1", max_episode_steps=30) for _ in range(2)]
    wanted = [single.reset(seed=7 + i)[0] for i, single in enumerate(singles)]
    random, ended = np.random.default_rng(0), [False, False]
    resets = ends = cuts = 0
    with env.vector(2) as vector:
        vector.reset(7)
        for _ in range(150):
            assert np.array_equal(vector.observations, np.stack(wanted))
            actions = random.integers(2, size=2)
            steps = vector.step(actions)
            for i, single in enumerate(singles):
                assert steps.taken[i] == (not ended[i])
                if ended[i]:
                    wanted[i], ended[i] = single.reset()[0], False
                    resets += 1
                    continue
                wanted[i], reward, terminated, truncated, _ = single.step(actions[i])
                assert (steps.rewards[i], steps.terminated[i], steps.truncated[i]) == (reward, terminated, truncated)
                ended[i] = terminated or truncated
                ends, cuts = ends + terminated, cuts + truncated
    assert min(resets, ends, cuts) > 0


@pytest.mark.parametrize("vectorization", ["auto", "sync"])
@pytest.mark.parametrize("before", [3, 5])
def test_a_reset_of_all_environments_begins_whole_episodes(before, vectorization):
    """Also if it comes in the middle of an episode, or when episodes have ended and the next step would reset them."""
    env = prepared("CartPole-v1", vectorization=vectorization, max_episode_steps=5)
    with env.vector(2) as vector:
        for seed, count in ((1, before), (2, 6)):
            vector.reset(seed)
            steps = [vector.step(np.zeros(2, np.int64)) for _ in range(count)]
    assert [each.taken.tolist() for each in steps] == [[True] * 2] * 5 + [[False] * 2]
    assert [each.truncated.tolist() for each in steps] == [[False] * 2] * 4 + [[True] * 2] + [[False] * 2]
    assert [each.rewards.tolist() for each in steps] == [[1.0] * 2] * 5 + [[0.0] * 2]


@pytest.mark.parametrize("id", ["CartPole-v1", "Acrobot-v1", "MountainCar-v0", "FrozenLake-v1", "Taxi-v4"])
@pytest.mark.parametrize("vectorization", ["auto", "sync"])
def test_a_restored_state_continues_bitwise(id, vectorization, tmp_path):
    env = prepared(id, vectorization=vectorization, max_episode_steps=25)
    random = np.random.default_rng(1)
    with env.vector(3) as vector, env.vector(3) as other:
        vector.reset(5)
        other.reset(99)
        for _ in range(60):
            vector.step(random.integers(env.num_actions, size=3))
        torch.save(vector.state_dict(), tmp_path / "state.pt")
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
        for _ in range(60):
            assert np.array_equal(vector.observations, other.observations)
            actions = random.integers(env.num_actions, size=3)
            for mine, others in zip(vector.step(actions), other.step(actions), strict=True):
                assert np.array_equal(mine, others)


def test_environment_processes_are_not_forked_from_the_run_and_do_not_keep_its_signal_handlers():
    """The run may have begun to use CUDA, which does not survive a fork."""
    env = prepared("CartPole-v1", num_envs=2, vectorization="async")
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with env.vector(2) as vector:
            assert isinstance(vector.envs, AsyncVectorEnv)
            vector.reset(0)
            for process in vector.envs.processes:
                assert psutil.Process(process.pid).ppid() != os.getpid()
                process.terminate()
                process.join(TIMEOUT_SECONDS)
                assert process.exitcode == -signal.SIGTERM
            vector.envs.close(terminate=True)
    finally:
        signal.signal(signal.SIGTERM, before)


def registered(monkeypatch: pytest.MonkeyPatch, environment: type[gymnasium.Env]) -> str:
    """Register the environment for one test, and return its name."""
    name = f"{environment.__name__}-v0"
    monkeypatch.setitem(gymnasium.registry, name, EnvSpec(name, environment, disable_env_checker=True))
    return name


class Broken(gymnasium.Env):
    """An environment that fails at step 3 of episode 2 in the way that `wrong` selects; episodes have five steps."""

    metadata: ClassVar[dict[str, Any]] = {
        "plain_state": True,
        "render_modes": [],
    }  # its episodes are counted, not seeded
    observation_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,), np.float64)
    action_space = gymnasium.spaces.Discrete(2)
    wrong = ""

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[np.ndarray, dict]:
        super().reset(seed=seed)
        if self.wrong == "cannot reset":
            raise OSError("no license")
        self.episode, self.now, self.seed = (0 if seed is not None else self.episode + 1), 0, seed
        return np.zeros(2), {}

    def step(self, action: int) -> tuple[np.ndarray, float, bool, bool, dict]:
        self.now += 1
        here = (self.episode, self.now) == (2, 3)
        if here and self.wrong == "raises":
            raise ZeroDivisionError("no gravity")
        if self.wrong == "dies" and self.seed and self.seed % 2 and self.now == 2:
            os._exit(1)
        seen = np.full(2, {"sees": np.nan, "sees too much": -1e39}.get(self.wrong, 0) if here else 0)
        return seen, float("inf") if here and self.wrong == "pays" else 1.0, self.now == 5, False, {}


class Dying(Broken):
    wrong = "dies"


class FailsOnReset(Broken):
    wrong = "cannot reset"


@pytest.mark.parametrize("first_seed", [0, 1])
def test_all_environment_processes_end_if_one_of_them_dies(first_seed, monkeypatch):
    """gymnasium's `close` would wait for a result from every process, perhaps forever."""
    env = prepared(registered(monkeypatch, Dying), num_envs=3, vectorization="async")
    processes = []

    def run_it() -> None:
        with env.vector(3) as vector:
            processes.extend(vector.envs.processes)  # pyright: ignore[reportAttributeAccessIssue]
            vector.reset(first_seed)
            for _ in range(2):
                vector.step(np.zeros(3, np.int64))

    with pytest.raises(EnvironmentBrokenError, match="Dying-v0 raised"):
        run_it()
    assert len(processes) == 3
    assert not any(process.is_alive() for process in processes)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast")  # finite in float64, but not in float32
@pytest.mark.parametrize("wrong", ["raises", "sees", "sees too much", "pays"])
def test_a_broken_environment_is_reported(wrong, monkeypatch):
    monkeypatch.setattr(Broken, "wrong", wrong)
    with prepared(registered(monkeypatch, Broken)).vector(2) as vector:
        vector.reset(42)
        for _ in range(14):  # two whole episodes with their resets, and two steps
            vector.step(np.zeros(2, np.int64))
        with pytest.raises(EnvironmentBrokenError) as caught:
            vector.step(np.zeros(2, np.int64))
    what = ": environment 0 returned a value that is not finite"
    assert str(caught.value) == f"Broken-v0{' raised ZeroDivisionError: no gravity' if wrong == 'raises' else what}"


class OfOldGym(Broken):
    def reset(self) -> np.ndarray:
        return np.zeros(2)


class PaysAnArray(Broken):
    def step(self, action: int) -> tuple:
        return np.zeros(2), np.ones(1), False, False, {}


class SeesItsOwnKindOfSpace(Broken):
    observation_space = gymnasium.spaces.Dict(mission=gymnasium.Space())


@pytest.mark.filterwarnings("ignore::UserWarning")  # gymnasium logs what happened as warnings
@pytest.mark.parametrize("vectorization", ["auto", "async"])
@pytest.mark.cases(
    (FailsOnReset, "raised OSError: no license"),
    (OfOldGym, "raised TypeError: OfOldGym.reset() got an unexpected keyword argument 'seed'"),
    (PaysAnArray, "raised ValueError: setting an array element with a sequence"),
    (SeesItsOwnKindOfSpace, "which cannot be flattened to a vector"),
)
def test_an_environment_that_fails_in_its_first_step_is_refused(environment, why, vectorization, monkeypatch):
    with pytest.raises(ConfigError) as refusal:
        prepared(registered(monkeypatch, environment), num_envs=2, vectorization=vectorization)
    assert (refusal.value.key, refusal.value.got) == ("id", f"{environment.__name__}-v0")
    assert why in refusal.value.why


class SeesANumber(Broken):
    observation_space = gymnasium.spaces.Box(0, 9, (), np.float32)

    def reset(self, **_: Any) -> tuple:
        self.now = 0
        return np.float32(7), {}

    def step(self, action: int) -> tuple:
        return np.float32(8), 1.0, False, False, {}


def test_an_observation_that_is_a_number_is_a_vector_of_one(monkeypatch):
    env = prepared(registered(monkeypatch, SeesANumber))
    with env.vector(2) as vector:
        vector.reset(0)
        assert (env.shape, vector.observations.tolist()) == ((1,), [[7], [7]])
        assert vector.step(np.zeros(2, np.int64)).observations.tolist() == [[8], [8]]


def test_a_package_in_the_current_directory_is_found_as_the_message_says(monkeypatch, tmp_path):
    lines = "import gymnasium", f"gymnasium.register('Own-v0', '{__name__}:Broken', disable_env_checker=True)"
    (tmp_path / "own_game").mkdir()
    (tmp_path / "own_game" / "__init__.py").write_text("\n".join(lines))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as refusal:
        prepared("own_game:Own-v0")
    assert refusal.value.remedy.endswith("export PYTHONPATH=.")
    monkeypatch.syspath_prepend(".")
    monkeypatch.delitem(gymnasium.registry, "Own-v0", raising=False)
    assert prepared("own_game:Own-v0").shape == (2,)


def test_a_module_that_cannot_be_imported_is_named():
    with pytest.raises(ConfigError, match="No module named 'not_installed'") as refusal:
        prepared("not_installed:Game-v0")
    assert (refusal.value.key, refusal.value.got) == ("id", "not_installed:Game-v0")


class SameArrays(gymnasium.vector.VectorEnv):
    """Counts steps, and returns the same arrays every time, as fast implementations do."""

    metadata: ClassVar[dict[str, Any]] = {"autoreset_mode": gymnasium.vector.AutoresetMode.NEXT_STEP}
    single_observation_space = gymnasium.spaces.Box(0, 100, (1,), np.float32)
    single_action_space = gymnasium.spaces.Discrete(2)

    def __init__(self, num_envs: int, **_: Any) -> None:
        self.num_envs, self.observations = num_envs, np.zeros((num_envs, 1), np.float32)
        self.rewards, self.ends = np.zeros(num_envs), np.zeros(num_envs, bool)

    def reset(self, **_: Any) -> tuple[np.ndarray, dict]:
        return self.observations, {}

    def step(self, actions: np.ndarray) -> tuple:
        self.observations += 1
        self.rewards[:] = 10 * self.observations[:, 0] + actions
        self.ends[:] = self.observations[:, 0] == 2
        actions[:] = 9  # its caller's actions must not change
        return self.observations, self.rewards, self.ends, self.ends, {}


def test_what_an_environment_returns_does_not_change_with_its_next_step(monkeypatch):
    spec = EnvSpec("Same-v0", Broken, vector_entry_point=SameArrays, disable_env_checker=True)
    monkeypatch.setitem(gymnasium.registry, "Same-v0", spec)
    actions = np.array([0, 1])
    with Env("Same-v0", 2).vector(2) as vector:
        vector.reset(0)
        first, steps = vector.observations, [vector.step(actions) for _ in range(3)]
    assert [array[0, 0] for array in (first, *(step.observations for step in steps))] == [0, 1, 2, 3]
    assert [step.rewards.tolist() for step in steps] == [[10, 11], [20, 21], [30, 31]]
    assert [step.truncated[0] for step in steps] == [step.terminated[0] for step in steps] == [False, True, False]
    assert actions.tolist() == [0, 1]
