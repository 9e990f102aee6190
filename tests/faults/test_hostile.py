"""Tests with malicious run directories, checkpoints, weights, images and data sets.

Each is refused with an error message, or does no harm: no code is executed, no other file is written or read, and no
secret of this machine is shown. Saved configs are also tested in tests/api/test_saved_defaults.py, and forged
checkpoints in tests/storage/test_forged.py.
"""

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
from helpers.checkpoint_edits import Call, read_checkpoint_file, rewrite_manifest, sealed_config, write_checkpoint_file
from helpers.compose import TINY_CPU, build_composed_run, prepare_session
from helpers.dry_run import run_in_this_process, run_up_to_training
from omegaconf import OmegaConf
from PIL import Image

from runner.api.run_job import run_one
from runner.storage.saved_run import config_text
from runner.system.console import STOPPED

SECRET = "hidden treasure"
OPTIONS = (*TINY_CPU, "steps=4", "save_every=2", "eval_every=0", "log_every=1", "name=first")


class Sandbox(NamedTuple):
    """The malicious run directory or file `path`, and the directory `outside`, which must not be read or changed."""

    path: Path
    cwd: Path  # the directory in which the command runs
    outside: Path
    before: dict[str, tuple]  # the `snapshot` of `outside`
    canary: Path  # a file that a payload creates if it is executed
    secret: Path  # a file whose content must not be shown
    victim: Path  # a file that must not be changed
    checkpoint: Path

    def config(self, **values: Any) -> None:
        """Change values of the saved config and of its copies in the checkpoints, and update all hashes."""
        saved: Any = OmegaConf.to_container(OmegaConf.load(self.path / "config.yaml"))
        self._write_config(config_text(saved | values).encode())

    def text(self, content: str) -> None:
        """Replace the saved config and its copies by `content`, and update all hashes."""
        self._write_config(sealed_config(content.replace("CANARY", str(self.canary)).encode()))

    def _write_config(self, data: bytes) -> None:
        (self.path / "config.yaml").write_bytes(data)
        for checkpoint in self.path.glob("checkpoints/step_*"):
            (checkpoint / "config.yaml").write_bytes(data)
            rewrite_manifest(checkpoint)

    def tracker(self, target: Any, **values: Any) -> None:
        """Replace the tracker in the saved config by another class."""
        self.config(tracking={"_target_": target, **values})

    def link(self, name: str, target: Path, hard: bool = False) -> None:
        """Replace the file `name` in the run directory by a symbolic or hard link."""
        (self.path / name).unlink(missing_ok=True)
        (self.path / name).hardlink_to(target) if hard else (self.path / name).symlink_to(target)

    def forge(self, file: str, content: bytes) -> None:
        """Replace the bytes of a file in the checkpoint, and update the hashes."""
        (self.checkpoint / file).write_bytes(content)
        rewrite_manifest(self.checkpoint)

    def insert(self, file: str, **values: Any) -> None:
        """Insert objects into a file in the checkpoint, and update the hashes."""
        content = read_checkpoint_file(self.checkpoint / file)
        write_checkpoint_file(self.checkpoint / file, content | values)

    def result(self, **values: Any) -> None:
        (self.path / "result.json").write_text(json.dumps(values))


def touch(sandbox: Sandbox) -> Call:
    return Call(os.system, f"touch '{sandbox.canary}'")


def snapshot(root: Path) -> dict[str, tuple]:
    """Return mode, size, modification time and inode of everything below `root`, without following links."""
    found = {}
    for folder, folders, files in os.walk(root):
        for name in (*folders, *files):
            path = Path(folder, name)
            about = path.lstat()
            found[str(path.relative_to(root))] = (about.st_mode, about.st_size, about.st_mtime_ns, about.st_ino)
    return found


def assert_no_harm(sandbox: Sandbox, console: str) -> None:
    assert not sandbox.canary.exists(), "something was executed"
    assert snapshot(sandbox.outside) == sandbox.before, "something was written elsewhere"
    assert SECRET not in console
    for file in (*sandbox.path.rglob("*"), *sandbox.cwd.rglob("*")):
        if file.is_file() and not file.is_symlink() and file.stat().st_size < 10_000_000:
            assert SECRET.encode() not in file.read_bytes(), file
    assert "Traceback" not in console, console
    assert all(line.isprintable() for line in console.splitlines()), repr(console)


