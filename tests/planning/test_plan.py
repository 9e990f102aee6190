"""Tests of `runner plan`: memory is compared with measurements, and FLOPs and messages with formulas."""

import functools
import io
import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers import networks_to_export
from helpers.compose import TINY_CPU, build_composed_run, compose_config
from helpers.runs import write_images
from helpers.sequences import Tied, sum_over_tokens
from helpers.tensor_memory import measured_peak
from helpers.user_objects import TENSORS, StepCounter
from rich.console import Console

from runner.commands import plan
from runner.config.user_code import passed, using
from runner.models.gpt import GPT
from runner.parallel.collectives import Collectives
from runner.parallel.compiling import modules_of_blocks
from runner.parallel.pipelining.schedules import SCHEDULES
from runner.planning.fake_step import FakeCollectives, RankPlan, prepared, trace_rank, trace_ranks, with_cuts
from runner.planning.report import bubbles, render, report_of
from runner.planning.step_tracker import KINDS
from runner.system import accelerator
from runner.system.fake_tensors import fake_process_group

RESNET = ("model=resnet18", "data=synthetic", "data.size=32", "data.num_samples=64", "device=cpu", "device.threads=1")
RESNET = (*RESNET, "batch_size=16", "steps=2")
SMALL = (*TINY_CPU, "batch_size=256", "steps=1")
"""A config whose activations need more memory than its weights, so that smaller micro-batches reduce the peak."""
PIPELINE = ("parallel=pipeline", "parallel.cuts=[layer3.0]", "parallel.num_micro_batches=2")
ADAMW = ("optimizer=adamw", "channels_last=false", "ema.decay=0.9")


@functools.cache
def planned(*overrides: str) -> list[RankPlan]:
    run = build_composed_run(*overrides)
    return trace_ranks(run, prepared(run))


def report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    """Return the plan of a command line, parsed from its JSON output."""
    assert plan.main([*arguments, "--json"]) in (0, plan.DOES_NOT_FIT)
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        ("accumulation=2", "model.checkpoint_activations=true"),
        ("precision=bf16",),
        ADAMW,
        (*PIPELINE, "parallel.engine=streams"),
        ("workload=dqn",),
    ],
    ids=" ".join,
)
def test_predicted_peak_memory_matches_the_allocator(overrides, tmp_path):
    base = RESNET if "workload=dqn" not in overrides else ("device=cpu", "device.threads=1")
    [rank] = planned(*base, *overrides)
    assert rank.peak_bytes == pytest.approx(measured_peak(compose_config(*base, *overrides), tmp_path), rel=0.01)


@pytest.mark.parametrize("mode", [("parallel=ddp",), PIPELINE], ids=["ddp", "pipeline"])
def test_predicted_peak_memory_of_each_rank_matches_the_allocator(mode, ranks, tmp_path):
    measured = ranks(2).call_on_all(measured_peak, compose_config(*RESNET, *mode), tmp_path)
    # How long a bucket of gradients is kept depends on when the other rank has its own.
    limit = 0.1 if mode == ("parallel=ddp",) else 0.01
    assert [rank.peak_bytes for rank in planned(*RESNET, *mode)] == pytest.approx(measured, rel=limit)


@pytest.mark.skipif(torch.__version__ < "2.14", reason="the plan is a quarter above what torch 2.11 allocates")
def test_predicted_peak_memory_of_fsdp_matches_the_allocator(tmp_path):
    rank, _ = planned(*RESNET, "parallel=fsdp")
    with fake_process_group(0, 2):
        process = FakeCollectives([torch.device("cpu")], 0, 2)
        measured = measured_peak(compose_config(*RESNET, "parallel=fsdp"), tmp_path, process)
    assert rank.peak_bytes == pytest.approx(measured, rel=0.01)


