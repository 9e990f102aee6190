#!/bin/sh
# torch: with class weights, the cross-entropy of one-hot targets is not that of the same classes as numbers.
#
# torch 2.14.1, CPython 3.11.
# Guess: CrossEntropyLoss(weight=w) takes classes as numbers or as probabilities, and one-hot ones give the same loss.
# Seen: the loss of numbers is divided by the sum of the weights of the batch, that of probabilities by the number of
#   samples. With the weights 1 and 5 and every fourth sample of the second class it is twice as large, and so are the
#   gradients; and it is no longer a mean in which the weights of the classes cancel. Training with MixUp, whose targets
#   are probabilities, has another learning rate than training without. Without weights both are the same.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import torch
from torch import nn

classes = torch.tensor([0, 0, 0, 1])
one_hot = nn.functional.one_hot(classes, 2).float()


def gradient(targets, **options):
    logits = torch.zeros(4, 2, requires_grad=True)
    loss = nn.CrossEntropyLoss(**options)(logits, targets)
    loss.backward()
    return round(loss.item(), 4), round(float(logits.grad.norm()), 4)


weight = torch.tensor([1.0, 5.0])
for name, options, numbers, probabilities in (("weights 1 and 5", {"weight": weight}, 0.6931, 1.3863), ("no weights", {}, 0.6931, 0.6931)):
    found = gradient(classes, **options), gradient(one_hot, **options)
    print(f"{name}: loss and gradient of numbers {found[0]}, of one-hot targets {found[1]}")
    assert [loss for loss, _ in found] == [numbers, probabilities]
    assert abs(found[1][1] / found[0][1] - probabilities / numbers) < 1e-3
EOF
echo "as before"
