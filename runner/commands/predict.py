"""`python -m runner predict RUN FILE|DIRECTORY …` prints the class that a run predicts for each image.

Of a run on a CSV file, FILE is one with the same inputs, and the numbers that are predicted for each row are printed.
Of a language model, `--prompt TEXT` takes the place of files, and the text is printed with its continuation.

Images are read as the evaluation of the run reads them: cropped, resized and normalized in the same way. For a file
that cannot be read, the reason is printed; if none can be read, the exit code is 2. Neither the data of the run nor
its device is needed. A network of your own needs its code: model=mine.py among the files.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from runner.analysis.output import csv_text, one_line
from runner.commands.arguments import Parser, command
from runner.config import user_code
from runner.config.errors import ABSENT, ConfigError, check
from runner.config.overrides import override_key
from runner.system.console import DONE, REFUSED
from runner.system.secrets import printable

if TYPE_CHECKING:
    from runner.api.saved import Prediction


_SAMPLING: dict[str, tuple[type, Any, str]] = {
    "tokens": (int, 200, "tokens to draw (default: 200)"),
    "temperature": (float, 0.8, "divides the logits; 0: the most probable token (default: 0.8)"),
    "top_k": (int, None, "draw only from the N most probable tokens"),
    "seed": (int, 0, "determines what is drawn (default: 0)"),
}


@command
def main(arguments: Sequence[str] | None) -> int:
    parser = Parser("predict", __doc__)
    parser.add_run()
    parser.add_argument("files", metavar="FILE|DIRECTORY", nargs="*", help="images, directories of them, or CSV files")
    parser.add_forms(csv="print CSV, not a table", json="print JSON, not a table")
    parser.add_argument("--top", metavar="K", type=int, default=1, help="also print the next classes: K in all")
    every = "with --csv or --json, print the probability of every class"
    parser.add_argument("--probabilities", action="store_true", help=every)
    parser.add_argument("--prompt", metavar="TEXT", help="the beginning of a text, which a language model continues")
    for name, (kind, default, text) in _SAMPLING.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}", metavar="N", type=kind, default=default, help=f"of a text: {text}"
        )
    options = parser.parsed(arguments)
    from runner.api.saved import load
    from runner.data.vocabulary import Vocabulary

    files, code = options.files, user_code.typed_files(options.files)  # model=mine.py, if the network is one of a user
    files = [word for word in files if override_key(word) not in code]
    user_code.give(replace(user_code.given(), files=code))
    why, remedy = "a table would have a column for each class", "add --csv or --json"
    check(options.csv or options.json or not options.probabilities, "--probabilities", ABSENT, why, remedy)
    check(options.top >= 1, "--top", options.top, "at least the most probable class is printed", "--top 5, for example")
    run = load(options.run)
    if options.prompt is not None:
        check(not files, "--prompt", ABSENT, "it takes the place of files", "leave out one of the two")
        sampling = {name: getattr(options, name) for name in _SAMPLING}
        try:
            text, utf_8 = run.generate(options.prompt, options.checkpoint, **sampling), Vocabulary()
            print(utf_8.decode(utf_8.encode(options.prompt)) + text)
        except ConfigError as error:
            key = f"--{error.key.replace('_', '-')}" if error.key in _SAMPLING else error.key
            raise ConfigError(key, error.got, error.why, error.remedy) from None
        return DONE
    check(bool(files), "FILES", ABSENT, "there is nothing to predict", "name images, CSV files, or --prompt TEXT")
    classes = [*map(printable, run.signature(options.checkpoint).get("classes", []))] if options.probabilities else []
    predictions = run.predict(files, options.checkpoint, max(options.top, len(classes)))
    top = min(options.top, max((len(each.top) for each in predictions), default=1))
    if has_rows := any(each.values for each in predictions):
        names = ["file", "line", *map(printable, predictions[0].values)]
        rows: list[list[Any]] = [[printable(each.file), each.line, *each.values.values()] for each in predictions]
    else:
        names = ["file", "class", "probability", "error"]
        names += [f"{name} {i}" for i in range(2, top + 1) for name in ("class", "probability")]
        names += [f"probability of {each}" for each in classes]
        rows = [_row(each, top, classes) for each in predictions]
    if options.csv:
        sys.stdout.write(csv_text([names, *rows]))
    elif options.json:
        print(json.dumps([dict(zip(names, row, strict=True)) for row in rows], indent=2))
    elif has_rows:
        for file, line, *values in rows:
            named = zip(map(one_line, names[2:]), values, strict=True)
            print("  ".join([*(f"{name} {value:.6g}" for name, value in named), f"{file}:{line}"]))
    else:
        print(_as_table(predictions, top))
    return REFUSED if all(each.error for each in predictions) else DONE


def _row(prediction: Prediction, top: int, classes: list[str]) -> list[Any]:
    others = [cell for pair in prediction.top[1:top] for cell in pair]
    others += [None] * (2 * (top - 1) - len(others))  # a file that cannot be read
    probability = dict(prediction.top)
    named = [printable(prediction.file), prediction.label, prediction.probability, prediction.error]
    return [*named, *others, *(probability.get(each) for each in classes)]


def _as_table(predictions: list[Prediction], top: int) -> str:
    from rich.cells import cell_len, set_cell_size

    # Names of classes may come from somebody else.
    labels = ["?" if each.error else one_line(each.label) for each in predictions]
    width = max(map(cell_len, labels))
    lines = []
    for label, each in zip(labels, predictions, strict=True):
        probability = " " * 6 if each.error else f"{each.probability:6.1%}"
        why = f": {printable(each.error)}" if each.error else ""
        others = ", ".join(f"{one_line(name)} {share:.1%}" for name, share in each.top[1:top])
        ending = f"  ({others})" if others else why
        lines.append(f"{set_cell_size(label, width)}  {probability}  {printable(each.file)}{ending}")
    return "\n".join(lines)
