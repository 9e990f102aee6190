"""Read what runs have left: `python read_results.py outputs` prints a table, and writes each run's curves as CSV."""

import csv
import json
import sys
from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def main(root: Path) -> None:
    """Print a line for each run below `root`, and write `curves.csv` (tag, step, value) into each run directory."""
    for file in sorted(root.rglob("result.json")):
        result = json.loads(file.read_text(encoding="utf-8"))
        best = result["best"].get("value")
        print(file.parent.name, result["status"], f"steps={result['steps']}", f"best={best}", sep="\t")

        events = EventAccumulator(str(file.parent), size_guidance={"scalars": 0}).Reload()
        with (file.parent / "curves.csv").open("w", newline="", encoding="utf-8") as out:
            rows = csv.writer(out)
            rows.writerow(["tag", "step", "value"])
            for tag in events.Tags()["scalars"]:
                rows.writerows([tag, point.step, point.value] for point in events.Scalars(tag))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
