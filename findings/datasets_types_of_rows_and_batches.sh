#!/bin/sh
# datasets: with the format "numpy", a row has the types of its columns, and a batch of rows has others.
#
# datasets 5.2.0, numpy 2.3.5, CPython 3.11.
# Guess: with_format("numpy") gives arrays of the types of the columns, for one row and for several.
# Seen: dataset[0] has float64, float16 and uint8, and dataset[0:2] float32, float32 and int64: a float64 number is rounded,
#   and images of bytes take eight times the memory. A missing value makes integers float32, in which 16,777,217 is
#   16,777,216: as a row it is exact, in a batch it is another id. No warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet datasets==5.2.0 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import os

os.environ["HF_DATASETS_DISABLE_PROGRESS_BARS"] = "1"

import datasets

types = {"float64": "float64", "float16": "float16", "uint8": "uint8", "id": "int64"}
features = datasets.Features({name: datasets.Value(kind) for name, kind in types.items()})
rows = {"float64": [0.1, 0.2], "float16": [0.5, 0.25], "uint8": [1, 2], "id": [16_777_217, None]}
dataset = datasets.Dataset.from_dict(rows, features=features).with_format("numpy")
row, batch = dataset[0], dataset[0:2]
for name in types:
    print(f"{name}: in a row {row[name].dtype} {row[name]!s}, in a batch {batch[name].dtype} {batch[name][0]:.17g}")
assert {name: str(value.dtype) for name, value in row.items()} == types
assert [str(batch[name].dtype) for name in types] == ["float32", "float32", "int64", "float32"], "changed"
assert row["id"] == 16_777_217 and batch["id"][0] == 16_777_216 and float(batch["float64"][0]) != 0.1
EOF
echo "as before"
