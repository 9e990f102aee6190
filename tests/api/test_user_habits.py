"""Tests of what users bring: data and outputs in many forms, metrics, and mistakes, which are refused or located."""

import inspect
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from helpers import user_objects
from helpers.command import run_successfully
from helpers.plain_loop import largest_difference, weights_at
from helpers.user_objects import (
    TENSORS,
    Dicts,
    Endless,
    Fails,
    FailsForward,
    LosesItsGradient,
    Net,
    NoLength,
    Plain,
    Rows,
    StepCounter,
    exiting_hook,
    failing_hook,
    logs_a_vector,
    recall,
    right,
    tensors,
)
from sklearn.metrics import r2_score
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import ConcatDataset, DataLoader

import runner
from runner.batching import Plan
from runner.commands import convert
from runner.config.errors import ConfigError
from runner.config.user_code import find, passed, using
from runner.data.base import Batch
from runner.data.user import UserData

SHORT = ["device=cpu", "device.threads=1", "optimizer=sgd", "optimizer.lr=0.05", "batch_size=12", "log_every=1"]
SHORT += ["steps=6", "eval_every=3", "save_every=3"]
DDP = "parallel=ddp"


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)


class Dict(Net):
    def __init__(self):
        super().__init__()
        self.spare = nn.Linear(2, 2)  # which no loss depends on

    def forward(self, x):
        return {"logits": super().forward(x), "more": (x,)}


class Several:
    """A collection of metrics, as of torchmetrics."""

    def add_metrics(self, *metrics: Any) -> None: ...

    def __call__(self, outputs: torch.Tensor, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"right": right(outputs, targets)}


def trained(*words: str, model: Any = Net, data: Any = TENSORS, **more: Any) -> tuple[Any, dict[str, torch.Tensor]]:
    result = runner.train([*SHORT, *words], model=model, data=data, **more)
    return result, weights_at(result.directory, result.steps)


def batches(data: Any) -> list[Batch]:
    with using(passed(data=data)):
        train, held_out = UserData().load()
    stream = train.batches(Plan(12).stream(0), 0, torch.device("cpu"))
    return [*itertools.islice(stream, 7), *held_out.in_order(8, (0, 1), torch.device("cpu"))]


def batches_in_order(*sets: Any) -> list[Batch]:
    with using(passed(data=sets)):
        return [next(samples.in_order(99, (0, 1), torch.device("cpu"))) for samples in UserData().load()]


def test_forms_and_types_of_data_do_not_change_the_result():
    wanted, arrays = batches(TENSORS), tuple(tuple(tensor.numpy() for tensor in each.tensors) for each in TENSORS)
    pairs = tuple(list(zip(*each.tensors, strict=True)) for each in TENSORS)
    frames = tuple((pandas.DataFrame(x.astype(np.float64)), pandas.Series(y)) for x, y in arrays)
    small = tuple((x, y.astype(np.int32)) for x, y in arrays)
    joined = tuple(ConcatDataset([each]) for each in TENSORS)
    for data in (pairs, arrays, [*map(Plain, pairs)], lambda: TENSORS, frames, small, joined):
        for ours, theirs in zip(batches(data), wanted, strict=True):
            assert ours.inputs.equal(theirs.inputs)
            assert ours.targets.equal(theirs.targets)
    assert largest_difference(trained(data=small, loss=nn.CrossEntropyLoss())[1], trained()[1]) < 1e-6
    two, as_ints = (tuple((x, (y > 0).astype(kind)) for x, y in arrays) for kind in (bool, np.int64))
    assert largest_difference(trained(data=two)[1], trained(data=as_ints)[1]) == 0


def test_arrays_and_tables_of_other_types_become_numbers(caplog):
    x, y = (tensor.numpy().copy() for tensor in TENSORS[0].tensors)
    table = pandas.DataFrame({"whole": y, "yes": y > 0, "share": x[:, 0], "missing": x[:, 1]}).convert_dtypes()
    wanted = np.stack([y, y > 0, x[:, 0], x[:, 1]], 1).astype(np.float32)
    forms: list[tuple[Any, Any]] = [(table, wanted), (x[::-1], x[::-1]), (x.astype(">f8"), x)]
    forms += [(x.astype(np.float16), x.astype(np.float16).astype(np.float32)), (torch.tensor(x).requires_grad_(), x)]
    for given, inputs in forms:
        train, held_out = batches_in_order((given, y.astype(np.uint16)), (given, y))
        for batch in (train, held_out):
            assert (batch.inputs.dtype, batch.targets.dtype) == (torch.float32, torch.int64)
            assert batch.inputs.numpy().tolist() == inputs.tolist()
            assert batch.targets.tolist() == y.tolist()
    assert not caplog.messages
    x[[3, 7], 1] = np.nan
    batches_in_order((x, y), (x[:3], y[:3]))
    assert caplog.messages == ["data: 2 of 60 training inputs have values that are NaN or infinite"]


