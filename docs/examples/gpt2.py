"""A language model of transformers, with its collator: `python -m runner workload=gpt2.py`."""

import argparse
import inspect

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import DataCollatorForLanguageModeling, GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

TEXTS = [line for line in inspect.getsource(argparse).splitlines() if len(line.split()) > 1]

VOCABULARY = ["[PAD]", "[UNK]", *sorted({word for text in TEXTS for word in text.split()})]  # in the same order always

words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(VOCABULARY)}, unk_token="[UNK]"))
words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="[PAD]", unk_token="[UNK]")


def model():
    sizes = {"n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4}
    dropout = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0}  # which each mode would draw differently
    return GPT2LMHeadModel(GPT2Config(vocab_size=len(tokenizer), **sizes, **dropout))


def data():
    samples = Dataset.from_dict(tokenizer(TEXTS, truncation=True, max_length=64)).train_test_split(0.2, seed=0)
    return samples["train"], samples["test"]


collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)  # labels of -100 where samples are padded


def training_step(model, batch):
    count = (batch["labels"][:, 1:] != -100).sum()  # transformers' loss is a mean over the tokens of a micro-batch
    return model(**batch).loss * count, count
