#!/bin/sh
# torch: on a CPU some sums of 16-bit numbers are added up in 16 bits, and their neighbours are not.
#
# torch 2.14.1, CPython 3.11.
# Guess: as sum, mean, norm, softmax and layer_norm do, all reductions of bfloat16 and float16 accumulate in float32.
# Seen: index_add and segment_reduce of 4,096 ones in bfloat16 end at 256, where scatter_add has 4,096, so that a mean over
#   the neighbours of a node is 0.06 of what it is. Of 100,000 ones in float16 the mean is 1 and nanmean infinite, as
#   their sum is beyond 65,504. So is cross_entropy of 1,000 samples with a loss of 100, and the mean of embedding_bag.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import torch
from torch.nn import functional as F

number = 4096
ones, one_group = torch.ones(number, dtype=torch.bfloat16), torch.zeros(number, dtype=torch.long)
groups = torch.zeros(1, dtype=torch.bfloat16)
halves = torch.ones(100_000, dtype=torch.float16)
logits = torch.tensor([0.0, 100.0], dtype=torch.float16).expand(1000, 2)
table = torch.full((1000, 1), 100.0, dtype=torch.float16)
found = {
    "sum": (ones.sum(), 4096),
    "scatter_add": (groups.scatter_add(0, one_group, ones), 4096),
    "index_add": (groups.index_add(0, one_group, ones), 256),
    "segment_reduce": (torch.segment_reduce(ones, "mean", lengths=torch.tensor([number])), 0.0625),
    "mean": (halves.mean(), 1),
    "nanmean": (halves.nanmean(), float("inf")),
    "mean of losses": (F.cross_entropy(logits, torch.zeros(1000, dtype=torch.long), reduction="none").mean(), 100),
    "cross_entropy": (F.cross_entropy(logits, torch.zeros(1000, dtype=torch.long)), float("inf")),
    "mean of a table": (table.mean(), 100),
    "embedding_bag": (F.embedding_bag(torch.arange(1000)[None], table, mode="mean"), float("inf")),
}
for name, (value, seen) in found.items():
    print(f"{name}: {value.item()}")
    assert value.item() == seen, f"changed: {seen} before"
EOF
echo "as before"
