#!/bin/sh
# torch: CyclicLR.load_state_dict takes entries out of the dict that it is given, which can then not be loaded again.
#
# torch 2.14.1, CPython 3.11.
# Guess: loading a state changes the scheduler and not the state, as for the other schedulers, optimizers and modules.
# Seen: "_scale_fn_custom" is popped from the dict of the caller: a second load of one checkpoint in memory, as after a
#   loss that is not finite, ends with KeyError: '_scale_fn_custom'. LambdaLR puts back what it pops.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import torch
from torch.optim import SGD, lr_scheduler


def scheduler(kind, **options):
    return kind(SGD([torch.zeros(1, requires_grad=True)], lr=0.1, momentum=0.9), **options)


CASES = {
    lr_scheduler.CyclicLR: {"base_lr": 0.1, "max_lr": 1.0},
    lr_scheduler.LambdaLR: {"lr_lambda": lambda step: 1.0},
    lr_scheduler.OneCycleLR: {"max_lr": 1.0, "total_steps": 9},
}
for kind, options in CASES.items():
    state = scheduler(kind, **options).state_dict()
    before = {*state}
    scheduler(kind, **options).load_state_dict(state)
    missing = sorted(before - {*state})
    print(f"{kind.__name__}: taken out of the state: {missing}")
    assert bool(missing) == (kind is lr_scheduler.CyclicLR), "changed"
    try:
        scheduler(kind, **options).load_state_dict(state)
    except KeyError as error:
        print("  again: KeyError:", error)
        assert missing
    else:
        assert not missing, "changed: it can be loaded again"
EOF
echo "as before"
