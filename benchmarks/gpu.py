"""Everything that only a machine with an accelerator can show; eight and a half minutes on one H200.

`python -m benchmarks.gpu [--only PART,PART] [--again] [--repeats N] [--data DIR] [--out DIR]`. Each part writes
`PART.json` when it ends, and a part that is there already is not repeated, so that a run that was cut off goes on.
Afterwards, `report.md` and `report.json` contain all parts: please send both in an issue. `--rehearse` runs every part
with tiny sizes on the device that there is, which may be a CPU.
"""

import argparse
import hashlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measure import interleave, result, runner
from benchmarks.resnet import CONTENDERS
from runner.device import flops_per_second, synchronize
from runner.system.accelerator import accelerator_type, total_bytes
from runner.system.provenance import environment

PRECISIONS = ("32", "bf16", "16")
VERDICTS = {0: "the same", 1: "DIFFERENT", 2: "refused", 3: "cannot be judged"}
ROOT = Path(__file__).parent.parent
TRAINING_FLOPS = 3 * 2 * 4.09e9
"""FLOPs per image of 224×224: 4.09 G multiply-adds forward (ResNet50 v1.5; He et al., 2016), twice that backward."""
BYTES_PER_IMAGE = 45e6
"""Memory of training, for each image of a batch, in bfloat16."""

Rows = list[list[Any]]
"""What was looked at, and what was found."""


@dataclass(frozen=True)
class Machine:
    """The devices, how often what is timed is repeated, and whether everything is only rehearsed."""

    kind: str
    count: int
    repeats: int
    tiny: bool
    data: Path
    out: Path

    @property
    def device(self) -> torch.device:
        return torch.device("cpu") if self.kind == "cpu" else torch.device(self.kind, 0)

    def modes(self) -> list[str]:
        """Return the parallel modes that this machine can run; a CPU stands in for two devices."""
        several = ["parallel=pipeline"] if self.count > 1 or self.kind == "cpu" else []
        modes = [f"parallel={name}" for name in ("single", "dp", "model", "ddp", "fsdp")]
        return [*modes, *several, "parallel=pipeline parallel.engine=streams"]

    def small(self) -> list[str]:
        """Return the options of a network that trains in milliseconds."""
        return ["model=tiny", "data.size=8", "data.crop=0", "batch_size=64", f"device={self.kind}", "eval_every=0"]

    def resnet(self) -> list[str]:
        """Return the options of ResNet50, in a rehearsal of a small network, on images that are on the device."""
        model, size, batch = ("tiny", 8, 16) if self.tiny else ("resnet50", 224, 256)
        options = [f"model={model}", "data=synthetic", f"data.size={size}", f"data.num_samples={4 * batch}"]
        options += ["data.holdout=8", f"batch_size={batch}", "precision=bf16", "channels_last=true"]
        options += [f"device={self.kind}", "optimizer.lr=0.001", "schedule=constant"]
        return [*options, "log_every=10", "eval_every=0", "save_every=0"]

    def peak(self, dtype: torch.dtype) -> float:
        return flops_per_second(self.device, dtype, 256 if self.tiny else 8192)

    def steps(self, wanted: int) -> str:
        return f"steps={min(wanted, 4) if self.tiny else wanted}"

    def some(self, items: Sequence[Any]) -> Sequence[Any]:
        """Return `items`, or only the last of them in a rehearsal."""
        return items[-1:] if self.tiny else items


def device(machine: Machine) -> Rows:
    """The devices, the versions, and the limits of the first device, measured by a matrix product and by a copy."""
    found = environment()
    rows = [[each["device"], f"{each['name']}, {each['total_bytes'] / 2**30:.1f} GiB"] for each in found["devices"]]
    rows += [[name, str(version)] for name, version in found["versions"].items()]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        rows.append([f"{str(dtype).removeprefix('torch.')} products, TFLOP/s", machine.peak(dtype) / 1e12])
    return [*rows, ["copies, bytes read and written, GB/s", bytes_per_second(machine) / 1e9]]


def bytes_per_second(machine: Machine) -> float:
    source, times = torch.ones(2**20 if machine.tiny else 2**30, dtype=torch.uint8, device=machine.device), []
    for _ in range(20):
        synchronize(machine.device)
        began = time.perf_counter()
        source.clone()
        synchronize(machine.device)
        times.append(time.perf_counter() - began)
    return 2 * source.numel() / statistics.median(times)


