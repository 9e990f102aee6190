"""Tests of `runner verify` and of its three verdicts: the same, different, and cannot be judged."""

import copy
import json
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers import incorrect_modes
from helpers.compose import TINY_CPU, compose_config, option_content, prepare_session
from helpers.narrow_resnet import record_first_steps, use_narrow_resnet
from helpers.ranks import Ranks

from runner.api import composing, verification
from runner.commands import verify
from runner.config.errors import ConfigError
from runner.parallel.launch.processes import LocalProcesses
from runner.precision import TF32, BFloat16, Double, Precision
from runner.run import Run, build_run
from runner.verification import steps as verify_steps
from runner.verification.steps import Steps, sample_hashes
from runner.verification.verdict import Pair, Verdict, compare, first_other_samples, largest_difference

RESNET = ("model=resnet18", "data.size=16", "data.holdout=0.02", "batch_size=8")
SINGLE = option_content("parallel", "single")["_target_"]
KINDS = ("samples", "loss", "gradients", "weights", "buffers", "evaluation")


REFERENCES: dict[str, list[Steps]] = {}
"""The first steps of reference configs on a single device, shared by all tests of this module."""


@pytest.fixture(autouse=True)
def _few_runs(ranks: Ranks, tmp_path, monkeypatch) -> None:
    """Save time: compose each config and compute each reference only once, narrow the networks, and reuse `ranks`."""

    def compose(overrides: list[str], config_dir: str | None) -> dict[str, Any]:
        return compose_config(*overrides) if config_dir is None else composing.compose(overrides, config_dir=config_dir)

    def first_steps(runs: list[Run]) -> list[Steps]:
        launcher = runs[0].parallel.launcher(runs[0].device)
        if isinstance(launcher, LocalProcesses) and len(launcher.devices) > 1:
            verify_steps.check_comparable(runs[-1], prepare_session(runs[-1]))
            configs = [run.config for run in runs]
            return ranks(len(launcher.devices)).call_on_all(record_first_steps, configs, tmp_path)[0]
        if any(run.config["parallel"]["_target_"] != SINGLE for run in runs):
            return verify_steps.first_steps(runs)
        key = json.dumps([run.config for run in runs])
        if key not in REFERENCES:
            REFERENCES[key] = verify_steps.first_steps(runs)
        return copy.deepcopy(REFERENCES[key])

    incorrect_modes.declare(tmp_path, monkeypatch)
    monkeypatch.setattr(verify_steps, "build_run", lambda config: use_narrow_resnet(build_run(config)))
    monkeypatch.setattr(verification, "first_steps", first_steps)
    monkeypatch.setattr(verification, "compose", compose)


def verify_exit_code(*overrides: str) -> int:
    return verify.main([*TINY_CPU, *overrides])


def mode(name: str) -> str:
    return f"parallel._target_=helpers.incorrect_modes.{name}"


def workload(name: str) -> str:
    return f"workload._target_=helpers.incorrect_modes.{name}"


def too_large(out: str) -> list[str]:
    """The rows of the table that exceed a limit."""
    return [kind for kind in KINDS for line in out.splitlines() if line.startswith(f"{kind}  ") and "<-" in line]


@pytest.mark.cases(
    ["accumulation=2", "data.crop=2", "max_grad_norm=0.1"],
    ["parallel=ddp", "precision=64"],
    ["parallel=ddp", "parallel.processes=3", "batch_size=48", "precision=bf16"],
    ["parallel=fsdp", "max_grad_norm=0.1", "optimizer=adam"],
    ["parallel=fsdp", "precision=16", "precision.growth_interval=100"],
    ["parallel=dp", "precision=tf32"],
    ["parallel=model"],
    ["parallel=pipeline", "accumulation=2", "max_grad_norm=0.1"],
    ["parallel=pipeline", "parallel.schedule=interleaved_1f1b", "model=convnet", "data.size=16", "precision=bf16"],
    ["parallel=hogwild", "parallel.processes=1"],
    [*RESNET, "parallel=ddp", "parallel.sync_batch_norm=true", "--steps=1"],
    [mode("Replicas"), "accumulation=2"],
    ["parallel=ddp", workload("WithRunningMean")],
    ["workload=dqn", "model=qnet", "accumulation=2", "workload.warm_up=100"],
    ids=lambda overrides: " ".join(overrides).replace("helpers.incorrect_modes.", ""),
)
def test_equivalent_modes_are_the_same(overrides, capfd):
    base = ["device=cpu", "device.threads=1"] if overrides[0] == "workload=dqn" else TINY_CPU
    code = verify.main([*base, *overrides])
    out = capfd.readouterr().out
    assert code == verify.SAME, out
    assert not too_large(out)
    assert all(f"\n{kind} " in out for kind in KINDS)
    assert out.endswith("the same: this config computes what a single device computes, up to rounding\n")


