"""Tests of `runner.cli.config_loader`: same configs and errors as Hydra's own loader, with and without the cache."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins import basic_launcher
from hydra.core.config_store import ConfigStore
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import OmegaConf
from omegaconf.errors import ConfigAttributeError

from runner.cli import config_loader
from runner.cli.composition import Composer
from runner.cli.config_loader import ConfigLoader
from runner.cli.config_source import OptionFiles

LINES = [
    ["seed=3", "optimizer=adamw", "optimizer.lr=0.1", "+model.x={a:1,b:[2]}", "~schedule.warmup"],
    ["optimizer=[adam,sgd]", "optimizer={lr:7}", "++new.key='a b'", "name=run-${seed}-${hydra:job.num}"],
    ["~model", "+experiment=ten_epochs", "keep=[]", "output_root=${oc.env:HOME}"],
    ["hydra.verbose=true", "precision='16'", "device=cpu", "batch_size=1", "batch_size=2"],
]
INVALID_OVERRIDES = [
    *("optimzer.lr=1", "optimizer.lrr=1", "optimizer=nope", "+seed=1", "~nope", "~seed=5", "a@b=1", "optimizer=5"),
    *("seed=1,2", "seed=range(3)", "++optimizer=adam", "~optimizer=adam", "seed.x=1", "seed=${", "x.y=1"),
]


@pytest.fixture(autouse=True)
def nothing_kept(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Start each test with an empty cache, and restore Hydra's global `ConfigStore` after it."""
    monkeypatch.setattr(config_loader, "_kept", {})
    monkeypatch.setattr(OptionFiles, "sets_hydra", False)
    Composer()  # registers Hydra's own options
    store = ConfigStore.instance()
    before = store.repo
    store.repo = copy.deepcopy(before)
    yield
    store.repo = before


def outcome(loader: ConfigLoaderImpl, overrides: list[str], mode: RunMode = RunMode.RUN) -> Any:
    """Compose a config with `loader`; return the config and two flags, or the type and message of the error.

    The flags say whether the config is in struct mode, and whether its node `hydra` is read-only.
    """
    try:
        config = loader.load_configuration("config", overrides, mode)
    except (HydraException, ValueError) as error:
        return type(error), str(error)
    return OmegaConf.to_container(config), OmegaConf.is_struct(config), OmegaConf.is_readonly(config.hydra)


def hydras_own(loader: ConfigLoader) -> ConfigLoaderImpl:
    return ConfigLoaderImpl(loader.get_search_path())


@pytest.mark.parametrize("overrides", [*LINES, *([word] for word in INVALID_OVERRIDES)], ids=" ".join)
def test_configs_and_errors_are_those_of_hydras_own_loader(overrides: list[str]) -> None:
    loader = Composer()._loader
    wanted = outcome(hydras_own(loader), overrides)
    assert outcome(loader, overrides) == wanted
    assert outcome(loader, overrides) == wanted, "from what was kept"


def test_configs_of_a_sweep_and_of_a_run_are_cached_separately() -> None:
    loader, words = Composer()._loader, ["optimizer=adam", "seed=3"]
    for mode in (RunMode.MULTIRUN, RunMode.RUN, RunMode.MULTIRUN):
        assert outcome(loader, words, mode) == outcome(hydras_own(loader), words, mode)


def test_a_list_of_trackers_is_expanded_to_tracking_several() -> None:
    short, full = Composer().run(["seed=1", "tracking=[csv,tensorboard]"]), ["tracking.names=[csv,tensorboard]"]
    assert short == Composer().run(["seed=1", "tracking=several", *full])
    assert short.config["tracking"]["names"] == ["csv", "tensorboard"]
    sweep = Composer().sweep(["seed=1,2"])
    assert Composer().job(sweep, 0, ["seed=1", "tracking=[csv]"]).config["tracking"]["names"] == ["csv"]


@pytest.mark.parametrize(
    ("typed", "steps", "epochs"),
    [
        ([], 10, 20),
        (["epochs=2"], None, 2),
        (["++epochs=2"], None, 2),
        (["epochs=2", "steps=7"], 7, 2),
        (["workload.env_steps=500", "workload=dqn"], None, None),
    ],
)
def test_typed_epochs_go_before_the_steps_of_an_option_file(
    typed: list[str], steps: int | None, epochs: int | None, tmp_path: Path
) -> None:
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "short.yaml").write_text("# @package _global_\nsteps: 10\n")
    composer = Composer(str(tmp_path))
    words = ["experiment=short", *typed]
    config = composer.run(words).config
    assert (config["steps"], config["epochs"]) == (steps, epochs)
    assert composer.job(composer.sweep(["experiment=short"]), 0, words).config["steps"] == steps


def test_a_misspelled_key_is_refused_although_the_options_are_cached() -> None:
    """Valid overrides must still be accepted after invalid ones with the same options."""
    loader = Composer()._loader
    good = outcome(loader, ["optimizer=adam", "seed=1"])
    assert outcome(loader, ["optimizer=adam", "seeed=1"]) == outcome(hydras_own(loader), ["optimizer=adam", "seeed=1"])
    assert outcome(loader, ["optimizer=adam", "seed=1"]) == good


