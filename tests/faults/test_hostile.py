"""Tests with malicious run directories, checkpoints, weights, images and data sets.

Each is refused with an error message, or does no harm: no code is executed, no other file is written or read, and no
secret of this machine is shown. Saved configs are also tested in tests/api/test_saved_defaults.py, and forged
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
from helpers.checkpoint_edits import read_checkpoint_file, rewrite_manifest, sealed_config
from helpers.checkpoint_edits import write_checkpoint_file as forge
from helpers.compose import TINY_CPU, build_composed_run, prepare_session
from helpers.dry_run import run_in_this_process, run_up_to_training
from helpers.faults import FaultCounter
from omegaconf import OmegaConf
from PIL import Image

from runner.api.run_job import run_one
from runner.storage.saved_config import config_text
from runner.system.exit_codes import STOPPED

SECRET = "hidden treasure"
REFUSED, RESUMED, CRASHED = (2,), (STOPPED,), (1,)
HARMLESS = (0, 2, STOPPED)
OPTIONS = (*TINY_CPU, "steps=4", "save_every=2", "eval_every=0", "log_every=1", "name=first")


class Sandbox(NamedTuple):
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
            rewrite_manifest(checkpoint)

    def text(self, content: str | bytes) -> None:
        """Replace the saved config and its copies by `content`, and update all hashes."""
        data = sealed_config(content.encode() if isinstance(content, str) else content)
        (self.path / "config.yaml").write_bytes(data)
        for checkpoint in self.path.glob("checkpoints/step_*"):
            (checkpoint / "config.yaml").write_bytes(data)
            rewrite_manifest(checkpoint)

    def link(self, name: str, target: Path, hard: bool = False) -> None:
        """Replace the file `name` in the run directory by a symbolic or hard link."""
        (self.path / name).unlink(missing_ok=True)
        (self.path / name).hardlink_to(target) if hard else (self.path / name).symlink_to(target)

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


def touch(sandbox: Sandbox) -> Runs:
    return Runs(os.system, f"touch '{sandbox.canary}'")


def snapshot(root: Path) -> dict[str, tuple]:
    """Return mode, size, modification time and inode of everything below `root`, without following links."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            about = path.lstat()
            found[str(path.relative_to(root))] = (about.st_mode, about.st_size, about.st_mtime_ns, about.st_ino)
    return found


def assert_no_harm(sandbox: Sandbox, before: dict[str, tuple], console: str, *written: Path) -> None:
    assert not sandbox.canary.exists(), "something was executed"
    assert snapshot(sandbox.outside) == before, "something was written elsewhere"
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
    run_one(build_composed_run(*OPTIONS, f"output_root={root}/outputs"), ["seed=0"])
    [path] = root.glob("outputs/first/*")
    shutil.rmtree(path / "checkpoints/step_00000004")
    (path / "result.json").unlink()
    return path