def test_classes_that_only_some_samples_have_have_outputs_in_every_session(capfd):
    x, y = TENSORS[0].tensors
    for first, second in ((4, 1), (1, 4)):  # the highest class of the training samples, and of the held-out ones
        data = (x, y.where(y < 1, first)), (x[:21], y[:21].where(y[:21] < 1, second))
        result = runner.train([*SHORT, "model=qnet", "workload=_user"], data=data)
        assert "data: 2 of the 5 classes from 0 on have no samples" in capfd.readouterr().err
        saved = runner.load(result.directory, data=data)
        assert saved.evaluate("last") == result.evaluation
        assert saved.model("last")(x).shape == (60, 5)


def test_ignored_targets_count_neither_in_gradients_nor_in_the_accuracy():
    ignored = [(x, torch.where(torch.arange(len(x)) % 3 == 0, -100, y)) for x, y in (tensors(60), tensors(21))]
    result, whole = trained("precision=64", data=tuple(ignored))
    parts = trained("precision=64", "accumulation=2", data=tuple(ignored))[1]
    assert largest_difference(parts, whole) < 1e-13
    (model := Net().double()).load_state_dict(whole)
    outputs, targets = model(ignored[1][0].double()), ignored[1][1]
    loss = cross_entropy(outputs, targets).item()
    share = (outputs.argmax(1) == targets).sum().item() / 14
    assert result.evaluation == {"eval/loss": pytest.approx(loss), "eval/accuracy": pytest.approx(share)}


@pytest.mark.parametrize(
    ("best", "mode"), [("half", ["workload.eval_batch_size=4"]), ("right", [DDP, "parallel.find_unused=true"])]
)
def test_metrics_are_of_all_held_out_samples_and_outputs_may_be_a_dict(best, mode):
    given = {"recall": recall, "right": right}
    metrics: dict[str, Any] = {name: lambda o, y, of=metric: of(o["logits"], y) for name, metric in given.items()}
    metrics["inputs"] = lambda outputs, targets: outputs["more"][0].sum()

    def loss(outputs: Any, targets: torch.Tensor) -> dict[str, torch.Tensor]:
        whole = cross_entropy(outputs["logits"], targets)
        return {"loss": whole, "half": whole / 2}

    words = [f"workload.best_metric={best}", "workload.best_goal=max", f"stop.metric=eval/{best}", "stop.patience=9"]
    result, weights = trained(*words, *mode, model=Dict, loss=loss, metrics=metrics)
    (model := Dict()).load_state_dict(weights)
    inputs, targets = TENSORS[1].tensors
    outputs = model(inputs)["logits"].detach()
    wanted = {"recall": recall(outputs, targets), "right": right(outputs, targets).float().mean()}
    wanted |= {"inputs": inputs.sum(), "loss": cross_entropy(outputs, targets)}
    wanted["half"] = wanted["loss"] / 2
    assert result.evaluation == {f"eval/{name}": pytest.approx(float(each), rel=1e-5) for name, each in wanted.items()}
    assert result.best["metric"] == f"eval/{best}"


def test_a_metric_that_is_not_defined_is_nan_and_never_the_best():
    values = iter([torch.nan, 0.5, torch.nan])  # of the first batch, which is tried, and of the evaluations
    metrics = {"some": lambda outputs, targets: next(values), "none": lambda outputs, targets: torch.zeros(0)}
    words = ("workload.best_metric=some", "workload.best_goal=max", "stop.metric=eval/some", "stop.patience=9")
    result, _ = trained(*words, metrics=metrics)
    assert (result.status, result.best) == ("done", {"metric": "eval/some", "value": 0.5, "step": 3})
    assert result.evaluation == pytest.approx(
        {"eval/loss": result.evaluation["eval/loss"], "eval/some": torch.nan, "eval/none": torch.nan}, nan_ok=True
    )
    saved = json.loads((result.directory / "result.json").read_text(), parse_constant=pytest.fail)["metrics"]
    assert (saved["eval/some"], saved["eval/none"]) == (None, None)
    again = {name: lambda outputs, targets: torch.nan for name in metrics}
    resumed, _ = trained(f"resume={result.directory}", "steps=9", metrics=again)
    assert (resumed.status, resumed.steps, resumed.best) == ("done", 9, result.best)
    never, _ = trained(*words, metrics=again)
    assert (never.status, never.best) == ("done", {})


