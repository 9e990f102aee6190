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
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from torch.nn.modules.batchnorm import _BatchNorm

from runner import cli
from runner.config import CONF, ConfigError, check, component_fields
from runner.explain import explained
from runner.parallel.crew import RankError
from runner.precision import Double, Precision
from runner.run import Result, Run, build_run
from runner.train import prepare

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
        check_comparable(run)
        ours, theirs = probed(run), probed(twin)
        exact = probed(composed([*twin_of(overrides), "precision=64", f"steps={options.steps}"]))
    except ConfigError as error:
        print(error, file=sys.stderr)
        return REFUSED
    except (HydraException, OmegaConfBaseException) as error:
        print(explained(error), file=sys.stderr)
        return REFUSED
    except RankError as error:
        print(f"{error.trace}{error}", file=sys.stderr)
        return 1
    tolerance = run.precision.tolerance
    code = report(tolerance, differences(ours, theirs), differences(theirs, exact))
    if code == DIFFERENT and tolerance == Precision.tolerance:
        print("once more in float64, which has no such rounding:")
        doubled = probed(composed([*overrides, "precision=64", f"steps={options.steps}"]))
        code = report(Double.tolerance, differences(doubled, exact), differences(exact, exact))
    parts = run.plan.num_workers * run.accumulation.steps * run.parallel.num_parts
    if code == DIFFERENT and ours["sees_parts"] and parts > 1:
        print(_PARTS)
    return code


def twin_of(overrides: Sequence[str]) -> list[str]:
    """The overrides of the single-device twin."""
    replaced = ("parallel", "accumulation")
    return [*(text for text in overrides if text.lstrip("+~").split("=")[0].split(".")[0] not in replaced), *_TWIN]


def composed(overrides: Sequence[str]) -> Run:
    """The run of a command line, checked and ready to be launched."""
    words = [cli.quoted(word, sweep=False) for word in cli.overrides_first(overrides)]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [*words, "name=verify"])
    plain: Any = OmegaConf.to_container(config, resolve=True)
    run = build_run(plain)
    run.prepare()
    return run


def check_comparable(run: Run) -> None:
    """Refuse what has no single-device twin by its very nature.

    Raises:
        ConfigError: saying why.
    """
    why = run.parallel.incomparable
    check(not why, "parallel.processes", run.parallel.world_size, why, "parallel.processes=1 can be compared")
    acts = "env" in component_fields(type(run.workload)) and run.plan.num_workers > 1
    why = "each process trains on what it meets in environments of its own"
    check(not acts, "parallel", "several processes", why, "compare accumulation or precision instead")


def probed(run: Run) -> dict[str, Any]:
    """What `probe` kept of `run`."""
    with tempfile.TemporaryDirectory(prefix="runner-verify-") as scratch:
        run.directory = Path(scratch)
        run.parallel.launch(probe, run)
        return torch.load(run.directory / _FILE, weights_only=True)


def probe(run: Run) -> Result:
    """The steps of a run as `train` takes them; rank 0 keeps the first loss and gradients, and the last weights."""
    parallel, precision, workload = run.parallel, run.precision, run.workload
    device = parallel.device(run.device)
    losses, gradients = {}, {}
    with run.device.settings(device, run.deterministic):
        state = prepare(run, device)
        model, optimizer = state.model, state.optimizer
        batches = workload.batches(model, run.plan, 0, device)
        model.train()
        for step, micros in run.plan.steps(0, run.num_steps):
            sums = [parallel.accumulate(model, workload, next(batches), precision, micro) for micro in micros]
            if step == 1:  # later ones come from weights that differ already
                loss = parallel.reduce({"loss": torch.stack(sums)[:, 0].sum()})["loss"] / run.batch_size
                losses = {"the first step": loss.cpu()}
                graded = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
                gradients = parallel.gathered(graded)
            run.schedule.set_lr(optimizer, step - 1 - precision.num_skipped(), run.num_steps)
            precision.step(optimizer, lambda: parallel.clip_gradients(model, run.max_grad_norm), parallel.anywhere)
            workload.after_step(model, step)
        tensors, _ = parallel.full_state(model, optimizer)
        weights = parallel.gathered({name: parameter.detach() for name, parameter in model.named_parameters()})
        if parallel.rank == 0:
            kept = {
                "loss": losses,
                "gradients": gradients,
                "weights": weights,
                "buffers": {name: tensor for name, tensor in tensors.items() if name not in weights},
                "sees_parts": any(isinstance(module, _BatchNorm) for module in model.modules()),
            }
            torch.save(kept, run.directory / _FILE)
    return Result("done", run.num_steps)


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