@pytest.mark.cases(
    "parallel=ddp",
    "parallel=fsdp",
    "parallel=pipeline parallel.num_micro_batches=2",
    "workload=dqn",
    ids=str,
)
def test_many_micro_batches_are_planned_from_a_few(typed):
    small = () if "dqn" in typed else ("model=tiny", "data.size=8")
    words = (*small, "device=cpu", "device.threads=1", *typed.split(), "batch_size=60", "accumulation.steps=5")
    run = build_composed_run(*words)
    session = prepared(run)
    run = with_cuts(run, session)
    if torch.__version__ < "2.14":  # torch 2.11 finds the shapes of DTensors by operations, once, which are counted
        trace_rank(run, session, 0)
    for rank, found in enumerate(trace_ranks(run, session)):
        whole = trace_rank(run, session, rank)
        assert found.peak_bytes == pytest.approx(whole.peak_bytes, rel=2e-3)  # indices and losses of all samples
        assert found.kept == pytest.approx(whole.kept, rel=2e-3, abs=64)
        assert (found.saved, found.blocks) == (whole.saved, whole.blocks)
        assert (found.costs.flops, found.costs.backward_flops) == (whole.costs.flops, whole.costs.backward_flops)
        assert found.costs.messages == whole.costs.messages


def test_planning_does_not_read_the_images(tmp_path):
    write_images(tmp_path / "images")
    words = ("model=tiny", "data=imagefolder", f"data.root={tmp_path}/images", "data.size=16", "data.workers=2")
    run = build_composed_run(*words, "batch_size=8", "steps=1", "device=cpu", "device.threads=1")
    session = prepared(run)
    for path in (tmp_path / "images").rglob("*.*"):
        path.unlink()
    [rank] = trace_ranks(run, session)
    images = 8 * 3 * 16 * 16
    assert rank.kept["data"] >= images * 4, "a batch of float32"
    assert rank.peak["data"] <= images * 5 + 1000, "and the bytes from which it is made"


def test_memory_is_broken_down_by_kind():
    [rank] = planned(*RESNET, *ADAMW)
    model = _network(*RESNET)
    weights = sum(parameter.nbytes for parameter in model.parameters())
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    assert rank.kept["parameters"] == weights + buffers
    # The moments, the averaged weights, and the step counters.
    assert rank.kept["optimizer state"] == pytest.approx(3 * weights, rel=1e-4)
    assert rank.kept["gradients"] == 0
    assert rank.kept["activations"] + rank.kept["temporary"] < 100, "sums of metrics"
    images, batch = (64 + 16) * 3 * 32 * 32, 16 * 3 * 32 * 32 * 4
    assert images + batch > rank.kept["data"] > images * 64 / 80 + batch
    assert set(rank.peak) == set(KINDS)
    assert rank.saved["fc.weight"] == 4 * model.fc.weight.nbytes + 4  # pyright: ignore
    assert rank.saved["bn1.running_mean"] == 2 * model.bn1.running_mean.nbytes  # pyright: ignore


def test_allocations_of_the_optimizer_step_count_as_temporary():
    adamw = ("optimizer=adamw", "optimizer.fused=false")
    [rank] = planned(*TINY_CPU, "model.hidden=10000", "batch_size=2", "steps=1", *adamw)
    weights = rank.kept["parameters"]
    assert rank.peak["gradients"] == weights, "the peak is in the update"
    assert rank.peak["temporary"] > weights / 2
    assert rank.peak["activations"] < weights / 10


@pytest.mark.parametrize("engine", ["processes", "streams"])
def test_stages_that_a_run_balances_by_time_are_planned_by_their_operations(engine):
    """The run itself would measure the blocks, which takes no time with fake tensors."""
    found = planned(*RESNET, "parallel=pipeline", f"parallel.engine={engine}", "parallel.split_size=8")
    flops = [rank.costs.flops for rank in found]
    assert len(flops) == (2 if engine == "processes" else 1)
    assert min(flops) > max(flops) / 2


def test_fsdp_shards_parameters_and_optimizer_state_and_pipeline_stages_have_their_own_layers():
    [whole], (sharded, _) = planned(*RESNET), planned(*RESNET, "parallel=fsdp")
    for kind in ("parameters", "optimizer state"):
        assert sharded.kept[kind] == pytest.approx(whole.kept[kind] / 2, rel=0.01)
    assert sum(sharded.saved.values()) == sum(whole.saved.values()), "a checkpoint has all of them"
    rprop = (*SMALL, "optimizer=torch", "optimizer.name=Rprop")  # whose step computes with whole tensors
    [alone], (sharded, _) = planned(*rprop), planned(*rprop, "parallel=fsdp")
    assert sharded.kept["optimizer state"] == pytest.approx(alone.kept["optimizer state"] / 2, rel=0.02)
    first, second = planned(*RESNET, *PIPELINE)
    ends = [first.blocks[0], first.blocks[-1], second.blocks[0], second.blocks[-1]]
    assert ends == ["stem", "layer2.1", "layer3.0", "head"]
    assert not first.saved.keys() & second.saved.keys()
    assert first.saved | second.saved == whole.saved


