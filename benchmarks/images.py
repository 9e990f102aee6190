"""ResNet18 on JPEG files: the runner compared with a plain torchvision loop with the same settings.

Run `python -m benchmarks.images FOLDER`. FOLDER has the folders `train/` and `test/`, each of which has a folder of
images per class, for example CIFAR-10 as JPEG files.

In each round, the runner and the plain loop train once with the same seed. They train for two epochs on crops of 32×32
pixels, with one thread and one process that loads images. Each round has another seed, so that the accuracies of the
rounds show the spread over seeds.
"""

import time
from pathlib import Path

import torch

from benchmarks import measure

GOALS = {("runner", "plain"): 1.0}
SIZE, BATCH, EPOCHS, RATE, WARMUP, LOG_EVERY = 32, 64, 2, 0.05, 20, 10
LEAST_AREA = 0.35
"""The smallest share of an image that a random crop covers."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def plain(folder: Path, seed: int) -> float:
    """Return images per second of a loop as in torchvision's references, and print its accuracy."""
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.models import resnet18
    from torchvision.transforms import v2

    torch.manual_seed(seed)
    torch.set_num_threads(1)
    as_input = [v2.PILToTensor(), v2.ToDtype(torch.float32, scale=True), v2.Normalize(list(MEAN), list(STD))]
    augment = [v2.RandomResizedCrop(SIZE, scale=(LEAST_AREA, 1.0)), v2.RandomHorizontalFlip()]
    train = ImageFolder(str(folder / "train"), v2.Compose([*augment, *as_input]))
    test = ImageFolder(str(folder / "test"), v2.Compose([v2.Resize(SIZE), v2.CenterCrop(SIZE), *as_input]))
    batches = DataLoader(train, BATCH, shuffle=True, drop_last=True, num_workers=1, persistent_workers=True)
    model = resnet18(num_classes=len(train.classes)).to(memory_format=torch.channels_last)  # pyright: ignore
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9, fused=True)
    num_steps = EPOCHS * len(batches)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, num_steps, cycle_momentum=False)
    times = []
    for _ in range(EPOCHS):
        for images, labels in batches:
            inputs = images.to(memory_format=torch.channels_last)
            loss = torch.nn.functional.cross_entropy(model(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            times.append(time.perf_counter())
    model.eval()
    with torch.no_grad():
        pairs = [(model(images).argmax(1), labels) for images, labels in DataLoader(test, 256, num_workers=1)]
    measure.print_value("accuracy", sum(int((got == labels).sum()) for got, labels in pairs) / len(test))
    return BATCH * (len(times) - 1 - WARMUP) / (times[-1] - times[WARMUP])


def with_runner(folder: Path, seed: int) -> float:
    """Return images per second of the runner, from the times of its logs, and print its accuracy."""
    options = ["model=torchvision", "model.name=resnet18", "data=imagefolder", f"data.root={folder}", "data.workers=1"]
    options += [f"data.size={SIZE}", f"data.crop_area={LEAST_AREA}", "data.center=1.0", f"batch_size={BATCH}"]
    options += [f"epochs={EPOCHS}", f"optimizer.lr={RATE}", f"seed={seed}", f"log_every={LOG_EVERY}"]
    with measure.command(options) as directory:
        measure.print_value("accuracy", measure.result(directory)["metrics"]["eval/accuracy"])
        times = [wall_time for wall_time, _ in measure.points(directory, "train/loss")]
    first = WARMUP // LOG_EVERY - 1
    last = len(times) - 2  # the last log may cover fewer steps
    return BATCH * LOG_EVERY * (last - first) / (times[last] - times[first])


CONTENDERS: measure.Contenders = {"plain": plain, "runner": with_runner}


def main() -> None:
    options = measure.parser(__doc__, CONTENDERS, repeats=5, seed=0)
    options.add_argument("folder", type=Path, help="the images")
    arguments = options.parse_args()
    if arguments.run:
        print(CONTENDERS[arguments.run](arguments.folder.resolve(), arguments.seed))
        return
    rates = measure.interleave(
        "benchmarks.images", list(CONTENDERS), arguments.repeats, [str(arguments.folder), "--seed="]
    )
    table = measure.report(
        f"ResNet18, {SIZE}×{SIZE} JPEG files, batch {BATCH}, {EPOCHS} epochs", "images/s", rates, GOALS
    )
    for name, values in rates.beside["accuracy"].items():
        print(f"  accuracy of {name:<8} {min(values):.4f} – {max(values):.4f} over {len(values)} seeds")
    measure.write("images", [table], ["FOLDER", f"--repeats={arguments.repeats}"])


if __name__ == "__main__":
    main()