@pytest.fixture
def sandbox(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sandbox:
    monkeypatch.setenv("MY_SECRET", SECRET)
    outside = tmp_path / "outside"
    (outside / "folder").mkdir(parents=True)
    (outside / "secret.txt").write_text(f"{SECRET}\n")
    (outside / "folder/victim.txt").write_text("mine")
    return Sandbox(tmp_path / "theirs", outside)


# ---------------------------------------------------------------------------------------------------------------------
# Run directories

Tamper = Callable[[Sandbox], object]


def classes(target: str, **values: Any) -> Tamper:
    return lambda sandbox: sandbox.config(tracking={"_target_": target, **values})


def payload_of_yaml(text: str) -> Tamper:
    return lambda sandbox: sandbox.text(text.replace("CANARY", str(sandbox.canary)))


def forged_bytes(file: str, content: Callable[[Sandbox], bytes]) -> Tamper:
    def tamper(sandbox: Sandbox) -> None:
        (sandbox.checkpoint / file).write_bytes(content(sandbox))
        rewrite_manifest(sandbox.checkpoint)

    return tamper


def inserted(file: str, **values: Callable[[Sandbox], Any]) -> Tamper:
    def tamper(sandbox: Sandbox) -> None:
        content = read_checkpoint_file(sandbox.checkpoint / file)
        forge(sandbox.checkpoint / file, content | {key: value(sandbox) for key, value in values.items()})

    return tamper


def result(**values: Any) -> Tamper:
    return lambda sandbox: (sandbox.path / "result.json").write_text(json.dumps(values))


def module_in_the_current_directory(sandbox: Sandbox) -> None:
    cwd = sandbox.path.parent / "cwd"
    cwd.mkdir()
    (cwd / "evil.py").write_text(f"open({str(sandbox.canary)!r}, 'w')\nclass Thing: pass\n")
    sandbox.config(tracking={"_target_": "evil.Thing"})


def module_in_the_run_directory(sandbox: Sandbox) -> None:
    for name in ("conf.py", "sitecustomize.py", "torch.py", "runner.py", "models.py"):
        (sandbox.path / name).write_text(f"open({str(sandbox.canary)!r}, 'w')\n")


def socket_in_it(sandbox: Sandbox) -> None:
    short = Path(f"/proc/self/fd/{os.open(sandbox.path, os.O_RDONLY | os.O_DIRECTORY)}")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(short / "log"))
    os.close(int(short.name))


def linked_checkpoint(sandbox: Sandbox) -> None:
    shutil.move(sandbox.checkpoint, sandbox.path / "aside")
    sandbox.checkpoint.symlink_to(sandbox.path / "aside")


def linked_run(sandbox: Sandbox) -> None:
    shutil.move(sandbox.path, sandbox.path.with_name("aside"))
    sandbox.path.symlink_to(sandbox.path.with_name("aside"))


def huge(name: str) -> Tamper:
    def tamper(sandbox: Sandbox) -> None:
        os.truncate(sandbox.path / name, 10**11)  # a sparse file, which takes no space on the disk

    return tamper


def deflated(file: str) -> Tamper:
    """Compress the entries of a `torch.save` file, and add an entry with 100 MB of zeros."""

    def tamper(sandbox: Sandbox) -> None:
        stored = sandbox.checkpoint / file
        content = io.BytesIO(stored.read_bytes())
        with zipfile.ZipFile(content) as old, zipfile.ZipFile(stored, "w", zipfile.ZIP_DEFLATED) as new:
            for entry in old.infolist():
                new.writestr(entry.filename, old.read(entry))
            new.writestr("archive/bomb", bytes(10**8))
        rewrite_manifest(sandbox.checkpoint)

    return tamper


def zip_with_absolute_names(sandbox: Sandbox) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(f"..{sandbox.canary}", "x")
        archive.writestr(str(sandbox.canary), "x")
    return content.getvalue()


def header(text: bytes, length: int | None = None) -> bytes:
    return (len(text) if length is None else length).to_bytes(8, "little") + text


def more_checkpoints(name: str) -> Tamper:
    return lambda sandbox: shutil.copytree(sandbox.checkpoint, sandbox.path / "checkpoints" / name)


BOMB = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)

