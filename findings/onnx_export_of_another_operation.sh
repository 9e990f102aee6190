#!/bin/sh
# onnxscript: some operations are exported as others, without a word.
#
# onnxscript 0.7.2, torch 2.14.1, onnx 1.23.2, onnxruntime 1.32.0, CPython 3.11.
# Guess: torch.onnx.export(dynamo=True) of one operation computes it in onnxruntime, or is refused. So it is for some 180
#   others.
# Seen: scatter_reduce with "mean" is exported as the sum, so that a network on a graph adds up its neighbours;
#   avg_pool2d ignores divisor_override; logcumsumexp is minus infinity where the largest value, which may come later, is
#   some 100 above; logsigmoid(-99.7) is minus infinity, as it is the logarithm of a sigmoid that is 0. No warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 onnx==1.23.2 onnxscript==0.7.2 onnxruntime==1.32.0 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import contextlib
import io
import logging
import warnings

import onnxruntime
import torch
from torch.nn import functional as F

warnings.simplefilter("ignore")
logging.disable(logging.WARNING)


class Operation(torch.nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, x):
        return self.function(x)


def reduced(kind):
    groups = torch.tensor([0, 1, 1])
    return lambda x: torch.zeros(2).scatter_reduce(0, groups, x.flatten()[:3], kind, include_self=False)


vector, image = torch.tensor([2.0, 1.0, 5.0, -99.7, 150.0]), torch.arange(16.0).view(1, 1, 4, 4)
CASES = {
    "scatter_reduce sum": (reduced("sum"), vector, False),
    "scatter_reduce mean": (reduced("mean"), vector, True),
    "avg_pool2d": (lambda x: F.avg_pool2d(x, 2), image, False),
    "avg_pool2d divisor_override": (lambda x: F.avg_pool2d(x, 2, divisor_override=1), image, True),
    "logsumexp": (lambda x: x.logsumexp(0), vector, False),
    "logcumsumexp": (lambda x: x.logcumsumexp(0), vector, True),
    "logsigmoid": (F.logsigmoid, vector, True),
}
options = onnxruntime.SessionOptions()
options.log_severity_level = 3
for name, (function, inputs, differs) in CASES.items():
    with contextlib.redirect_stdout(io.StringIO()):
        program = torch.onnx.export(Operation(function).eval(), (inputs,), dynamo=True)
    program.save(file := io.BytesIO())
    session = onnxruntime.InferenceSession(file.getvalue(), options, providers=["CPUExecutionProvider"])
    [found] = session.run(None, {session.get_inputs()[0].name: inputs.numpy()})
    expected = function(inputs)
    print(f"{name}: torch {expected.flatten().tolist()}, onnxruntime {found.ravel().tolist()}")
    assert torch.allclose(torch.from_numpy(found), expected, rtol=1e-4) != differs, "changed"
EOF
echo "as before"