@pytest.fixture(scope="module")
def original(tmp_path_factory) -> Path:
    """The directory of a run of four steps that was killed after two."""
    root = tmp_path_factory.mktemp("original")
    run_one(build_composed_run(*OPTIONS, f"output_root={root}/outputs"), ["seed=0"])
    [path] = root.glob("outputs/first/*")
    shutil.rmtree(path / "checkpoints/step_00000004")
    (path / "result.json").unlink()
    return path


@pytest.fixture
def sandbox(tmp_path, monkeypatch) -> Sandbox:
    monkeypatch.setenv("MY_SECRET", SECRET)
    path, cwd, outside = tmp_path / "theirs", tmp_path / "cwd", tmp_path / "outside"
    cwd.mkdir()
    secret, victim = outside / "secret.txt", outside / "folder/victim.txt"
    victim.parent.mkdir(parents=True)
    secret.write_text(f"{SECRET}\n")
    victim.write_text("mine")
    checkpoint = path / "checkpoints/step_00000002"
    return Sandbox(path, cwd, outside, snapshot(outside), outside / "canary", secret, victim, checkpoint)


def module_in_the_current_directory(sandbox: Sandbox) -> None:
    (sandbox.cwd / "evil.py").write_text(f"open({str(sandbox.canary)!r}, 'w')\nclass Thing: pass\n")
    sandbox.tracker("evil.Thing")


def module_in_the_run_directory(sandbox: Sandbox) -> None:
    for name in ("conf.py", "sitecustomize.py", "torch.py", "runner.py", "models.py"):
        (sandbox.path / name).write_text(f"open({str(sandbox.canary)!r}, 'w')\n")


def socket_in_it(sandbox: Sandbox) -> None:
    short = Path(f"/proc/self/fd/{os.open(sandbox.path, os.O_RDONLY | os.O_DIRECTORY)}")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(short / "log"))
    os.close(int(short.name))


def replaced_by_a_link(path: Path) -> None:
    shutil.move(path, path.with_name("aside"))
    path.symlink_to(path.with_name("aside"))


def weights_in(box: Sandbox, path: str | Path) -> dict[str, Any]:
    return yaml.safe_load((box.path / "config.yaml").read_text())["model"] | {"weights": str(path)}


def one_more_checkpoint(box: Sandbox, name: str) -> None:
    shutil.copytree(box.checkpoint, box.path / "checkpoints" / name)


IMAGES_ELSEWHERE = {"_target_": "runner.data.imagefolder.ImageFolder", "size": 8}
LARGE_SHAPE = b'{"w":{"dtype":"F32","shape":[4611686018427387904,4],"data_offsets":[0,0]}}'

