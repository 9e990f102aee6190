"""Lazy packages: free to import, loaded once, whichever way they are first used."""

from __future__ import annotations

import subprocess
import sys

import pytest
from helpers.command import environment

LAZY = "import sys; from runner.system.lazy_import import import_lazily; import_lazily('torch', 'torchvision'); import torch\n"


def run(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", LAZY + program], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_import_loads_nothing():
    run("import torchvision, torch\nassert 'torch._C' not in sys.modules")


FIRST_USES = [
    "torch.zeros(1)",
    "from torch import nn",
    "import torchvision.transforms.v2",
    "import inspect; inspect.getmodule(inspect.currentframe())",
    *(
        pytest.param(first_use, marks=pytest.mark.slow)  # three seconds each
        for first_use in (
            "import torch.utils.data",
            "import torch.nn.functional as F",
            "from torch.utils.tensorboard.summary import scalar",
            "import copyreg, pickle; pickle.loads(b'ctorch._utils\\n_rebuild_tensor_v2\\n.')",
        )
    ),
]


@pytest.mark.parametrize("first_use", FIRST_USES)
def test_the_first_use_loads_the_package_whole_and_once(first_use):
    run(f"""
{first_use}
import torch.utils._pytree, torch.nn
assert torch.utils is sys.modules['torch.utils'] and torch.nn is sys.modules['torch.nn']
assert torch.utils._pytree is sys.modules['torch.utils._pytree']
assert type(torch).__name__ == 'module' and torch.__spec__.name == 'torch'
assert torch.nn.__spec__.origin == torch.nn.__file__
model = torch.nn.Linear(2, 1)
assert isinstance(model, sys.modules['torch.nn'].Module)
model(torch.ones(1, 2)).sum().backward()
import torchvision
assert torchvision.ops.nms(torch.tensor([[0., 0., 1., 1.]]), torch.ones(1), 0.5).tolist() == [0]
""")
