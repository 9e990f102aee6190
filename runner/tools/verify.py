"""`python -m runner.tools.verify [--steps N] [OVERRIDE …]` compares a config with the same config on a single device.

The config and its reference, the same config on a single device without accumulation, train from the same weights on
the same few batches. The tool prints the largest relative differences of loss, gradients, weights and buffers, and the
limit of each: the tolerance of the precision, or four times the rounding error of the reference if that is larger. This
rounding error is the difference between the reference and the same in float64: a deep network may amplify a difference
in the last bit, for example where a max pooling chooses between two almost equal pixels. If a float32 config exceeds a
limit, the comparison is repeated in float64.
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
_REFERENCE = ("parallel=single", "accumulation=1")
_LOSS_TOLERANCE = 1e-6  # losses are summed in float32 in every precision

_BATCH_NORM = """batch normalization computes its statistics on each micro-batch of a rank, so this config is expected
to differ. parallel=ddp parallel.sync_batch_norm=true without accumulation does not, nor do networks without batch
normalization (model.norm=group)"""


class Difference(NamedTuple):
    """The largest relative difference between tensors of two runs.

    Args:
        what: the kind of tensors: loss, gradients, weights or buffers.
        size: the relative difference.
        where: the name of the tensor.
    """

    what: str
    size: float
    where: str


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare the config of the command line with its reference.

    Returns:
        The exit code: 0 if they agree, 3 if they differ, 2 if they cannot be compared, 1 after a crash.
    """
    parser = argparse.ArgumentParser("python -m runner.tools.verify", description=__doc__)
    parser.add_argument("--steps", type=int, default=3, help="number of optimizer steps (default: 3)")
    options, overrides = parser.parse_known_args(arguments)
    try:
        check(options.steps > 0, "--steps", options.steps, "there is nothing to compare", "--steps 3")
        steps = f"steps={options.steps}"
        run, reference_run = (compose_run([*each, steps]) for each in (overrides, reference_overrides(overrides)))
        tested, reference = probe_run(run), probe_run(reference_run)
        exact = probe_run(compose_run([*reference_overrides(overrides), "precision=64", steps]))
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
    code = report(tolerance, differences(tested, reference), differences(reference, exact))
    if code == DIFFERENT and tolerance == Precision.tolerance:
        print("once more in float64, where rounding errors are negligible:")
        doubled = probe_run(compose_run([*overrides, "precision=64", steps]))
        code = report(Double.tolerance, differences(doubled, exact), differences(exact, exact))
    if code == DIFFERENT and tested["normalizes_micro_batches"]:
        print(_BATCH_NORM)
    return code


