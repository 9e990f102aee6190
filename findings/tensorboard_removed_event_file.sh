#!/bin/sh
# TensorBoard without its fast reader: a run whose newest event file is removed is never read again.
#
# tensorboard 2.21.0, tensorboard-data-server 0.7.2, CPython 3.11.
# Guess: a TensorBoard that is running goes on with the next file, as its fast reader does, or as it does after a restart.
# Seen: the reader tries to open the file that it has read last again and again, and swallows the error as long as the
#   directory exists. It goes on if the file is emptied instead. No message.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet tensorboard==2.21.0 'setuptools<81'
"$folder/bin/python" - "$folder/run" <<'EOF'
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.record_writer import RecordWriter


def write(path, steps):
    with path.open("wb") as file:
        for step in steps:
            summary = Summary(value=[Summary.Value(tag="a", simple_value=step)])
            RecordWriter(file).write(Event(step=step, summary=summary).SerializeToString())


def steps_read(remove):
    run = Path(sys.argv[1], str(remove))
    run.mkdir(parents=True)
    write(first := run / "events.out.tfevents.1", [1, 2])
    reader = EventAccumulator(str(run)).Reload()
    write(run / "events.out.tfevents.2", [3, 4])
    first.unlink() if remove else first.write_bytes(b"")
    for _ in range(3):
        reader.Reload()
    return [point.step for point in reader.Scalars("a")]


emptied, removed = steps_read(remove=False), steps_read(remove=True)
print("emptied:", emptied, "removed:", removed)
assert (emptied, removed) == ([1, 2, 3, 4], [1, 2]), "changed"
EOF
echo "as before"
