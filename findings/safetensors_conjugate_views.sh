#!/bin/sh
# safetensors: a conjugated complex tensor is saved without its conjugation.
#
# safetensors 0.8.0, torch 2.14.1, CPython 3.11.
# Guess: the values are saved that the tensor has, as by torch.save; or the lazy view is refused, as numpy() refuses it.
# Seen: torch's conj(), and with it .mH and .adjoint(), only sets a bit of the tensor, and the bytes of the original are
#   written: 1-2j is read as 1+2j. The same with the bit of a negative: z.conj().imag of -2 is read as 2. No warning;
#   resolve_conj() and resolve_neg() before saving make it right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet safetensors==0.8.0 torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import io

import torch
from safetensors.torch import load, save


def by_torch(tensor):
    torch.save(tensor, buffer := io.BytesIO())
    return torch.load(io.BytesIO(buffer.getvalue()))


number = torch.tensor([1 + 2j])
CASES = {
    "conj()": (number.conj(), 1 - 2j, 1 + 2j),
    "mH": (number[:, None].mH, 1 - 2j, 1 + 2j),
    "conj().imag": (number.conj().imag, -2, 2),
    "conj().resolve_conj()": (number.conj().resolve_conj(), 1 - 2j, 1 - 2j),
}
for name, (tensor, value, read) in CASES.items():
    found = load(save({"x": tensor}))["x"].item()
    print(f"{name}: {tensor.item()}, read as {found}")
    assert tensor.item() == by_torch(tensor).item() == value
    assert found == read
try:
    number.conj().numpy()
except RuntimeError as error:
    print("numpy():", error)
else:
    raise SystemExit("changed: numpy() takes it")
EOF
echo "as before"
