#!/bin/sh
# torchdata: after a resume without workers, the rest of the epoch is right, and later epochs are shuffled otherwise.
#
# torchdata 0.11.0, torch 2.14.1, CPython 3.11.
# Guess: StatefulDataLoader, saved in the middle of an epoch, gives the samples of this epoch and the next as if unbroken.
# Seen: with a generator of one's own and num_workers=0 the epoch in which it was saved is completed, and the next two are
#   in another order than those of a loader that was not interrupted. With one worker both are right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torchdata==0.11.0 torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import copy

import torch
from torchdata.stateful_dataloader import StatefulDataLoader


def loader(workers):
    generator = torch.Generator().manual_seed(3)
    return StatefulDataLoader(range(8), batch_size=2, shuffle=True, num_workers=workers, generator=generator)


def epoch(batches):
    return [int(number) for batch in batches for number in batch]


if __name__ == "__main__":
    for workers in (0, 1):
        torch.manual_seed(0)
        unbroken = loader(workers)
        expected = [epoch(unbroken) for _ in range(4)][1:]
        torch.manual_seed(0)
        saved = loader(workers)
        epoch(saved)
        begun = [int(number) for number in next(iter(saved))]
        state = copy.deepcopy(saved.state_dict())
        resumed = loader(workers)
        resumed.load_state_dict(state)
        found = [begun + epoch(resumed), epoch(resumed), epoch(resumed)]
        same = [one == other for one, other in zip(found, expected, strict=True)]
        print(f"{workers} workers: as if unbroken: the epoch, the next, the one after: {same}")
        assert same == [True, workers == 1, workers == 1], "changed"
EOF
echo "as before"