RUNS: dict[str, Callable[[Sandbox], object]] = {
    # YAML
    "yaml: a call": lambda box: box.text("name: !!python/object/apply:os.system ['touch CANARY']"),
    "yaml: a name": lambda box: box.text("name: !!python/name:os.system"),
    "yaml: NUL": lambda box: box.text("name: a\0b"),
    "yaml: 100 GB": lambda box: os.truncate(box.path / "config.yaml", 10**11),  # sparse: it takes no space
    # classes
    "class: dunder": lambda box: box.tracker("runner.tracking.base.__builtins__"),
    "class: imported there": lambda box: box.tracker("runner.training.json.loads"),
    "class: a function": lambda box: box.tracker("runner.storage.checkpoints.prune"),
    "class: the command itself": lambda box: box.tracker("runner.commands.train.main"),
    "class: a module here": module_in_the_current_directory,
    "modules in the run directory": module_in_the_run_directory,
    # interpolations and values
    "reference: a secret": lambda box: box.config(name="${oc.env:MY_SECRET}"),
    "name: upwards": lambda box: box.config(name="../../outside"),
    "output_root: elsewhere": lambda box: box.config(output_root=str(box.outside)),
    "weights: a secret": lambda box: box.config(model=weights_in(box, box.secret)),
    "weights: a device": lambda box: box.config(model=weights_in(box, "/dev/zero")),
    "data: a secret": lambda box: box.config(data=IMAGES_ELSEWHERE | {"root": str(box.secret)}),
    "steps: a huge integer": lambda box: box.config(steps=10**400),
    # files
    "config: a link to a secret": lambda box: box.link("config.yaml", box.secret),
    "log: a link": lambda box: box.link("log.txt", box.victim),
    "log: a hard link": lambda box: box.link("log.txt", box.victim, hard=True),
    "lock: a link": lambda box: box.link(".lock", box.outside / "folder/new"),
    "result: a link": lambda box: box.link("result.json", box.secret),
    "events: a link": lambda box: box.link("events.out.tfevents.9999999999", box.victim),
    "checkpoint: a link": lambda box: replaced_by_a_link(box.checkpoint),
    "all checkpoints: a link": lambda box: replaced_by_a_link(box.path / "checkpoints"),
    "the run: a link": lambda box: replaced_by_a_link(box.path),
    "a pipe": lambda box: os.mkfifo(box.path / "log_rank_1.txt"),
    "a socket": socket_in_it,
    "tmp: a link": lambda box: box.link("checkpoints/tmp.step_00000004", box.outside / "folder"),
    "a file name with escape codes": lambda box: (box.path / "\x1b[31mred\nx").touch(),
    "overrides: a call": lambda box: (box.path / "overrides.yaml").write_text(
        f"- !!python/object/apply:os.system ['touch {box.canary}']"
    ),
    "overrides: escape codes": lambda box: (box.path / "overrides.yaml").write_text('- "seed=\\e[31m"\n- a: {b: c}\n'),
    # results
    "result: done long ago": lambda box: box.result(status="done", steps=10**30),
    "result: deep": lambda box: (box.path / "result.json").write_text("[" * 100_000),
    "result: escape codes": lambda box: box.result(
        status="done", steps=4, best={"metric": "\x1b[31m", "value": 1.0, "step": 2}
    ),
    # checkpoints
    "state: a call in it": lambda box: box.insert("state.pt", metrics=touch(box)),
    "rank: a call in it": lambda box: box.insert("rank_0.pt", workload=touch(box)),
    "state: a plain pickle": lambda box: box.forge("state.pt", pickle.dumps(touch(box))),
    "state: memory of a call": lambda box: box.insert("state.pt", best=Call(bytearray, 10**12)),
    "model: a pickle": lambda box: box.forge("model.safetensors", pickle.dumps(touch(box))),
    "model: a large header": lambda box: box.forge("model.safetensors", (2**62).to_bytes(8, "little") + b"{}"),
    "model: a large shape": lambda box: box.forge(
        "model.safetensors", len(LARGE_SHAPE).to_bytes(8, "little") + LARGE_SHAPE
    ),
    "manifest: a path up": lambda box: rewrite_manifest(box.checkpoint, files={"../../../outside/secret.txt": ""}),
    "manifest: escape codes": lambda box: rewrite_manifest(box.checkpoint, schema="\x1b[31m"),
    "a step of a thousand digits": lambda box: one_more_checkpoint(box, "step_" + "9" * 200),
    "a step in other digits": lambda box: one_more_checkpoint(box, "step_٠٠٠٠٠٠٠٤"),
    "a step of a file": lambda box: (box.path / "checkpoints/step_00000003").write_text("x"),
    "another checkpoint under a later step": lambda box: one_more_checkpoint(box, "step_00000003"),
}
RESUMED = ("modules in the run directory", "output_root: elsewhere", "overrides: a call", "overrides: escape codes")
RESUMED += ("result: deep", "a step in other digits")
HARMLESS = ("yaml: 100 GB", "the run: a link", "a file name with escape codes", "result: done long ago")
HARMLESS += ("result: escape codes", "a step of a thousand digits", "a step of a file")
"""Those that are resumed, and those that may be resumed, refused or done; all others are refused."""


@pytest.mark.parametrize("kind", RUNS)
def test_a_hostile_run_directory_does_no_harm(kind, original, sandbox):
    shutil.copytree(original, sandbox.path)
    RUNS[kind](sandbox)
    here = snapshot(sandbox.cwd)
    found = run_up_to_training(f"resume={sandbox.path}", cwd=sandbox.cwd, train_one_step=True)
    codes = (STOPPED,) if kind in RESUMED else (0, 2, STOPPED) if kind in HARMLESS else (2,)
    assert found.code in codes, found.console
    assert_no_harm(sandbox, found.console)
    assert snapshot(sandbox.cwd) == here
    if found.code == 2:
        assert 1 < len(found.console.splitlines()) <= 10, found.console


