#!/bin/sh
# kornia, segmentation-models-pytorch: pixels that are ignored have no loss, but count in its mean.
#
# kornia 0.9.0, segmentation-models-pytorch 0.6.0, torch 2.14.1, CPython 3.11.
# Guess: with ignore_index the mean is over the pixels that are left, as of torch's cross_entropy, and the gradients of
#   those do not depend on how many others are ignored.
# Seen: SoftCrossEntropyLoss, SoftBCEWithLogitsLoss and kornia's focal_loss divide by all pixels: with 9 of 10 ignored
#   the loss is a tenth. FocalLoss of segmentation-models-pytorch divides by those that are left.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet kornia==0.9.0 segmentation-models-pytorch==0.6.0 torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import torch
from kornia.losses import focal_loss
from segmentation_models_pytorch.losses import FocalLoss, SoftBCEWithLogitsLoss, SoftCrossEntropyLoss
from torch.nn.functional import binary_cross_entropy_with_logits, cross_entropy

torch.manual_seed(0)
outputs, targets = torch.randn(1, 3, 10, 10), torch.randint(0, 3, (1, 10, 10))
targets[:, 1:] = 255  # all rows but the first are ignored
row, labels = outputs[:, :, :1], targets[:, :1]
of_one, one = outputs[:, :1], (targets[:, None] > 0).float()
one[:, :, 1:] = 255
pairs = {
    "SoftCrossEntropyLoss": (
        SoftCrossEntropyLoss(smooth_factor=0.0, ignore_index=255)(outputs, targets),
        cross_entropy(row, labels),
    ),
    "SoftBCEWithLogitsLoss": (
        SoftBCEWithLogitsLoss(ignore_index=255)(of_one, one),
        binary_cross_entropy_with_logits(of_one[:, :, :1], one[:, :, :1]),
    ),
    "kornia's focal_loss": (
        focal_loss(outputs, targets, 0.5, 2.0, "mean", ignore_index=255),
        focal_loss(row, labels, 0.5, 2.0, "mean"),
    ),
    "FocalLoss": (
        FocalLoss("multiclass", ignore_index=255)(outputs, targets),
        FocalLoss("multiclass")(row, labels),
    ),
    "torch's cross_entropy": (cross_entropy(outputs, targets, ignore_index=255), cross_entropy(row, labels)),
}
ratios = {name: (ignoring / alone).item() for name, (ignoring, alone) in pairs.items()}
for name, ratio in ratios.items():
    print(f"{name}: {ratio:.3f} of the loss of the pixels that are left")
for name in list(pairs)[:3]:
    assert abs(ratios[name] - 0.1) < 1e-3, f"changed: {name}"
for name in list(pairs)[3:]:
    assert abs(ratios[name] - 1) < 1e-3
EOF
echo "as before"
