"""Tests of MNIST, Fashion-MNIST and CIFAR-10, with files that have the real formats but only a few images."""

from __future__ import annotations

import functools
import gzip
import hashlib
import http.server
import os
import pickle
import socket
import struct
import threading

import numpy
import pytest
import torch
import torchvision
from helpers.permissions import enforced_permissions

from runner.config.errors import ConfigError
from runner.data import torchvision_data
from runner.data.memory import TensorSamples
from runner.data.torchvision_data import Cifar10, FashionMnist, Mnist

PARTS = {"train": 7, "t10k": 4}


def idx(values: torch.Tensor) -> bytes:
    """Return `values` in the file format of MNIST (http://yann.lecun.com/exdb/mnist)."""
    return bytes((0, 0, 8, values.dim())) + struct.pack(f">{values.dim()}I", *values.shape) + values.numpy().tobytes()


def write_mnist(root, dataset="MNIST", packed=False) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    folder = root / dataset / "raw"
    folder.mkdir(parents=True)
    written = {}
    for part, count in PARTS.items():
        images = torch.randint(256, (count, 28, 28), dtype=torch.uint8)
        labels = torch.randint(10, (count,), dtype=torch.uint8)
        for name, values in ((f"{part}-images-idx3-ubyte", images), (f"{part}-labels-idx1-ubyte", labels)):
            path = folder / (f"{name}.gz" if packed else name)
            path.write_bytes(gzip.compress(idx(values)) if packed else idx(values))
        written[part] = images[:, None], labels.long()
    return written


def as_in_2009(content: bytes) -> bytes:
    """Return the pickle of an array as NumPy wrote it in 2009: with another module name, and booleans as integers."""
    content = content.replace(b"numpy._core.multiarray", b"numpy.core.multiarray")
    return content.replace(b"\x89\x88\x87", b"K\x00K\x01\x87", 1)


def write_cifar(root, monkeypatch) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    sums, written = [], {}
    for number, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        pixels = numpy.random.default_rng(number).integers(0, 256, (3, 3072), dtype=numpy.uint8)
        labels = [number, 9, 0]
        content = as_in_2009(pickle.dumps({"data": pixels, "labels": labels}, protocol=2))
        (folder / name).write_bytes(content)
        sums.append([name, hashlib.md5(content).hexdigest()])
        written[name] = torch.from_numpy(pixels).view(3, 3, 32, 32), torch.tensor(labels)
    meta = pickle.dumps({"label_names": list("abcdefghij")}, protocol=2)
    (folder / "batches.meta").write_bytes(meta)
    described = {"filename": "batches.meta", "key": "label_names", "md5": hashlib.md5(meta).hexdigest()}
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "meta", described)
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "train_list", sums[:5])
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "test_list", sums[5:])
    return written


def loaded(data) -> tuple[TensorSamples, TensorSamples]:
    train, held_out = data.load()
    assert isinstance(train, TensorSamples)
    assert isinstance(held_out, TensorSamples)
    return train, held_out