@pytest.mark.parametrize("name", ["Lengths", "ComplexWeights", "Parametrized"])
def test_networks_of_ones_own_are_planned(name, capsys):
    """The floating-point operations are those of one linear layer; the gradient of the images is not computed."""
    found = report(capsys, *TINY_CPU, f"model={networks_to_export.__file__}:{name}", "batch_size=32", "steps=1")
    [rank] = found["ranks"]
    assert (rank["forward_flops"], rank["backward_flops"]) == (2 * 32 * 64 * 10,) * 2


def test_planning_does_not_change_the_run(tmp_path):
    """The data of the session is not replaced by fake tensors, and no random number is drawn."""
    run = build_composed_run(*TINY_CPU, "steps=1", "batch_size=16")
    session = prepared(run)
    before = torch.get_rng_state()
    trace_ranks(run, session)
    assert torch.equal(torch.get_rng_state(), before)
    batch = next(iter(session.workload.batches(torch.nn.Identity(), session.plan, 0, session.device)))
    assert float(batch.inputs.abs().sum()) > 0


def test_flops_match_the_formulas():
    n, sizes = 32, ["model.channels=[3,5]", "model.kernel_size=3", "model.padding=1", "model.hidden=7"]
    [rank] = planned(*TINY_CPU, "model=convnet", "batch_size=32", "steps=1", *sizes)
    conv1, conv2 = 2 * n * 1 * 9 * 3 * 8 * 8, 2 * n * 3 * 9 * 5 * 4 * 4
    hidden, head = 2 * n * 20 * 7, 2 * n * 7 * 10
    forward = conv1 + conv2 + hidden + head
    assert rank.costs.flops - rank.costs.backward_flops == forward
    assert rank.costs.backward_flops == 2 * forward - conv1, "the images need no gradient"


@pytest.mark.cases(
    ({}, ()),
    ({"norm": "layer", "positions": "learned", "bias": True, "tied": False}, ("optimizer=adamw",)),
    ({"kv_heads": 2, "checkpoint_activations": True}, ("accumulation=2",)),
)
def test_the_plan_of_a_language_model_is_its_memory_and_its_operations(options, words, tmp_path):
    vocabulary, context, layers, width, n = 257, 64, 2, 64, 8
    make = functools.partial(GPT, vocabulary, context, layers, width, 4, **options)
    ids = torch.randint(vocabulary, (n, context))
    typed = ("model=_user", "data=_user", "workload=_user", "device=cpu", "device.threads=1", "proof=false")
    typed = (*typed, f"batch_size={n}", "steps=2", *words)
    with using(passed(model=make, data=((ids, ids), (ids, ids)), loss=sum_over_tokens)):
        run = build_composed_run(*typed)
        [rank] = trace_ranks(run, prepared(run))
        measured = measured_peak(compose_config(*typed), tmp_path)
    assert rank.peak_bytes == pytest.approx(measured, rel=0.02)
    matrices = {name: p.numel() for name, p in make().named_parameters() if p.dim() == 2}
    if not options.get("tied", True) or options.get("positions") == "learned":
        matrices = {name: count for name, count in matrices.items() if name not in ("wte.weight", "wpe.weight")}
    products, attention = 2 * n * context * sum(matrices.values()), 4 * n * layers * context**2 * width
    forward = products + attention
    last = vocabulary * width + layers * 4 * width**2  # the head, and what only makes the outputs of layers
    again = forward - 2 * n * context * last if "checkpoint_activations" in options else 0
    assert rank.costs.flops - rank.costs.backward_flops == forward
    assert rank.costs.backward_flops == again + 2 * products + 5 * attention // 2, "with the scores once more"


