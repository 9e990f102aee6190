#!/bin/sh
# torch: the sum of a nested tensor that torch.nested.narrow makes of a padded batch is that of the padding, too.
#
# torch 2.14.1, CPython 3.11.
# Guess: sum(), mean(), max() and l1_loss of a jagged nested tensor are those of its sequences, or are refused, as sum(1)
#   is.
# Seen: if it has gaps, as those of torch.nested.narrow and of nested_tensor_from_jagged with lengths have, functions of
#   all values take the gaps as well: of three sequences of ones, padded with 100, the sum is 306.0 for 6.0. The same
#   sequences in nested_tensor, or after contiguous(), have the right sum.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import torch

lengths = torch.tensor([1, 2, 3])
padded = torch.full((3, 3), 100.0)
for row, length in zip(padded, lengths, strict=True):
    row[:length] = 1
gaps = torch.nested.narrow(padded, 1, 0, lengths, layout=torch.jagged)
dense = torch.nested.nested_tensor([torch.ones(int(length)) for length in lengths], layout=torch.jagged)
assert [each.tolist() for each in gaps.unbind()] == [each.tolist() for each in dense.unbind()]
try:
    gaps.sum(1)
    raise SystemExit("changed: sum(1) is not refused")
except RuntimeError as error:
    print("sum(1):", error)
for name, tensor in (("narrow", gaps), ("nested_tensor", dense), ("contiguous", gaps.contiguous())):
    print(name, "sum, mean, max:", tensor.sum().item(), tensor.mean().item(), tensor.max().item())
assert dense.sum() == gaps.contiguous().sum() == 6
assert gaps.sum() == 306, "changed: the sum leaves the gaps out"
EOF
echo "as before"
