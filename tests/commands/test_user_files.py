"""Tests of Python files that are named on the command line: `workload=mine.py`, `model=mine.py:Net`."""

import json
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.command import ROOT, run_command
from helpers.dry_run import run_in_this_process
from helpers.plain_loop import largest_difference, weights_at
from helpers.runs import assert_checkpoint_bitwise_equal, checkpoint_tensors, only_run
from PIL import Image
from torch.utils._pytree import tree_leaves

import runner
from runner.commands import convert, evaluate, predict, verify
from runner.config.user_code import UserCode, find, passed, using

SMALL = ("device=cpu", "device.threads=1", "steps=4", "save_every=2", "batch_size=16", "log_every=1")

MARK = "__import__('pathlib').Path('executed').touch()\n"

NETWORKS = """
from torch import nn

def narrow():
    return nn.Sequential(nn.Linear(13, 3))

def wide():
    return nn.Sequential(nn.Linear(13, 64), nn.ReLU(), nn.Linear(64, 3))
"""


TOKENS = """
import torch
from torch import nn

class model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.last = nn.Embedding(6, 4), nn.Linear(4, 2)

    def forward(self, x):
        return {"logits": self.last(self.table(x).mean(1))}

def data():
    x = torch.arange(180).view(60, 3) % 6
    return x, (x[:, 0] > 2).long()

def loss(outputs, targets):
    return nn.functional.cross_entropy(outputs["logits"], targets)
"""


PIXELS = """
from math import prod
from torch import nn

def model(shape, num_classes):
    return nn.Sequential(nn.Flatten(), nn.Linear(prod(shape), num_classes))
"""


@pytest.fixture
def here(tmp_path, monkeypatch) -> Iterator[Path]:
    shutil.copy(ROOT / "docs" / "examples" / "mine.py", tmp_path)
    (tmp_path / "networks.py").write_text(NETWORKS)
    monkeypatch.chdir(tmp_path)
    with using(UserCode()):  # commands run in this process, too
        yield tmp_path


def succeeds(cwd: Path, *words: str) -> str:
    code, console = run_command(*words, cwd=cwd)
    assert code == 0, console
    return console


def refused(cwd: Path, *words: str) -> str:
    code, console = run_in_this_process([*words], cwd)
    assert code == 2, console
    return console


def test_a_file_trains_the_same_from_the_command_from_python_and_part_by_part(here):
    succeeds(here, "workload=mine.py", *SMALL)
    run = only_run(here)
    assert run.parent.name == "mine"
    wanted = checkpoint_tensors(run)
    result: Any = runner.train(["workload=mine.py", *SMALL, "output_root=python"])
    assert_checkpoint_bitwise_equal(result.directory, wanted)
    curves = runner.load(run).curves()
    assert set(curves["weights/first"]) == {1, 2, 3, 4}
    assert "eval/accuracy" in curves
    parts = ["model=mine.py:model", "data=mine.py", "output_root=parts", *SMALL, "parallel=ddp", "precision=64"]
    two = runner.train(parts)
    one = runner.train([*parts, "parallel=single"])
    assert two.world_size == 2
    assert largest_difference(weights_at(two.directory, 4), weights_at(one.directory, 4)) < 1e-12
    assert "weights/first" not in runner.load(one.directory).curves(), "hooks are those of a workload"


