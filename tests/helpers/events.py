"""What TensorBoard reads from a run directory."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def events(directory: Path) -> EventAccumulator:
    """All events of a run directory."""
    return EventAccumulator(str(directory), size_guidance=dict.fromkeys(("scalars", "images", "tensors"), 0)).Reload()


def curves(directory: Path) -> dict[str, list[tuple[int, float]]]:
    """(step, value) of every scalar in a run directory, by tag."""
    read = events(directory)
    return {tag: [(point.step, point.value) for point in read.Scalars(tag)] for tag in read.Tags()["scalars"]}