def test_a_parameter_of_two_stages_is_sent_from_one_to_the_other_and_back():
    ids = torch.randint(20, (12, 5))
    words = ("model=_user", "data=_user", "workload=_user", "device=cpu", "batch_size=12", "parallel=pipeline")
    with using(passed(model=Tied, data=((ids, ids), (ids, ids)))):
        run = build_composed_run(*words, "parallel.split_size=12", "parallel.cuts=['2']")
        first, second = trace_ranks(run, prepared(run))
    assert (first.blocks, second.blocks) == (["0", "1"], ["2", "3"])
    activations, weight = 12 * 5 * 8 * 4, 20 * 8 * 4
    assert first.costs.messages["send"][1] == second.costs.messages["send"][1] == activations + weight


def test_messages_are_those_of_the_modes():
    [whole] = planned(*RESNET)
    weights = sum(p.numel() * 4 for p in _network(*RESNET).parameters())
    assert whole.costs.messages == {}
    ddp, fsdp = planned(*RESNET, "parallel=ddp")[0].costs, planned(*RESNET, "parallel=fsdp")[0].costs
    assert ddp.messages["all-reduce"][1] == weights
    assert ddp.sent_bytes(2) == weights
    model = _network(*RESNET)
    of_blocks = sum(p.nbytes for block in modules_of_blocks(model) for p in block.parameters())
    gathered = weights + of_blocks  # the parameters that are in no block stay gathered for the backward pass
    assert fsdp.messages["all-gather"][1] == pytest.approx(gathered, rel=1e-3)
    assert fsdp.messages["reduce-scatter"][1] == pytest.approx(weights, rel=1e-3)
    assert fsdp.sent_bytes(4) == pytest.approx((gathered + weights) * 3 / 4, rel=1e-3)
    first, second = (rank.costs.messages for rank in planned(*RESNET, *PIPELINE))
    activations = 16 * 128 * 4 * 4 * 4  # the output of layer2, whose gradient is sent back
    connecting = 1 if torch.__version__ < "2.12" else 0  # torch 2.11 connects the stages by a message of 4 bytes
    assert first == second == {"send": (2 + connecting, activations + 4 * connecting)}


def _network(*overrides: str) -> torch.nn.Module:
    run = build_composed_run(*overrides)
    run.workload.prepare()
    with torch.device("meta"):
        return run.workload.build_model()


def test_the_report_contains_batch_length_ranks_and_checkpoint(capsys):
    words = (*TINY_CPU, "data=synthetic", "data.num_samples=64", "batch_size=16", "epochs=3")
    found = report(capsys, *words, "parallel=ddp", "accumulation=2")
    batch = {"batch_size": 16, "data_shards": 2, "accumulation": 2, "pipeline_micro_batches": 1, "samples_per_pass": 4}
    assert found["batch"] == batch
    assert found["length"] == {"steps": 12, "samples": 192, "steps_per_epoch": 4.0, "epochs": 3.0}
    assert [rank["samples"] for rank in found["ranks"]] == [[0, 8], [8, 16]]
    weights = sum(p.numel() * 4 for p in _network(*words).parameters())
    assert found["checkpoint"]["bytes"] == 2 * weights, "and the momentum"
    assert found["fits"] is None
    assert found["host"]["tensor_bytes"] == sum(rank["peak_bytes"] for rank in found["ranks"])


def test_the_memory_of_a_gpu_is_that_which_counts(monkeypatch):
    run = build_composed_run("model=tiny", "data.size=8", "device.threads=1")
    session = run.prepare(Collectives([torch.device("cuda", 1)]))
    properties = SimpleNamespace(total_memory=7_000_000_000, name="GPU")
    monkeypatch.setattr(accelerator, "properties", lambda device: properties)
    ranks = trace_ranks(run, session)
    found = report_of(run, session, ranks)["host"]
    assert list(found.values()) == ["cuda:1 (GPU)", ranks[0].peak_bytes, 7_000_000_000]


def test_bubbles_are_reported_for_each_schedule_and_split_size(capsys):
    words = (*TINY_CPU, "batch_size=16", "steps=1", "parallel=pipeline", "parallel.schedule=1f1b")
    even, uneven = (
        report(capsys, *words, "parallel.split_size=8", *cuts)["pipeline"] for cuts in ((), ["parallel.cuts=[head]"])
    )
    assert (even["schedule"], even["num_micro_batches"]) == ("1f1b", 2)
    rows = {row["split_size"]: row for row in even["bubbles"]}
    assert list(rows) == [16, 8, 4, 2, 1]
    assert [rows[16][key] is None for key in SCHEDULES] == [False, True, True, True]
    assert rows[1]["gpipe"] < rows[4]["gpipe"] < rows[8]["gpipe"]
    assert rows[4]["zero_bubble"] < rows[4]["1f1b"] < uneven["bubbles"][2]["1f1b"]
    assert uneven["bubbles"][2]["interleaved_1f1b"] is None, "it has two stages per process"


