"""Trains the first steps of a recorded run again, and compares what is logged with what was logged (`verify RUN`).

The recorded run is data: only its config, which the caller has checked as for a resume, its curves, its environment
and what its checkpoint says of the samples are read, and nothing is written to it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from runner.config import user_code
from runner.config.errors import ABSENT, check
from runner.failures import torch_refusals
from runner.parallel.collectives import Collectives
from runner.run import Run, build_run
from runner.storage.run_directory import ENVIRONMENT, read_environment
from runner.system.provenance import environment
from runner.tracking.event_file import EventReader
from runner.tracking.metrics import DivergedError
from runner.tracking.progress import progress_for
from runner.tracking.recorder import Recorder
from runner.tracking.tensorboard import TensorBoard
from runner.training import evaluate, initial_state, log_training, step_function
from runner.verification.verdict import FLOAT32_ROUNDING, MARGIN, Outcome, Verdict

Curves = Mapping[str, Mapping[int, float]]

COMPARED = ("train/", "eval/", "episode/")
"""The first parts of the tags that are compared. The others are times, or follow from the config."""

MAX_PERTURBATIONS, LARGEST_PERTURBATION = 3, 5e-3
"""How often the steps are trained with perturbed initial weights, at most; and by how much of their value: 1e-6 in
float32, 5e-3 in TF32 and 16 bits, a few units in the last place. `MARGIN` times the effect of it is explained.

Modes, threads and memory formats changed the curves by up to 6 × the effect of one perturbation. But where rounding
moves a unit over the edge of its rectifier, the curves jump by 1,000 × as much, with one and not with another."""

BLURRED = 0.05
"""From the point on where rounding explains more than this share of the largest value, a tag is not judged."""

FINE = ("loss", "norm")
"""The last parts of tags that every perturbation changes."""

STEPPED = 0.01
"""The share that is explained of other tags, such as an accuracy, if no perturbation has changed them yet."""

_DIVERGED = "diverged"  # the tag at whose step a loss was not finite


class Point(NamedTuple):
    """A value that was logged `then` and is logged `now`, and the largest difference that rounding explains."""

    step: int
    tag: str
    then: float
    now: float
    explained: float
    scale: float
    """The largest absolute value of the tag."""

    @property
    def excess(self) -> float:
        """The difference as a multiple of what rounding explains; -1 if that is so much that nothing is judged."""
        return abs(self.now - self.then) / self.explained if self.explained <= BLURRED * self.scale else -1.0


def train_again(run: Run, signature: Mapping[str, Any], last_step: int, noise: int = 0) -> Curves:
    """Train the first steps of a run, in its mode, and return what it logs by tag and step.

    Args:
        run: the run, which does not resume anything.
        signature: what a checkpoint of the recorded run says of its samples and its stages; empty if it is not known.
        last_step: the last step; the schedule is that of the whole run.
        noise: the number of the random noise by which the initial weights are perturbed, from 1; 0 for none.

    Raises:
        ConfigError: if the run is refused, its data has changed, or its mode is asynchronous.
        RankError: if a process fails.
    """
    launcher = run.parallel.launcher(run.device)
    with tempfile.TemporaryDirectory(prefix="runner-verify-") as scratch, launcher.connect() as collectives:
        session = run.prepare(collectives)
        why = "its processes do not wait for each other: no two runs are the same"
        check(session.plan.steps_per_round == 1, "parallel", ABSENT, why, "name a run of another mode")
        run.workload.check_same_samples(signature)
        rank_main = partial(_train, run.config, signature, Path(scratch), last_step, noise)
        launcher.launch(partial(rank_main, collectives), rank_main, session, Path(scratch))
        return EventReader(Path(scratch)).read()


def _train(
    config: dict[str, Any],
    signature: Mapping[str, Any],
    directory: Path,
    last_step: int,
    noise: int,
    collectives: Collectives,
) -> None:
    run = build_run(config)
    run.parallel.continue_with(signature)
    session = run.prepare(collectives)
    is_first = session.rank == 0
    with (
        run.settings(session.device),
        torch_refusals(run),
        Recorder(TensorBoard(), directory, 0, visible=is_first) as recorder,
        progress_for(last_step, 0, visible=is_first) as progress,
    ):
        run.workload.images = lambda sums: {}  # nobody sees them, and drawing them takes longer than short evaluations
        if noise:
            build, size = run.workload.build_model, min(run.precision.tolerance, LARGEST_PERTURBATION)
            run.workload.build_model = lambda: _perturbed(build(), size, noise)
        state = initial_state(run, session, directory)
        batches, take_step = session.batches(state.model, 0), step_function(state)
        state.modules.train()
        state.step_timer.start(last_step)
        try:
            for step in session.plan.steps(0, last_step):  # as `loop`, without what does not change the numbers
                log_due = session.is_due(run.log_every, step.number)
                evaluation_due = session.is_due(session.eval_every, step.number)
                norm = take_step(state, batches, step, log_due)
                state.hooks.after_step(state)
                state.step_timer.lap(pausing=log_due or evaluation_due)
                if log_due:
                    log_training(state, recorder, progress, norm)
                if evaluation_due:
                    evaluate(state, recorder, progress)
                if session.is_due(session.save_every, step.number):
                    state.hooks.before_save(state)
                progress.step(step.number)
        except DivergedError as error:
            recorder.scalars({_DIVERGED: 1.0}, error.step)


def _perturbed(model: torch.nn.Module, size: float, seed: int) -> torch.nn.Module:
    """Multiply each weight by a random factor between 1 − `size` and 1 + `size`, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.rand(parameter.shape, generator=generator, dtype=torch.float64) * 2 - 1
            parameter.mul_((1 + size * noise).to(parameter))
    return model


