#!/bin/sh
# torch: the imaginary part of an inverse FFT changes its sign when another library, or torch, takes it over by DLPack.
#
# torch 2.14.1, numpy 2.3.5, CPython 3.11.
# Guess: the lazy negation of a view is carried out for the copy, or it is refused, as a lazy conjugation is ("Can't export
#   tensors with the conjugate bit set") and as .numpy() refuses both.
# Seen: torch.fft.ifft of real numbers returns a conjugated view, and its .imag is a view with a bit that says "negated".
#   np.from_dlpack and torch.from_dlpack read the memory without it, in silence: -9.66 becomes 9.66.
#   .mH.imag and .adjoint().imag are such views, too; resolve_neg() before makes it right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import numpy as np
import torch

x = torch.fft.ifft(torch.arange(8.0) ** 2).imag
found = {"x": x, "np.from_dlpack": np.from_dlpack(x), "torch.from_dlpack": torch.from_dlpack(x)}
for name, values in found.items():
    print(f"{name}:", [round(float(value), 2) for value in values[:4]])
assert x.is_neg() and x[1] != 0
assert np.array_equal(np.from_dlpack(x), -np.array(x.tolist(), np.float32)), "changed: NumPy's have their sign"
assert torch.equal(torch.from_dlpack(x), -x), "changed: torch's have their sign"
assert np.array_equal(np.from_dlpack(x.resolve_neg()), np.array(x.tolist(), np.float32))
for refused in (lambda: np.from_dlpack(torch.fft.ifft(torch.arange(8.0))), x.numpy):
    try:
        refused()
    except (BufferError, RuntimeError) as error:
        print("refused:", error)
    else:
        raise AssertionError("changed: it is not refused")
EOF
echo "as before"
