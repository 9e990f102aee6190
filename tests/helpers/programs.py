"""`python -m helpers.programs NAME ARGUMENT …` calls a function of this file, in a process of its own.

The functions import what they need themselves: some of them check what their imports load.
"""

import inspect
import itertools
import mmap
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import closing
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def imported_by(*modules: str) -> None:
    """Import the modules, and print the names of all loaded modules."""
    for name in modules:
        import_module(name)
    print(*sorted(sys.modules), sep="\n")


FIRST_USES: dict[str, Callable[[], Any]] = {
    "attribute": lambda: import_module("torch").zeros(1),
    "submodule_of_the_other_package": lambda: import_module("torchvision.transforms.v2"),
    "inspection": lambda: inspect.getmodule(inspect.currentframe()),  # reads the `__file__` of every module
    "submodule": lambda: import_module("torch.utils.data"),
    "unpickling": lambda: pickle.loads(b"ctorch._utils\n_rebuild_tensor_v2\n."),
}


def import_lazily(first_use: str) -> None:
    """Import torch lazily, use it for the first time by one of `FIRST_USES`, and check that it works."""
    from runner.system.lazy_import import import_lazily

    import_lazily("torch", "torchvision")
    import torch
    import torchvision

    assert "torch._C" not in sys.modules, "an import loads nothing"
    FIRST_USES[first_use]()
    import torch.nn
    import torch.utils._pytree

    assert torch.utils is sys.modules["torch.utils"]
    assert torch.nn is sys.modules["torch.nn"]
    assert torch.utils._pytree is sys.modules["torch.utils._pytree"]
    assert type(torch).__name__ == "module"
    assert (torch.__spec__.name, torch.nn.__spec__.origin) == ("torch", torch.nn.__file__)
    model = torch.nn.Linear(2, 1)
    assert isinstance(model, sys.modules["torch.nn"].Module)
    model(torch.ones(1, 2)).sum().backward()
    assert torchvision.ops.nms(torch.tensor([[0.0, 0.0, 1.0, 1.0]]), torch.ones(1), 0.5).tolist() == [0]


def deferred_compiler() -> None:
    import pytest
    import torch

    from runner.system.torch_private import defer_compiler

    def trained(optimizer: Any, compiled: bool = False) -> list[float]:
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        updates = optimizer(model.parameters(), lr=0.1)

        def step() -> None:
            updates.zero_grad()
            model(torch.arange(6.0).reshape(2, 3)).square().sum().backward()
            updates.step()

        for _ in range(3):
            (torch.compile(step, backend="eager") if compiled else step)()
        updates.load_state_dict(updates.state_dict())
        return [value for parameter in model.parameters() for value in parameter.flatten().tolist()]

    defer_compiler()
    optimizers = (torch.optim.SGD, torch.optim.Adam)
    before = [trained(each) for each in optimizers]
    assert "torch._dynamo.eval_frame" not in sys.modules, "training without the compiler must not load it"

    config = import_module("torch._dynamo.config")  # loads it, starting with a submodule that rejects new attributes
    eval_frame = import_module("torch._dynamo.eval_frame")
    assert (torch._dynamo.config, torch._dynamo.eval_frame) == (config, eval_frame)
    assert torch._dynamo is sys.modules["torch._dynamo"]
    assert torch._dynamo.graph_break.__module__ == "torch._dynamo.decorators"
    assert [trained(each) for each in optimizers] == before
    # Functions that `torch._disable_dynamo` decorates are hidden from the compiler even if they were called before.
    hidden: Any = torch.optim.Optimizer.zero_grad
    assert vars(hidden.__wrapped__)["__dynamo_disable"]._torchdynamo_disable
    for each, values in zip(optimizers, before, strict=True):
        assert trained(each, compiled=True) == pytest.approx(values, rel=1e-5)


class Echo:
    """A loader of numbers, each of which takes a millisecond."""

    def __call__(self, number: int) -> int:
        time.sleep(0.001)
        return number


class Megabytes:
    """A loader of tensors of 1,000,000 bytes."""

    def __call__(self, number: int) -> Any:
        import torch

        return torch.full((1_000_000,), number, dtype=torch.uint8)


