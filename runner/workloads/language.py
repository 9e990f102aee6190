"""Language modeling: a network that predicts the next token of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

import torch
from torch.nn.functional import cross_entropy

from runner.config.errors import ABSENT, ConfigError, check, errors_under
from runner.config.limits import Range
from runner.config.options import chosen_option
from runner.data.base import IGNORED, Samples
from runner.data.text import TokenData
from runner.data.token_files import TokenSamples
from runner.device import sum_dtype
from runner.model.user import UserModel
from runner.seeds import derive
from runner.tracking.metrics import MetricSums
from runner.workloads.samples import SampleWorkload
from runner.workloads.supervised import SupervisedWorkload, comparable

_TEMPERATURE = 0.8  # of the sample of an evaluation


@dataclass
class Language(SupervisedWorkload, SampleWorkload[TokenSamples]):
    """The training of a language model on the tokens of texts; for options, see `conf/workload/language.yaml`.

    The network is called with ids of tokens, int64 [n, context], and returns logits, [n, context, vocabulary], of which
    those at a position depend on no later token. The loss is the mean cross-entropy of the tokens, but not of the first
    one of a document.
    """

    sample_tokens: Annotated[int, Range(least=0, most=10_000)] = 200  # which are drawn one after another

    _num_tried = 0  # contexts, while the network is only tried

    best_possible: ClassVar[Mapping[str, float]] = {"loss": 0, "perplexity": 1, "bits_per_byte": 0}

    def usable(self, samples: Samples) -> TokenSamples:
        if isinstance(samples, TokenSamples):
            return samples
        why, name = "its samples are no tokens of a text", chosen_option("data", self.data)
        raise ConfigError("data", name, why, "use data=text, or data=tokens")

    @property
    def num_outputs(self) -> int:
        return self.train.vocabulary.size

    @property
    def loss_form(self) -> tuple[tuple[str, ...], bool]:
        return self.train_metrics, True

    def criterion(self, outputs: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the sum of the cross-entropy of logits [n, context, vocabulary], and the number of its tokens."""
        self._check_size(outputs)
        return token_losses(outputs, targets).sum(), (targets != IGNORED).sum()

    def _check_size(self, outputs: torch.Tensor) -> None:
        given, wanted = outputs.shape[-1], self.train.vocabulary.size
        why = f"it returns {given:,} logits for a token, and the vocabulary has {wanted:,} tokens"
        check(given == wanted, "model", ABSENT, why, "build it for `num_classes` outputs")

    def few_samples(self, count: int, device: torch.device) -> AbstractContextManager[None] | None:
        return self._tried(count) if isinstance(self.model, UserModel) else None

    @contextmanager
    def _tried(self, count: int) -> Iterator[None]:
        self._num_tried = count
        try:
            yield
        finally:
            self._num_tried = 0

    def _try(self, infer: Callable[[torch.Tensor], torch.Tensor], count: int, device: torch.device) -> MetricSums:
        """Refuse a network whose logits depend on later tokens: it would be shown what it is to predict."""
        size, [context] = self.held_out.vocabulary.size, self.held_out.shape
        ids = torch.arange(count * context, device=device).view(count, context) % size
        changed = torch.cat((ids[:, :-1], (ids[:, -1:] + 1) % size), 1)
        before, after = (infer(each)[:, :-1] for each in (ids, changed))
        self._check_size(before)
        why = "its logits for a token depend on the tokens after it, which they are to predict"
        tolerance = 16 * torch.finfo(before.dtype).eps * float(before.abs().amax()) if before.numel() else 0.0
        check(torch.allclose(before, after, 0, tolerance), "model", ABSENT, why, "mask attention, or pad on the left")
        return {"tokens": torch.ones(2, dtype=sum_dtype(device), device=device), "sample": []}

    def describe(self) -> dict[str, str]:
        samples, context = self.train, self.train.shape[0]
        return {"data": f"{self.summary()} of {context:,} tokens, {samples.vocabulary.size:,} tokens in the vocabulary"}

    def scalars(self, rates: Mapping[str, float]) -> dict[str, float]:
        rate = rates.get("time/samples_per_second")
        return {} if rate is None else {"time/tokens_per_second": rate * self.train.shape[0]}

    def evaluate(
        self, infer: Callable[[torch.Tensor], torch.Tensor], shard: tuple[int, int], device: torch.device
    ) -> MetricSums:
        if self._num_tried:
            return self._try(infer, max(1, self._num_tried // shard[1]), device)
        totals = torch.zeros(2, dtype=sum_dtype(device), device=device)
        for batch in self.held_out.in_order(self.eval_batch_size, shard, device):
            outputs, targets = comparable(infer(batch.inputs), batch.targets)
            losses = token_losses(outputs, targets).sum(1)  # a text at a time, so that their batches change nothing
            totals += torch.stack([each.sum(dtype=totals.dtype) for each in (losses, targets != IGNORED)])
        sample = [self._sample(infer, device)] if shard[0] == 0 and self.sample_tokens and not self.split else []
        return {"tokens": totals, "sample": sample}

    def summarize(self, sums: MetricSums) -> dict[str, float]:
        total, count = sums["tokens"].tolist()
        loss, samples = total / count, self.held_out
        metrics = {"loss": loss, "perplexity": math.exp(min(loss, 700))}
        if samples.num_bytes:
            # With what the ends of documents cost; bytes of the text in place of tokens.
            metrics["bits_per_byte"] = loss / math.log(2) * len(samples.tokens) / samples.num_bytes
        return metrics

    def texts(self, sums: MetricSums) -> dict[str, str]:
        return {"eval/sample": sums["sample"][0]} if sums["sample"] else {}

    def vote(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return the logarithm of the mean of the models' probabilities, [n, context, vocabulary]."""
        return outputs.log_softmax(-1).logsumexp(0) - math.log(len(outputs))

    def signature(self) -> dict[str, Any]:
        vocabulary = self.train.vocabulary
        sizes = {"context": self.train.shape[0], "vocabulary": vocabulary.size}
        return {"text": sizes | {"tokenizer": vocabulary.identity}}

    def continue_with(self, saved: Mapping[str, Any]) -> None:
        assert isinstance(self.data, TokenData)
        with errors_under("data"):
            self.data.check_vocabulary(saved)  # whatever else `data.changed=accept` allows
        super().continue_with(saved)

    def saved_model(self, signature: Mapping[str, Any]) -> torch.nn.Module:
        if "text" not in signature:
            return super().saved_model(signature)
        with errors_under("model"):
            return self.model.build((signature["text"]["context"],), signature["text"]["vocabulary"])

    def continuation(self, model: torch.nn.Module, prompt: str, signature: Mapping[str, Any], **sampling: Any) -> str:
        """Return the text with which `model` continues `prompt`; for `sampling`, see `continued`.

        Raises:
            ConfigError: if the prompt cannot be used, or the tokenizer is not that of `signature`.
        """
        assert isinstance(self.data, TokenData)
        with errors_under("data"):
            vocabulary = self.data.vocabulary
        why, remedy = "the file is not that with which the model was trained", "restore it"
        is_same = vocabulary.identity == signature["text"]["tokenizer"]
        check(is_same, "data.tokenizer", self.data.tokenizer, why, remedy)
        ids, context = vocabulary.encode(prompt), signature["text"]["context"]
        check(bool(ids), "--prompt", prompt, "there is nothing to continue", "type the beginning of a text")
        why = f"it has {len(ids):,} tokens, and the model was trained with a context of {context:,}"
        check(len(ids) <= context, "--prompt", ABSENT, why, "type a shorter one")
        with torch.no_grad():
            return vocabulary.decode_after(ids, continued(model, ids, context, end=vocabulary.end, **sampling))

    def _sample(self, infer: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> str:
        """Return the beginning of the held-out text, and how the model continues it."""
        vocabulary, [context] = self.held_out.vocabulary, self.held_out.shape
        tokens = self.held_out.tokens
        ids = tokens.read(0, min(len(tokens), max(1, context // 8))).tolist()
        options = {"temperature": _TEMPERATURE, "seed": derive(0, "sample"), "device": device}
        new = continued(infer, ids, context, self.sample_tokens, **options)
        return vocabulary.decode([*ids, *new])


def token_losses(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the cross-entropy of each token, [n, context], given logits [n, context, vocabulary]; 0 if `IGNORED`.

    Raises:
        ConfigError: if the logits have another shape.
    """
    why = f"it returns the shape {list(outputs.shape)} for tokens of the shape {list(targets.shape)}"
    remedy = "return logits of the shape [n, context, vocabulary]"
    check(outputs.dim() == 3 and outputs.shape[:2] == targets.shape, "model", ABSENT, why, remedy)
    losses = cross_entropy(outputs.flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="none")
    return losses.view_as(targets)


def continued(
    infer: Callable[[torch.Tensor], torch.Tensor],
    ids: list[int],
    context: int,
    count: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    end: int | None = None,
    device: torch.device | str = "cpu",
) -> list[int]:
    """Return `count` ids that follow `ids`, drawn one after another from what a language model predicts.

    Args:
        infer: returns the logits, [1, length, vocabulary], for ids [1, length].
        ids: those of the prompt, of which the last `context` are used.
        context: the most tokens that the model can take.
        count: the number of ids to return, less if `end` is drawn.
        temperature: divides the logits; 0: the most probable token.
        top_k: if given, only the k most probable tokens are drawn.
        seed: determines the draws.
        end: the id at which the text ends.
        device: that of the ids that `infer` gets.
    """
    generator, ids, prompt = torch.Generator().manual_seed(seed), [*ids], len(ids)
    while len(ids) < prompt + count:
        recent = ids[-context:]
        # Three lengths in all, as each new one would be compiled; no logit depends on the zeros that follow.
        length = next(each for each in (-(-context // 4), -(-context // 2), context) if each >= len(recent))
        inputs = torch.tensor([recent + [0] * (length - len(recent))], device=device)
        logits = infer(inputs)[0, len(recent) - 1].double().cpu()
        if top_k is not None:
            logits[logits < logits.topk(min(top_k, len(logits))).values[-1]] = -math.inf
        if temperature:
            probabilities = ((logits - logits.max()) / temperature).softmax(0)  # finite, however small it is
            new = int(torch.multinomial(probabilities, 1, generator=generator))
        else:
            new = int(logits.argmax())
        if new == end:
            break
        ids.append(new)
    return ids[prompt:]
