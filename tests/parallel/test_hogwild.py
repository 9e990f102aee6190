"""Tests of Hogwild: one worker equals `single`, several divide the steps, stop together and resume."""

import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from helpers.compose import TINY_CPU, build_composed_run, train_in
from helpers.events import scalar_curves
from helpers.narrow_resnet import use_narrow_resnet
from helpers.plain_loop import weights_at
from helpers.runs import assert_bitwise_equal, run_outcome

from runner.parallel.collectives import Collectives
from runner.parallel.hogwild import SharedMemoryCollectives
from runner.parallel.launch.supervisor import LostError, report_of
from runner.result import Result
from runner.run import build_run
from runner.training import prepare, train, train_rank

HARD = ("data.crop=2", "model.dropout=0.2", "accumulation=2", "batch_size=32", "schedule=constant", "optimizer.lr=0.05")


def launched(directory: Path, *overrides: str, work: Callable[..., Any] = train_rank) -> Any:
    """Run `work(config, directory, process)` in Hogwild's processes, and return the result of rank 0."""
    return train_in(
        directory, build_composed_run(*TINY_CPU, *HARD, "parallel=hogwild", *overrides), train_rank=work
    ).result


def test_one_worker_is_bitwise_equal_to_a_single_process(trained, tmp_path):
    schedule = ("steps=12", "log_every=3", "eval_every=6", "save_every=6")
    trained(*HARD, *schedule, directory="single")
    launched(tmp_path / "hogwild", *schedule, "parallel.processes=1")
    got, wanted = run_outcome(tmp_path / "hogwild"), run_outcome(tmp_path / "single")
    assert {value for _, value in got["curves"].pop("hogwild/staleness")} == {0.0}
    assert [value for _, value in got["curves"].pop("hogwild/updates")] == [3, 3, 3, 3]
    got["local"].pop("parallel"), wanted["local"].pop("parallel")
    assert_bitwise_equal(got, wanted)


def test_batch_normalization_and_memory_format_survive_shared_memory(tmp_path):
    overrides = (*TINY_CPU[1:], "model=resnet18", "data.holdout=0.02", "steps=2", "batch_size=8", "channels_last=true")
    overrides += ("eval_every=0",)
    train_in(tmp_path / "single", build_composed_run(*overrides), use_narrow_resnet)
    run = use_narrow_resnet(build_composed_run(*overrides, "parallel=hogwild", "parallel.processes=1"))
    assert train_in(tmp_path / "one", run, train_rank=trained_in_shared_memory).result == (True, True)
    assert_bitwise_equal(weights_at(tmp_path / "one", 2), weights_at(tmp_path / "single", 2))


