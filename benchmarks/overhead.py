"""The overhead of the training loop, compared with a lower bound, a plain PyTorch loop, Accelerate and Lightning.

`python -m benchmarks.overhead [--repeats 7] [--steps 3000]`. The network is small, so that overhead is visible: two 3×3
convolutions with 16 and 32 channels and pooling, 64 hidden units, on the 8×8 digits, batch size 64, SGD with momentum.
The runner logs every 50 steps, shows its progress and saves checkpoints; the others neither log nor save.
"""

import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import torch
from torch import nn

from benchmarks.measure import Contenders, measured, parser, passed, report, write
from runner.data.built_in import Digits
from runner.data.memory import TensorSamples

BATCH = 64
CHANNELS_LAST = False
GOALS = {
    ("runner", "limit"): 0.95,
    ("runner", "plain"): 1.0,
    ("runner", "lightning"): 1.5,
    ("runner", "accelerate"): 1.3,
    ("runner, compiled step", "runner"): 1.25,
    ("runner, compiled step", "limit"): 1.0,
}


def network() -> nn.Module:
    """Return the network of all contenders except the runner, which builds the same network itself."""
    torch.manual_seed(0)
    pool = nn.MaxPool2d(2)
    convolutions = [nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(inplace=True), pool]
    convolutions += [nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(inplace=True), pool]
    model = nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10))
    layout = torch.channels_last if CHANNELS_LAST else torch.contiguous_format
    return model.to(memory_format=layout)  # pyright: ignore[reportCallIssue]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)


def digits() -> TensorSamples:
    samples, _ = Digits(size=8).load()
    assert isinstance(samples, TensorSamples)
    return samples


def loader() -> torch.utils.data.DataLoader:
    samples = digits()
    data = torch.utils.data.TensorDataset(samples.inputs, samples.targets)
    return torch.utils.data.DataLoader(data, batch_size=BATCH, shuffle=True, drop_last=True)


def endless(batches: torch.utils.data.DataLoader) -> Iterator[list[torch.Tensor]]:
    while True:
        yield from batches


def limit(steps: int) -> float:
    """Return steps per second on one fixed batch: only forward, backward and update."""
    samples, model = digits(), network()
    optimizer = sgd(model)
    inputs, targets = samples.inputs[:BATCH].clone(), samples.targets[:BATCH].clone()
    began = time.perf_counter()
    for _ in range(steps):
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return steps / (time.perf_counter() - began)


def plain(steps: int) -> float:
    """Return steps per second of the loop in PyTorch's tutorial: a DataLoader, and no logs."""
    model, batches = network(), endless(loader())
    optimizer = sgd(model)
    began = time.perf_counter()
    for _ in range(steps):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
    return steps / (time.perf_counter() - began)


def accelerate(steps: int) -> float:
    """Return steps per second of the plain loop with Hugging Face Accelerate."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator = Accelerator(cpu=True)
    model = network()
    model, optimizer, data = accelerator.prepare(model, sgd(model), loader())
    batches = endless(data)
    began = time.perf_counter()
    for _ in range(steps):
        inputs, targets = next(batches)
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), targets))
        optimizer.step()
    return steps / (time.perf_counter() - began)


def lightning(steps: int) -> float:
    """Return steps per second of Lightning's Trainer without logger, progress bar, checkpoints and evaluation."""
    import lightning as L  # pyright: ignore[reportMissingImports]

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = network()
            self.began = 0.0

        def on_train_start(self) -> None:
            self.began = time.perf_counter()

        def training_step(self, batch: list[torch.Tensor], _: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.network(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    module = Module()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    L.Trainer(max_steps=steps, max_epochs=-1, accelerator="cpu", **quiet).fit(module, loader())
    return steps / (time.perf_counter() - module.began)


def command(options: list[str]) -> int:
    """Run the command in this process; returns its exit code."""
    from runner.commands.train import main

    sys.argv = ["runner", *options]
    return main()


def with_runner(steps: int, *more: str, start: Callable[[list[str]], int] = command) -> float:
    """Return steps per second of the runner, with logs, progress display and checkpoints.

    Args:
        steps: the number of steps.
        more: further overrides.
        start: trains the run that the overrides describe; see `run`.
    """
    options = ["model=tiny", "data.size=8", "data.crop=0", "schedule=constant", "optimizer.lr=0.05", "device=cpu"]
    options += [f"device.threads={torch.get_num_threads()}", "log_every=50", "eval_every=0", f"batch_size={BATCH}"]
    return run([*options, f"save_every={steps // 3}", f"steps={steps}", *more], start=start)


def run(options: list[str], warmup: int = 0, start: Callable[[list[str]], int] = command) -> float:
    """Return steps per second of a run in this process, including logs, checkpoints and progress display.

    Args:
        options: the overrides of the run.
        warmup: steps that are not counted.
        start: trains the run that the overrides describe, in this process, and returns 0 if it is done.
    """
    from runner import training

    times: list[float] = []
    step_done = training.Progress.step  # called at the end of every step, after its logs and checkpoints

    def timed(self: training.Progress, step: int) -> None:
        step_done(self, step)
        times.append(time.perf_counter())

    training.Progress.step = timed
    with tempfile.TemporaryDirectory() as root:
        if start([*options, f"output_root={root}"]):
            raise SystemExit(1)
    # Without the last step, which includes the final evaluation and checkpoint.
    return (len(times) - 2 - warmup) / (times[-2] - times[warmup])


CONTENDERS: Contenders = {
    "limit": limit,
    "plain": plain,
    "accelerate": accelerate,
    "lightning": lightning,
    "runner": with_runner,
    "runner, compiled step": lambda steps: with_runner(steps, "compile=step"),
}


def main() -> None:
    """Measure all contenders, or with `--run` a single one in this process."""
    options = parser(__doc__, CONTENDERS, repeats=7, steps=3000, threads=1)
    options.add_argument("--channels-last", action="store_true", help="for all (default: each with its default layout)")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    global CHANNELS_LAST
    CHANNELS_LAST = arguments.channels_last
    rates = measured("overhead", CONTENDERS, arguments, arguments.steps)
    layouts = "channels_last for all" if arguments.channels_last else "default memory formats"
    table = report(f"small network on digits, {arguments.threads} thread(s), {layouts}", "steps/s", rates, GOALS)
    write("overhead", [table], passed(arguments), "_channels_last" * arguments.channels_last)


if __name__ == "__main__":
    main()
