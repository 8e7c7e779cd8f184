"""A small language model and packs of uneven documents, the same for every trainer of this folder."""
import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY, WIDTH, IGNORED = 61, 24, -100
PRECISION = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16"}  # as a dump calls it


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(dtype):
    torch.manual_seed(1)  # the same weights everywhere
    return Model().to(dtype)


def pack_of(rank):
    """Rank r's pack: documents of different lengths, hence another number of targets on each rank."""
    generator = torch.Generator().manual_seed(100 + rank)
    tokens = torch.randint(VOCABULARY, (40 + 50 * rank,), generator=generator)
    targets = torch.roll(tokens, -1)
    targets[::7] = IGNORED  # the last token of a document predicts nothing
    return tokens, targets, [2 * rank, 2 * rank + 1]  # and the ids of its two samples


def cross_entropy(model, tokens, targets, reduction):
    return F.cross_entropy(model(tokens), targets, ignore_index=IGNORED, reduction=reduction)


def num_targets(targets):
    return int((targets != IGNORED).sum())
