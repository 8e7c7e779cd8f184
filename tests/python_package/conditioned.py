"""python conditioned.py FOLDER: isograd.watch on 2 and 3 ranks, the third without samples, of steps in fp32 whose losses multiply
all of the gradient by a number that rounding makes wrong: DPO, CTC, a function of sums of cosines; and of a token mean, which has
no such number. Right ones for each of SEEDS, whose dumps are kept as FOLDER/RANKS-LOSS-SEED, and planted mistakes. As JSON, by
ranks, loss, case and seed: what rank 0 says."""
import functools
import json
import pathlib
import sys

import torch
import torch.nn as nn
import torch.nn.functional as F
from ranks import on_ranks

import isograd

SEEDS = range(4)
WORDS, WIDTH = 64, 16
MISTAKES = {"1 + 1e-5": {"factor": 1 + 1e-5}, "1 - 1e-5": {"factor": 1 - 1e-5}, "1.0002": {"factor": 1.0002},
            "rank_means": {"by_rank": True}}


class Words(nn.Module):
    """Logits of the next word, from the mean of those before it."""

    def __init__(self):
        super().__init__()
        self.words, self.hidden, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, words):
        x = self.words(words)
        before = x.cumsum(0) / torch.arange(1, len(words) + 1, dtype=x.dtype)[:, None]
        return self.head(x + F.gelu(self.hidden(before)))


def words(generator, least, most):
    return torch.randint(1, WORDS, (int(torch.randint(least, most + 1, (), generator=generator)),), generator=generator)


def log_probability(model, some):
    return model(some[:-1]).log_softmax(-1).gather(-1, some[1:, None]).sum()


@functools.cache
def before(dtype):
    torch.manual_seed(1000)
    return Words().to(dtype)


def dpo(model, pair):
    """Equation 7 of arXiv 2305.18290, beta = 0.1."""
    with torch.no_grad():
        old = before(next(model.parameters()).dtype)
        known = log_probability(old, pair[0]) - log_probability(old, pair[1])
    return -F.logsigmoid(0.1 * (log_probability(model, pair[0]) - log_probability(model, pair[1]) - known))[None]


class Sounds(nn.Module):
    def __init__(self):
        super().__init__()
        self.frames, self.hidden, self.head = nn.Conv1d(1, WIDTH, 10, 8), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WORDS)

    def forward(self, sound):
        return self.head(F.gelu(self.hidden(F.gelu(self.frames(sound[None, None])[0].T))))


def ctc(model, sample):
    chances = model(sample[0].to(next(model.parameters()).dtype)).log_softmax(-1)
    return F.ctc_loss(chances[:, None], sample[1][None], torch.tensor([len(chances)]), torch.tensor([len(sample[1])]), reduction="sum"), 1


def cosines(model, sample):
    one, other = (model(rows.to(next(model.parameters()).dtype)) for rows in sample)
    return -F.logsigmoid(F.cosine_similarity(one, other).sum() / 0.5)[None]


def rows(generator, number=None):
    return torch.randn(number or int(torch.randint(4, 48, (), generator=generator)), WIDTH, generator=generator)


def pair_of_rows(generator):
    one = rows(generator)
    return one, rows(generator, len(one))


def token_mean(model, some):
    return F.cross_entropy(model(some[:-1]), some[1:], reduction="none")


LOSSES = {  # model, loss, sample
    "dpo": (Words, dpo, lambda g: (words(g, 30, 47), words(g, 30, 47))),
    "ctc": (Sounds, ctc, lambda g: (torch.randn(80, generator=g), words(g, 2, 4))),
    "cosines": (lambda: nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 32)), cosines, pair_of_rows),
    "token_mean": (Words, token_mean, lambda g: words(g, 4, 47)),
}


def watched(rank, size, name, seed, folder=None, factor=1.0, by_rank=False):
    make_model, loss, sample = LOSSES[name]
    generator = torch.Generator().manual_seed(100 * seed + size)
    batch = [[[sample(generator)]], [[sample(generator)], [sample(generator)]], []][:size]
    torch.manual_seed(seed)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def number(micros):
        with torch.no_grad():
            found = [loss(model, one) for micro in micros for one in micro]
        return sum(one[1] if isinstance(one, tuple) else one.numel() for one in found)

    divisor = size * number(batch[rank]) if by_rank else sum(map(number, batch))
    with isograd.watch(model, optimizer, micro_batches=batch[rank], loss=loss, folder=folder) as step:
        for one in (one for micro in batch[rank] for one in micro):
            found = loss(model, one)
            ((found[0] if isinstance(found, tuple) else found.sum()) / divisor).backward()
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            torch.distributed.all_reduce(parameter.grad)
            parameter.grad.mul_(factor)
        optimizer.step()
    return {"passed": step.verdict.passed, "said": step.verdict.findings, "text": str(step.verdict)} if rank == 0 else None


def all_cases(rank, size, folder):
    found = {name: {"right": {seed: watched(rank, size, name, seed, folder / f"{size}-{name}-{seed}") for seed in SEEDS}} for name in LOSSES}
    for name, cases in found.items():
        cases.update({case: {1: watched(rank, size, name, 1, **how)} for case, how in MISTAKES.items()})
    return found


if __name__ == "__main__":
    kept = pathlib.Path(sys.argv[1])
    json.dump({size: on_ranks(size, lambda rank: all_cases(rank, size, kept))[0] for size in (2, 3)}, sys.stdout)  # noqa: B023
