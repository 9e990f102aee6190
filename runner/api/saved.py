"""A saved run: its config, its metrics, its models in plain torch, and their predictions for image files."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from runner.api.composing import Config, check_list_of_texts, compose
from runner.api.evaluation import evaluate_checkpoint, without_initial_weights
from runner.api.execution import settings_kept
from runner.config import user_code
from runner.config.errors import ABSENT, ConfigError, check, errors_under
from runner.config.limits import Range
from runner.config.user_code import UserCode
from runner.data.decode import ImageInput
from runner.data.imagefolder import EXTENSIONS, images_below
from runner.data.tabular import read_inputs
from runner.model.base import without_memory
from runner.parallel.attributes import set_values
from runner.parallel.full_state import load_module
from runner.run import Run, build_run, check_used
from runner.storage import checkpoint as stored
from runner.storage.checkpoint import chosen_checkpoint
from runner.storage.files import check_readable
from runner.storage.manifest import DamagedError, untrusted
from runner.storage.run_directory import read_result, step_of
from runner.storage.saved_run import (
    UnreadableConfigError,
    checkpoints,
    directory_of,
    saved_config,
    saved_overrides,
    warn_of_changed_code,
)
from runner.storage.signature import saved_signature
from runner.storage.state_dict import fitted
from runner.storage.value_checks import UnexpectedContentError
from runner.system.secrets import printable
from runner.tracking.event_file import EventReader
from runner.workloads.language import Language

_BATCH = 64  # images that a prediction computes at once


def load(directory: str | os.PathLike[str], overrides: Sequence[str] = (), **code: Any) -> SavedRun:
    """Return the run in `directory`, such as `outputs/classifier/2026-01-31_12-00-00-abc123`. It may still be running.

    If it was trained with code of your own, its methods need it again, as `runner.train` got it: the `overrides` that
    name files, such as `["workload=mine.py"]`, or objects, the `code`. For the model alone, `model=…` is enough.

    Raises:
        ConfigError: if there is no run whose config can be read, `directory` is a checkpoint, or there is no such file.
    """
    others = [word for word in check_list_of_texts(overrides) if not user_code.typed_files([word])]
    why, remedy = "it names no file with code of the run", "pass changes of the config to evaluate or model"
    check(not others, "overrides", ", ".join(others), why, remedy)
    return SavedRun(Path(os.path.expanduser(directory)), user_code.passed(overrides, **code))


@dataclass(frozen=True)
class Prediction:
    """The prediction for one image, or for the row of a table that begins at a `line` of a file.

    If a file could not be read, it has only an `error`, the reason.
    """

    file: str
    label: str = ""
    """The name of the most probable class."""
    probability: float = 0.0
    error: str = ""
    top: tuple[tuple[str, float], ...] = ()
    """The most probable classes, as many as were asked for, and their probabilities; the first is that above."""
    line: int = 0
    values: Mapping[str, float] = field(default_factory=dict)
    """The predicted numbers of a row, by the name of the target and in the units of the data."""


class SavedRun:
    """The run in a run directory. Nothing is written to it.

    `choice` is a checkpoint: `best` (best evaluation), `last` (newest intact), or the step at which it was saved. All
    methods that take it raise a `ConfigError` if there is no such checkpoint, if it is damaged, or if it does not suit
    what is asked for. `overrides` are changes of the run's config, such as `["parallel=single", "data.root=…"]`.
    """

    def __init__(self, directory: Path, code: UserCode | None = None):
        run, step = directory_of(directory), step_of(directory)
        remedy = f"name the run, {run}, and choose the checkpoint {step} (--checkpoint {step})"
        check(run == directory, "directory", str(directory), "it is a checkpoint, and not a run", remedy)
        try:
            values = saved_config(directory).values
        except UnreadableConfigError as error:
            remedy = "name a run directory: outputs/NAME/RUN"
            raise ConfigError("directory", str(directory), error.why, remedy) from None
        self.directory, self._code = directory, code or UserCode()
        self.config = Config(values, saved_overrides(directory))

    def __repr__(self) -> str:
        return f"SavedRun({str(self.directory)!r})"

    @property
    def result(self) -> dict[str, Any]:
        """The content of `result.json` (see `runner.Result`); empty if the run has not ended or the file is damaged."""
        return read_result(self.directory)

    @property
    def steps(self) -> list[int]:
        """The steps of the checkpoints, in increasing order."""
        return [int(path.name.removeprefix("step_")) for path in checkpoints(self.directory)]

    def checkpoint(self, choice: str | int = "best") -> Path:
        """Return the path of a checkpoint."""
        return chosen_checkpoint(self.directory, choice)

    def curves(self) -> dict[str, dict[int, float]]:
        """Return the scalars that the run logged to TensorBoard: for each tag, a dict from steps to values."""
        return EventReader(self.directory).read()

    def weights(self, choice: str | int = "best") -> dict[str, torch.Tensor]:
        """Return the tensors of the model by name, on the CPU: the averaged weights, if the run averages them."""
        checkpoint = self._read(choice, stored.load)
        return checkpoint.ema or checkpoint.tensors

    def signature(self, choice: str | int = "best") -> dict[str, Any]:
        """Return a description of the model's inputs and outputs (see `Workload.signature`); empty if there is none."""
        return self._read(choice, saved_signature)

    def model(self, choice: str | int = "best", overrides: Sequence[str] = ()) -> torch.nn.Module:
        """Return the model of a checkpoint as a plain module, on the CPU and in evaluation mode.

        With `precision=64`, the parameters are float64. For an ensemble, the first member is returned. The data is
        needed only for workloads without a signature.
        """
        step = self._step(choice)
        checkpoint, path = self._read(step, stored.load), self.checkpoint(step)
        weights = checkpoint.ema or checkpoint.tensors
        with settings_kept(), self._given(overrides):
            run, signature = self.on_one_device(step, overrides), self.signature(step)
            parts = ("model",) if {"model"} & {*user_code.given().names()} else ("model", "workload")
            of_model = {part: name for part, name in run.code.items() if part in parts}
            user_code.check_given(of_model, str(self.directory), "directory")
            if "inputs" in signature:  # before memory is allocated: the checkpoint may be anybody's
                _check_fits(_without_memory(lambda: run.workload.saved_model(signature), path), weights, path)
            model = run.precision.convert(run.workload.saved_model(signature))
            warn_of_changed_code(self.directory)
            _check_fits(model, weights, path)
            try:
                load_module(model, weights, "the model")
                attributes = checkpoint.state.get("attributes", {})
                own = {name[2:]: value for name, value in attributes.items() if name.startswith("0.")}
                set_values(model, own, weights)
            except UnexpectedContentError as error:
                raise untrusted(path, f"the hashes are correct, but the content is not: {error}") from None
        model.eval()  # which may be a method of the user's that returns nothing
        return model

    def on_one_device(self, choice: str | int = "best", overrides: Sequence[str] = ()) -> Run:
        """Return a run, not yet prepared, with the config of a checkpoint on one CPU without tracking."""
        plain = ["parallel=single", "device=cpu", "tracking=none", *without_initial_weights(self.config)]
        if "record_video" in (self.config.get("workload") or {}):  # of evaluations; drawing may be impossible here
            plain.append("workload.record_video=false")
        run = build_run(dict(compose([f"resume={self.checkpoint(choice)}", *plain, *overrides])))
        check_used(run, overrides)
        return run

    @property
    def classes(self) -> list[str]:
        """The names of the classes, in the order of the model's outputs; empty if the newest checkpoint has none."""
        return self.signature("last").get("classes", [])

    def evaluate(
        self, choice: str | int = "best", overrides: Sequence[str] = (), split: str | None = None
    ) -> dict[str, float]:
        """Evaluate a checkpoint, and return a dict from TensorBoard tags to the values of the metrics.

        On the device of the run and without overrides, the metrics equal, to the last bit, those that the run computed
        at the step of the checkpoint. Normalization and columns are those of the checkpoint.

        Args:
            choice: the checkpoint.
            overrides: changes of the run's config.
            split: `train`, `val`, `test` or `all`; None for the held-out samples. If `overrides` name other data, None
                is all of it, or `val` if it has a directory for each split.
        """
        with settings_kept(), self._given(overrides):
            return evaluate_checkpoint(self.checkpoint(choice), overrides, split).metrics

    def predict(
        self,
        files: Sequence[str | os.PathLike[str]] | str | os.PathLike[str],
        choice: str | int = "best",
        top: int = 1,
    ) -> list[Prediction]:
        """Return a prediction for each image in `files`: paths of images, and of directories with images at any depth.

        The images are read as in the run's evaluation. If one cannot be read, its prediction has an `error`. `top` is
        the number of the most probable classes in a prediction. Of a run on a CSV file, `files` are CSV files with the
        same inputs, which need no targets, and there is a prediction for each row.
        """
        check(top >= 1, "top", top, "at least the most probable class is predicted", "top=5, for example")
        step = self._step(choice)
        why, remedy = "the run has trained a language model", "predict RUN --prompt TEXT, or load(RUN).generate(TEXT)"
        check("text" not in self.signature(step), "FILES", ABSENT, why, remedy)
        if self.signature(step).get("columns"):
            named = [files] if isinstance(files, str | os.PathLike) else files
            return [each for file in named for each in self._predicted_rows(Path(file), step)]
        inputs, classes = self.image_input(step), self.signature(step)["classes"]
        paths = image_files([files] if isinstance(files, str | os.PathLike) else files)
        model = self.model(step)
        predictions: list[Prediction] = []
        for start in range(0, len(paths), _BATCH):
            images: dict[str, torch.Tensor] = {}
            found: dict[str, Prediction] = {}
            for file in paths[start : start + _BATCH]:
                try:
                    images[file] = inputs.read(file)
                except Exception as error:  # decoders may raise anything for a damaged file
                    found[file] = Prediction(file, error=printable(f"{type(error).__name__}: {error}"))
            if images:
                with torch.no_grad():
                    outputs = model(inputs.normalized(torch.stack([*images.values()])))
                    values, indices = outputs.softmax(1).topk(min(top, len(classes)))
                for file, probabilities, labels in zip(images, values.tolist(), indices.tolist(), strict=True):
                    best = tuple((printable(classes[i]), p) for i, p in zip(labels, probabilities, strict=True))
                    found[file] = Prediction(file, *best[0], top=best)
            predictions += [found[file] for file in paths[start : start + _BATCH]]
        return predictions

    def generate(
        self,
        prompt: str,
        choice: str | int = "best",
        tokens: int = 200,
        temperature: float = 0.8,
        top_k: int | None = None,
        seed: int = 0,
    ) -> str:
        """Return the text with which a language model continues `prompt`; it ends early where a document ends.

        Args:
            prompt: the beginning of the text, which is not part of the result.
            choice: the checkpoint.
            tokens: the number of tokens to draw, one after another.
            temperature: divides the logits; 0 takes the most probable token.
            top_k: if given, only the k most probable tokens are drawn.
            seed: determines what is drawn.
        """
        whole, real = (int,), (int, float)
        for name, kinds, got, limits in (
            ("tokens", whole, tokens, Range(least=1)),
            ("temperature", real, temperature, Range(least=0)),
            ("top_k", whole, 1 if top_k is None else top_k, Range(least=1)),
            ("seed", whole, seed, Range(least=0, below=2**63)),
        ):
            ok = isinstance(got, kinds) and not isinstance(got, bool) and got in limits
            check(ok, name, got, f"it must be a {'whole ' * (kinds is whole)}number {limits}", "choose another")
        check(isinstance(prompt, str), "prompt", prompt, "it is no text", "pass a str")
        step = self._step(choice)
        signature = self.signature(step)
        why = "the run has not trained a language model"
        check("text" in signature, "directory", str(self.directory), why, "name a run of workload=language")
        model = self.model(step)
        with self._given(()):
            workload = self.on_one_device(step).workload
        assert isinstance(workload, Language)
        sampling = {"count": tokens, "temperature": temperature, "top_k": top_k, "seed": seed}
        return workload.continuation(model, prompt, signature, **sampling)

    def _predicted_rows(self, file: Path, step: int) -> list[Prediction]:
        signature, delimiter = self.signature(step), (self.config.get("data") or {}).get("delimiter") or ","
        check_readable("FILES", file)
        why = f"the run predicts {', '.join(signature['targets'])} from the columns of tables"
        check(file.suffix.lower() in (".csv", ".tsv"), "FILES", str(file), why, "name .csv or .tsv files")
        check(file.is_file(), "FILES", str(file), "there is no such file", "name .csv or .tsv files")
        with errors_under("FILES"):
            inputs, lines = read_inputs(file, signature["columns"], delimiter)
        scale = {
            part: [torch.tensor(part_scale[key], dtype=torch.float64) for key in ("mean", "std")]
            for part, part_scale in signature["scale"].items()
        }
        model = self.model(step)
        like = next((each.dtype for each in model.parameters()), torch.float32)
        with torch.no_grad():
            outputs = model(((inputs - scale["inputs"][0]) / scale["inputs"][1]).float().to(like)).double()
        values = (outputs * scale["targets"][1] + scale["targets"][0]).tolist()
        named = [dict(zip(signature["targets"], row, strict=True)) for row in values]
        return [Prediction(str(file), line=line, values=row) for line, row in zip(lines, named, strict=True)]

    def image_input(self, choice: str | int = "best") -> ImageInput:
        """Return the transform that turns images into inputs of the model, as in the evaluation of the run."""
        signature = self.signature(choice)
        why = "its checkpoint does not say how images are read"
        remedy = "name a run that classifies square images; runner evaluate takes all runs, runner play those of agents"
        remedy += '; runner.load(RUN, ["workload=mine.py"]).model("best")(inputs) predicts with a network of your own'
        check(signature.get("image") is not None, "directory", str(self.directory), why, remedy)
        return ImageInput(**signature["image"])

    def _given(self, overrides: Sequence[str]) -> AbstractContextManager[UserCode]:
        """Return a context in which the code of the run is given; that of a subcommand is, as it is typed."""
        files = user_code.typed_files(overrides) or self._code.files or user_code.given().files
        return user_code.using(UserCode(self._code.objects, files))

    def _read(self, choice: str | int, read: Callable[[Path], Any]) -> Any:
        """Return what `read` reads from a checkpoint. A damaged one is refused."""
        path = self.checkpoint(choice)
        try:
            return read(path)
        except DamagedError as error:
            raise ConfigError("checkpoint", choice, str(error), "choose another checkpoint of the run") from None

    def _step(self, choice: str | int) -> int:
        """Return the step of the checkpoint that `choice` selects now: `best` and `last` change during a run."""
        return int(self.checkpoint(choice).name.removeprefix("step_"))


