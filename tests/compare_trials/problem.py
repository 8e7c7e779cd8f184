"""Model and data of the trials: three small models, samples of uneven length, and how these are assigned to ranks."""
import dataclasses

import torch
import torch.nn as nn
import torch.nn.functional as F

IGNORED = -100
VOCABULARY, WIDTH, HEADS, MOST_POSITIONS = 37, 16, 2, 128


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, allowed):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=allowed.unsqueeze(1))
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention, self.norm2 = nn.LayerNorm(WIDTH), Attention(), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(3 * WIDTH, WIDTH)

    def forward(self, x, allowed):
        x = x + self.attention(self.norm(x), allowed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A causal decoder, its embedding tied to its head: tokens [rows, T] to logits [rows, T, VOCABULARY]."""

    def __init__(self, extras=()):
        super().__init__()
        self.embedding, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(MOST_POSITIONS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.checkpointed = "checkpointed" in extras
        if "unused" in extras:
            self.unused = nn.Linear(WIDTH, 3)
        if "gate" in extras:  # zero at first, so that what lies behind it has a gradient of exactly zero
            self.gated, self.gate = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.zeros(WIDTH))
        if "whisper" in extras:
            self.whisper = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, tokens, documents, noise=None):
        same = documents.unsqueeze(2) == documents.unsqueeze(1)
        allowed = same & torch.ones(same.shape[1:], dtype=torch.bool).tril()
        x = self.embedding(tokens) + self.positions(allowed.sum(-1) - 1)  # a position counts within its document
        if noise is not None:
            x = x * noise
        for block in self.blocks:
            if self.checkpointed:
                x = torch.utils.checkpoint.checkpoint(block, x, allowed, use_reentrant=False)
            else:
                x = block(x, allowed)
        if hasattr(self, "gate"):
            x = x + self.gate * self.gated(x)
        logits = F.linear(self.norm(x), self.embedding.weight)
        if hasattr(self, "whisper"):
            logits = logits + 1e-9 * self.whisper
        return logits


class Mlp(nn.Module):
    """Rows [n, 12] to logits [n, 7]."""

    def __init__(self, extras=()):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(12, 24), nn.GELU(), nn.LayerNorm(24), nn.Linear(24, 24), nn.GELU())
        self.head = nn.Linear(24, 7)

    def forward(self, rows, documents=None, noise=None):
        return self.head(self.layers(rows))


class Convolution(nn.Module):
    """Images [n, 2, 8, 8] to logits [n, 5]."""

    def __init__(self, extras=()):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 6, 3, padding=1), nn.Conv2d(6, 8, 3, stride=2)
        self.head = nn.Linear(8, 5)

    def forward(self, images, documents=None, noise=None):
        x = F.gelu(self.second(F.gelu(self.first(images))))
        return self.head(x.mean((2, 3)))


MODELS = {"transformer": Transformer, "mlp": Mlp, "convolution": Convolution}


@dataclasses.dataclass
class Sample:
    """A document, a session of rows or an image; or the part of one that lies on one rank."""

    id: int
    inputs: torch.Tensor  # tokens [T], rows [T, 12] or an image [1, 2, 8, 8]
    labels: torch.Tensor  # [T], at the positions of the inputs that they name: a language model's are not shifted yet
    targets: torch.Tensor  # [T], what each position must predict; IGNORED carries no loss
    whole: int  # valid targets of the whole sample
    first: bool = True  # whether this is the beginning of the sample


@dataclasses.dataclass
class Micro:
    """The input of one forward."""

    inputs: torch.Tensor
    documents: torch.Tensor  # [rows, T]
    labels: torch.Tensor  # as targets, not shifted
    targets: torch.Tensor  # one for each logit
    shares: torch.Tensor  # 1 / whole of each target's sample
    samples: list


@dataclasses.dataclass(frozen=True)
class Problem:
    """One optimizer step. `assignment` has, for each rank, how many samples each of its micro-batches has."""

    model: str = "transformer"
    assignment: tuple = ((3,), (1,), (2,))
    seed: int = 1
    shortest: int = 6
    longest: int = 30
    mean: str = "token"  # or "sample"
    precision: str = "fp32"  # "fp64", "fp32", "bf16" (autocast), "bf16_parameters"
    extras: tuple = ()
    frozen: tuple = ()
    masked: float = 0.2  # the part of the labels that carries no loss
    empty_ranks: tuple = ()  # ranks whose samples carry no loss at all
    cut: bool = False  # rank 0's first sample goes on on rank 1
    dropout: float = 0.0
    max_norm: float = 0.0  # clips where it is above zero
    decay: float = 0.0  # weight decay of matrices

    @property
    def ranks(self):
        return len(self.assignment)

    def samples(self):
        generator = torch.Generator().manual_seed(self.seed)
        owners = [rank for rank, micros in enumerate(self.assignment) for _ in range(sum(micros))]
        return [self._sample(10 + 3 * i, generator, owner in self.empty_ranks) for i, owner in enumerate(owners)]

    def _sample(self, number, generator, silent):
        length = 1 if self.model == "convolution" else int(
            torch.randint(self.shortest, self.longest + 1, (1,), generator=generator))
        if self.model == "transformer":
            inputs = torch.randint(1, VOCABULARY, (length,), generator=generator)  # 0 is padding
            labels = inputs.clone()
        else:
            shape, classes = ((12,), 7) if self.model == "mlp" else ((2, 8, 8), 5)
            inputs = torch.randn(length, *shape, generator=generator, dtype=torch.float64)
            labels = torch.randint(classes, (length,), generator=generator)
            inputs += labels.reshape(-1, *[1] * len(shape)) * 0.3
        if length > 3:
            hidden = torch.rand(length, generator=generator) < self.masked
            hidden[0] = False  # the first label names something, whether or not anything predicts it
            labels[hidden] = IGNORED
        if silent:
            labels[:] = IGNORED
        targets = labels
        if self.model == "transformer":  # position t predicts token t + 1
            targets = torch.cat([labels[1:], torch.tensor([IGNORED])])
        return Sample(number, inputs, labels, targets, int((targets != IGNORED).sum()))

    def assigned(self):
        """[rank][micro-batch] -> samples."""
        left = iter(self.samples())
        assignment = [[[next(left) for _ in range(size)] for size in micros] for micros in self.assignment]
        if self.cut:
            whole = assignment[0][0][0]
            at = len(whole.inputs) // 3
            head, tail = (dataclasses.replace(whole, inputs=whole.inputs[part], labels=whole.labels[part],
                                              targets=whole.targets[part], first=part.start is None)
                          for part in (slice(None, at), slice(at, None)))
            assignment[0][0][0] = head
            assignment[1][0].insert(0, tail)
        return assignment

    def make_model(self, precision):
        """The same weights in every precision that holds them; fp64 begins with what the trainer has."""
        torch.manual_seed(self.seed)
        model = MODELS[self.model](self.extras)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() == 1 and "gate" not in name and "whisper" not in name:  # norms and biases move too
                    p.add_(0.1 * torch.randn(p.shape))
        if "trained" in self.extras:
            self._train(model)
        if self.precision == "bf16_parameters":
            model = model.to(torch.bfloat16)
        for name, p in model.named_parameters():
            p.requires_grad_(not any(word in name for word in self.frozen))
        return model.to(dtype_of(precision))

    def _train(self, model):
        """A few updates by AdamW, of other samples: the checkpoint that both sides begin with."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for seed in range(5):
            micro = pack(dataclasses.replace(self, seed=1000 + seed).samples())
            optimizer.zero_grad()
            inputs = micro.inputs if micro.inputs.dtype == torch.int64 else micro.inputs.float()
            logits = model(inputs, micro.documents).flatten(0, -2)
            F.cross_entropy(logits, micro.targets, ignore_index=IGNORED).backward()
            optimizer.step()
        optimizer.zero_grad()


def dtype_of(precision):
    return {"fp64": torch.float64, "bf16_parameters": torch.bfloat16}.get(precision, torch.float32)


def num_targets(targets):
    return int((targets != IGNORED).sum())


def keyed_noise(sample, p):
    """Dropout's factors [T, WIDTH] of a sample, keyed by nothing but the sample."""
    kept = torch.rand(len(sample.inputs), WIDTH, generator=torch.Generator().manual_seed(sample.id)) >= p
    return kept / (1 - p)


def pack(samples, padded=False):
    """Samples as one row after the other, or each in a row of its own filled up with padding."""
    if samples[0].inputs.dtype != torch.int64:
        inputs, documents = torch.cat([s.inputs for s in samples]), torch.zeros(1, 1)
        labels, targets, shares = (torch.cat(parts) for parts in zip(
            *[(s.labels, s.targets, share_of(s)) for s in samples]))
        return Micro(inputs, documents, labels, targets, shares, samples)
    longest = max(len(s.inputs) for s in samples)

    def filled(values, fill):
        return F.pad(values, (0, longest - len(values) if padded else 0), value=fill)

    columns = [(filled(s.inputs, 0), filled(torch.full_like(s.inputs, i), -1), filled(s.labels, IGNORED),
                filled(s.targets, IGNORED), filled(share_of(s), 0.0)) for i, s in enumerate(samples)]
    join = torch.stack if padded else (lambda parts: torch.cat(parts).unsqueeze(0))
    inputs, documents, labels, targets, shares = (join(parts) for parts in zip(*columns))
    return Micro(inputs, documents, labels.flatten(), targets.flatten(), shares.flatten(), samples)


def share_of(sample):
    return torch.full((len(sample.inputs),), 1 / max(sample.whole, 1), dtype=torch.float64)
