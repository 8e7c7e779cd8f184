"""Models and data of the trainers, and how far a step is from one process in fp64, by code that shares nothing with isograd."""
import contextlib
import copy
import inspect
import math

import isograd
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

VOCABULARY, WIDTH, IGNORED = 30, 12, -100


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.qkv = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)
        self.norm2 = torch.nn.LayerNorm(WIDTH)
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden, sees):  # hidden [..., T, WIDTH], sees [..., T, T]
        query, key, value = self.qkv(self.norm(hidden)).chunk(3, -1)
        hidden = hidden + self.out(F.scaled_dot_product_attention(query, key, value, attn_mask=sees))
        return hidden + self.down(F.gelu(self.up(self.norm2(hidden))))


class Decoder(torch.nn.Module):
    def __init__(self, tied=False, recompute=None):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.place = torch.nn.Embedding(64, WIDTH)
        self.blocks = torch.nn.ModuleList(Block() for _ in range(2))
        self.norm = torch.nn.LayerNorm(WIDTH)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.recompute = recompute  # None, or use_reentrant of torch.utils.checkpoint
        if tied:
            self.head.weight = self.embedding.weight

    def features(self, tokens, sees=None, positions=None):
        length = tokens.shape[-1]
        sees = torch.ones(length, length, dtype=torch.bool).tril() if sees is None else sees
        positions = torch.arange(length) if positions is None else positions
        hidden = self.embedding(tokens) + self.place(positions)
        for block in self.blocks:
            if self.recompute is None:
                hidden = block(hidden, sees)
            else:
                hidden = checkpoint(block, hidden, sees, use_reentrant=self.recompute)
        return self.norm(hidden)

    def forward(self, tokens, sees=None, positions=None):
        return self.head(self.features(tokens, sees, positions))


class Dropout(torch.nn.Module):
    """Of code of one's own."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, hidden):
        return F.dropout(hidden, self.p, self.training)


class Classifier(torch.nn.Module):
    def __init__(self, dropout=None, statistics=False):
        super().__init__()
        self.stem = torch.nn.Linear(6, WIDTH)
        self.normal = torch.nn.BatchNorm1d(WIDTH) if statistics else torch.nn.LayerNorm(WIDTH)
        self.dropout = dropout or torch.nn.Identity()
        self.trunk = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 5)

    def forward(self, x):
        hidden = self.dropout(torch.tanh(self.normal(self.stem(x.to(self.stem.weight.dtype)))))
        return self.head(hidden + torch.tanh(self.trunk(hidden)))


class Towers(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = torch.nn.Linear(6, WIDTH), torch.nn.Linear(7, WIDTH)
        self.scale = torch.nn.Parameter(torch.tensor(1.0))

    def encode(self, image, text):
        image, text = image.to(self.scale.dtype), text.to(self.scale.dtype)
        return F.normalize(torch.tanh(self.image(image)), dim=-1), F.normalize(torch.tanh(self.text(text)), dim=-1)

    def forward(self, image, text):
        return *self.encode(image, text), self.scale.exp()


class Experts(torch.nn.Module):
    """Tokens [T, 6] -> (logits [T, 5], probabilities of the experts [T, 3])."""

    def __init__(self):
        super().__init__()
        self.stem = torch.nn.Linear(6, WIDTH)
        self.router = torch.nn.Linear(WIDTH, 3)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, 5)

    def forward(self, x):
        hidden = torch.tanh(self.stem(x.to(self.stem.weight.dtype)))
        routed = self.router(hidden).softmax(-1)
        mixed = torch.stack([expert(hidden) for expert in self.experts], -1)
        return self.head(torch.tanh((mixed * routed[:, None]).sum(-1))), routed


def next_token(model, document):
    """A document's losses, one for each target."""
    return F.cross_entropy(model(document[:-1]), document[1:], reduction="none")


def mean_of(losses):
    """The truth where every target counts alike."""
    return lambda model, samples: torch.cat([losses(model, sample).flatten() for sample in samples]).mean()


