"""Tests of image files: the same batches with any number of workers, unreadable files, and copies to a device."""

import itertools
import logging
import os
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import numpy
import pytest
import torch
from helpers.fake_cuda import CUDA, FakeCuda, FakeTensor
from PIL import Image

from runner.batching import Plan, SampleOrder
from runner.data.base import Batch, DataError, Samples
from runner.data.built_in import Digits
from runner.data.decode import ImageReader
from runner.data.image_files import Fetch, FileSamples, to_device
from runner.data.workers import Workers
from runner.seeds import sample_seeds

CPU = torch.device("cpu")
MEAN, STD = (0.4, 0.5, 0.6), (0.2, 0.25, 0.3)


class ConstantColorReader:
    """Returns images of one color without a file: (number in `path`, two random numbers in training, otherwise 0)."""

    def __init__(self, *damaged: int):
        self.damaged = damaged

    def __call__(self, path: str, for_training: bool) -> torch.Tensor:
        if int(path) in self.damaged:
            raise OSError(f"{path} is damaged")
        green, blue = torch.randint(256, (2,)).tolist() if for_training else (0, 0)
        return torch.tensor([int(path), green, blue], dtype=torch.uint8).view(3, 1, 1).expand(3, 2, 2)


def made_up(count: int = 20, damaged: tuple[int, ...] = (), skipped: dict[str, str] | None = None) -> FileSamples:
    paths, targets = [str(i) for i in range(count)], [i % 4 for i in range(count)]
    fetch = Fetch(ConstantColorReader(*damaged), (3, 2, 2), augment=lambda image: 255 - image)
    return FileSamples(paths, targets, list("abcd"), fetch, MEAN, STD, Workers(0), None, skipped)


