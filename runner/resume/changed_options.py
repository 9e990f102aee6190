"""Which options of a run may change when it is resumed, and with which options it is another run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from runner.config.errors import check
from runner.config.options import option_name
from runner.config.overrides import LOCATION_KEYS
from runner.config.schema import load_class
from runner.parallel.base import Parallel
from runner.system.secrets import redacted_values

_ESSENTIAL = ("seed", "batch_size", "workload", "model", "data", "env")
"""Keys that must not change on resume, as the type of the optimizer; but options in `may_change_on_resume` may."""

_HOW = (
    *(*LOCATION_KEYS, "tracking", "parallel", "device", "accumulation", "compile", "profiler", "proof"),
    *("channels_last", "deterministic", "log_every", "eval_every", "save_every", "keep", "stop.max_time"),
    *("optimizer.fused", "data.changed"),
)
"""Keys and groups that determine how a run is computed and what is written: they make no other run."""

_AT_THE_START = ("model.weights", "model.reset_head")
"""Options in `may_change_on_resume` that a resumed run no longer reads: they may be taken back, but not set."""

_DISTINCT = (*_AT_THE_START, "workload.env_steps", "workload.epsilon_fraction", "data.root", "data.file")
"""Options in `may_change_on_resume` that distinguish runs: what they begin with, their schedules, their data."""


class Difference(NamedTuple):
    """An option whose value in the config of an earlier run differs from its value now."""

    key: str
    then: Any
    now: Any
    is_essential: bool
    """Whether a run cannot be resumed with the other value."""

    def __str__(self) -> str:
        return f"{self.key}: {self.then} then, {self.now} now"


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> list[Difference]:
    """Return the options by which a session with the config `now` is another run than the one with the config `saved`.

    How the run is computed is not compared: `_HOW`, and the options in `may_change_on_resume`.

    Raises:
        ConfigError: if a config names a class that cannot be loaded.
    """
    saved = {"repeat": 0, **saved}  # which older runs do not have
    keys = [key for key in dict.fromkeys((*_ESSENTIAL, "optimizer", *now, *saved)) if saved.get(key) != now.get(key)]
    saved, now = (redacted_values({key: each.get(key) for key in keys}) for each in (saved, now))
    return [found for key in keys if key not in _HOW or key == "parallel" for found in _compared(key, saved, now)]


def check_resumable(saved: Mapping[str, Any], now: Mapping[str, Any], source: str) -> None:
    """Check that the run or checkpoint `source` with the config `saved` can be continued with the config `now`.

    Raises:
        ConfigError: if an essential option differs: see `Difference`.
    """
    found = [str(each) for each in differences(saved, now) if each.is_essential]
    why, remedy = f"another run: {'; '.join(found[:5])}", "take these back, or start a new run, without resume"
    check(not found, "resume", source, why, remedy)


def _compared(key: str, saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[Difference]:
    nodes = (config.get(key) for config in (saved, now))
    then, today = (dict(node) if isinstance(node, Mapping) else {"": node} for node in nodes)
    one, other = then.get("_target_"), today.get("_target_")
    saved_name, name_now = (option_name(key, node) if node.get("_target_") else None for node in (then, today))
    if saved_name == name_now:  # classes of a package of somebody else
        saved_name, name_now = one, other
    if key == "parallel":
        classes = [load_class(name, Parallel) for name in (one, other) if name]
        if one != other and any(cls.difference for cls in classes):
            yield Difference(key, saved_name, name_now, False)
    elif one != other:
        yield Difference(key, saved_name, name_now, key in (*_ESSENTIAL, "optimizer"))
    else:
        free = getattr(load_class(one, object), "may_change_on_resume", ()) if one else ()
        for name in dict.fromkeys((*then, *today)):
            full = f"{key}.{name}" if name else key
            is_same_run = full in _HOW or (name in free and full not in _DISTINCT)
            if then.get(name) != today.get(name) and not is_same_run:
                may_change = name in free and not (full in _AT_THE_START and today.get(name))
                is_kind = key == "optimizer" and _kinds(then).get(name) != _kinds(today).get(name)
                is_essential = is_kind or (key in _ESSENTIAL and not may_change)
                yield Difference(full, then.get(name), today.get(name), is_essential)


def _kinds(optimizer: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of the options `name` and `groups` decides on the classes of `torch.optim`, and so on their state."""
    named = {
        pattern: [group.get(key) for key in ("optimizer", "name")]
        for pattern, group in (optimizer.get("groups") or {}).items()
        if isinstance(group, Mapping) and {"optimizer", "name"} & {*group}
    }
    return {"name": optimizer.get("name"), "groups": named}