def test_a_saved_run_never_runs_its_code_unless_it_is_typed(here, capsys):
    words = ("workload=mine.py", "model=networks.py:wide", *SMALL)
    whole: Any = runner.train([*words, "output_root=whole"])
    code, console = run_command(*words, "stop.max_time=1e-6", cwd=here)
    assert code == 75
    run = only_run(here)
    [line] = [line for line in console.splitlines() if line.startswith("resume: ")]
    for file in ("mine.py", "networks.py"):
        (here / file).write_text(f"{MARK}{(here / file).read_text()}")
    code, console = run_command(f"resume={run}", cwd=here)
    assert code == 2, console
    typed = shlex.split(" ".join(console.partition("type: ")[2].split("\n")))
    assert typed[:3] == shlex.split(line)[1:4] == ["python", "-m", "runner"]
    assert {*typed[3:]} == {f"resume={run}", "workload=mine.py", "model=networks.py:wide"}
    resume = shlex.split(line)[4:]
    assert {*resume[1:]} == {"workload=mine.py", "model=networks.py:wide"}
    assert evaluate.main([str(run)]) == 2
    assert verify.main([str(run)]) == 2
    assert not (here / "executed").exists()

    console = succeeds(here, *resume, "stop.max_time=null")
    assert (here / "executed").exists()
    assert "mine.py has changed since the last session" in console
    assert "networks.py has changed" in console
    assert_checkpoint_bitwise_equal(run, checkpoint_tensors(whole.directory))
    capsys.readouterr()
    assert evaluate.main([str(run), *typed[4:], "--checkpoint=last"]) == 0
    printed = capsys.readouterr()
    assert "eval/accuracy" in printed.out
    assert "has changed" not in printed.err
    assert verify.main([str(run), *typed[4:]]) == 0


def test_code_that_has_changed_since_the_training_is_said_also_of_what_a_file_imports(here, caplog, capsys):
    (here / "rates.py").write_text("RATE = 0.1\n")
    for name in ("mine.py", "networks.py"):
        (here / name).write_text(f"import rates\n{(here / name).read_text()}")
    words = ["workload=mine.py", "model=networks.py:wide"]
    run = runner.train([*words, *SMALL, "steps=1"]).directory
    assert {"rates.py", "mine.py", "networks.py"} <= {*json.loads((run / "environment.json").read_text())["code"]}
    runner.load(run, words).evaluate("last")
    assert "has changed" not in caplog.text
    (here / "rates.py").write_text("RATE = 0.2\n")
    (here / "networks.py").write_text(f"{(here / 'networks.py').read_text()}# edited\n")
    capsys.readouterr()
    assert evaluate.main([str(run), *words, "--checkpoint=last"]) == 0
    runner.load(run, ["model=networks.py:wide"]).model("last")
    for said in (capsys.readouterr().err, caplog.text):
        assert "networks.py has changed since the last session of this run" in said
        assert "rates.py has changed since the last session of this run" in said
        assert "mine.py has changed" not in said


def test_a_stopped_agent_in_an_environment_of_a_module_resumes_as_printed(here):
    agent = ("workload=dqn", "env.id=helpers.talking_env:Talking-v0", "device=cpu", "steps=4", "workload.warm_up=100")
    code, console = run_command(*agent, "workload.eval_episodes=2", "stop.max_time=1e-6", cwd=here)
    assert code == 75, console
    [line] = [line for line in console.splitlines() if line.startswith("resume: ")]
    assert "4/4" in succeeds(here, *shlex.split(line)[4:], "stop.max_time=null")


def test_a_network_is_exported_with_its_file(here, capsys):
    (here / "tokens.py").write_text(TOKENS)
    for file, inputs in {"mine.py": torch.randn(5, 13), "tokens.py": torch.tensor([[1, 2, 5], [0, 3, 3]])}.items():
        result = runner.train([f"workload={file}", *SMALL, "precision=64"])
        words = [str(result.directory), f"{file}.pt2"]
        assert convert.main(words) == 2
        assert f"pass it again: ['workload={file}']" in (said := capsys.readouterr().err)
        assert said.splitlines()[-2].startswith(f"SOURCE: got '{words[0][:20]}")
        assert evaluate.main(words[:1]) == 2
        assert capsys.readouterr().err.startswith(f"RUN: got '{words[0][:20]}")
        assert convert.main([*words, f"workload={file}"]) == 0
        inputs = inputs.double() if inputs.is_floating_point() else inputs
        program = torch.export.load(f"{file}.pt2").module()
        with using(passed([f"model={file}"])):
            model = find("model")().double()
        model.load_state_dict(weights_at(result.directory, 4))
        for batch in (inputs, inputs[:1]):
            for outputs, wanted in zip(tree_leaves(program(batch)), tree_leaves(model(batch)), strict=True):
                torch.testing.assert_close(outputs, wanted)
    assert convert.main([str(result.directory), "weights.pt", "workload=tokens.py"]) == 2