@pytest.fixture(scope="module")
def photos(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("photos")
    generator = numpy.random.default_rng(0)
    for number in range(20):
        pixels = generator.integers(0, 256, (*generator.integers(12, 40, 2), 3), dtype=numpy.uint8)
        Image.fromarray(pixels).save(folder / f"{number:02}.{'png' if number % 2 else 'jpg'}")
    return sorted(map(str, folder.iterdir()))


def photographed(photos: list[str], workers: int, skipped: dict[str, str] | None = None) -> FileSamples:
    targets = [i % 4 for i in range(len(photos))]
    augment = Digits(auto_augment="trivialaugment", random_erase=0.5).transform(MEAN)
    fetch = Fetch(ImageReader(10, "crop", 0.2, 0.9), (3, 10, 10), augment)
    return FileSamples(photos, targets, list("abcd"), fetch, MEAN, STD, Workers(workers), None, skipped)


def take(samples: Samples, plan: Plan, after_step: int, count: int) -> list[Batch]:
    with closing(cast(Any, samples.batches(plan.stream(after_step), plan.seed, CPU))) as stream:  # modes close it
        return list(itertools.islice(stream, count))


def levels(batch: Batch) -> torch.Tensor:
    """Return the color of each image, which must be one, as the reader returned it: int64 [n, 3]."""
    mean, std = (torch.tensor(values)[:, None, None] for values in (MEAN, STD))
    return ((batch.inputs * std + mean) * 255).round().long()[:, :, 0, 0]


def assert_same(batches: list[Batch], others: list[Batch]) -> None:
    for a, b in zip(batches, others, strict=True):
        assert torch.equal(a.inputs, b.inputs)
        assert torch.equal(a.targets, b.targets)


@pytest.mark.parametrize(("accumulation", "shard"), [(1, (0, 1)), (3, (0, 1)), (2, (1, 3))])
def test_every_row_is_its_sample_augmented_with_the_random_numbers_of_its_seed(accumulation, shard):
    order, plan = SampleOrder(20, seed=3), Plan(12, accumulation, shard, seed=3)
    for micro, batch in zip(plan.stream(0), take(made_up(), plan, 0, 7), strict=False):
        indices, epochs = order.indices(micro.start, micro.stop), order.epochs(micro.start, micro.stop)
        seeds = sample_seeds(3, epochs, indices)
        draws = torch.stack([torch.randint(256, (2,), generator=torch.Generator().manual_seed(each)) for each in seeds])
        assert batch.inputs.dtype == torch.float32
        assert batch.targets.tolist() == [int(i) % 4 for i in indices]
        assert torch.equal(levels(batch), 255 - torch.cat((indices[:, None], draws), 1))


def test_any_number_of_workers_gives_bitwise_the_same_batches_and_no_global_generator_changes(photos, tmp_path):
    bad = tmp_path / "cut.jpg"  # which is skipped
    bad.write_bytes(Path(photos[0]).read_bytes()[:300])
    files, skipped = [*photos[:5], str(bad), *photos[5:]], dict[str, str]()
    before = torch.get_rng_state(), numpy.random.get_state()[1].copy()
    reference = take(photographed(files, 0, {}), Plan(6, seed=5), 0, 9)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (numpy.random.get_state()[1] == before[1]).all()
    samples = photographed(files, 3, skipped)
    assert_same(take(samples, Plan(6, seed=5), 0, 9), reference)
    assert_same(take(samples, Plan(6, seed=5), 4, 5), reference[4:])
    samples.close()
    assert {len(batch.targets) for batch in reference} == {6}
    assert "OSError: Truncated" in skipped[str(bad)]
    assert len(skipped) == 1


def test_batches_do_not_depend_on_how_they_are_divided(photos):
    samples, plans = photographed(photos, 0), [Plan(12, 2, (rank, 3)) for rank in range(3)]
    for step, whole in enumerate(take(samples, Plan(12), 0, 3)):
        parts = [batch for plan in plans for batch in take(samples, plan, step, 2)]
        assert_same([Batch(*map(torch.cat, zip(*parts, strict=True)))], [whole])


def test_inputs_are_normalized_pixels(photos):
    samples = photographed(photos, 0)
    (batch,) = samples.in_order(20, (0, 1), CPU)
    pictures = samples.display_images(list(range(20)))
    mean, std = (torch.tensor(values, dtype=torch.float64)[:, None, None] for values in (MEAN, STD))
    torch.testing.assert_close(batch.inputs, ((pictures.double() / 255 - mean) / std).float(), rtol=0, atol=2e-6)
    assert pictures.dtype == torch.uint8
    assert batch.inputs.is_contiguous()


def test_by_default_the_first_file_that_cannot_be_read_ends_the_run():
    samples = made_up(damaged=(7,))
    for batches in (samples.in_order(8, (0, 1), CPU), samples.batches(Plan(20).stream(0), 0, CPU)):
        with pytest.raises(DataError, match=r"^7: .*7 is damaged") as raised:
            list(itertools.islice(batches, 3))
        assert "data.on_error=skip" in raised.value.remedy


def test_in_training_the_next_readable_sample_replaces_an_unreadable_one():
    damaged = (4, 7, 8, 19)
    instead = {4: 5, 7: 9, 8: 9, 19: 0}
    whole, holed = take(made_up(), Plan(6), 0, 20), take(made_up(damaged=damaged, skipped={}), Plan(6), 0, 20)
    for a, b in zip(whole, holed, strict=True):
        numbers = [instead.get(number, number) for number in (255 - levels(a)[:, 0]).tolist()]
        assert (255 - levels(b)[:, 0]).tolist() == numbers
        assert b.targets.tolist() == [number % 4 for number in numbers]
        assert torch.equal(levels(b)[:, 1:], levels(a)[:, 1:])  # same draws as for the unreadable sample


@pytest.mark.parametrize("count", [1, 2, 3])
def test_batches_in_order_come_with_the_indices_of_their_samples(count):
    samples = made_up(damaged=(0, 7, 8, 19), skipped={})
    pairs = [pair for index in range(count) for pair in samples.in_order_with_indices(4, (index, count), CPU)]
    for indices, batch in pairs:
        assert indices.tolist() == levels(batch)[:, 0].tolist()
    left = [i for i in range(20) if i not in (0, 7, 8, 19)]
    assert torch.cat([indices for indices, _ in pairs]).tolist() == left
    assert torch.cat([batch.targets for _, batch in pairs]).tolist() == [i % 4 for i in left]
    assert max(len(indices) for indices, _ in pairs) <= 4
    assert samples.display_images([1, 7, 12])[:, 0, 0, 0].tolist() == [1, 0, 12], "what cannot be read is black"


def test_each_unreadable_file_is_logged_once_and_counted_once(caplog):
    def notes(samples: FileSamples, *others: dict[str, str]) -> dict[str, Any]:
        return samples.extra_results(lambda value: [value, *others])

    skipped: dict[str, str] = {}
    train = made_up(damaged=tuple(range(25, 50)), count=60, skipped=skipped)
    held_out = made_up(damaged=(1,), count=5, skipped=skipped)
    assert notes(train) == {}
    with caplog.at_level(logging.WARNING):
        take(train, Plan(60), 0, 3)
        list(held_out.in_order(5, (0, 1), CPU))
        found = notes(train, {os.fsdecode(b"a\xff\n.png"): "damaged", "30": "seen by another rank too"})
    assert len(caplog.records) == 27
    assert "skipped 30: OSError: 30 is damaged" in caplog.text
    assert caplog.messages[-1] == "skipped a\\xff\n.png: damaged", "not UTF-8"
    assert found == notes(held_out)
    assert (found["skipped_images"], len(found["skipped_files"])) == (27, 20)


def test_if_no_file_can_be_read_training_ends_and_a_shard_is_empty():
    with pytest.raises(DataError, match="none of them can be read"):
        take(made_up(damaged=tuple(range(20)), skipped={}), Plan(20), 0, 1)
    samples = made_up(damaged=tuple(range(10)), skipped={})
    assert [list(samples.in_order(8, (shard, 2), CPU)) for shard in (0, 0)] == [[], []]
    assert sum(len(batch.targets) for batch in samples.in_order(8, (1, 2), CPU)) == 10


@pytest.mark.gpu
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_on_a_gpu_are_the_same_up_to_rounding(photos, workers):
    stream = photographed(photos, workers).batches(Plan(6).stream(0), 0, torch.device("cuda"))
    for ours, reference in zip(itertools.islice(stream, 9), take(photographed(photos, 0), Plan(6), 0, 9), strict=True):
        assert ours.inputs.device == ours.targets.device == torch.device("cuda", 0)
        torch.testing.assert_close(ours.inputs.cpu(), reference.inputs, rtol=0, atol=1e-6)
        assert torch.equal(ours.targets.cpu(), reference.targets)


def host(cuda: FakeCuda, count: int) -> Any:
    for number in range(1, count + 1):
        cuda.calls.append(("load", number))
        yield FakeTensor(cuda, f"x{number}"), FakeTensor(cuda, f"y{number}")


def copied(number: int) -> list[tuple[Any, ...]]:
    names = f"x{number}", f"y{number}"
    return [("load", number), *(("copy", "copy", name) for name in names), ("record", "copy", number)]


def handed_out(number: int) -> list[tuple[Any, ...]]:
    names = f"x{number} on the device", f"y{number} on the device"
    return [("wait", "compute", number), *(("record_stream", "compute", name) for name in names), ("compute", number)]


def test_the_next_copy_is_queued_before_a_batch_is_yielded():
    cuda = FakeCuda()
    for number, batch in enumerate(to_device(host(cuda, 3), CUDA, backend=cuda), start=1):
        assert [tensor.name for tensor in batch] == [f"x{number} on the device", f"y{number} on the device"]
        cuda.calls.append(("compute", number))
    begun = [*copied(1), *copied(2), *handed_out(1), *copied(3)]
    assert cuda.calls == [*begun, *handed_out(2), *handed_out(3), ("synchronize", "copy")]


def test_a_closed_stream_waits_for_its_copies_and_closes_its_source():
    source = host(cuda := FakeCuda(), 10)
    batches = to_device(source, CUDA, backend=cuda)
    next(batches)
    batches.close()
    assert cuda.calls[-1] == ("synchronize", "copy")
    assert list(source) == []


@pytest.mark.gpu
def test_copies_overlap_with_computation():
    device = torch.device("cuda")
    host_batch = torch.ones(1 << 26).pin_memory()  # 256 MiB: copying them takes about ten milliseconds
    weights = torch.randn(4096, 4096, device=device)

    def milliseconds(copy: bool, work: bool) -> float:
        begin, end = torch.Event(device, enable_timing=True), torch.Event(device, enable_timing=True)
        source = ((host_batch if copy else torch.ones(1),) for _ in range(20))
        begin.record()
        for _ in to_device(source, device):
            for _ in range(10 if work else 0):
                weights @ weights  # only queued; the result is not needed
        torch.cuda.synchronize()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end)

    milliseconds(True, True)
    copies, work, both = milliseconds(True, False), milliseconds(False, True), milliseconds(True, True)
    assert both < max(copies, work) + 0.5 * min(copies, work)
