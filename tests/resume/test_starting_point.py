"""Tests of `runner.resume.starting_point`: which directory a run uses, and what a refused run leaves in it."""

import errno
import fcntl
import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any
from unittest import mock

import pytest
from helpers.compose import TINY_CPU, build_composed_run, compose_config, prepare_session
from helpers.handmade_runs import write_config
from helpers.permissions import enforced_permissions

import runner.resume.starting_point
import runner.training
from runner.config.errors import ConfigError
from runner.result import Result
from runner.resume.starting_point import claimed_directory
from runner.run import config_hash
from runner.storage import run_directory
from runner.storage.files import json_text, write_text
from runner.storage.saved_run import checkpoints, config_text, saved_config, saved_overrides


def claiming(cwd: Path, *overrides: str, name: str | None = None) -> Any:
    """A context that claims a run directory in `cwd / "test"`, with the given name or a new one."""
    run = build_composed_run(*TINY_CPU, "steps=4", *overrides)
    return claimed_directory(run, prepare_session(run), cwd / "test", name, list(overrides))


def claim(cwd: Path, *overrides: str, name: str | None = None) -> Path:
    """Claim a run directory, end the run before its first step, and return the directory."""
    with claiming(cwd, *overrides, name=name) as claimed:
        claimed.begin()
        return claimed.path


def refusal(cwd: Path, *overrides: str, name: str | None = None) -> ConfigError:
    """Return the error of a run that cannot claim its directory."""
    with pytest.raises(ConfigError) as refused:
        claim(cwd, *overrides, name=name)
    return refused.value


def refused_by_a_rank(cwd: Path, *overrides: str, name: str | None = None) -> None:
    """Claim a run directory, and let another rank refuse the run."""
    with pytest.raises(ConfigError, match="a rank refused it"), claiming(cwd, *overrides, name=name) as claimed:
        raise ConfigError("resume", str(claimed.path), "a rank refused it", "nothing")


def content_of(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in sorted(path.rglob("*")) if file.is_file()}


def ended_early(cwd: Path) -> Path:
    """Return the directory of a run that was stopped after step 3, with a checkpoint of each step."""
    path = claim(cwd, "optimizer.lr=0.2")
    write_result(path, "stopped", 3)
    for step in (1, 2, 3):
        make_checkpoint(path, run_directory.step_name(step))
    return path


def locked(path: Path) -> IO[Any]:
    """A context in which another process seems to train the run."""
    lock = run_directory.lock(path)
    assert lock is not None
    return lock


def write_result(path: Path, status: str, steps: int = 4) -> None:
    write_text(path / "result.json", json_text(Result(status, steps).as_dict()))


def make_checkpoint(path: Path, name: str) -> None:
    (path / "checkpoints" / name).mkdir(parents=True)


def test_auto_resumes_the_newest_unfinished_run_of_the_same_config_that_is_not_in_use(tmp_path):
    first, second, other = claim(tmp_path), claim(tmp_path), claim(tmp_path, "optimizer.lr=0.2")
    (first.parent / "latest").symlink_to(second.name)  # which is not followed
    assert len({first, second, other}) == 3
    for status in ("", "stopped", "crashed"):
        if status:
            write_result(second, status, 2)
        assert claim(tmp_path, "resume=auto") == second
    assert claim(tmp_path, "resume=auto", "optimizer.lr=0.2") == other
    assert claim(tmp_path, "resume=auto", "seed=5") not in (first, second, other), "there is none: a new one"
    with locked(second):
        assert claim(tmp_path, "resume=auto") == first
        with locked(first):
            assert "is running" in refusal(tmp_path, "resume=auto").why
    write_result(second, "done")
    assert claim(tmp_path, "resume=auto") == first
    write_result(first, "done")
    assert claim(tmp_path, "resume=auto") not in (first, second, other)


def test_the_overrides_of_a_resumed_run_are_those_that_still_hold(tmp_path):
    """As after a session with another precision, when the run goes on from a checkpoint before it."""
    path = claim(tmp_path, "optimizer=sgd", "precision=bf16", "deterministic=true", "keep=3")
    assert claim(tmp_path, "keep=3", "optimizer.lr=0.2", f"resume={path}") == path
    kept = ["optimizer=sgd", "keep=3", "optimizer.lr=0.2", f"resume={path}"]
    assert saved_overrides(path) == kept


