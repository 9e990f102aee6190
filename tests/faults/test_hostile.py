"""Tests with malicious run directories, checkpoints, weights, images and data sets.

Each is refused with an error message, or does no harm: no code is executed, no other file is written or read, and no
secret of this machine is shown. Saved configs are also tested in tests/cli/test_saved_defaults.py, and forged
checkpoints in tests/storage/test_forged.py.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import pickle
import shutil
import socket
import struct
import tarfile
import warnings
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
import yaml
from helpers.compose import FAST, built, prepared
from helpers.faults import Tally
from helpers.forged import read, reseal
from helpers.forged import write as forge
from helpers.probe import in_process, probe
from omegaconf import OmegaConf
from PIL import Image

from runner.cli.run_job import run_one
from runner.storage.saved_config import config_text
from runner.system.exit_codes import STOPPED

SECRET = "hidden treasure"
REFUSED, RESUMED, CRASHED = (2,), (STOPPED,), (1,)
HARMLESS = (0, 2, STOPPED)
OPTIONS = (*FAST, "steps=4", "save_every=2", "eval_every=0", "log_every=1", "name=first")


class World(NamedTuple):
    """The malicious run directory or file `path`, and the directory `outside`, which must not be read or changed."""

    path: Path
    outside: Path

    @property
    def canary(self) -> Path:
        """A file that a payload creates if it is executed."""
        return self.outside / "canary"

    @property
    def secret(self) -> Path:
        """A file outside of the run directory, whose content must not be shown."""
        return self.outside / "secret.txt"

    def config(self, **values: Any) -> None:
        """Change values of the saved config and of its copies in the checkpoints, and update all hashes."""
        saved: Any = OmegaConf.to_container(OmegaConf.load(self.path / "config.yaml"))
        text = config_text({key: value for key, value in (saved | values).items() if value is not OMIT})
        (self.path / "config.yaml").write_text(text)
        for checkpoint in self.path.glob("checkpoints/step_*"):
            (checkpoint / "config.yaml").write_text(text)
            reseal(checkpoint)

    def text(self, content: str | bytes) -> None:
        """Replace the saved config and its copies by `content`, and update the hashes of the checkpoints."""
        data = content.encode() if isinstance(content, str) else content
        (self.path / "config.yaml").write_bytes(data)
        for checkpoint in self.path.glob("checkpoints/step_*"):
            (checkpoint / "config.yaml").write_bytes(data)
            reseal(checkpoint)

    def link(self, name: str, target: Path) -> None:
        """Replace the file `name` in the run directory by a symbolic link."""
        (self.path / name).unlink(missing_ok=True)
        (self.path / name).symlink_to(target)

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoints/step_00000002"


OMIT = object()


class Runs:
    """An object that calls a function when it is unpickled."""

    def __init__(self, *call: Any):
        self.call = call

    def __reduce__(self) -> tuple:
        return self.call[0], self.call[1:]


def touch(world: World) -> Runs:
    return Runs(os.system, f"touch '{world.canary}'")


def snapshot(root: Path) -> dict[str, tuple]:
    """Return mode, size, modification time and inode of everything below `root`, without following links."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            about = path.lstat()
            found[str(path.relative_to(root))] = (about.st_mode, about.st_size, about.st_mtime_ns, about.st_ino)
    return found


