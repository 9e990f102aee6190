"""The loop on padded text, which a worker collates, compared with a plain loop, Accelerate and Lightning.

`python -m benchmarks.text [--repeats 7] [--steps 2000]`. A batch is a dict of four tensors: 32 texts of 8 to 64 tokens,
padded to the longest one, their mask, their segments and their labels. The network is small, so that overhead is
visible: the mean of the tokens' embeddings, and a linear layer. All load batches ahead in one worker.
"""

import time
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from benchmarks.measure import Contenders, measured, parser, passed, report, write
from benchmarks.overhead import endless, run

BATCH = 32
GOALS = {("runner", "plain"): 1.0, ("runner", "lightning"): 1.5, ("runner", "accelerate"): 1.1}


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.segments, self.head = nn.Embedding(1000, 32), nn.Embedding(2, 32), nn.Linear(32, 4)

    def forward(self, ids: torch.Tensor, mask: torch.Tensor, segments: torch.Tensor) -> torch.Tensor:
        mask = mask.unsqueeze(2)
        return self.head(((self.words(ids) + self.segments(segments)) * mask).sum(1) / mask.sum(1))


# The runner takes these three from this file.


def model() -> nn.Module:
    torch.manual_seed(0)
    return Classifier()


def data() -> list[dict[str, Any]]:
    draw = torch.Generator().manual_seed(0)
    lengths = torch.randint(8, 65, (4096,), generator=draw).tolist()
    texts = [torch.randint(1, 1000, (length,), generator=draw) for length in lengths]
    return [{"ids": text, "segments": (text > 500).long(), "labels": len(text) % 4} for text in texts]


def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    ids = pad_sequence([each["ids"] for each in samples], batch_first=True)
    segments = pad_sequence([each["segments"] for each in samples], batch_first=True)
    labels = torch.tensor([each["labels"] for each in samples])
    return {"ids": ids, "mask": (ids > 0).float(), "segments": segments, "labels": labels}


def loader() -> torch.utils.data.DataLoader:
    options: dict[str, Any] = {"shuffle": True, "drop_last": True, "num_workers": 1, "persistent_workers": True}
    return torch.utils.data.DataLoader(data(), BATCH, collate_fn=collate, **options)  # pyright: ignore[reportArgumentType]


def sgd(network: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9, fused=True)


def cross_entropy(network: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    inputs = {name: each for name, each in batch.items() if name != "labels"}
    return nn.functional.cross_entropy(network(**inputs), batch["labels"])


def plain(steps: int) -> float:
    """Return steps per second of a loop over a DataLoader, without logs."""
    network, batches = model(), endless(loader())
    optimizer = sgd(network)
    next(batches)  # the start of the worker is not counted
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(network, next(batches)).backward()  # pyright: ignore[reportArgumentType]
        optimizer.step()
    return steps / (time.perf_counter() - began)


def accelerate(steps: int) -> float:
    """Return steps per second of the plain loop with Hugging Face Accelerate."""
    from accelerate import Accelerator  # pyright: ignore[reportMissingImports]

    accelerator, network = Accelerator(cpu=True), model()
    network, optimizer, batches = accelerator.prepare(network, sgd(network), loader())
    batches = endless(batches)
    next(batches)
    began = time.perf_counter()
    for _ in range(steps):
        optimizer.zero_grad()
        accelerator.backward(cross_entropy(network, next(batches)))  # pyright: ignore[reportArgumentType]
        optimizer.step()
    return steps / (time.perf_counter() - began)


def lightning(steps: int) -> float:
    """Return steps per second of Lightning's Trainer without logger, progress bar, checkpoints and evaluation."""
    import lightning as L  # pyright: ignore[reportMissingImports]

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network, self.times = model(), list[float]()

        def training_step(self, batch: dict[str, torch.Tensor], _: int) -> torch.Tensor:
            self.times.append(time.perf_counter())
            return cross_entropy(self.network, batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return sgd(self)

    module = Module()
    quiet = dict.fromkeys(("logger", "enable_progress_bar", "enable_checkpointing", "enable_model_summary"), False)
    L.Trainer(max_steps=steps, max_epochs=-1, accelerator="cpu", **quiet).fit(module, loader())
    return (len(module.times) - 1) / (module.times[-1] - module.times[0])


def with_runner(steps: int) -> float:
    """Return steps per second of the runner, with logs and a progress display."""
    options = [f"workload={__file__}", "data.workers=1", "data.holdout=0.1", f"batch_size={BATCH}", "optimizer=sgd"]
    options += ["optimizer.lr=0.05", "schedule=constant", "device=cpu", f"device.threads={torch.get_num_threads()}"]
    return run([*options, "log_every=50", "eval_every=0", "save_every=0", f"steps={steps}"], warmup=1)


CONTENDERS: Contenders = {"plain": plain, "accelerate": accelerate, "lightning": lightning, "runner": with_runner}


def main() -> None:
    """Measure all contenders, or with `--run` a single one in this process."""
    arguments = parser(__doc__, CONTENDERS, repeats=7, steps=2000, threads=1).parse_args()
    torch.set_num_threads(arguments.threads)
    rates = measured("text", CONTENDERS, arguments, arguments.steps)
    title = f"padded text through one worker, {arguments.threads} thread(s)"
    write("text", [report(title, "steps/s", rates, GOALS)], passed(arguments))


if __name__ == "__main__":
    main()
