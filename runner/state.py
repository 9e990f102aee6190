"""All that changes while a run goes on; a checkpoint is this, in no mode's terms."""

from __future__ import annotations

import logging
import math
from typing import Any

import torch

from runner import memory
from runner.checkpoint import Checkpoint, Checkpoints
from runner.run import Result, Run, config_hash
from runner.window import DivergedError, Stopwatch, Window, quantiles
from runner.workloads.base import Sums

log = logging.getLogger(__name__)


class State:
    """Where a run stands.

    Args:
        run: the parts that do not change.
        model: placed.
        optimizer: over the placed model's parameters.
        device: this process's.
    """

    def __init__(self, run: Run, model: torch.nn.Module, optimizer: torch.optim.Optimizer, device: torch.device):
        self.run, self.model, self.optimizer, self.device = run, model, optimizer, device
        self.step, self.logged = 0, 0
        self.window = Window(torch.zeros(len(run.workload.metrics), device=device))
        self.stopwatch = Stopwatch(device)
        self.metrics: dict[str, float] = {}
        self.best: dict[str, Any] = {}
        parallel = run.parallel
        self.hash = config_hash(run.config)
        self.checkpoints = Checkpoints(
            run.directory, run.keep, parallel.rank, parallel.world_size, parallel.barrier, self.hash
        )

    def resume(self) -> None:
        """Go on where the newest whole checkpoint of the run directory stands, if there is one."""
        checkpoint = self.checkpoints.latest()
        if checkpoint is None:
            if self.run.resume != "never":
                log.info("there is no checkpoint to go on from: the run begins")
            return
        shared, local, run = checkpoint.state, checkpoint.local, self.run
        run.parallel.load_full_state(self.model, self.optimizer, checkpoint.tensors, shared["optimizer"])
        run.precision.load_state_dict(shared["precision"])
        self.step, self.metrics, self.best = checkpoint.step, shared["metrics"], shared["best"]
        self.logged, rows = shared["logged"], run.parallel.share_of(shared["window"]).to(self.device)
        self.window = Window(rows.new_zeros(len(run.workload.metrics)), list(rows.unbind()))
        run.parallel.load_local_state(self.model, self.optimizer, local.get("parallel", {}))
        if local:
            run.workload.load_state_dict(local["workload"])
            _set_random_state(local["random"], self.device)
        else:
            log.info("rank %d was not there when this was saved: its random numbers begin anew", run.parallel.rank)
        log.info("resumed after step %d", self.step)

    def save(self) -> None:
        """Write a checkpoint, unless something in it is not finite.

        Raises:
            DivergedError: then; the checkpoints before are left as they are.
        """
        run = self.run
        window = self.window.peek(run.parallel.reduce, self.step)
        tensors, moments = run.parallel.full_state(self.model, self.optimizer)
        broken = _not_finite(tensors, moments)
        anywhere = run.parallel.reduce({"broken": torch.tensor(float(bool(broken)), device=self.device)})
        if anywhere["broken"]:  # not every rank has every tensor
            raise DivergedError(self.step, broken or "the state")
        shared = {
            "optimizer": moments,
            "precision": run.precision.state_dict(),
            "window": window,
            "logged": self.logged,
            "metrics": self.metrics,
            "best": self.best,
        }
        local = {
            "workload": run.workload.state_dict(),
            "parallel": run.parallel.local_state(self.model, self.optimizer),
            "random": _random_state(self.device),
        }
        self.checkpoints.save(Checkpoint(self.step, tensors, shared, local), self.best.get("step"))

    def take_window(self) -> dict[str, float]:
        """The training metrics since the last log, by tag; the window begins anew."""
        num_samples = (self.step - self.logged) * self.run.batch_size
        sums = self.window.take(self.run.parallel.reduce, self.step).double().sum(0) / num_samples
        self.logged = self.step
        return {f"train/{name}": float(value) for name, value in zip(self.run.workload.metrics, sums, strict=True)}

    def take_evaluation(self, metrics: dict[str, float]) -> bool:
        """Keep the `metrics` of an evaluation, by tag; returns whether they are better than all before.

        Raises:
            DivergedError: when one is not finite.
        """
        broken = [tag for tag, number in metrics.items() if not math.isfinite(number)]
        if broken:
            self.window.peek(self.run.parallel.reduce, self.step)  # a step since the last log may have been the first
            raise DivergedError(self.step, broken[0])
        self.metrics |= metrics
        name, direction = self.run.workload.best
        value, best = metrics[f"eval/{name}"], self.best.get("value")
        if best is not None and not (value > best if direction == "max" else value < best):
            return False
        self.best = {"metric": f"eval/{name}", "value": value, "step": self.step}
        return True

    def result(self, status: str, error: str) -> Result:
        """What `result.json` tells."""
        run, stopwatch = self.run, self.stopwatch
        training = sum(stopwatch.seconds)
        return Result(
            status=status,
            steps=self.step,
            metrics=self.metrics,
            best=self.best,
            seconds=stopwatch.elapsed(),
            samples_per_second=len(stopwatch.seconds) * run.round_size / training if training else 0.0,
            step_seconds=quantiles(stopwatch.steady()),
            peak_memory_bytes=int(memory.usage(self.device)["memory/peak"]),
            world_size=run.parallel.world_size,
            config_hash=self.hash,
            notes=run.workload.notes(),
            error=error,
        )


def _not_finite(tensors: Sums, moments: dict[str, dict[str, Any]]) -> str:
    """The first tensor of the model or the optimizer with a number that is not finite, by name; empty if none has."""
    named = [
        *tensors.items(),
        *((f"{key} of {name}", t) for name, state in moments.items() for key, t in state.items()),
    ]
    return next((name for name, t in named if isinstance(t, torch.Tensor) and not t.isfinite().all()), "")


def _random_state(device: torch.device) -> dict[str, torch.Tensor]:
    """The states of the generators that dropout and exploration draw from."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    if device.type == "mps":
        state["mps"] = torch.mps.get_rng_state()
    return state


def _set_random_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)
    if device.type == "mps" and "mps" in state:
        torch.mps.set_rng_state(state["mps"])
