"""`--summary`: a table of the network, without training it."""

from __future__ import annotations

from runner.config.errors import ABSENT, check
from runner.model.base import without_memory
from runner.run import Run


def print_model_table(run: Run) -> None:
    """Print a table of the network that `run` would train.

    Raises:
        ConfigError: if the data or the network is refused, or if the workload does not say what the inputs are.
    """
    from runner.model.table import formatted, rows_of  # imported here: config errors are reported before torch is

    run.workload.prepare()
    shape = run.workload.input_shape()
    why = f"{type(run.workload).__name__} does not say of what shape the inputs of its network are"
    check(shape is not None, "--summary", ABSENT, why, "leave it out, or define input_shape()")
    assert shape is not None
    print(formatted(rows_of(without_memory(run.workload.build_model), shape)))
    print(f"for one input of {'×'.join(map(str, shape))}; FLOPs are those of a forward pass")
