"""Functions that recognize torch's errors by their messages (of torch 2.11 to 2.14): they have no exception types."""

from __future__ import annotations

import os
import re
import traceback
from typing import Any

import torch

_FAILED_HERE = re.compile("nccl(unhandledcudaerror|systemerror|internalerror|invalidargument|invalidusage)")
"""NCCL's codes of errors in the process that reports them. `ncclRemoteError` is the one that another process causes."""

NO_GRADIENT = "compute it from the outputs, without detach(), item(), argmax(), NumPy or torch.no_grad()"
"""What to do about a loss that does not depend on the weights."""


def is_lost_peer(error: BaseException) -> bool:
    """Return whether `error` means that another rank has exited, or has not reached a collective before the timeout.

    NCCL and the stores raise `torch.distributed.DistError` (https://github.com/pytorch/pytorch/pull/107651), but gloo
    raises a RuntimeError (https://github.com/pytorch/pytorch/issues/14433, closed).
    """
    text = str(error).lower()
    names = ("gloo", "nccl", "pair closure")
    lost = isinstance(error, torch.distributed.DistError) or any(name in text for name in names)
    return lost and _FAILED_HERE.search(text) is None


def nondeterministic_operation(error: BaseException) -> str:
    """Return the message of `error`, without torch's advice, if an operation has no deterministic form; else ""."""
    text = str(error)
    if "does not have a deterministic implementation" not in text and "not deterministic" not in text:
        return ""
    return text.splitlines()[0].split(". You can turn off")[0]


def refusal(error: BaseException) -> tuple[str, Any, str, str] | None:
    """Return the key, value, reason and remedy of a config error in place of `error`; None for other errors."""
    if reads := value_read(error):
        return reads
    if "find_unused_parameters" in str(error):
        why = "a step does not use all parameters, and DistributedDataParallel waits for the gradient of each"
        return "parallel.find_unused", False, why, "parallel.find_unused=true"
    if "mark a variable ready only once" in str(error):
        why = "a backward pass within another one, as of checkpoint(…, use_reentrant=True), hides what is used from DDP"
        return "parallel.find_unused", "auto", why, "parallel.find_unused=false, or checkpoint(…, use_reentrant=False)"
    if "mixed torch.Tensor and DTensor" in str(error):
        why = "the code reads a parameter that FSDP has divided, outside of the forward pass of the module that has it"
        remedy = "read it by its name (model.head.weight) or in model.parameters(), or parallel=ddp"
        return "parallel", "fsdp", why, remedy
    if "fsdp::chunk_cat" in str(error):
        return "parallel", "fsdp", "FSDP takes no sparse gradients", "parallel=ddp, or leave out Embedding(sparse=True)"
    if isinstance(error, IndexError) and (target := re.fullmatch(r"Target (-?\d+) is out of bounds\.", str(error))):
        remedy = "number the classes from 0, and let the network have an output for each; -100 is ignored"
        return "data", int(target[1]), "the network has no output for this class", remedy
    if shapes := re.search(
        r"(?i)target size \(torch\.Size\((.+?)\)\) .*input size \(torch\.Size\((.+?)\)\)", str(error)
    ):
        got, remedy = f"outputs {shapes[2]}, targets {shapes[1]}", "for example outputs.squeeze(1), or targets[:, None]"
        return "loss", got, "this loss compares tensors of one shape", f"change the network or the targets: {remedy}"
    integer = r"\b(Byte|Char|Short|Int|Long|Bool|unsigned char|signed char|short|int|long|bool)"
    if found := re.search(rf"(?:mat1 and mat2 must have the same dtype|Input type).*?{integer}", str(error)):
        remedy = "convert inputs that are no indices: inputs.float(), of images divided by 255"
        return "data", found[1], "a layer with floating-point weights cannot be called with integers", remedy
    types = r"(?:m(?:at)?1 and m(?:at)?2 .*same dtype, but got:?|Input type|expected scalar type) (.*)"
    if (found := re.search(types, str(error))) and re.search("(?i)double|half|bfloat16", found[1]):
        remedy = "let all be float32, or float64 with precision=64, or convert in forward: x.to(self.weight.dtype)"
        return "model", found[1], "a layer's weights have another type than its inputs", remedy
    if "result type Float can't be cast" in str(error) or re.search(rf"Found dtype {integer} but expected", str(error)):
        why = "the loss, or an operation of the network, gives floating-point numbers"
        return "data", "integers", why, "pass targets.float(), or call inputs.float() in the network"
    if isinstance(error, TypeError) and (call := re.fullmatch(r"(.+\.forward\(\)) missing .* argument.*", str(error))):
        remedy = "let the data have one tensor as input, and forward divide it: x[:, :5], x[:, 5:]"
        return "model", call[1], "a network is called with a single input", remedy
    if "does not require grad and does not have a grad_fn" in str(error):
        return "loss", "no gradient", "it does not depend on the weights", NO_GRADIENT
    if "Trying to backward through the graph a second time" in str(error):
        why = "the code calls it, too, or keeps a tensor with its graph from one step to the next"
        return "loss", "backward()", why, "return the loss alone, and detach() what is kept"
    if unsupported := re.search(r"(\w+)`? does not support (complex parameters|sparse gradients)", str(error)):
        why = f"it does not support {unsupported[2]}"
        return "optimizer", unsupported[1].strip("_"), why, "optimizer=sgd optimizer.fused=false takes them"
    return None


