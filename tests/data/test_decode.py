"""Tests of `runner.data.decode`: formats, orientation and crops of image files, and files that must be refused."""

import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image
from torchvision.transforms import v2

from runner.data.decode import FORMATS, MAX_BYTES, ImageReader

T = Image.Transpose
STORED = [T.FLIP_LEFT_RIGHT, T.ROTATE_180, T.FLIP_TOP_BOTTOM, T.TRANSPOSE, T.ROTATE_90, T.TRANSVERSE, T.ROTATE_270]
"""How the stored image is transposed, for EXIF orientations 2 to 8 (https://exiftool.org/TagNames/EXIF.html)."""

WHOLE = ImageReader(size=16, augment="none", least_area=0.08, center=1.0)


def picture(width: int = 16, height: int = 16) -> Image.Image:
    """Return an image whose red increases to the right and green downward, with a blue spot at the top left."""
    red, green = numpy.meshgrid(numpy.linspace(0, 255, width), numpy.linspace(0, 255, height))
    blue = numpy.zeros((height, width))
    blue[: height // 4, : width // 4] = 255
    return Image.fromarray(numpy.stack((red, green, blue), 2).round().astype(numpy.uint8))


def pixels(image: Image.Image) -> torch.Tensor:
    return torch.from_numpy(numpy.array(image)).permute(2, 0, 1)


def augmented(reader: ImageReader, path: Path, seed: int = 0) -> torch.Tensor:
    torch.manual_seed(seed)
    return reader(str(path), True)


def largest_difference(a: torch.Tensor, b: torch.Tensor) -> int:
    return int((a.int() - b.int()).abs().max())


@pytest.mark.parametrize("extension", ["png", "bmp", "ppm", "tif", "gif", "webp"])
@pytest.mark.parametrize("mode", ["RGB", "RGBA", "P", "L", "LA", "1", "CMYK"])
def test_every_mode_is_converted_to_rgb_as_by_pillow_under_any_file_name(tmp_path, extension, mode):
    path, image = tmp_path / f"x.{extension}", picture().convert(mode)
    try:
        image.save(path, **({"lossless": True} if extension == "webp" else {}))
    except (OSError, ValueError, KeyError):
        pytest.skip(f"{extension} holds no {mode}")
    (tmp_path / "x.jpg").symlink_to(path)
    read = WHOLE(str(tmp_path / "x.jpg"), False)
    assert read.dtype == torch.uint8
    with Image.open(path) as image:
        assert torch.equal(read, pixels(image.convert("RGBA").convert("RGB")))
    for transparency in (3, bytes(range(256))) if (extension, mode) == ("png", "P") else ():
        image.save(path, transparency=transparency)
        assert torch.equal(WHOLE(str(path), False), read), "without a warning"


def tiff(path: Path, levels: numpy.ndarray, bits: int, white: int = 1, sample_format: int = 1) -> None:
    """Write gray `levels` as an uncompressed little-endian TIFF; white is the lowest (0) or the highest level (1)."""
    if bits == 12:
        pairs = levels.reshape(-1, 2).tolist()
        data = b"".join(bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in pairs)
    else:
        data = levels.astype(f"<u{bits // 8}").tobytes()
    height, width = levels.shape
    tags = {256: width, 257: height, 258: bits, 259: 1, 262: white, 273: 8, 277: 1, 278: height, 279: len(data)}
    entries = [struct.pack("<HHII", tag, 4, 1, value) for tag, value in (tags | {339: sample_format}).items()]
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    path.write_bytes(b"II*\0" + struct.pack("<I", 8 + len(data)) + data + directory)


@pytest.mark.parametrize(("bits", "white"), [(12, 1), (16, 1), (16, 0)])
def test_tiff_files_of_more_than_8_bits_are_scaled_from_black_to_white(tmp_path, bits, white):
    levels = numpy.linspace(0, 2**bits - 1, 256).astype(numpy.int64).reshape(16, 16)
    tiff(tmp_path / "x.tif", levels if white else 2**bits - 1 - levels, bits, white)
    expected = torch.from_numpy(levels >> (bits - 8)).expand(3, 16, 16)
    assert torch.equal(WHOLE(str(tmp_path / "x.tif"), False).long(), expected)


@pytest.mark.parametrize(("extension", "largest"), [("pgm", 1023), ("pgm", 65535), ("png", 65535)])
def test_the_largest_gray_value_of_a_file_is_white(tmp_path, extension, largest):
    path, levels = tmp_path / f"x.{extension}", numpy.linspace(0, largest, 256).astype(numpy.uint16).reshape(16, 16)
    if extension == "pgm":
        path.write_bytes(b"P5 16 16 %d\n" % largest + levels.astype(">u2").tobytes())
    else:
        Image.fromarray(levels).save(path)
    expected = torch.from_numpy(levels.astype(numpy.float64) * 255 / largest)
    assert (WHOLE(str(path), False) - expected).abs().max() < 1


@pytest.mark.parametrize(("bits", "sample_format"), [(32, 1), (32, 2), (16, 2), (32, 3)])
def test_pixels_without_a_known_white_are_refused(tmp_path, bits, sample_format):
    """Unsigned, signed and floating-point TIFF files state no range: 0 to 255, 0 to 1, or all that fits."""
    tiff(tmp_path / "x.tif", numpy.arange(256).reshape(16, 16), bits, 1, sample_format)
    with pytest.raises(ValueError, match="white is unknown"):
        WHOLE(str(tmp_path / "x.tif"), False)


@pytest.mark.parametrize("augment", ["none", "crop"])
@pytest.mark.parametrize("extension", ["png", "webp", "jpg", "tif"])
def test_the_orientation_of_every_format_is_applied(tmp_path, extension, augment):
    """The stored image is transposed; reading it must undo the transposition that its orientation states."""
    upright, reader = picture(48, 32), ImageReader(32, augment, 0.3, 1.0)
    upright.save(tmp_path / "upright.png")
    expected = augmented(reader, tmp_path / "upright.png")
    if augment == "none":
        assert torch.equal(expected, pixels(upright)[:, :, 8:40])
    lossless = {"webp": {"lossless": True}, "jpg": {"quality": 100, "subsampling": 0}}.get(extension, {})
    for orientation in range(1, 9):
        stored = upright if orientation == 1 else upright.transpose(STORED[orientation - 2])
        exif = Image.Exif()
        exif[0x0112] = orientation
        stored.save(tmp_path / f"x.{extension}", exif=exif, **lossless)
        read = augmented(reader, tmp_path / f"x.{extension}")
        assert largest_difference(read, expected) <= (8 if extension == "jpg" else 0), orientation


def exif(*entries: tuple[int, int, int, bytes]) -> bytes:
    """Return EXIF data of entries (tag, type, count, value), however odd; long values follow the entries."""
    head, extra, end = struct.pack("<2sHLH", b"II", 42, 8, len(entries)), b"", 10 + 12 * len(entries) + 4
    for tag, kind, count, value in sorted(entries):
        place = value.ljust(4, b"\0") if len(value) <= 4 else struct.pack("<L", end + len(extra))
        head, extra = head + struct.pack("<HHL", tag, kind, count) + place, extra + value * (len(value) > 4)
    return b"Exif\0\0" + head + bytes(4) + extra


TURNED = (0x0112, 3, 1, struct.pack("<H", 6))
ODD = {
    "a negative resolution": (0x011A, 10, 1, struct.pack("<ll", -1, 0)),
    "a maker that is a number": (0x010F, 5, 1, struct.pack("<LL", 3, 2)),
    "a width in words": (0x0100, 2, 4, b"300\0"),
    "a negative position": (0x0213, 8, 1, struct.pack("<h", -1)),
    "an offset beyond the end": (0x8769, 4, 1, struct.pack("<L", 10**6)),
    "a type that does not exist": (0x9000, 99, 1, b"0230"),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("extension", ["jpg", "png", "webp"])
def test_an_odd_value_in_exif_data_leaves_the_image_upright(kind, extension, tmp_path):
    upright, path = picture(64, 64), tmp_path / f"x.{extension}"
    lossless = {"webp": {"lossless": True}, "jpg": {"quality": 100, "subsampling": 0}}.get(extension, {})
    upright.transpose(T.ROTATE_90).save(path, exif=exif(TURNED, ODD[kind]), **lossless)
    read = ImageReader(64, "none", 1.0, 1.0)(str(path), False)
    assert largest_difference(read, pixels(upright)) <= (8 if extension == "jpg" else 0)
    upright.save(path, exif=b"Exif\0\0II*\0\xff\xff\xff\xff", **lossless)
    assert largest_difference(ImageReader(64, "none", 1.0, 1.0)(str(path), False), pixels(upright)) <= 8


def test_what_pillow_writes_is_read_as_pillow_reads_it_under_another_name(tmp_path):
    Image.init()
    written, image = {*FORMATS} & {*Image.SAVE} & {*Image.OPEN}, picture(32, 32)
    assert {"AVIF", "ICO", "JPEG2000", "QOI", "TGA"} <= written
    for name in sorted(written):
        extensions = [each for each, kind in Image.registered_extensions().items() if kind == name]
        path = tmp_path / (f"x{extensions[0]}" if name == "TGA" else "x.jpg")
        (image.convert("1") if name == "XBM" else image).save(path, name)
        with Image.open(path) as opened:
            wanted = pixels(opened.convert("RGBA").convert("RGB"))
        read = ImageReader(wanted.shape[1], "none", 1.0, 1.0)(str(path), False)
        assert read.equal(wanted), name


@pytest.mark.parametrize("extension", ["png", "jpg", "bmp", "tif", "webp", "gif", "avif", "jp2", "tga", "ico", "qoi"])
def test_a_damaged_file_is_an_error_never_a_wrong_image(tmp_path, extension):
    path = tmp_path / f"x.{extension}"
    picture(64, 64).save(path)
    whole = path.read_bytes()
    for content in (whole[: len(whole) // 2], b"", b"no image at all"):
        path.write_bytes(content)
        with pytest.raises(Exception):  # noqa: B017  # each decoder raises its own types
            WHOLE(str(path), False)


def bomb(path: Path, width: int, height: int) -> None:
    """Write a file of a few bytes whose header states width×height pixels."""
    path.write_bytes(b"P6 %d %d 255\n" % (width, height))


HOSTILE: dict[str, tuple[Callable[[Path], object], str]] = {
    "EPS, which Pillow gives to Ghostscript": (lambda path: picture().save(path, "EPS"), "not an image in one of"),
    "a pickle": (lambda path: path.write_bytes(pickle.dumps([1])), "not an image"),
    "a pipe": (os.mkfifo, "not a regular file"),
    "a link to a pipe": (lambda path: (os.mkfifo(f"{path}.pipe"), path.symlink_to(f"{path}.pipe")), "not a regular"),
    "a link to an endless device": (lambda path: path.symlink_to("/dev/zero"), "not a regular file"),
    "a link to itself": (lambda path: path.symlink_to(path), "Too many levels of symbolic links"),
    "a directory": (Path.mkdir, "Is a directory"),
    "a large file": (lambda path: (path.touch(), os.truncate(path, MAX_BYTES + 1)), "more than 268,435,456"),
    "a few more pixels than allowed": (lambda path: bomb(path, 9460, 9460), "exceeds limit of 89478485 pixels"),
    "a decompression bomb": (lambda path: bomb(path, 2**31 - 1, 2**31 - 1), "exceeds limit of"),
}
"""For each kind of file: a function that creates it, and a text in the error message."""


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_file_is_an_error_and_does_not_start_ghostscript(kind, tmp_path, monkeypatch):
    ghostscript, started = tmp_path / "bin" / "gs", tmp_path / "started"
    ghostscript.parent.mkdir()
    ghostscript.write_text(f"#!/bin/sh\ntouch {started}\n")
    ghostscript.chmod(0o755)
    monkeypatch.setenv("PATH", f"{ghostscript.parent}:{os.environ['PATH']}")
    make, words = HOSTILE[kind]
    make(tmp_path / "x.jpg")
    with pytest.raises(Exception, match=words):
        WHOLE(str(tmp_path / "x.jpg"), False)
    assert not started.exists()


def test_crops_and_flips_are_those_of_torchvision_resized_as_by_pillow(tmp_path):
    image = Image.fromarray(numpy.random.default_rng(0).integers(0, 256, (60, 90, 3), dtype=numpy.uint8))
    image.save(tmp_path / "x.png")
    reader = ImageReader(20, "crop", 0.08, 0.8)
    expected = image.crop((21, 6, 69, 54)).resize((20, 20), Image.Resampling.BILINEAR)  # 0.8 · 60 = 48 pixels
    assert largest_difference(reader(str(tmp_path / "x.png"), False), pixels(expected)) <= 1
    theirs = v2.Compose([v2.RandomResizedCrop(20, (0.08, 1.0)), v2.RandomHorizontalFlip()])
    for seed in range(12):
        torch.manual_seed(seed)
        wanted = pixels(theirs(image))
        assert largest_difference(augmented(reader, tmp_path / "x.png", seed), wanted) <= 1


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_large_jpeg_decoded_at_a_lower_resolution_looks_the_same(tmp_path, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    picture(1600, 1200).save(tmp_path / "x.jpg", quality=95, exif=exif)
    picture(1600, 1200).save(tmp_path / "x.png", exif=exif)  # always decoded at full resolution
    reader = ImageReader(64, "crop", 0.3, 0.9)
    plain = [reader(str(tmp_path / name), False) for name in ("x.jpg", "x.png")]
    for a, b in (plain, [augmented(reader, tmp_path / name) for name in ("x.jpg", "x.png")]):
        assert 0 < (a.float() - b.float()).abs().mean() < 2


@pytest.mark.parametrize(("mode", "transparency"), [("RGB", (255, 0, 0)), ("L", 255), ("1", 1)])
def test_a_transparent_color_of_a_png_keeps_its_color_as_in_torchvision(tmp_path, mode, transparency):
    image = picture().convert(mode)
    image.save(tmp_path / "x.png", transparency=transparency)
    with Image.open(tmp_path / "x.png") as opened:
        assert opened.mode == mode
        assert "transparency" in opened.info
    assert WHOLE(str(tmp_path / "x.png"), False).equal(pixels(image.convert("RGB")))


@pytest.mark.parametrize("marked", [True, False])
def test_colors_of_a_jpeg_for_print_are_those_of_pillow_with_and_without_a_marker_of_adobe(tmp_path, marked):
    path = tmp_path / "x.jpg"
    picture().convert("CMYK").save(path, quality=100, subsampling=0)
    content = path.read_bytes()
    start = content.index(b"\xff\xee")
    if not marked:
        length = int.from_bytes(content[start + 2 : start + 4], "big")
        path.write_bytes(content[:start] + content[start + 2 + length :])
    read = WHOLE(str(path), False)
    with Image.open(path) as opened:
        assert opened.mode == "CMYK"
        assert read.equal(pixels(opened.convert("RGB")))
    if marked:
        assert largest_difference(read, pixels(picture())) <= 8