def assert_no_harm(world: World, before: dict[str, tuple], console: str, *written: Path) -> None:
    assert not world.canary.exists(), "something was executed"
    assert snapshot(world.outside) == before, "something was written elsewhere"
    assert SECRET not in console
    for root in written:
        for file in root.rglob("*"):
            if file.is_file() and not file.is_symlink() and file.stat().st_size < 10_000_000:
                assert SECRET.encode() not in file.read_bytes(), file
    assert "Traceback" not in console, console
    assert all(line.isprintable() for line in console.splitlines()), repr(console)


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of four steps that was killed after two."""
    root = tmp_path_factory.mktemp("original")
    run_one(built(*OPTIONS, f"output_root={root}/outputs"), ["seed=0"])
    [path] = root.glob("outputs/first/*")
    shutil.rmtree(path / "checkpoints/step_00000004")
    (path / "result.json").unlink()
    return path


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("MY_SECRET", SECRET)
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "secret.txt").write_text(f"{SECRET}\n")
    (outside / "folder/victim.txt").write_text("mine")
    return World(tmp_path / "theirs", outside)


# ---------------------------------------------------------------------------------------------------------------------
# Run directories

Spoil = Callable[[World], object]


def classes(target: str, **values: Any) -> Spoil:
    return lambda world: world.config(tracking={"_target_": target, **values})


def payload_of_yaml(text: str) -> Spoil:
    return lambda world: world.text(text.replace("CANARY", str(world.canary)))


def forged_state(file: str, content: Callable[[World], Any]) -> Spoil:
    return lambda world: forge(world.checkpoint / file, content(world))


def forged_bytes(file: str, content: Callable[[World], bytes]) -> Spoil:
    def spoil(world: World) -> None:
        (world.checkpoint / file).write_bytes(content(world))
        reseal(world.checkpoint)

    return spoil


def inserted(file: str, **values: Callable[[World], Any]) -> Spoil:
    def spoil(world: World) -> None:
        content = read(world.checkpoint / file)
        forge(world.checkpoint / file, content | {key: value(world) for key, value in values.items()})

    return spoil


def result(**values: Any) -> Spoil:
    return lambda world: (world.path / "result.json").write_text(json.dumps(values))


def module_in_the_current_directory(world: World) -> None:
    cwd = world.path.parent / "cwd"
    cwd.mkdir()
    (cwd / "evil.py").write_text(f"open({str(world.canary)!r}, 'w')\nclass Thing: pass\n")
    world.config(tracking={"_target_": "evil.Thing"})


def module_in_the_run_directory(world: World) -> None:
    for name in ("conf.py", "sitecustomize.py", "torch.py", "runner.py", "models.py"):
        (world.path / name).write_text(f"open({str(world.canary)!r}, 'w')\n")


def socket_in_it(world: World) -> None:
    short = Path(f"/proc/self/fd/{os.open(world.path, os.O_RDONLY | os.O_DIRECTORY)}")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(short / "log"))
    os.close(int(short.name))


def linked_checkpoint(world: World) -> None:
    shutil.move(world.checkpoint, world.path / "aside")
    world.checkpoint.symlink_to(world.path / "aside")


def linked_run(world: World) -> None:
    shutil.move(world.path, world.path.with_name("aside"))
    world.path.symlink_to(world.path.with_name("aside"))


def huge(name: str) -> Spoil:
    def spoil(world: World) -> None:
        os.truncate(world.path / name, 10**11)  # a sparse file, which takes no space on the disk

    return spoil


def deflated(file: str) -> Spoil:
    """Compress the entries of a `torch.save` file, and add an entry with 100 MB of zeros."""

    def spoil(world: World) -> None:
        stored = world.checkpoint / file
        content = io.BytesIO(stored.read_bytes())
        with zipfile.ZipFile(content) as old, zipfile.ZipFile(stored, "w", zipfile.ZIP_DEFLATED) as new:
            for entry in old.infolist():
                new.writestr(entry.filename, old.read(entry))
            new.writestr("archive/bomb", bytes(10**8))
        reseal(world.checkpoint)

    return spoil


def zip_with_absolute_names(world: World) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(f"..{world.canary}", "x")
        archive.writestr(str(world.canary), "x")
    return content.getvalue()


def script(world: World) -> bytes:
    """A TorchScript archive."""
    content = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        torch.jit.save(torch.jit.script(torch.nn.ReLU()), content)
    return content.getvalue()


def header(text: bytes, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def more_checkpoints(name: str) -> Spoil:
    return lambda world: shutil.copytree(world.checkpoint, world.path / "checkpoints" / name)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

RUNS: dict[str, tuple[Spoil, tuple[int, ...]]] = {
    # YAML
    "yaml: a call": (payload_of_yaml("name: !!python/object/apply:os.system ['touch CANARY']"), REFUSED),
    "yaml: a new object": (payload_of_yaml("name: !!python/object/new:os.system ['touch CANARY']"), REFUSED),
    "yaml: a module": (payload_of_yaml("name: !!python/module:antigravity"), REFUSED),
    "yaml: a name": (payload_of_yaml("name: !!python/name:os.system"), REFUSED),
    "yaml: a tuple": (payload_of_yaml("name: !!python/tuple [1]"), REFUSED),
    "yaml: a tag of its own": (payload_of_yaml("name: !include /etc/passwd"), REFUSED),
    "yaml: billion laughs": (payload_of_yaml(BOMB), REFUSED),
    "yaml: an alias of itself": (payload_of_yaml("name: &a [*a]"), REFUSED),
    "yaml: a merge": (payload_of_yaml("<<: {name: x}"), REFUSED),
    "yaml: deep": (payload_of_yaml("name: " + "[" * 5000), REFUSED),
    "yaml: deep blocks": (payload_of_yaml("".join(f"{' ' * i}a:\n" for i in range(500))), REFUSED),
    "yaml: the same key twice": (payload_of_yaml("name: a\nname: b"), REFUSED),
    "yaml: two documents": (payload_of_yaml("name: a\n---\nname: b"), REFUSED),
    "yaml: a long number": (payload_of_yaml("seed: " + "9" * 100_000), REFUSED),
    "yaml: sixty": (payload_of_yaml("seed: " + ":".join(["59"] * 20_000)), REFUSED),
    "yaml: binary": (payload_of_yaml("name: !!binary aGk="), REFUSED),
    "yaml: NUL": (lambda world: world.text(b"name: a\0b"), REFUSED),
    "yaml: UTF-16": (lambda world: world.text("name: a".encode("utf-16")), REFUSED),
    "yaml: a directive": (payload_of_yaml("%TAG ! tag:yaml.org,2002:python/\n---\nname: !name:os.system"), REFUSED),
    "yaml: 100 GB": (huge("config.yaml"), HARMLESS),
    # classes
    "class: os.system": (classes("os.system"), REFUSED),
    "class: subprocess": (classes("subprocess.Popen", args=["touch", "x"]), REFUSED),
    "class: exec": (classes("builtins.exec"), REFUSED),
    "class: torch.load": (classes("torch.load", f="x"), REFUSED),
    "class: hydra.utils.call": (classes("hydra.utils.call"), REFUSED),
    "class: a path up": (classes("runner.tracking..base.Tracker"), REFUSED),
    "class: dunder": (classes("runner.tracking.base.__builtins__"), REFUSED),
    "class: imported there": (classes("runner.training.json.loads"), REFUSED),
    "class: a function": (classes("runner.storage.retention.delete_all"), REFUSED),
    "class: with a call in it": (classes("runner.tracking.base.Tracker", hook={"_target_": "os.system"}), REFUSED),
    "class: a number": (lambda world: world.config(tracking={"_target_": 3}), REFUSED),
    "class: a list": (lambda world: world.config(tracking={"_target_": ["os", "system"]}), REFUSED),
    "class: _args_": (classes("runner.tracking.base.Tracker", _args_=["x"]), REFUSED),
    "class: _recursive_": (classes("runner.tracking.base.Tracker", _recursive_=True), REFUSED),
    "class: the command itself": (classes("runner.__main__.main"), REFUSED),
    "class: a module here": (module_in_the_current_directory, REFUSED),
    "modules in the run directory": (module_in_the_run_directory, RESUMED),
    # interpolations
    "reference: a secret": (lambda world: world.config(name="${oc.env:MY_SECRET}"), REFUSED),
    "reference: in a path": (lambda world: world.config(output_root="x/${oc.env:MY_SECRET}"), REFUSED),
    "reference: nested": (lambda world: world.config(name="${oc.env:${oc.decode:MY_SECRET}}"), REFUSED),
    "reference: in a list": (
        lambda world: world.config(data={"_target_": "runner.data.digits.Digits", "size": ["${oc.env:MY_SECRET}"]}),
        REFUSED,
    ),
    "reference: of Hydra": (lambda world: world.config(name="${hydra:runtime.cwd}"), REFUSED),
    "reference: created": (lambda world: world.config(name="${oc.create:{a: 1}}"), REFUSED),
    "reference: escaped": (lambda world: world.config(name="\\${oc.env:MY_SECRET}"), REFUSED),
    "reference: as a key": (lambda world: world.config(**{"${oc.env:MY_SECRET}": 1}), REFUSED),
    # values
    "name: upwards": (lambda world: world.config(name="../../outside"), REFUSED),
    "name: escape codes": (lambda world: world.config(name="\x1b]0;title\x07"), REFUSED),
    "name: right to left": (lambda world: world.config(name="\u202egnp.exe"), REFUSED),
    "name: line break": (lambda world: world.config(name="a\nresume: ok"), REFUSED),
    "output_root: elsewhere": (lambda world: world.config(output_root=str(world.outside)), RESUMED),
    "output_root: a link": (lambda world: world.config(output_root="/proc/self/cwd/x"), RESUMED),
    "weights: a secret": (lambda world: world.config(model=weights_in(world, world.secret)), REFUSED),
    "weights: a device": (lambda world: world.config(model=weights_in(world, Path("/dev/zero"))), REFUSED),
    "data: a secret": (
        lambda world: world.config(
            data={"_target_": "runner.data.imagefolder.ImageFolder", "root": str(world.secret), "size": 8}
        ),
        REFUSED,
    ),
    "steps: a huge integer": (lambda world: world.config(steps=10**400), REFUSED),
    "batch_size: a boolean": (lambda world: world.config(batch_size=True), REFUSED),
    "a key of Hydra": (lambda world: world.config(hydra={"job": {"chdir": True}}), REFUSED),
    "a search path": (lambda world: world.config(hydra={"searchpath": ["file:///tmp"]}), REFUSED),
    "a long key": (lambda world: world.config(**{"k" * 100_000: 1}), REFUSED),
    # files
    "config: a link to a secret": (lambda world: world.link("config.yaml", world.secret), REFUSED),
    "log: a link": (lambda world: world.link("log.txt", world.outside / "folder/victim.txt"), REFUSED),
    "lock: a link": (lambda world: world.link(".lock", world.outside / "folder/new"), REFUSED),
    "result: a link": (lambda world: world.link("result.json", world.secret), REFUSED),
    "overrides: a link": (lambda world: world.link("overrides.yaml", world.secret), REFUSED),
    "environment: a link": (lambda world: world.link("environment.json", world.secret), REFUSED),
    "events: a link": (
        lambda world: world.link("events.out.tfevents.9999999999", world.outside / "folder/victim.txt"),
        REFUSED,
    ),
    "a picture: a link": (lambda world: world.link("pipeline.png", world.outside / "folder/new"), REFUSED),
    "checkpoint: a link": (linked_checkpoint, REFUSED),
    "the run: a link": (linked_run, HARMLESS),
    "a pipe": (lambda world: os.mkfifo(world.path / "log_rank_1.txt"), REFUSED),
    "a socket": (socket_in_it, REFUSED),
    "a temporary checkpoint: a link": (
        lambda world: (world.path / "checkpoints/tmp.step_00000004").symlink_to(world.outside / "folder"),
        REFUSED,
    ),
    "a deleted checkpoint: a link": (
        lambda world: (world.path / "checkpoints/step_00000001.pruned").symlink_to(world.outside / "folder"),
        REFUSED,
    ),
    "a file name with escape codes": (lambda world: (world.path / "\x1b[31mred\nx").touch(), HARMLESS),
    "overrides: a call": (
        lambda world: (world.path / "overrides.yaml").write_text(
            f"- !!python/object/apply:os.system ['touch {world.canary}']"
        ),
        RESUMED,
    ),
    "overrides: 100 GB": (huge("overrides.yaml"), HARMLESS),
    "overrides: escape codes": (
        lambda world: (world.path / "overrides.yaml").write_text('- "seed=\\e[31m"\n- a: {b: c}\n- [1]\n'),
        RESUMED,
    ),
    # results
    "result: done long ago": (result(status="done", steps=10**30), HARMLESS),
    "result: deep": (lambda world: (world.path / "result.json").write_text("[" * 100_000), RESUMED),
    "result: not a number": (result(status="done", steps=float("nan")), RESUMED),
    "result: a best that is none": (result(status="done", steps=4, best={"metric": 3}), HARMLESS),
    "result: seconds as text": (result(status="done", steps=4, seconds="\x1b[31m"), HARMLESS),
    "result: an error with escape codes": (result(status="done", steps=4, error="\x1b[31m"), HARMLESS),
    "result: escape codes": (
        result(status="done", steps=4, best={"metric": "\x1b[31m", "value": 1.0, "step": 2}),
        HARMLESS,
    ),
    # checkpoints
    "state: a call": (forged_state("state.pt", lambda world: {"optimizer": touch(world)}), REFUSED),
    "rank: a call": (forged_state("rank_0.pt", lambda world: {"random": touch(world)}), REFUSED),
    "state: a call in it": (inserted("state.pt", metrics=touch), REFUSED),
    "rank: a call in it": (inserted("rank_0.pt", workload=touch), REFUSED),
    "state: eval": (inserted("state.pt", best=lambda world: Runs(eval, f"open({str(world.canary)!r}, 'w')")), REFUSED),
    "state: a plain pickle": (forged_bytes("state.pt", lambda world: pickle.dumps(touch(world))), REFUSED),
    "state: memory of a call": (inserted("state.pt", best=lambda world: Runs(bytearray, 10**12)), REFUSED),
    "state: a module": (inserted("state.pt", best=lambda world: torch.nn.Linear(1, 1)), REFUSED),
    "state: an array": (inserted("state.pt", best=lambda world: np.zeros(2)), REFUSED),
    "state: TorchScript": (forged_bytes("state.pt", script), REFUSED),
    "state: compressed": (deflated("state.pt"), REFUSED),
    "rank: compressed": (deflated("rank_0.pt"), REFUSED),
    "state: absolute names": (forged_bytes("state.pt", zip_with_absolute_names), REFUSED),
    "model: a pickle": (forged_bytes("model.safetensors", lambda world: pickle.dumps(touch(world))), REFUSED),
    "model: a large header": (forged_bytes("model.safetensors", lambda world: header(b"{}", 2**62)), REFUSED),
    "model: a deep header": (forged_bytes("model.safetensors", lambda world: header(b"[" * 10_000)), REFUSED),
    "model: a large shape": (
        forged_bytes(
            "model.safetensors",
            lambda world: header(b'{"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}'),
        ),
        REFUSED,
    ),
    "manifest: a path": (lambda world: reseal(world.checkpoint, files={str(world.secret): "0" * 64}), REFUSED),
    "manifest: a path up": (lambda world: reseal(world.checkpoint, files={"../../../outside/secret.txt": ""}), REFUSED),
    "manifest: escape codes": (lambda world: reseal(world.checkpoint, schema="\x1b[31m"), REFUSED),
    "a step of a thousand digits": (more_checkpoints("step_" + "9" * 200), HARMLESS),
    "a step in other digits": (more_checkpoints("step_٠٠٠٠٠٠٠٤"), RESUMED),
    "a step of a file": (lambda world: (world.path / "checkpoints/step_00000003").write_text("x"), HARMLESS),
    "another checkpoint under a later step": (more_checkpoints("step_00000003"), REFUSED),
}


def weights_in(world: World, path: Path) -> dict[str, Any]:
    return yaml.safe_load((world.path / "config.yaml").read_text())["model"] | {"weights": str(path)}


@pytest.mark.parametrize("kind", RUNS)
def test_a_hostile_run_directory_does_no_harm(kind: str, original: Path, world: World, tally: Tally) -> None:
    spoil, codes = RUNS[kind]
    with tally("hostile run directory"):
        shutil.copytree(original, world.path)
        spoil(world)
        cwd = world.path.parent / "cwd"
        cwd.mkdir(exist_ok=True)
        here, before = snapshot(cwd), snapshot(world.outside)
        found = probe(f"resume={world.path}", cwd=cwd, deep=True)
        assert found.code in codes, found.console
        assert_no_harm(world, before, found.console, world.path, cwd)
        assert snapshot(cwd) == here
        if found.code == 2:
            assert 1 < len(found.console.splitlines()) <= 10, found.console


# ---------------------------------------------------------------------------------------------------------------------
# Files of weights


def saved_by_torch(content: Callable[[World], Any], **options: Any) -> Callable[[World], bytes]:
    def data(world: World) -> bytes:
        file = io.BytesIO()
        torch.save(content(world), file, **options)
        return file.getvalue()

    return data


def tar(world: World) -> bytes:
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as archive:
        archive.addfile(tarfile.TarInfo(str(world.canary)), io.BytesIO())
    return content.getvalue()


WEIGHTS: dict[str, Callable[[World], bytes]] = {
    "a call": saved_by_torch(lambda world: {"w": touch(world)}),
    "a call, old format": saved_by_torch(lambda world: touch(world), _use_new_zipfile_serialization=False),
    "a plain pickle": lambda world: pickle.dumps(touch(world)),
    "a pickle of protocol 0": lambda world: f"cos\nsystem\n(S'touch {world.canary}'\ntR.".encode(),
    "a module": saved_by_torch(lambda world: torch.nn.Linear(2, 2)),
    "TorchScript": script,
    "an array": saved_by_torch(lambda world: {"w": np.zeros(3)}),
    "objects of NumPy": lambda world: pickle.dumps(np.array([touch(world)], dtype=object)),
    "a gigabyte": saved_by_torch(lambda world: {"w": Runs(bytearray, 10**12)}),
    "no dictionary": saved_by_torch(lambda world: [torch.zeros(1)]),
    "no tensors": saved_by_torch(lambda world: {"w": {"w": {"w": 1}}}),
    "other names": saved_by_torch(lambda world: {"../../w": torch.zeros(1), "\x1b[31m": torch.zeros(1)}),
    "the text of a secret": lambda world: world.secret.read_bytes(),
    "a tar archive": tar,
    "a zip archive": zip_with_absolute_names,
    "gzip": lambda world: gzip.compress(bytes(10**7)),
    "HTML": lambda world: b"<html><script>alert(1)</script></html>",
    "Python": lambda world: f"import os; os.system('touch {world.canary}')".encode(),
    "zeros": lambda world: bytes(1000),
}


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_hostile_file_of_weights_is_refused(kind: str, suffix: str, world: World, tally: Tally) -> None:
    with tally("hostile weights"):
        cwd, path = world.path.parent / "cwd", world.path.with_suffix(f".{suffix}")
        cwd.mkdir()
        path.write_bytes(WEIGHTS[kind](world))
        before = snapshot(world.outside)
        code, console = in_process([*FAST, "steps=1", f"model.weights={path}"], cwd)
        assert code == 2, console
        assert console.startswith("model.weights: got "), console
        assert_no_harm(world, before, console, cwd)


def test_the_payloads_work(world: World) -> None:
    """The payloads are executed if they are loaded without checks, so the tests above are meaningful."""
    for kind in ("a plain pickle", "a pickle of protocol 0", "objects of NumPy"):
        pickle.loads(WEIGHTS[kind](world))
        assert world.canary.exists(), kind
        world.canary.unlink()
    torch.load(io.BytesIO(WEIGHTS["a call"](world)), weights_only=False)
    assert world.canary.exists()


# ---------------------------------------------------------------------------------------------------------------------
# Data sets


def png(width: int, height: int, data: bytes = b"", extra: bytes = b"") -> bytes:
    """Return a PNG file whose header says `width` and `height`, whatever the size of its pixel data `data`."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + head + extra + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


