#!/bin/sh
# segmentation-models-pytorch: the normalized focal loss falls with the number of pixels.
#
# segmentation-models-pytorch 0.6.0, torch 2.14.1, CPython 3.11.
# Guess: FocalLoss(normalized=True) is the sum of weighted losses divided by the sum of weights, a mean that is the same
#   for an image and for the image tiled twice.
# Seen: the weighted losses are divided by the sum of weights, and then averaged over the pixels, too. With the default
#   reduction="mean" the loss of an image tiled 2 x 2 is a quarter, 4 x 4 a sixteenth; so is its gradient, against any
#   other loss that is added to it. Batches of 16 samples have a sixteenth of the loss of one. reduction="sum" is what
#   the mean of the paper is.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet segmentation-models-pytorch==0.6.0 torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import torch
from segmentation_models_pytorch.losses import FocalLoss

torch.manual_seed(0)
outputs, targets = torch.randn(1, 1, 8, 8), torch.randint(0, 2, (1, 1, 8, 8))
found = {}
for name, loss in {
    "normalized": FocalLoss("binary", normalized=True),
    "normalized, sum": FocalLoss("binary", normalized=True, reduction="sum"),
    "plain": FocalLoss("binary"),
}.items():
    found[name] = [loss(outputs.repeat(1, 1, n, n), targets.repeat(1, 1, n, n)).item() for n in (1, 2, 4)]
    print(f"{name}: tiled 1 x 1, 2 x 2, 4 x 4:", *(f"{value:.6f}" for value in found[name]))
once, four, sixteen = found["normalized"]
assert abs(once / four - 4) < 1e-3 and abs(once / sixteen - 16) < 1e-3, "changed: the loss is one of the image"
for name in ("normalized, sum", "plain"):
    assert max(found[name]) - min(found[name]) < 1e-5
EOF
echo "as before"