@pytest.fixture
def _no_server(monkeypatch):
    """Set the download addresses to a port without a server, where connections are refused at once."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}/"
    monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [address, address])
    monkeypatch.setattr(torchvision.datasets.FashionMNIST, "mirrors", [address])
    monkeypatch.setattr(torchvision.datasets.CIFAR10, "url", f"{address}cifar-10-python.tar.gz")


@pytest.mark.usefixtures("_no_server")
@pytest.mark.parametrize(("component", "folder"), [(Mnist, "MNIST"), (FashionMnist, "FashionMNIST")])
def test_idx_files_are_read_as_they_were_written_and_not_downloaded_again(tmp_path, component, folder):
    written = write_mnist(tmp_path, folder)
    train, held_out = loaded(component(root=str(tmp_path), download=True))
    for samples, part in ((train, "train"), (held_out, "t10k")):
        assert torch.equal(samples.inputs, written[part][0])
        assert torch.equal(samples.targets, written[part][1])
        assert samples.shape == (1, 28, 28)
        assert samples.num_classes == 10


@pytest.mark.usefixtures("_no_server")
def test_cifar_is_read_as_it_was_written_and_not_downloaded_again(tmp_path, monkeypatch):
    written = write_cifar(tmp_path, monkeypatch)
    train, held_out = loaded(Cifar10(root=str(tmp_path), download=True))
    batches = [written[f"data_batch_{number}"] for number in range(1, 6)]
    assert torch.equal(train.inputs, torch.cat([images for images, _ in batches]))
    assert torch.equal(train.targets, torch.cat([targets for _, targets in batches]))
    assert torch.equal(held_out.inputs, written["test_batch"][0])
    assert train.shape == (3, 32, 32)


@pytest.mark.parametrize("component", [Mnist, FashionMnist, Cifar10])
def test_missing_files_are_refused_with_a_remedy_and_nothing_is_downloaded(tmp_path, component):
    with pytest.raises(ConfigError) as refused:
        component(root=str(tmp_path / "nowhere")).load()
    assert refused.value.key == "root"
    assert f"cannot be read from {tmp_path / 'nowhere' / component.folder}" in refused.value.why
    for advice in ("data.download=true", "data=digits"):
        assert advice in refused.value.remedy
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.usefixtures("_no_server")
@pytest.mark.parametrize("component", [Mnist, FashionMnist, Cifar10])
def test_a_failed_download_is_refused_with_a_remedy(tmp_path, component, capfd):
    with pytest.raises(ConfigError) as refused:
        component(root=str(tmp_path), download=True).load()
    assert refused.value.key == "download"
    assert "Connection refused" in refused.value.why
    assert "data=digits" in refused.value.remedy
    assert len(str(refused.value).splitlines()) == 2
    assert socket.getdefaulttimeout() is None


def test_a_download_from_a_server_that_does_not_respond_times_out(tmp_path, monkeypatch):
    monkeypatch.setattr(torchvision_data, "_PATIENCE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts connections, but never responds
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"http://127.0.0.1:{silent.getsockname()[1]}/"])
        with pytest.raises(ConfigError, match="timed out"):
            Mnist(root=str(tmp_path), download=True).load()


def test_downloaded_files_are_loaded(tmp_path, monkeypatch, capfd):
    source = tmp_path / "server"
    written = write_mnist(source, packed=True)
    files = sorted((source / "MNIST" / "raw").iterdir())
    resources = [(file.name, hashlib.md5(file.read_bytes()).hexdigest()) for file in files]
    monkeypatch.setattr(torchvision.datasets.MNIST, "resources", resources)
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=source / "MNIST" / "raw")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        monkeypatch.setattr(torchvision.datasets.MNIST, "mirrors", [f"http://127.0.0.1:{server.server_port}/"])
        train, _ = loaded(Mnist(root=str(tmp_path / "data"), download=True))
        server.shutdown()
    assert torch.equal(train.inputs, written["train"][0])


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("train-images-idx3-ubyte", b""),
        ("train-images-idx3-ubyte", b"<html>not found</html>"),
        ("train-images-idx3-ubyte", idx(torch.zeros(7, 14, 56, dtype=torch.uint8))),
        ("t10k-images-idx3-ubyte", idx(torch.zeros(4, 28, 28, dtype=torch.uint8))[:-1]),
        ("train-labels-idx1-ubyte", idx(torch.zeros(6, dtype=torch.uint8))),
        ("train-labels-idx1-ubyte", idx(torch.zeros(0, dtype=torch.uint8))),
        ("train-labels-idx1-ubyte", idx(torch.full((7,), 10, dtype=torch.uint8))),
    ],
)
def test_a_damaged_idx_file_is_refused(tmp_path, name, content):
    write_mnist(tmp_path)
    (tmp_path / "MNIST" / "raw" / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"MNIST cannot be read from {tmp_path / 'MNIST' / 'raw'}") as refused:
        Mnist(root=str(tmp_path)).load()
    assert refused.value.key == "root"
    assert "delete damaged files" in refused.value.remedy


def test_a_file_that_would_fill_the_memory_and_a_pipe_are_refused(tmp_path):
    write_mnist(tmp_path)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    os.truncate(path, 1 << 40)  # takes no space on the disk
    with pytest.raises(ConfigError, match="train-images-idx3-ubyte has more than 67,108,864 bytes"):
        Mnist(root=str(tmp_path)).load()
    path.unlink()
    os.mkfifo(path)  # opening it would block
    with pytest.raises(ConfigError, match="Dataset not found"):
        Mnist(root=str(tmp_path)).load()


@pytest.mark.parametrize("folder", ["MNIST", "MNIST/raw"])
def test_a_directory_that_may_not_be_searched_is_refused(tmp_path, folder):
    write_mnist(tmp_path)
    with enforced_permissions(tmp_path / folder, 0), pytest.raises(ConfigError, match="Permission denied") as refused:
        Mnist(root=str(tmp_path)).load()
    assert refused.value.key == "root"


def test_a_pickle_with_a_wrong_checksum_is_never_loaded(tmp_path, monkeypatch):
    write_cifar(tmp_path, monkeypatch)
    trap = tmp_path / "executed"
    path = tmp_path / "cifar-10-batches-py" / "data_batch_3"
    path.write_bytes(b"cos\nmkdir\n(V" + str(trap).encode() + b"\ntR.")
    with pytest.raises(ConfigError, match="Dataset not found or corrupted"):
        Cifar10(root=str(tmp_path)).load()
    assert not trap.exists()
    pickle.loads(path.read_bytes())
    assert trap.exists()  # the pickle does execute code when it is loaded
