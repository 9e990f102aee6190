"""The returns of the agents of `conf/experiment/dqn_*.yaml`, compared with those of Stable-Baselines3.

`python -m benchmarks.agents [acrobot mountaincar lunarlander] [--first-seed 7500] [--seeds 10] [--sb3-seeds 2]` trains
one agent per seed, with one thread each, and prints the mean return of 100 greedy episodes after the last update.
`--at-once` sets how many agents are trained at the same time. LunarLander needs the extra `box2d`.

The agents of Stable-Baselines3 are trained with the settings in `ZOO`. These settings come from the RL Zoo, from the
file hyperparameters/dqn.yml in https://github.com/DLR-RM/rl-baselines3-zoo. For each task, `PUBLISHED` has the return
of the DQN agent that the RL Zoo has trained and published (https://huggingface.co/sb3).
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks.measure import command, passed, result, write

PUBLISHED = {"acrobot": -72.0, "mountaincar": -101.0, "lunarlander": 154.0}
_OFTEN = {"learning_rate": 6.3e-4, "buffer_size": 50_000, "learning_starts": 0, "target_update_interval": 250}
_OFTEN |= {"train_freq": 4, "gradient_steps": -1, "exploration_fraction": 0.12, "exploration_final_eps": 0.1}
_CAR = {"learning_rate": 4e-3, "buffer_size": 10_000, "learning_starts": 1000, "target_update_interval": 600}
_CAR |= {"train_freq": 16, "gradient_steps": 8, "exploration_fraction": 0.2, "exploration_final_eps": 0.07}
ZOO: dict[str, tuple[str, int, dict[str, Any]]] = {
    "acrobot": ("Acrobot-v1", 100_000, {**_OFTEN, "gamma": 0.99}),
    "mountaincar": ("MountainCar-v0", 120_000, {**_CAR, "gamma": 0.98}),
    "lunarlander": ("LunarLander-v3", 100_000, {**_OFTEN, "gamma": 0.99}),
}
"""The environment, the number of environment steps, and the options of Stable-Baselines3, by the name of a task."""


def with_runner(task: str, seed: int) -> dict[str, Any]:
    """Train the agent of the experiment.

    Returns:
        A dict with the mean return after training (`return`), the number of environment steps (`env_steps`), and the
        duration of the command in seconds (`seconds`).
    """
    began = time.perf_counter()
    with command([f"experiment=dqn_{task}", f"seed={seed}"]) as directory:
        measured = result(directory)
    seconds = time.perf_counter() - began
    return {
        "return": measured["metrics"]["eval/return"],
        "env_steps": measured["notes"]["env_steps"],
        "seconds": seconds,
    }


def with_sb3(task: str, seed: int) -> dict[str, Any]:
    """Train an agent of Stable-Baselines3 in a new process, and return the same as `with_runner`."""
    line = [sys.executable, "-m", "benchmarks.agents", task, "--first-seed", str(seed), "--train-sb3"]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])


def train_sb3(task: str, seed: int) -> dict[str, Any]:
    """Train an agent of Stable-Baselines3 in this process."""
    import torch
    from stable_baselines3 import DQN  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.evaluation import evaluate_policy  # pyright: ignore[reportMissingImports]

    torch.set_num_threads(1)
    env_id, steps, options = ZOO[task]
    began = time.perf_counter()
    network = {"net_arch": [256, 256]}
    env = make_vec_env(env_id, seed=seed)
    agent = DQN("MlpPolicy", env, batch_size=128, policy_kwargs=network, device="cpu", seed=seed, **options)
    agent.learn(steps)
    evaluation: Any = evaluate_policy(agent, make_vec_env(env_id, seed=seed + 10**6), n_eval_episodes=100)
    return {"return": float(evaluation[0]), "env_steps": steps, "seconds": time.perf_counter() - began}


def row(task: str, who: str, agents: list[dict[str, Any]], seeds: list[int]) -> dict[str, Any]:
    """Print and return a row of the table: the mean, the standard deviation and the range of the returns."""
    returns = [each["return"] for each in agents]
    mean, seconds = statistics.fmean(returns), statistics.median(each["seconds"] for each in agents)
    spread = statistics.stdev(returns) if len(returns) > 1 else 0.0
    verdict = "reached" if mean >= PUBLISHED[task] else "MISSED"
    text = f"{mean:8.1f} ± {spread:.1f} ({min(returns):.1f} – {max(returns):.1f}), {len(seeds)} seeds, {seconds:.0f} s"
    print(f"  {task:<12} {who:<18} {text}; published {PUBLISHED[task]:.0f}: {verdict}", flush=True)
    steps = agents[0]["env_steps"]
    return {"task": task, "who": who, "env_steps": steps, "seeds": seeds, "returns": returns, "seconds": seconds}


def main() -> None:
    """Train the agents, and write a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tasks", nargs="*", choices=[*ZOO, []], help="default: all")
    parser.add_argument("--first-seed", type=int, default=7500)
    parser.add_argument("--seeds", type=int, default=10, help="number of seeds of the runner's agents")
    parser.add_argument("--sb3-seeds", type=int, default=2, help="number of seeds of Stable-Baselines3")
    parser.add_argument("--at-once", type=int, default=2, help="number of agents that are trained at the same time")
    parser.add_argument("--train-sb3", action="store_true", help="train one agent of Stable-Baselines3, and print it")
    arguments = parser.parse_args()
    first, tasks = arguments.first_seed, arguments.tasks or list(ZOO)
    if arguments.train_sb3:
        print(json.dumps(train_sb3(tasks[0], first)))
        return
    rows = []
    with ThreadPoolExecutor(arguments.at_once) as pool:
        for task in tasks:
            for who, train, count in (
                ("runner", with_runner, arguments.seeds),
                ("Stable-Baselines3", with_sb3, arguments.sb3_seeds),
            ):
                seeds = list(range(first, first + count))
                if seeds:
                    rows.append(row(task, who, list(pool.map(partial(train, task), seeds)), seeds))
    table = {"title": "mean return of 100 greedy episodes after training", "rows": rows}
    write("agents", [table], [*tasks, *passed(arguments, "tasks")])


if __name__ == "__main__":
    main()
