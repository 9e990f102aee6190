#!/bin/sh
# torch: over gloo, all_reduce with MAX or MIN keeps NaN in one part of a tensor, and loses it in the others.
#
# torch 2.14.1, CPython 3.11, two and four processes with gloo.
# Guess: where one process has NaN the result is NaN, as of torch.maximum and of SUM; or the numbers win everywhere, as of
#   torch.fmax.
# Seen: a tensor that is NaN on one process is NaN in 1/n of its elements on all n processes, those that this process
#   adds up; elsewhere it is the largest number of the others. A short tensor is NaN if rank 0 has the NaN, and a number
#   if another has it. So a check for a NaN anywhere by MAX finds it, or not.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
cat > "$folder/largest.py" <<'EOF'
import sys

import torch
import torch.distributed as dist


def find_largest(rank: int, folder: str, world_size: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store{world_size}", rank=rank, world_size=world_size)
    for owner in (0, 1):
        for operation in (dist.ReduceOp.MAX, dist.ReduceOp.MIN):
            long, short = (torch.full((n,), torch.nan if rank == owner else float(rank)) for n in (4096, 2))
            dist.all_reduce(long, operation)
            dist.all_reduce(short, operation)
            share = long.isnan().float().mean().item()
            if rank == 0:
                print(f"{world_size} processes, {operation}, NaN on rank {owner}: {share} of 4096 elements, {short.tolist()}")
            assert share == 1 / world_size, "changed: another share is NaN"
            assert short.isnan().all().item() == (owner == 0), "changed: another NaN is kept"
    total = torch.full((2,), torch.nan if rank == 1 else 1.0)
    dist.all_reduce(total)
    assert total.isnan().all()
    dist.destroy_process_group()


if __name__ == "__main__":
    for world_size in (2, 4):
        torch.multiprocessing.spawn(find_largest, (sys.argv[1], world_size), world_size)
EOF
"$folder/bin/python" "$folder/largest.py" "$folder"
echo "as before"
