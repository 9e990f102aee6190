#!/bin/sh
# torch: over gloo, all_reduce, reduce and broadcast of a column of a matrix take its first row, and change it.
#
# torch 2.14.1, CPython 3.11, two processes with gloo.
# Guess: a view whose elements lie apart is copied, as all_gather does, or refused, as all_to_all_single does
#   ("Tensors must be contiguous").
# Seen: the memory from the view's first element on is taken for it, in silence. Of the column [0, 3, 6] on one process,
#   [10, 13, 16] on the other, all_reduce leaves [10, 3, 6] and [10, 13, 16] where the sum is [10, 16, 22]; what stands
#   beside the first element in its row is added up instead. .contiguous() before, and copy_() after, is right.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5
cat > "$folder/columns.py" <<'EOF'
import sys

import torch
import torch.distributed as dist


def column(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    matrix = torch.arange(9.0).view(3, 3) + 10 * rank
    return matrix, matrix[:, 0]


def reduce_columns(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    found = {}
    for name, call in {"all_reduce": dist.all_reduce, "reduce": lambda x: dist.reduce(x, 0)}.items():
        matrix, x = column(rank)
        call(x)
        found[name], found[f"{name}, row 0"] = x.tolist(), matrix[0].tolist()
    _, x = column(rank)
    dist.broadcast(x, 0)
    found["broadcast"] = x.tolist()
    _, x = column(rank)
    parts = [torch.zeros(3), torch.zeros(3)]
    dist.all_gather(parts, x)
    found["all_gather"] = [part.tolist() for part in parts]
    try:
        dist.all_to_all_single(torch.zeros(2), column(rank)[1][:2])
    except ValueError as error:
        found["all_to_all_single"] = str(error)
    print(rank, found, flush=True)
    assert found["all_gather"] == [[0, 3, 6], [10, 13, 16]]
    assert "contiguous" in found["all_to_all_single"]
    assert found["all_reduce"] == ([10, 3, 6], [10, 13, 16])[rank], "changed: another sum"
    assert found["all_reduce, row 0"] == [10, 12, 14], "changed: the row is left alone"
    assert rank or found["reduce"] == [10, 3, 6], "changed: another sum"
    assert found["broadcast"] == ([0, 3, 6], [0, 13, 16])[rank], "changed: another column"
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.multiprocessing.spawn(reduce_columns, (sys.argv[1],), 2)
EOF
"$folder/bin/python" "$folder/columns.py" "$folder"
echo "as before"