def tests(machine: Machine) -> Rows:
    """The tests that need a device, one of which fails if training waits for the device between two logs."""
    marked = [str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8")]
    selected = ["tests/test_seeds.py"] if machine.tiny else ["-m", "gpu", "-n", "0", *marked]
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *selected]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    failed = [line.removeprefix("FAILED ")[:200] for line in lines if line.startswith(("FAILED", "ERROR"))]
    verdict = {0: "passed", 5: "no tests"}.get(done.returncode, "failed")
    return [["pytest", verdict], *([each, "failed"] for each in failed)]


def verify(machine: Machine) -> Rows:
    """Does each mode compute in each precision what one device computes? Are killed and resumed runs the same?"""

    def compared(cell: str) -> list[str]:
        options = [*cell.split(), "accumulation=2", "model=tiny", "data.size=8", "data.crop=0", "batch_size=32"]
        done = runner("verify", *options, f"device={machine.kind}")
        lines = (done.stdout + done.stderr).strip().splitlines()
        return [cell, VERDICTS.get(done.returncode, "CRASHED"), *([] if done.returncode == 0 else lines[-1:])]

    modes, precisions = machine.some(machine.modes()), machine.some(PRECISIONS)
    cells = [f"{mode} precision={precision}" for mode in modes for precision in precisions]
    killed = machine.some(("parallel=ddp precision=bf16", "precision=16", "precision=32"))
    with ThreadPoolExecutor(1 if machine.tiny else os.cpu_count()) as pool:  # nothing is timed here
        resumed = [pool.submit(_resumed, machine, options) for options in killed]  # they take longest
        return [*pool.map(compared, cells), *(each.result() for each in resumed)]


