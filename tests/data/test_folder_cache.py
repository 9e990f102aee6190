"""Tests of `runner.data.folder_cache`: a cached listing is used only if no directory can have changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from runner.data import class_folders, folder_cache
from runner.data.class_folders import Files, training_and_held_out


@pytest.fixture
def images(tmp_path: Path) -> Path:
    root = tmp_path / "images"
    names = (
        "b/3.png",
        "b/2.jpg",
        "a/0.png",
        "a/1.png",
        "a/8.png",
        "a/deep/er/4.webp",
        "a/deep/er/0.gif",
        "a/notes.txt",
    )
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).touch()
    return root


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use an empty cache, which also accepts small listings and listings of directories that have just changed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(folder_cache, "_LEAST_FILES", 0)
    monkeypatch.setattr(folder_cache, "_QUIET", -1e9)
    return tmp_path / "cache" / "runner" / "folders"


@pytest.fixture
def walks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list to which the name of each directory is appended when `os.walk` starts there."""
    walked: list[str] = []
    walk = os.walk

    def recorded(path: Path, **options: bool) -> Iterator[tuple[str, list[str], list[str]]]:
        walked.append(path.name)
        yield from walk(path, **options)

    monkeypatch.setattr(os, "walk", recorded)
    return walked


def list_without_cache(root: Path) -> tuple[Files, Files]:
    """List the images without the cache."""
    train, held_out, _ = class_folders._listed(root, 0.2).values
    return class_folders._joined(root, train), class_folders._joined(root, held_out)


def test_a_cached_listing_is_used_and_is_the_same(
    images: Path, walks: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    first = training_and_held_out(images, 0.2)
    logged = caplog.text
    assert sorted(walks) == ["a", "b"]
    walks.clear()
    caplog.clear()
    assert training_and_held_out(images, 0.2) == first
    assert walks == []
    assert "1 .txt" in logged
    assert caplog.text == logged
    monkeypatch.chdir(images.parent)
    train, _ = training_and_held_out(Path("images"), 0.2)  # by a relative path
    assert walks == []
    assert {os.path.join(images.parent, path) for paths in train.values() for path in paths} == {
        path for paths in first[0].values() for path in paths
    }
    assert training_and_held_out(images, 0.5) == training_and_held_out(images, 0.5)  # another split has its own listing
    assert sorted(walks) == ["a", "b"]


CHANGES: dict[str, Callable[[Path], object]] = {
    "added": lambda root: (root / "a/deep/er/5.png").touch(),
    "removed": lambda root: (root / "b/2.jpg").unlink(),
    "renamed": lambda root: (root / "a/1.png").rename(root / "a/7.png"),
    "moved": lambda root: (root / "a/1.png").rename(root / "b/1.png"),
    "class": lambda root: (root / "a/deep/er").rename(root / "c"),
    "image": lambda root: (root / "a/notes.txt").rename(root / "a/notes.png"),
    "replaced": lambda root: [(root / "b").rename(root.parent / "old"), (root / "a/deep").rename(root / "b")],
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("times_restored", [False, True])
def test_a_change_in_any_directory_invalidates_the_cached_listing(
    images: Path, change: str, times_restored: bool
) -> None:
    (images / "b/er").mkdir()
    (images / "b/er/6.png").touch()
    before = training_and_held_out(images, 0.2)
    times = {path: path.stat().st_mtime_ns for path in (images, *images.rglob("*"))}
    CHANGES[change](images)
    if times_restored:  # as archiving tools do; `st_ctime` cannot be set
        for path, time in times.items():
            if path.exists():
                os.utime(path, ns=(time, time))
    found = training_and_held_out(images, 0.2)
    assert found == list_without_cache(images)
    assert found != before


def test_a_change_during_the_listing_invalidates_the_cached_listing(
    images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    listed = class_folders._listed

    def late(root: Path, holdout: float) -> folder_cache.Listing:
        found = listed(root, holdout)
        (root / "b/late.png").touch()
        return found

    with monkeypatch.context() as patched:
        patched.setattr(class_folders, "_listed", late)
        training_and_held_out(images, 0.2)
    assert training_and_held_out(images, 0.2) == list_without_cache(images)


@pytest.mark.parametrize("link", ["directory", "file"])
def test_listings_with_symlinks_are_not_cached(images: Path, cache: Path, tmp_path: Path, link: str) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/8.png").touch()
    target = tmp_path / "elsewhere" if link == "directory" else images / "a/notes.txt"
    (images / "b/link").symlink_to(target)
    training_and_held_out(images, 0.2)
    assert list(cache.glob("*")) == []
    (tmp_path / "elsewhere/9.png").touch()
    assert training_and_held_out(images, 0.2) == list_without_cache(images)


def test_listings_of_directories_that_have_just_changed_are_not_cached(
    images: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_cache, "_QUIET", 10.0)
    training_and_held_out(images, 0.2)
    assert list(cache.glob("*")) == []


@pytest.mark.parametrize("damage", ["one character", "half", "empty", "no JSON", "other directories"])
def test_a_damaged_cache_file_is_ignored(images: Path, cache: Path, damage: str) -> None:
    before = training_and_held_out(images, 0.2)
    (file,) = cache.glob("*.json")
    text = file.read_text()
    damaged = {
        "one character": text.replace("2.jpg", "3.jpg"),
        "half": text[: len(text) // 2],
        "empty": "",
        "no JSON": f"{folder_cache._checksum('x')}\nx",
        "other directories": _of_another_key(text),
    }[damage]
    assert damaged != text
    file.write_text(damaged)
    assert training_and_held_out(images, 0.2) == before


def _of_another_key(text: str) -> str:
    body = text.partition("\n")[2].replace("2.jpg", "3.jpg").replace("0.2", "0.3")
    return f"{folder_cache._checksum(body)}\n{body}"


def test_a_cache_that_cannot_be_written_to_is_not_an_error(images: Path, cache: Path) -> None:
    cache.parent.parent.mkdir(parents=True)
    cache.parent.touch()  # a file in place of the directory
    assert training_and_held_out(images, 0.2) == training_and_held_out(images, 0.2) == list_without_cache(images)
