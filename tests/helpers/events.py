"""Read the events in a run directory with TensorBoard."""

from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import google_crc32c
from tensorboard import context
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.compat.tensorflow_stub import pywrap_tensorflow
from tensorboard.plugins import base_plugin
from tensorboard.plugins.hparams import api_pb2, backend_context, get_experiment, list_session_groups


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


def hparams_tab(root: Path) -> SimpleNamespace:
    """Return what the HPARAMS tab shows: its `rows`, the tags of its `metrics`, and by the name of a hyper-parameter,
    its type in `types` and the values to choose from in `values`."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(root)).Reload()
    plugin = base_plugin.TBContext(data_provider=MultiplexerDataProvider(multiplexer, str(root)))
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
