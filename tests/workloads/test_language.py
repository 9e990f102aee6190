"""Tests of language models: losses over tokens in every mode, what evaluations measure, and how texts are continued."""

import functools
import math
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers.compose import compose_config, prepared_workload
from helpers.events import load_events, scalar_curves
from helpers.plain_loop import largest_difference, weights_at
from torch.nn.functional import cross_entropy

import runner
from runner.commands import predict
from runner.config.errors import ConfigError
from runner.models.gpt import GPT
from runner.seeds import derive
from runner.workloads.language import continued

END, CONTEXT, BATCH, STEPS, LR = 256, 12, 8, 4, 0.5
TEXTS = [b"".join(f"{a} + {b} = {a + b}\n".encode() for b in range(2 + a % 3)) for a in range(40)]
SIZES: dict[str, Any] = {"layers": 2, "width": 16, "heads": 2}


@pytest.fixture(scope="module")
def texts(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("texts")
    for number, text in enumerate(TEXTS):
        (folder / f"{number:02}.txt").write_bytes(text)
    return folder


def options(texts: Path, *more: str) -> list[str]:
    small = [f"model.{key}={value}" for key, value in SIZES.items()]
    return [
        *("workload=language", f"data.file={texts}", f"data.context={CONTEXT}", "data.holdout=0.2", *small),
        *("device=cpu", "device.threads=1", "precision=64", "optimizer=sgd", f"optimizer.lr={LR}"),
        *("optimizer.momentum=0", "schedule=constant", "max_grad_norm=null", f"batch_size={BATCH}", f"steps={STEPS}"),
        *("log_every=1", "eval_every=0", "workload.sample_tokens=10", "workload.eval_batch_size=5", *more),
    ]


class Contexts(NamedTuple):
    inputs: torch.Tensor
    targets: torch.Tensor
    num_tokens: int
    num_bytes: int


@functools.cache
def contexts(held_out: bool, texts: Path) -> Contexts:
    """All contexts of the training or of the held-out texts, made of the bytes of their files."""
    workload = prepared_workload(*options(texts))
    samples = workload.held_out if held_out else workload.train
    ids, targets = [], []
    for segment in samples.tokens.segments:
        content = [*Path(segment.file).read_bytes()]
        ids += [*content, END]
        targets += [-100, *content[1:], END]
    num_tokens, num_bytes, missing = len(ids), len(ids) - ids.count(END), -(len(ids) - 1) % CONTEXT
    assert missing or not held_out, "an evaluation is to have a part of a context"
    inputs, wanted = [*ids[:-1], *[0] * missing], [*targets[1:], *[-100] * missing]
    return Contexts(
        torch.tensor(inputs).view(-1, CONTEXT), torch.tensor(wanted).view(-1, CONTEXT), num_tokens, num_bytes
    )


@functools.cache
def plain(texts: Path) -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights and the losses of a loop that computes whole batches."""
    inputs, targets, *_ = contexts(False, texts)
    torch.manual_seed(derive(0, "weights"))
    model = GPT(257, 256, **SIZES).double()
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(derive(0, "order", 0)))
    losses = []
    for step in range(STEPS):
        rows = order[step * BATCH : (step + 1) * BATCH]
        loss = cross_entropy(model(inputs[rows]).flatten(0, 1), targets[rows].flatten())
        gradients = torch.autograd.grad(loss, [*model.parameters()])
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= LR * gradient
        losses.append(loss.item())
    return model.state_dict(), losses


MODES = {
    "single": (1, ()),
    "accumulation": (1, ("accumulation=4",)),
    "ddp": (2, ("parallel=ddp", "accumulation=2")),
    "fsdp": (2, ("parallel=fsdp",)),
    "pipeline": (2, ("parallel=pipeline",)),
}


@pytest.mark.parametrize(("processes", "mode"), MODES.values(), ids=MODES)
def test_the_loss_is_a_mean_over_the_tokens_of_the_whole_batch(processes, mode, ranks, texts, tmp_path):
    result = ranks(processes).train(compose_config(*options(texts, *mode)), tmp_path)
    weights, losses = plain(texts)
    assert largest_difference(weights_at(tmp_path, STEPS), weights) <= 1e-12
    assert [value for _, value in scalar_curves(tmp_path)["train/loss"]] == pytest.approx(losses, rel=1e-6)
    model, (inputs, targets, num_tokens, num_bytes) = network(weights), contexts(True, texts)
    with torch.no_grad():
        loss = cross_entropy(model(inputs).flatten(0, 1), targets.flatten()).item()
    bits = loss * num_tokens / num_bytes / math.log(2)
    wanted = {"eval/loss": loss, "eval/perplexity": math.exp(loss), "eval/bits_per_byte": bits}
    assert {tag: result.metrics[tag] for tag in wanted} == pytest.approx(wanted, rel=1e-12)


def network(weights: dict[str, torch.Tensor]) -> torch.nn.Module:
    model = GPT(257, 256, **SIZES).double()
    model.load_state_dict(weights)
    return model


def most_probable(model: torch.nn.Module, ids: list[int], count: int) -> list[int]:
    for _ in range(count):
        with torch.no_grad():
            ids = [*ids, int(model(torch.tensor([ids[-CONTEXT:]]))[0, -1].argmax())]
    return ids


@pytest.fixture(scope="module")
def trained(texts, tmp_path_factory) -> Any:
    return runner.train(options(texts, f"output_root={tmp_path_factory.mktemp('outputs')}", "eval_every=2"))


def test_a_text_is_continued_token_by_token_also_beyond_the_context(trained):
    run, prompt = runner.load(trained.directory), "1 + 2"
    wanted = most_probable(network(run.weights("last")), [*prompt.encode()], 20)
    generated = run.generate(prompt, "last", tokens=20, temperature=0)
    assert prompt + generated == bytes(each for each in wanted if each < END).decode("utf-8", "replace")
    assert run.generate(prompt, "last", tokens=20, top_k=1) == generated
    drawn = [run.generate(prompt, "last", tokens=20, temperature=2, seed=seed) for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_draws_follow_the_probabilities_of_the_logits():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0])
    drawn = continued(lambda ids: logits.expand(1, ids.shape[1], 4), [0], 4, 6_000, temperature=0.5, top_k=3)
    wanted = (logits[:3] / 0.5).softmax(0)
    shares = torch.bincount(torch.tensor(drawn), minlength=4) / len(drawn)
    torch.testing.assert_close(shares, torch.cat((wanted, torch.zeros(1))), rtol=0, atol=0.015)
    many = torch.arange(200_000.0)  # whose square would not fit into memory
    for temperature in (0, 1e-310):
        assert continued(lambda ids: many.expand(1, ids.shape[1], -1), [0], 4, 3, temperature) == [199_999] * 3


def test_a_continuation_ends_with_its_document():
    assert continued(lambda ids: torch.eye(9)[(ids + 1) % 9] * 50, [3], 4, 100, end=7) == [4, 5, 6]


def test_each_evaluation_shows_how_the_held_out_text_is_continued(trained, texts):
    events, held_out = load_events(trained.directory), contexts(True, texts)
    shown = events.Tensors("eval/sample/text_summary")
    assert [each.step for each in shown] == [2, STEPS]
    [text] = shown[-1].tensor_proto.string_val
    start = held_out.inputs.flatten()[: CONTEXT // 8].tolist()
    options = {"temperature": 0.8, "seed": derive(0, "sample")}
    model = network(runner.load(trained.directory).weights("last"))
    with torch.no_grad():
        wanted = [*start, *continued(model, start, CONTEXT, 10, **options)]
    assert bytes(wanted).decode("utf-8", "replace") in text.decode()


def test_the_command_prints_the_prompt_with_its_continuation(trained, capsys):
    directory = str(trained.directory)
    assert predict.main([directory, "--prompt", "1 + ", "--tokens", "8", "--temperature", "0"]) == 0
    assert capsys.readouterr().out == "1 + " + runner.load(directory).generate("1 + ", tokens=8, temperature=0) + "\n"
    assert predict.main([directory, "--prompt", "\udce9", "--tokens", "8"]) == 0
    assert capsys.readouterr().out.startswith("\ufffd")


REFUSED = {
    "an empty prompt": (["--prompt", ""], "--prompt"),
    "a prompt longer than the context": (["--prompt", "x" * (CONTEXT + 1)], "--prompt"),
    "neither files nor a prompt": ([], "FILES"),
    "both": (["image.png", "--prompt", "x"], "--prompt"),
    "no token": (["--prompt", "x", "--tokens", "0"], "--tokens"),
    "no most probable token": (["--prompt", "x", "--top-k", "0"], "--top-k"),
    "a seed that is too large": (["--prompt", "x", "--seed", str(2**63)], "--seed"),
    "files of other runs": (["image.png"], "FILES"),
    "a negative temperature": (["--prompt", "x", "--temperature", "-1"], "--temperature"),
}


@pytest.mark.parametrize(("words", "key"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_continued_is_refused(words, key, trained, capsys):
    assert predict.main([str(trained.directory), *words]) == 2
    assert capsys.readouterr().err.startswith(f"{key}:")


def test_a_run_of_images_continues_no_text(tmp_path, capsys):
    small = ["model=tiny", "data.size=8", "device=cpu", "steps=1", "eval_every=0", f"output_root={tmp_path}"]
    assert predict.main([str(runner.train(small).directory), "--prompt", "x"]) == 2
    assert "workload=language" in capsys.readouterr().err


def test_another_text_is_evaluated_whole(trained, tmp_path):
    content = b"12 + 7 = 19\n" * 7 + b"1"
    (tmp_path / "other.txt").write_bytes(content)
    run = runner.load(trained.directory)
    found = run.evaluate("last", [f"data.file={tmp_path / 'other.txt'}"])
    missing = -len(content) % CONTEXT
    ids = torch.tensor([*content, *[0] * missing]).view(-1, CONTEXT)
    with torch.no_grad():
        logits = network(run.weights("last"))(ids).flatten(0, 1)[: len(content)]
    assert missing, "the last context is not a whole one"
    wanted = cross_entropy(logits, torch.tensor([*content[1:], END])).item()
    assert found["eval/loss"] == pytest.approx(wanted, rel=1e-12)


def test_a_text_shorter_than_a_context_is_evaluated(trained, tmp_path):
    run = runner.load(trained.directory)
    for text in (b"1 + 1", b"1"):
        (tmp_path / "other.txt").write_bytes(text)
        found = run.evaluate("last", [f"data.file={tmp_path / 'other.txt'}"])
        with torch.no_grad():
            logits = network(run.weights("last"))(torch.tensor([[*text]]))[0]
        wanted = cross_entropy(logits, torch.tensor([*text[1:], END])).item()
        assert found["eval/loss"] == pytest.approx(wanted, rel=1e-12)


class Bag(torch.nn.Module):
    """A network whose logits at each position depend on all tokens, as of a transformer without a mask."""

    def __init__(self, num_classes: int, size: int = 0):
        super().__init__()
        self.tokens, self.head = torch.nn.Embedding(num_classes, 8), torch.nn.Linear(8, size or num_classes)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.tokens(ids)
        return self.head(x + x.mean(1, keepdim=True))


class Causal(Bag):
    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.tokens(ids).cumsum(1))


@pytest.mark.parametrize(
    ("model", "why"), [(Bag, "depend on the tokens after"), (lambda num_classes: Causal(num_classes, 5), "5 logits")]
)
def test_a_network_of_a_user_that_is_no_language_model_is_refused(model, why, texts, tmp_path):
    small = [each for each in options(texts, f"output_root={tmp_path}") if not each.startswith("model.")]
    with pytest.raises(ConfigError, match=why) as refused:
        runner.train(small, model=model)
    assert refused.value.key == "model"
    assert runner.train(small, model=Causal).status == "done"


@pytest.mark.parametrize(
    ("words", "key"),
    [
        (["workload=language", "data=digits"], "data"),
        (["workload=language", "model=tiny"], "model"),
        (["workload=classifier", "model=gpt_tiny"], "model"),
        (["workload=regression", "model=gpt_tiny"], "model"),
    ],
)
def test_only_networks_for_tokens_are_trained_on_text(words, key, texts):
    with pytest.raises(ConfigError) as refused:
        prepared_workload(*words)
    assert refused.value.key == key


def test_a_resumed_run_trains_on_the_same_contexts(texts, tmp_path):
    half = options(texts, f"output_root={tmp_path}", "save_every=2", "schedule=cosine", "keep=5")
    whole: Any = runner.train(half).directory
    again: Any = runner.train(
        [f"resume={whole}/checkpoints/step_00000002", f"output_root={tmp_path / 'again'}"]
    ).directory
    assert largest_difference(weights_at(again, STEPS), weights_at(whole, STEPS)) == 0


def test_another_text_than_that_of_the_checkpoint_is_refused(texts, tmp_path):
    folder = tmp_path / "texts"
    shutil.copytree(texts, folder)
    run = runner.train(options(folder, f"output_root={tmp_path}", "steps=2")).directory
    (folder / "00.txt").write_bytes(TEXTS[0].replace(b"=", b"~"))
    with pytest.raises(ConfigError, match="other content"):
        runner.train([f"resume={run}", "steps=4"])
