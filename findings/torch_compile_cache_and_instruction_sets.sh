#!/bin/sh
# torch.compile takes from its cache on disk what it generated for another instruction set, and computes other numbers.
#
# torch 2.14.1, CPython 3.11, a CPU with AVX-512 (others end with 77, "not tried").
# Guess: the key of the cache holds the instruction set for which the C++ code was generated, so that a process under
#   ATEN_CPU_CAPABILITY=avx2 (or an older CPU that shares a home directory) compiles the function anew.
# Seen: with one cache directory, the second process loads the code that steps through memory by 16 values, and
#   compiles it with vectors of 8. Nothing is said, the exit code is 0:
#     AVX512  sum: 3.8e-06    softmax: 1.5e-08
#     AVX2    sum: 3.3e+01    softmax: nan
#   With a directory for each instruction set (TORCHINDUCTOR_CACHE_DIR) both agree with the uncompiled function.
set -eu
grep -q avx512f /proc/cpuinfo || { echo "not tried: this CPU has no AVX-512"; exit 77; }
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet torch==2.14.1 numpy==2.3.5 setuptools==80.9.0
cat > "$folder/compiled.py" <<'EOF'
import torch

torch.manual_seed(0)
torch.set_num_threads(1)
values = torch.randn(64, 33)


def function(values):
    return (values.exp() * values.sin()).sum(1), torch.softmax(values, 1)


differences = [float((a - b).abs().max()) for a, b in zip(function(values), torch.compile(function)(values), strict=True)]
print(torch.backends.cpu.get_cpu_capability(), "sum: {:.1e} softmax: {:.1e}".format(*differences))
raise SystemExit(0 if max(differences) < 1e-4 else 3)  # NaN is not
EOF
run() { # run CACHE [NAME=VALUE]
    cache=$1
    shift
    env TORCHINDUCTOR_CACHE_DIR="$folder/$cache" "$@" "$folder/venv/bin/python" "$folder/compiled.py" 2> "$folder/errors" ||
        { code=$?; [ $code = 3 ] || cat "$folder/errors"; return $code; }
}
run shared
run own ATEN_CPU_CAPABILITY=avx2
if run shared ATEN_CPU_CAPABILITY=avx2; then
    echo "changed: the cache is no longer shared between instruction sets"
    exit 1
elif [ $? = 3 ]; then
    echo "as before: code of AVX-512 is used under AVX2"
else
    exit 1
fi
