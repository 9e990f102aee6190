#!/bin/sh
# torch: the number that item() reads from the sum of a sharded tensor (DTensor) is the sum of this process's own part.
#
# torch 2.14.1, CPython 3.11, two processes with gloo.
# Guess: `x.sum().item()` and `float(x.norm())` of a tensor of ones on two processes give that of the whole tensor, as
#   `bool(x.sum() > 6)` and `x.sum().full_tensor()` do, or an error.
# Seen: 6.0 ones of 12, in silence; each process has another number if the parts differ. And
#   `x.sum(0).fill_(2.0)` is a tensor of fours, as each process fills in what it adds.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
cat > "$folder/read_numbers.py" <<'EOF'
import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh


def read(rank: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29660")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    x = distribute_tensor(torch.ones(4, 3), init_device_mesh("cpu", (2,)), [Shard(0)])
    numbers = {
        "sum().item()": x.sum().item(),
        "float(norm())": float(x.norm()),
        "sum() > 6": bool(x.sum() > 6),
        "sum().full_tensor()": x.sum().full_tensor().item(),
        "sum(0).fill_(2.0)": x.sum(0).fill_(2.0).full_tensor()[0].item(),
    }
    if rank == 0:
        print(numbers, flush=True)
    assert numbers["sum() > 6"] and numbers["sum().full_tensor()"] == 12
    assert numbers["sum().item()"] == 6, "changed: it is the whole sum"
    assert abs(numbers["float(norm())"] - 6**0.5) < 1e-6, "changed: it is the whole norm"
    assert numbers["sum(0).fill_(2.0)"] == 4, "changed: it is filled with 2"
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(read, (), 2)
EOF
"$folder/bin/python" "$folder/read_numbers.py"
echo "as before"
