#!/bin/sh
# gymnasium: the four actions of tabular/CliffWalking-v0 are a box of one integer, and an integer is refused.
#
# gymnasium 1.4.0, jax 0.10.2, flax 0.12.8, CPython 3.11.
# Guess: as the same environment without JAX, CliffWalking-v1, and as tabular/Blackjack-v0, it has Discrete actions.
# Seen: Box(0, 3, (1,), int32); step(1) raises IndexError, step([1]) walks. The 192 transitions are the same in both. Agents
#   with a value for each action (deep Q-learning, action masks) take it for a continuous one.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet gymnasium==1.4.0 jax==0.10.2 flax==0.12.8 numpy==2.3.5
JAX_PLATFORMS=cpu "$folder/bin/python" -W ignore - <<'EOF'
import gymnasium
import jax
import jax.numpy as jnp
from gymnasium.envs.tabular.cliffwalking import CliffWalkingFunctional

plain, tabular, cards = map(gymnasium.make, ("CliffWalking-v1", "tabular/CliffWalking-v0", "tabular/Blackjack-v0"))
print(plain.action_space, cards.action_space, tabular.action_space)
assert [str(env.action_space) for env in (plain, cards, tabular)] == ["Discrete(4)", "Discrete(2)", "Box(0, 3, (1,), int32)"]
plain.reset(seed=0)
tabular.reset(seed=0)
plain.step(1)
tabular.step(jnp.array([1]))
try:
    tabular.step(1)
except IndexError as error:
    print("step(1):", error)
else:
    raise SystemExit("changed: an integer is an action")
functions, key, differ = CliffWalkingFunctional(), jax.random.key(0), 0
start = functions.initial(key)
for place in range(48):
    for action in range(4):
        [(_, following, reward, ended)] = plain.unwrapped.P[place][action]
        state, taken = start._replace(player_position=jnp.array([place // 12, place % 12])), jnp.array([action])
        then = functions.transition(state, taken, key)
        found = int(functions.observation(then, key)[0]), float(functions.reward(state, taken, then, key)), bool(functions.terminal(then, key))
        differ += (following, reward, ended) != found
print("transitions that differ:", differ)
assert differ == 0
EOF
echo "as before"
