"""One experiment: its parts, and the checks that need two parts at once."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from runner.batching import Accumulation, Plan
from runner.config import (
    ABSENT,
    build,
    check,
    check_range,
    component_fields,
    did_you_mean,
    errors_under,
    load_class,
    option_fields,
    typed_values,
)
from runner.data.base import Data
from runner.device import Device
from runner.env.base import Env
from runner.model import Model
from runner.optimizer import Optimizer
from runner.parallel.base import Parallel
from runner.precision import Precision
from runner.profiler import Profiler
from runner.schedule import Schedule
from runner.workloads.base import Workload

ROOMS: dict[str, type] = {
    "device": Device,
    "parallel": Parallel,
    "precision": Precision,
    "accumulation": Accumulation,
    "optimizer": Optimizer,
    "schedule": Schedule,
    "profiler": Profiler,
}
"""The config groups that every run has, and the base class that each accepts."""

MATERIALS: dict[str, type] = {"model": Model, "data": Data, "env": Env}
"""The config groups that a workload is made from, where it has a field of that name."""

_MOST = 2**31 - 1  # more steps, or samples in a step, are a slip of the finger


@dataclass
class Run:
    """One experiment, composed and checked. conf/config.yaml says what each scalar means."""

    device: Device
    parallel: Parallel
    precision: Precision
    accumulation: Accumulation
    workload: Workload
    optimizer: Optimizer
    schedule: Schedule
    profiler: Profiler
    name: str
    batch_size: int
    seed: int = 0
    steps: int | None = None
    epochs: float | None = None
    max_grad_norm: float | None = None
    log_every: int = 50
    eval_every: int | None = None
    save_every: int | None = None
    keep: int = 2
    resume: str = "never"
    deterministic: bool = False
    compile: bool = False
    channels_last: bool = True
    output_root: str = "outputs"
    config: dict[str, Any] = field(default_factory=dict, init=False)
    directory: Path = field(default=Path(), init=False)

    def __post_init__(self) -> None:
        plain = self.name.isprintable() and self.name.strip() not in ("", ".", "..") and not set(self.name) & set("/\\")
        check(plain, "name", self.name, "it becomes a directory's name", "use letters, digits, - and _")
        check(len(self.name.encode()) <= 200, "name", self.name, "it is too long for a directory", "shorten it")
        path = self.output_root.isprintable() and self.output_root.strip() != ""
        check(
            path, "output_root", self.output_root, "it is no path of a directory", "output_root=. is the one you are in"
        )
        check_range(self, "seed", least=0, most=2**63 - 1)
        for key in ("batch_size", "steps", "log_every"):
            check_range(self, key, least=1, most=_MOST)
        for key in ("eval_every", "save_every", "keep"):
            check_range(self, key, least=0, most=_MOST)
        check_range(self, "epochs", above=0, most=1_000_000)
        check_range(self, "max_grad_norm", above=0)
        measures = (self.steps, self.epochs, self.workload.num_steps(self.batch_size))
        known = any(measure is not None for measure in measures)
        check(known, "steps", None, "neither steps nor epochs says how long to train", "set epochs=10 or steps=1000")
        self.plan  # noqa: B018 (refuses a batch that does not divide)

    @property
    def plan(self) -> Plan:
        """The batch arithmetic, as this process sees it."""
        parallel = self.parallel
        return Plan(self.batch_size, self.accumulation.steps, parallel.data_shard, self.seed, parallel.turn)

    def prepare(self) -> None:
        """Do the checks that need the device and the data, and resolve what depends on them.

        Raises:
            ConfigError: while nothing has been written yet.
        """
        with errors_under("device"):
            device = self.parallel.device(self.device)
        with errors_under("parallel"):
            self.parallel.prepare(device, self)
        self.workload.check_plan(self.plan)  # now that the number of processes is known
        self.precision.check_device(device)
        self.workload.prepare()
        self.parallel.check_workload(self)
        epoch = self.workload.steps_per_epoch(self.batch_size)
        own = self.workload.num_steps(self.batch_size)
        if self.steps is None and own is not None:
            why = "this workload has no epochs, but a measure of its own"
            check(self.epochs is None, "epochs", self.epochs, why, "leave epochs=null, or set steps=N")
            self.steps = own
        if self.steps is None:
            assert self.epochs is not None
            check(epoch is not None, "epochs", self.epochs, "this workload has no epochs", "set steps=N")
            self.steps = max(1, math.ceil(self.epochs * (epoch or 1) - 1e-9))
        often = math.ceil(epoch) if epoch else max(1, self.steps // 10)
        self.eval_every = often if self.eval_every is None else self.eval_every
        self.save_every = often if self.save_every is None else self.save_every

    @property
    def num_steps(self) -> int:
        """How many optimizer steps the whole run has."""
        assert self.steps is not None, "prepare() resolves it"
        return self.steps

    @property
    def round_size(self) -> int:
        """Samples of the steps that are done at once: of one, but of several where processes take turns."""
        return self.batch_size * self.parallel.turn[1]

    @staticmethod
    def again(config: dict[str, Any]) -> Run:
        """The run of a resolved config, in whichever process."""
        return build_run(config)

    def due(self, every: int | None, step: int) -> bool:
        """Whether something done `every` so many steps (0: only at the end) is due after `step`.

        Where processes take turns, after the round of steps in which it falls.
        """
        return step == self.num_steps or (bool(every) and step % (every or 1) < self.parallel.turn[1])


@dataclass
class Result:
    """What became of a run; `result.json` is this. Metrics' keys are TensorBoard's tags.

    Args:
        status: `done`, `stopped` (by a signal, after saving), `diverged` or `crashed`.
        steps: optimizer steps done, those before a resume counted in.
        best: the best evaluation: metric, value, step.
        seconds: from the first step of this session to its end.
        samples_per_second: of training alone, evaluations and checkpoints left out.
        step_seconds: median and p90, the warm-up left out.
        notes: whatever else a reader of the numbers must know; rank 0's, as is the memory.
    """

    status: str
    steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    best: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    samples_per_second: float = 0.0
    step_seconds: dict[str, float] = field(default_factory=dict)
    peak_memory_bytes: int = 0
    world_size: int = 1
    config_hash: str = ""
    notes: dict[str, Any] = field(default_factory=dict)
    error: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def build_run(config: Mapping[str, Any]) -> Run:
    """The experiment that `config`, composed and resolved, describes.

    Raises:
        ConfigError: with the key that the user would type.
    """
    scalars = [name for name in option_fields(Run) if name not in ROOMS]
    known = [*scalars, *ROOMS, *MATERIALS, "workload"]
    for key in config:
        check(key in known, key, ABSENT, "there is no such key;", did_you_mean(key, known))
    parts = {room: build(_node(config, room), base, room) for room, base in ROOMS.items()}
    node = _node(config, "workload")
    with errors_under("workload"):
        needed = component_fields(load_class(node.get("_target_"), Workload))
    materials = {room: build(_node(config, room), MATERIALS[room], room) for room in needed}
    parts["workload"] = build(node, Workload, "workload", **materials)
    run = Run(**typed_values(Run, {key: config[key] for key in scalars if key in config}), **parts)
    run.config = dict(config)
    return run


def check_used(run: Run, overrides: Iterable[str]) -> None:
    """Refuse a material that was asked for, and that the workload is not made from.

    Args:
        overrides: as typed: `env=acrobot`, `data.size=32`.

    Raises:
        ConfigError: where leaving it unsaid would train something else than was meant.
    """
    used = component_fields(type(run.workload))
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        room = key.partition(".")[0]
        why = f"{type(run.workload).__name__} is not made from any {room}"
        check(room in used or room not in MATERIALS, key, value, why, "leave it out, or choose another workload")


def _node(config: Mapping[str, Any], room: str) -> Mapping[str, Any]:
    node = config.get(room)
    check(isinstance(node, Mapping), room, node, "nothing is chosen", f"choose one of the options in conf/{room}/")
    assert isinstance(node, Mapping)
    return node


class CrashedError(Exception):
    """A run ended by an error, which is its `__cause__`; `result` tells how far it had come."""

    def __init__(self, result: Result):
        super().__init__(result)
        self.result = result


_NOT_HASHED = ("name", "output_root", "resume")


def config_hash(config: Mapping[str, Any]) -> str:
    """Twelve hexadecimal digits for everything in `config` but where it is written."""
    hashed = {key: value for key, value in config.items() if key not in _NOT_HASHED}
    return hashlib.sha256(json.dumps(hashed, sort_keys=True, default=str).encode()).hexdigest()[:12]
