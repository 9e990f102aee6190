"""`python -m runner.tools.verify [--steps N] [OVERRIDE …]`: does this config compute what one device computes?

The config and its twin, the same on one device without accumulation, begin with the same weights and take the same few
batches. What differs is printed beside what may: the precision's tolerance, or four times the twin's own rounding where
that is larger. The twin's rounding is how far it is from the same in float64: a deep network may amplify the last bit,
and where two pixels are equal but for it, a gradient goes another way. What differs in float32 is compared in float64.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.nn.modules.batchnorm import _BatchNorm

from runner.cli import arguments as cli
from runner.cli.hydra_errors import explain
from runner.config.errors import ConfigError, check
from runner.config.options import CONF
from runner.config.schema import component_fields
from runner.parallel.context import Process
from runner.parallel.full_state import full_tensor
from runner.parallel.launch.supervisor import RankError
from runner.precision import Double, Precision
from runner.run import Result, Run, Session, build_run
from runner.tracking.metrics import DivergedError
from runner.train import prepare, train_step

SAME, REFUSED, DIFFERENT = 0, 2, 3
_FILE = "probe.pt"
_TWIN = ("parallel=single", "accumulation=1")
_LOSS = 1e-6  # losses are summed in float32, whatever computes them

_PARTS = """batch normalisation sees the parts of a batch, each by itself: a named exception. The same numbers have
parallel=ddp parallel.sync_batch_norm=true without accumulation, and networks without it (model.norm=group)"""


class Difference(NamedTuple):
    """The largest relative difference of several values, and which it is of."""

    what: str
    size: float
    where: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare what the command line composes with its twin; returns 0, 3 where they differ, 2 with a reason."""
    parser = argparse.ArgumentParser("python -m runner.tools.verify", description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="optimizer steps that are compared (3)")
    options, overrides = parser.parse_known_args(arguments)
    try:
        check(options.steps > 0, "--steps", options.steps, "there is nothing to compare", "--steps 3")
        run, twin = (composed([*some, f"steps={options.steps}"]) for some in (overrides, twin_of(overrides)))
        ours, theirs = probed(run), probed(twin)
        exact = probed(composed([*twin_of(overrides), "precision=64", f"steps={options.steps}"]))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except (HydraException, OmegaConfBaseException) as error:
        print(explain(error), file=sys.stderr)
        return REFUSED
    except DivergedError as error:
        print(error, file=sys.stderr)
        return 1
    except RankError as error:
        print(f"{error.trace}{error}", file=sys.stderr)
        return 1
    tolerance = run.precision.tolerance
    code = report(tolerance, differences(ours, theirs), differences(theirs, exact))
    if code == DIFFERENT and tolerance == Precision.tolerance:
        print("once more in float64, which has no such rounding:")
        doubled = probed(composed([*overrides, "precision=64", f"steps={options.steps}"]))
        code = report(Double.tolerance, differences(doubled, exact), differences(exact, exact))
    if code == DIFFERENT and ours["normalizes_parts"]:
        print(_PARTS)
    return code


def twin_of(overrides: Sequence[str]) -> list[str]:
    """The overrides of the single-device twin."""
    replaced = ("parallel", "accumulation")
    return [*(text for text in overrides if text.lstrip("+~").split("=")[0].split(".")[0] not in replaced), *_TWIN]


def composed(overrides: Sequence[str]) -> Run:
    """The run of a command line."""
    words = [cli.quoted(word, sweep=False) for word in cli.overrides_first(overrides)]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [*words, "name=verify"])
    plain: Any = OmegaConf.to_container(config, resolve=True)
    return build_run(plain)


def check_comparable(session: Session) -> None:
    """Refuse what no single device can compute.

    Raises:
        ConfigError: saying why.
    """
    why, processes = session.context.layout.non_equivalence_reason, session.context.world_size
    check(not why, "parallel.processes", processes, why, "parallel.processes=1 can be compared")
    acts = "env" in component_fields(type(session.run.workload)) and session.plan.num_workers > 1
    why = "each process trains on what it meets in environments of its own"
    check(not acts, "parallel", "several processes", why, "compare accumulation or precision instead")


def probed(run: Run) -> dict[str, Any]:
    """What `probe` saved of `run`."""
    launcher = run.parallel.launcher(run.device)
    with tempfile.TemporaryDirectory(prefix="runner-verify-") as scratch, launcher.connect() as process:
        directory, session = Path(scratch), run.prepare(process)
        check_comparable(session)
        here, there = partial(probe, session, directory), partial(probe_rank, run.config, directory)
        launcher.launch(here, there, session.context, directory)
        return torch.load(directory / _FILE, weights_only=True)


