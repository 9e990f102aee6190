"""The speed of DQN: compared with Stable-Baselines3 at equal settings, and in one and two processes.

`python -m benchmarks.dqn [--repeats 5] [--steps 50000] [--cleanrl DIRECTORY]`. The settings are those of CleanRL's
dqn.py (Huang et al., 2022): CartPole-v1, a 4-120-84-2 network, batch size 128, one update per ten environment steps
after the first 10,000 steps, a replay buffer of 10,000 transitions, Adam with learning rate 2.5e-4, a target network
copied every 500 environment steps, 1-step returns without double Q-learning, the mean squared error, and ε from 1 to
0.05 over half of the run. Stable-Baselines3 has only the Huber loss. By default, each contender uses one thread. The
runner logs every 100 updates and shows its progress. Stable-Baselines3 logs every 100 episodes.

CleanRL has one environment. The others are measured with several numbers of environments, with as many updates per
environment step: with ten environments, one update follows each step in all of them, and with fifty, five updates. To
check that the runner learns the same, the mean length of all episodes of the training is printed beside each rate;
compare it for several seeds, with 500,000 environment steps as CleanRL has them by default:

    python -m benchmarks.dqn --run "runner, fifty environments" --steps 500000 --seed 1

With `--cleanrl`, CleanRL's own dqn.py is measured, too. It needs gymnasium 0.29, which is installed in a separate
directory, so that all contenders use the same torch and numpy:

    git clone https://github.com/vwxyzjn/cleanrl && cd cleanrl
    python -m pip install --target packages gymnasium==0.29.1 tyro && rm -r packages/numpy*

The parallel modes are measured with the defaults of `workload=dqn` and one thread per process; the rate counts the
environment steps of all processes.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch

from benchmarks import measure

CLEANRL_GOALS = {("compiled", "cleanrl"): 3.0, ("compiled, fifty environments", "cleanrl"): 5.0}
GOALS = {("runner", "sb3"): 3.0, ("runner", "sb3, ten environments"): 1.0}
GOALS |= {("runner, fifty environments", "sb3"): 3.0}
MODE_GOALS = {("hogwild, two", "one"): 1.6}


def sb3(steps: int, seed: int, num_envs: int = 1) -> float:
    """Return environment steps per second of Stable-Baselines3 with its vectorized environments and TensorBoard."""
    from stable_baselines3 import DQN  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.env_util import make_vec_env  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as root:
        agent = DQN(
            "MlpPolicy",
            make_vec_env("CartPole-v1", n_envs=num_envs),
            learning_rate=2.5e-4,
            buffer_size=10_000,
            learning_starts=10_000,
            batch_size=128,
            tau=1.0,
            gamma=0.99,
            train_freq=10 // num_envs,  # in vectorized steps
            gradient_steps=1,
            target_update_interval=500,
            exploration_fraction=0.5,
            exploration_final_eps=0.05,
            policy_kwargs={"net_arch": [120, 84]},
            tensorboard_log=root,
            device="cpu",
            seed=seed,
        )
        began = time.perf_counter()
        agent.learn(steps, log_interval=100)
        return steps / (time.perf_counter() - began)


def cleanrl(steps: int, seed: int, checkout: Path) -> float:
    """Return the environment steps per second that CleanRL's dqn.py prints when it runs with its own settings."""
    paths = os.pathsep.join(map(str, (checkout / "packages", checkout)))
    line = [sys.executable, str(checkout / "cleanrl" / "dqn.py"), "--total-timesteps", str(steps)]
    line += ["--seed", str(seed)]
    variables = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    with tempfile.TemporaryDirectory() as scratch:  # it logs to the current directory
        done = subprocess.run(line, check=True, capture_output=True, text=True, env=variables, cwd=scratch)
    _print_length(steps, done.stdout.count("episodic_return="))
    return float([line for line in done.stdout.splitlines() if line.startswith("SPS:")][-1].removeprefix("SPS:"))


def _print_length(steps: int, num_episodes: int) -> None:
    measure.print_value("mean episode", steps / num_episodes)


