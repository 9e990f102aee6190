"""Tokens per second of `workload=language` beside a plain loop, Accelerate, Lightning and transformers' Trainer.

`python -m benchmarks.language [--size 10m] [--precision bf16] [--compile] [--repeats 5] [--steps 40]`. All train the
same network, with 1 or 10 million parameters, on the same contexts of a file of token ids, in the same order: 16
contexts of 256 bytes per step, AdamW, and gradients clipped to a norm of 1. All but the runner map the file into
memory, as nanoGPT does, and log nothing.
"""

import sysconfig
import tempfile
import time
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.measure import Contenders, measured, parser, passed, report, write
from benchmarks.overhead import run
from runner.batching import SampleOrder
from runner.models.gpt import GPT
from runner.seeds import derive

BATCH, CONTEXT, VOCABULARY, LR = 16, 256, 257, 0.002
WARMUP = 3
"""The steps that are not counted, in which networks are compiled and data loaders start."""
SIZES: dict[str, Any] = {
    "1m": {"layers": 5, "width": 128, "heads": 4},
    "10m": {"layers": 6, "width": 384, "heads": 6},
}
GOALS = {"plain": 0.97, "accelerate": 1.0, "lightning": 1.0, "trainer": 1.0}


class WithLoss(nn.Module):
    """The network and its loss, which are compiled as one."""

    def __init__(self, given: Namespace):
        super().__init__()
        torch.manual_seed(derive(0, "weights"))
        self.network = GPT(VOCABULARY, CONTEXT, **SIZES[given.size])
        if given.compile:
            self.compile()

    def forward(self, ids: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.network(ids).flatten(0, 1), targets.flatten())}