def test_auto_says_in_what_the_newest_unfinished_run_differs(tmp_path, caplog):
    """A run without a checkpoint, one that is running and one that is done are not worth mentioning."""
    old, new, held, empty, done = (claim(tmp_path, f"optimizer.lr=0.{i}") for i in range(1, 6))
    for path in (old, new, held, done):
        make_checkpoint(path, "step_00000002")
    write_result(done, "done")
    with locked(held):
        assert claim(tmp_path, "resume=auto", "optimizer.lr=0.7") not in (old, new, held, empty, done)
        assert caplog.messages[0].endswith(f"{new}, has optimizer.lr: 0.2 then, 0.7 now")
        assert claim(tmp_path, f"resume={new}", "optimizer.lr=0.7") == new


@pytest.mark.parametrize("content", [{"config.yaml": b""}, {"config.yaml": b"[" * 100_000}, {"result.json": b"{}"}])
def test_auto_ignores_broken_files_of_another_run(content, tmp_path):
    ours = claim(tmp_path)
    (tmp_path / "test" / "9999-broken").mkdir()
    for name, data in content.items():
        (tmp_path / "test" / "9999-broken" / name).write_bytes(data)
    (tmp_path / "test" / "9999-file").touch()
    os.mkfifo(tmp_path / "test" / "9999-pipe")
    assert claim(tmp_path, "resume=auto") == ours


def test_auto_skips_a_run_of_a_package_that_has_been_removed(tmp_path):
    path = claim(tmp_path)
    config = saved_config(path).values
    write_config(path, config | {"optimizer": {"_target_": "removed_package.optimizers.Own"}}, [])
    assert claim(tmp_path, "resume=auto") != path


def test_auto_is_refused_if_checkpoints_have_no_readable_config(tmp_path):
    """The checkpoints may be those of the run to resume. If they were ignored, the run would begin again."""
    ours = claim(tmp_path)
    make_checkpoint(ours, "step_00000002")
    (ours / "config.yaml").write_text("")
    error = refusal(tmp_path, "resume=auto")
    assert (error.key, error.got) == ("resume", "auto")
    assert str(ours) in error.why
    saved = config_text(compose_config(*TINY_CPU, "steps=4"))
    (ours / "checkpoints" / "step_00000002" / "config.yaml").write_text(saved)
    assert claim(tmp_path, "resume=auto") == ours
    assert saved_config(ours).unreadable == [], "it is written again"


@pytest.mark.parametrize("resumed", [False, True])
def test_a_stop_while_the_first_files_are_written_undoes_all_changes(resumed, tmp_path, monkeypatch):
    source = claim(tmp_path) if resumed else "never"
    before = content_of(tmp_path)

    monkeypatch.setattr(runner.resume.starting_point, "environment", mock.Mock(side_effect=SystemExit(75)))
    with pytest.raises(SystemExit):
        claim(tmp_path, "optimizer.lr=0.3", f"resume={source}")
    assert content_of(tmp_path) == before


def test_credentials_are_in_no_file_of_a_run(tmp_path):
    run = build_composed_run(*TINY_CPU, "steps=4")
    session = prepare_session(run)
    run.config["model"]["weights"] = "https://me:hunter2@example.org/w.pt"
    with claimed_directory(run, session, tmp_path / "test", None, ["x.token=hf_abcdefghijklmnopqrstuvwx"]) as claimed:
        path = claimed.path
        found = b"".join(file.read_bytes() for file in path.rglob("*") if file.is_file())
    assert b"example.org" in found
    assert b"hunter2" not in found
    assert b"hf_abc" not in found
    assert config_hash(saved_config(path).values) == config_hash(run.config)


def test_runs_that_start_at_the_same_time_get_different_directories(tmp_path):
    claim(tmp_path)
    with ExitStack() as stack:
        first = stack.enter_context(claiming(tmp_path, "resume=auto")).path
        assert len({first, *(stack.enter_context(claiming(tmp_path)).path for _ in range(3))}) == 4
        assert refusal(tmp_path, "resume=auto").remedy.endswith("resume=never starts another run")


