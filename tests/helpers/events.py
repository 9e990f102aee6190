"""Read the events in a run directory with TensorBoard."""

# pyright: reportAttributeAccessIssue=false
# (protobuf creates its classes at run time)

import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import google_crc32c
import tensorboard_data_server
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow
from tensorboard.data import provider, server_ingester
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups
from tensorboard.util.grpc_util import ChannelCredsType


def load_events(directory: Path) -> EventAccumulator:
    sizes = dict.fromkeys(("scalars", "images", "tensors"), 0)
    # The original takes 10 ms for the images of a run.
    with mock.patch.object(pywrap_tensorflow, "crc32c", google_crc32c.value):
        return EventAccumulator(str(directory), size_guidance=sizes).Reload()


MEASURED = ("time/", "memory/")
"""Prefixes of the tags of curves that no two runs have in common."""


def scalar_curves(directory: Path, without: tuple[str, ...] = ()) -> dict[str, list[tuple[int, float]]]:
    read = load_events(directory)
    tags = [tag for tag in read.Tags()["scalars"] if not tag.startswith(without)]
    return {tag: [(point.step, point.value) for point in read.Scalars(tag)] for tag in tags}


def slow_reader(root: Path) -> Any:
    """Return TensorBoard's data of the runs below `root` with `--load_fast=false`."""
    return provider_of(multiplexer_of(root).Reload(), root)


def multiplexer_of(root: Path) -> Any:
    """Return the slow reader of a TensorBoard that is running: its method `Reload` reads what is new."""
    return EventMultiplexer().AddRunsFromDirectory(str(root))


def provider_of(multiplexer: Any, root: Path) -> Any:
    return MultiplexerDataProvider(multiplexer, str(root))


@contextmanager
def fast_reader(root: Path, reload_seconds: int = 0) -> Iterator[Any]:
    """A context manager that returns TensorBoard's data of the runs below `root` with `--load_fast=true`, the default.

    They are read once, or every `reload_seconds` again.
    """
    with tempfile.TemporaryDirectory() as scratch:
        port = Path(scratch, "port")
        options = f"--logdir={root}", f"--reload={reload_seconds or 'once'}", "--port=0", f"--port-file={port}"
        server = [tensorboard_data_server.server_binary(), *options, "--die-after-stdin"]
        with subprocess.Popen(server, stdin=subprocess.PIPE):  # whose end closes its stdin, and waits for it
            while not (port.exists() and port.read_text().endswith("\n")):
                time.sleep(0.005)
            data = server_ingester.ExistingServerDataIngester(
                f"localhost:{port.read_text().strip()}", channel_creds_type=ChannelCredsType.LOCAL
            )
            yield data.data_provider


def curves_of_runs(reader: Any) -> dict[str, dict[str, list[tuple[int, float]]]]:
    """Return the points (step, value) of each curve that `reader` shows, by run and tag."""
    found = reader.read_scalars(
        context.RequestContext(), experiment_id="", plugin_name="scalars", downsample=1000,
        run_tag_filter=provider.RunTagFilter(),
    )  # fmt: skip
    return {
        run: {tag: [(p.step, p.value) for p in points] for tag, points in tags.items()} for run, tags in found.items()
    }


def hparams_tab(root: Path, reader: Any = None) -> SimpleNamespace:
    """Return what the HPARAMS tab shows: its `rows`, the tags of its `metrics`, and by the name of a hyper-parameter,
    its type in `types` and the values to choose from in `values`; with another than the slow `reader`, if given."""
    plugin = base_plugin.TBContext(data_provider=reader or slow_reader(root))
    backend, request = backend_context.Context(plugin), context.RequestContext()
    asked = api_pb2.ListSessionGroupsRequest(start_index=0, slice_size=100, allowed_statuses=[0, 1, 2, 3])
    experiment = get_experiment.Handler(request, backend, "", api_pb2.GetExperimentRequest()).run()
    rows = [
        {
            "status": [api_pb2.Status.Name(session.status) for session in group.sessions],
            "hparams": {name: getattr(value, value.WhichOneof("kind")) for name, value in group.hparams.items()},
            "metrics": {metric.name.tag: (metric.training_step, metric.value) for metric in group.metric_values},
        }
        for group in list_session_groups.Handler(request, backend, "", asked).run().session_groups
    ]
    return SimpleNamespace(
        rows=rows,
        metrics=[info.name.tag for info in experiment.metric_infos],
        types={info.name: api_pb2.DataType.Name(info.type) for info in experiment.hparam_infos},
        values={info.name: list(info.domain_discrete) for info in experiment.hparam_infos},
    )
