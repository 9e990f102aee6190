#!/bin/sh
# torch: on a CPU, the norm of a large tensor in float32 has three right digits, and so has a clipped gradient.
#
# torch 2.14.1, CPython 3.11, one thread.
# Guess: norms are right to 1e-6, as sums are, which torch adds up in a cascade.
# Seen: of 38.6 million normal values, as many as GPT-2's embedding has, the norm is 2.7e-3 too small, the 3-norm 2.7 %:
#   the squares are added up one after another. .square().sum().sqrt() is right to 1e-7, and so is the norm of the norms
#   of short pieces. clip_grad_norm_ to a norm of 1 leaves 1.0027; with FSDP on two processes, whose shards are half as
#   long, another gradient. The digits depend on the threads and on the width of the instructions.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import torch

torch.set_num_threads(1)
torch.manual_seed(0)
weight = torch.nn.Parameter(torch.empty(50257 * 768))
weight.grad = torch.randn(50257 * 768)
exact, cubes = weight.grad.double().norm().item(), weight.grad.double().norm(3).item()
found = {
    "norm": weight.grad.norm().item() / exact,
    "norm(3)": weight.grad.norm(3).item() / cubes,
    "square().sum().sqrt()": weight.grad.square().sum().sqrt().item() / exact,
    "norm of norms": torch.stack([piece.norm() for piece in weight.grad.split(65536)]).norm().item() / exact,
}
torch.nn.utils.clip_grad_norm_([weight], 1.0)
found["clipped to 1"] = weight.grad.double().norm().item()
for name, value in found.items():
    print(f"{name}: {value - 1:+.1e}")
off = {name: abs(value - 1) for name, value in found.items()}
assert min(off["norm"], off["clipped to 1"]) > 2e-4 and off["norm(3)"] > 2e-3
assert max(off["square().sum().sqrt()"], off["norm of norms"]) < 1e-6
EOF
echo "as before"
