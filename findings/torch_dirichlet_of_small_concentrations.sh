#!/bin/sh
# torch: of a Dirichlet or Beta distribution of small concentrations, a quarter of the samples is the middle.
#
# torch 2.14.1, numpy 2.3.5, CPython 3.11.
# Guess: with concentrations of 0.001 nearly every sample is (1, 0) or (0, 1), but for rounding, as NumPy's are.
# Seen: 24 % of torch's samples are (0.5, 0.5), in float32 and in float64: both Gamma variables are smaller than the
#   smallest number, are raised to it, and are equal then. The variance is 0.19 where it should be 0.25; with three
#   classes 12 % are thirds. Of 0.01 and more, the samples are right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import numpy as np
import torch

torch.manual_seed(0)


def share_of_middle(samples: np.ndarray) -> float:
    return float((np.abs(samples - 1 / samples.shape[-1]) < 0.001).all(-1).mean())


for dtype in (torch.float32, torch.float64):
    for count in (2, 3):
        concentration = torch.full((count,), 0.001, dtype=dtype)
        ours = torch.distributions.Dirichlet(concentration).sample((20000,)).numpy()
        numpys = np.random.default_rng(0).dirichlet([0.001] * count, 20000)
        print(dtype, count, "classes, the middle:", share_of_middle(ours), "NumPy:", share_of_middle(numpys))
        assert share_of_middle(numpys) < 0.001
        assert share_of_middle(ours) > 0.08, "changed: the middle is rare"
    beta = torch.distributions.Beta(concentration[0], concentration[0]).sample((20000,))
    print(dtype, "variance of Beta:", beta.var().item())
    assert beta.var() < 0.2, "changed: the variance is that of the distribution, 0.2495"
    right = torch.distributions.Dirichlet(torch.full((2,), 0.01, dtype=dtype)).sample((20000,)).numpy()
    assert share_of_middle(right) < 0.001
EOF
echo "as before"