def test_metrics_that_need_more_samples_than_a_batch_are_not_refused():
    def of_both_classes(outputs: torch.Tensor, targets: torch.Tensor) -> float:
        if len(targets) < 21:
            raise ValueError("a class is missing")
        return 0.5

    assert trained(metrics={"a": of_both_classes})[0].evaluation["eval/a"] == 0.5


def test_a_compiled_network_saves_weights_under_its_own_names():
    for given in (torch.compile(Net()), lambda: torch.compile(Net())):
        assert trained(model=given)[1].keys() == Net().state_dict().keys()


# ---------------------------------------------------------------------------------------------------------------------
# What is refused, and errors


class TwoInputs(Net):
    def forward(self, x, y):
        return super().forward(x) + y


class Remembers(Net):
    """What it computes of a batch depends on the one before."""

    memory = 0.0

    def forward(self, x):
        outputs = super().forward(x) + self.memory
        self.memory = outputs.mean()
        return outputs


class LightningNet(Net):
    def training_step(self, batch, index):
        raise AssertionError("not called")


class HeadAlone(Net):
    def parameters(self, recurse=True):
        return iter([*super().parameters(recurse)][-2:])


def pinball(y_true, y_pred):
    return torch.maximum(0.9 * (y_true - y_pred), 0.1 * (y_pred - y_true)).mean()


def one_output() -> nn.Module:
    return Net(1)


class WithClasses(Rows):
    def __init__(self, classes: str):
        super().__init__(60)
        self.classes = [*classes]


FLOATS = (torch.ones(60, 5), torch.ones(60))


def shifted(by: int) -> Any:
    """Class indices that do not begin with 0, in the training samples."""
    x, y = tensors(60)
    return (x, y + by), tensors(21)