RUNS: dict[str, tuple[Tamper, tuple[int, ...]]] = {
    # YAML
    "yaml: a call": (payload_of_yaml("name: !!python/object/apply:os.system ['touch CANARY']"), REFUSED),
    "yaml: a name": (payload_of_yaml("name: !!python/name:os.system"), REFUSED),
    "yaml: billion laughs": (payload_of_yaml(BOMB), REFUSED),
    "yaml: deep": (payload_of_yaml("name: " + "[" * 5000), REFUSED),
    "yaml: a long number": (payload_of_yaml("seed: " + "9" * 100_000), REFUSED),
    "yaml: sixty": (payload_of_yaml("seed: " + ":".join(["59"] * 20_000)), REFUSED),
    "yaml: NUL": (lambda sandbox: sandbox.text(b"name: a\0b"), REFUSED),
    "yaml: 100 GB": (huge("config.yaml"), HARMLESS),
    # classes
    "class: os.system": (classes("os.system"), REFUSED),
    "class: a path up": (classes("runner.tracking..base.Tracker"), REFUSED),
    "class: dunder": (classes("runner.tracking.base.__builtins__"), REFUSED),
    "class: imported there": (classes("runner.training.json.loads"), REFUSED),
    "class: a function": (classes("runner.storage.retention.prune"), REFUSED),
    "class: with a call in it": (classes("runner.tracking.base.Tracker", hook={"_target_": "os.system"}), REFUSED),
    "class: a number": (lambda sandbox: sandbox.config(tracking={"_target_": 3}), REFUSED),
    "class: _args_": (classes("runner.tracking.base.Tracker", _args_=["x"]), REFUSED),
    "class: the command itself": (classes("runner.__main__.main"), REFUSED),
    "class: a module here": (module_in_the_current_directory, REFUSED),
    "modules in the run directory": (module_in_the_run_directory, RESUMED),
    # interpolations
    "reference: a secret": (lambda sandbox: sandbox.config(name="${oc.env:MY_SECRET}"), REFUSED),
    "reference: in a path": (lambda sandbox: sandbox.config(output_root="x/${oc.env:MY_SECRET}"), REFUSED),
    "reference: nested": (lambda sandbox: sandbox.config(name="${oc.env:${oc.decode:MY_SECRET}}"), REFUSED),
    "reference: in a list": (
        lambda sandbox: sandbox.config(data={"_target_": "runner.data.digits.Digits", "size": ["${oc.env:MY_SECRET}"]}),
        REFUSED,
    ),
    # values
    "name: upwards": (lambda sandbox: sandbox.config(name="../../outside"), REFUSED),
    "output_root: elsewhere": (lambda sandbox: sandbox.config(output_root=str(sandbox.outside)), RESUMED),
    "weights: a secret": (lambda sandbox: sandbox.config(model=weights_in(sandbox, sandbox.secret)), REFUSED),
    "weights: a device": (lambda sandbox: sandbox.config(model=weights_in(sandbox, Path("/dev/zero"))), REFUSED),
    "data: a secret": (
        lambda sandbox: sandbox.config(
            data={"_target_": "runner.data.imagefolder.ImageFolder", "root": str(sandbox.secret), "size": 8}
        ),
        REFUSED,
    ),
    "steps: a huge integer": (lambda sandbox: sandbox.config(steps=10**400), REFUSED),
    "a key of Hydra": (lambda sandbox: sandbox.config(hydra={"job": {"chdir": True}}), REFUSED),
    # files
    "config: a link to a secret": (lambda sandbox: sandbox.link("config.yaml", sandbox.secret), REFUSED),
    "log: a link": (lambda sandbox: sandbox.link("log.txt", sandbox.outside / "folder/victim.txt"), REFUSED),
    "log: a hard link": (lambda sandbox: sandbox.link("log.txt", sandbox.outside / "folder/victim.txt", True), REFUSED),
    "lock: a link": (lambda sandbox: sandbox.link(".lock", sandbox.outside / "folder/new"), REFUSED),
    "result: a link": (lambda sandbox: sandbox.link("result.json", sandbox.secret), REFUSED),
    "events: a link": (
        lambda sandbox: sandbox.link("events.out.tfevents.9999999999", sandbox.outside / "folder/victim.txt"),
        REFUSED,
    ),
    "checkpoint: a link": (linked_checkpoint, REFUSED),
    "the run: a link": (linked_run, HARMLESS),
    "a pipe": (lambda sandbox: os.mkfifo(sandbox.path / "log_rank_1.txt"), REFUSED),
    "a socket": (socket_in_it, REFUSED),
    "a temporary checkpoint: a link": (
        lambda sandbox: (sandbox.path / "checkpoints/tmp.step_00000004").symlink_to(sandbox.outside / "folder"),
        REFUSED,
    ),
    "a file name with escape codes": (lambda sandbox: (sandbox.path / "\x1b[31mred\nx").touch(), HARMLESS),
    "overrides: a call": (
        lambda sandbox: (sandbox.path / "overrides.yaml").write_text(
            f"- !!python/object/apply:os.system ['touch {sandbox.canary}']"
        ),
        RESUMED,
    ),
    "overrides: escape codes": (
        lambda sandbox: (sandbox.path / "overrides.yaml").write_text('- "seed=\\e[31m"\n- a: {b: c}\n- [1]\n'),
        RESUMED,
    ),
    # results
    "result: done long ago": (result(status="done", steps=10**30), HARMLESS),
    "result: deep": (lambda sandbox: (sandbox.path / "result.json").write_text("[" * 100_000), RESUMED),
    "result: escape codes": (
        result(status="done", steps=4, best={"metric": "\x1b[31m", "value": 1.0, "step": 2}),
        HARMLESS,
    ),
    # checkpoints
    "state: a call in it": (inserted("state.pt", metrics=touch), REFUSED),
    "rank: a call in it": (inserted("rank_0.pt", workload=touch), REFUSED),
    "state: a plain pickle": (forged_bytes("state.pt", lambda sandbox: pickle.dumps(touch(sandbox))), REFUSED),
    "state: memory of a call": (inserted("state.pt", best=lambda sandbox: Runs(bytearray, 10**12)), REFUSED),
    "state: compressed": (deflated("state.pt"), REFUSED),
    "model: a pickle": (forged_bytes("model.safetensors", lambda sandbox: pickle.dumps(touch(sandbox))), REFUSED),
    "model: a large header": (forged_bytes("model.safetensors", lambda sandbox: header(b"{}", 2**62)), REFUSED),
    "model: a large shape": (
        forged_bytes(
            "model.safetensors",
            lambda sandbox: header(b'{"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}'),
        ),
        REFUSED,
    ),
    "manifest: a path up": (
        lambda sandbox: rewrite_manifest(sandbox.checkpoint, files={"../../../outside/secret.txt": ""}),
        REFUSED,
    ),
    "manifest: escape codes": (lambda sandbox: rewrite_manifest(sandbox.checkpoint, schema="\x1b[31m"), REFUSED),
    "a step of a thousand digits": (more_checkpoints("step_" + "9" * 200), HARMLESS),
    "a step in other digits": (more_checkpoints("step_٠٠٠٠٠٠٠٤"), RESUMED),
    "a step of a file": (lambda sandbox: (sandbox.path / "checkpoints/step_00000003").write_text("x"), HARMLESS),
    "another checkpoint under a later step": (more_checkpoints("step_00000003"), REFUSED),
}


