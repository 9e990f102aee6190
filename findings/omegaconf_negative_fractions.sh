#!/bin/sh
# omegaconf: in a file .5 is a number and -.5 a text; on Hydra's command line both are numbers.
#
# omegaconf 2.3.1, hydra-core 1.3.8, PyYAML 6, CPython 3.11.
# Guess: OmegaConf, which made 1e-3 a number where YAML 1.1 has a text, reads numbers as Hydra's overrides do.
# Seen: a sign before a point, and an exponent after it without a sign, make a text: "-.5", "+.5", ".5e3". An
#   option file and an override with the same letters give other types, and a text reaches the code as "-.5". Likewise
#   nan and inf are numbers in an override and texts in a file, .nan and .inf the other way round.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet omegaconf==2.3.1 hydra-core==1.3.8
"$folder/bin/python" - <<'EOF'
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

parser = OverridesParser.create()
SEEN = {
    "1e-3": (float, float),
    ".5": (float, float),
    "-0.5": (float, float),
    "-.5": (str, float),
    "+.5": (str, float),
    ".5e3": (str, float),
    ".5e+3": (float, float),
    "nan": (str, float),
    ".nan": (float, str),
    "-inf": (str, float),
    "-.inf": (float, str),
}
for letters, seen in SEEN.items():
    found = OmegaConf.create(f"x: {letters}").x, parser.parse_override(f"x={letters}").value()
    print(f"{letters}: in a file {found[0]!r}, in an override {found[1]!r}")
    assert tuple(map(type, found)) == seen, f"changed: {seen} before"
EOF
echo "as before"
