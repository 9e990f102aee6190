"""The speed of DQN on Atari at the settings of CleanRL's dqn_atari.py, compared with a plain loop and with SB3.

`python -m benchmarks.pixels [--repeats 3] [--steps 1200]`. The settings are those of Huang et al. (2022): Pong without
sticky actions, stacks of four gray frames of 84×84, the network of Mnih et al. (2015), batch size 32, an update per
four environment steps, Adam, 1-step returns without double Q-learning. The rate counts environment steps after the
first 400, which are random. The plain loop is written as CleanRL's: one environment with gymnasium's wrappers, and a
replay buffer of whole stacks; Stable-Baselines3 has the Huber loss. Both need OpenCV. The runner steps four
environments together. Each contender has one thread.
"""

import copy
import statistics
import time

import numpy as np
import torch
from torch import nn

from benchmarks.measure import Contenders, command, measured, parser, passed, points, report, write

WARM_UP, BATCH, SIZE = 400, 32, 10_000
GAME = "ALE/Pong-v5"
GOALS = {("runner", "plain"): 1.5, ("runner", "sb3"): 1.5}


def plain(steps: int) -> float:
    """Return the environment steps per second of a loop without a framework."""
    import ale_py  # noqa: F401  # pyright: ignore[reportMissingImports]  # registers the games
    import gymnasium
    from gymnasium.wrappers import AtariPreprocessing, FrameStackObservation

    options = {"frameskip": 1, "repeat_action_probability": 0.0}
    env = FrameStackObservation(AtariPreprocessing(gymnasium.make(GAME, **options), terminal_on_life_loss=True), 4)
    num_actions, random = int(env.action_space.n), np.random.default_rng(0)  # pyright: ignore
    layers = [nn.Conv2d(4, 32, 8, 4), nn.ReLU(), nn.Conv2d(32, 64, 4, 2), nn.ReLU(), nn.Conv2d(64, 64, 3), nn.ReLU()]
    online = nn.Sequential(*layers, nn.Flatten(), nn.Linear(3136, 512), nn.ReLU(), nn.Linear(512, num_actions))
    target, optimizer = copy.deepcopy(online), torch.optim.Adam(online.parameters(), lr=1e-4)
    seen, following = (np.zeros((SIZE, 4, 84, 84), np.uint8) for _ in range(2))
    actions, rewards, over = np.zeros(SIZE, np.int64), np.zeros(SIZE, np.float32), np.zeros(SIZE, np.float32)
    (observation, _), began = env.reset(seed=0), 0.0
    for step in range(steps):
        if step == WARM_UP:
            began = time.perf_counter()
        if random.random() < 0.1 or step < WARM_UP:
            action = int(random.integers(num_actions))
        else:
            with torch.no_grad():
                action = int(online(torch.from_numpy(observation)[None].float() / 255).argmax())
        after, reward, terminated, truncated, _ = env.step(action)
        seen[step], following[step], actions[step] = observation, after, action
        rewards[step], over[step] = np.sign(float(reward)), terminated
        observation = env.reset()[0] if terminated or truncated else after
        if step >= WARM_UP and step % 4 == 0:
            drawn = random.integers(step, size=BATCH)
            with torch.no_grad():
                best = target(torch.from_numpy(following[drawn]).float() / 255).amax(1)
                wanted = torch.from_numpy(rewards[drawn]) + 0.99 * best * torch.from_numpy(1 - over[drawn])
            values = online(torch.from_numpy(seen[drawn]).float() / 255)
            chosen = values.gather(1, torch.from_numpy(actions[drawn])[:, None])[:, 0]
            loss = nn.functional.mse_loss(chosen, wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return (steps - WARM_UP) / (time.perf_counter() - began)


def sb3(steps: int) -> float:
    """Return the environment steps per second of Stable-Baselines3, with its own wrappers."""
    import ale_py  # noqa: F401  # pyright: ignore[reportMissingImports]  # registers the games
    from stable_baselines3 import DQN  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.env_util import make_atari_env  # pyright: ignore[reportMissingImports]
    from stable_baselines3.common.vec_env import VecFrameStack  # pyright: ignore[reportMissingImports]

    options = {"frameskip": 1, "repeat_action_probability": 0.0}
    env = VecFrameStack(make_atari_env(GAME, env_kwargs=options), 4)
    times = {"learning_rate": 1e-4, "buffer_size": SIZE, "learning_starts": WARM_UP, "train_freq": 4}
    agent = DQN("CnnPolicy", env, batch_size=BATCH, target_update_interval=1000, device="cpu", **times)
    began: list[float] = []

    def note_start(variables: dict, _: dict) -> bool:
        if variables["self"].num_timesteps == WARM_UP:
            began.append(time.perf_counter())
        return True

    agent.learn(steps, callback=note_start)
    return (steps - WARM_UP) / (time.perf_counter() - began[0])


def with_runner(steps: int) -> float:
    """Return the median of the environment steps per second that the runner logs."""
    options = ["experiment=dqn_atari", f"env.id={GAME}", f"workload.env_steps={steps}", f"workload.warm_up={WARM_UP}"]
    options += [f"workload.replay_size={SIZE}", "workload.eval_episodes=1", "env.max_episode_steps=100", "log_every=50"]
    with command(options) as directory:
        return statistics.median(rate for _, rate in points(directory, "time/env_steps_per_second"))


CONTENDERS: Contenders = {"plain": plain, "sb3": sb3, "runner": with_runner}


def main() -> None:
    """Measure all contenders, or with `--run` a single one in this process."""
    arguments = parser(__doc__, CONTENDERS, repeats=3, steps=1200).parse_args()
    torch.set_num_threads(1)
    rates = measured("pixels", CONTENDERS, arguments, arguments.steps)
    table = report("DQN on Atari, CleanRL's settings, 1 thread", "environment steps/s", rates, GOALS)
    write("pixels", [table], passed(arguments))


if __name__ == "__main__":
    main()