def weights_in(sandbox: Sandbox, path: Path) -> dict[str, Any]:
    return yaml.safe_load((sandbox.path / "config.yaml").read_text())["model"] | {"weights": str(path)}


@pytest.mark.parametrize("kind", RUNS)
def test_a_hostile_run_directory_does_no_harm(
    kind: str, original: Path, sandbox: Sandbox, count_fault: FaultCounter
) -> None:
    tamper, codes = RUNS[kind]
    with count_fault("hostile run directory"):
        shutil.copytree(original, sandbox.path)
        tamper(sandbox)
        cwd = sandbox.path.parent / "cwd"
        cwd.mkdir(exist_ok=True)
        here, before = snapshot(cwd), snapshot(sandbox.outside)
        found = run_up_to_training(f"resume={sandbox.path}", cwd=cwd, train_one_step=True)
        assert found.code in codes, found.console
        assert_no_harm(sandbox, before, found.console, sandbox.path, cwd)
        assert snapshot(cwd) == here
        if found.code == 2:
            assert 1 < len(found.console.splitlines()) <= 10, found.console


# ---------------------------------------------------------------------------------------------------------------------
# Files of weights


def saved_by_torch(content: Callable[[Sandbox], Any], **options: Any) -> Callable[[Sandbox], bytes]:
    def data(sandbox: Sandbox) -> bytes:
        file = io.BytesIO()
        torch.save(content(sandbox), file, **options)
        return file.getvalue()

    return data


