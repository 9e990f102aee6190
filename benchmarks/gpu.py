"""ResNet50 on one GPU: images per second, compared with a plain loop and with the limits of the device.

`python -m benchmarks.gpu`: 224×224, bfloat16, channels_last, compiled, batch size 256. The limits are computed from a
measured matrix product and a measured copy, not from the data sheet.
"""

from __future__ import annotations

import sys
import time

import torch

from benchmarks.resnet import Setting, compare

GPU = Setting(size=224, batch=256, steps=100, warmup=20, dtype=torch.bfloat16, compile=True, device="cuda")

TRAINING_FLOPS = 3 * 2 * 4.09e9
"""FLOPs per image: 4.09 G multiply-adds forward (ResNet50 v1.5 at 224×224; He et al., 2016), twice that backward."""


def seconds(work, repeats: int = 20) -> float:
    """Return the median time of `work` on the device, in seconds."""
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return sorted(times)[repeats // 2]


def flops_per_second(side: int = 8192) -> float:
    """Return the bfloat16 FLOPs per second of a product of two square matrices with `side` rows."""
    a, b = (torch.randn(side, side, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * side**3 / seconds(lambda: a @ b)


def bytes_per_second(size: int = 2**30) -> float:
    """Return the bytes read and written per second by a copy of `size` bytes on the device."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source))


def traffic_per_image() -> float:
    """Return the bytes of memory traffic for training on one image in bfloat16, without reuse between operations.

    A convolution moves its input and its output three times: in the forward pass, for the gradient of the input, and
    for the gradient of the weight. In the forward pass, batch normalization with its activation reads its input for the
    statistics, reads its input again to normalize it, and writes its output. The backward pass moves as many bytes as
    this forward pass.
    """
    from torchvision.models import resnet50

    elements = [0]

    def count(module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        is_convolution = isinstance(module, torch.nn.Conv2d)
        elements[0] += 3 * (inputs[0].numel() + output.numel()) if is_convolution else 3 * 2 * output.numel()

    model = resnet50(weights=None)
    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d | torch.nn.BatchNorm2d):
            module.register_forward_hook(count)
    with torch.no_grad():
        model.eval()(torch.zeros(1, 3, GPU.size, GPU.size))
    return 2.0 * elements[0]


def main() -> None:
    """Print the limits, then measure the loops."""
    if not torch.cuda.is_available():
        sys.exit("benchmarks.gpu needs a CUDA device; `python -m runner doctor` lists the devices")
    if "--run" not in sys.argv:
        print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
        print(f"arithmetic limit: {flops_per_second() / TRAINING_FLOPS:,.0f} images/s")
        print(f"bandwidth limit:  {bytes_per_second() / traffic_per_image():,.0f} images/s")
    compare("benchmarks.gpu", "gpu", GPU)


if __name__ == "__main__":
    main()