def test_a_network_of_a_file_predicts_the_classes_of_images(here, capsys):
    (here / "pixels.py").write_text(PIXELS)
    result = runner.train(["model=pixels.py", *SMALL])
    Image.linear_gradient("L").save("image.png")
    with using(passed(["model=pixels.py"])):
        [wanted] = runner.load(result.directory).predict("image.png")
    assert predict.main([str(result.directory), "image.png", "model=pixels.py", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert (found["class"], found["probability"]) == (wanted.label, wanted.probability)


def test_an_option_file_cannot_choose_code(here):
    (here / "evil.py").write_text(MARK)
    target = "  _target_: runner.model.user.UserModel\n"
    for group, content in (
        ("experiment", "# @package _global_\ncode:\n  model: evil.py:Net\nmodel:\n" + target),
        ("model", f"code: evil.py\n{target.strip()}\n"),
        ("experiment", "# @package _global_\nhydra:\n  sweeper:\n    params:\n      model: evil.py:Net\n"),
    ):
        (here / "conf" / group).mkdir(parents=True, exist_ok=True)
        (here / "conf" / group / "mine.yaml").write_text(content)
        sweep = ["-m"] if "sweeper" in content else []
        refused(here, *sweep, "--config-dir=conf", f"{group}=mine", *SMALL)
    for content in ("defaults:\n  - override /workload: mine.py\n", "workload: mine.py\n"):
        (here / "conf" / "experiment" / "mine.yaml").write_text(f"# @package _global_\n{content}")
        assert ": workload=mine.py" in refused(here, "--config-dir=conf", "experiment=mine", *SMALL)
    refused(here, "model=_user", *SMALL)
    refused(here, "workload=_user", *SMALL)
    assert not (here / "executed").exists()


def test_mistakes_in_a_file_are_refused_with_its_line(here):
    (here / "wrong.py").write_text("import torch\n\nvalue = 1 / 0\n")
    (here / "syntax.py").write_text("import torch\n\ndef model(:\n")
    (here / "data.py").write_text("def data():\n    raise OSError('no disk')\n\ndef model():\n    return Net\n")
    for words, texts in {
        ("workload=wrong.py",): ("wrong.py:3", "ZeroDivisionError"),
        ("workload=syntax.py",): ("syntax.py:3",),
        ("workload=data.py",): ("data.py:2", "no disk"),
        ("workload=mine.py", "model=data.py"): ("data.py:5", "Net"),
        ("workload=mine.py", "model=networks.py:wied"): ("networks.py:wide",),
        ("workload=networks.py",): ("no data",),
        ("workload=absent.py",): ("no such file",),
        ("workload=mine.py:model",): ("model=mine.py:model",),
        ("workload=mine.py", "workload.best_metric=acuracy"): ("accuracy",),
    }.items():
        with pytest.raises(runner.ConfigError) as mistake:
            runner.train([*words, *SMALL])
        assert all(text in str(mistake.value) for text in texts), mistake.value
    assert not (here / "outputs").exists()


def test_names_of_files_are_texts_in_a_sweep_too(here):
    for name in ("nan", "true", "null", "1e3"):
        shutil.copy("mine.py", f"{name}.py")
        assert runner.compose([f"workload={name}.py", *SMALL])["name"] == name
    (here / "conf" / "experiment").mkdir(parents=True)
    (here / "conf" / "experiment" / "study.yaml").write_text("# @package _global_\nname: of_the_file\n")
    words = ["experiment=study", "workload=null.py"]
    assert runner.compose(words, config_dir="conf")["name"] == "of_the_file"
    assert runner.compose([*words, "name=typed"], config_dir="conf")["name"] == "typed"
    succeeds(here, "-m", "workload=null.py", "model=networks.py:narrow,networks.py:wide", *SMALL)
    runs = [runner.load(path.parent) for path in here.glob("outputs/sweeps/null/*/*/config.yaml")]
    assert sorted(run.config["code"]["model"] for run in runs) == ["networks.py:narrow", "networks.py:wide"]
    assert {run.result["status"] for run in runs} == {"done"}
