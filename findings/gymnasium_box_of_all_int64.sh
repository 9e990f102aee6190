#!/bin/sh
# gymnasium: a Box of all integers of 64 bits has only one sample, and one of half of them has none.
#
# gymnasium 1.4.0, numpy 2.3.5, CPython 3.11.
# Guess: `sample()` of Box(min, max, dtype=int64) is uniform, as it is of int32, or the space is refused when it is made.
# Seen: the upper bound plus one is computed in 64 bits. All 1,000 values of the sample are the lower bound, in int64 and
#   in uint64, and `contains` agrees. From 0 to the largest int64, `sample()` raises "high - low < 0". No warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet gymnasium==1.4.0 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import numpy as np
from gymnasium.spaces import Box


def sample(low, high, dtype):
    space = Box(low, high, (1000,), dtype)
    space.seed(0)
    values = space.sample()
    assert space.contains(values)
    return values


for dtype in (np.int32, np.int64, np.uint64):
    values = sample(np.iinfo(dtype).min, np.iinfo(dtype).max, dtype)
    print(dtype.__name__, "distinct values:", len(np.unique(values)), "smallest:", values.min())
    assert (len(np.unique(values)) == 1 and values[0] == np.iinfo(dtype).min) == (dtype is not np.int32)
try:
    sample(0, np.iinfo(np.int64).max, np.int64)
except ValueError as error:
    print("int64 from 0:", error)
    assert "high - low < 0" in str(error)
else:
    raise SystemExit("changed: it can be sampled")
EOF
echo "as before"
