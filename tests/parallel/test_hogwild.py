"""Lock-free workers on one model: one is exact, several do as many steps, and each goes on with its own moments."""

from __future__ import annotations

import time
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import torch
from helpers.compose import FAST, built
from helpers.events import curves
from helpers.plain_loop import weights_at
from test_resume import assert_same, outcome

from runner.parallel.hogwild import Hogwild, Shared
from runner.parallel.launch.cluster import Place
from runner.parallel.launch.supervisor import LostError, report_of
from runner.run import Run
from runner.train import prepare, train

HARD = ("data.crop=2", "model.dropout=0.2", "accumulation=2", "batch_size=32", "schedule=constant", "optimizer.lr=0.05")


def launched(directory: Path, work: Any, *overrides: str) -> Any:
    """What `work(run)` returns on rank 0 of hogwild's processes."""
    directory.mkdir(exist_ok=True)
    run = built(*FAST, *HARD, "parallel=hogwild", *overrides)
    run.prepare()
    run.directory = directory
    return run.parallel.launch(work, run)


def test_one_worker_is_a_single_process_to_the_last_bit(trained, tmp_path: Path) -> None:
    schedule = ("steps=12", "log_every=3", "eval_every=6", "save_every=6")
    trained(*HARD, *schedule, directory="single")
    launched(tmp_path / "hogwild", train, *schedule, "parallel.processes=1")
    got, wanted = outcome(tmp_path / "hogwild"), outcome(tmp_path / "single")
    for tag in ("hogwild/staleness", "hogwild/distance"):
        assert {value for _, value in got["curves"].pop(tag)} == {0.0}
    assert [value for _, value in got["curves"].pop("hogwild/updates")] == [3, 3, 3, 3]
    got["local"].pop("parallel"), wanted["local"].pop("parallel")
    assert_same(got, wanted)


def test_one_worker_keeps_batch_normalisation_and_memory_format(trained, tmp_path: Path) -> None:
    overrides = ("model=resnet18", "data.holdout=0.02", "steps=2", "batch_size=8", "channels_last=true", "eval_every=0")
    wanted = weights_at(trained(*plain(HARD), *overrides, directory="single").directory, 2)
    run = built(*FAST, *plain(HARD), *overrides, "parallel=hogwild", "parallel.processes=1")
    run.prepare()
    run.directory = tmp_path
    assert run.parallel.launch(trained_in_shared_memory, run) == (True, True)
    assert_same(weights_at(tmp_path, 2), wanted)