def text_chunk(size: int) -> bytes:
    content = b"comment\0\0" + zlib.compress(bytes(size))
    return struct.pack(">I", len(content)) + b"zTXt" + content + struct.pack(">I", zlib.crc32(b"zTXt" + content))


def encoded(kind: str, size: tuple[int, int] = (8, 8), **options: Any) -> bytes:
    content = io.BytesIO()
    Image.new("RGB", size).save(content, kind, **options)
    return content.getvalue()


IMAGES: dict[str, Callable[[World, Path], object]] = {
    "EPS": lambda world, path: path.write_bytes(
        f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n({world.canary}) (w) file closefile\nshowpage\n".encode()
    ),
    "EPS by Pillow": lambda world, path: path.write_bytes(encoded("EPS")),
    "PDF": lambda world, path: path.write_bytes(encoded("PDF")),
    "SVG": lambda world, path: path.write_text(f"<svg><image href='file://{world.secret}'/></svg>"),
    "a secret": lambda world, path: path.symlink_to(world.secret),
    "a script": lambda world, path: path.write_text(f"#!/bin/sh\ntouch {world.canary}\n"),
    "a pickle": lambda world, path: path.write_bytes(pickle.dumps(touch(world))),
    "ImageMagick": lambda world, path: path.write_text(f"push graphic-context\nimage over 0,0 0,0 '{world.secret}'\n"),
    "a device": lambda world, path: path.symlink_to("/dev/zero"),
    "a terminal": lambda world, path: path.symlink_to("/dev/tty"),
    "a pipe": lambda world, path: os.mkfifo(path),
    "a link to nothing": lambda world, path: path.symlink_to(world.outside / "nothing"),
    "a link to itself": lambda world, path: path.symlink_to(path.name),
    "a directory": lambda world, path: path.mkdir(),
    "100 GB": lambda world, path: path.write_bytes(b"\x89PNG\r\n\x1a\n") and os.truncate(path, 10**11),
    "PNG of a billion pixels": lambda world, path: path.write_bytes(png(30_000, 40_000)),
    "PNG of no pixel": lambda world, path: path.write_bytes(png(0, 8)),
    "PNG whose text is a gigabyte": lambda world, path: path.write_bytes(
        png(8, 8, bytes(8 * 25), text_chunk(10**8) * 3)
    ),
    "PNG without pixels": lambda world, path: path.write_bytes(png(8, 8)),
    "half a PNG": lambda world, path: path.write_bytes(png(64, 64, os.urandom(64 * 193))[:5000]),
    "half a JPEG": lambda world, path: path.write_bytes(encoded("JPEG", (64, 64))[:300]),
    "half a GIF": lambda world, path: path.write_bytes(encoded("GIF", (64, 64))[:40]),
    "half a TIFF": lambda world, path: path.write_bytes(encoded("TIFF", (64, 64))[:100]),
    "GIF of a billion pixels": lambda world, path: path.write_bytes(
        b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b";"
    ),
    "BMP of a billion pixels": lambda world, path: path.write_bytes(
        b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, 60_000, 60_000, 1, 24, *[0] * 6)
    ),
    "PPM of a billion pixels": lambda world, path: path.write_bytes(b"P6 99999 99999 255\n"),
    "TIFF whose directory is itself": lambda world, path: path.write_bytes(
        b"II*\0" + struct.pack("<IHI", 8, 0, 8) + bytes(50)
    ),
    "nothing": lambda world, path: path.touch(),
    "zeros": lambda world, path: path.write_bytes(bytes(10_000)),
}