def reference_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides of the same config on a single device, without accumulation."""
    replaced = ("parallel", "accumulation")
    kept = [text for text in overrides if text.lstrip("+~").split("=")[0].split(".")[0] not in replaced]
    return [*kept, *_REFERENCE]


def compose_run(overrides: Sequence[str]) -> Run:
    """Compose the config of a command line, and build its run."""
    words = [cli.quoted(word, sweep=False) for word in cli.overrides_first(overrides)]
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", [*words, "name=verify"])
    plain: Any = OmegaConf.to_container(config, resolve=True)
    return build_run(plain)


def check_comparable(session: Session) -> None:
    """Check that a single device can compute the same as this run.

    Raises:
        ConfigError: if it cannot.
    """
    why, processes = session.context.layout.non_equivalence_reason, session.context.world_size
    check(not why, "parallel.processes", processes, why, "parallel.processes=1 can be compared")
    has_own_envs = "env" in component_fields(type(session.run.workload)) and session.plan.num_workers > 1
    why = "each process trains on transitions from its own environments"
    check(not has_own_envs, "parallel", "several processes", why, "compare accumulation or precision instead")


def probe_run(run: Run) -> dict[str, Any]:
    """Train the first steps of `run`, and return what `probe` saved."""
    launcher = run.parallel.launcher(run.device)
    with tempfile.TemporaryDirectory(prefix="runner-verify-") as scratch, launcher.connect() as process:
        directory, session = Path(scratch), run.prepare(process)
        check_comparable(session)
        main_process, rank_main = partial(probe, session, directory), partial(probe_rank, run.config, directory)
        launcher.launch(main_process, rank_main, session.context, directory)
        return torch.load(directory / _FILE, weights_only=True)


def probe_rank(config: dict[str, Any], directory: Path, process: Process) -> Result:
    """Call `probe` in a process that a launcher has started."""
    return probe(build_run(config).prepare(process), directory)


def probe(session: Session, directory: Path) -> Result:
    """Train the first steps of a run; rank 0 saves the loss and gradients of the first, and the weights of the last."""
    run, collectives = session.run, session.collectives
    first: dict[str, Any] = {}

    def save_first_gradients(_: torch.optim.Optimizer, *__: Any) -> None:
        """Save the gradients of the first step; those of later steps are of weights that may differ."""
        if not first:
            parameters = state.model.named_parameters()
            gradients = {name: full_tensor(p.grad) for name, p in parameters if p.grad is not None}
            first["gradients"] = collectives.gather_to_rank0(_on_cpu(gradients))

    with run.device.settings(session.device, run.deterministic):
        state = prepare(session, directory)
        state.optimizer.register_step_pre_hook(save_first_gradients)
        batches = run.workload.batches(state.model, session.plan, 0, session.device)
        state.model.train()
        for step in session.plan.steps(0, session.num_steps):
            train_step(state, batches, step, log_due=True)
        sums = state.metric_buffer.peek(collectives.all_reduce, state.step)
        tensors, _ = run.parallel.full_state(state.model, state.optimizer)
        names = [name for name, _ in state.model.named_parameters()]
        names = [name for of_rank in collectives.all_gather(names) for name in of_rank]
        num_passes = session.plan.num_workers * session.plan.accumulation
        num_passes *= run.parallel.num_microbatches(session.context)
        has_batch_norm = any(isinstance(module, _BatchNorm) for module in state.model.modules())
        normalizes_micro_batches = num_passes > 1 and any(collectives.all_gather(has_batch_norm))
        if session.rank == 0:
            saved = {
                "loss": {"the first step": sums[0, 0] / run.batch_size},
                "gradients": first["gradients"],
                "weights": {name: tensor for name, tensor in tensors.items() if name in names},
                "buffers": {name: tensor for name, tensor in tensors.items() if name not in names},
                "normalizes_micro_batches": normalizes_micro_batches,
            }
            torch.save(saved, directory / _FILE)
    return Result("done", session.num_steps)


def _on_cpu(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors.items()}


def differences(tested: dict[str, Any], reference: dict[str, Any]) -> list[Difference]:
    """Return the largest difference of each kind of tensors."""
    return [largest(kind, tested[kind], reference[kind]) for kind in ("loss", "gradients", "weights", "buffers")]


def largest(what: str, tested: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> Difference:
    """Return the largest relative difference between tensors of the same name.

    It is the norm of their difference, divided by the norm of the reference tensor. The divisor is at least a
    thousandth of the norm of all reference tensors together: the gradient of a bias before batch normalization, for
    example, is zero up to rounding errors.

    Args:
        what: the kind of tensors.
        tested: tensors by name.
        reference: tensors with the same names and shapes.
    """
    assert tested.keys() == reference.keys(), sorted(tested.keys() ^ reference.keys())
    floats = {name: tensor.double() for name, tensor in reference.items() if tensor.is_floating_point()}
    if not floats:
        return Difference(what, 0.0, "there are none")
    least = 1e-3 * torch.stack([tensor.norm() for tensor in floats.values()]).norm()
    sizes = {
        name: float((tested[name].double() - tensor).norm() / torch.maximum(tensor.norm(), least).clamp_min(1e-30))
        for name, tensor in floats.items()
    }
    worst = max(sizes, key=lambda name: (sizes[name] != sizes[name], sizes[name]))  # nan is the largest
    return Difference(what, sizes[worst], worst)


def report(tolerance: float, found: list[Difference], rounding: list[Difference]) -> int:
    """Print the differences and their limits.

    Args:
        tolerance: the tolerance of the precision.
        found: the differences from the reference.
        rounding: the rounding errors of the reference.

    Returns:
        The exit code, `SAME` or `DIFFERENT`.
    """
    print(f"{'':12}{'largest difference':>20}{'limit':>10}{'rounding error':>16}   tensor")
    good = True
    for difference, error in zip(found, rounding, strict=True):
        limit = max(tolerance, 4 * error.size, _LOSS_TOLERANCE if difference.what == "loss" else 0)
        within = difference.size <= limit
        good = good and within
        mark = "" if within else "   <- too large"
        sizes = f"{difference.size:>20.1e}{limit:>10.1e}{error.size:>16.1e}"
        print(f"{difference.what:12}{sizes}   {difference.where}{mark}")
    print("the same: this config computes what a single device computes" if good else "different")
    return SAME if good else DIFFERENT


if __name__ == "__main__":
    sys.exit(main())
