"""Tests of the options in conf/: each alone, all pairs from different groups, and the content of the option files."""

import itertools
import re
import shlex
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.compose import build_composed_run, compose_config, option_content, prepare_session, train_in

from runner.config.composition import Composer
from runner.config.errors import ConfigError
from runner.config.options import CONF, option_files
from runner.config.schema import build, load_class, option_fields, typed_values
from runner.run import CONFIG_GROUPS, WORKLOAD_INPUTS, Run, build_run
from runner.sweeps.engines.base import Engine
from runner.sweeps.sweep_jobs import SweepJobs
from runner.system.accelerator import accelerator_type

# Further overrides that an option needs.
SMALL = ["data.num_samples=64", "data.num_classes=10", "data.size=32"]
WITH = {
    "model=torchvision": ["model.name=resnet18"],
    "data=imagefolder": ["data.root=photos"],
    "data=synthetic": SMALL,
    "workload=resnet50": ["batch_size=64"],
    "data=tabular": ["workload=regression"],
    "data=text": ["workload=language"],
    "data=tokens": ["workload=language"],
    "model=nature_cnn": ["model.kernel_sizes=[3,3,3]", "model.strides=[1,1,1]"],  # for the digits, of 8×8 pixels
}

# Options that are not available on this machine: the key in the error.
ABSENT_HERE = {
    **dict.fromkeys(("data=mnist", "data=fashion_mnist", "data=cifar10", "experiment=cifar10"), "data.root"),
    "data=imagefolder": "data.root",
    **dict.fromkeys(("data=tokens", "experiment=gpt2"), "data.file"),
    **{f"device={kind}": "device.kind" for kind in ("cuda", "mps", "xpu") if kind != accelerator_type()},
    **{f"tracking={package}": "tracking" for package in ("wandb", "mlflow", "trackio") if find_spec(package) is None},
}

# Incompatible pairs of options: the key in the error.
IMAGE_NETWORKS = ["model=convnet", "model=tiny", "model=nature_cnn", "model=minatar_cnn"]
IMAGE_NETWORKS += ["model=resnet18", "model=resnet50", "model=torchvision", "model=timm"]
REFUSED: dict[frozenset[str], str] = {
    frozenset((other, network)): "model"  # a row of a table, or an observation, is not an image
    for other in ("workload=dqn", "workload=regression", "data=tabular")
    for network in IMAGE_NETWORKS
}
for name in ("classifier", "resnet50"):
    REFUSED[frozenset((f"workload={name}", "data=tabular"))] = "data"
for name in ("digits", "synthetic"):
    REFUSED[frozenset(("workload=regression", f"data={name}"))] = "data"
for mode in ("model", "pipeline"):
    REFUSED[frozenset(("workload=dqn", f"parallel={mode}"))] = "workload"
REFUSED[frozenset(("workload=dqn", "debug=overfit"))] = "workload.overfit_batches"
if find_spec("Box2D") is None:
    ABSENT_HERE["experiment=dqn_lunarlander"] = "env.id"
    REFUSED[frozenset(("workload=dqn", "env=lunarlander"))] = "env.id"
if accelerator_type() == "cuda":
    REFUSED[frozenset(("parallel=hogwild", "device=cuda"))] = "device.kind"
if accelerator_type() == "mps":
    for mode in ("ddp", "fsdp", "ensemble", "hogwild"):
        REFUSED[frozenset((f"parallel={mode}", "device=mps"))] = "device.kind"

FILES = sorted(CONF.glob("*/[!_]*.yaml"))
INHERITED = sorted(CONF.glob("*/_*.yaml"))
# Experiments and local files are not combined with other options, because they set keys of the whole config.
GROUPS = {group: list(files) for group, files in option_files().items()}
CROSSED = {group: options for group, options in GROUPS.items() if group not in ("experiment", "local")}
for package, game in (("ale_py", "atari"), ("minatar", "minatar")):
    CROSSED["env"].remove(game)  # games need networks for images, which other environments refuse
    if find_spec(package) is None:
        ABSENT_HERE[f"experiment=dqn_{game}"] = "env.id"
