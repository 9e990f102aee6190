"""Tests of pictures: positions, colors and sizes, in part pixel by pixel."""

import io

import pytest
import torch
from PIL import Image, ImageDraw

from runner.tracking.image_grids import BAD, GOOD, PLAIN, class_shares, confusion_matrix, font, grid, png, write

GAP, STRIP = 4, 18


def colour_at(picture: torch.Tensor, row: int, column: int) -> tuple[int, ...]:
    return tuple(picture[:, row, column].tolist())


def noise(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("channels", [1, 3])
def test_small_images_are_scaled_by_an_integer_and_placed_row_by_row(channels):
    images = noise(4, channels, 20, 28)  # the longer side, 28, is scaled by 3, to at least 64 pixels
    picture = grid(images, ["a", "b", "c", "d"])
    assert picture.dtype == torch.uint8
    assert picture.shape == (3, 2 * (60 + STRIP + GAP) + GAP, 2 * (84 + GAP) + GAP)
    large = images.repeat_interleave(3, 2).repeat_interleave(3, 3).expand(4, 3, 60, 84)
    for i, (top, left) in enumerate([(4, 4), (4, 92), (86, 4), (86, 92)]):
        assert torch.equal(picture[:, top : top + 60, left : left + 84], large[i])


def test_tiles_are_64_to_160_pixels_and_large_images_are_averaged():
    sizes = {(8, 8): (64, 64), (63, 10): (126, 20), (160, 90): (160, 90), (320, 640): (80, 160)}
    for (height, width), expected in sizes.items():
        picture = grid(noise(1, 3, height, width), ["a"])
        assert picture.shape == (3, expected[0] + STRIP + 2 * GAP, expected[1] + 2 * GAP)
    checks = torch.zeros(1, 3, 320, 320, dtype=torch.uint8)
    checks[..., ::2] = 200  # every other column
    assert colour_at(grid(checks, ["a"]), GAP + 80, GAP + 80) == (100, 100, 100)


def test_captions_are_green_red_or_gray_and_written_in_their_strip_and_nowhere_else():
    images = torch.zeros(4, 1, 64, 64, dtype=torch.uint8)
    corner = GAP + 64 + 1, GAP + 1
    picture = grid(images, [""] * 4, [True, False, True, True])
    assert colour_at(picture, *corner) == GOOD
    assert colour_at(picture, corner[0], corner[1] + 64 + GAP) == BAD
    assert colour_at(grid(images, [""] * 4), *corner) == PLAIN
    empty, written = grid(images, [""] * 4), grid(images, ["", "", "", "a caption"])
    rows, columns = (empty != written).any(0).nonzero().unbind(1)
    top, left = GAP + 64 + STRIP + GAP + 64, GAP + 64 + GAP
    assert top <= rows.min() <= rows.max() < top + STRIP
    assert left <= columns.min() <= columns.max() < left + 64


def test_two_line_captions_are_stacked_and_long_captions_widen_the_cells():
    images = torch.zeros(4, 1, 64, 64, dtype=torch.uint8)
    picture = grid(images, ["automobile 98%\nis truck", "a", "b", "c"])
    assert 80 < (picture.shape[2] - GAP) // 2 - GAP < 120
    assert picture.shape[1] == 2 * (64 + 2 * STRIP - 4 + GAP) + GAP
    assert 2 * (140 + GAP) < grid(images, ["x" * 100, "a", "b", "c"]).shape[2] <= 2 * (160 + GAP) + GAP


@pytest.mark.parametrize("anchor", ["lm", "rm", "mm", "mt"])
def test_text_has_the_pixels_of_pillow(anchor):
    """Also at fractions of a pixel, over the edge, and of a text that was drawn before."""
    ours, theirs = (Image.new("RGB", (120, 60), (200, 210, 220)) for _ in range(2))
    lines = "\nis g" if anchor == "mm" else ""
    for text, place in (("Ag 97%", (60.5, 30.25)), ("Ag 97%", (20, 10.75)), ("j", (118, 57.5)), ("7", (60.5, 5))):
        write(ours, place, text + lines, (10, 60, 90), anchor)
        style = {"font": font(12), "anchor": anchor, "align": "center", "spacing": 2}
        ImageDraw.Draw(theirs).text(place, text + lines, (10, 60, 90), **style)
    assert ours.tobytes() == theirs.tobytes()


@pytest.mark.parametrize("channels", [1, 3])
def test_a_png_has_each_pixel(channels):
    picture = noise(channels, 5, 7)
    with Image.open(io.BytesIO(png(picture))) as read:
        read.load()  # which verifies its checksums
        assert (read.format, read.mode, read.size) == ("PNG", "RGB", (7, 5))
        assert read.tobytes() == bytes(picture.expand(3, 5, 7).permute(1, 2, 0).flatten().tolist())


def test_bars_show_the_accuracy_of_each_class_in_ascending_order():
    counts = torch.tensor([[8, 2, 0], [5, 5, 0], [0, 0, 0]])
    picture = class_shares(counts, ["cat", "dog", "none"])
    blue = (picture == torch.tensor((47, 111, 159))[:, None, None]).all(0)
    rows = [blue[28 + 20 * number + 10].sum().item() for number in range(2)]
    assert rows == [121, 193], "5 of 10, then 8 of 10, of 240 pixels; the class without samples is left out"
    assert picture.shape[1] == 28 + 2 * 20 + 4
    many = class_shares(torch.eye(100, dtype=torch.int64), [str(i) for i in range(100)])
    assert many.shape[1] == 28 + 40 * 20 + 4


def cells(picture: torch.Tensor, num_classes: int, cell: int) -> torch.Tensor:
    """Return the color of each cell's upper left pixel, [3, classes, classes]."""
    margin = picture.shape[1] - num_classes * cell - GAP
    corners = margin + cell * torch.arange(num_classes)
    return picture[:, corners][:, :, corners]


def shade(share: float) -> tuple[int, ...]:
    return tuple(round(255 + (dark - 255) * share**0.5) for dark in (8, 48, 107))


def test_rows_are_true_classes_and_shades_are_fractions_of_their_row():
    counts = torch.tensor([[75, 25, 0], [0, 0, 0], [1, 0, 0]])
    shown = cells(confusion_matrix(counts, ["a", "b", "c"]), 3, 44)
    wanted = {(0, 0): shade(0.75), (0, 1): shade(0.25), (2, 0): shade(1)}
    for row in range(3):
        for column in range(3):
            assert colour_at(shown, row, column) == wanted.get((row, column), (255, 255, 255))


def test_numbers_are_drawn_inside_their_cells():
    counts = torch.zeros(3, 3, dtype=torch.int64)
    before = confusion_matrix(counts, ["a", "b", "c"])
    counts[1, 2] = 7 * 10**12
    after = confusion_matrix(counts, ["a", "b", "c"])
    rows, columns = (before != after).any(0).nonzero().unbind(1)
    margin = before.shape[1] - 3 * 44 - GAP
    assert (rows.min(), rows.max()) == (margin + 44, margin + 87)  # the shade fills row 1
    assert (columns.min(), columns.max()) == (margin + 88, margin + 131)  # and column 2
    white = (after[:, margin + 44 : margin + 88, margin + 88 : margin + 132] > 200).all(0)
    assert white.any()
    assert not white[:, [0, 1, -2, -1]].any()


@pytest.mark.parametrize(("num_classes", "cell"), [(21, 38), (1000, 1)])
def test_many_classes_are_drawn_as_a_heat_map(num_classes, cell):
    counts = torch.eye(num_classes, dtype=torch.int64) * 3
    counts[4, 17] = 1
    picture = confusion_matrix(counts, [str(i) for i in range(num_classes)])
    assert picture.shape[1] == picture.shape[2] < 1200
    shown = cells(picture, num_classes, cell)
    assert (shown[0] < 255).nonzero().tolist() == sorted([[4, 17], *([i, i] for i in range(num_classes))])
    assert colour_at(shown, 4, 17) == shade(0.25)


def test_any_text_can_be_drawn():
    for name in ("Ünïcödé", "猫", "עברית", "🙂", "two\nlines", "\x00\x07", "bytes \udcff\udc80", "", "ﷺ" * 50):
        assert grid(noise(1, 1, 8, 8), [name]).shape[2] <= 160 + 2 * GAP
        assert confusion_matrix(torch.eye(2, dtype=torch.int64), [name, "b"]).shape[0] == 3