def test_a_device_without_float64_refuses_it(monkeypatch, capfd):
    refusal = Mock(side_effect=ConfigError("precision", "64", "it has no float64", "choose device=cpu"))
    monkeypatch.setattr(Double, "check_device", refusal)
    assert verify_exit_code("accumulation=2", "precision=64") == verify.REFUSED
    assert "precision: got '64': it has no float64" in capfd.readouterr().err


def test_processes_that_the_mode_starts_and_options_of_a_config_directory_are_compared(tmp_path, monkeypatch):
    monkeypatch.setattr(verification, "first_steps", verify_steps.first_steps)
    assert verify_exit_code("parallel=ddp", "accumulation=2") == verify.SAME
    option = tmp_path / "it's" / "parallel" / "replicas.yaml"
    option.parent.mkdir(parents=True)
    option.write_text("defaults: [_processes, _self_]\n_target_: helpers.incorrect_modes.NoAllReduce\n")
    assert verify_exit_code("-cd", str(option.parent.parent), "parallel=replicas") == verify.DIFFERENT


PLANTED_MISTAKES = {
    "other samples": (["parallel=ddp", workload("ShufflesWithOwnSeed")], "samples"),
    "other samples that cannot be read": (["parallel=ddp", workload("OpaqueOwnSeed")], "gradients"),
    "permuted targets": ([mode("PermutesTargets")], "gradients"),
    "mean of means": ([mode("UnequalShards")], "gradients"),
    "no all-reduce": ([mode("NoAllReduce")], "gradients"),
    "all-reduce once": ([mode("ReducesOnce")], "weights"),
    "rounded gradients": ([mode("RoundsGradients")], "gradients"),
    "clipping by local norms": ([mode("ClipsLocally"), "max_grad_norm=0.1"], "gradients"),
    "a micro-batch dropped": ([mode("DropsLastMicroBatch"), "accumulation=2"], "gradients"),
    "rounded buffers": ([mode("SavesRoundedBuffers"), workload("WithRunningMean")], "buffers"),
    "evaluation of one shard": ([mode("EvaluatesOneShard")], "evaluation"),
    "other samples under rounding": (["parallel=ddp", workload("Float32OwnSeed"), "+workload.scale=1e12"], "samples"),
}
"""The overrides of each planted mistake, and a row of the table in which it must show."""


@pytest.mark.parametrize("name", PLANTED_MISTAKES)
def test_a_planted_mistake_is_distinguished_from_rounding(name, capfd):
    overrides, row = PLANTED_MISTAKES[name]
    code = verify_exit_code(*overrides)
    out = capfd.readouterr().out
    assert code == verify.DIFFERENT, out
    assert row in too_large(out), out
    assert out.count("different: this config does not compute what a single device computes") == 1
    assert "the same:" not in out


@pytest.mark.cases(
    ([*RESNET, "accumulation=2"], "Batch normalization"),
    (["parallel=ddp", "model=convnet", "data.size=16", "model.dropout=0.5"], "dropout"),
)
def test_an_expected_difference_is_explained(overrides, words, capfd):
    assert verify_exit_code(*overrides, "--steps", "1") == verify.DIFFERENT
    out = capfd.readouterr().out
    assert "gradients" in too_large(out)
    assert words in out.partition("\ndifferent: ")[2]


@pytest.mark.cases(
    (["parallel=ddp", workload("Float32")], "something here computes in fewer than 64 bits"),
    (["accumulation=2", workload("AmplifiesRounding")], "on a single device alone"),
    (["accumulation=2", workload("Diverges")], "on a single device, the loss is not finite at step 1"),
)
def test_differences_hidden_by_rounding_are_not_judged(overrides, words, capfd):
    assert verify_exit_code(*overrides) == verify.UNJUDGED
    out = capfd.readouterr().out
    assert words in out.partition("cannot be judged: ")[2]
    assert "the same:" not in out


def test_a_config_that_crashes_is_not_judged(capfd):
    assert verify_exit_code(mode("Crashes")) == verify.UNJUDGED
    err = capfd.readouterr().err
    assert "ZeroDivisionError" in err
    assert "cannot be judged: the config crashed" in err