@pytest.mark.parametrize(
    "names", [(), (".lock",), (".lock", "environment.json", "overrides.yaml", ".config.yaml.part")]
)
def test_a_run_begins_in_a_directory_in_which_no_run_has_begun(names, tmp_path):
    """Nobody may write to its parent, so it can be neither replaced nor renamed."""
    path = tmp_path / "test" / "here"
    path.mkdir(parents=True)
    for name in names:
        (path / name).write_text("")
    with enforced_permissions(tmp_path / "test", 0o555):
        refused_by_a_rank(tmp_path, "resume=auto", name="here")
        assert not list(path.iterdir()), "a refused run leaves nothing"
        with claiming(tmp_path, "resume=auto", name="here") as claimed:
            assert claimed.path == path
            assert run_directory.lock(path) is None
        assert content_of(path).keys() == {".lock", "config.yaml", "overrides.yaml", "environment.json"}


STRANGERS: list[tuple[str, ...]] = [
    *(("movie.mkv.part",), ("book.part/text",), ("overrides.yaml",), (".lock", "overrides.yaml", "thesis.tex")),
    ("result.json", ".lock"),
    *(("config.yaml", "hydra.yaml", "overrides.yaml"), ("checkpoints/step_100/weights.pt", "config.yaml")),
]


@pytest.mark.parametrize("names", STRANGERS, ids="-".join)
def test_a_directory_that_no_run_has_written_is_refused_and_not_changed(names, tmp_path):
    path = tmp_path / "test" / "here"
    for name in names:
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("seed: 5\nname: mine\n")
    before = content_of(path)
    error = refusal(tmp_path, "resume=auto", name="here")
    assert (error.key, error.got) == ("--run-directory", str(path))
    assert "not a run directory" in error.why
    assert content_of(path) == before
    assert list(path.parent.iterdir()) == [path]


def test_a_run_in_use_is_refused_and_not_changed(tmp_path):
    path = claim(tmp_path)
    for step in (2, 4):
        make_checkpoint(path, run_directory.step_name(step))
    before = {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.name != ".lock"}
    with locked(path):
        for source in (path, path / "checkpoints/step_00000002"):
            error = refusal(tmp_path, f"resume={source}")
            assert (error.key, error.got) == ("resume", str(path))
            assert "another process" in error.why
    assert {file: file.stat().st_mtime_ns for file in path.rglob("*") if file.name != ".lock"} == before


@pytest.mark.parametrize("secret", ["", "test"])
def test_a_new_run_in_an_unreadable_directory_is_refused(secret, tmp_path):
    (tmp_path / secret).mkdir(exist_ok=True)
    before = sorted(tmp_path.rglob("*"))
    for resume in ("auto", "never"):
        with enforced_permissions(tmp_path / secret, 0):
            error = refusal(tmp_path, f"resume={resume}")
        assert (error.key, error.got) == ("output_root", str(tmp_path / "test"))
        assert "Permission denied" in error.why
        assert sorted(tmp_path.rglob("*")) == before


def test_auto_is_refused_if_a_run_directory_cannot_be_read(tmp_path):
    """The directory may be that of the run to resume. If it were ignored, the run would begin again."""
    with enforced_permissions(claim(tmp_path), 0) as ours:
        error = refusal(tmp_path, "resume=auto")
    assert (error.key, error.got) == ("resume", "auto")
    assert str(ours) in error.why
    assert "Permission denied" in error.why
    assert list(ours.parent.iterdir()) == [ours]


@pytest.mark.parametrize("bits", [0, 0o444])
def test_a_named_directory_that_cannot_be_read_or_renamed_is_refused(bits, tmp_path):
    claim(tmp_path).rename(tmp_path / "test" / "here")
    before = content_of(tmp_path)
    for path, mode, other in ((tmp_path / "test" / "here", bits, ()), (tmp_path / "test", 0o555, ("seed=1",))):
        with enforced_permissions(path, mode):
            error = refusal(tmp_path, "resume=auto", *other, name="here")
        assert error.key == "--run-directory"
        assert "Permission denied" in error.why
    assert content_of(tmp_path) == before