WEIGHTS: dict[str, Callable[[Sandbox], bytes]] = {
    "a call": saved_by_torch(lambda sandbox: {"w": touch(sandbox)}),
    "a call, old format": saved_by_torch(lambda sandbox: touch(sandbox), _use_new_zipfile_serialization=False),
    "a plain pickle": lambda sandbox: pickle.dumps(touch(sandbox)),
    "a pickle of protocol 0": lambda sandbox: f"cos\nsystem\n(S'touch {sandbox.canary}'\ntR.".encode(),
    "objects of NumPy": lambda sandbox: pickle.dumps(np.array([touch(sandbox)], dtype=object)),
    "a gigabyte": saved_by_torch(lambda sandbox: {"w": Runs(bytearray, 10**12)}),
    "no dictionary": saved_by_torch(lambda sandbox: [torch.zeros(1)]),
    "other names": saved_by_torch(lambda sandbox: {"../../w": torch.zeros(1), "\x1b[31m": torch.zeros(1)}),
    "the text of a secret": lambda sandbox: sandbox.secret.read_bytes(),
    "a zip archive": zip_with_absolute_names,
}


@pytest.mark.parametrize("suffix", ["pt", "safetensors"])
@pytest.mark.parametrize("kind", WEIGHTS)
def test_a_hostile_file_of_weights_is_refused(
    kind: str, suffix: str, sandbox: Sandbox, count_fault: FaultCounter
) -> None:
    with count_fault("hostile weights"):
        cwd, path = sandbox.path.parent / "cwd", sandbox.path.with_suffix(f".{suffix}")
        cwd.mkdir()
        path.write_bytes(WEIGHTS[kind](sandbox))
        before = snapshot(sandbox.outside)
        code, console = run_in_this_process([*TINY_CPU, "steps=1", f"model.weights={path}"], cwd)
        assert code == 2, console
        assert console.startswith("model.weights: got "), console
        assert_no_harm(sandbox, before, console, cwd)


def test_the_payloads_work(sandbox: Sandbox) -> None:
    """The payloads are executed if they are loaded without checks, so the tests above are meaningful."""
    for kind in ("a plain pickle", "a pickle of protocol 0", "objects of NumPy"):
        pickle.loads(WEIGHTS[kind](sandbox))
        assert sandbox.canary.exists(), kind
        sandbox.canary.unlink()
    torch.load(io.BytesIO(WEIGHTS["a call"](sandbox)), weights_only=False)
    assert sandbox.canary.exists()


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


IMAGES: dict[str, Callable[[Sandbox, Path], object]] = {
    "EPS": lambda sandbox, path: path.write_bytes(
        f"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n({sandbox.canary}) (w) file closefile\nshowpage\n".encode()
    ),
    "a secret": lambda sandbox, path: path.symlink_to(sandbox.secret),
    "a pickle": lambda sandbox, path: path.write_bytes(pickle.dumps(touch(sandbox))),
    "a device": lambda sandbox, path: path.symlink_to("/dev/zero"),
    "a pipe": lambda sandbox, path: os.mkfifo(path),
    "a link to nothing": lambda sandbox, path: path.symlink_to(sandbox.outside / "nothing"),
    "a directory": lambda sandbox, path: path.mkdir(),
    "100 GB": lambda sandbox, path: path.write_bytes(b"\x89PNG\r\n\x1a\n") and os.truncate(path, 10**11),
    "PNG of a billion pixels": lambda sandbox, path: path.write_bytes(png(30_000, 40_000)),
    "PNG whose text is a gigabyte": lambda sandbox, path: path.write_bytes(
        png(8, 8, bytes(8 * 25), text_chunk(10**8) * 3)
    ),
    "half a PNG": lambda sandbox, path: path.write_bytes(png(64, 64, os.urandom(64 * 193))[:5000]),
    "GIF of a billion pixels": lambda sandbox, path: path.write_bytes(
        b"GIF89a" + struct.pack("<HHBBB", 65535, 65535, 0, 0, 0) + b";"
    ),
    "TIFF whose directory is itself": lambda sandbox, path: path.write_bytes(
        b"II*\0" + struct.pack("<IHI", 8, 0, 8) + bytes(50)
    ),
    "nothing": lambda sandbox, path: path.touch(),
}


