#!/bin/sh
# torch: compiled for a CPU, the remainder of a large number can be wrong in its first digit, and as large as the divisor.
#
# torch 2.14.1, CPython 3.11, with a C++ compiler.
# Guess: torch.compile gives x % y up to rounding, as it does x / y and torch.fmod, which has no error at all.
# Seen: it computes x - floor(x / y) * y in float32, whose error grows with x: of an angle of 10 million, modulo two pi,
#   2.0 for 2.43, of 1 million 5.875 for 5.898; 100,000 % 0.1 is 0.1016, beyond the divisor. fmod stays exact.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import math

import torch

torch.set_num_threads(1)


def wrapped(angles):
    return torch.remainder(angles, 2 * math.pi), angles % 0.1, torch.fmod(angles, 2 * math.pi)


angles = torch.tensor([1e1, 1e3, 1e5, 1e6, 1e7])
eager, compiled = wrapped(angles), torch.compile(wrapped)(angles)
for name, here, there in zip(("% 2 pi", "% 0.1", "fmod 2 pi"), eager, compiled, strict=True):
    print(name, [f"{value:.4f}" for value in here.tolist()], "compiled", [f"{value:.4f}" for value in there.tolist()])
double = angles.double() % torch.tensor(2 * math.pi).float().double()
assert torch.allclose(eager[0].double(), double, atol=1e-6)
assert (compiled[0] - eager[0]).abs().max() > 0.1, "changed: the remainder is right"
assert compiled[1].max() > 0.1 >= eager[1].max(), "changed: the remainder is below the divisor"
assert torch.equal(compiled[2], eager[2])
EOF
echo "as before"
