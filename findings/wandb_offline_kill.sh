#!/bin/sh
# W&B offline: a process that is killed within 15 seconds leaves an empty file, whatever it has logged and committed.
#
# wandb 0.31.0, CPython 3.11.
# Guess: `log(…, commit=True)` is in the `.wandb` file at once, or the service, another process, writes it when the one
#   that it serves ends.
# Seen: three seconds after ten rows the file has 7 bytes, none of them a row; the service ends without writing. With the
#   setting `x_transaction_log_flush_interval=0.02`, which 0.30.0 does not have, all rows are there. No warning.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet wandb==0.31.0
for interval in 15 0.02; do
    mkdir "$folder/$interval"
    "$folder/bin/python" - "$folder/$interval" "$interval" <<'EOF' || true
import os, signal, sys, time
import wandb

options = {"silent": True, "console": "off", "x_transaction_log_flush_interval": float(sys.argv[2])}
run = wandb.init(mode="offline", dir=sys.argv[1], settings=wandb.Settings(**options))
for step in range(10):
    run.log({"loss": 1.0 / (step + 1)}, step=step, commit=True)
time.sleep(3)
os.kill(os.getpid(), signal.SIGKILL)
EOF
    sleep 1
    rows=$(cat "$folder/$interval"/wandb/offline-run-*/*.wandb | grep -a -o '"\?loss"\?' | wc -l)
    echo "every $interval s: $(cat "$folder/$interval"/wandb/offline-run-*/*.wandb | wc -c) bytes, the name of the curve $rows times"
    if [ "$interval" = 15 ]; then [ "$rows" -eq 0 ]; else [ "$rows" -ge 10 ]; fi
done
echo "as before"
