#!/bin/sh
# optax: with inject_hyperparams, the options of Adam have the type of the weights, and in bfloat16 its first step is NaN.
#
# optax 0.2.8, jax 0.10.2, CPython 3.11.
# Guess: the wrapper that lets the learning rate be read and changed leaves the arithmetic as it is; numbers are float32.
# Seen: each number becomes an array of the type of the first weight. In bfloat16, b2=0.999 is 1, of which the correction
#   of the bias is a division by 0: all updates are NaN. The learning rate 0.001 is 0.000999451, b1=0.9 is 0.898438.
#   adamw by itself, and inject_hyperparams(..., hyperparam_dtype=float32), step by -0.001. No warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet optax==0.2.8 jax==0.10.2 numpy==2.3.5
JAX_PLATFORMS=cpu "$folder/bin/python" - <<'EOF'
import jax.numpy as jnp
import optax

weights, gradients = jnp.ones(1, jnp.bfloat16), jnp.full(1, 0.5, jnp.bfloat16)


def first_step(optimizer):
    state = optimizer.init(weights)
    return float(optimizer.update(gradients, state, weights)[0][0]), state


injected = optax.inject_hyperparams(optax.adamw)
plain, _ = first_step(optax.adamw(1e-3))
nan, state = first_step(injected(1e-3))
right, _ = first_step(optax.inject_hyperparams(optax.adamw, hyperparam_dtype=jnp.float32)(1e-3))
options = {name: float(value) for name, value in state.hyperparams.items()}
print("plain", plain, "injected", nan, "injected as float32", right)
print({name: options[name] for name in ("learning_rate", "b1", "b2")})
assert nan != nan
assert abs(plain + 1e-3) < 1e-4
assert abs(right + 1e-3) < 1e-4
assert (options["b1"], options["b2"]) == (0.8984375, 1.0)
EOF
echo "as before"