@pytest.mark.cases(
    ({"data": Endless()}, "data", "a stream, which has no length"),
    ({"data": (NoLength(), NoLength())}, "data", "__len__"),
    ({"data": (DataLoader(TENSORS[0]), TENSORS[1])}, "data", "batches"),
    ({"data": (Dicts([1, 2]), Dicts([1]))}, "data", "(input, target)"),
    ({"data": (tensors(60), (torch.zeros(2, 6), torch.zeros(2).long()))}, "data", "[6]"),
    ({"data": ((torch.zeros(9, 5), torch.zeros(8)), tensors(21))}, "data", "9 inputs and 8 targets"),
    ({"data": ((torch.zeros(24, 5), torch.zeros(24)),) * 2}, "data", "[12, 3], targets [12]"),
    ({"data": ((torch.zeros(24, 5), torch.zeros(24, 2).long()),) * 2}, "data", "[12, 3], targets [12, 2]"),
    ({"data": (tensors(60), (torch.zeros(9, 5), torch.full((9,), 1.7)))}, "data", "held-out ones floating"),
    ({"data": [([1.0, 2.0, 3.0], "cat")] * 40}, "data", "numbers"),
    ({"data": shifted(1)}, "data", "no output"),
    ({"data": shifted(-1), "loss": nn.CrossEntropyLoss()}, "data", "no output"),
    ({"data": (WithClasses("ab"), WithClasses("ba"))}, "data", "['a', 'b']"),
    ({"data": (Rows(60), [*[(torch.zeros(5), 1)] * 20, None])}, "data", "sample 20 is NoneType"),
    ({"data": (pandas.DataFrame({"a": [1, 2], "b": [3, "?"]}), np.zeros(2))}, "data", "row 1, column b is '?'"),
    ({"data": (np.zeros((9, 5)), pandas.Series(["cat"] * 9))}, "data", "row 0 is 'cat'"),
    ({"data": (torch.ones(60, 5).long(), torch.zeros(60).long())}, "data", "inputs.float()"),
    ({"data": FLOATS, "model": one_output, "loss": nn.MSELoss()}, "loss", "outputs [12, 1], targets [12]"),
    ({"data": FLOATS, "model": one_output, "loss": nn.BCEWithLogitsLoss()}, "loss", "outputs [12, 1], targets [12]"),
    ({"loss": lambda outputs, targets: outputs}, "loss", "scalar"),
    ({"loss": lambda outputs, targets: cross_entropy(outputs, targets) * 1j}, "loss", "a complex number ("),
    (
        {"loss": lambda outputs, targets: (outputs.argmax(1) != targets).sum()},
        "loss",
        "torch.int64 that does not depend",
    ),
    ({"model": Remembers}, "loss", "keeps a tensor with its graph"),
    ({"loss": 3}, "loss", "function"),
    ({"loss": pinball}, "loss", "pinball(targets, outputs)"),
    ({"metrics": {"r2": r2_score}}, "metrics.r2", "r2_score(targets, outputs)"),
    ({"model": LightningNet}, "model", "training_step"),
    ({"model": HeadAlone}, "model", "parameters()"),
    ({"metrics": [right]}, "metrics", "dict"),
    ({"metrics": {"": right}}, "metrics", "no name"),
    ({"metrics": {3: right}}, "metrics", "no name"),
    ({"metrics": {"a": Several}}, "metrics.a", "Several(…)"),
    ({"metrics": {"a": Several()}}, "metrics.a", "**collection"),
    ({"metrics": {"a": right, "b": object()}}, "metrics.b", "cannot be called"),
    ({"model": Net().requires_grad_(False)}, "model", "none of its parameters is trained"),
    ({"model": nn.Flatten}, "model", "it has no parameters"),
    ({"metrics": {"a": lambda outputs, targets: outputs.argmx(1)}}, "metrics.a", "argmx"),
    ({"metrics": {"a": lambda outputs: outputs}}, "metrics.a", "argument"),
    ({"metrics": {"a": lambda outputs, targets: "high"}}, "metrics.a", "number"),
    ({"loss": lambda outputs, targets: cross_entropy(outputs.detach(), targets)}, "loss", "weights"),
    ({"model": TwoInputs}, "model", "single input"),
    ({"model": lambda width: Net()}, "model", "width"),
    ({"model": lambda num_classes: Net(), "data": Rows(60)}, "data", "number of outputs"),
    ({"model": lambda: 3}, "model", "int"),
    ({"model": lambda: Net().double()}, "model", "float64 with precision=64"),
    ({"model": lambda: Net().to("meta")}, "model", "without a value"),
    ({"model": lambda: nn.Sequential(nn.LazyLinear(3))}, "model", ""),
    ({"model": Dict}, "model", "dict"),
    ({"after_step": lambda: None}, "after_step", "no function of (state)"),
    ({"modle": Net}, "modle", "no such argument"),
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_what_cannot_be_trained_is_refused(given, key, why):
    with pytest.raises(ConfigError) as refused:
        trained(**given)
    assert refused.value.key == key, refused.value
    assert why in f"{refused.value.got} {refused.value.why} {refused.value.remedy}"
    assert not list(Path.cwd().glob("outputs/*/*/config.yaml"))


def test_unused_parameters_are_found_by_ddp_and_refused_where_they_are_not_looked_for():
    loss = lambda outputs, targets: cross_entropy(outputs["logits"], targets)  # noqa: E731
    (_, ours), (_, theirs) = (trained(*mode, model=Dict, loss=loss) for mode in ([DDP], []))
    assert largest_difference(ours, theirs) < 1e-6
    with pytest.raises(ConfigError, match="gradients are not those of a single device"):
        trained(DDP, "parallel.find_unused=false", model=Dict, loss=loss)


def test_what_cannot_be_sent_to_processes_is_refused_only_where_there_are_some():
    with Path("words.txt").open("w") as file:
        loss = lambda outputs, targets: cross_entropy(outputs, targets, reduction="mean" if file else "sum")  # noqa: E731
        assert trained(loss=loss)[0].status == "done"
        with pytest.raises(ConfigError) as refused:
            trained(DDP, loss=loss)
    assert refused.value.key == "code"
    assert "files" in refused.value.why


def line_of(text: str) -> str:
    lines = inspect.getsource(user_objects).splitlines()
    return f"user_objects.py:{next(n for n, line in enumerate(lines, 1) if line.endswith(text))}"


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"data": (Fails(60), Rows(20))}, "# of a sample"),
        ({"model": FailsForward}, "# of a network"),
        ({"after_step": failing_hook}, "# of a hook"),
        ({"after_step": logs_a_vector}, "# no number"),
        ({"after_step": exiting_hook}, "# of an exit"),
    ],
    ids=["sample", "forward", "hook", "vector", "exit"],
)
@pytest.mark.parametrize("mode", [["data.workers=1"], [DDP]], ids=["single", "ddp"])
def test_errors_in_code_of_the_user_name_its_line(mode, given, line):
    with pytest.raises(runner.CrashedError) as crashed:
        trained(*mode, **given)
    assert line_of(line) in crashed.value.result.error


