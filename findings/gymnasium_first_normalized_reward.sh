#!/bin/sh
# gymnasium: NormalizeReward makes the first reward of a training seventy times as large, not of unit variance.
#
# gymnasium 1.4.0, numpy 2.3.5, CPython 3.11.
# Guess: the running variance begins at one, so the first reward of CartPole, 1, becomes about 1, and later ones shrink.
# Seen: the variance counts as one ten-thousandth of a sample. The first return, whose variance is 0, all but replaces
#   it, so that the first reward is divided by 0.014: 70.71, 2.02, 1.24, 0.91, 0.73, 0.60; MountainCar -70.71.
#   With four environments side by side it is 141.41. The first target of an agent has this size.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet gymnasium==1.4.0 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import gymnasium as gym
import numpy as np
from gymnasium.wrappers import NormalizeReward
from gymnasium.wrappers.vector import NormalizeReward as VectorNormalizeReward


def rewards(name, count):
    environment = NormalizeReward(gym.make(name))
    environment.reset(seed=0)
    return [round(float(environment.step(0)[1]), 2) for _ in range(count)]


found = rewards("CartPole-v1", 6)
print("CartPole", found)
assert found == [70.71, 2.02, 1.24, 0.91, 0.73, 0.6]
assert rewards("MountainCar-v0", 1) == [-70.71]
environments = VectorNormalizeReward(gym.make_vec("CartPole-v1", num_envs=4, vectorization_mode="sync"))
environments.reset(seed=0)
found = environments.step(np.zeros(4, int))[1].round(2).tolist()
print("four of them", found)
assert found == [141.41] * 4
EOF
echo "as before"
