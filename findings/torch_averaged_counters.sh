#!/bin/sh
# torch: AveragedModel(use_buffers=True) leaves counters at their first value, and so batch normalization that counts.
#
# torch 2.14.1, CPython 3.11.
# Guess: integer buffers, of which there is no mean, are copied; or their mean is rounded: 10 or 5 after ten batches.
# Seen: the mean is updated in integers, where each of its steps is rounded to 0: num_batches_tracked is 1 after ten
#   batches, of plain averages and of an EMA. BatchNorm1d(momentum=None) divides by it: trained on from the averaged
#   network, its next batch counts as one of two, not of eleven.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

for name, options in {"mean": {}, "EMA": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)}}.items():
    torch.manual_seed(0)
    network = torch.nn.BatchNorm1d(1, momentum=None, affine=False)
    averaged = AveragedModel(network, use_buffers=True, **options)
    for _ in range(10):
        network(torch.randn(1000, 1))
        averaged.update_parameters(network)
    counts = int(network.num_batches_tracked), int(averaged.module.num_batches_tracked)
    averaged.module.train()(10 + torch.randn(1000, 1))
    network(10 + torch.randn(1000, 1))
    means = round(float(network.running_mean), 1), round(float(averaged.module.running_mean), 1)
    print(f"{name}: batches counted {counts}, mean after one batch around 10 {means}")
    assert counts == (10, 1)
    assert means == (0.9, 5.0)
EOF
echo "as before"