def test_a_file_system_without_locks_is_refused_and_no_directory_is_left(tmp_path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", mock.Mock(side_effect=OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))))
    error = refusal(tmp_path)
    assert error.key == "output_root"
    assert "No locks available" in error.why
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("missing", ["", "config.yaml"])
@pytest.mark.parametrize("protected", ["", "checkpoints"])
def test_a_run_that_is_not_writable_is_refused_and_not_changed(protected, missing, tmp_path, caplog):
    path = ended_early(tmp_path)
    if missing == "config.yaml":
        shutil.copy(path / missing, path / "checkpoints" / "step_00000001")
    if missing:
        (path / missing).unlink()
    before = content_of(path)
    with enforced_permissions(path / protected, 0o555):
        error = refusal(tmp_path, f"resume={path}/checkpoints/step_00000001", "optimizer.lr=0.3")
    assert (error.key, error.got) == ("resume", str(path))
    assert "Permission denied" in error.why
    assert "output_root" not in error.remedy
    assert content_of(path) == before
    assert len(checkpoints(path)) == 3
    assert not caplog.records, "everything was restored"


@pytest.mark.parametrize("name", ["overrides.yaml", "config.yaml", "environment.json"])
def test_if_there_is_no_room_for_a_file_nothing_is_changed(name, tmp_path, monkeypatch):
    path, fsync = ended_early(tmp_path), os.fsync
    before = content_of(path)

    def full(descriptor: int) -> None:
        if name in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    error = refusal(tmp_path, f"resume={path}/checkpoints/step_00000001", "optimizer.lr=0.3")
    assert (error.key, error.got) == ("resume", str(path))
    assert "No space left" in error.why
    assert content_of(path) == before
    assert len(checkpoints(path)) == 3


def test_the_result_of_every_session_is_kept(tmp_path):
    path = claim(tmp_path)
    for steps in (1, 2, 3):
        write_result(path, "stopped", steps)
        before = content_of(path)
        refused_by_a_rank(tmp_path, f"resume={path}")
        assert content_of(path) == before, "a refused session keeps them, too"
        assert claim(tmp_path, f"resume={path}") == path
    names = [f"result.json.superseded{number}" for number in ("", 2, 3)]
    assert [json.loads((path / name).read_text())["steps"] for name in names] == [1, 2, 3]
    assert not (path / "result.json").exists()


def test_a_resume_path_that_is_not_a_checkpoint_is_refused(tmp_path):
    path = claim(tmp_path)
    for name in ("step_00000002", "step_00000003.superseded"):
        make_checkpoint(path, name)
    for name in ("step_00000009", "step_00000003.superseded", "tmp.step_00000003"):
        error = refusal(tmp_path, f"resume={path}/checkpoints/{name}")
        assert (error.key, error.got) == ("resume", f"{path}/checkpoints/{name}")
        assert "no such checkpoint" in error.why
        assert "step_00000002" in error.remedy
    error = refusal(tmp_path, f"resume={claim(tmp_path)}/checkpoints/step_00000009")
    assert "it has none" in error.remedy
    error = refusal(tmp_path, f"resume={tmp_path}")
    assert (error.key, error.got) == ("resume", str(tmp_path))
    assert "no run" in error.why


def test_fewer_steps_than_are_done_are_refused(tmp_path, caplog):
    """Otherwise, the run would be done after more steps than configured, without an evaluation at its end."""
    path = claim(tmp_path)
    for step in (4, 9):
        make_checkpoint(path, run_directory.step_name(step))
    error = refusal(tmp_path, f"resume={path}", "steps=8")
    assert (error.key, error.got) == ("steps", 8)
    assert error.why.startswith("9 ")
    assert "steps=10" in error.remedy
    assert claim(tmp_path, f"resume={path}", "steps=9") == path
    assert caplog.messages == []
    assert claim(tmp_path, f"resume={path}/checkpoints/step_00000004", "steps=8") == path
    assert [message[:21] for message in caplog.messages] == ["back to step_00000004"]
