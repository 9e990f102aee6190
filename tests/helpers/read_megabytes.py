"""`python -m helpers.read_megabytes COUNT` reads COUNT batches of 1 MB with two workers, and prints how many it read.

If this fails, it prints the error.
"""

from __future__ import annotations

import sys

import torch

from runner.data.base import DataError
from runner.data.workers import Loader, Workers


class Megabytes:
    """A dataset of tensors of 1,000,000 bytes."""

    def __getitem__(self, number: int) -> torch.Tensor:
        return torch.full((1_000_000,), number, dtype=torch.uint8)


def main() -> None:
    try:
        read = [int(batch[-1]) for batch in Loader(Megabytes(), Workers(2)).read(range(int(sys.argv[1])))]
    except DataError as error:
        print(error)
    else:
        assert read == [*range(len(read))]
        print(len(read))


if __name__ == "__main__":
    from helpers.read_megabytes import Megabytes  # workers do not import the main module

    main()
