#!/bin/sh
# torch: ReduceLROnPlateau never sees a plateau in a negative metric, and takes values that got worse for improvements.
#
# torch 2.14.1, CPython 3.11.
# Guess: with the defaults (threshold 1e-4, relative) a loss that stays the same is a plateau, whatever its sign: the
#   threshold is a part of its size.
# Seen: the best value is multiplied by 1 - 1e-4, which moves a negative one towards zero. A loss of -1 (a log density,
#   an ELBO) that stays -1, and one that rises from -1 by 5e-5 at each evaluation, are improvements each time, and the
#   learning rate stays as it is; a loss of +1 that stays is a plateau. threshold_mode="abs" is right for both signs.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau


def last_rate(losses, **options):
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule = ReduceLROnPlateau(optimizer, patience=3, **options)
    for loss in losses:
        schedule.step(loss)
    return optimizer.param_groups[0]["lr"]


CASES = {
    "+1, as it was": ([1.0] * 8, {}, 0.1),
    "-1, as it was": ([-1.0] * 8, {}, 1.0),
    "-1, and worse": ([-1.0 + 5e-5 * number for number in range(8)], {}, 1.0),
    "-1, as it was, mode=max": ([-1.0] * 8, {"mode": "max"}, 1.0),
    "-1, as it was, absolute": ([-1.0] * 8, {"threshold_mode": "abs"}, 0.1),
}
for name, (losses, options, expected) in CASES.items():
    rate = last_rate(losses, **options)
    print(f"{name}: learning rate {rate:g}")
    assert rate == expected
EOF
echo "as before"