def trained_in_shared_memory(config: dict[str, Any], directory: Path, process: Collectives) -> tuple[bool, bool]:
    """In a worker: train; return whether all tensors are in shared memory, and all filters in NHWC memory format."""
    run, seen = use_narrow_resnet(build_run(config)), []
    place = run.parallel.place
    run.parallel.place = lambda *arguments: seen.append(place(*arguments)) or seen[0]
    train(run, run.prepare(process), directory)
    assert isinstance(process, SharedMemoryCollectives)
    start, stop = process.memory.data_ptr(), process.memory.data_ptr() + process.memory.nbytes
    tensors = [*seen[0].parameters(), *seen[0].buffers()]
    filters = [t for t in tensors if t.ndim == 4]
    return (
        all(start <= t.data_ptr() < stop for t in tensors),
        all(t.is_contiguous(memory_format=torch.channels_last) for t in filters),
    )


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_the_workers_together_do_every_step_once(workers, tmp_path):
    """A round has one step of each worker. The last round of 31 steps is not full, and logs are due within a round."""
    schedule = ("steps=31", "log_every=5", "eval_every=10", "save_every=10", f"parallel.processes={workers}")
    result, logged = launched(tmp_path, *schedule), scalar_curves(tmp_path)
    assert (result.status, result.steps, result.world_size) == ("done", 31, workers)
    assert sum(value for _, value in logged["hogwild/updates"]) == 31
    for tag, every in (("train/loss", 5), ("hogwild/updates", 5), ("eval/loss", 10)):
        due = [every * i for i in range(1, 31 // every + 1)]
        rounds = [-(-step // workers) * workers for step in due]  # the end of the round in which the step is
        assert [step for step, _ in logged[tag]] == [min(step, 31) for step in rounds] + [31] * (rounds[-1] < 31)


def test_two_workers_learn_what_one_process_learns(trained, tmp_path):
    """Without clipping, a stale gradient at the highest learning rate can cause a plateau of the loss."""
    schedule = ("schedule=onecycle", "steps=450", "save_every=0", "eval_every=0", "max_grad_norm=1")
    overrides = ("accumulation=1", "model.dropout=0", *schedule)
    alone = trained(*HARD, *overrides, directory="single").result.metrics["eval/accuracy"]
    together = launched(tmp_path / "hogwild", *overrides).metrics["eval/accuracy"]
    logged = scalar_curves(tmp_path / "hogwild")
    assert alone > 0.8
    assert together > alone - 0.1, logged["train/loss"]

    staleness = [value for _, value in logged["hogwild/staleness"]]
    assert all(0 <= value <= 50 for value in staleness)
    assert sum(staleness) > 0, "nobody ever wrote while the other computed"


def test_divergence_names_the_first_step_and_each_worker_saves_its_batch(tmp_path):
    schedule = ("steps=11", "log_every=11", "eval_every=0", "save_every=0")
    result = launched(tmp_path, *schedule, work=trained_without_a_finite_loss)
    assert (result.status, result.error) == ("diverged", "the loss is not finite at step 1")
    saved = {path.name: torch.load(path, weights_only=True) for path in tmp_path.glob("diverged_*")}
    assert saved.keys() == {"diverged_step_00000001_rank_0.pt", "diverged_step_00000002_rank_1.pt"}
    first, second = (saved[name]["inputs"] for name in sorted(saved))
    assert not torch.equal(first, second)


def trained_without_a_finite_loss(config: dict[str, Any], directory: Path, process: Collectives) -> Result:
    """In a worker: train, with a loss that is NaN in every step."""
    run = build_run(config)
    workload: Any = run.workload
    criterion = workload.criterion
    workload.criterion = lambda *values: criterion(*values) * float("nan")
    return train(run, run.prepare(process), directory)


def test_each_worker_resumes_with_its_own_optimizer_state_and_counts(tmp_path):
    launched(tmp_path, "steps=8", "log_every=6")
    path = tmp_path / "checkpoints" / "step_00000008"
    shared = torch.load(path / "state.pt", weights_only=True)["optimizer"]
    own = [torch.load(path / f"rank_{rank}.pt", weights_only=True)["parallel"]["moments"] for rank in range(2)]
    assert_bitwise_equal(own[0], shared)
    assert not torch.equal(*(moments["head.fc.weight"]["momentum_buffer"] for moments in own))
    for processes in (2, 3):  # an additional worker begins with the state of the first one
        seen = launched(tmp_path, "steps=8", f"parallel.processes={processes}", work=state_after_a_resume)
        assert seen == [[processes]] * processes, "all workers see the weights that the last one has written"
        got = [torch.load(tmp_path / f"optimizer_{rank}.pt", weights_only=True) for rank in range(processes)]
        assert_bitwise_equal(got, [*own, shared][:processes])
    launched(tmp_path, "steps=16", "log_every=6")
    updates = [(6, 6.0), (8, 2.0), (12, 4.0), (16, 4.0)]
    assert scalar_curves(tmp_path)["hogwild/updates"] == updates, "counts between two logs go on, too"


def state_after_a_resume(config: dict[str, Any], directory: Path, process: Collectives) -> list[list[float]]:
    """In a worker: save the optimizer state after a resume, and return the weights that each sees, set in turn."""
    run = build_run(config)
    state = prepare(run, run.prepare(process), directory)
    assert state.step == 8
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    states = {names[parameter]: own for parameter, own in state.optimizer.state.items()}
    torch.save(states, directory / f"optimizer_{process.rank}.pt")
    for rank in range(process.world_size):
        for parameter in state.model.parameters() if rank == process.rank else ():
            parameter.detach().fill_(rank + 1)
        process.barrier()
    return process.all_gather(sorted({float(edge) for p in state.model.parameters() for edge in (p.min(), p.max())}))


class Worker(SharedMemoryCollectives):
    """One of several workers in this process, which share only the counts of updates."""

    def __init__(self, rank: int, updates: torch.Tensor, stop_requested: torch.Tensor, last_update: torch.Tensor):
        self.rank, self.world_size, self.timeout = rank, len(updates), 300.0
        self.updates = updates.numpy()
        self._stop_requested, self._last_update = stop_requested.numpy(), last_update.numpy()


def workers_of(count: int) -> list[Worker]:
    counts = [torch.zeros(length, dtype=torch.int64) for length in (count, 1, 1)]
    return [Worker(rank, *counts) for rank in range(count)]


def wait_for_the_others(worker: Worker) -> None:
    """Wait until the other workers are as far ahead of `worker` as they may be, or have stopped."""
    while True:
        ahead, last = worker.updates[worker.rank] + 4, int(worker._last_update[0])
        others = min(count for rank, count in enumerate(worker.updates) if rank != worker.rank)
        if others >= (min(ahead, last) if last else ahead):
            return
        time.sleep(0.0005)


@pytest.mark.parametrize("slow", [0, 2])
@pytest.mark.parametrize("asked", [(0, 1), (2, 1), (1, 17), (2, 40)])
def test_all_workers_stop_after_the_same_update(asked, slow):
    """Before each update, worker `slow` waits until the others are as far ahead as they may be, or have stopped."""
    workers = workers_of(3)
    done, leads = [0, 0, 0], []

    def work(rank: int) -> None:
        stopping = False
        while not stopping:
            if rank == slow:
                wait_for_the_others(workers[rank])
            workers[rank].updates[rank] += 1
            stopping = workers[rank].any_rank((rank, done[rank] + 1) == asked)
            done[rank] += 1
            leads.append(done[rank] - min(done))

    threads = [Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert done[0] == done[1] == done[2]
    assert asked[1] < done[0] <= asked[1] + 10
    assert 3 <= max(leads) <= 5, "four updates, give or take the one that is counted here a moment late"


def test_a_worker_that_makes_no_update_is_waited_for_until_the_timeout():
    fast, _ = workers_of(2)
    fast.timeout = 0.2
    fast.updates[0] = 4
    assert not fast.any_rank(False)
    fast.updates[0] = 5
    began = time.monotonic()
    with pytest.raises(LostError, match=r"^rank 1 .* 0.2 s$") as error:
        fast.any_rank(False)
    assert time.monotonic() - began >= 0.2
    assert report_of(error.value).by_others
