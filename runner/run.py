"""An experiment: its components, the checks that involve several components, and what depends on the machine."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch

from runner.batching import Accumulation, Plan
from runner.config import user_code
from runner.config.errors import ABSENT, ConfigError, check, did_you_mean, errors_under
from runner.config.limits import NonNegativeInt, PositiveInt, Range
from runner.config.options import chosen_option, root_keys
from runner.config.other_names import type_instead
from runner.config.overrides import LOCATION_KEYS
from runner.config.schema import build, component_fields, load_class, option_fields, plain_options, typed_values
from runner.data.base import Data
from runner.device import Device, device_name
from runner.ema import Ema
from runner.env.base import Env
from runner.model.base import Model
from runner.model.user import UserModel
from runner.optimizer import Optimizer
from runner.optimizer_trial import ALL, SAME
from runner.parallel.base import Parallel
from runner.parallel.collectives import Collectives
from runner.parallel.session import Session
from runner.precision import Precision
from runner.profiler import Profiler
from runner.schedule import Schedule, with_function
from runner.stop import Stop
from runner.system.secrets import redacted_values
from runner.tracking.base import Tracker
from runner.tracking.recorder import flatten
from runner.workloads.base import Workload, check_metrics

CONFIG_GROUPS: dict[str, type] = {
    "device": Device,
    "parallel": Parallel,
    "precision": Precision,
    "accumulation": Accumulation,
    "optimizer": Optimizer,
    "schedule": Schedule,
    "ema": Ema,
    "stop": Stop,
    "profiler": Profiler,
    "tracking": Tracker,
}
"""The config groups of every run except `workload`, with the base class of each."""

WORKLOAD_INPUTS: dict[str, type] = {"model": Model, "data": Data, "env": Env}
"""The config groups that are passed to a workload if it has fields of these names, with the base class of each."""


@dataclass
class Run:
    """The components and options of one experiment; conf/config.yaml documents them.

    The options of a `Run` do not change. Values that depend on the machine, the data or the process are in the
    `Session` that `prepare` returns.
    """

    device: Device
    parallel: Parallel
    precision: Precision
    accumulation: Accumulation
    workload: Workload
    optimizer: Optimizer
    schedule: Schedule
    ema: Ema
    stop: Stop
    profiler: Profiler
    tracking: Tracker
    name: str
    batch_size: PositiveInt
    seed: Annotated[int, Range(least=0, most=2**63 - 1)] = 0
    repeat: NonNegativeInt = 0
    steps: PositiveInt | None = None
    epochs: Annotated[float, Range(above=0, most=1_000_000)] | None = None
    max_grad_norm: Annotated[float, Range(above=0)] | None = None
    log_every: PositiveInt = 50
    eval_every: NonNegativeInt | None = None
    save_every: NonNegativeInt | None = None
    keep: NonNegativeInt = 2
    resume: str = "never"
    deterministic: bool = False
    compile: bool | Literal["blocks", "step"] = False
    channels_last: bool | Literal["auto"] = "auto"
    proof: bool | Literal["auto"] = "auto"
    code: dict[str, Any] = field(default_factory=dict)
    output_root: str = "outputs"
    config: dict[str, Any] = field(default_factory=dict, init=False)
    """The config from which the run was built, as plain values."""

    def __post_init__(self) -> None:
        plain = self.name.isprintable() and self.name.strip() not in ("", ".", "..") and not set(self.name) & set("/\\")
        check(plain, "name", self.name, "it becomes a directory's name", "use letters, digits, - and _")
        check(len(self.name.encode()) <= 200, "name", self.name, "it is too long for a directory", "shorten it")
        path = self.output_root.isprintable() and self.output_root.strip() != ""
        remedy = "output_root=. is the current directory"
        check(path, "output_root", self.output_root, "it is not the path of a directory", remedy)
        if self.channels_last == "auto":  # code of the user's may need contiguous tensors, for example for `view`
            model = getattr(self.workload, "model", None)
            self.channels_last = type(model).__module__.startswith("runner.") and not isinstance(model, UserModel)
        if self.steps is None and self.epochs is None and self.workload.num_steps(self.batch_size) is None:
            why = "neither steps nor epochs says how long to train"
            raise ConfigError("steps", None, why, "set epochs=10 or steps=1000")
        Plan(self.batch_size, self.accumulation.count)  # raises ConfigError if the batch is not divisible

    def prepare(self, collectives: Collectives) -> Session:
        """Load the data, run the checks that need the device or the data, and return the session of this process.

        Raises:
            ConfigError: if a check fails. The run directory is created only after all checks have passed.
        """
        session = self.session_with_data(collectives, self.workload.prepare)
        epoch = self.workload.steps_per_epoch(self.batch_size)
        num_steps = self._num_steps(epoch)
        once_an_epoch = math.ceil(epoch) if epoch else max(1, num_steps // 10)
        eval_every = once_an_epoch if self.eval_every is None else self.eval_every
        check_metrics(self.workload)
        tags = ", ".join(sorted(f"eval/{name}" for name in session.eval_metrics)) + self.workload.other_metrics
        self.stop.check_evaluations(session.eval_metrics, tags, eval_every, self.workload.best_possible)
        self.schedule.check_evaluations(session.eval_metrics, tags, eval_every)
        for schedule in (with_function(self.schedule), *self.optimizer.schedules().values()):
            schedule.check_length(num_steps)
        save_every = once_an_epoch if self.save_every is None else self.save_every
        lengths = {"num_steps": num_steps, "eval_every": eval_every, "save_every": save_every}
        return replace(session, steps_per_epoch=epoch, **lengths)

    def session_with_data(self, collectives: Collectives, load: Callable[[], None]) -> Session:
        """Return a session that has no lengths yet, after `load` has loaded the data of the workload.

        Raises:
            ConfigError: if a check fails.
        """
        user_code.check_given(self.code, self.resume)
        session = self.session(collectives)
        is_missing = {ALL: session.plan.splits_network, SAME: session.plan.num_data_ranks > 1}
        for need in (need for need, missing in is_missing.items() if missing):
            key, mode = self.optimizer.key_that_needs(need), chosen_option("parallel", self.parallel)
            name = chosen_option("optimizer", self.optimizer) if key == "optimizer" else ABSENT
            why = f"it needs {need}, which a process of {mode} has not"
            check(not key, key, name, why, "parallel=single, or optimizer=adamw")
        if self.ema.decay is not None and session.plan.steps_per_round > 1:
            why = "the processes of this mode do not wait for each other: there is no sequence of weights to average"
            raise ConfigError("ema.decay", self.ema.decay, why, "ema.decay=null, or another parallel mode")
        for tracker in self.tracking.backends():
            tracker.check()
        self.workload.check_plan(session.plan)
        self.precision.check_device(session.device)
        if isinstance(data := getattr(self.workload, "data", None), Data):
            data.keeps_double = self.precision.keeps_double
        load()
        self.parallel.check(session)
        return session

    def session(self, collectives: Collectives) -> Session:
        """Return the session of a process whose data has not been loaded, and whose lengths are not known yet.

        Raises:
            ConfigError: as in `Parallel.divide`.
        """
        plan = Plan(self.batch_size, self.accumulation.count, seed=self.seed)
        session = Session(collectives, plan, self.workload, self.precision, bool(self.channels_last), self.compile)
        return replace(session, plan=self.parallel.divide(session))

    @contextmanager
    def settings(self, device: torch.device) -> Iterator[None]:
        """A context in which torch's global flags are those of the run (see `Device.settings`), and data may be read.

        The data workers end with it.
        """
        settings = self.device.settings(device, self.deterministic, self.workload.num_data_workers)
        with settings, closing(self.workload):
            yield

    def describe(self, session: Session, model: str, directory: Path) -> str:
        """Return the first lines of the log; `model` describes the whole model, before a mode splits it."""
        threads, count = torch.get_num_threads(), session.world_size
        steps = f"{session.num_steps:,} step{'s' * (session.num_steps != 1)}"
        lines = {
            "model": model,
            **self.workload.describe(),
            "device": f"{device_name(session.device)}, {threads} CPU thread{'s' * (threads > 1)} per process",
            "precision": type(self.precision).description,
            "parallel": f"{self.parallel.description}, {count} process{'es' * (count > 1)}",
            "batch": session.plan.describe(),
            "length": f"{steps}, {session.num_steps * self.batch_size:,} samples",
            "directory": os.path.relpath(directory),
        }
        return "\n".join(f"{key:<10} {text}" for key, text in lines.items())

    def _num_steps(self, epoch: float | None) -> int:
        if self.steps is not None:
            return self.steps
        length = self.workload.num_steps(self.batch_size)
        if length is not None:
            why = "this workload has no epochs: its own options say how long it is"
            check(self.epochs is None, "epochs", self.epochs, why, "leave epochs=null, or set steps=N")
            return length
        assert self.epochs is not None
        why = "this workload has no epochs (a stream, for example, has no length), so that steps=… is required"
        check(epoch is not None, "steps", None, why, "set steps=N in place of epochs")
        return max(1, math.ceil(self.epochs * (epoch or 1) - 1e-9))


def build_run(config: Mapping[str, Any]) -> Run:
    """Build the run that the composed and resolved `config` describes.

    Raises:
        ConfigError: if an option is unknown or invalid; the error names the key as the user would type it.
    """
    scalars = [name for name in option_fields(Run) if name not in CONFIG_GROUPS]
    known = [*scalars, *CONFIG_GROUPS, *WORKLOAD_INPUTS, "workload"]
    for key in config:
        if key not in known:
            inner = config[key] if isinstance(config[key], Mapping) else ()
            others = filter(None, map(type_instead, (key, *(f"{key}.{name}" for name in inner))))
            remedy = next(others, did_you_mean(key, root_keys()))
            raise ConfigError(key, ABSENT, "there is no such key;", remedy)
    parts = {group: build(_node(config, group), base, group) for group, base in CONFIG_GROUPS.items()}
    node = _node(config, "workload")
    with errors_under("workload"):
        needed = component_fields(load_class(node.get("_target_"), Workload))
    inputs = {group: build(_node(config, group), WORKLOAD_INPUTS[group], group) for group in needed}
    parts["workload"] = build(node, Workload, "workload", **inputs)
    run = Run(**typed_values(Run, {key: config[key] for key in scalars if key in config}), **parts)
    nodes = {"workload": run.workload} | {group: getattr(run, group) for group in CONFIG_GROUPS}
    nodes |= {group: getattr(run.workload, group) for group in needed}
    run.config = plain_options(run, config)
    run.config |= {group: plain_options(component, config[group]) for group, component in nodes.items()}
    modules = {"model": ".user", "data": ".user", "loss": ".user", "metrics": ".user"}
    modules |= dict.fromkeys(user_code.STEPS, ".user_steps")
    for part, module in modules.items():
        group = part if part in ("model", "data") else "workload"
        chosen, why = str((config.get(group) or {}).get("_target_")), f"the config chooses another {group}"
        used = part not in run.code or chosen.rpartition(".")[0].endswith(module)
        check(used, part, chosen, f"code is given that would not be used: {why}", f"leave out {group}=…, or the code")
    return run


def check_used(run: Run, overrides: Iterable[str]) -> None:
    """Refuse `overrides` that the run would ignore: of a group that the workload does not use, or several options."""
    used = component_fields(type(run.workload))
    groups = (*CONFIG_GROUPS, *WORKLOAD_INPUTS, "workload")
    for text in overrides:
        key, _, value = text.lstrip("+~").partition("=")
        why = "only the last of several options of a group would be used"
        check(key not in groups or not value.startswith("["), key, value, why, "choose one of them")
        group = key.partition(".")[0]
        if group in WORKLOAD_INPUTS and group not in used:
            why = f"workload={chosen_option('workload', run.workload)} does not use {group}"
            raise ConfigError(key, value, why, "leave it out, or choose another workload")


def check_same_config(config: dict[str, Any], collectives: Collectives) -> None:
    """Refuse a `config` that is not the same on all ranks, naming the first key that differs; called on every rank."""
    ours, *others = collectives.all_gather(flatten(config))
    for rank, other in enumerate(others, start=1):
        for key in ours | other:
            why = f"rank 0 was started with {ours.get(key)!r}, rank {rank} with {other.get(key)!r}"
            check(ours.get(key) == other.get(key), key, ABSENT, why, "start all processes with the same command")


def _node(config: Mapping[str, Any], group: str) -> Mapping[str, Any]:
    node: Any = config.get(group)
    if str(node).endswith(".py"):
        raise user_code.chosen_by_file(group, node)
    check(isinstance(node, Mapping), group, node, "nothing is chosen", f"choose one of the options in conf/{group}/")
    return node


def describe_model(model: torch.nn.Module) -> str:
    """Return such as `ConvNet, 26,650 trainable parameters, 0.11 MB`; the size is that of all tensors."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    size = sum(tensor.numel() * tensor.element_size() for tensor in (*model.parameters(), *model.buffers()))
    return f"{type(model).__name__}, {trained:,} trainable parameters, {size / 1e6:,.2f} MB"


def config_hash(config: Mapping[str, Any]) -> str:
    """Return a hash of `hashed_options(config)` as 12 hexadecimal digits."""
    return hashlib.sha256(json.dumps(hashed_options(config), sort_keys=True, default=str).encode()).hexdigest()[:12]


def hashed_options(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what `config` says of the computation, without credentials, which the saved config does not have.

    To compare two configs, compare these parts, not their hashes: 1 and 1.0 are equal, but their hashes differ.
    """
    return redacted_values({key: value for key, value in config.items() if key not in (*LOCATION_KEYS, "tracking")})
