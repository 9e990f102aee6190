#!/bin/sh
# torch: compiled for a CPU, a sum of 8-bit integers in 8 bits is wrong, although it fits.
#
# torch 2.14.1, CPython 3.11, with a C++ compiler.
# Guess: x.sum(dtype=x.dtype), as of votes or of signs, is that of eager mode, modulo 256 if it does not fit.
# Seen: of ten zeros and ones it is another number, and so for many lengths and both int8 and uint8, in a loop of these
#   types alone: with a sum in int64 of the same numbers beside it, both are right. int16 is right, too. No warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import torch

torch.set_num_threads(1)


def total(values):
    return values.sum(dtype=values.dtype)


compiled, wrong = torch.compile(total, dynamic=False), {torch.int8: [], torch.uint8: [], torch.int16: []}
for dtype, lengths in wrong.items():
    for length in (10, 33):
        torch.manual_seed(length)
        values = torch.randint(0, 2, (length,), dtype=dtype)
        here, there = int(total(values)), int(compiled(values))
        print(f"{length} numbers in {dtype}: {here}, compiled {there}")
        assert here == int(values.sum())
        if there != here:
            lengths.append(length)
assert wrong[torch.int8] and wrong[torch.uint8] and not wrong[torch.int16], "changed"
EOF
echo "as before"