def with_runner(steps: int, seed: int = 0, num_envs: int = 10, compiled: str = "false") -> float:
    """Return environment steps per second of the training loop, with compilation, logs, display and checkpoints."""
    from runner import training
    from runner.commands.train import main

    options = ["workload=dqn", "model.hidden=[120,84]", "batch_size=128", "optimizer.lr=2.5e-4", "schedule=constant"]
    options += [f"env.num_envs={num_envs}", f"workload.env_steps={steps}", "workload.warm_up=10000"]
    options += ["workload.replay_ratio=0.1", "workload.replay_size=10000"]
    options += ["workload.n_step=1", "workload.double=false", "workload.target_tau=1"]
    options += ["workload.target_every=50", "workload.epsilon_fraction=0.5", "workload.epsilon_final=0.05"]
    options += ["workload.td_loss=mse", "workload.clip_targets=false"]
    options += ["log_every=100", "eval_every=0", "device=cpu", f"save_every={steps // 20}", f"compile={compiled}"]
    times: list[float] = []
    loop, evaluate = training.loop, training.evaluate

    def timed_loop(*arguments) -> str:
        times.append(time.perf_counter())
        return loop(*arguments)

    def timed_evaluate(*arguments) -> bool:  # after the last step
        times.append(time.perf_counter())
        return evaluate(*arguments)

    training.loop, training.evaluate = timed_loop, timed_evaluate
    with tempfile.TemporaryDirectory() as root:
        options += [f"seed={seed}", f"device.threads={torch.get_num_threads()}", f"output_root={root}", "name=bench"]
        sys.argv = ["runner", *options]
        if main():
            raise SystemExit(1)
        (directory,) = Path(root, "bench").iterdir()
        _print_length(steps, measure.result(directory)["notes"]["episodes"])
        rates = [rate for _, rate in measure.points(directory, "time/env_steps_per_second")]
        measure.print_value("median of the logged rates, environment steps/s", statistics.median(rates))
    start, end = times
    return steps / (end - start)


def in_mode(options: Sequence[str], steps: int, seed: int) -> float:
    """Train a run with `options`, and return the median of its logged environment steps per second.

    The time that the run spends on logging, evaluating and saving does not count in the logged values.
    """
    line = ["workload=dqn", f"workload.env_steps={steps}", "workload.eval_episodes=1", f"seed={seed}", *options]
    with measure.command([*line, "log_every=200"]) as directory:
        return statistics.median(rate for _, rate in measure.points(directory, "time/env_steps_per_second"))


CONTENDERS: measure.Contenders = {
    "sb3": sb3,
    "sb3, ten environments": partial(sb3, num_envs=10),
    "runner": with_runner,
    "runner, fifty environments": partial(with_runner, num_envs=50),
    "compiled": partial(with_runner, compiled="step"),
    "compiled, fifty environments": partial(with_runner, num_envs=50, compiled="step"),
}
MODES: measure.Contenders = {
    "one": partial(in_mode, ["parallel=single"]),
    "ddp, two": partial(in_mode, ["parallel=ddp"]),
    "hogwild, two": partial(in_mode, ["parallel=hogwild"]),
}


def main() -> None:
    """Measure all contenders, or with `--run` a single one in this process."""
    options = measure.parser(
        __doc__, {**CONTENDERS, **MODES, "cleanrl": cleanrl}, repeats=5, steps=50_000, threads=1, seed=0
    )
    options.add_argument("--cleanrl", type=Path, metavar="DIRECTORY", help="a checkout of CleanRL, prepared as above")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    contenders, goals = dict(CONTENDERS), GOALS
    if arguments.cleanrl:
        arguments.cleanrl = arguments.cleanrl.resolve()
        contenders = {"cleanrl": partial(cleanrl, checkout=arguments.cleanrl), **contenders}
        goals = CLEANRL_GOALS | GOALS
    if arguments.run:
        print({**contenders, **MODES}[arguments.run](arguments.steps, arguments.seed))
        return
    words = measure.passed(arguments, "repeats")
    title, unit = f"DQN on CartPole-v1, {arguments.threads} thread(s)", "environment steps/s"
    tables = [
        measure.report(
            f"{title}{kind}", unit, measure.interleave("benchmarks.dqn", list(group), arguments.repeats, words), wanted
        )
        for kind, group, wanted in ((", CleanRL's settings", contenders, goals), (" a process", MODES, MODE_GOALS))
    ]
    shown = ["--cleanrl=DIRECTORY" if word.startswith("--cleanrl") else word for word in measure.passed(arguments)]
    measure.write("dqn", tables, shown)


if __name__ == "__main__":
    main()