def saved_by_torch(content: Callable[[Sandbox], Any], **options: Any) -> Callable[[Sandbox], bytes]:
    def data(sandbox: Sandbox) -> bytes:
        file = io.BytesIO()
        torch.save(content(sandbox), file, **options)
        return file.getvalue()

    return data


def zip_with_absolute_names(sandbox: Sandbox) -> bytes:
    content = io.BytesIO()
    with zipfile.ZipFile(content, "w") as archive:
        archive.writestr(f"..{sandbox.canary}", "x")
        archive.writestr(str(sandbox.canary), "x")
    return content.getvalue()


WEIGHTS: dict[str, Callable[[Sandbox], bytes]] = {
    "a call": saved_by_torch(lambda sandbox: {"w": touch(sandbox)}),
    "a call, old format": saved_by_torch(lambda sandbox: touch(sandbox), _use_new_zipfile_serialization=False),
    "a plain pickle": lambda sandbox: pickle.dumps(touch(sandbox)),
    "a pickle of protocol 0": lambda sandbox: f"cos\nsystem\n(S'touch {sandbox.canary}'\ntR.".encode(),
    "objects of NumPy": lambda sandbox: pickle.dumps(np.array([touch(sandbox)], dtype=object)),
    "a gigabyte": saved_by_torch(lambda sandbox: {"w": Call(bytearray, 10**12)}),
    "no dictionary": saved_by_torch(lambda sandbox: [torch.zeros(1)]),
    "other names": saved_by_torch(lambda sandbox: {"../../w": torch.zeros(1), "\x1b[31m": torch.zeros(1)}),
    "the text of a secret": lambda sandbox: sandbox.secret.read_bytes(),
    "a zip archive": zip_with_absolute_names,
}


SUFFIXES = [(kind, "pt") for kind in WEIGHTS]
SUFFIXES += [(kind, "safetensors") for kind in ("a call", "a plain pickle", "the text of a secret", "a zip archive")]


@pytest.mark.parametrize(("kind", "suffix"), SUFFIXES)
def test_a_hostile_file_of_weights_is_refused(kind, suffix, sandbox):
    path = sandbox.path.with_suffix(f".{suffix}")
    path.write_bytes(WEIGHTS[kind](sandbox))
    code, console = run_in_this_process([*TINY_CPU, "steps=1", f"model.weights={path}"], sandbox.cwd)
    assert code == 2, console
    assert console.startswith("model.weights: got "), console
    assert_no_harm(sandbox, console)


def test_the_payloads_work(sandbox):
    """The payloads are executed if they are loaded without checks, so the tests above are meaningful."""
    for kind in ("a plain pickle", "a pickle of protocol 0", "objects of NumPy"):
        pickle.loads(WEIGHTS[kind](sandbox))
        assert sandbox.canary.exists(), kind
        sandbox.canary.unlink()
    torch.load(io.BytesIO(WEIGHTS["a call"](sandbox)), weights_only=False)
    assert sandbox.canary.exists()


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, data: bytes = b"", text: bytes = b"") -> bytes:
    """Return a PNG file whose header says `width` and `height`, whatever the size of its pixel data `data`."""
    head = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    texts = chunk(b"zTXt", b"comment\0\0" + zlib.compress(text, 1)) * 3 if text else b""
    return b"\x89PNG\r\n\x1a\n" + head + texts + chunk(b"IDAT", zlib.compress(data)) + chunk(b"IEND", b"")


EPS = "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n(CANARY) (w) file closefile\nshowpage\n"