def folder_of_images(root: Path) -> None:
    for number, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for index in range(3):
            Image.new("RGB", (8, 8), (number * 90, index, 0)).save(root / name / f"{index}.png")


@pytest.mark.parametrize("kind", IMAGES)
def test_a_hostile_image_does_no_harm(kind: str, world: World, tally: Tally) -> None:
    with tally("hostile image"):
        cwd, root = world.path.parent / "cwd", world.path
        cwd.mkdir()
        folder_of_images(root)
        (root / "dog/2.png").unlink()
        IMAGES[kind](world, root / "dog/2.png")
        before = snapshot(world.outside)
        data = ("data=imagefolder", f"data.root={root}", "data.size=8", "data.workers=0", "data.augment=none")
        rest = ("steps=2", "batch_size=4", "eval_every=2", "device=cpu", "device.threads=1", "model=tiny")
        code, console = in_process([*data, *rest], cwd)
        assert code in (1, 2) or kind == "a directory", console
        assert "2.png" in console or kind == "a directory", console
        assert "Fatal" not in console
        assert_no_harm(world, before, console.replace("\r", "\n"), cwd)
        code, console = in_process([*data, "data.on_error=skip", *rest], cwd)
        assert code in (0, 2), console
        assert_no_harm(world, before, console.replace("\r", "\n"), cwd)


