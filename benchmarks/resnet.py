"""ResNet50: the runner compared with a plain PyTorch loop with the same settings.

On a CPU, `python -m benchmarks.resnet`: 128×128, batch size 16, channels_last, float32. On a GPU: `benchmarks.gpu`.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from benchmarks.measure import Contenders, measured, parser, passed, report, write
from benchmarks.overhead import run
from runner.device import synchronize

GOALS = {("runner", "plain"): 0.97}


@dataclass(frozen=True)
class Setting:
    """The settings of both loops."""

    size: int
    batch: int
    steps: int
    warmup: int
    dtype: torch.dtype
    compile: bool
    device: str


CPU = Setting(size=128, batch=16, steps=12, warmup=3, dtype=torch.float32, compile=False, device="cpu")
GPU = Setting(size=224, batch=256, steps=40, warmup=10, dtype=torch.bfloat16, compile=False, device="cuda")


def plain(setting: Setting) -> float:
    """Return images per second of a hand-written loop over a fixed set of images on the device, without logs."""
    from torchvision.models import resnet50

    device = torch.device(setting.device)
    torch.backends.cudnn.benchmark = True
    torch.manual_seed(0)
    model = resnet50(weights=None).to(device, memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    if setting.compile:
        model.compile()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)
    images = torch.randn(setting.batch * 4, 3, setting.size, setting.size, device=device)
    labels = torch.randint(1000, (len(images),), device=device)
    began = 0.0
    for step in range(setting.warmup + setting.steps):
        if step == setting.warmup:
            synchronize(device)
            began = time.perf_counter()
        rows = torch.arange(setting.batch, device=device) + step % 4 * setting.batch
        with torch.autocast(device.type, setting.dtype, enabled=setting.dtype != torch.float32):
            loss = torch.nn.functional.cross_entropy(model(images[rows]), labels[rows])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    synchronize(device)
    return setting.steps * setting.batch / (time.perf_counter() - began)


def with_runner(setting: Setting) -> float:
    """Return images per second of the runner after the warm-up, with logs and progress display."""
    precision = {torch.float32: "32", torch.bfloat16: "bf16"}[setting.dtype]
    options = ["model=resnet50", "data=synthetic", f"data.size={setting.size}", f"data.num_samples={setting.batch * 4}"]
    options.append("data.holdout=8")  # evaluated at the end, which is not measured
    options += [f"batch_size={setting.batch}", f"precision={precision}", f"compile={str(setting.compile).lower()}"]
    options += ["schedule=constant", "optimizer.lr=0.01", "log_every=5", "eval_every=0", "save_every=0"]
    options += [f"steps={setting.warmup + setting.steps}", f"device={setting.device}"]
    return setting.batch * run(options, setting.warmup)


CONTENDERS: Contenders = {"plain": plain, "runner": with_runner}


def main(words: Sequence[str] | None = None) -> None:
    """Measure each loop several times, each time in a new process; with `--run`, one loop once, in this process."""
    options = parser(__doc__, CONTENDERS, repeats=5)
    options.add_argument("--device", default="cpu")
    options.add_argument("--compile", action="store_true")
    options.add_argument("--tiny", action="store_true", help="a rehearsal")
    arguments = options.parse_args(words)
    setting = replace(CPU if arguments.device == "cpu" else GPU, device=arguments.device, compile=arguments.compile)
    if arguments.tiny:
        setting = replace(setting, size=32, batch=4, steps=3, warmup=1)
    rates = measured("resnet", CONTENDERS, arguments, setting)
    kind = f"{setting.size}×{setting.size}, batch {setting.batch}, {setting.dtype}"
    table = report(f"ResNet50, {kind}", "images/s", rates, GOALS)
    write("resnet", [table], passed(arguments))


if __name__ == "__main__":
    main()
