"""Tests that each precision computes the same as a loop in plain torch: on the CPU to the bit, unless it is fused."""

import copy
import math
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace

import pytest
import torch

import runner.precision
from runner.config.errors import ConfigError
from runner.optimizer import SGD
from runner.precision import TF32, BFloat16, Double, Float16, Precision
from runner.system import accelerator

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restore_global_switches() -> Iterator[None]:
    before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cudnn.allow_tf32 = before[1]


def network(device: torch.device = CPU) -> torch.nn.Module:
    torch.manual_seed(0)
    layers = torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 36, 10)
    return torch.nn.Sequential(*layers).to(device)


def batches(device: torch.device = CPU, num_batches: int = 5) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_batches):
        inputs, targets = torch.randn(4, 3, 8, 8, generator=generator), torch.randint(0, 10, (4,), generator=generator)
        yield inputs.to(device), targets.to(device)


def sgd(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


cross_entropy = torch.nn.functional.cross_entropy
GradientHook = Callable[[int, torch.nn.Module], None]


def train(
    precision: Precision,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    max_norm: float | None = None,
    gradient_hook: GradientHook = lambda step, model: None,
    device: torch.device = CPU,
) -> list[torch.Tensor]:
    """Train five steps as the training loop does, and return the flattened weights after each step."""
    weights = []
    clip = None if max_norm is None else partial(torch.nn.utils.clip_grad_norm_, list(model.parameters()), max_norm)
    for step, (inputs, targets) in enumerate(batches(device)):
        with precision.autocast():
            loss = cross_entropy(model(inputs), targets)
        precision.backward(loss)
        gradient_hook(step, model)
        precision.step(optimizer, clip)
        assert all(parameter.grad is None for parameter in model.parameters())
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    return weights


def by_hand(
    dtype: torch.dtype | None = None,
    max_norm: float | None = None,
    gradient_hook: GradientHook = lambda step, model: None,
    device: torch.device = CPU,
    growth_interval: int = 0,
) -> tuple[list[torch.Tensor], torch.amp.GradScaler]:
    """Train the same five steps by torch's recipe, in float32 or with autocast to `dtype`, and perhaps loss scaling."""
    model, weights = network(device), []
    optimizer, scaled = sgd(model), growth_interval > 0
    scaler = torch.amp.GradScaler(device.type, init_scale=256.0, growth_interval=growth_interval or 1, enabled=scaled)
    for step, (inputs, targets) in enumerate(batches(device)):
        optimizer.zero_grad()
        with torch.autocast(device.type, dtype or torch.bfloat16, enabled=dtype is not None):
            loss = cross_entropy(model(inputs), targets)
        scaler.scale(loss).backward()
        gradient_hook(step, model)
        scaler.unscale_(optimizer)
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        weights.append(torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone())
    return weights, scaler


def run(precision: Precision, max_norm: float | None = None) -> list[torch.Tensor]:
    precision.prepare(CPU)
    model = precision.convert(network())
    return train(precision, model, sgd(model), max_norm)


def equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize(
    ("kind", "dtype", "warning"),
    [
        (Precision, None, ""),
        (BFloat16, torch.bfloat16, ""),
        (Float16, torch.bfloat16, "precision=16: cpu computes in bfloat16"),
        (TF32, None, "precision=tf32: cpu has no TF32 units"),
    ],
)
def test_on_a_cpu_each_precision_is_plain_float32_or_autocast(kind, dtype, warning, max_norm, caplog):
    precision = kind()
    weights = run(precision, max_norm)
    assert equal(weights, by_hand(dtype, max_norm)[0])
    assert weights[0].dtype == torch.float32, "parameters stay float32"
    assert dtype is None or not equal(weights, by_hand(None, max_norm)[0])
    assert warning in caplog.text
    assert torch.get_float32_matmul_precision() == "highest"
    assert (precision.scalars(), precision.num_skipped()) == ({}, 0)


@pytest.mark.parametrize("is_fast", [True, False])
def test_a_cpu_without_bfloat16_instructions_causes_a_warning(is_fast, monkeypatch, caplog):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512" if is_fast else "AVX2")
    BFloat16().prepare(CPU)
    assert ("no instructions" in caplog.text) is not is_fast


def test_64_is_refused_on_a_device_without_float64(monkeypatch):
    monkeypatch.setattr(accelerator, "has_float64", lambda device: False)
    with pytest.raises(ConfigError) as refused:
        Double().check_device(torch.device("mps"))
    assert (refused.value.key, refused.value.got) == ("precision", "64")
    assert "float64" in refused.value.why


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "highest"), ((8, 0), "high"), ((10, 0), "high")])
def test_tf32_needs_ampere(capability, expected, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    TF32().prepare(torch.device("cuda"))
    assert torch.get_float32_matmul_precision() == expected
    assert torch.backends.cudnn.allow_tf32 == (expected == "high")
    for other in (Precision(), BFloat16()):  # the jobs of a sweep share a process
        other.prepare(torch.device("cuda"))
        assert torch.get_float32_matmul_precision() == "highest"
        assert not torch.backends.cudnn.allow_tf32


def test_step_returns_the_norm_before_clipping_or_none():
    model, precision = network(), Precision()
    optimizer, parameters = torch.optim.SGD(model.parameters(), 0.0), list(model.parameters())
    inputs, targets = next(batches())
    for max_norm in (1e-3, None):
        precision.backward(cross_entropy(model(inputs), targets))
        expected = math.sqrt(sum(float(p.grad.double().square().sum()) for p in parameters if p.grad is not None))
        norm = precision.step(optimizer, max_norm and partial(torch.nn.utils.clip_grad_norm_, parameters, max_norm))
        assert norm is None if max_norm is None else float(norm) == pytest.approx(expected, rel=1e-5)  # type: ignore[arg-type]


def scaled(growth_interval: int = 2, device: torch.device = CPU) -> Float16:
    """Return `precision=16` on `device`, with float16 and loss scaling as on CUDA."""
    precision = Float16(init_scale=256.0, growth_interval=growth_interval)
    precision.prepare(device)
    if device.type == "cpu":
        precision._scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=growth_interval)
        precision._dtype = torch.float16
    return precision


