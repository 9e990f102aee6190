"""The base class of trackers that call other packages, which may be slow, or fail."""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from runner.config.errors import check
from runner.config.overrides import text_override
from runner.storage.files import read_regular, write_text
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
    """The base class of trackers that call another package, such as wandb, in a separate thread.

    Training does not wait for the calls: they are put into a queue, and the thread makes them in order. If a call
    fails, the queue is full, or `close` has waited for `patience` seconds, a warning is logged, and the run goes on
    without tracking. Animations are not logged.

    A file in the run directory has the identifier of the run in the backend, which a resumed run continues. The points
    of the steps that it repeats after its checkpoint are logged again, because those in a remote database cannot be
    removed: they have the same values, except for measurements of time.
    """

    package: ClassVar[str]
    """The name of the package, and of the extra that installs it."""
    patience: ClassVar[float] = 60.0
    """Seconds that `close` waits for the remaining calls, including `finish`."""

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

    def check(self) -> None:
        remedy = f"pip install {self.package}"
        check(is_installed(self.package), "tracking", self.package, "it is not installed", remedy)

    @abstractmethod
    def start(self, directory: Path, identifier: str) -> str:
        """Begin to track a new run, or continue the one with `identifier`; return the run's identifier."""

    @abstractmethod
    def log_scalars(self, values: dict[str, float], step: int) -> None:
        """Log scalars by tag."""

    @abstractmethod
    def log_images(self, images: dict[str, numpy.ndarray], step: int) -> None:
        """Log RGB images, uint8 [height, width, 3], by tag."""

    @abstractmethod
    def log_texts(self, texts: dict[str, str]) -> None:
        """Log texts by tag."""

    @abstractmethod
    def log_config(self, config: dict[str, float | str | bool]) -> None:
        """Log the whole config, by dotted key."""

    @abstractmethod
    def finish(self, done: bool) -> None:
        """End the session, also after an error; `done` is whether the run has reached its last step."""

    def open(self, directory: Path, first_step: int) -> None:
        self._calls: queue.Queue[Callable[[], Any] | None] = queue.Queue(MAX_WAITING)
        self._failed, self._started, self._done = False, False, False
        self._thread = threading.Thread(target=self._make_calls, name=f"tracking {self.package}", daemon=True)
        self._thread.start()
        self._call(lambda: self._start(directory))

    def scalars(self, values: dict[str, float], step: int) -> None:
        self._call(lambda: self.log_scalars(values, step))

    def images(self, images: dict[str, torch.Tensor], step: int) -> None:
        stills = {tag: pixels.cpu() for tag, pixels in images.items() if pixels.dim() == 3}
        arrays = {tag: pixels.permute(1, 2, 0).contiguous().numpy() for tag, pixels in stills.items()}
        self._call(lambda: self.log_images(arrays, step))

    def texts(self, texts: dict[str, str], step: int) -> None:
        self._call(lambda: self.log_texts(texts))

    def hyperparameters(self, config: dict[str, float | str | bool], typed: dict[str, float | str | bool]) -> None:
        self._call(lambda: self.log_config(config))

    def close(self, done: bool) -> None:
        self._done, deadline = done, time.monotonic() + self.patience
        try:
            self._calls.put(None, timeout=self.patience)
            self._thread.join(max(0.0, deadline - time.monotonic()))
        except queue.Full:
            log.debug("%s takes no more calls", self.package)
        if self._thread.is_alive():
            self._fail(f"it has not answered for {self.patience:g} s")

    def _start(self, directory: Path) -> None:
        file = directory / f"{self.package}_run.txt"
        saved = read_regular(file, MAX_IDENTIFIER_BYTES).decode().strip() if file.exists() else ""
        identifier = self.start(directory, saved)
        self._started = True
        write_text(file, identifier + "\n")

    def _call(self, call: Callable[[], Any]) -> None:
        try:
            self._calls.put_nowait(call)
        except queue.Full:
            self._fail(f"{MAX_WAITING:,} calls are waiting")

    def _make_calls(self) -> None:
        while (call := self._calls.get()) is not None:
            if not self._failed:
                self._make(call)
        if self._started:  # also after an error, or the backend would show a run that goes on
            self._make(lambda: self.finish(self._done))

    def _make(self, call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:  # of any type: it comes from another package, its network or its disk
            self._fail(f"{type(error).__name__}: {error}")

    def _fail(self, why: str) -> None:
        if not self._failed:
            self._failed = True
            log.warning("tracking with %s ends here, and the run goes on: %s", self.package, why)