def _resumed(machine: Machine, more: str) -> list[str]:
    """Compare a run that is killed after a checkpoint and resumed with one that is not killed, bit for bit."""
    options = [*machine.small(), *more.split(), "deterministic=true", "save_every=20", "keep=2"]
    options.append("steps=60" if machine.tiny else "steps=400")
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor() as pool:
        whole, cut = Path(scratch, "whole"), Path(scratch, "cut")
        uncut = pool.submit(_train, options, whole)
        words = [sys.executable, "-m", "runner", *options, f"--run-directory={cut}"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        while process.poll() is None and not any(cut.glob("checkpoints/step_*/manifest.json")):
            time.sleep(0.01)
        was_killed = process.poll() is None
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        _train([f"resume={cut}"], cut)
        uncut.result()
        verdict = "the same weights" if _weights(whole) == _weights(cut) else "OTHER WEIGHTS"
        return [f"{more}, killed and resumed", verdict, *([] if was_killed else ["it ended before it was killed"])]


def memory(machine: Machine) -> Rows:
    """A batch that does not fit into the memory, with `accumulation=auto`."""
    batch = 16 if machine.tiny else 1024 * math.ceil(1.5 * total_bytes(machine.device) / BYTES_PER_IMAGE / 1024)
    larger = [f"batch_size={batch}", f"data.num_samples={batch}", "accumulation=auto", "steps=1", "keep=0"]
    found = _train([*machine.resnet(), *larger])
    peak = ["peak, GiB", found["peak_memory_bytes"] / 2**30]
    return [[f"batch_size={batch} accumulation=auto", found["status"]], peak]


def resnet50(machine: Machine) -> Rows:
    """ResNet50, bfloat16, channels_last: images per second of the runner and of a plain loop (goal: 0.97 of it)."""
    rows: Rows = []
    for compiled in machine.some((["--compile"], [])):
        options = ["--device", machine.kind, *compiled, *(["--tiny"] if machine.tiny else [])]
        rates = interleave("benchmarks.resnet", list(CONTENDERS), machine.repeats, options)
        each = {name: statistics.median(values) for name, values in rates.items()}
        kind = "compiled" if compiled else "eager"
        rows += [[f"{name}, {kind}, images/s", rate] for name, rate in each.items()]
        rows.append([f"runner / plain, {kind}", each["runner"] / each["plain"]])
        peak = machine.peak(torch.bfloat16)
        rows.append([f"runner, {kind}, share of the measured peak", each["runner"] * TRAINING_FLOPS / peak])
    return rows


def users_command(machine: Machine) -> Rows:
    """The command of the README: `parallel=ddp precision=16 workload=resnet50`."""
    options = ["parallel=ddp", "precision=16", "workload=resnet50", f"device={machine.kind}", "keep=0"]
    smaller = ["model=tiny", "data.size=8", "data.num_samples=16", "data.holdout=8", "batch_size=8", "epochs=1"]
    found = _train([*options, *(smaller if machine.tiny else [])])
    return [["images/s", found["samples_per_second"]], ["status", found["status"]]]


def small(machine: Machine) -> Rows:
    """A small network and the agent, whose steps are short: on the CPU and on the device, there also compiled."""
    how = "device=[cpu,{0},{0}],compile=[false,false,step]" if not machine.tiny else "device=[{0}],compile=[false]"
    each = [f"how=zip({how.format(machine.kind)})", "eval_every=0", "keep=0"]
    network = [option for option in machine.small() if not option.startswith(("device=", "eval_every="))]
    steps, counts = (1500, "50") if machine.tiny else (5000, "10,50")
    agent = ["workload=dqn", f"env.num_envs={counts}", f"workload.env_steps={steps}", "workload.eval_episodes=2"]
    rows = []
    for job, found in _sweep([*network, machine.steps(1000), *each]).items():
        rows.append([f"small network, {job}, steps/s", found["samples_per_second"] / 64])
    for job, found in _sweep([*agent, "batch_size=128", *each]).items():
        rows.append([f"agent, {job}, updates/s", found["samples_per_second"] / 128])
        rows.append([f"agent, {job}, environment steps/s, start included", steps / found["seconds"]])
    return rows


def cifar10(machine: Machine) -> Rows:
    """CIFAR-10 from one config (airbench, hand-tuned: 94 % in 2.6 s on an A100)."""
    if not (machine.data / "cifar-10-batches-py").is_dir():
        return [["not run", "cifar-10-batches-py is not in the directory of --data"]]
    options = ["experiment=cifar10", f"data.root={machine.data}", f"device={machine.kind}", "keep=0"]
    found = _train([*options, *(["steps=2", "batch_size=16", "model.depth=18"] if machine.tiny else [])])
    return [["accuracy", found["metrics"]["eval/accuracy"]], ["seconds", found["seconds"]]]


def images(machine: Machine) -> Rows:
    """JPEG files with data workers, page-locked memory and a copy stream, beside images that are on the device."""
    options = [option for option in machine.resnet() if not option.startswith("data")]
    size = 8 if machine.tiny else 224
    with tempfile.TemporaryDirectory() as scratch:
        _write_images(Path(scratch, "photos"), 24 if machine.tiny else 2048, 2 * size)
        of_files = ["data=imagefolder", f"data.root={scratch}/photos", f"data.size={size}", machine.steps(40)]
        files = _train([*options, *of_files, "keep=0"])["samples_per_second"]
    stored = _train([*machine.resnet(), machine.steps(40), "keep=0"])["samples_per_second"]
    return [["files, images/s", files], ["on the device, images/s", stored], ["share", files / stored]]


def modes(machine: Machine) -> Rows:
    """ResNet50 in the parallel modes, without those that need several devices: images per second of all together."""
    names = [mode.removeprefix("parallel=") for mode in machine.modes() if " " not in mode]
    names = machine.some(names if machine.count > 1 else ["single", "ddp", "fsdp"])
    sweeps = [
        [f"parallel={','.join(names)}"],
        *([["parallel=pipeline", "parallel.engine=streams"]] if machine.count > 1 else []),
    ]
    found = {
        job: each["samples_per_second"]
        for more in sweeps
        for job, each in _sweep([*machine.resnet(), machine.steps(20), "keep=0", *more]).items()
    }
    return [[job, rate, rate / next(iter(found.values()))] for job, rate in found.items()]


def split_size(machine: Machine) -> Rows:
    """The studies of the pipeline: run times over `split_size` and of three modes, with their pictures."""
    if machine.count < 2 and not machine.tiny:
        return [["not run", "one device"]]
    shorter = ["steps=1", "seed=0", "model=tiny", "data.size=8", "data.num_samples=8", "data.holdout=8"]
    shorter += ["batch_size=8", "parallel.split_size=4", "parallel.engine=streams"]  # no ranks: it starts faster
    rows = []
    for study in machine.some(("resnet50_modes", "split_size")):
        words = ["-m", f"experiment={study}", f"device={machine.kind}", *(shorter if machine.tiny else [])]
        with tempfile.TemporaryDirectory() as scratch:
            done = runner(*words, f"output_root={scratch}")
            plotted = runner("plot", scratch, f"--out={machine.out / study}")
            text = (done.stdout + done.stderr + plotted.stderr)[-500:]
            rows.append([study, text if done.returncode or plotted.returncode else f"{machine.out.name}/{study}/*.png"])
    return rows


_ALL = (device, tests, verify, users_command, resnet50, small, images, memory, modes, cifar10, split_size)
PARTS: dict[str, Callable[[Machine], Rows]] = {part.__name__: part for part in _ALL}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the parts that have not been run, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help=f"some of {', '.join(PARTS)}")
    parser.add_argument("--again", action="store_true", help="repeat parts that have been run")
    parser.add_argument("--data", type=Path, default=Path("data"), help="the directory of cifar-10-batches-py")
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"))
    parser.add_argument("--repeats", type=int, default=1, help="of ResNet50 beside a plain loop")
    parser.add_argument("--rehearse", action="store_true", help="tiny sizes, on any device")
    options = parser.parse_args(arguments)
    wanted = options.only.split(",")
    if unknown := [name for name in wanted if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]}: {', '.join(PARTS)}")
    kind = accelerator_type()
    if kind is None and not options.rehearse:
        parser.error("torch finds no accelerator here; `python -m runner doctor` says more, --rehearse uses the CPU")
    count = torch.accelerator.device_count()
    data, out = options.data.resolve(), options.out.resolve()
    machine = Machine(kind or "cpu", count, options.repeats, options.rehearse, data, out)
    options.out.mkdir(parents=True, exist_ok=True)
    for name in wanted:
        path = options.out / f"{name}.json"
        if path.exists() and not options.again:
            continue
        print(f"{name}: {PARTS[name].__doc__}", file=sys.stderr, flush=True)
        began = time.perf_counter()
        try:
            rows = PARTS[name](machine)
        except Exception as error:  # the other parts are of use, too
            rows = [["FAILED", f"{type(error).__name__}: {error}"[-1500:]]]
        path.write_text(json.dumps({"rows": rows, "seconds": time.perf_counter() - began}, indent=2) + "\n", "utf-8")
    paths = {name: options.out / f"{name}.json" for name in PARTS}
    parts = {name: json.loads(path.read_text()) for name, path in paths.items() if path.exists()}
    report = {"environment": environment(), "parts": parts}
    (options.out / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    text = "\n".join(_markdown(name, part) for name, part in parts.items())
    (options.out / "report.md").write_text(text, encoding="utf-8")
    print(text)
    print(f"please send {options.out}/report.md and report.json")


def _markdown(name: str, part: dict[str, Any]) -> str:
    def cell(value: Any) -> str:
        return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|").replace("\n", " ")

    width = max(2, *(len(row) for row in part["rows"]))
    rows = ["| " + " | ".join(map(cell, [*row, *[""] * (width - len(row))])) + " |" for row in part["rows"]]
    head = f"\n### {name} ({part['seconds']:.0f} s)\n\n{PARTS[name].__doc__}\n"
    return "\n".join([head, "| " + " | ".join([""] * width) + " |", "|" + "---|" * width, *rows])


def _train(options: Sequence[str], directory: Path | None = None) -> dict[str, Any]:
    """Train, in a directory of its own or in `directory`, and return the result."""
    with tempfile.TemporaryDirectory() as scratch:
        where = f"--run-directory={directory or Path(scratch, 'run')}"
        done = runner(*options, *([] if "resume=" in options[0] else [where]))
        if done.returncode:
            text = (done.stdout + done.stderr)[-800:]
            raise RuntimeError(f"{' '.join(options)}: exit code {done.returncode}: {text}")
        return result(directory or Path(scratch, "run"))


def _sweep(options: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Train each combination, one after another, in processes that share their imports; returns results by values."""
    with tempfile.TemporaryDirectory() as scratch:
        done = runner("-m", *options, "sweep.slots=1", f"output_root={scratch}")
        if done.returncode:
            raise RuntimeError(
                f"{' '.join(options)}: exit code {done.returncode}: {(done.stdout + done.stderr)[-800:]}"
            )
        jobs = sorted(path.parent for path in Path(scratch).rglob("result.json"))
        return {job.name.partition("-")[2]: result(job) for job in jobs}


def _weights(directory: Path) -> str:
    """Return the SHA-256 of the last weights of a run."""
    return hashlib.sha256(max(directory.glob("checkpoints/step_*/model.safetensors")).read_bytes()).hexdigest()


def _write_images(folder: Path, count: int, side: int) -> None:
    """Write `count` JPEG files of `side` × `side` pixels, of a size like that of photos, in two class directories."""
    from PIL import Image

    def write(number: int) -> None:
        path = folder / "ab"[number % 2] / f"{number}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        coarse = torch.randint(256, (side // 8, side // 8, 3), generator=torch.Generator().manual_seed(number))
        Image.fromarray(coarse.byte().numpy()).resize((side, side), Image.Resampling.BICUBIC).save(path, quality=90)

    with ThreadPoolExecutor() as pool:
        list(pool.map(write, range(count)))


if __name__ == "__main__":
    main()