@pytest.mark.parametrize("mode", [["data.workers=1"], [DDP]], ids=["single", "ddp"])
def test_a_run_that_has_saved_is_not_removed_if_torch_refuses_a_later_step(mode):
    with pytest.raises(runner.CrashedError, match="does not depend on the weights") as crashed:
        trained(*mode, "save_every=1", "keep=9", loss=LosesItsGradient())
    result = crashed.value.result
    assert (result.status, result.steps) == ("crashed", 4)
    assert json.loads((result.directory / "result.json").read_text())["error"] == result.error
    assert weights_at(result.directory, 3)


@pytest.mark.parametrize(("name", "tag"), [("after_step", "train/loss"), ("after_evaluation", "eval/loss")])
def test_a_hook_does_not_replace_a_curve_of_the_run(name, tag):
    with pytest.raises(runner.CrashedError) as crashed:
        trained(**{name: lambda state, *metrics: state.log(tag, 7)})
    assert f"log('{tag}', …)" in crashed.value.result.error


def test_files_are_compiled_as_they_are(tmp_path):
    (tmp_path / "mine.py").write_text("class Net:\n    size: int\n")
    with using(passed(["model=mine.py:Net"])):
        assert find("model").__annotations__ == {"size": int}


def test_folders_beside_a_file_may_be_called_as_those_of_this_repository(tmp_path):
    """In all processes; what is in the standard library or installed is found before them."""
    theirs = tmp_path / "theirs"
    for name in ("models", "tests", "conf", "benchmarks"):
        (theirs / name).mkdir(parents=True)
        (theirs / name / "theirs.py").write_text("from helpers.user_objects import Net, TensorDataset, tensors\n")
    (theirs / "models" / "resnet.py").write_text("SIZE = 15\n")  # ours has no such name
    for name in ("colorsys", "yaml"):
        (theirs / f"{name}.py").write_text("raise SystemExit('this is not the usual one')\n")
    lines = ["import colorsys, yaml, benchmarks.theirs, conf.theirs", "from models.theirs import Net as model"]
    lines += ["from models.resnet import SIZE"]
    lines += ["from tests.theirs import TensorDataset, tensors", "data = TensorDataset(*tensors(SIZE))"]
    (theirs / "mine.py").write_text("\n".join(lines))
    run_successfully(tmp_path / "elsewhere", f"workload={theirs}/mine.py", *SHORT, DDP)
    [log] = (tmp_path / "elsewhere").glob("outputs/*/*/log.txt")
    assert "12 training and 3 held-out samples" in log.read_text(), "of the 15 that models/resnet.py says"


def test_a_training_step_of_a_network_is_said_not_to_be_called(capfd):
    trained("steps=1", model=LightningNet, loss=nn.CrossEntropyLoss())
    said = "CrossEntropyLoss; what the network defines as training_step is not called"
    assert said in capfd.readouterr().err


def test_an_extra_state_that_is_a_dict_is_averaged_sharded_and_converted(capsys):
    plain, _ = trained("ema.decay=0.5", model=StepCounter)
    sharded, _ = trained("ema.decay=0.5", "parallel=fsdp", model=StepCounter)
    averages = [runner.load(each.directory, model=StepCounter).model("last") for each in (plain, sharded)]
    assert largest_difference(*(dict(each.named_parameters()) for each in averages)) < 1e-6
    assert convert.main([str(plain.directory), "net.safetensors"]) == 0
    said = capsys.readouterr().out
    assert "left out, as only .pt holds what is no tensor: _extra_state" in said
    assert "net.safetensors: 4 tensors, " in said
