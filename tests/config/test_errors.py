"""Tests of `runner.config.errors`: an error states the key, the value, the reason and the remedy."""

import copy
import pickle

import pytest

from runner.config import errors
from runner.optimizer import SGD
from runner.run import Run


def test_an_error_is_unchanged_by_pickling_and_copying():
    """A rank pickles an error to send it to the parent process; `ABSENT` must stay the same object."""
    for error in (
        errors.ConfigError("key", errors.ABSENT, "why", "do"),
        errors.ConfigError("key", [1, None], "why", "do"),
    ):
        for copied in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
            assert type(copied) is errors.ConfigError
            assert str(copied) == str(error)
            assert copied.got == error.got
            assert (copied.got is errors.ABSENT) == (error.got is errors.ABSENT)


def test_see_comments_names_the_file_that_explains_a_component():
    assert "conf/optimizer/sgd.yaml" in errors.see_comments(SGD(lr=0.1))
    assert "conf/optimizer/sgd.yaml" in errors.see_comments(SGD)
    assert "conf/config.yaml" in errors.see_comments(Run)


def test_errors_under_prepends_the_path_to_the_key():
    with pytest.raises(errors.ConfigError) as refusal, errors.errors_under("a"), errors.errors_under("b"):
        raise errors.ConfigError("c", 1, "no", "yes")
    assert (refusal.value.key, str(refusal.value)) == ("a.b.c", "a.b.c: got 1: no\n  yes")


def test_control_characters_are_escaped_and_long_keys_and_values_shortened():
    error = errors.ConfigError("a\x1b[31m\nb", "c\x07\n\x9b", "d\x08 ü\u202e", "e\x00")
    assert str(error) == "a\\x1b[31m\\nb: got 'c\\x07\\n\\x9b': d\\x08 ü\\u202e\n  e\\x00"
    assert str(errors.ConfigError("k" * 1000, errors.ABSENT, "why", "do")) == f"{'k' * 39}…{'k' * 40}: why\n  do"
    shown = str(errors.ConfigError("key", "x" * 1000, "why", "do"))
    assert len(shown.splitlines()[0]) < 100
    assert f"'{'x' * 38}…{'x' * 39}': why" in shown
    path = f"/{'long/' * 40}checkpoints/step_00000040"
    assert "checkpoints/step_00000040': no" in str(errors.ConfigError("resume", path, "no", "do"))
    assert "secret" not in str(errors.ConfigError("key", f"{'x' * 60} token={'secret' * 20}", "why", "do"))


def test_a_message_has_lines_of_limited_length_with_whole_paths():
    path = "/".join(["", *["directory"] * 50])
    lines = errors.wrapped(f"key: Hydra cannot use it (1 is not {'x' * 5000}, see {path})\n  leave it out").splitlines()
    assert [line for line in lines if len(line) > errors.WIDTH] == [f"  {path})"]
    assert f" {'x' * 39}…{'x' * 39}, see" in lines[0]
    assert lines[-1] == "  leave it out"
    assert errors.wrapped("a " * 150 + "x" * 199).endswith(f" {'x' * 39}…{'x' * 40}")
    lines = errors.wrapped("\n".join(f"line {number}" for number in range(30))).splitlines()
    assert (len(lines), lines[6:]) == (10, ["line 6", "  …", "line 28", "line 29"])


def test_did_you_mean_suggests_the_nearest_or_lists_all():
    assert errors.did_you_mean("lrr", ["lr", "momentum"]) == "did you mean lr?"
    assert errors.did_you_mean("LR", ["lr"]) == "did you mean lr?"
    assert errors.did_you_mean("lrr", ["lr"], "optimizer.") == "did you mean optimizer.lr?"
    assert errors.did_you_mean("xyz", ["b", "a"]) == "choose from: a, b"
    assert errors.did_you_mean("xyz", []) == "it has none"