def plain(overrides: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(text for text in overrides if not text.startswith("model."))


def trained_in_shared_memory(run: Run) -> tuple[bool, bool]:
    """In a worker: train; whether every tensor lies in the shared memory, and is laid out as it was to be."""
    seen: list[torch.nn.Module] = []
    place = run.parallel.place
    run.parallel.place = lambda *arguments: seen.append(place(*arguments)) or seen[0]
    train(run)
    memory = run.parallel._memory  # pyright: ignore[reportAttributeAccessIssue]
    start, stop = memory.data_ptr(), memory.data_ptr() + memory.nbytes
    tensors = [*seen[0].parameters(), *seen[0].buffers()]
    filters = [t for t in tensors if t.ndim == 4]
    return (
        all(start <= t.data_ptr() < stop for t in tensors),
        all(t.is_contiguous(memory_format=torch.channels_last) for t in filters),
    )


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_do_as_many_steps_as_there_are(workers: int, tmp_path: Path) -> None:
    """31 divides by neither 2, 3 nor 5: the last round is not full, and logs fall within rounds."""
    schedule = ("steps=31", "log_every=5", "eval_every=10", "save_every=10", f"parallel.processes={workers}")
    result, logged = launched(tmp_path, train, *schedule), curves(tmp_path)
    assert (result.status, result.steps, result.world_size) == ("done", 31, workers)
    assert sum(value for _, value in logged["hogwild/updates"]) == 31
    for tag, every in (("train/loss", 5), ("hogwild/updates", 5), ("eval/loss", 10)):
        due = [every * i for i in range(1, 31 // every + 1)]
        rounds = [-(-step // workers) * workers for step in due]  # as the round ends in which it falls
        assert [step for step, _ in logged[tag]] == [min(step, 31) for step in rounds] + [31] * (rounds[-1] < 31)


def test_two_workers_learn_what_one_process_learns(trained, tmp_path: Path) -> None:
    overrides = ("accumulation=1", "model.dropout=0", "schedule=onecycle", "steps=600", "save_every=0", "eval_every=0")
    alone = trained(*HARD, *overrides, directory="single").result.metrics["eval/accuracy"]
    together = launched(tmp_path / "hogwild", train, *overrides).metrics["eval/accuracy"]
    assert alone > 0.9
    assert together > alone - 0.1

    logged = curves(tmp_path / "hogwild")
    staleness, distance = ([value for _, value in logged[f"hogwild/{name}"]] for name in ("staleness", "distance"))
    assert all(0 <= value <= 50 for value in staleness)
    assert sum(staleness) > 0, "nobody ever wrote while the other computed"
    assert all(0 <= value < 1 for value in distance)
    assert max(distance) > 0


def test_what_one_worker_writes_the_others_read(tmp_path: Path) -> None:
    assert launched(tmp_path, written_by_the_last, "parallel.processes=3") == [3.0] * 3


def written_by_the_last(run: Run) -> list[float]:
    """In a worker: each writes its rank + 1 over all weights, one after the other; what all see then."""
    model = prepare(run, torch.device("cpu")).model
    for rank in range(3):
        if rank == run.parallel.rank:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.fill_(rank + 1)
        run.parallel.barrier()
    seen: list[Any] = [None] * 3
    low_high = {float(edge) for p in model.parameters() for edge in (p.min(), p.max())}
    torch.distributed.all_gather_object(seen, low_high.pop() if len(low_high) == 1 else -1.0)
    return seen


def test_a_resume_gives_each_worker_its_own_moments(tmp_path: Path) -> None:
    launched(tmp_path, train, "steps=8")
    path = tmp_path / "checkpoints" / "step_00000008"
    shared = torch.load(path / "state.pt", weights_only=True)["optimizer"]
    own = [torch.load(path / f"rank_{rank}.pt", weights_only=True)["parallel"]["moments"] for rank in range(2)]
    assert_same(own[0], shared)
    assert not torch.equal(*(moments["head.fc.weight"]["momentum_buffer"] for moments in own))
    for processes in (2, 3):  # a worker that was not there begins with those of the first
        launched(tmp_path, moments_after_a_resume, "steps=8", f"parallel.processes={processes}")
        got = [torch.load(tmp_path / f"moments_{rank}.pt", weights_only=True) for rank in range(processes)]
        assert_same(got, [*own, shared][:processes])


def moments_after_a_resume(run: Run) -> None:
    """In a worker: leave its moments in a file."""
    state = prepare(run, torch.device("cpu"))
    assert state.step == 8
    names = {parameter: name for name, parameter in state.model.named_parameters()}
    moments = {names[parameter]: moments for parameter, moments in state.optimizer.state.items()}
    torch.save(moments, run.directory / f"moments_{run.parallel.rank}.pt")
    run.parallel.barrier()


def test_scalars_go_on_where_a_checkpoint_between_two_logs_left_them(tmp_path: Path) -> None:
    launched(tmp_path, train, "steps=8", "log_every=6")
    launched(tmp_path, train, "steps=16", "log_every=6")
    assert curves(tmp_path)["hogwild/updates"] == [(6, 6.0), (8, 2.0), (12, 4.0), (16, 4.0)]


# ---------------------------------------------------------------------------------------------------------------------
# Stopping together without waiting for each other


def crew_of(count: int) -> list[Hogwild]:
    """Workers as in `count` processes, which share only the counts."""
    counts = (torch.zeros(length, dtype=torch.int64) for length in (count, 1, 1))
    shared = Shared(torch.zeros(0, dtype=torch.uint8), *counts)
    workers = [Hogwild(processes=count) for _ in range(count)]
    for rank, worker in enumerate(workers):
        worker._place = Place(rank, count, rank, count, "127.0.0.1", 1)
        worker.share(shared)
    return workers


@pytest.mark.parametrize("slow", [0, 2])
@pytest.mark.parametrize("asked", [(0, 1), (2, 1), (1, 17), (2, 40)])
def test_all_stop_after_the_same_update_however_fast_each_is(asked: tuple[int, int], slow: int) -> None:
    workers = crew_of(3)
    done, leads = [0, 0, 0], []

    def work(rank: int) -> None:
        workers[rank].timeout, stopping = 2, False
        while not stopping:
            time.sleep(0.002 * (rank == slow))
            workers[rank]._updates[rank] += 1
            stopping = workers[rank].agree((rank, done[rank] + 1) == asked)
            done[rank] += 1
            leads.append(done[rank] - min(done))

    threads = [Thread(target=work, args=(rank,)) for rank in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert done[0] == done[1] == done[2]
    assert asked[1] < done[0] <= asked[1] + 10
    assert 3 <= max(leads) <= 5, "four updates, give or take the one that is counted here a moment late"


def test_a_worker_that_does_not_come_is_waited_for_until_the_timeout() -> None:
    fast, _ = crew_of(2)
    fast.timeout = 0.2
    fast._updates[0] = 4
    assert not fast.agree(False)
    fast._updates[0] = 5
    began = time.monotonic()
    with pytest.raises(LostError, match=r"^rank 1 did not come within 0.2 s$") as error:
        fast.agree(False)
    assert 0.2 <= time.monotonic() - began < 5
    assert report_of(error.value).by_others
