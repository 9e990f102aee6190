#!/bin/sh
# torch: the mean loss of a tensor that is divided unevenly over processes (DTensor) is wrong, and its mean is right.
#
# torch 2.14.1, CPython 3.11, two processes with gloo.
# Guess: mse_loss of two tensors, of which one process has four rows and the other three, is that of the whole tensors,
#   as `(x - y).square().mean()` is.
# Seen: the losses of the parts are averaged without their numbers of rows: 0.298 for 0.265. So are those of
#   smooth_l1_loss, huber_loss and binary_cross_entropy_with_logits. With an even number of rows they are right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
cat > "$folder/mean_losses.py" <<'EOF'
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

FUNCTIONS = [F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy_with_logits]


def compare(rank: int, rows: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29650 + rows))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    x, y = torch.arange(float(rows))[:, None] / rows, torch.zeros(rows, 1)
    there = [distribute_tensor(each, mesh, [Shard(0)]) for each in (x, y)]
    mean = (there[0] - there[1]).square().mean().full_tensor()
    torch.testing.assert_close(mean, (x - y).square().mean())
    for function in FUNCTIONS:
        whole, sharded = function(x, y), function(*there).full_tensor()
        if rank == 0:
            print(rows, "rows", function.__name__, f"{sharded:.4f}", "whole", f"{whole:.4f}", flush=True)
        same = torch.allclose(whole, sharded)
        assert same == (rows % 2 == 0), "changed: it is right for uneven shards"
    dist.destroy_process_group()


if __name__ == "__main__":
    for rows in (7, 8):
        torch.multiprocessing.spawn(compare, (rows,), 2)
EOF
"$folder/bin/python" "$folder/mean_losses.py"
echo "as before"