MNIST: dict[str, Callable[[World], bytes]] = {
    "a pickle": lambda world: pickle.dumps(touch(world)),
    "more than it has": lambda world: struct.pack(">IIII", 0x803, 2**31 - 1, 28, 28),
    "negative": lambda world: struct.pack(">Iiii", 0x803, -1, 28, 28),
    "another type": lambda world: struct.pack(">IIII", 0xD03, 1, 28, 28) + bytes(28 * 28),
    "other sizes": lambda world: struct.pack(">IIII", 0x803, 1, 4096, 4096) + bytes(4096**2),
    "nothing": lambda world: b"",
}


@pytest.mark.parametrize("kind", [*MNIST, "gzip of a gigabyte", "cifar: a pickle"])
def test_a_hostile_data_set_is_refused(kind: str, world: World, tally: Tally) -> None:
    with tally("hostile data set"):
        cwd, root = world.path.parent / "cwd", world.path
        cwd.mkdir()
        if kind.startswith("cifar"):
            (root / "cifar-10-batches-py").mkdir(parents=True)
            for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
                (root / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(touch(world)))
        else:
            raw = root / "MNIST/raw"
            raw.mkdir(parents=True)
            for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
                if kind.startswith("gzip"):
                    (raw / f"{name}-ubyte.gz").write_bytes(gzip.compress(bytes(10**8)))
                else:
                    (raw / f"{name}-ubyte").write_bytes(MNIST[kind](world))
        before = snapshot(world.outside)
        data = "cifar10" if kind.startswith("cifar") else "mnist"
        code, console = in_process([f"data={data}", f"data.root={root}", "steps=1", "device=cpu"], cwd)
        assert code == 2, console
        assert console.startswith("data.root: got "), console
        assert_no_harm(world, before, console, cwd)


def test_valid_weights_at_the_same_path_are_loaded(world: World) -> None:
    """Valid weights at the same path are accepted: the files above are refused because of their content."""
    model = prepared(built(*FAST)).run.workload.build_model()
    cwd, path = world.path.parent / "cwd", world.path.with_suffix(".safetensors")
    cwd.mkdir()
    safetensors.torch.save_file(model.state_dict(), path)
    code, console = in_process([*FAST, "steps=1", f"model.weights={path}"], cwd)
    assert code == 0, console
