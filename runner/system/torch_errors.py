"""torch's errors that have no type of their own, told apart by their words; here alone, and nowhere else.

If torch gives them types, this file goes. Each sentence is torch's own, as of 2.11 to 2.14.
"""

from __future__ import annotations

import torch


def is_lost_peer(error: BaseException) -> bool:
    """Whether `error` says that another rank is gone, or did not reach a collective in time.

    `torch.distributed.DistError` is raised by NCCL and the stores; gloo raises a bare RuntimeError, with its own name
    or "pair closure" in it.
    """
    text = str(error).lower()
    names = ("gloo", "nccl", "pair closure")
    return isinstance(error, torch.distributed.DistError) or any(name in text for name in names)


def nondeterministic_operation(error: BaseException) -> str:
    """Torch's sentence on an operation that `torch.use_deterministic_algorithms` refuses; empty for another error."""
    text = str(error)
    if "does not have a deterministic implementation" not in text and "not deterministic" not in text:
        return ""
    return text.splitlines()[0].split(". You can turn off")[0]


def is_single_value_batch_norm(error: BaseException) -> bool:
    """Whether batch normalisation saw one value a channel, which has no variance."""
    return "Expected more than 1 value per channel" in str(error)
