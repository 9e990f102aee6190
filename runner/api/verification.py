"""Compares a config with plain training on a single device, and a recorded run with what today's code computes."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from runner.api.composing import check_list_of_texts, compose
from runner.api.execution import settings_kept
from runner.api.saved import load
from runner.config import user_code
from runner.config.errors import ABSENT, ConfigError, check
from runner.config.overrides import LOCATION_KEYS, override_key, replaced
from runner.precision import Double
from runner.resume.changed_options import differences
from runner.run import build_run, check_used
from runner.tracking.event_file import was_resumed
from runner.verification.commits import CommitError, copy_of, trained_in
from runner.verification.golden import COMPARED, changed, changes, judge, train_again
from runner.verification.steps import first_steps
from runner.verification.verdict import Outcome, Pair, Verdict, compare

PLAIN = ("parallel=single", "accumulation=1", "compile=false", "channels_last=false")
"""The overrides that turn a config into its reference, which trains in the plainest way, on a single device."""

_SWITCHES = (("model", "checkpoint_activations"), ("optimizer", "fused"))
"""Options that are switched off in the reference, if the config has them."""

MOST_STEPS = 200
"""How many steps of a recorded run are trained again by default; but at least to its first log."""


def retrace(
    directory: Path, overrides: Sequence[str], steps: int | None = None, config_dir: str | None = None
) -> Outcome:
    """Train the first steps of a recorded run again, and compare what they log with what it has logged.

    Raises:
        ConfigError: if `overrides` make it another run, it has logged nothing, or it cannot run here.
    """
    saved, signature = load(directory), {}
    composed = dict(compose([f"resume={directory}", *overrides, "tracking=none"], config_dir=config_dir))
    run = build_run(composed | {"resume": "never"})
    config = run.config
    others = {each.key: str(each) for each in differences(saved.config, config)}
    others |= {key: key for key in ("log_every", "eval_every") if config[key] != saved.config.get(key)}
    groups = {key.partition(".")[0] for key in others}
    typed = " ".join(text for text in overrides if override_key(text).partition(".")[0] in groups)
    remedy = f"leave out {typed or 'what sets it'}: only how it is computed may change, as the device or accumulation"
    check(not others, "overrides", ABSENT, f"another run: {'; '.join([*others.values()][:5])}", remedy)
    check_used(run, overrides)
    then = {tag: values for tag, values in saved.curves().items() if tag.startswith(COMPARED)}

    logged = sorted({step for values in then.values() for step in values})
    why, remedy = "it has logged nothing that could be compared", "record runs with tracking=tensorboard"
    check(bool(logged), "PATH", str(directory), why, remedy)
    why, remedy = f"its first log is at step {logged[0]}", f"--steps {logged[0]}"
    check(steps is None or steps >= logged[0], "--steps", steps, why, remedy)
    last = max(step for step in logged if step <= max(steps or MOST_STEPS, logged[0]))
    more = "" if last == logged[-1] else f" (all: --steps {logged[-1]})"
    print(f"training steps 1 to {last} again{more}", flush=True)
    with suppress(ConfigError):  # without a checkpoint, the samples are not known
        signature = saved.signature("last")
    again = partial(train_again, run, signature, last)
    outcome = judge(then, again(), last, lambda number: again(noise=number))
    if outcome.verdict is Verdict.DIFFERENT and was_resumed(directory):
        why = "the run was resumed, perhaps with other options; only those of its last session are known"
        return outcome._replace(verdict=Verdict.UNJUDGED, reason=f"{outcome.reason}. But {why}")
    return outcome


def verify_against(commit: str, overrides: Sequence[str], steps: int = 20, config_dir: str | None = None) -> Outcome:
    """Train the first steps of a config with the code of another commit and with today's, and compare what they log.

    Raises:
        ConfigError: as `copy_of` and `trained_in`; if today's code refuses the config, or its mode is asynchronous.
    """
    words = replaced(overrides, f"steps={steps}", "log_every=1")
    run = build_run(compose(replaced(words, "resume=never"), config_dir=config_dir))
    check_used(run, overrides)
    again = partial(train_again, run, {}, steps)
    try:
        with copy_of(commit) as copy:
            print(f"training {steps} steps with today's code", flush=True)
            now = again()
            print(f"training the same steps with the code of {commit}", flush=True)
            directory = trained_in(copy, words, config_dir)
            recorded = load(directory)
            then = {tag: values for tag, values in recorded.curves().items() if tag.startswith(COMPARED)}
            outcome = judge(then, now, steps, lambda number: again(noise=number))
            where = (*LOCATION_KEYS, "tracking", "code")  # of the code, its environment has the hashes
            options = [key for key in dict.fromkeys((*recorded.config, *run.config)) if key not in where]
            return outcome._replace(changes=[*changed(recorded.config, run.config, options), *changes(directory)])
    except CommitError as error:
        return Outcome([], Verdict.UNJUDGED, str(error))


def verify(overrides: Sequence[str], steps: int = 3, *, config_dir: str | None = None, **code: Any) -> Outcome:
    """Compare a config with its reference, that is, the same config with the overrides `PLAIN`, for some steps.

    Args:
        overrides: those of the config; with `code`, as in `runner.train`. Its hooks are called only in the config
            itself, so that one that changes weights or gradients makes a difference.
        steps: the number of optimizer steps.

    Returns:
        The outcome, which can be printed. Its `verdict` is 0 if the config computes the same, 1 if it does not, and 3
        if that cannot be judged.

    Raises:
        ConfigError: if the config is refused, or cannot be the same.
    """
    overrides = check_list_of_texts(overrides)
    given = user_code.passed(overrides, **code)
    words = [*given.added_to(overrides), f"steps={steps}"]
    in_float64 = replaced(words, "precision=64")
    with settings_kept(), user_code.using(given):
        config = compose(words, config_dir=config_dir)
        plain = [*PLAIN, *(f"{group}.{key}=false" for group, key in _SWITCHES if (config.get(group) or {}).get(key))]
        tested, reference = (
            [build_run(dict(compose(each, config_dir=config_dir))) for each in form]
            for form in ((words, in_float64), (replaced(words, *plain), replaced(in_float64, *plain)))
        )
        check_used(tested[0], overrides)
        precision = tested[0].precision
        if isinstance(precision, Double):
            del tested[0], reference[0]
        compiled = ", once it is compiled, in each precision" * bool(tested[0].compile)
        print(f"training {steps} steps of this config{compiled}", file=sys.stderr, flush=True)
        ours, called = first_steps(tested), [*filter(user_code.find, user_code.Hooks._fields)]
        own_loss = user_code.find("loss") is not None
        print("training the same steps on a single device", file=sys.stderr, flush=True)
        without_hooks = replace(given, objects={**given.objects, **dict.fromkeys(user_code.Hooks._fields)})
        with user_code.using(without_hooks):
            theirs = first_steps(reference)
    pairs = [Pair(*each) for each in zip(ours, theirs, strict=False)]  # float64 may be left out of one
    configured, exact = (None, pairs[0]) if isinstance(precision, Double) else (*pairs, None)[:2]
    outcome = compare(configured, exact, precision)
    hints = [f"Only the config calls {', '.join(called)}: does it change weights or gradients?"] * bool(called)
    hints += [
        "The loss is your own: where batches are divided, it must be the mean over the samples it is given; if it\n"
        "divides by another number, as of tokens or of valid targets, let it return (sum, count)."
    ] * own_loss
    if hints and outcome.verdict is Verdict.DIFFERENT:
        return outcome._replace(reason="\n".join([outcome.reason, *hints]).lstrip())
    return outcome
