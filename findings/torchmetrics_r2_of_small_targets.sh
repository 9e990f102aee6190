#!/bin/sh
# torchmetrics: R2 of targets with a standard deviation below about 0.001 is 1.0, or 0.0, whatever is predicted.
#
# torchmetrics 1.9.0, torch 2.14.1, scikit-learn 1.9.1, CPython 3.11.
# Guess: R2 has no unit: of metres and of millimetres it is the same number, but for rounding. Only targets that are all
#   equal are a special case.
# Seen: sums of squares are taken for zero below an absolute 1e-4. With 50 targets of standard deviation 1e-4, and
#   predictions that have nothing to do with them, r2_score is 1.0, the best there is, where scikit-learn says -1.2; with
#   1e-3 it is 0.0 for -0.6. In float64, too. The more samples, the smaller the deviation has to be. explained_variance,
#   relative_squared_error and the coefficients of correlation have no such limit.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torchmetrics==1.9.0 torch==2.14.1 numpy==2.3.5 scikit-learn==1.9.1
"$folder/bin/python" - <<'EOF'
import sklearn.metrics
import torch
from torchmetrics.functional import explained_variance, r2_score

torch.manual_seed(0)
for scale, expected in ((1.0, None), (1e-2, None), (1e-3, 0.0), (1e-4, 1.0)):
    targets, predictions = scale * torch.randn(50, dtype=torch.double), scale * torch.randn(50, dtype=torch.double)
    found, right = r2_score(predictions, targets).item(), sklearn.metrics.r2_score(targets, predictions)
    explained = explained_variance(predictions, targets).item()
    print(f"standard deviation {scale}: R2 {found:.3f}, scikit-learn {right:.3f}")
    assert abs(explained - sklearn.metrics.explained_variance_score(targets, predictions)) < 1e-6
    assert right < -0.3
    assert abs(found - (right if expected is None else expected)) < 1e-6, "changed: R2 of small targets"
EOF
echo "as before"
