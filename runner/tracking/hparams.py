"""The rows and columns of TensorBoard's HPARAMS tab, as summaries for an event file."""

# pyright: reportAttributeAccessIssue=false
# (protobuf creates its classes at run time)

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from tensorboard.plugins.hparams import metadata, plugin_data_pb2
from tensorboard.plugins.hparams.api_pb2 import (
    DATA_TYPE_BOOL,
    DATA_TYPE_FLOAT64,
    DATA_TYPE_STRING,
    STATUS_SUCCESS,
    Experiment,
    MetricName,
)
from torch.utils.tensorboard.summary import Summary


def row_start(values: dict[str, float | str | bool]) -> Summary:
    """Return the summary that starts a run's row in TensorBoard's HPARAMS tab, with its hyperparameters by name.

    TensorBoard infers the columns from all runs, unless the summary of a sweep sets them (see `columns`).
    """
    start = plugin_data_pb2.SessionStartInfo(start_time_secs=time.time())
    for name, value in values.items():
        kind = "bool" if isinstance(value, bool) else "string" if isinstance(value, str) else "number"
        setattr(start.hparams[name], f"{kind}_value", value)
    return _hparams(metadata.SESSION_START_INFO_TAG, session_start_info=start)


def row_end() -> Summary:
    """Return the summary that marks a run as successful in TensorBoard's HPARAMS tab."""
    end = plugin_data_pb2.SessionEndInfo(status=STATUS_SUCCESS, end_time_secs=time.time())
    return _hparams(metadata.SESSION_END_INFO_TAG, session_end_info=end)


def columns(values: dict[str, list[float | str | bool]], metrics: Iterable[str]) -> Summary:
    """Return the summary that sets the columns of the HPARAMS tab for all runs in TensorBoard's log directory.

    Args:
        values: a dict from the name of each hyperparameter to a list of all distinct values that it has in the runs; no
            list is empty. TensorBoard hides runs with a text or a boolean that is not in the list.
        metrics: the tags of the metrics, in the order of their columns.
    """
    experiment = Experiment(time_created_secs=time.time())
    for name, each in values.items():
        column = experiment.hparam_infos.add(name=name, differs=len(each) > 1)
        if any(isinstance(value, str | bool) for value in each):
            is_bool = all(isinstance(value, bool) for value in each)
            column.type = DATA_TYPE_BOOL if is_bool else DATA_TYPE_STRING
            column.domain_discrete.extend(each)  # TensorBoard hides the rows that have none of these values
        else:
            column.type = DATA_TYPE_FLOAT64
            column.domain_interval.min_value, column.domain_interval.max_value = min(each), max(each)
    for tag in metrics:
        experiment.metric_infos.add(name=MetricName(tag=tag))
    return _hparams(metadata.EXPERIMENT_TAG, experiment=experiment)


def _hparams(tag: str, **content: Any) -> Summary:
    data = plugin_data_pb2.HParamsPluginData(version=metadata.PLUGIN_DATA_VERSION, **content)
    value = Summary.Value(tag=tag, metadata=metadata.create_summary_metadata(data), tensor=metadata.NULL_TENSOR)
    return Summary(value=[value])