def read_with_workers(what: str) -> None:
    """Read with two workers, and print their process ids after the first item.

    Args:
        what: a folder of images, which are read; or `endless`, to read numbers.
    """
    import torch

    from runner.data.imagefolder import ImageFolder
    from runner.data.workers import Workers

    if what == "endless":
        results = Workers(2).map(Echo(), itertools.count())
    else:
        _, held_out = ImageFolder(what, workers=2, size=8).load()
        results = held_out.in_order(1, (0, 1), torch.device("cpu"))
    next(results)
    print(*(process.pid for process in multiprocessing.active_children()), flush=True)
    for _ in results:
        pass
    sys.stdin.readline()


def read_megabytes(count: str, *options: str) -> None:
    """For each of `options`, mount /dev/shm with it, read batches of 1 MB with two new workers, and print the outcome.

    The outcome is how many batches were read, or the error. The process exits while it reads with two more workers,
    whose ids it prints.
    """
    from runner.data.base import DataError
    from runner.data.workers import Workers

    for option in options:
        print(f"mounted with {option}", flush=True)
        subprocess.run(["mount", "-t", "tmpfs", "-o", option, "tmpfs", "/dev/shm"], check=True)
        with closing(Workers(2)) as workers:
            try:
                read = [int(batch[-1]) for batch in workers.map(Megabytes(), range(int(count)))]
            except DataError as error:
                print(error)
            else:
                assert read == [*range(len(read))]
                print(len(read))
    for _ in Workers(2).map(Echo(), itertools.count()):
        print("workers", *(process.pid for process in multiprocessing.active_children()))
        sys.exit(0)


def create_run_directories(root: Path, begin: float) -> list[str]:
    """At the time `begin`, create five run directories whose names contain the same time; return their paths."""
    from runner.storage import run_directory

    run_directory.time.strftime = lambda *_: FIXED_TIME
    time.sleep(max(0.0, begin - time.time()))
    return [str(run_directory.create(root)) for _ in range(5)]


FIXED_TIME = "2026-01-02_03-04-05"


def hold_lock(directory: Path, locked: Any) -> None:
    """Lock a run directory until this process is killed; set the event `locked` if that worked."""
    from runner.storage import run_directory

    file = run_directory.lock(directory)
    if file is not None:
        locked.set()
    signal.pause()


def interrupt_while_a_disk_hangs(directory: Path) -> None:
    """Receive SIGINT, as the main process of a command does, while a thread writes a checkpoint."""
    from runner.storage import checkpoints
    from runner.storage.checkpoint import Checkpoint
    from runner.system.forkserver import become_command
    from runner.system.signals import run_main

    def main() -> int:
        checkpoints._save = lambda *_: threading.Event().wait()  # pyright: ignore[reportAttributeAccessIssue]
        checkpoints.Checkpoints(directory, keep=1).save(Checkpoint(1, {}, {}, {}))
        signal.raise_signal(signal.SIGINT)
        return 0

    become_command()
    sys.exit(run_main(main))


def signal_itself(place: str, name: str) -> None:
    """Send a signal in code that is run by `exec`, or in `__del__`, where Python only prints exceptions."""
    from runner.system.signals import run_main

    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.Signals[name])

    def main() -> int:
        places: dict[str, Any] = {"exec": kill, "destructor": type("Dying", (), {"__del__": kill})}
        try:
            exec("place()", {"place": places[place]})
            for _ in range(1000):
                time.sleep(0.1)
        finally:
            print("cleaned up", flush=True)
        return 0

    sys.exit(run_main(main))


def lose_peer(store: Path, rank: int, pipe: Connection) -> None:
    """Rank 1 exits after an all-reduce; rank 0 sends the type of the error of its next one, and if it is recognized."""
    import torch

    from runner.system.torch_errors import is_lost_peer

    torch.distributed.init_process_group("gloo", f"file://{store}", rank=rank, world_size=2)
    torch.distributed.all_reduce(torch.ones(3))  # both ranks have joined
    if rank == 1:
        os._exit(7)
    try:
        torch.distributed.all_reduce(torch.ones(3))
    except Exception as error:
        pipe.send((type(error), is_lost_peer(error)))
    os._exit(0)


def map_new_pages(size: int) -> mmap.mmap:
    """Write new pages, which grow this process by `size` bytes, as free memory on the heap would not."""
    block = mmap.mmap(-1, size)
    for _ in range(0, size, mmap.PAGESIZE):  # one page at a time, because the written bytes take memory, too
        block.write(b"x" * mmap.PAGESIZE)
    return block


if __name__ == "__main__":
    # Not a function of this module: children cannot import what is in `__main__`.
    getattr(import_module("helpers.programs"), sys.argv[1])(*sys.argv[2:])
