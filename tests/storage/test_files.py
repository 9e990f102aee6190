"""Tests of `runner.storage.files`: safe reading of untrusted files, and writing that a power loss cannot tear."""

import errno
import os
import pickle
import socket
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
from helpers.permissions import enforced_permissions

from runner.config.errors import ConfigError
from runner.storage import files


def link(path: Path) -> None:
    (path.parent / "target").write_text("secret")
    path.symlink_to("target")


def listening_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))


NOT_REGULAR: dict[str, Callable[[Path], None]] = {
    "a link": link,
    "a broken link": lambda path: path.symlink_to("missing"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/zero"),
    "a pipe": os.mkfifo,
    "a socket": listening_socket,
}


def test_a_regular_file_is_read_up_to_its_limit(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    assert files.read_regular(path, limit_bytes=5) == b"12345"
    with pytest.raises(files.UnsafeFileError) as refused:
        files.read_regular(path, limit_bytes=4)
    assert refused.value.filename == str(path)
    assert "4 bytes" in str(refused.value)
    with pytest.raises(FileNotFoundError):
        files.read_regular(tmp_path / "missing", limit_bytes=100)
    with pytest.raises(IsADirectoryError):
        files.read_regular(tmp_path, limit_bytes=100)


@pytest.mark.parametrize("kind", NOT_REGULAR)
def test_anything_but_a_regular_file_is_refused(kind, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the path of a socket has at most 108 bytes
    path = Path("file")
    NOT_REGULAR[kind](path)
    for check in (lambda path: files.read_regular(path, limit_bytes=100), files.check_no_link):
        with pytest.raises(files.UnsafeFileError) as refused:
            check(path)
        assert refused.value.filename == "file"
        assert str(pickle.loads(pickle.dumps(refused.value))) == str(refused.value)  # ranks send it to each other


@pytest.mark.parametrize("kind", ["a link", "a pipe"])
def test_a_file_that_is_replaced_between_check_and_opening_is_refused(kind, tmp_path, monkeypatch):
    path, regular = tmp_path / "file", tmp_path / "regular"
    regular.write_bytes(b"")
    NOT_REGULAR[kind](path)
    status = os.lstat(regular)
    monkeypatch.setattr("runner.storage.files.os.lstat", lambda _: status)
    free = os.dup(0)
    os.close(free)
    with pytest.raises(OSError, match="file"):
        files.open_regular(path)
    again = os.dup(0)
    os.close(again)
    assert again == free  # no descriptor was left open


def test_check_no_link_refuses_links_and_files(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path)
    (tmp_path / "file").touch()
    files.check_no_link(tmp_path)
    files.check_no_link(tmp_path / "missing")
    for name in ("link", "file"):
        with pytest.raises(files.UnsafeFileError):
            files.check_no_link(tmp_path / name)


def test_walk_stops_after_fifty_levels(tmp_path):
    deep = tmp_path.joinpath(*["d"] * 50)
    (deep / "d" / "d").mkdir(parents=True)
    (deep / "file").touch()
    assert [names for _, _, names in files.walk(tmp_path)] == [[]] * 50 + [["file"]]


def test_paths_that_cannot_be_looked_up_are_refused_by_key(tmp_path):
    (tmp_path / "secret").mkdir()
    (tmp_path / "secret" / "file").touch()
    paths = [tmp_path / "secret" / name for name in ("file", "absent", "absent/below")]
    with enforced_permissions(tmp_path / "secret", 0) as secret:
        for path in (secret, *paths):
            with pytest.raises(ConfigError) as refused:
                files.check_readable("PATH", path)
            assert (refused.value.key, refused.value.got) == ("PATH", str(path))
            assert "Permission denied" in refused.value.why
    with pytest.raises(ConfigError, match="name too long"):
        files.check_readable("PATH", tmp_path / ("x" * 300))
    for path in (tmp_path, tmp_path / "secret" / "file" / "below", tmp_path / "null\0", *paths):
        files.check_readable("PATH", path)


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_failure_leaves_the_old_content(call, tmp_path, monkeypatch):
    path = tmp_path / "a"
    files.write_text(path, "größe")

    with monkeypatch.context() as patched:
        patched.setattr(os, call, mock.Mock(side_effect=OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))))
        with pytest.raises(OSError, match="No space"):
            files.write_text(path, "2")
    assert path.read_text(encoding="utf-8") == "größe"
    files.write_text(path, "3")
    assert {found.name: found.read_text() for found in tmp_path.iterdir()} == {"a": "3"}


def test_a_link_in_the_place_of_the_temporary_file_is_not_followed(tmp_path):
    other = tmp_path / "other"
    other.write_text("mine")
    (tmp_path / ".a.part").symlink_to(other)
    files.write_text(tmp_path / "a", "theirs")
    assert (other.read_text(), (tmp_path / "a").read_text()) == ("mine", "theirs")
    assert not (tmp_path / "a").is_symlink()