def value_read(error: BaseException) -> tuple[str, Any, str, str] | None:
    """Return what `refusal` returns for an error of a fake tensor whose value was asked for; None for other errors."""
    if type(error).__name__ not in ("DataDependentOutputException", "DynamicOutputShapeException"):
        return None
    places = [f"{each.filename}:{each.lineno}" for each in traceback.extract_tb(error.__traceback__)]
    where = next((place for place in reversed(places) if "/torch/" not in place and "/runner/" not in place), "")
    why = f"a plan computes with tensors without values, and the code asks for one ({error.args[0]}, {where})"
    return (
        "model",
        "a value of a tensor",
        why,
        "run a step instead (steps=1), or let no shape and no branch depend on values",
    )


def compiler_refusal(error: BaseException, whole_step: bool) -> tuple[str, str] | None:
    """Return why torch.compile raised `error`, with the place in the code, and a remedy; None for other errors."""
    text, instead = str(error), "set compile=true" if whole_step else "set compile=false"
    if isinstance(error, AssertionError) and "expected size" in text and "stride" in text:
        # Seen with torch 2.11 on CUDA, in convolutions of images of 1×1, which have both memory formats at once.
        why = "torch's compiler expects another memory format of a result than the operation has"
        return why, f"set channels_last=false, or {instead}"
    if not type(error).__module__.startswith(("torch._dynamo", "torch._inductor")) and "\nfrom user code:" not in text:
        return None
    if "InvalidCxxCompiler" in text:
        return "torch finds no C++ compiler", "install one, such as g++, or set compile=false"
    why = " ".join(text.strip().splitlines()[: 2 if "raised:\n" in text else 1])
    places = re.findall(r'File "([^"]+)", line (\d+)', text)
    if places and ("/torch/optim/" in places[-1][0] or places[-1][0].endswith("/runner/torch_optimizer.py")):
        return f"torch cannot compile this optimizer: {why}", f"choose another optimizer, or {instead}"
    libraries = ("/site-packages/", os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(__file__)))
    if own := [place for place in places if not any(each in place[0] for each in libraries)]:
        return f"torch cannot compile it: {why} ({':'.join(own[-1])})", f"change what is at this place, or {instead}"
    return f"torch cannot compile it: {why}", instead


_OUT_OF_MEMORY = re.compile(
    "out[ _]of[ _]memory"  # torch, the CUDA runtime and driver, NCCL, MPS
    "|(can't|cannot) allocate memory|DefaultCPUAllocator: not enough memory|bad_alloc"  # torch, Linux, C++
    "|_ALLOC(ATION)?_FAILED"  # CUBLAS_STATUS_ALLOC_FAILED and those of cuDNN, cuSPARSE, cuSOLVER and cuFFT
    "|Failed to CUDA (calloc|malloc)"  # NCCL
    "|unable to find an engine to execute"  # cuDNN, if no algorithm has room: github.com/pytorch/pytorch/issues/108645
    "|SIGKILL",  # of another process: probably Linux's OOM killer
    re.IGNORECASE,
)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether `error` was raised because there is not enough memory, on the host or on a device."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or _OUT_OF_MEMORY.search(str(error)) is not None


def is_single_value_batch_norm(error: BaseException) -> bool:
    """Return whether batch normalization raised `error` because a channel has a single value and thus no variance."""
    return "Expected more than 1 value per channel" in str(error)


def is_out_of_shared_memory(error: BaseException) -> bool:
    return "unable to allocate shared memory" in str(error)