def count_compositions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the name of each option file is appended when it is read."""
    read: list[str] = []
    load = OptionFiles.load_config

    def counted(self: OptionFiles, config_path: str) -> Any:
        read.append(config_path)
        return load(self, config_path)

    monkeypatch.setattr(OptionFiles, "load_config", counted)
    return read


def test_options_are_composed_once_for_all_values(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    read = count_compositions(monkeypatch)
    first = Composer().run(["seed=1", "optimizer=adam"]).config
    assert read
    read.clear()
    monkeypatch.chdir(tmp_path)
    second = Composer().run(["optimizer=adam", "optimizer.lr=0.5"])
    assert read == []
    assert second.config == first | {"seed": 0, "optimizer": first["optimizer"] | {"lr": 0.5}}
    assert second.overrides == ["optimizer=adam", "optimizer.lr=0.5"]
    assert Composer().run(["name=${hydra:runtime.cwd}", "optimizer=adam"]).config["name"] == str(tmp_path)
    assert read == []
    assert Composer().run(["optimizer=sgd"]).config["optimizer"] != first["optimizer"]
    assert read


def test_changing_a_composed_config_does_not_change_the_cache() -> None:
    loader = Composer()._loader
    config = loader.load_configuration("config", [], RunMode.RUN)
    config.optimizer.lr = 77
    with pytest.raises(ConfigAttributeError):
        config.optimizer.nope = 1
    assert loader.load_configuration("config", [], RunMode.RUN).optimizer.lr != 77


def test_the_number_of_cached_configs_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config_loader, "_MAX_KEPT", 2)
    lines = [["optimizer=adam"], ["optimizer=sgd"], ["optimizer=adamw"]]
    values = [Composer().run(line).config for line in lines]
    assert len(config_loader._kept) == 2
    assert [Composer().run(line).config for line in lines] == values


# ---------------------------------------------------------------------------------------------------------------------
# What a cached config depends on


def option(directory: Path, name: str, text: str) -> Path:
    path = directory / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def test_a_changed_added_or_removed_option_file_is_noticed(tmp_path: Path) -> None:
    def seed() -> int:
        return values()[0]

    def values() -> tuple[int, int]:
        config = Composer(str(tmp_path)).run([]).config
        return config["seed"], config["batch_size"]

    assert seed() == 0
    path = option(tmp_path, "local/default", "# @package _global_\nseed: 3\n")
    assert seed() == 3
    path.write_text("# @package _global_\nseed: 4\n")
    assert seed() == 4
    path.write_text("# @package _global_\ndefaults: [/optimizer/adam@more, /local/other]\nseed: 5\n")
    other = option(tmp_path, "local/other", "# @package _global_\nbatch_size: 7\n")
    assert values() == (5, 7)
    other.write_text("# @package _global_\nbatch_size: 8\nseed: 6\n")
    assert values() == (5, 8), "what a file inherits is overridden by what it says"
    path.unlink()
    assert seed() == 0


def test_an_option_file_with_hydra_keys_is_refused_each_time(tmp_path: Path) -> None:
    from runner.config.errors import ConfigError

    option(tmp_path, "local/default", "# @package _global_\nhydra: {run: {dir: x}}\n")
    for _ in range(2):
        OptionFiles.sets_hydra = False  # as in a new process
        with pytest.raises(ConfigError) as refusal:
            Composer(str(tmp_path)).run([])
        assert refusal.value.key == "hydra.run.dir"


def test_interpolations_in_a_defaults_list_are_resolved_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    option(tmp_path, "local/default", "# @package _global_\ndefaults: [/optimizer@extra: '${oc.env:MINE}']\n")
    for name, target in (("adam", "Adam"), ("sgd", "SGD")):
        monkeypatch.setenv("MINE", name)
        assert Composer(str(tmp_path)).run([]).config["extra"]["_target_"] == f"runner.optimizer.{target}"


def test_changed_options_in_the_config_store_are_noticed() -> None:
    for seed in (5, 6):
        ConfigStore.instance().store(group="local", name="default", package="_global_", node={"seed": seed})
        assert Composer().run([]).config["seed"] == seed


def test_configs_from_a_directory_with_many_files_are_not_cached(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Checking whether the files have changed could take longer than composing."""
    monkeypatch.setattr(config_loader, "_MAX_ENTRIES", 100)
    for number in range(101):
        (tmp_path / f"{number}.txt").touch()
    (tmp_path / "nowhere").symlink_to("nothing")
    read = count_compositions(monkeypatch)
    for _ in range(2):
        read.clear()
        Composer(str(tmp_path)).run([])
        assert read


def test_the_cache_works_after_hydra_has_imported_its_plugins_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hydra imports its plugins again when its singletons are reset.

    A config then cannot be pickled, because its class is no longer the class of the same name in the plugin's module.
    """
    wanted = Composer().run(["seed=1", "name=kept"]).config
    monkeypatch.setattr(config_loader, "_kept", {})
    monkeypatch.setattr(basic_launcher, "BasicLauncherConf", type("BasicLauncherConf", (), {}))
    assert Composer().run(["seed=1", "name=kept"]).config == wanted
    assert Composer().run(["seed=2", "name=kept"]).config == wanted | {"seed": 2}
    assert len(config_loader._kept) == 1
