"""From which module is a line of Python? A BERT of transformers: `python -m runner workload=bert.py`."""

import argparse
import inspect
import tarfile

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import BertConfig, BertForSequenceClassification, DataCollatorWithPadding, PreTrainedTokenizerFast

MODULES = argparse, tarfile
LINES = [(line, number) for number, module in enumerate(MODULES) for line in inspect.getsource(module).splitlines()]
TEXTS, LABELS = zip(*[(line, number) for line, number in LINES if line.strip()], strict=True)

VOCABULARY = ["[PAD]", "[UNK]", *sorted({word for text in TEXTS for word in text.split()})]  # in the same order always

words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def model():
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    dropout = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}  # which each mode would draw differently
    config = BertConfig(vocab_size=len(tokenizer), num_labels=len(MODULES), **sizes, **dropout)
    return BertForSequenceClassification(config)


def data():
    samples = Dataset.from_dict({**tokenizer(list(TEXTS), truncation=True, max_length=64), "labels": LABELS})
    parts = samples.train_test_split(0.2, seed=0)
    return parts["train"], parts["test"]


collate = DataCollatorWithPadding(tokenizer)


def training_step(model, batch):
    return model(**batch).loss


def evaluation_step(model, batch):
    outputs = model(**batch)
    return {"loss": outputs.loss, "accuracy": (outputs.logits.argmax(1) == batch["labels"]).float().mean()}