for name in ("gpt", "gpt2", "gpt_tiny"):
    CROSSED["model"].remove(name)  # they need texts, which other networks and workloads refuse
    REFUSED[frozenset(("workload=dqn", f"model={name}"))] = "model"
CROSSED["workload"].remove("language")
for name in ("text", "tokens"):
    CROSSED["data"].remove(name)
if find_spec("timm") is None:
    CROSSED["model"].remove("timm")
    for pair in [pair for pair in REFUSED if "model=timm" in pair]:
        del REFUSED[pair]
HERE = {group: [o for o in options if f"{group}={o}" not in ABSENT_HERE] for group, options in CROSSED.items()}


def pairs_of(factors: dict[str, list[str]]) -> set[frozenset[str]]:
    """Return all pairs of options from different groups; an option is written as `group=option`."""
    named = [[f"{group}={option}" for option in options] for group, options in factors.items()]
    return {frozenset(pair) for two in itertools.combinations(named, 2) for pair in itertools.product(*two)}


def covering_rows(factors: dict[str, list[str]], without: Iterable[frozenset[str]]) -> list[list[str]]:
    """Return a few rows, each with an option per group, that contain all pairs of options but those in `without`."""
    never = set(without)
    left = sorted(map(sorted, pairs_of(factors) - never))
    rows = []
    while left:
        row = list(left[0])
        for group in sorted(factors, key=lambda group: -len(factors[group])):
            if not any(option.startswith(f"{group}=") for option in row):
                options = [f"{group}={option}" for option in factors[group]]
                fits = [o for o in options if not any(frozenset((o, other)) in never for other in row)]
                row += sorted(fits, key=lambda o: -sum(sorted((o, other)) in left for other in row))[:1]
        together = [sorted(pair) for pair in itertools.combinations(row, 2)]
        left = [pair for pair in left if pair not in together]
        rows.append(sorted(row))
    return rows


def checked(run: Run, options: Iterable[str]) -> Run:
    """Check that `options` were chosen, and if they are available, prepare the run and build its model on `meta`."""
    for option in options:
        group, _, name = option.partition("=")
        target = option_content(group, name).get("_target_")
        if group == "sweep":  # its options are not part of a run
            assert build(option_content(group, name), Engine, "sweep")
        else:
            assert target is None or run.config[group]["_target_"] == target, f"{option} was not chosen"
    if not ABSENT_HERE.keys() & set(options):
        prepare_session(run)
        with torch.device("meta"):
            run.workload.build_model()
    return run


def crossed(row: Iterable[str], *more: str) -> Run:
    """Build the run of a row. Hydra composes only the options that set keys of the whole config, to save time."""
    whole = [option for option in row if option.startswith(("workload=", "debug="))]
    config = compose_config(*whole, "batch_size=64", *more)
    for option in row:
        group, _, name = option.partition("=")
        if option == "tracking=several":
            config[group] = compose_config(option)[group]
        elif option not in whole and group != "sweep":
            config[group] = option_content(group, name)
        for key, _, value in (text.partition("=") for text in WITH.get(option, ()) if text.startswith(f"{group}.")):
            config[group][key.partition(".")[2]] = yaml.safe_load(value)
    return build_run(config)


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")
def test_an_option_of_a_package_that_is_not_installed_names_its_extra():
    with pytest.raises(ConfigError) as refused:
        build_composed_run("model=timm")
    assert str(refused.value).startswith("model._target_: got 'timm': it is not installed")
    assert refused.value.remedy == "pip install timm"


ALONE = GROUPS | {"env": CROSSED["env"], "model": CROSSED["model"]}


