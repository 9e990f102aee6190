"""The recorder, which passes what the training loop logs to each tracker of the run."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from runner.config.overrides import LOCATION_KEYS, as_typed
from runner.storage.saved_run import saved_overrides
from runner.system.secrets import MASK, printable, redacted, redacted_values
from runner.tracking.base import Tracker

log = logging.getLogger(__name__)


class Recorder:
    """A context manager that opens the backends of a tracker, logs to each, and closes them.

    `directory` is that of the run, `after_step` the step from which it was resumed, 0 for a new run. On ranks other
    than 0, for which `visible` is False, nothing is logged.
    """

    def __init__(self, tracker: Tracker, directory: Path, after_step: int, visible: bool = True):
        self._backends = tracker.backends() if visible else []
        self._directory, self._first_step, self._status = directory, after_step + 1, "stopped"

    def __enter__(self) -> Recorder:
        with ExitStack() as opened:  # if one cannot be opened, those before it are closed
            for backend in self._backends:
                backend.open(self._directory, self._first_step)
                opened.callback(lambda backend=backend: backend.close(self._status))
            self._opened = opened.pop_all()
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, Exception):
            self._status = "crashed"
        self._opened.close()  # all of them, even if one raises an error

    def scalars(self, values: dict[str, Any], step: int) -> None:
        """Log numbers, scalar tensors or texts by tag. `step` is the number of completed optimizer steps."""
        texts = {tag: value for tag, value in values.items() if isinstance(value, str)}
        for tag, text in texts.items() if self._backends else ():  # also in the log, as not all backends have texts
            log.info("step %d: %s: %s", step, tag, text)
        self.texts(texts, step)
        for backend in self._backends:
            backend.scalars({tag: float(value) for tag, value in values.items() if tag not in texts}, step)

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        """Log RGB images, uint8 [3, height, width], and animations, uint8 [frames, 3, height, width], by tag."""
        for backend in self._backends:
            backend.images(images, step)

    def texts(self, texts: dict[str, str], step: int | None = None) -> None:
        """Log preformatted texts by tag, with secrets masked, for a step: by default, the first one of the session."""
        shown = {tag: printable(redacted(text)) for tag, text in texts.items()}
        for backend in self._backends if shown else ():
            backend.texts(shown, self._first_step if step is None else step)

    def hyperparameters(self, config: dict[str, Any]) -> None:
        """Log the config of the run with secrets masked, and separately the values that the user overrode."""
        config = redacted_values(config)  # an override may be `${oc.env:TOKEN}`, but the config has the token itself
        typed = typed_values(saved_overrides(self._directory), config)
        for backend in self._backends:
            backend.hyperparameters(shown_values(flatten(config)), shown_values(typed))

    def finish(self, status: str = "done") -> None:
        """Note how the session has ended: `done`, `stopped` or `diverged`."""
        self._status = status

    def flush(self) -> None:
        """Save everything that was logged so far, before a checkpoint."""
        for backend in self._backends:
            backend.flush()


def typed_values(overrides: Iterable[str], config: dict[str, Any]) -> dict[str, Any]:
    """Return the values that the user overrode, by key, without secrets and the keys that say where a run is saved.

    For an option of a config group, as in `precision=16`, the value is the name of the option. All other values are
    taken from `config`, with their types.
    """
    values: dict[str, Any] = {}
    for text in overrides:
        key, equals, typed = text.lstrip("+").partition("=")
        if not equals or key in LOCATION_KEYS or key.startswith(("~", "hydra.")) or MASK in redacted_values([text])[0]:
            continue
        value: Any = config
        for name in key.split("."):
            value = value.get(name, typed) if isinstance(value, dict) else typed
        values[key] = typed.strip("'\"") if isinstance(value, dict) or value is typed else value
    return values


def shown_values(values: dict[str, Any]) -> dict[str, float | str | bool]:
    """Return `values` in the types that a tracker accepts: lists become text, and values that are None are left out."""
    plain = {key: v if isinstance(v, int | float | str) else as_typed(v) for key, v in values.items() if v is not None}
    return {printable(key): printable(value) if isinstance(value, str) else value for key, value in plain.items()}


def flatten(config: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return the values in a nested config as a flat dict with dotted keys after `prefix`. Lists become text.

    A component, that is, a nested config with a `_target_`, also gets a value: the name of its class.
    """
    leaves: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict):
            leaves |= flatten(value, f"{prefix}{key}.")
        elif key == "_target_":
            leaves[prefix.rstrip(".")] = value.rpartition(".")[2]
        else:
            leaves[prefix + key] = value if isinstance(value, int | float | str | None) else as_typed(value)
    return leaves
