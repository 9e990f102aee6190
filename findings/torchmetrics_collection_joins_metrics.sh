#!/bin/sh
# torchmetrics: two metrics of a collection that agree on the first batch are one metric from then on.
#
# torchmetrics 1.9.0, torch 2.14.1, CPython 3.11.
# Guess: a MetricCollection shares the counting of metrics that count the same by their arguments, such as precision and
#   recall with the same threshold; metrics with different arguments are counted each for itself.
# Seen: metrics are joined if their counts are equal after the first update, whatever their arguments, and stay joined:
#   later batches are counted by the first of them alone. The accuracies at the thresholds 0.5 and 0.9, and those with
#   and without an ignored class, get the same value for good if no sample of the first batch is between the
#   thresholds, or of that class. reset() does not divide them; the order of the batches decides whether they are right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torchmetrics==1.9.0 torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import torch
from torchmetrics import MetricCollection
from torchmetrics.classification import BinaryAccuracy, MulticlassAccuracy

SCORES = [
    (torch.tensor([0.1, 0.2, 0.95, 0.99]), torch.tensor([0, 0, 1, 1])),
    (torch.tensor([0.6, 0.7, 0.6, 0.7]), torch.tensor([0, 0, 0, 0])),
]
CLASSES = [
    (torch.tensor([0, 1, 0]), torch.tensor([0, 1, 1])),
    (torch.tensor([2, 2, 0]), torch.tensor([2, 2, 1])),
]


def thresholds():
    return {"at 1/2": BinaryAccuracy(threshold=0.5), "at 9/10": BinaryAccuracy(threshold=0.9)}


def ignoring():
    return {name: MulticlassAccuracy(3, average="micro", ignore_index=each) for name, each in (("all", None), ("but 2", 2))}


def together(metrics, batches, **options):
    collection = MetricCollection(metrics, **options)
    for _ in range(2):  # two evaluations
        collection.reset()
        for batch in batches:
            collection.update(*batch)
        values = collection.compute()
    return [round(float(value), 4) for value in values.values()]


def alone(metrics, batches):
    for metric in metrics.values():
        for batch in batches:
            metric.update(*batch)
    return [round(float(metric.compute()), 4) for metric in metrics.values()]


for make, batches, joined, right in ((thresholds, SCORES, [0.5, 0.5], [0.5, 1.0]), (ignoring, CLASSES, [0.6667] * 2, [0.6667, 0.5])):
    print(*make(), sep=", ", end=": ")
    print("collection", together(make(), batches), "each by itself", alone(make(), batches))
    assert together(make(), batches) == joined
    assert alone(make(), batches) == right
    assert together(make(), batches[::-1]) == right
    assert together(make(), batches, compute_groups=False) == right
EOF
echo "as before"