def probe_rank(config: dict[str, Any], directory: Path, process: Process) -> Result:
    """`probe` in a process that a launcher has started."""
    return probe(build_run(config).prepare(process), directory)


def probe(session: Session, directory: Path) -> Result:
    """The first steps of a run; rank 0 saves the first loss and gradients, and the last weights."""
    run, collectives = session.run, session.collectives
    first: dict[str, Any] = {}

    def keep_first_step(_: torch.optim.Optimizer, *__: Any) -> None:
        """Before an update: its gradients; those of later steps come from weights that differ already."""
        if not first:
            graded = {name: full_tensor(p.grad) for name, p in state.model.named_parameters() if p.grad is not None}
            first["gradients"] = collectives.gather_to_rank0(_on_cpu(graded))

    with run.device.settings(session.device, run.deterministic):
        state = prepare(session, directory)
        state.optimizer.register_step_pre_hook(keep_first_step)
        batches = run.workload.batches(state.model, session.plan, 0, session.device)
        state.model.train()
        for step in session.plan.steps(0, session.num_steps):
            train_step(state, batches, step, log_due=True)
        sums = state.metric_buffer.peek(collectives.all_reduce, state.step)
        tensors, _ = run.parallel.full_state(state.model, state.optimizer)
        names = [name for name, _ in state.model.named_parameters()]
        names = [name for own in collectives.all_gather(names) for name in own]
        parts = session.plan.num_workers * session.plan.accumulation * run.parallel.num_microbatches(session.context)
        has_batch_norm = any(isinstance(module, _BatchNorm) for module in state.model.modules())
        normalizes_parts = parts > 1 and any(collectives.all_gather(has_batch_norm))
        if session.rank == 0:
            kept = {
                "loss": {"the first step": sums[0, 0] / run.batch_size},
                "gradients": first["gradients"],
                "weights": {name: tensor for name, tensor in tensors.items() if name in names},
                "buffers": {name: tensor for name, tensor in tensors.items() if name not in names},
                "normalizes_parts": normalizes_parts,
            }
            torch.save(kept, directory / _FILE)
    return Result("done", session.num_steps)


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> list[Difference]:
    """What differs most, of each kind, relative to the twin."""
    return [largest(kind, ours[kind], theirs[kind]) for kind in ("loss", "gradients", "weights", "buffers")]


def largest(what: str, ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> Difference:
    """The largest difference of a tensor, by norm, relative to the twin's.

    A tensor that has next to no share in the norm of all holds rounding alone (the gradient of a bias before a batch
    normalisation): it is measured against a thousandth of that norm.
    """
    assert ours.keys() == theirs.keys(), sorted(ours.keys() ^ theirs.keys())
    floats = {name: tensor.double() for name, tensor in theirs.items() if tensor.is_floating_point()}
    if not floats:
        return Difference(what, 0.0, "there are none")
    least = 1e-3 * torch.stack([tensor.norm() for tensor in floats.values()]).norm()
    sizes = {
        name: float((ours[name].double() - tensor).norm() / torch.maximum(tensor.norm(), least).clamp_min(1e-30))
        for name, tensor in floats.items()
    }
    worst = max(sizes, key=lambda name: (sizes[name] != sizes[name], sizes[name]))  # what is no number is the worst
    return Difference(what, sizes[worst], worst)


def report(tolerance: float, found: list[Difference], rounding: list[Difference]) -> int:
    """Print the table of the differences that were `found`, beside the twin's own `rounding`; returns the exit code."""
    print(f"{'':12}{'largest difference':>20}{'may be':>10}{'twin rounds by':>16}   of")
    good = True
    for difference, own in zip(found, rounding, strict=True):
        limit = max(tolerance, 4 * own.size, _LOSS if difference.what == "loss" else 0)
        within = difference.size <= limit
        good = good and within
        mark = "" if within else "   <- too large"
        print(f"{difference.what:12}{difference.size:>20.1e}{limit:>10.1e}{own.size:>16.1e}   {difference.where}{mark}")
    print("the same: this config computes what one device computes" if good else "different")
    return SAME if good else DIFFERENT


if __name__ == "__main__":
    sys.exit(main())
