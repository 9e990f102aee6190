#!/bin/sh
# safetensors: a slice of a tensor in a file is not that of NumPy.
#
# safetensors 0.8.0, numpy 2.3.5, CPython 3.11.
# Guess: get_slice takes what NumPy takes, at least ints and slices, and gives the same.
# Seen: [-1] is the last row, but [-2:] raises OverflowError; a step is taken; an end beyond the tensor, which Python
#   cuts off, raises: the last batch of s[i : i + 4] has to be cut by hand. [True] is row 1, where NumPy adds an axis.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet safetensors==0.8.0 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import tempfile

import numpy as np
import safetensors
from safetensors.numpy import save_file

table = np.arange(12, dtype=np.int32).reshape(6, 2)
with tempfile.NamedTemporaryFile() as file:
    save_file({"table": table}, file.name)
    with safetensors.safe_open(file.name, "numpy") as opened:
        rows = opened.get_slice("table")
        for name, index, seen in (
            ("[-1]", -1, [10, 11]),
            ("[::4]", slice(None, None, 4), [0, 1, 8, 9]),
            ("[-2:]", slice(-2, None), "OverflowError"),
            ("[4:8]", slice(4, 8), "SafetensorError"),
            ("[True]", True, [2, 3]),
        ):
            try:
                found = rows[index].ravel().tolist()
            except Exception as error:
                found = type(error).__name__
            print(f"{name}: {found}; in NumPy {table[index].ravel().tolist()}")
            assert found == seen, f"changed: {seen} before"
EOF
echo "as before"
