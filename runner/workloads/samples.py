"""Workloads whose batches come from a data set."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

import torch

from runner.batching import MicroBatch, Plan
from runner.config.errors import check, errors_under
from runner.config.limits import NonNegativeInt, PositiveInt
from runner.data.base import Batch, Data, Samples, class_weights
from runner.model.base import Model
from runner.storage.signature import check_same_names, check_same_samples, num_samples
from runner.system.trees import Tree, map_leaves, map_tensors
from runner.system.turns import own_seat
from runner.workloads.base import Workload

log = logging.getLogger(__name__)

S = TypeVar("S", bound=Samples)


def _loaded(data: Data) -> tuple[Samples, Samples]:
    """Return the samples of `data`; runs that one process computes together share those of the project in memory."""
    seat, key = own_seat(), repr(data)
    if seat is None or not type(data).__module__.startswith("runner."):
        return data.load()
    from runner.data.memory import ArraySamples  # these import numpy, which checking a config does not need
    from runner.data.user import UserData

    if isinstance(data, UserData):
        return data.load()
    if key not in seat.common:
        found = data.load()
        if not all(isinstance(each, ArraySamples) for each in found):
            return found  # workers read them, which belong to one run
        seat.common[key] = found
    return seat.common[key]


@dataclass
class SampleWorkload(Workload, Generic[S]):
    """A workload whose batches come from a data set.

    `prepare` loads the training samples as the attribute `train`, and the samples for evaluations as `held_out`.
    """

    model: Model
    data: Data
    eval_batch_size: PositiveInt = 256
    overfit_batches: NonNegativeInt = 0

    may_change_on_resume: ClassVar[tuple[str, ...]] = ("eval_batch_size",)

    @abstractmethod
    def usable(self, samples: Samples) -> S:
        """Return `samples`; raises `ConfigError` with the key `data` if this workload cannot be trained on them."""

    @property
    def num_outputs(self) -> int:
        """The number of outputs for one sample, such as classes; known after `prepare`."""
        raise NotImplementedError(f"{type(self).__name__} does not say how many outputs its network has")

    def build_model(self) -> torch.nn.Module:
        num_outputs = self.num_outputs  # an error of it is one of the data
        with errors_under("model"):
            return self.model.build(self.train.shape, num_outputs)

    @property
    def num_data_workers(self) -> int:
        return self.train.num_workers

    def prepare(self) -> None:
        with errors_under("data"):
            train, held_out = _loaded(self.data)
        self.use(train, held_out)

    def use(self, train: Samples, held_out: Samples) -> None:
        """Train on `train`, and evaluate on `held_out`; raises `ConfigError` if an option does not suit them."""
        self.train, self.held_out = self.usable(train), self.usable(held_out)
        if getattr(self.data, "sampler", "") == "weighted" and not self.split:
            with errors_under("data"):
                self.train.weights = class_weights(self.train.labels())
        takes_tokens, has_tokens = self.model.takes_tokens, self.train.has_tokens
        if None not in (takes_tokens, has_tokens) and takes_tokens != has_tokens:
            why = f"inputs of {type(self.data).__name__} are "
            why += "the indices of tokens" if has_tokens else "no indices of tokens"
            raise self.model.refused(why, "use model=gpt for text, and others for anything else")
        num_dims, shape = self.model.num_dims, self.train.shape
        if num_dims is not None and not (isinstance(shape, tuple) and len(shape) == num_dims):
            shape = list(shape) if isinstance(shape, tuple) else shape
            why = f"an input of {type(self.data).__name__} has the shape {shape}, and it needs {num_dims} dimensions"
            raise self.model.refused(why, "use model=qnet")

    def samples_identity(self) -> dict[str, Any]:
        counts = {"training": self.train.length or 0, "held_out": self.held_out.length or 0}  # 0: a stream
        return counts | {"sha256": self.train.fingerprint()}

    def continue_with(self, saved: Mapping[str, Any]) -> None:
        now = json.loads(json.dumps(self.signature()))  # lists in place of tuples, as in `saved`
        # Columns are matched by name, but none may be missing or new.
        check_same_names(_sorted_names(saved), _sorted_names(now))
        if any(key in saved and saved[key] != now.get(key) for key in ("columns", "targets", "scale", "image")):
            with errors_under("data"):
                splits = self.data.splits(saved)
                train, held_out = splits["train"](), splits["val"]()
            self.use(train, held_out)

    def check_same_samples(self, saved: Mapping[str, Any]) -> str:
        return check_same_samples(saved.get("data", {}), self.samples_identity(), self.data.changed == "accept")

    def session_with_data(self, saved: Mapping[str, Any], split: str | None, is_other: bool) -> None:
        with errors_under("data"):
            splits = self.data.splits(saved)
        first, before = next(iter(splits)), saved.get("data", {}).get("sha256", "")
        held_out = "val" if "val" in splits else first
        name = split or (first if is_other else held_out)
        check(name in splits, "--split", name, "this data has no such split", f"it has {', '.join(splits)}")
        with errors_under("data"):
            samples = splits[name]()
            if split is None and samples.fingerprint() == before and name != held_out:  # the same, in another place
                name, samples = held_out, splits[held_out]()
        if split is None and not is_other and before and samples.fingerprint() != before:
            log.warning("the data has changed since the checkpoint: the run may have trained on these samples")
        check(samples.length != 0, "--split", name, "there are no samples in it", "--split all")
        self.split = name
        self.use(samples, samples)
        check_same_names(saved, self.signature())

    def saved_model(self, signature: Mapping[str, Any]) -> torch.nn.Module:
        names = signature.get("classes") or signature.get("targets")
        if not names:
            return super().saved_model(signature)
        with errors_under("model"):
            return self.model.build(tuple(signature["inputs"]), len(names))

    def summary(self) -> str:
        """Return the data set and the numbers of its samples in words."""
        name = type(self.data).__name__
        train, held_out = (num_samples(each.length or 0) for each in (self.train, self.held_out))
        if not self.split:
            return f"{name}, {train} training and {held_out} held-out samples"
        path = getattr(self.data, "root", None) or getattr(self.data, "file", None)
        return f"{name}{f' {path}' if path else ''}, {held_out} samples (--split {self.split})"

    def input_shape(self) -> tuple[int, ...] | None:
        return self.train.shape

    def steps_per_epoch(self, batch_size: int) -> float | None:
        samples = self.train.length
        if samples is None:
            return None
        why = f"the data has only {samples} training samples, so a batch would contain some of them twice"
        check(batch_size <= samples, "batch_size", batch_size, why, f"use at most batch_size={samples}")
        return samples / batch_size

    def batches(self, model: torch.nn.Module, plan: Plan, after_step: int, device: torch.device) -> Iterator[Batch]:
        return self.batches_of(plan, self._positions(plan, plan.stream(after_step)), device)

    def batches_of(self, plan: Plan, micros: Iterable[MicroBatch], device: torch.device) -> Iterator[Batch]:
        """Yield the inputs and targets of each micro-batch in `micros`, on `device`."""
        return self.train.batches(micros, plan.seed, device)

    def _positions(self, plan: Plan, micros: Iterable[MicroBatch]) -> Iterable[MicroBatch]:
        """Return `micros`; with `overfit_batches` n > 0, micro-batches of batch k modulo n in place of batch k."""
        if not self.overfit_batches:
            return micros
        span = self.overfit_batches * plan.batch_size
        return (m._replace(start=m.start % span, stop=m.start % span + m.stop - m.start) for m in micros)

    def shared_state(self) -> dict[str, Any]:
        return self.train.state()

    def load_shared_state(self, state: dict[str, Any]) -> None:
        self.train.load_state(state)

    def extra_results(self, all_gather: Callable[[Any], list[Any]]) -> dict[str, Any]:
        return self.train.extra_results(all_gather) | self.held_out.extra_results(all_gather)

    def close(self) -> None:
        self.train.close()
        self.held_out.close()

    def diverged_batch(self, plan: Plan, step: int, device: torch.device) -> dict[str, Tree]:
        stream = self.batches_of(plan, self._positions(plan, plan.micro_batches(step)), device)
        parts = [map_tensors(torch.Tensor.cpu, each) for each in stream]
        try:
            inputs, targets = map_leaves(lambda *leaves: torch.cat(leaves), *parts)
        except (RuntimeError, TypeError, ValueError):  # of several lengths, or no tensors
            return {"micro_batches": [tuple(each) for each in parts]}
        return {"inputs": inputs, "targets": targets}


def _sorted_names(signature: Mapping[str, Any]) -> dict[str, Any]:
    names = {key: sorted(signature[key]) for key in ("targets", "columns") if signature.get(key)}
    return dict(signature) | names