@pytest.mark.cases(
    ("gpipe", 2, [1.0] * 2, 1, 1 / 2),
    ("gpipe", 4, [1.0] * 4, 8, 3 / 11),
    ("1f1b", 4, [1.0] * 4, 8, 3 / 11),
    ("interleaved_1f1b", 2, [1.0] * 4, 8, 1 / 17),
    ("zero_bubble", 4, [1.0] * 4, 8, 3 / 27),
    ("zero_bubble", 2, [1.0] * 4, 4, 1 / 25),
    ("gpipe", 2, [1.0, 3.0], 8, 1 - (8 + 24) / (2 * 25)),  # the second computes 8 × 3, after 1; the first 8 of 25
)
def test_the_bubble_is_that_of_the_formulas(schedule, workers, stages, micros, expected):
    rows = bubbles([schedule], workers, micros, stages, len(stages))
    assert {row["num_micro_batches"]: row[schedule] for row in rows}[micros] == pytest.approx(expected)


def test_a_plan_for_another_number_of_devices(capsys):
    assert len(report(capsys, *TINY_CPU, "--devices", "8")["ranks"]) == 1, "of eight devices, one is used"
    wide = (*TINY_CPU, "model.hidden=800")
    found = report(capsys, *wide, "parallel=fsdp", "--devices", "8")
    shard = sum(-(-len(p) // 8) * p[0].numel() * 4 for p in _network(*wide).parameters())  # rows are not divided
    assert found["ranks"][3]["kept"]["optimizer state"] == shard
    assert found["host"] is None
    Console(width=140, file=(shown := io.StringIO())).print(render(found))
    assert shown.getvalue().count(" 0 – 7, each ") == 2, "ranks with the same work share a row, of work and of memory"


def test_a_config_that_does_not_fit_is_reported_with_changes_that_fit(capsys):
    [rank] = planned(*SMALL)
    limit = rank.peak_bytes - 1
    assert plan.main([*SMALL, "--memory", str(limit), "--json"]) == plan.DOES_NOT_FIT
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False
    first, *_ = found["remedies"]
    assert (first["overrides"], first["costs"]) == (["accumulation=4"], "smaller matrices")
    assert first["peak_bytes"] <= limit
    [changed] = planned(*SMALL, *first["overrides"])
    assert changed.peak_bytes == first["peak_bytes"]
    assert plan.main([*SMALL, *first["overrides"], "--memory", str(limit)]) == 0
    assert "it fits" in capsys.readouterr().out


REFUSED = {
    "--devices 0": "--devices",
    "--memory 80iB": "--memory",
    "--memory 80": "--memory",
    "resume=outputs/classifier/run": "resume",
    "parallel=pipeline workload=dqn": "workload",
    "parallel=ddp parallel.processes=4 --devices 2": "parallel.processes",
    "model=resnet18 data=synthetic data.size=16 parallel=ddp --devices 8 batch_size=8": "batch_size",
}


@pytest.mark.parametrize("line", REFUSED)
def test_mistakes_are_refused(line, capsys):
    assert plan.main([*TINY_CPU, *line.split()]) == 2
    output = capsys.readouterr()
    assert REFUSED[line] in output.err
    assert output.out == ""


CENTER, TEACHER = torch.zeros(3), torch.nn.Linear(3, 3).requires_grad_(False)


def judged(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """A loss with values of the file, which a run looks for."""
    return torch.nn.functional.cross_entropy(TEACHER(outputs - CENTER.to(outputs)), targets)


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_a_network_of_ones_own_is_planned_in_modes_that_look_for_unused_parameters(mode):
    options = ("model=_user", "data=_user", "workload=_user", "device=cpu", "batch_size=12", f"parallel={mode}")
    with using(passed(model=StepCounter, data=TENSORS, loss=judged)):
        run = build_composed_run(*options)
        plans = trace_ranks(run, prepared(run))
    assert [plan.peak["parameters"] > 0 for plan in plans] == [True, True]
