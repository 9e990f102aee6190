#!/bin/sh
# torchvision: a key point is on its pixel after a flip, and one pixel beside it after a rotation.
#
# torchvision 0.29.2, torch 2.14.1, CPython 3.11.
# Guess: transforms.v2 moves KeyPoints as it moves the pixels: a turn by 180 degrees is a flip in both directions.
# Seen: flips count the centers of pixels (x becomes width - 1 - x), rotations their corners (width - x). After turns by
#   90 and 180 degrees, and affine ones, the image is that of the flips, and the point is one pixel to the right, below,
#   or both; the first pixel's is outside of the image. Boxes, whose edges are corners, are right in both.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet torchvision==0.29.2 torch==2.14.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import torch
from torchvision.transforms.v2 import functional
from torchvision.tv_tensors import BoundingBoxes, Image, KeyPoints

SIZE = 6, 8  # height, width


def both_flips(value):
    return functional.vertical_flip(functional.horizontal_flip(value))


def half_turn(value):
    return functional.rotate(value, 180)


def affine_half_turn(value):
    return functional.affine(value, 180, [0, 0], 1.0, [0.0, 0.0])


def quarter_turn(value):
    return functional.rotate(value, 90, expand=True)


for transform, beside in ((both_flips, [0, 0]), (half_turn, [1, 1]), (affine_half_turn, [1, 1]), (quarter_turn, [0, 1])):
    for x, y in ((0, 0), (1, 2), (7, 5)):
        image = torch.zeros(1, *SIZE)
        image[0, y, x] = 1
        [(row, column)] = transform(Image(image))[0].nonzero().tolist()
        [[point_x, point_y]] = transform(KeyPoints([[float(x), float(y)]], canvas_size=SIZE)).round().tolist()
        print(f"{transform.__name__}: pixel {column, row}, point {point_x, point_y}")
        assert [point_x - column, point_y - row] == beside
boxes = BoundingBoxes([[1.0, 2.0, 4.0, 3.0]], format="XYXY", canvas_size=SIZE)
assert torch.allclose(half_turn(boxes), both_flips(boxes))
EOF
echo "as before"
