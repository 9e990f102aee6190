"""Tests of MNIST, Fashion-MNIST and CIFAR-10, with files that have the real formats but only a few images."""

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
@pytest.mark.parametrize("component", [Mnist, FashionMnist, Cifar10])
def test_files_are_read_as_they_were_written_and_not_downloaded_again(tmp_path, component, monkeypatch):
    if component is Cifar10:
        written = write_cifar(tmp_path, monkeypatch)
        parts = [[f"data_batch_{number}" for number in range(1, 6)], ["test_batch"]]
    else:
        written, parts = write_mnist(tmp_path, component.dataset), [["train"], ["t10k"]]
    for samples, names in zip(component(root=str(tmp_path), download=True).load(), parts, strict=True):
        images, targets = zip(*(written[name] for name in names), strict=True)
        assert torch.equal(samples.inputs, torch.cat(images))
        assert torch.equal(samples.targets, torch.cat(targets))
        assert (samples.shape, samples.num_classes) == (component.shape, 10)
    assert not (tmp_path / ".lock").exists()


@pytest.mark.usefixtures("_no_server")
@pytest.mark.parametrize("component", [Mnist, FashionMnist, Cifar10])
def test_missing_files_and_a_failed_download_are_refused(tmp_path, component, capfd):
    root = tmp_path / "nowhere"
    for download, key, why in ((False, "root", f"{root / component.folder}"), (True, "download", "Connection refused")):
        with pytest.raises(ConfigError, match=why) as refused:
            component(root=str(root), download=download).load()
        assert refused.value.key == key
        assert root.exists() == download
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
        train, _ = Mnist(root=str(tmp_path / "data"), download=True).load()
        server.shutdown()
    assert torch.equal(train.inputs, written["train"][0])


@pytest.mark.cases(
    ("train-images-idx3-ubyte", b"<html>not found</html>"),
    ("train-images-idx3-ubyte", idx(torch.zeros(7, 14, 56, dtype=torch.uint8))),
    ("t10k-images-idx3-ubyte", idx(torch.zeros(4, 28, 28, dtype=torch.uint8))[:-1]),
    ("train-labels-idx1-ubyte", idx(torch.zeros(6, dtype=torch.uint8))),
    ("train-labels-idx1-ubyte", idx(torch.full((7,), 10, dtype=torch.uint8))),
)
def test_a_damaged_idx_file_is_refused(name, content, tmp_path):
    write_mnist(tmp_path)
    (tmp_path / "MNIST" / "raw" / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"^root: .*MNIST cannot be read from {tmp_path / 'MNIST' / 'raw'}"):
        Mnist(root=str(tmp_path)).load()


def test_a_file_that_would_fill_the_memory_a_pipe_and_a_closed_directory_are_refused(tmp_path):
    write_mnist(tmp_path)
    path = tmp_path / "MNIST" / "raw" / "train-images-idx3-ubyte"
    os.truncate(path, 1 << 40)  # takes no space on the disk
    with pytest.raises(ConfigError, match="train-images-idx3-ubyte has more than 67,108,864 bytes"):
        Mnist(root=str(tmp_path)).load()
    path.unlink()
    os.mkfifo(path)  # opening it would block
    with pytest.raises(ConfigError, match="Dataset not found"):
        Mnist(root=str(tmp_path)).load()
    with enforced_permissions(tmp_path / "MNIST" / "raw", 0), pytest.raises(ConfigError, match="Permission denied"):
        Mnist(root=str(tmp_path)).load()


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
