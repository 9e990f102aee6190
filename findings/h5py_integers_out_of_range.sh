#!/bin/sh
# h5py: integers that a data set cannot hold become its nearest ones, where NumPy and zarr count modulo 256.
#
# h5py 3.16.0, zarr 3.1.6, numpy 2.3.5, CPython 3.11.
# Guess: labels of -1 ("to be ignored") that are written into a data set of uint8 become 255, as by astype and in zarr.
# Seen: HDF5 saturates. -1 becomes 0, which is a class, and 256 and 300 become 255, the common label for "to be ignored";
#   in zarr they are 255, 0 and 44. So do create_dataset(data=…, dtype="uint8"), and floats.
#   No warning from either.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet h5py==3.16.0 zarr==3.1.6 numpy==2.3.5
"$folder/bin/python" -W error - "$folder" <<'EOF'
import sys

import h5py
import numpy as np
import zarr

labels = np.array([-1, 256, 300])
with h5py.File(f"{sys.argv[1]}/labels.h5", "w") as file:
    file.create_dataset("written", labels.shape, "uint8")[:] = labels
    file.create_dataset("given", data=labels, dtype="uint8")
    file.create_dataset("floats", data=np.array([-1.0, 300.0]), dtype="uint8")
    found = {name: values[:].tolist() for name, values in file.items()}
array = zarr.create_array(f"{sys.argv[1]}/labels.zarr", shape=labels.shape, dtype="uint8")
array[:] = labels
print("h5py", found, "zarr", array[:].tolist(), "NumPy", labels.astype("uint8").tolist())
assert found == {"written": [0, 255, 255], "given": [0, 255, 255], "floats": [0, 255]}
assert array[:].tolist() == labels.astype("uint8").tolist() == [255, 0, 44]
EOF
echo "as before"
