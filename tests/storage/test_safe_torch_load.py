"""Tests of `runner.storage.safe_torch_load`: a file cannot run code, or take far more memory than its own size."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.checkpoint_edits import Call, rewrite_archive

from runner.storage.safe_torch_load import load_tensors
from runner.storage.value_checks import UnexpectedContentError

NUMEL = b"K\x04tq\x07Q"
"""The end of the pickle's description of a storage of four elements."""


@pytest.fixture
def plain(tmp_path) -> Path:
    torch.save({"a": torch.arange(4.0)}, tmp_path / "plain.pt")
    return tmp_path / "plain.pt"


@pytest.mark.parametrize("is_zip", [True, False])  # False: the format before PyTorch 1.6
def test_plain_values_and_tied_and_sliced_tensors_are_loaded(tmp_path, is_zip):
    tensor = torch.arange(10_000.0)
    tensors = {"a": tensor, "b": [tensor, tensor[::2]], "c": torch.nn.Parameter(tensor.view(100, 100).mT)}
    plain = {"b": [1, 2.5, "c", None, True, {1, 2}], "d": {"e": (1 + 2j,)}}
    torch.save({"tensors": tensors, "plain": plain}, tmp_path / "a.pt", _use_new_zipfile_serialization=is_zip)
    loaded = load_tensors(tmp_path / "a.pt")
    assert loaded["plain"] == plain
    assert torch.equal(loaded["tensors"]["b"][1], tensor[::2])
    assert torch.equal(loaded["tensors"]["c"], tensors["c"])


def test_a_compressed_archive_is_refused(tmp_path):
    torch.save({"a": torch.zeros(1_000_000)}, tmp_path / "large.pt")
    rewrite_archive(tmp_path / "large.pt", tmp_path / "bomb.pt", compression=zipfile.ZIP_DEFLATED)
    assert (tmp_path / "bomb.pt").stat().st_size < 100_000
    with pytest.raises(UnexpectedContentError, match="compressed"):
        load_tensors(tmp_path / "bomb.pt")


def test_entries_that_share_their_bytes_are_refused(plain, monkeypatch):
    """The central directory of the archive says that each entry is as large as the file."""
    size, original = plain.stat().st_size, zipfile.ZipFile.infolist

    def overlapping(archive: zipfile.ZipFile) -> list[zipfile.ZipInfo]:
        entries = original(archive)
        for entry in entries:
            entry.file_size = size
        return entries

    monkeypatch.setattr(zipfile.ZipFile, "infolist", overlapping)
    with pytest.raises(UnexpectedContentError, match="larger"):
        load_tensors(plain)


@pytest.mark.parametrize("claim", [b"J\xff\xff\xff\x0f", b"K\x05", b"K\x00", b"J\xff\xff\xff\xff"])
def test_a_storage_cannot_claim_other_sizes_than_it_has(plain, tmp_path, claim):
    forged = tmp_path / "forged.pt"
    rewrite_archive(plain, forged, lambda _, data: data.replace(NUMEL, claim + NUMEL[2:]))
    assert claim + NUMEL[2:] in forged.read_bytes()
    try:
        loaded = load_tensors(forged)["a"]
    except (RuntimeError, ValueError, UnexpectedContentError):
        return
    assert loaded.tolist() == [0, 1, 2, 3], "no more than there is"


@pytest.mark.parametrize("name", ["_codecs\nencode", "posix\nsystem"])
def test_a_pickle_that_names_other_functions_is_refused(plain, tmp_path, name):
    bomb = b"\x80\x02c" + name.encode() + b"\nJ\x00\x00\x00\x70\x85R."
    for entry in ("data.pkl", "DATA.PKL"):
        forged = tmp_path / "forged.pt"
        rewrite_archive(plain, forged, lambda name, data: bomb if ".pkl" in name else data, pickle_name=entry)
        with pytest.raises((UnexpectedContentError, pickle.UnpicklingError), match=name.partition("\n")[2]):
            load_tensors(forged)


HUGE: dict[str, Any] = {
    "no values": Call(torch.Tensor, 10**8),
    "a type with no values": Call(torch._tensor._rebuild_from_type_v2, torch.Tensor, torch.Tensor, (10**8,), {}),
    "one value": torch.zeros(1).expand(10**8),
    "many views": [torch.zeros(1_000).expand(100, 1_000) for _ in range(100)],
    "no memory": torch.empty(10**8, device="meta"),
    "sparse": torch.sparse_coo_tensor(
        torch.zeros(1, 1, dtype=torch.long), torch.ones(1), (10**8,), check_invariants=True
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("kind", HUGE)
def test_a_tensor_that_is_larger_than_the_file_is_refused(tmp_path, kind, is_zip):
    torch.save({"a": torch.zeros(2), "b": HUGE[kind]}, tmp_path / "file.pt", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UnexpectedContentError, match="without its values"):
        load_tensors(tmp_path / "file.pt")


@pytest.mark.parametrize("call", [Call(bytearray, 10**8), Call(torch._utils._rebuild_nested_tensor, 1, 2, 3, 4)])
@pytest.mark.parametrize("is_zip", [True, False])
def test_harmful_functions_that_torch_load_allows_are_refused(tmp_path, call, is_zip):
    torch.save({"a": torch.zeros(2), "b": call}, tmp_path / "file.pt", _use_new_zipfile_serialization=is_zip)
    with pytest.raises(UnexpectedContentError, match=call.call[0].__name__[-12:]):
        load_tensors(tmp_path / "file.pt")


@pytest.mark.parametrize(("depth", "width"), [(60, 2), (150, 1)])
def test_a_small_file_with_many_nested_values_is_refused(tmp_path, depth, width, monkeypatch):
    monkeypatch.setattr("runner.storage.safe_torch_load._MAX_VALUES", 30_000)  # three million take seconds
    value: list = []
    for _ in range(depth):
        value = [value] * width
    torch.save({"a": torch.zeros(2), "b": value}, tmp_path / "file.pt")
    with pytest.raises(UnexpectedContentError, match="nested"):
        load_tensors(tmp_path / "file.pt")