IMAGES: dict[str, Callable[[Sandbox, Path], object]] = {
    "EPS": lambda box, path: path.write_text(EPS.replace("CANARY", str(box.canary))),
    "a secret": lambda box, path: path.symlink_to(box.secret),
    "a pickle": lambda box, path: path.write_bytes(pickle.dumps(touch(box))),
    "a device": lambda box, path: path.symlink_to("/dev/zero"),
    "a pipe": lambda box, path: os.mkfifo(path),
    "a directory": lambda box, path: path.mkdir(),
    "100 GB": lambda box, path: path.write_bytes(b"\x89PNG\r\n\x1a\n") and os.truncate(path, 10**11),
    "PNG of a billion pixels": lambda box, path: path.write_bytes(png(30_000, 40_000)),
    "PNG with much text": lambda box, path: path.write_bytes(png(8, 8, bytes(8 * 25), bytes(10**8))),
    "TIFF in a circle": lambda box, path: path.write_bytes(b"II*\0" + struct.pack("<IHI", 8, 0, 8) + bytes(50)),
}


def folder_of_images(root: Path) -> None:
    for number, name in enumerate(("cat", "dog")):
        (root / name).mkdir(parents=True)
        for index in range(3):
            Image.new("RGB", (8, 8), (number * 90, index, 0)).save(root / name / f"{index}.png")


def run_with_images(sandbox: Sandbox, *words: str) -> tuple[int, str]:
    data = ("data=imagefolder", f"data.root={sandbox.path}", "data.size=8", "data.workers=0", "data.augment=none")
    sizes = ("steps=2", "batch_size=4", "device=cpu", "device.threads=1", "model=tiny")
    return run_in_this_process([*data, *sizes, *words], sandbox.cwd)


@pytest.mark.parametrize("kind", IMAGES)
def test_a_hostile_image_does_no_harm(kind, sandbox):
    folder_of_images(sandbox.path)
    (sandbox.path / "dog/2.png").unlink()
    IMAGES[kind](sandbox, sandbox.path / "dog/2.png")
    code, console = run_with_images(sandbox)
    assert code in (1, 2) or kind == "a directory", console
    assert "2.png" in console or kind == "a directory", console
    assert "Fatal" not in console
    assert_no_harm(sandbox, console.replace("\r", "\n"))


def test_hostile_images_are_skipped_if_asked_for(sandbox):
    folder_of_images(sandbox.path)
    for number, kind in enumerate(IMAGES):
        IMAGES[kind](sandbox, sandbox.path / f"dog/hostile_{number}.png")
    code, console = run_with_images(sandbox, "data.on_error=skip", "data.holdout=0.1")
    assert (code, "skipped" in console) == (0, True), console
    assert_no_harm(sandbox, console.replace("\r", "\n"))


CIFAR = [f"cifar-10-batches-py/{name}" for name in (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch")]
MNIST = [f"MNIST/raw/{name}-ubyte" for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3")]
MNIST += ["MNIST/raw/t10k-labels-idx1-ubyte"]

DATA_SETS: dict[str, tuple[str, list[str], Callable[[Sandbox], bytes]]] = {
    "a pickle": ("mnist", MNIST, lambda box: pickle.dumps(touch(box))),
    "more than it has": ("mnist", MNIST, lambda box: struct.pack(">IIII", 0x803, 2**31 - 1, 28, 28)),
    "gzip of a gigabyte": ("mnist", [f"{name}.gz" for name in MNIST], lambda box: gzip.compress(bytes(10**8), 1)),
    "cifar: a pickle": ("cifar10", CIFAR, lambda box: pickle.dumps(touch(box))),
}


@pytest.mark.parametrize("kind", DATA_SETS)
def test_a_hostile_data_set_is_refused(kind, sandbox):
    data, files, content = DATA_SETS[kind]
    (sandbox.path / files[0]).parent.mkdir(parents=True)
    hostile = content(sandbox)
    for name in files:
        (sandbox.path / name).write_bytes(hostile)
    words = [f"data={data}", f"data.root={sandbox.path}", "steps=1", "device=cpu"]
    code, console = run_in_this_process(words, sandbox.cwd)
    assert code == 2, console
    assert console.startswith("data.root: got "), console
    assert_no_harm(sandbox, console)


def test_valid_weights_at_the_same_path_are_loaded(sandbox):
    """Valid weights at the same path are accepted: the files above are refused because of their content."""
    model = prepare_session(build_composed_run(*TINY_CPU)).workload.build_model()
    path = sandbox.path.with_suffix(".safetensors")
    safetensors.torch.save_file(model.state_dict(), path)
    code, console = run_in_this_process([*TINY_CPU, "steps=1", f"model.weights={path}"], sandbox.cwd)
    assert code == 0, console
