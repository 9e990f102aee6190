#!/bin/sh
# torch: the initial weights of a transposed convolution depend on the number of its outputs, not of its inputs.
#
# torch 2.14.1, CPython 3.11.
# Guess: as after any other layer, a signal of variance 1 leaves a new ConvTranspose2d about half as large, by whatever
#   number of channels.
# Seen: the fan-in is read from the second axis of the weight, which is the one of the outputs here. The last layer of a
#   decoder, 512 channels to 1, begins with outputs of 6.4, eleven times those of a Conv2d, and one from 1 to 512
#   channels with 0.013. kaiming_normal_(mode="fan_in") takes the same axis.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import torch
from torch import nn

torch.manual_seed(0)
for inputs, outputs, plain, transposed in ((512, 1, 0.56, 6.4), (64, 64, 0.55, 0.28), (1, 512, 0.55, 0.0126)):
    images = torch.randn(8, inputs, 16, 16)
    layers = [kind(inputs, outputs, 4, stride=2, padding=1, bias=False) for kind in (nn.Conv2d, nn.ConvTranspose2d)]
    found = [layer(images).std().item() for layer in layers]
    print(f"{inputs} to {outputs}: convolution {found[0]:.3f}, transposed {found[1]:.3f}")
    assert all(abs(value / expected - 1) < 0.1 for value, expected in zip(found, (plain, transposed), strict=True))
layer = nn.ConvTranspose2d(512, 1, 4, stride=2, padding=1)
nn.init.kaiming_normal_(layer.weight, mode="fan_in")
expected = (2 / (1 * 4 * 4)) ** 0.5  # of 512 inputs: (2 / (512 * 4 * 4)) ** 0.5, which is 0.016
print(f"kaiming_normal_: {layer.weight.std().item():.3f}")
assert abs(layer.weight.std().item() / expected - 1) < 0.05
EOF
echo "as before"
