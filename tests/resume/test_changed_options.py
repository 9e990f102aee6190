"""Tests of `runner.resume.changed_options`: with which other options a session is still the same run."""

import pytest
from helpers.compose import TINY_CPU, compose_config

from runner.config.errors import ConfigError
from runner.resume.changed_options import check_resumable, differences


@pytest.mark.parametrize(
    "changes",
    [
        ("log_every=7", "eval_every=3", "save_every=0", "keep=9", "device.threads=2", "tracking=csv"),
        ("parallel=ddp", "accumulation=4", "channels_last=false", "profiler=simple", "deterministic=true"),
        ("parallel=fsdp", "optimizer.fused=false", "model.checkpoint_activations=true", "name=b", "resume=auto"),
        ("workload.eval_batch_size=7", "compile=true", "stop.max_time=60"),
    ],
)
def test_how_a_run_is_computed_does_not_make_it_another_run(changes):
    saved, now = compose_config(*TINY_CPU), compose_config(*TINY_CPU, *changes)
    assert differences(saved, now) == []
    check_resumable(saved, now, "PATH")


def test_a_run_that_was_saved_before_there_were_repeats_is_the_first_one():
    older, now = compose_config(*TINY_CPU), compose_config(*TINY_CPU)
    del older["repeat"]
    assert differences(older, now) == []
    assert [each[:3] for each in differences(older, now | {"repeat": 1})] == [("repeat", 0, 1)]


@pytest.mark.cases(
    ("steps=7", ("steps", None, 7)),
    ("epochs=3", ("epochs", 20, 3)),
    ("optimizer.lr=0.5", ("optimizer.lr", 0.05, 0.5)),
    ("optimizer.groups={head:{lr:0.1}}", ("optimizer.groups", None, {"head": {"lr": 0.1}})),
    ("schedule=cosine", ("schedule", "onecycle", "cosine")),
    ("ema.decay=0.9", ("ema.decay", None, 0.9)),
    ("precision=bf16", ("precision", "32", "bf16")),
    ("parallel=hogwild", ("parallel", "single", "hogwild")),
    ("parallel=ensemble", ("parallel", "single", "ensemble")),
    ("max_grad_norm=1", ("max_grad_norm", None, 1)),
    ("workload.env_steps=200", ("workload.env_steps", 100, 200)),
)
def test_what_is_computed_makes_another_run_which_can_be_continued_if_it_is_named(change, found):
    workload = () if found[0] != "workload.env_steps" else ("workload=dqn", "workload.env_steps=100")
    saved, now = compose_config(*workload or TINY_CPU), compose_config(*workload or TINY_CPU, change)
    assert [each[:3] for each in differences(saved, now)] == [found]
    check_resumable(saved, now, "PATH")


@pytest.mark.cases(
    ("seed=1", "seed: 0 ", "1 "),
    ("batch_size=32", "batch_size: 64 ", "32 "),
    ("model=convnet", "model.channels: [16, 32] ", "[20, 20] "),
    ("model.weights=a.pt", "model.weights: None ", "a.pt "),
    ("data.size=16", "data.size: 8 ", "16 "),
    ("optimizer=adam", "optimizer: sgd ", "adam "),
    ("optimizer.groups={head:{optimizer:adamw}}", "optimizer.groups: None ", "{'head': {'optimizer': 'adamw'}} "),
    ("workload.label_smoothing=0.1", "workload.label_smoothing: 0.0 ", "0.1 "),
)
def test_seed_batch_size_model_data_and_optimizer_cannot_change(change, then, now):
    saved, other = (compose_config(*TINY_CPU, "data.crop=0", *words) for words in ((), (change, "log_every=2")))
    assert all(each.is_essential for each in differences(saved, other))
    with pytest.raises(ConfigError) as caught:
        check_resumable(saved, other, "PATH")
    assert (caught.value.key, caught.value.got) == ("resume", "PATH")
    assert now in caught.value.why.partition(then)[2]


def test_the_weights_that_a_run_began_with_may_be_taken_back():
    saved = compose_config(*TINY_CPU, "model.weights=a.pt", "model.reset_head=true")
    check_resumable(saved, compose_config(*TINY_CPU), "PATH")


@pytest.mark.parametrize("optimizer", ["sgd", None, []])
def test_a_saved_optimizer_that_is_not_a_component_is_refused(optimizer):
    """The saved config may come from somebody else."""
    with pytest.raises(ConfigError) as caught:
        check_resumable(compose_config(*TINY_CPU) | {"optimizer": optimizer}, compose_config(*TINY_CPU), "PATH")
    assert (caught.value.key, caught.value.got) == ("resume", "PATH")
    assert "optimizer: None then, sgd now" in caught.value.why
