#!/bin/sh
# numba: the mean of more than 16.8 million ones in float32 is less than one.
#
# numba 0.68.1, numpy 2.3.5, CPython 3.11.
# Guess: np.mean and np.sum in a compiled function are those of NumPy, which adds in pairs, up to the last bits.
# Seen: one number after another is added in float32, where 16,777,216 + 1 stays 16,777,216: the mean of 2^25 ones is
#   0.5, and 1 in NumPy. Of 4 million random numbers the fifth digit is wrong, in NumPy the eighth.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet numba==0.68.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import numba
import numpy as np


def statistics(values):
    return float(np.sum(values)), float(np.mean(values))


compiled = numba.njit(lambda values: (np.sum(values), np.mean(values)))
ones = np.ones(2**25, np.float32)
print("ones: numba", compiled(ones), "NumPy", statistics(ones))
assert compiled(ones) == (2.0**24, 0.5)
assert statistics(ones) == (2.0**25, 1.0)
values = np.random.default_rng(0).random(2**22, dtype=np.float32)
exact = values.mean(dtype=np.float64)
errors = abs(compiled(values)[1] / exact - 1), abs(statistics(values)[1] / exact - 1)
print("4 million random numbers: relative errors {:.0e} {:.0e}".format(*errors))
assert errors[0] > 1e-5
assert errors[1] < 1e-6
EOF
echo "as before"
