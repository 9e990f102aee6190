#!/bin/sh
# MLflow: if its first process is killed, its SQLite file cannot be opened any more.
#
# mlflow-skinny 3.17.2, SQLAlchemy 2.1.9, alembic 1.20.1, CPython 3.11.
# Guess: the tables are made in a transaction, or the next process makes those that are missing, as there is no run yet.
# Seen: they are made by dozens of migrations, over several seconds, and each statement is committed by itself. Killed
#   within a migration, the next process repeats it from its start, and ends with "table … already exists", as does every
#   later one, whichever experiment it logs to, until somebody removes the file.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder"
"$folder/bin/pip" install --quiet mlflow-skinny==3.17.2 sqlalchemy==2.1.9 alembic==1.20.1
cat > "$folder/use.py" <<'EOF'
import os
import signal
import sys

from mlflow import MlflowClient
from sqlalchemy import Engine, event


@event.listens_for(Engine, "after_cursor_execute")
def kill(connection, cursor, statement, *_):
    if sys.argv[2:] and "CREATE TABLE _alembic_tmp_experiments" in statement:
        os.kill(os.getpid(), signal.SIGKILL)


client = MlflowClient(tracking_uri=f"sqlite:///{sys.argv[1]}/mlflow.db")
client.create_experiment("mine")
EOF
cd "$folder"
code=0
"$folder/bin/python" use.py "$folder" kill > killed.txt 2>&1 || code=$?
echo "first process: exit code $code"
[ "$code" -eq 137 ]
for process in second third; do
    ! "$folder/bin/python" use.py "$folder" > errors.txt 2>&1
    echo "$process process: $(grep -o -m 1 'table .* already exists' errors.txt)"
done
rm mlflow.db
"$folder/bin/python" use.py "$folder" > errors.txt 2>&1
echo "as before"
