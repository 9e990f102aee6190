"""Tests of `runner.config.overrides`, which checks and quotes overrides, and of `other_names`."""

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from runner.config.errors import ConfigError
from runner.config.options import CONF, option_files, root_keys
from runner.config.other_names import NAMES, type_instead
from runner.config.overrides import checked_override, quoted, resumed, text_override

REFUSED_HYDRA_KEYS = [
    *("hydra.run.dir=x", "hydra.sweeper.max_batch_size=0", "hydra.launcher._target_=os.system", "hydra.verbose.x=1"),
    *("hydra=x", "hydra/launcher=joblib", "hydra/hydra_logging@hydra.job_logging=default", "hydra.searchpaths=[x]"),
]


@pytest.mark.parametrize("prefix", ["", "+", "++", "~"])
@pytest.mark.parametrize("word", [*REFUSED_HYDRA_KEYS, "hydra/launcher", "hydra", "hydra.verbose"])
def test_a_hydra_key_is_refused_with_any_prefix(word, prefix):
    with pytest.raises(ConfigError) as refusal:
        checked_override(f"{prefix}{word}")
    assert refusal.value.key == f"{prefix}{word}".partition("=")[0]


@pytest.mark.cases(
    ("precision=16", "precision='16'"),
    ("tracking=-5.0e+16", "tracking='-5.0e+16'"),
    ("tracking=true,.5", "tracking='true','.5'"),
    ("precision=16,32,bf16", "precision='16','32',bf16"),
    ("+accumulation=4", "+accumulation='4'"),
    ("accumulation.steps=4", "accumulation.steps=4"),
    ("debug=null", "~debug"),
    ("name=a b", "name='a b'"),
    ("name=it's", r"name='it\'s'"),
    ("name=${seed}-x", "name=${seed}-x"),
    ("output_root=/a b/ü=,c", "output_root='/a b/ü=,c'"),
    ("resume=outputs/a/000-seed=1,lr=2", "resume='outputs/a/000-seed=1,lr=2'"),
    ("data.inputs=[1_0, 1.10 ,on,null,'007',a b]", "data.inputs=['1_0', '1.10' ,on,'null','007',a b]"),
    ("data.file=my table (1).csv", "data.file='my table (1).csv'"),
    ("~seed", "~seed"),
)
def test_values_are_quoted_for_hydra(typed, wanted):
    assert quoted(typed, sweep=False) == wanted


def test_a_comma_separates_values_in_a_sweep_and_is_text_in_a_single_run():
    assert quoted("name=a b,c", sweep=True) == "name='a b',c"
    assert quoted("model.weights=ü.pt,null", sweep=True) == "model.weights='ü.pt',null"
    assert quoted("optimizer.lr=0.1,0.2", sweep=True) == "optimizer.lr=0.1,0.2"
    assert quoted("data.inputs=[1_0],null,[10,null]", sweep=True) == "data.inputs=['1_0'],null,['10','null']"
    assert quoted("name=a b,c", sweep=False) == "name='a b,c'"


@pytest.mark.cases(
    ("model.weights=choice(a.pt,b.pt)", ["a.pt", "b.pt"]),
    ("output_root=sort(choice(b,a),reverse=true)", ["b", "a"]),
    ("name=range(1,3)", ["1", "2"]),
)
def test_hydra_functions_expand_to_the_values_of_a_sweep(typed, values):
    [override] = OverridesParser.create().parse_overrides([quoted(typed, sweep=True)])
    assert list(override.sweep_string_iterator()) == values


@pytest.mark.parametrize("value", ["1.10", "1e-3", "016", "1_000", "0x10", "true", "False", "inf", "nan", "-0", ".5"])
def test_text_options_keep_exactly_what_was_typed(value):
    for key in ("name", "output_root", "data.root"):
        [override] = OverridesParser.create().parse_overrides([quoted(f"{key}={value}", sweep=False)])
        assert (override.value(), type(override.value())) == (value, str)
    [override] = OverridesParser.create().parse_overrides([quoted(f"name={value},x", sweep=True)])
    assert list(override.sweep_string_iterator()) == [f"'{value}'", "x"] or value in ("016", "0x10")


def test_paths_of_runs_and_files_need_no_quotes():
    for word in ("resume=outputs/a/2026-01-01_12-00-00-abc-lr=0.1+steps=3", "data.file=2026-01.csv", "env.id=A/B-v1"):
        assert text_override(*word.split("=", 1)) == word
        [override] = OverridesParser.create().parse_overrides([quoted(word, sweep=False)])
        assert override.value() == word.partition("=")[2]
    assert text_override("env.id", "1=2") == "\"env.id='1=2'\"", "Hydra would read it as something else"


def test_a_tilde_at_the_beginning_of_a_path_is_expanded(monkeypatch):
    monkeypatch.setenv("HOME", "/me")
    assert quoted("output_root=~/runs", sweep=False) == "output_root=/me/runs"
    assert quoted("name=~", sweep=False) == "name='~'"
    for value in ("~nobody-of-this-name/x", "/a/" + "ü" * 128, "a/" * 2100):  # no user, and names that are too long
        with pytest.raises(ConfigError) as refusal:
            quoted(f"data.root={value}", sweep=False)
        assert (refusal.value.key, refusal.value.got) == ("data.root", value)


def test_groups_are_the_folders_of_conf_with_numeric_options_in_order():
    assert [*option_files()["accumulation"]] == ["1", "2", "4", "8", "16", "auto"]
    assert set(option_files()) == {path.parent.name for path in CONF.glob("*/*.yaml")}


@pytest.mark.parametrize("prefix", ["", "+", "++"])
def test_resumed_returns_the_directory_that_resume_names(prefix, tmp_path):
    assert resumed(["seed=1"]) is None
    assert resumed([f"{prefix}resume=auto"]) is None
    assert resumed([f"{prefix}resume={tmp_path}"]) == tmp_path
    assert resumed(["resume=auto", f"{prefix}resume={tmp_path}"]) == tmp_path, "the last one counts"
    assert resumed([f"~resume={tmp_path}"]) is None, "it deletes the key"
    for value in (f"{tmp_path}/absent", "~nobody-of-this-name", "x" * 300, "a\0b"):
        with pytest.raises(ConfigError) as refusal:
            resumed([f"resume={value}"])
        assert (refusal.value.key, refusal.value.got) == ("resume", value)


def test_every_name_of_other_libraries_means_one_thing_and_none_is_ours():
    names = " ".join(NAMES.values()).split()
    assert len(names) == len(set(names))
    assert not set(names) & root_keys()


@pytest.mark.parametrize(
    ("key", "remedy"),
    [("Trainer.Max-Epochs", "type epochs=…"), ("hydra.job.name", "type name=…"), ("hydra.launcher.gpus", "")],
)
def test_a_name_of_another_library_is_known_by_its_last_word(key, remedy):
    assert type_instead(key) == remedy