def folder_of_images(root: Path) -> None:
    for number, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for index in range(3):
            Image.new("RGB", (8, 8), (number * 90, index, 0)).save(root / name / f"{index}.png")


@pytest.mark.parametrize("kind", IMAGES)
def test_a_hostile_image_does_no_harm(kind: str, sandbox: Sandbox, count_fault: FaultCounter) -> None:
    with count_fault("hostile image"):
        cwd, root = sandbox.path.parent / "cwd", sandbox.path
        cwd.mkdir()
        folder_of_images(root)
        (root / "dog/2.png").unlink()
        IMAGES[kind](sandbox, root / "dog/2.png")
        before = snapshot(sandbox.outside)
        data = ("data=imagefolder", f"data.root={root}", "data.size=8", "data.workers=0", "data.augment=none")
        rest = ("steps=2", "batch_size=4", "eval_every=2", "device=cpu", "device.threads=1", "model=tiny")
        code, console = run_in_this_process([*data, *rest], cwd)
        assert code in (1, 2) or kind == "a directory", console
        assert "2.png" in console or kind == "a directory", console
        assert "Fatal" not in console
        assert_no_harm(sandbox, before, console.replace("\r", "\n"), cwd)
        code, console = run_in_this_process([*data, "data.on_error=skip", *rest], cwd)
        assert code in (0, 2), console
        assert_no_harm(sandbox, before, console.replace("\r", "\n"), cwd)


MNIST: dict[str, Callable[[Sandbox], bytes]] = {
    "a pickle": lambda sandbox: pickle.dumps(touch(sandbox)),
    "more than it has": lambda sandbox: struct.pack(">IIII", 0x803, 2**31 - 1, 28, 28),
    "negative": lambda sandbox: struct.pack(">Iiii", 0x803, -1, 28, 28),
    "another type": lambda sandbox: struct.pack(">IIII", 0xD03, 1, 28, 28) + bytes(28 * 28),
    "other sizes": lambda sandbox: struct.pack(">IIII", 0x803, 1, 4096, 4096) + bytes(4096**2),
    "nothing": lambda sandbox: b"",
}


@pytest.mark.parametrize("kind", [*MNIST, "gzip of a gigabyte", "cifar: a pickle"])
def test_a_hostile_data_set_is_refused(kind: str, sandbox: Sandbox, count_fault: FaultCounter) -> None:
    with count_fault("hostile data set"):
        cwd, root = sandbox.path.parent / "cwd", sandbox.path
        cwd.mkdir()
        if kind.startswith("cifar"):
            (root / "cifar-10-batches-py").mkdir(parents=True)
            for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"):
                (root / "cifar-10-batches-py" / name).write_bytes(pickle.dumps(touch(sandbox)))
        else:
            raw = root / "MNIST/raw"
            raw.mkdir(parents=True)
            for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
                if kind.startswith("gzip"):
                    (raw / f"{name}-ubyte.gz").write_bytes(gzip.compress(bytes(10**8)))
                else:
                    (raw / f"{name}-ubyte").write_bytes(MNIST[kind](sandbox))
        before = snapshot(sandbox.outside)
        data = "cifar10" if kind.startswith("cifar") else "mnist"
        code, console = run_in_this_process([f"data={data}", f"data.root={root}", "steps=1", "device=cpu"], cwd)
        assert code == 2, console
        assert console.startswith("data.root: got "), console
        assert_no_harm(sandbox, before, console, cwd)


def test_valid_weights_at_the_same_path_are_loaded(sandbox: Sandbox) -> None:
    """Valid weights at the same path are accepted: the files above are refused because of their content."""
    model = prepare_session(build_composed_run(*TINY_CPU)).workload.build_model()
    cwd, path = sandbox.path.parent / "cwd", sandbox.path.with_suffix(".safetensors")
    cwd.mkdir()
    safetensors.torch.save_file(model.state_dict(), path)
    code, console = run_in_this_process([*TINY_CPU, "steps=1", f"model.weights={path}"], cwd)
    assert code == 0, console