@pytest.mark.parametrize("option", [f"{group}={name}" for group, names in ALONE.items() for name in names])
def test_every_option_is_prepared_or_refused_if_it_is_not_available_here(option):
    run = checked(build_composed_run(option, *WITH.get(option, ())), [option])
    if option in ABSENT_HERE:
        with pytest.raises(ConfigError) as refusal:
            prepare_session(run)
        assert refusal.value.key == ABSENT_HERE[option]


ROWS = covering_rows(HERE, REFUSED)


def test_runs_with_all_compatible_pairs_of_options_are_prepared():
    together = {frozenset(pair) for row in ROWS for pair in itertools.combinations(row, 2)}
    assert together == pairs_of(HERE) - REFUSED.keys()
    for row in ROWS:
        checked(crossed(row), row)


@pytest.mark.parametrize("number", range(max(len(HERE[group]) for group in ("parallel", "optimizer", "schedule"))))
def test_texts_are_prepared_with_the_options_of_all_other_groups(number):
    others = {group: options for group, options in HERE.items() if group not in ("workload", "data", "env", "debug")}
    others |= {"model": ["gpt", "gpt2", "gpt_tiny"], "workload": ["language"], "data": ["text"]}
    row = [f"{group}={options[number % len(options)]}" for group, options in others.items()]
    if not any({*pair} <= {*row} for pair in REFUSED):
        checked(crossed(row, "data.context=64", "data.holdout=0.1"), row)


def test_incompatible_pairs_of_options_are_refused_by_key():
    for pair, key in REFUSED.items():
        chosen = {option.partition("=")[0] for option in pair}
        others = (text for option in pair for text in WITH.get(option, ()))
        needed = [text for text in others if (key_of := text.partition("=")[0]) not in chosen and "." not in key_of]
        with pytest.raises(ConfigError) as refusal:
            checked(crossed(pair, *needed), pair)
        assert refusal.value.key == key


@pytest.mark.slow
@pytest.mark.parametrize("row", ROWS, ids=" ".join)
def test_runs_with_all_compatible_pairs_of_options_train(row, tmp_path):
    run = crossed(row, "steps=2", "log_every=1", "eval_every=0", "device.threads=1")
    result = train_in(tmp_path, run).result
    assert (result.status, result.steps) == ("done", 2)