def judge(then: Curves, now: Curves, last_step: int, perturb: Callable[[int], Curves]) -> Outcome:
    """Compare what was logged `then` up to `last_step` with what is logged `now`.

    `perturb(i)` trains the steps once more after the i-th perturbation of the initial weights. It is called while there
    are differences that are not explained.
    """
    if _DIVERGED in now:
        return Outcome([], Verdict.DIFFERENT, f"it diverges at step {min(now[_DIVERGED])}, which it did not then")
    points, perturbed = _points(then, now, [], last_step), []
    lost = sum(step <= last_step for values in then.values() for step in values) - len(points)
    remark = f"; {lost} points are not logged any more" if lost else ""
    if not points:
        return Outcome([], Verdict.UNJUDGED, f"nothing is left to compare{remark}")
    if all(point.now == point.then for point in points):
        return Outcome([], Verdict.SAME, f"identical, all {len(points)} points{remark}")

    for number in range(1, MAX_PERTURBATIONS + 1):
        perturbed.append(perturb(number))
        points = _points(then, now, perturbed, last_step)
        if all(point.excess <= 1 for point in points):
            break
    lines = [f"  {'':22}{'points':>8}{'largest difference':>22}{'explained':>12}{'at step':>10}"]
    for tag in dict.fromkeys(point.tag for point in points):
        of_tag = [point for point in points if point.tag == tag]
        worst = max(of_tag, key=lambda point: point.excess)
        sizes = abs(worst.now - worst.then) / worst.scale, worst.explained / worst.scale
        found = f"{sizes[0]:>22.1e}{sizes[1]:>12.1e}{worst.step:>10}" if worst.excess >= 0 else "      lost in rounding"
        lines.append(f"  {tag:22}{len(of_tag):>8}{found}")
    if different := [point for point in points if point.excess > 1]:
        step, tag, before, today, explained, _ = different[0]
        text = f"from step {step} on: {tag} was {before:.9g} and is {today:.9g}; rounding explains {explained:.1e}"
        return Outcome(lines, Verdict.DIFFERENT, text + remark)
    if blurred := sum(point.excess < 0 for point in points):
        remark += f"; at {blurred} of {len(points)} points, rounding alone may change more than {BLURRED * 100:g} %"
    if not any(point.excess >= 0 and point.tag.endswith(FINE) for point in points):
        return Outcome(lines, Verdict.UNJUDGED, f"record a run with a smaller log_every{remark}")
    return Outcome(lines, Verdict.SAME, f"equal up to rounding{remark}")


def _points(then: Curves, now: Curves, perturbed: list[Curves], last_step: int) -> list[Point]:
    """Return the points that both have, in the order of their steps."""
    found = []
    for tag, values in then.items():
        effect, scale = 0.0, max(map(abs, values.values())) or 1.0
        for step in sorted(step for step in values if step <= last_step and step in now.get(tag, {})):
            value = now[tag][step]
            effect = max([effect, *(abs(curves.get(tag, {}).get(step, math.inf) - value) for curves in perturbed)])
            floor = FLOAT32_ROUNDING if effect or tag.endswith(FINE) else STEPPED
            found.append(Point(step, tag, values[step], value, max(MARGIN * effect, floor * scale), scale))
    return sorted(found)


def changes(directory: Path) -> list[str]:
    """Return in what the environment of a recorded run, as far as it can be read, differs from the present one."""
    if not (then := read_environment(directory)):
        return [f"{ENVIRONMENT} cannot be read"]
    parts = ("source", "code", "versions", "variables", "cpu", "devices")
    return changed(then, environment() | {"code": user_code.given().hashes()}, parts)


def changed(then: Mapping[str, Any], now: Mapping[str, Any], parts: Iterable[str]) -> list[str]:
    """Return a line for each value in `parts` of two nested dicts that differs: `cpu.cores: 4 then, 2 now`."""
    lines = []
    for part in parts:
        before, today = (each if isinstance(each, dict) else {"": each} for each in (then.get(part), now.get(part)))
        for key in dict.fromkeys((*today, *before)):
            if before.get(key) != today.get(key):
                name = f"{part}.{key}".rstrip(".")
                lines.append(f"{name}: {before.get(key)} then, {today.get(key)} now")
    return lines