def plain(model):
    return model.module if isinstance(model, DistributedDataParallel) else model


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def local(tensor):
    return None if tensor is None else (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach().clone()


def full(tensor):
    """Of a DTensor the whole, as far as its placements say what there is to be put together."""
    return None if tensor is None else (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def whole(name, tensors, shards):
    """The ranks' tensors: of shards the one that they make, as often as their groups are."""
    if shards == 1:
        return [tensor[name] for tensor in tensors]
    groups = [tensors[i:i + shards] for i in range(0, len(tensors), shards)]
    return [torch.cat([part[name] for part in group]) if all(part[name] is not None for part in group) else None for group in groups]


def doubled(samples):
    return torch.utils._pytree.tree_map(lambda x: x.double() if torch.is_tensor(x) and x.is_floating_point() else x, samples)


class World:
    def __init__(self, size, dtype):
        self.size, self.rank, self.dtype = size, dist.get_rank(), dtype
        self.random = torch.Generator().manual_seed(100 + self.rank)
        self.unclipped, self.own = None, local
        self.result = {"error": "the trainer opened no watch"}

    def documents(self, *lengths):
        """This rank's documents: lengths[rank] is a list of micro-batches, each a list of lengths."""
        return [[torch.randint(VOCABULARY, (length,), generator=self.random) for length in batch] for batch in lengths[self.rank]]

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.random, dtype=self.dtype)

    def number(self, *shape, below):
        return torch.randint(below, shape, generator=self.random)

    def sum(self, number):
        """Of all ranks."""
        total = torch.as_tensor(number).clone()
        dist.all_reduce(total)
        return total

    def measure(self, model):
        """The gradient as it is before it is clipped."""
        self.unclipped = {name: self.own(p.grad) for name, p in plain(model).named_parameters()}

    @contextlib.contextmanager
    def watch(self, model, optimizer, micro_batches, loss, truth, make=None, clip=math.inf, shards=1, spread=False, **options):
        """isograd.watch around the block, and the distance of its gradient and update from one process in fp64.

        truth(model, all samples) is what is to be differentiated; of groups of `shards` ranks each holds a part of the model.
        With `spread` a parameter is on some ranks only, or a DTensor of which a group of ranks holds the whole.
        """
        self.own = full if spread else local
        samples = doubled([sample for rank in gathered(micro_batches) for batch in rank for sample in batch])
        parameters = dict(plain(model).named_parameters())
        before = {name: self.own(p) for name, p in parameters.items()}
        reference = (make() if make else copy.deepcopy(plain(model))).double()
        begin = gathered(before)
        with torch.no_grad():
            for name, p in reference.named_parameters():
                p.copy_(next(rank[name] for rank in begin if name in rank) if spread else whole(name, begin, shards)[0])
        state = copy.deepcopy(optimizer.state_dict()) if shards == 1 and not spread else {"state": {}}
        taken_by = inspect.signature(type(optimizer)).parameters
        options_of = {key: value for key, value in optimizer.param_groups[0].items() if key in taken_by and key not in ("params", "fused")}
        given = {}

        def taken(*_):
            given.update({name: self.own(p.grad) for name, p in plain(model).named_parameters() if name not in given})

        hook = optimizer.register_step_pre_hook(taken)
        error, entered = None, False
        try:
            with isograd.watch(model, optimizer, micro_batches=micro_batches, loss=loss, make_model=make, **options) as step:
                entered = True
                yield step
        except (isograd.ConfigError, isograd.PeerError) as refusal:
            if not entered:
                raise
            error = f"{type(refusal).__name__}: {refusal}"
        hook.remove()
        taken()
        moved = {name: self.own(p) for name, p in plain(model).named_parameters()}
        self.result = self._distance(reference, truth(reference, samples), begin, gathered(given), gathered(moved),
                                     gathered(self.unclipped or given), shards, clip if self.unclipped else math.inf, optimizer, state,
                                     options_of)
        if error is not None:
            self.result["error"] = error
        elif self.rank == 0:
            verdict = step.verdict
            self.result |= {"passed": bool(verdict), "findings": list(verdict.findings), "changes": dict(verdict.changes),
                            "text": str(verdict)}

    def _distance(self, reference, loss, begin, given, moved, unclipped, shards, clip, optimizer, state, options):
        loss.backward()
        trained = {name: p for name, p in reference.named_parameters() if p.requires_grad}
        for p in trained.values():
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        start = {name: p.detach().clone() for name, p in trained.items()}

        def far(ranks, right):
            """The largest distance of a rank, or of a group of them, relative to the length of what is right."""
            length = torch.stack([tensor.norm() for tensor in right.values()]).norm().item()
            lacks = [{} if shards > 1 else {name: wanted for name, wanted in right.items() if name not in held} for held in begin]
            found = {name: whole(name, [{name: None} | rank | less for rank, less in zip(ranks, lacks)], shards) for name in right}
            parts = [[torch.zeros_like(right[name]) if tensor is None else tensor.double() for tensor in tensors]
                     for name, tensors in found.items()]
            return max(torch.stack([(tensor - wanted).norm() for tensor, wanted in zip(group, right.values())]).norm().nan_to_num(math.inf)
                       .item() for group in zip(*parts)) / length

        gradient = far(unclipped, {name: p.grad for name, p in trained.items()})
        norm = torch.stack([p.grad.norm() for p in trained.values()]).norm().item()
        for p in trained.values():
            p.grad *= min(1.0, clip / (norm + 1e-6))
        clipped = far(given, {name: p.grad for name, p in trained.items()})
        alone = type(optimizer)(trained.values(), **options)
        if state["state"]:
            alone.load_state_dict({**state, "param_groups": alone.state_dict()["param_groups"]})
        alone.step()
        steps = [{name: None if rank[name] is None else rank[name] - first[name] for name in trained if name in rank}
                 for rank, first in zip(moved, begin)]
        return {"gradient": max(gradient, clipped), "update": far(steps, {name: p.detach() - start[name] for name, p in trained.items()})}