def image_files(paths: Sequence[str | os.PathLike[str]]) -> list[str]:
    """Return `paths`, with each directory replaced by the sorted paths of its images at any depth but hidden ones."""
    found: list[str] = []
    for path in map(Path, paths):
        text, suffixes = printable(str(path)), " ".join(EXTENSIONS)
        check_readable("FILES", path)
        check(path.exists(), "FILES", text, "there is no such file or directory", "name images, or a directory of them")
        if not path.is_dir():
            found.append(str(path))
            continue
        images, _ = images_below(path, "FILES")
        check(bool(images), "FILES", text, "there are no images in this directory", f"name one with {suffixes}")
        found += images
    check(bool(found), "FILES", list(paths), "there is nothing to predict", "name images, or a directory of them")
    return found


def _without_memory(build: Callable[[], torch.nn.Module], path: Path) -> torch.nn.Module | None:
    """Return the network that `build` creates, on the meta device; None if a library cannot build the network there."""
    try:
        return without_memory(build)
    except ConfigError:
        raise
    except ValueError as error:
        why = f"its network cannot be built for its inputs: {error}"
        raise ConfigError("checkpoint", str(path), why, "choose another checkpoint of the run") from None
    except Exception:  # of any type: some libraries compute with the values of tensors while they build a network
        return None


def _check_fits(model: torch.nn.Module | None, weights: Mapping[str, torch.Tensor], path: Path) -> None:
    """Check that the names and the shapes of `weights` are those of `model`. If `model` is None, do nothing."""
    if model is None:
        return
    buffers = fitted(model, weights, weights)  # whose shapes are data
    wanted, found = (
        {name: getattr(each, "shape", "extra state") for name, each in values.items() if name not in buffers}
        for values in (model.state_dict(), weights)
    )
    others = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    why = f"its tensors are not those of the network in its config ({', '.join(others[:3])})"
    remedy = "choose another checkpoint of the run, or give the network with which it was trained, if it is your own"
    check(not others, "checkpoint", str(path), why, remedy)
