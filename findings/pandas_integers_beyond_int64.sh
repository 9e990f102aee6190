#!/bin/sh
# pandas: a column of integers becomes one of texts if its largest fits an unsigned 64-bit integer, and not if it is larger.
#
# pandas 3.1.1, numpy 2.3.5, CPython 3.11.
# Guess: integers for which there is no common 64-bit type become Python integers (or float64), whatever their size.
# Seen: read_csv gives
#     18446744073709551615, 1      uint64
#     18446744073709551615, -1     texts: '18446744073709551615', '-1'
#     18446744073709551616, -1     Python integers
#     9223372036854775808, empty   texts
#     18446744073709551615, 1.5    float64
#     18446744073709551616, 1.5    texts
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet pandas==3.1.1 numpy==2.3.5
"$folder/bin/python" - <<'EOF'
import io

import pandas as pd

EXPECTED = {
    ("18446744073709551615", "1"): ("uint64", int),
    ("18446744073709551615", "-1"): ("str", str),
    ("18446744073709551616", "-1"): ("object", int),
    ("9223372036854775808", ""): ("str", str),
    ("18446744073709551615", "1.5"): ("float64", float),
    ("18446744073709551616", "1.5"): ("str", str),
}
for values, (dtype, kind) in EXPECTED.items():
    column = pd.read_csv(io.StringIO("a,b\n" + "".join(f"{value},0\n" for value in values))).a
    print(values, column.dtype, column.tolist())
    assert (str(column.dtype), type(column.tolist()[0])) == (dtype, kind)
EOF
echo "as before"
