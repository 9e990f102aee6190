#!/bin/sh
# torchmetrics: whether numbers are logits is decided for each batch, so that an AUROC depends on the batch size.
#
# torchmetrics 1.9.0, torch 2.14.1, CPython 3.11.
# Guess: a metric that is given logits takes the sigmoid of all of them, or of none.
# Seen: it takes that of a batch in which a number is outside of [0, 1]. A batch in which, by chance, all logits are
#   inside counts as probabilities: a logit of 0.3 is a negative there, and is below one of -0.2 in another batch, whose
#   sigmoid is 0.45. In one batch accuracy and AUROC are 1, in two batches 0.5. No warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torchmetrics==1.9.0 torch==2.14.1 numpy==2.3.5
"$folder/bin/python" -W error - <<'EOF'
import torch
from torchmetrics.classification import BinaryAccuracy, BinaryAUROC, MultilabelAccuracy

LOGITS, TARGETS = torch.tensor([0.3, 0.4, -0.2, -3.0]), torch.tensor([1, 1, 0, 0])
METRICS = {
    "accuracy": (BinaryAccuracy, LOGITS, TARGETS),
    "AUROC": (BinaryAUROC, LOGITS, TARGETS),
    "accuracy of two labels": (lambda: MultilabelAccuracy(num_labels=2), LOGITS[:, None].expand(4, 2), TARGETS[:, None].expand(4, 2)),
}
for name, (make, logits, targets) in METRICS.items():
    found = []
    for size in (4, 2):
        metric = make()
        for batch in zip(logits.split(size), targets.split(size), strict=True):
            metric.update(*batch)
        found.append(float(metric.compute()))
    print(f"{name}: {found[0]} in one batch, {found[1]} in two")
    assert found == [1.0, 0.5]
EOF
echo "as before"
