"""`python -m helpers.lost_peer STORE RANK` is one of two ranks; rank 1 exits with code 7 after the first all-reduce.

Rank 0 prints the type of the error that its next all-reduce raises, and whether `is_lost_peer` recognizes it.
"""

from __future__ import annotations

import os
import sys

import torch

from runner.system.torch_errors import is_lost_peer


def main() -> None:
    path, rank = sys.argv[1], int(sys.argv[2])
    torch.distributed.init_process_group("gloo", f"file://{path}", rank=rank, world_size=2)
    torch.distributed.all_reduce(torch.ones(3))  # both ranks have joined
    if rank == 1:
        os._exit(7)
    try:
        torch.distributed.all_reduce(torch.ones(3))
    except Exception as error:
        print(type(error).__name__, is_lost_peer(error), sep="\n", flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