class Contexts(torch.utils.data.Dataset):
    """Contexts of token ids in a file, in the order in which the runner trains on them."""

    def __init__(self, file: Path, count: int):
        self.ids = np.memmap(file, np.uint16, "r")
        self.order = SampleOrder((len(self.ids) - 1) // CONTEXT, 0).indices(0, count).tolist()

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        start = self.order[number] * CONTEXT
        ids = torch.from_numpy(self.ids[start : start + CONTEXT + 1].astype(np.int64))
        return {"ids": ids[:-1], "targets": ids[1:]}


def text(folder: str) -> Path:
    """Write 4 Mi ids of bytes of the standard library, and 64 Ki to hold out; returns the file of the first."""
    sources = (path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    ids = np.frombuffer(b"".join(sources), np.uint8).astype(np.uint16)
    ids[: 1 << 22].tofile(Path(folder, "train.bin"))
    ids[1 << 22 :][: 1 << 16].tofile(Path(folder, "val.bin"))
    return Path(folder, "train.bin")


def loader(folder: str, steps: int) -> torch.utils.data.DataLoader:
    return torch.utils.data.DataLoader(Contexts(text(folder), steps * BATCH), BATCH)


def adamw(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(network.parameters(), lr=LR, weight_decay=0.01, fused=True)


def rate(times: list[float]) -> float:
    """Return tokens per second, given the times at which steps ended."""
    return (len(times) - 1 - WARMUP) * BATCH * CONTEXT / (times[-1] - times[WARMUP])


def plain(folder: str, given: Namespace, accelerator: Any = None) -> float:
    """Return the rate of a loop without logs; with an `Accelerator`, that of the loop in its documentation."""
    network, batches, times = WithLoss(given), loader(folder, given.steps), list[float]()
    optimizer, backward, clip = adamw(network), torch.Tensor.backward, nn.utils.clip_grad_norm_
    if accelerator is not None:
        network, optimizer, batches = accelerator.prepare(network, optimizer, batches)
        backward, clip = accelerator.backward, accelerator.clip_grad_norm_
    for batch in batches:
        with torch.autocast("cpu", torch.bfloat16, enabled=given.precision == "bf16" and accelerator is None):
            loss = network(**batch)["loss"]
        backward(loss)
        clip(network.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        times.append(time.perf_counter())
    return rate(times)


def accelerate(folder: str, given: Namespace) -> float:
    """Return the rate of the plain loop with Hugging Face Accelerate."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    return plain(folder, given, Accelerator(cpu=True, mixed_precision="bf16" if given.precision == "bf16" else "no"))


def lightning(folder: str, given: Namespace) -> float:
    """Return the rate of Lightning's Trainer without logger, progress bar, checkpoints and evaluation."""
    import lightning as L  # pyright: ignore[reportMissingImports]

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.times = WithLoss(given), list[float]()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            return self.network(**batch)["loss"]

        def on_train_batch_end(self, *_: Any) -> None:
            self.times.append(time.perf_counter())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    module, precision = Module(), "bf16-mixed" if given.precision == "bf16" else "32-true"
    options = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    options |= {"accelerator": "cpu", "precision": precision, "gradient_clip_val": 1.0}
    L.Trainer(max_steps=given.steps, max_epochs=-1, **options).fit(module, loader(folder, given.steps))
    return rate(module.times)


def trainer(folder: str, given: Namespace) -> float:
    """Return the rate of the Trainer of transformers without logs, progress bar, checkpoints and evaluation."""
    import transformers  # pyright: ignore[reportMissingImports]

    times: list[float] = []

    class Clock(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            times.append(time.perf_counter())

    class InOrder(transformers.Trainer):
        def get_train_dataloader(self) -> torch.utils.data.DataLoader:
            return loader(folder, given.steps)

    options = {"save_strategy": "no", "logging_strategy": "no", "report_to": "none"}
    options |= {"max_steps": given.steps, "max_grad_norm": 1.0, "lr_scheduler_type": "constant", "disable_tqdm": True}
    options |= {"per_device_train_batch_size": BATCH, "use_cpu": True, "bf16": given.precision == "bf16"}
    network, settings = WithLoss(given), transformers.TrainingArguments(folder, **options)
    InOrder(network, settings, optimizers=(adamw(network), None), callbacks=[Clock()]).train()
    return rate(times)


def with_runner(folder: str, given: Namespace) -> float:
    """Return the rate of the runner, with logs and a progress display."""
    options = ["workload=language", "data=tokens", f"data.file={text(folder).parent}", f"data.context={CONTEXT}"]
    options += [f"data.vocabulary_size={VOCABULARY}", f"batch_size={BATCH}", f"optimizer.lr={LR}", "schedule=constant"]
    options += [f"model.{key}={value}" for key, value in SIZES[given.size].items()] + [f"precision={given.precision}"]
    options += ["workload.sample_tokens=0", "device=cpu", f"device.threads={given.threads}", "log_every=10"]
    options += ["eval_every=0", "save_every=0", f"steps={given.steps}", f"compile={str(given.compile).lower()}"]
    return BATCH * CONTEXT * run(options, warmup=WARMUP)


EVERY = {"plain": plain, "accelerate": accelerate, "lightning": lightning, "trainer": trainer, "runner": with_runner}
PACKAGES = {"accelerate": ["accelerate"], "lightning": ["lightning"], "trainer": ["transformers", "accelerate"]}
MISSING = [name for name, packages in PACKAGES.items() if not all(map(find_spec, packages))]
CONTENDERS: Contenders = {name: function for name, function in EVERY.items() if name not in MISSING}


def main() -> None:
    """Measure all contenders, or with `--run` a single one in this process."""
    options = parser(__doc__, CONTENDERS, repeats=5, steps=40, threads=1)
    options.add_argument("--size", choices=SIZES, default="1m", help="the number of parameters")
    options.add_argument("--precision", choices=("32", "bf16"), default="32")
    options.add_argument("--compile", action="store_true")
    arguments = options.parse_args()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as folder:
        rates = measured("language", CONTENDERS, arguments, folder, arguments)
    if MISSING:
        print(f"not installed, and left out: {', '.join(MISSING)}")
    goals = {("runner", name): goal for name, goal in GOALS.items() if name in CONTENDERS}
    title = f"language model of {arguments.size} parameters, precision {arguments.precision}"
    title += f"{', compiled' * arguments.compile}, {arguments.threads} thread(s)"
    variant = f"_{arguments.size}_{arguments.precision}{'_compiled' * arguments.compile}"
    write("language", [report(title, "tokens/s", rates, goals)], passed(arguments), variant)


if __name__ == "__main__":
    main()