def lines_of(path: Path) -> list[str]:
    """Return the lines of an option file without `# @package _global_`."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return lines[1:] if lines[0] == "# @package _global_" else lines


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_an_option_file_begins_with_a_command_that_uses_it_and_a_sentence(path):
    command, sentence = lines_of(path)[:2]
    assert re.fullmatch(r"# python -m runner( .+)?", command)
    assert re.fullmatch(r"# (?!python).+\.", sentence)
    assert len(sentence) <= 150
    words = shlex.split(command)[4:]
    assert f"{path.parent.name}={path.stem}" in words
    if "-m" in words:
        jobs = SweepJobs(Composer(), [word for word in words if word != "-m"])
        jobs.compose(0, next(iter(jobs)))
    else:
        compose_config(*words)


def test_hydra_composes_each_option_of_a_component_as_its_file_lists_it():
    """This is how `compose_config` composes them, to save time."""
    listed = {group: names for group, names in GROUPS.items() if group in {*CONFIG_GROUPS, "model", "data", "env"}}
    for number in range(max(map(len, listed.values()))):
        row = {group: names[number % len(names)] for group, names in listed.items()}
        composed = Composer().run([f"{group}={name}" for group, name in row.items()]).config
        for group, name in row.items():
            assert composed[group] == compose_config(f"{group}={name}")[group], f"{group}={name}"


def test_every_key_has_a_comment():
    for path in (*FILES, *INHERITED, CONF / "config.yaml"):
        ours = path.read_text(encoding="utf-8").partition("\nhydra:")[0]
        for line in ours.splitlines():
            opens_a_group = re.fullmatch(r" *\w+:( +#.*)?", line)  # the comments are at its keys
            if line.startswith(("#", "_target_:", "defaults:", "  - ")) or not line.strip() or opens_a_group:
                continue
            assert re.search(r"\S +# \S", line), f"{path}: {line}"
            assert len(line) <= 160, f"{path}: {line}"


def test_an_option_file_of_a_component_lists_every_field_with_a_value_of_its_type():
    for path in FILES:
        sets_other_groups = len(lines_of(path)) < len(path.read_text(encoding="utf-8").splitlines())
        if path.parent.name not in {*CONFIG_GROUPS, *WORKLOAD_INPUTS, "workload"} or sets_other_groups:
            continue
        node = option_content(path.parent.name, path.stem)
        cls = load_class(node.pop("_target_"), object)
        assert sorted(node) == sorted(option_fields(cls)), f"{path}: every field is listed"
        given = {key: value for key, value in node.items() if value != "???"}
        assert_typed(given, typed_values(cls, given | {key: 1 for key in node if key not in given}))


def assert_typed(node: dict[str, Any], values: dict[str, Any]) -> None:
    """Check that each value in an option file reaches the class as it is, except as a float or a tuple."""
    for key, value in node.items():
        got = list(values[key]) if isinstance(values[key], tuple) else values[key]
        assert got == value, key
        assert type(got) is type(value) or (type(got), type(value)) == (float, int), key


def test_resnet50_has_25557032_parameters_and_trains_18_steps_of_120_images():
    run = build_composed_run("workload=resnet50")
    session, samples = prepare_session(run), run.workload.train
    assert (run.batch_size, session.num_steps, samples.shape, samples.num_classes) == (120, 18, (3, 128, 128), 1000)
    with torch.device("meta"):
        network = run.workload.build_model()
    assert sum(parameter.numel() for parameter in network.parameters()) == 25_557_032


def test_the_root_config_lists_every_scalar_and_every_group():
    root = yaml.safe_load((CONF / "config.yaml").read_text(encoding="utf-8"))
    defaults, scalars = root.pop("defaults"), {key: value for key, value in root.items() if key != "hydra"}
    assert sorted(scalars) == sorted(set(option_fields(Run)))
    scalars["name"] = "classifier"
    assert_typed(scalars, typed_values(Run, scalars))
    assert defaults[0] == "_self_", "or the root would override what an experiment chooses"
    chosen = {group: option for entry in defaults[1:] for group, option in entry.items()}
    assert set(GROUPS) <= {group.split()[-1] for group in chosen}
    for group, option in chosen.items():
        assert option is None or isinstance(option, str), f"{group}: {option} must be quoted"
        if group in GROUPS and option is not None:
            assert option in GROUPS[group]


@pytest.mark.cases(
    ("resnet50_modes", {"parallel": "single,model,pipeline"}),
    ("split_size", {"parallel.split_size": "1,3,5,8,10,12,20,40,60"}),
)
def test_the_resnet50_experiments_sweep_modes_and_split_sizes_on_three_seeds(name, swept):
    assert option_content("experiment", name)["hydra"]["sweeper"]["params"] == swept | {"seed": "0,1,2"}
    [(key, values)] = swept.items()
    for value in (values.split(",")[0], values.split(",")[-1]):
        run = build_composed_run(f"experiment={name}", f"{key}={value}")
        session = prepare_session(run)
        assert (run.batch_size, session.num_steps, run.workload.train.shape) == (120, 5, (3, 128, 128))


def test_debug_smoke_trains_evaluates_and_saves(trained):
    run = trained("debug=smoke")
    assert (run.result.status, run.result.steps) == ("done", 2)
    assert run.result.metrics.keys() == {"train/loss", "train/accuracy", "eval/loss", "eval/accuracy"}
    assert {path.name for path in (run.directory / "checkpoints").glob("step_*")} == {"step_00000001", "step_00000002"}


def test_debug_overfit_memorizes_a_batch(trained):
    run = trained("debug=overfit")
    assert run.result.status == "done"
    assert run.result.metrics["train/accuracy"] == 1.0
    assert run.result.metrics["train/loss"] < 0.01
