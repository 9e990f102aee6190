"""The base class of trackers that call other packages, which may be slow, or fail, and the thread of these calls."""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from runner.config.errors import check
from runner.config.overrides import text_override
from runner.storage.files import read_regular, write_text
from runner.storage.ledger_file import LEDGER
from runner.system.import_path import is_installed
from runner.tracking.base import Tracker

if TYPE_CHECKING:
    import numpy
    import torch

log = logging.getLogger(__name__)

MAX_IDENTIFIER_BYTES = 1000
MAX_WAITING = 10_000
"""The maximum number of calls in the queue: enough for the curves of several hours, if the network is down."""


@dataclass
class RemoteTracker(Tracker, ABC):
    """The base class of trackers that call another package, such as wandb; a `Background` calls their methods.

    Instead of `open`, they have `start`. A resumed run continues the run of the backend, which shows no point that the
    run logs once more, if the backend can remove points or begin another run with the others.
    """

    package: ClassVar[str]
    """The name of the package, and of the extra that installs it."""
    destinations: ClassVar[tuple[str, ...]] = ()
    """Names of the options that determine where the data of a run is sent."""

    @classmethod
    def untrusted_values(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Refuse a saved config that determines where data is sent, by other `values` than the defaults."""
        defaults = {each.name: each.default for each in fields(cls)}
        for key in cls.destinations:
            value = values.get(key, defaults[key])
            why = "a saved config does not decide where a run is sent"
            remedy = f"if you trust it, type it again: {text_override(f'tracking.{key}', value)}"
            check(value == defaults[key], key, value, why, remedy)
        return {}

    def backends(self) -> list[Tracker]:
        return [Background(self)]

    def check(self) -> None:
        why, remedy = "it is not installed", f"pip install {self.package}"
        check(is_installed(self.package), "tracking", self.package, why, remedy)

    @abstractmethod
    def start(self, directory: Path, identifier: str, first_step: int) -> str:
        """Begin to track a new run, or continue the one with `identifier`; return the run's identifier.

        What the run has logged before for `first_step` and later steps is set aside: the session computes them again.
        """

    def send(self) -> None:
        """Send the scalars that were kept back to be sent together; called when no other call is waiting."""

    def remember(self, directory: Path, identifier: str) -> None:
        """Save the identifier by which the next session of the run continues the run of the backend."""
        write_text(directory / f"{self.package}_run.txt", identifier + "\n")


class Background(Tracker):
    """A tracker that calls the methods of `tracker` in a separate thread, in order, while training goes on.

    If a call fails, the queue is full, or `close` has waited for `patience` seconds, a warning is logged, and the run
    goes on without tracking. `flush` waits for the calls before it, `flush_patience` seconds at most; if that is not
    enough, a warning is logged, and the run does not wait again until these calls are made. Animations are not logged.
    The identifier of the run in the backend is saved in a file in the run directory.
    """

    patience: ClassVar[float] = 60.0
    flush_patience: ClassVar[float] = 20.0
    """Less than the time between a stop signal and a kill, 30 seconds on most clusters: a checkpoint follows."""

    def __init__(self, tracker: RemoteTracker):
        self._tracker, self.check = tracker, tracker.check

    def open(self, directory: Path, first_step: int) -> None:
        self._calls: queue.Queue[Callable[[], None] | None] = queue.Queue(MAX_WAITING)
        self._failed, self._status = False, "stopped"
        self._behind: threading.Event | None = None  # set when the calls before a flush are made, if they were late
        self._thread = threading.Thread(target=self._track, args=[directory, first_step], name="tracking", daemon=True)
        self._thread.start()

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._call(self._tracker.scalars, values, step)

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        stills = {tag: pixels.cpu() for tag, pixels in images.items() if pixels.dim() == 3}
        self._call(self._tracker.images, stills, step)

    def texts(self, texts: dict[str, str], step: int) -> None:
        self._call(self._tracker.texts, texts, step)

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        self._call(self._tracker.hyperparameters, config, typed)

    def flush(self) -> None:
        name = self._tracker.package
        if self._behind is not None:
            if not self._behind.is_set():
                return
            log.info("%s has now taken what was logged before", name)
        flushed = self._behind = threading.Event()
        self._call(self._flush, flushed)
        deadline = time.monotonic() + self.flush_patience
        while not (flushed.is_set() or self._failed) and time.monotonic() < deadline:
            flushed.wait(0.05)
        if flushed.is_set():
            self._behind = None
        elif not self._failed:
            why = f"has not taken what was logged within {self.flush_patience:g} s"
            log.warning("%s %s; the run goes on, but if it is killed, points may be missing there", name, why)

    def _flush(self, flushed: threading.Event) -> None:
        self._tracker.send()
        self._tracker.flush()
        flushed.set()

    def close(self, status: str) -> None:
        self._status, deadline = status, time.monotonic() + self.patience
        if self._thread.is_alive():
            with suppress(queue.Full):
                self._calls.put(None, timeout=self.patience)
                self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            self._fail(f"it has not answered for {self.patience:g} s")

    def _call(self, method: Callable[..., None], *arguments: Any) -> None:
        try:
            if not self._failed:
                self._calls.put_nowait(partial(method, *arguments))
        except queue.Full:
            self._fail(f"{MAX_WAITING:,} calls are waiting")

    def _track(self, directory: Path, first_step: int) -> None:
        try:
            file = directory / f"{self._tracker.package}_run.txt"
            saved = read_regular(file, MAX_IDENTIFIER_BYTES).decode().strip() if file.exists() else ""
            identifier = self._tracker.start(directory, saved, first_step)
            try:
                self._tracker.remember(directory, identifier)
                while call := self._calls.get():
                    call()
                    if self._calls.empty():
                        self._tracker.send()
                self._tracker.send()
            finally:  # or the backend would show a run that goes on
                self._tracker.close(self._status)
        except Exception as error:  # of any type: it comes from another package, its network or its disk
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            log.warning("tracking with %s ends here, and the run goes on: %s", self._tracker.package, why)


def sweep_name(directory: Path) -> str | None:
    """Return the name of the sweep that a run directory is in."""
    sweep = directory.parent
    return sweep.name if (sweep / LEDGER).is_file() else None


def array(pixels: torch.Tensor) -> numpy.ndarray:
    """Return an image [3, height, width] as an array [height, width, 3]."""
    return pixels.permute(1, 2, 0).contiguous().numpy()
