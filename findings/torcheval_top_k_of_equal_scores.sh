#!/bin/sh
# torcheval: a network that gives all classes the same score, or NaN, has a top-2 accuracy of 1.0.
#
# torcheval 0.0.7, torch 2.14.1, scikit-learn 1.9.1, CPython 3.11.
# Guess: k classes of the scores are chosen, so that equal scores are right in about k of 5 cases, as in torchmetrics
#   and scikit-learn; scores that are NaN are an error, NaN, or no better than that.
# Seen: what counts is that fewer than k scores are larger. All 200 samples are right with k=2, equal scores or NaN, and
#   so hit_rate and reciprocal_rank are 1.0; with k=1, for which argmax is taken, the accuracy is about 1/5. Outputs
#   that saturate (softmax in float16, clipped logits, rounded scores) are counted as right in the same way.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torcheval==0.0.7 torch==2.14.1 numpy==2.3.5 scikit-learn==1.9.1
"$folder/bin/python" - <<'EOF'
import torch
from sklearn.metrics import top_k_accuracy_score
from torcheval.metrics.functional import hit_rate, multiclass_accuracy, reciprocal_rank

torch.manual_seed(0)
targets = torch.randint(0, 5, (200,))
for name, value in {"equal": 0.0, "NaN": torch.nan}.items():
    scores = torch.full((200, 5), value)
    top = {k: multiclass_accuracy(scores, targets, num_classes=5, k=k).item() for k in (1, 2)}
    ranks = [f(scores, targets).mean().item() for f in (lambda x, y: hit_rate(x, y, k=1), reciprocal_rank)]
    print(name, "top-1 and top-2 accuracy:", top, "hit rate and reciprocal rank:", ranks)
    assert 0.1 < top[1] < 0.3
    assert top[2] == 1, "changed: equal scores, or NaN, are not all right"
    assert ranks == [1, 1], "changed: equal scores, or NaN, do not all rank first"
equal = top_k_accuracy_score(targets, torch.zeros(200, 5), k=2, labels=range(5))
print("scikit-learn, equal:", equal)
assert 0.3 < equal < 0.5
EOF
echo "as before"