def overflow_at(*steps: int) -> GradientHook:
    """Return a function that makes a gradient infinite at `steps`, counted from 0."""

    def gradient_hook(step: int, model: torch.nn.Module) -> None:
        if step in steps:
            last = list(model.parameters())[-1]
            last.grad[0] = math.inf

    return gradient_hook


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("max_norm", [None, 0.5])
@pytest.mark.parametrize("steps", [(), (0,), (1, 2, 4)])
def test_16_equals_torchs_recipe_for_mixed_precision(steps, max_norm, fused, device, monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    where, exact = torch.device(device), device == "cpu" and not fused
    precision, model = scaled(device=where), network(where)
    weights = train(precision, model, SGD(lr=0.1, fused=fused).build(model), max_norm, overflow_at(*steps), where)
    expected, scaler = by_hand(torch.float16, max_norm, overflow_at(*steps), where, growth_interval=2)
    torch.testing.assert_close(weights, expected, rtol=0 if exact else 1e-4, atol=0 if exact else 1e-6)
    assert precision.num_skipped() == len(steps)
    assert precision.scalars() == {"train/loss_scale": scaler.get_scale(), "train/skipped_steps": float(len(steps))}


def test_skips_are_known_before_the_next_step():
    """The schedule needs their number when the next update is due."""
    precision, model, counts = scaled(), network(), []

    def gradient_hook(step: int, model: torch.nn.Module) -> None:
        counts.append(precision.num_skipped())
        overflow_at(1, 3)(step, model)

    train(precision, model, sgd(model), gradient_hook=gradient_hook)
    assert [*counts, precision.num_skipped()] == [0, 0, 1, 1, 2, 2]


def test_the_norm_is_of_unscaled_gradients():
    precision, model, reference = scaled(), network(), network()
    inputs, targets = next(batches())
    with precision.autocast():
        loss = cross_entropy(model(inputs), targets)
    precision.backward(loss)
    norm = precision.step(sgd(model), None)
    with torch.autocast("cpu", torch.float16):
        cross_entropy(reference(inputs), targets).backward()
    gradients = [parameter.grad for parameter in reference.parameters() if parameter.grad is not None]
    torch.testing.assert_close(norm, torch.nn.utils.get_total_norm(gradients), rtol=1e-2, atol=0)


def test_a_resumed_scaler_continues_with_the_same_scale():
    whole, parts = scaled(growth_interval=3), scaled(growth_interval=3)
    whole_model, parts_model = network(), network()
    train(whole, whole_model, sgd(whole_model), gradient_hook=overflow_at(1))
    train(parts, parts_model, sgd(parts_model), gradient_hook=overflow_at(1))
    resumed = scaled(growth_interval=3)
    resumed.load_state_dict(copy.deepcopy(parts.state_dict()))
    assert resumed.num_skipped() == 1
    expected = train(whole, whole_model, sgd(whole_model), gradient_hook=overflow_at(4))
    assert equal(train(resumed, parts_model, sgd(parts_model), gradient_hook=overflow_at(4)), expected)
    assert resumed.scalars() == whole.scalars()


@pytest.mark.parametrize("kind", [Precision, TF32, Double, BFloat16, Float16])
def test_any_precision_loads_the_state_of_any_other(kind):
    model, half = network(), scaled()
    train(half, model, sgd(model), gradient_hook=overflow_at(0))
    for state in (half.state_dict(), Precision().state_dict(), Float16().state_dict()):
        kind().load_state_dict(state)
    fresh = scaled()
    fresh.load_state_dict(Precision().state_dict())
    assert fresh.scalars() == {"train/loss_scale": 256.0, "train/skipped_steps": 0.0}


def test_the_event_after_the_flag_is_recorded_on_the_stream_of_its_device(monkeypatch):
    """On that of the current device, a skipped step on another one could be missed, and the averages advance."""
    recorded: list[str] = []
    monkeypatch.setattr(torch, "Event", lambda device: SimpleNamespace(record=recorded.append))
    monkeypatch.setattr(torch.accelerator, "current_stream", lambda device: f"stream of {device}")
    assert runner.precision._record_event(torch.device("cuda:1")) is not None
    assert recorded == ["stream of cuda:1"]


@pytest.mark.gpu
def test_a_fused_step_in_16_does_not_wait_for_the_device():
    device = torch.device("cuda")
    precision, model = scaled(device=device), network(device)
    optimizer = SGD(lr=0.1).build(model)
    train(precision, model, optimizer, 0.5, device=device)
    inputs, targets = next(batches(device))
    with precision.autocast():
        loss = cross_entropy(model(inputs), targets)
    precision.backward(loss)
    try:
        torch.cuda.set_sync_debug_mode("error")
        precision.step(optimizer, None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_rounding_errors_of_tf32_and_32_are_as_expected_on_cuda():
    device = torch.device("cuda")
    if torch.cuda.get_device_capability(device) < (8, 0):
        pytest.skip("no TF32 units")
    a, b = (torch.randn(512, 512, device=device) for _ in range(2))
    exact, errors = a.double() @ b.double(), []
    for precision in (Precision(), TF32()):
        precision.prepare(device)
        errors.append(float((a @ b - exact).norm() / exact.norm()))
    assert errors[0] < 1e-6
    assert 1e-5 < errors[1] < 1e-2


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("overflows", [(True, False), (False, True), (True, True), (False, False)])
def test_an_overflow_on_one_or_two_gpus_skips_the_update_of_both(overflows, fused):
    model = torch.nn.ModuleList(torch.nn.Linear(2, 2, device=f"cuda:{index}") for index in range(2))
    precision, optimizer = scaled(device=torch.device("cuda", 0)), SGD(lr=0.1, fused=fused).build(model)
    scale = precision.scaled(torch.ones((), device="cuda:0")).item()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    for layer, overflow in zip(model, overflows, strict=True):
        for parameter in layer.parameters():
            parameter.grad = torch.full_like(parameter, math.inf if overflow else scale)
    precision.step(optimizer, None)
    change = 0.0 if any(overflows) else -0.1
    for parameter, was in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.detach(), was + change)
    assert precision.num_skipped() == any(overflows)
    assert precision.scaled(torch.ones((), device="cuda:0")).item() == (scale / 2 if any(overflows) else scale)