@pytest.mark.cases(
    (["parallel=hogwild"], "parallel.processes: got 2:"),
    (["parallel=ensemble"], "parallel.processes: got 2:"),
    (["workload=dqn", "parallel=ddp", "model=qnet"], "parallel: got 'several processes':"),
    (["env=acrobot"], "env: got 'acrobot':"),
    (["--steps", "0"], "--steps: got 0"),
    (["resume=outputs/run"], "resume: got 'outputs/run':"),
)
def test_configs_that_cannot_be_compared_are_refused(overrides, words, capfd):
    words_of_device = [text for text in TINY_CPU if "dqn" not in " ".join(overrides) or text.startswith("device")]
    assert verify.main([*words_of_device, *overrides]) == verify.REFUSED
    captured = capfd.readouterr()
    assert words in captured.err
    assert not captured.out


def test_the_largest_difference_is_relative_and_named():
    theirs = {"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 1e-9]), "count": torch.tensor(3)}
    ours = {"a": torch.tensor([3.0, 4.5]), "b": torch.tensor([0.0, 2e-9]), "count": torch.tensor(3)}
    found = largest_difference(ours, theirs)
    assert found.where == "a"
    assert found.size == pytest.approx(0.1)
    ours["b"] = torch.tensor([0.0, float("nan")])
    assert largest_difference(ours, theirs).where == "b"
    del ours["b"]
    assert largest_difference(ours, theirs).size == torch.inf


def test_of_a_mask_with_infinite_values_the_finite_ones_are_compared_and_other_tensors():
    mask = torch.tensor([0.0, -torch.inf, torch.nan])
    assert largest_difference({"mask": mask}, {"mask": mask.clone()}).size == 0
    assert largest_difference({"mask": mask + 1}, {"mask": mask}).size > 1
    assert largest_difference({"mask": mask.nan_to_num(1)}, {"mask": mask}).size != 0
    one = torch.ones(1)
    assert largest_difference({"mask": mask, "weight": 2 * one}, {"mask": mask, "weight": one}).size == 1


@pytest.mark.cases(
    (torch.tensor([3 + 4j, 0]), torch.tensor([3 + 4j, 1j]), 0.2),
    (torch.tensor(3), torch.tensor(4), 1.0),
    (torch.tensor(2**60), torch.tensor(2**60 + 1), 1.0),
    (torch.tensor([True, False, True, True]), torch.tensor([True, True, True, True]), 0.5),
    (torch.tensor([1, 2]), torch.tensor([1, 2]), 0.0),
    (torch.tensor([1.0]), torch.tensor([1]), torch.inf),
    (torch.tensor([1.0]), torch.tensor([1.0 + 0j]), torch.inf),
)
def test_complex_numbers_are_compared_and_integers_exactly(reference, tested, size):
    same = torch.tensor([1e6, 1.0])
    assert largest_difference({"a": tested}, {"a": reference}).size == pytest.approx(size)
    found = largest_difference({"a": reference, "same": same}, {"a": reference, "same": same})
    assert found.size == 0
    if not reference.is_complex():
        found = largest_difference({"a": tested, "same": same}, {"a": reference, "same": same})
        assert found.size == pytest.approx(size)


def test_sample_hashes_depend_on_every_bit():
    batch = {"inputs": torch.randn(3, 2, 4, 4), "more": [torch.tensor([1, 2, 3])], "rate": torch.tensor(0.1)}
    hashes = sample_hashes(batch, 3)
    assert len(set(hashes)) == 3
    parts = [{"inputs": batch["inputs"][i : i + 1], "more": [batch["more"][0][i : i + 1]]} for i in range(3)]
    assert [sample_hashes(part, 1)[0] for part in parts] == hashes
    in_memory = batch | {"inputs": batch["inputs"].contiguous(memory_format=torch.channels_last)}
    assert sample_hashes(in_memory, 3) == hashes

    batch["inputs"][1, 0, 0, 0] = torch.nextafter(batch["inputs"][1, 0, 0, 0], torch.tensor(9.0))
    batch["more"][0][2] = 4
    changed = sample_hashes(batch, 3)
    assert [one == other for one, other in zip(hashes, changed, strict=True)] == [True, False, False]
    assert sample_hashes(("a", torch.zeros(2)), 3) == []
    assert sample_hashes(torch.zeros(3, 0), 3) == sample_hashes([torch.ones(3, 0)], 3), "no sample has an element"


def test_the_first_step_with_other_samples_is_named():
    reference = [["a", "b"], ["c", "d"]]
    for tested, step in ([["a", "b"], ["c", "d"]], 0), ([["a", "b"], ["c", "c"]], 2), ([["a"], ["c", "d"]], 1):
        assert first_other_samples(Pair(Steps(tested), Steps(reference))) == step


def steps(gradient: float, **others: float) -> Steps:
    values = dict.fromkeys(("loss", "weights"), 1.0) | {"gradients": gradient} | others
    tensors = {kind: {"w": torch.tensor(value, dtype=torch.float64)} for kind, value in values.items()}
    return Steps([["a"]], {"buffers": {}, "evaluation": {}} | tensors)


@pytest.mark.cases(
    ((1 + 9e-3, 1), (1 + 9e-10, 1), Precision(), Verdict.SAME),
    ((1 + 2e-2, 1), (1, 1), Precision(), Verdict.DIFFERENT),
    ((1, 1), (1 + 2e-5, 1), Precision(), Verdict.DIFFERENT),
    ((1, 1), (1 + 2e-9, 1), Precision(), Verdict.UNJUDGED),  # something computes in float32
    ((1.57, 1), (5, 3.35), Precision(), Verdict.UNJUDGED),  # a difference of 0.57 and a rounding error of 2.35
    ((1.03, 1.006), (1, 1), Precision(), Verdict.UNJUDGED),
    ((1.1, 1.006), (1, 1), Precision(), Verdict.DIFFERENT),  # sixteen times the rounding error
    ((1, 1.02), (1.5, 1), Precision(), Verdict.DIFFERENT),  # in float64, rounding explains 0.2 at most
    ((1.3, 1.15), (1.01, 1), BFloat16(), Verdict.DIFFERENT),
    ((1.57, 1), (1, 1), Precision(), Verdict.DIFFERENT),
    ((1, 1), (3.35, 3.35), Precision(), Verdict.SAME),  # bitwise equal in both precisions
    ((float("nan"), 1), (1, 1), Precision(), Verdict.DIFFERENT),
    ((1 + 9e-7, 1), None, Precision(), Verdict.SAME),  # a device without float64
    ((1 + 9e-6, 1), None, Precision(), Verdict.UNJUDGED),
    ((1 + 2e-2, 1), None, Precision(), Verdict.DIFFERENT),
    ((1.15, 1), (1, 1), BFloat16(), Verdict.SAME),
    ((1.25, 1), (1, 1), BFloat16(), Verdict.DIFFERENT),
    (None, (1 + 2e-9, 1), Double(), Verdict.UNJUDGED),
    ids=str,
)
def test_limits_do_not_grow_with_rounding(own, exact, precision, verdict):
    configured, in_float64 = (each and Pair(*map(steps, each)) for each in (own, exact))
    assert compare(configured, in_float64, precision).verdict == verdict


def test_weights_whose_gradients_are_lost_in_rounding_are_compared_in_float64_alone():
    """Adam divides by the gradient: a weight whose true gradient is zero moves by the learning rate either way."""

    def of_adam(gradients: list[float], weights: list[float]) -> Steps:
        named = {"loss": [1.0], "gradients": gradients, "weights": weights, "buffers": [1.0], "evaluation": [1.0]}
        values = {kind: {"bias": torch.tensor(each, dtype=torch.float64)} for kind, each in named.items()}
        return Steps([["sample"]], values)

    exact = Pair(of_adam([1, 0], [0.1, 0]), of_adam([1, 0], [0.1, 0]))
    rounded = of_adam([1, 1e-9], [0.1, -0.1])
    outcome = compare(Pair(of_adam([1, -1e-9], [0.1, 0.1]), rounded), exact, Precision())
    assert outcome.verdict == Verdict.SAME
    assert "without 1 weights whose gradients" in outcome.lines[-1]
    wrong = Pair(of_adam([1, -1e-9], [0.2, 0.1]), rounded)
    assert compare(wrong, exact, Precision()).verdict == Verdict.DIFFERENT
    inexact = Pair(of_adam([1, 0], [0.1, 0.01]), exact.reference)
    assert compare(Pair(rounded, rounded), inexact, Precision()).verdict == Verdict.DIFFERENT


def test_a_plain_difference_counts_also_if_rounding_hides_others_or_the_config_diverges():
    wrong = Pair(steps(1.5), steps(1, weights=2.35))
    assert compare(wrong, Pair(steps(1), steps(1)), Precision()).verdict == Verdict.DIFFERENT
    diverged = Steps(diverged="the loss is not finite at step 2")
    assert compare(Pair(diverged, steps(1)), None, Precision()).verdict == Verdict.DIFFERENT


def test_a_wrong_mean_loss_is_detected_in_float64_for_every_precision():
    right = steps(1, loss=1)
    for precision in (Precision(), TF32(), BFloat16()):
        for loss, verdict in ((1.003, Verdict.DIFFERENT), (1 + 5e-7, Verdict.SAME)):
            assert compare(Pair(right, right), Pair(steps(1, loss=loss), right), precision).verdict == verdict
