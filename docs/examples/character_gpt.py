"""A small language model, of which only the answers count in the loss: `python -m runner workload=character_gpt.py`."""

import torch
from torch import nn

DIGITS = 3
PROMPT = 2 * DIGITS + 2  # as in 123+456=


class GPT(nn.Module):
    def __init__(self, width=64):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(128, width), nn.Embedding(PROMPT + DIGITS + 1, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0, batch_first=True, norm_first=True)
        self.layers, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, 128)

    def forward(self, ids):
        mask = nn.Transformer.generate_square_subsequent_mask(ids.shape[1], ids.device, self.head.weight.dtype)
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1], device=ids.device))
        return self.head(self.layers(x, mask, is_causal=True)).transpose(1, 2)  # [n, classes, length]


model = GPT


def data():
    numbers = torch.randint(10**DIGITS, (4000, 2)).tolist()
    texts = [f"{a:0{DIGITS}}+{b:0{DIGITS}}={a + b:0{DIGITS + 1}}" for a, b in numbers]
    ids = torch.tensor([list(text.encode()) for text in texts])
    targets = ids[:, 1:].clone()
    targets[:, : PROMPT - 1] = -100  # ignored: the default loss is a mean over the other tokens of the whole batch
    return ids[:, :-1], targets
