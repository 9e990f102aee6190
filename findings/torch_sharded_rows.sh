#!/bin/sh
# torch: what is written to a row of a sharded tensor (DTensor) is lost, or written to the tensor, by how it is selected.
#
# torch 2.14.1, CPython 3.11, two processes with gloo.
# Guess: `x[0].zero_()` zeroes the first row, as of any tensor, or is refused, as `x[0] = 0` is.
# Seen: x[0], x[1:3], select, narrow, split and diagonal zero a copy, in silence; unsqueeze and movedim write to the
#   tensor.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
cat > "$folder/write_rows.py" <<'EOF'
import os

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

LOST = {
    "x[0]": lambda x: x[0],
    "x[1:3]": lambda x: x[1:3],
    "select": lambda x: x.select(0, 1),
    "narrow": lambda x: x.narrow(0, 1, 2),
    "split": lambda x: x.split(2)[0],
    "diagonal": torch.diagonal,
}
KEPT = {"unsqueeze": lambda x: x.unsqueeze(0), "movedim": lambda x: x.movedim(0, 1)}


def write(rank: int) -> None:
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29670")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    mesh, plain = init_device_mesh("cpu", (2,)), torch.ones(7, 3)

    def sharded() -> torch.Tensor:
        return distribute_tensor(plain.clone(), mesh, [Shard(0)])

    for name, select in (LOST | KEPT).items():
        x, y = sharded(), plain.clone()
        select(x).zero_()
        select(y).zero_()
        assert y.sum() < 21
        if rank == 0:
            print(name, "sum", x.full_tensor().sum().item(), "plain", y.sum().item(), flush=True)
        else:
            x.full_tensor()
        lost = torch.equal(x.full_tensor(), plain)
        assert lost == (name in LOST), f"changed: {name}"
    x = sharded()
    try:
        x[0] = 0
        raise SystemExit("changed: x[0] = 0 is not refused")
    except NotImplementedError as error:
        print("x[0] = 0 is refused:", str(error)[:80], flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(write, (), 2)
EOF
"$folder/bin/python" "$folder/write_rows.py"
echo "as before"
