"""python whole_batch.py [RANKS ...]: isograd.watch on two ranks of steps whose loss is over the whole batch, right and with planted
mistakes, and of bad input; as JSON, by case, of rank 0 (of bad input what each rank says). RANKS: such steps on that many ranks, each with
another number of samples, and rank 1 with none; by number and case.

The truth is one forward of all samples by plain torch in fp64, without isograd: how far the run is from it says which step is right.
"""
import json
import math
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn as nn
import torch.nn.functional as F
from ranks import on_ranks, results_of
from torch.nn.parallel import DistributedDataParallel

import isograd

CLASSES = 5
WEIGHTS = torch.tensor([0.3, 1.0, 2.5, 0.7, 1.4], dtype=torch.float64)


class Model(nn.Module):
    """Two towers with a learnt scale; a mixture of experts, of which each token goes to one; a head."""

    def __init__(self):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 8))
        self.text = nn.Sequential(nn.Linear(5, 12), nn.GELU(), nn.Linear(12, 8))
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.bias = nn.Parameter(torch.tensor(-0.5))
        self.router, self.experts, self.head = nn.Linear(6, 3), nn.Linear(6, 3 * 8), nn.Linear(8, CLASSES)

    def forward(self, images, texts):
        """As DDP calls it; what a step does not use has no gradient."""
        unused = 0 * (self.scale + self.bias) + 0 * sum(p.sum() for part in (self.router, self.experts, self.head) for p in part.parameters())
        return F.normalize(self.image(images), dim=-1) + unused, F.normalize(self.text(texts), dim=-1) + unused

    def tokens(self, x):
        """Logits of each token, and the router's probabilities."""
        probabilities = self.router(x).softmax(-1)
        chosen = probabilities.argmax(-1)
        hidden = self.experts(x).view(-1, 3, 8)[torch.arange(len(x)), chosen] * probabilities.gather(-1, chosen[:, None])
        return self.head(torch.tanh(hidden)), probabilities


def make_model():
    torch.manual_seed(3)
    return Model()


def pairs(rank, n=4, seed=0):
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return [(torch.randn(6, generator=generator), torch.randn(5, generator=generator)) for _ in range(n)]


def documents(rank, lengths=((3, 5), (9, 4))):
    """(tokens, targets, reward, group): groups have members on both ranks."""
    generator = torch.Generator().manual_seed(50 + rank)
    return [(torch.randn(n, 6, generator=generator), torch.randint(CLASSES, (n,), generator=generator),
             torch.rand((), generator=generator), i) for i, n in enumerate(lengths[rank])]


# ---- losses over the whole batch, as isograd is told ----

def two_towers(model, pair):
    return F.normalize(model.image(pair[0]), dim=-1), F.normalize(model.text(pair[1]), dim=-1)


def sigmoid_loss(model, features):
    images, texts = map(torch.stack, zip(*features))
    signs = 2 * torch.eye(len(images), dtype=images.dtype) - 1
    return -F.logsigmoid(signs * (model.scale.exp() * images @ texts.T + model.bias)).sum() / len(images)


def contrast(images, texts, scale, first=0):
    """Cross-entropy of the first ones, which are rows first, first + 1 ... of all texts."""
    logits = scale * images @ texts.T
    return F.cross_entropy(logits, first + torch.arange(len(images)))


def info_nce(model, features):
    images, texts = map(torch.stack, zip(*features))
    return (contrast(images, texts, model.scale.exp()) + contrast(texts, images, model.scale.exp())) / 2


def token_losses(model, document):
    return F.cross_entropy(model.tokens(document[0])[0], document[1], reduction="none")


def routed(model, document):
    probabilities = model.tokens(document[0])[1]
    return probabilities.sum(0), torch.bincount(probabilities.argmax(-1), minlength=3)


def balance(model, features):
    """Of Switch Transformers: experts x the sum of (share of tokens) x (mean probability)."""
    probabilities, counts = (sum(column) for column in zip(*features))
    return 3 * (counts * probabilities).sum() / counts.sum()**2


def log_probabilities(model, document):
    logits = model.tokens(document[0])[0]
    return logits.log_softmax(-1).gather(-1, document[1][:, None]).sum(), len(document[1]), document[2], document[3]


def advantages(model, features):
    """Rewards of a group less their mean, times the log-probability, over all tokens."""
    members = {group: [float(r) for *_, r, g in features if g == group] for *_, group in features}
    total = sum((float(reward) - sum(members[group]) / len(members[group])) * log for log, _, reward, group in features)
    return -total / sum(count for _, count, *_ in features)


def hinge(model, samples):
    """Of all pairs that are nearer than a margin, whose number is known when they are computed; the batch at once."""
    return hinge_of_rows(model, [two_towers(model, pair) for pair in samples])


def hinge_of_rows(_, rows):
    images, texts = map(torch.stack, zip(*rows))
    losses = F.relu(images @ texts.T - (images * texts).sum(-1, keepdim=True) + 0.4)
    active = losses[~torch.eye(len(images), dtype=torch.bool)]
    return active.sum() / (active > 0).sum()


def weighted(model, document):
    losses = token_losses(model, document)
    weights = WEIGHTS.to(losses.dtype)[document[1]]
    return (weights * losses).sum(), weights.sum()


def by_confidence(model, document):
    """A weight that is known after the forward."""
    losses = token_losses(model, document)
    return (losses.detach().exp() * losses).sum(), losses.detach().exp().sum()


def by_positives(model, document):
    """All of a document's losses, over its targets of one class, of which rank 1's have none."""
    return token_losses(model, document).sum(), (document[1] == 1).sum()


# ---- one process in fp64, which isograd has no part in ----

def by_features(loss, features):
    return lambda model, samples: loss(model, [features(model, sample) for sample in samples])


def token_mean(model, samples):
    return torch.cat([token_losses(model, sample) for sample in samples]).mean()


def quotient(parts):
    def truth(model, samples):
        above, below = zip(*(parts(model, sample) for sample in samples))
        return sum(above) / sum(below)
    return truth


def in_fp64(value):
    return value.double() if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def true_gradient(truth, everything):
    model = make_model().double()
    truth(model, [tuple(map(in_fp64, sample)) for sample in everything]).backward()
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in model.named_parameters()}


def apart(ones, truth):
    """The largest distance of a parameter, of the whole gradient's norm."""
    norm = math.sqrt(sum(float(g.square().sum()) for g in truth.values()))
    return max(float((ones[name].double() - g).norm()) for name, g in truth.items()) / norm


def judged(rank, truth, micro_batches, step, everything, model=None, original=make_model, **options):
    """A step under watch: its verdict, and how far the run and the reference are from the truth."""
    model = model or original()
    try:
        with tempfile.TemporaryDirectory() as folder:
            with isograd.watch(model, None, micro_batches=micro_batches, folder=folder, **options) as watched:
                step(model)
            right = truth(everything)
            from safetensors.torch import load_file
            reference = load_file(f"{folder}/one_process/gradients.safetensors") if rank == 0 else right
    except isograd.ConfigError as error:
        return {"error": str(error)}
    plain = getattr(model, "module", model)
    run = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in plain.named_parameters()}
    verdict = watched.verdict
    return {"passed": verdict.passed, "said": verdict.findings, "text": str(verdict), "run": apart(run, right),
            "reference": apart(reference, right), "json": [finding["id"] for finding in verdict.json["findings"]]}


# ---- steps ----

def averaged(model, over=2):
    """Over ranks; over=1: summed."""
    for p in model.parameters():
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad)
        p.grad /= over


def gathered(rows, how):
    """Rows of all ranks: "none", those of this rank; "cut", without the gradient of the others' losses; else with it."""
    if how == "none":
        return rows
    if how == "with":
        return isograd.all_gather_rows(rows)
    parts = [torch.zeros_like(rows) for _ in range(2)]
    dist.all_gather(parts, rows)
    if how == "whole":  # this rank's rows as they are, so that its loss, that of all rows, has their gradient
        parts[dist.get_rank()] = rows
    return torch.cat(parts)


def contrastive(rank, how, ddp=True):
    mine = pairs(rank)
    model = DistributedDataParallel(make_model()) if ddp else make_model()

    def step(model):
        images, texts = model(*map(torch.stack, zip(*mine)))
        scale = getattr(model, "module", model).scale.exp()
        first = 0 if how == "none" or how == "whole" else rank * len(mine)
        all_images, all_texts = gathered(images, how), gathered(texts, how)
        if how == "whole":
            images, texts = all_images, all_texts
        ((contrast(images, all_texts, scale, first) + contrast(texts, all_images, scale, first)) / 2).backward()
        averaged(model) if not ddp else None
    return judged(rank, lambda all_of: true_gradient(by_features(info_nce, two_towers), all_of), [mine], step, pairs(0) + pairs(1),
                  model, features=two_towers, loss=info_nce)


def accumulated(rank, cached):
    """Two micro-batches of a rank; cached: features first, then the loss over all of them, then each micro-batch once more (GradCache)."""
    micros = [pairs(rank), pairs(rank, seed=1)]
    everything = [pair for r in range(2) for seed in range(2) for pair in pairs(r, seed=seed)]

    def loss_of(features):
        return sigmoid_loss(model, features)

    def step(model):
        if not cached:
            for micro in micros:
                (loss_of([two_towers(model, pair) for pair in micro]) / 2).backward()
            return averaged(model)
        with torch.no_grad():
            held = [torch.stack(part) for part in zip(*(two_towers(model, pair) for micro in micros for pair in micro))]
        parts = [torch.zeros_like(part).requires_grad_() for part in held]
        every = [[torch.zeros_like(part) for _ in range(2)] for part in held]
        for part, some in zip(held, every):
            dist.all_gather(some, part)
        for leaf, part in zip(parts, held):
            leaf.data.copy_(part)
        for some, leaf in zip(every, parts):
            some[rank] = leaf
        loss_of(list(zip(*(torch.cat(some) for some in every)))).backward()
        for p in (model.scale, model.bias):
            p.grad /= 2  # the whole loss's, on each rank
        for j, micro in enumerate(micros):
            features = [torch.stack(part) for part in zip(*(two_towers(model, pair) for pair in micro))]
            torch.autograd.backward(features, [leaf.grad[4 * j:4 * j + 4] for leaf in parts])
        averaged(model)
        for p in model.parameters():
            p.grad *= 2

    model = make_model()
    return judged(rank, lambda all_of: true_gradient(by_features(sigmoid_loss, two_towers), all_of), micros, step, everything, model,
                  features=two_towers, loss=sigmoid_loss)


def mixture(rank, over_ranks, factor=1.0):
    """The token mean and the load balance of all ranks' tokens, or of each rank's."""
    mine = documents(rank)

    def step(model):
        mean = isograd.TokenMean().count([torch.cat([y for _, y, *_ in mine])])
        loss = mean.scale(sum(token_losses(model, document).sum() for document in mine))
        probabilities, counts = (sum(column) for column in zip(*(routed(model, document) for document in mine)))
        if over_ranks:
            dist.all_reduce(counts)
            (loss + factor * 0.05 * 3 * (counts * probabilities).sum() / counts.sum()**2).backward()
        else:
            (loss + 0.05 * balance(model, [(probabilities, counts)]) / 2).backward()
        averaged(model)
        for p in model.parameters():
            p.grad *= 2  # the sum

    def truth(model, samples):
        return token_mean(model, samples) + 0.05 * by_features(balance, routed)(model, samples)
    return judged(rank, lambda all_of: true_gradient(truth, all_of), [mine], step, documents(0) + documents(1), loss=token_losses,
                  terms=[isograd.Term(balance, 0.05, features=routed)])


def grouped(rank, means="group", tokens="all"):
    """Advantages of groups that lie on both ranks, each with two members there. means: of a group; of its members on this rank; of
    all samples of this rank, whatever the group. tokens: of all ranks, or of this one, and then averaged."""
    lengths = (3, 5, 4, 2, 6, 3), (9, 4, 2, 5, 1, 7)
    by_rank = [[(*document[:3], document[3] // 2) for document in documents(r, lengths)] for r in range(2)]
    everything, mine = by_rank[0] + by_rank[1], by_rank[rank]

    def step(model):
        def mean_of(group):
            among = everything if means == "group" else mine
            members = [float(reward) for *_, reward, other in among if other == group or means == "rank"]
            return sum(members) / len(members)

        count = sum(len(document[1]) for document in (everything if tokens == "all" else mine))
        features = [log_probabilities(model, document) for document in mine]
        (-sum((float(reward) - mean_of(group)) * log for log, _, reward, group in features) / count).backward()
        averaged(model, 1 if tokens == "all" else 2)
    return judged(rank, lambda all_of: true_gradient(by_features(advantages, log_probabilities), all_of), [mine], step, everything,
                  features=log_probabilities, loss=advantages)


def distilled(rank, over_ranks):
    """Distances between all pairs of samples are to be the teacher's, whose features stand in the samples."""
    teacher = nn.Linear(6, 4)
    torch.manual_seed(8)
    teacher.reset_parameters()
    of = {r: [(x, teacher(x).detach()) for x, _ in pairs(r)] for r in range(2)}

    def student(model, sample):
        return model.image(sample[0]), sample[1]

    def relations(model, features):
        own, given = map(torch.stack, zip(*features))
        return (torch.cdist(own, own) - torch.cdist(given, given)).square().mean()

    def step(model):
        own, given = map(torch.stack, zip(*(student(model, sample) for sample in of[rank])))
        if over_ranks:
            own, given = gathered(own, "with"), gathered(given, "with")
        relations(model, list(zip(own, given))).backward()
        averaged(model)
    return judged(rank, lambda all_of: true_gradient(by_features(relations, student), all_of), [of[rank]], step, of[0] + of[1],
                  features=student, loss=relations)


def mined(rank, over_ranks):
    mine = pairs(rank, 5)

    def step(model):
        images, texts = map(torch.stack, zip(*(two_towers(model, pair) for pair in mine)))
        if over_ranks:
            images, texts = gathered(images, "with"), gathered(texts, "with")
        hinge_of_rows(model, list(zip(images, texts))).backward()
        averaged(model)
    return judged(rank, lambda all_of: true_gradient(hinge, all_of), [mine], step, pairs(0, 5) + pairs(1, 5), loss=hinge, mean="batch")


class OverRanks(nn.BatchNorm1d):
    """As SyncBatchNorm, which takes no tensors of a CPU."""

    def forward(self, x):
        mean = torch.distributed.nn.all_reduce(x.mean(0)) / 2
        variance = torch.distributed.nn.all_reduce((x - mean).square().mean(0)) / 2
        return self.weight * (x - mean) / (variance + self.eps).sqrt() + self.bias


def make_normalised(norm=nn.BatchNorm1d):
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 12), norm(12), nn.Tanh(), nn.Linear(12, 5))


def squares(model, samples):
    images, texts = map(torch.stack, zip(*samples))
    return (model(images) - texts).square().mean()


def normalised(rank, over_ranks):
    mine = pairs(rank, 5)

    def truth(samples):
        model = make_normalised().double()
        squares(model, [tuple(map(in_fp64, sample)) for sample in samples]).backward()
        return {name: p.grad for name, p in model.named_parameters()}

    def step(model):
        squares(model, mine).backward()
        averaged(model)
    return judged(rank, truth, [mine], step, pairs(0, 5) + pairs(1, 5), make_normalised(OverRanks if over_ranks else nn.BatchNorm1d),
                  loss=squares, mean="batch", make_model=lambda: nn.SyncBatchNorm.convert_sync_batchnorm(make_normalised()))


def decorrelated(rank, over_ranks):
    """As Barlow Twins: the correlations of all rows, each column normalised by its mean and variance over all of them, or over a rank's."""
    mine = pairs(rank, 6)

    def normal(rows):
        return (rows - rows.mean(0)) / (rows.var(0, correction=0) + 1e-3).sqrt()

    def correlations(images, texts):
        return (images.T @ texts / len(images) - torch.eye(images.shape[1], dtype=images.dtype)).square().sum()

    def loss(model, features):
        return correlations(*(normal(torch.stack(part)) for part in zip(*features)))

    def step(model):
        rows = [torch.stack(part) for part in zip(*(two_towers(model, pair) for pair in mine))]
        correlations(*(normal(gathered(part, "with")) if over_ranks else gathered(normal(part), "with") for part in rows)).backward()
        averaged(model)
    return judged(rank, lambda all_of: true_gradient(by_features(loss, two_towers), all_of), [mine], step, pairs(0, 6) + pairs(1, 6),
                  features=two_towers, loss=loss)


def separable(rank, weights):
    """A mean over all samples, told as a loss of the whole batch: ranks count otherwise, and none is alone in anything."""
    mine = pairs(rank)

    def loss(model, samples):
        return sum(two_towers(model, pair)[0][0] for pair in samples) / len(samples)

    def step(model):
        (weights[rank] * loss(model, mine)).backward()
        averaged(model)
    return judged(rank, lambda all_of: true_gradient(loss, all_of), [mine], step, pairs(0) + pairs(1), loss=loss, mean="batch")


def weighted_mean(rank, loss, over_ranks):
    mine = documents(rank)

    def step(model):
        above, below = (sum(column) for column in zip(*(loss(model, document) for document in mine)))
        total = below.detach().clone().clamp(min=0 if over_ranks else 1)
        if over_ranks:
            dist.all_reduce(total)
        (above / total * (2 if over_ranks else 1)).backward()
        averaged(model)
    return judged(rank, lambda all_of: true_gradient(quotient(loss), all_of), [mine], step, documents(0) + documents(1), loss=loss,
                  mean="weighted")


CASES = {
    **{f"contrastive_{name}": lambda rank, how=how: contrastive(rank, how) for name, how in {
        "right": "with", "each_rank_alone": "none", "gathered_without_gradient": "cut", "whole_loss_without_gradient": "whole"}.items()},
    "accumulated_right": lambda rank: accumulated(rank, True), "accumulated_each_alone": lambda rank: accumulated(rank, False),
    "mixture_right": lambda rank: mixture(rank, True), "mixture_each_rank_alone": lambda rank: mixture(rank, False),
    "mixture_term_forgotten": lambda rank: mixture(rank, True, 0.0),
    "grouped_right": grouped, "grouped_by_rank": lambda rank: grouped(rank, "rank", "own"),
    "grouped_by_members_on_the_rank": lambda rank: grouped(rank, "own"), "grouped_by_rank_summed": lambda rank: grouped(rank, "rank"),
    "grouped_own_tokens": lambda rank: grouped(rank, tokens="own"),
    "decorrelated_right": lambda rank: decorrelated(rank, True), "decorrelated_by_rank": lambda rank: decorrelated(rank, False),
    "separable_right": lambda rank: separable(rank, (1, 1)), "separable_one_rank": lambda rank: separable(rank, (1.5, 0.5)),
    "distilled_right": lambda rank: distilled(rank, True), "distilled_each_rank_alone": lambda rank: distilled(rank, False),
    "mined_right": lambda rank: mined(rank, True), "mined_each_rank_alone": lambda rank: mined(rank, False),
    "normalised_right": lambda rank: normalised(rank, True), "normalised_each_rank_alone": lambda rank: normalised(rank, False),
    "weighted_right": lambda rank: weighted_mean(rank, weighted, True), "weighted_by_rank": lambda rank: weighted_mean(rank, weighted, False),
    "confident_right": lambda rank: weighted_mean(rank, by_confidence, True),
    "confident_by_rank": lambda rank: weighted_mean(rank, by_confidence, False),
    "positives_right": lambda rank: weighted_mean(rank, by_positives, True),
    "positives_by_rank": lambda rank: weighted_mean(rank, by_positives, False)}


# ---- more ranks, each with another number of samples, rank 1 with none ----

def of_all(rows, counts):
    """Rows of all ranks, of which each has that many; their gradient is the sum of what each rank's loss has by them."""
    before, after = sum(counts[:dist.get_rank()]), sum(counts[dist.get_rank() + 1:])
    return torch.distributed.nn.functional.all_reduce(F.pad(rows, (0, 0, before, after)))


def uneven_pairs(rank, size, of_rows, how, **options):
    """how: over the rows of all ranks; else of each rank's rows, weighted by how many, summed or averaged over ranks."""
    counts = [0 if r == 1 else 2 + r for r in range(size)]
    everything = [pair for r in range(size) for pair in pairs(r, counts[r])]
    mine = pairs(rank, counts[rank])

    def step(model):
        rows = [torch.stack(part) for part in zip(*(two_towers(model, pair) for pair in mine))] or [torch.zeros(0, 8)] * 2
        unused = 0 * sum(p.sum() for p in model.parameters())  # a rank without rows takes part in each collective
        if how == "right":
            of_rows(model, list(zip(*(of_all(part + unused, counts) for part in rows)))).backward()
        elif mine:
            (of_rows(model, list(zip(*rows))) * (counts[rank] / sum(counts) if how == "weighted" else 1)).backward()  # each rank's own
        averaged(model, 1 if how in ("weighted", "summed") else size)

    def truth(model, samples):
        return of_rows(model, [two_towers(model, pair) for pair in samples])
    return judged(rank, lambda all_of: true_gradient(truth, all_of), [mine], step, everything, **options)


def uneven_documents(rank, size, term, how):
    """A weighted mean, or a token mean with a load balance (term) of all ranks' documents; else that of each rank's, averaged."""
    lengths = [() if r == 1 else (3 + r, 5, 2 * r + 1)[:1 + r % 3] for r in range(size)]
    everything, mine = [document for r in range(size) for document in documents(r, lengths)], documents(rank, lengths)

    def of_step(value):
        """The sum over ranks; or what a rank's own mean, averaged over ranks, is divided by in its place."""
        value = torch.as_tensor(value).detach().clone()
        if how == "right":
            dist.all_reduce(value)
        return value

    def step(model):
        loss = 0 * sum(p.sum() for p in model.parameters())  # a rank without documents takes part in each collective
        if term:
            mean = isograd.TokenMean().count([torch.cat([y for _, y, *_ in mine] or [torch.zeros(0, dtype=torch.int64)])])
            loss = loss + mean.scale(sum((token_losses(model, document).sum() for document in mine), torch.zeros(())))
            probabilities, counts = (sum(part) for part in zip(*(routed(model, d) for d in mine))) if mine else [torch.zeros(3)] * 2
            counts = of_step(counts.float())
            part = 0.05 * 3 * (counts * probabilities).sum() / counts.sum().clamp(min=1)**2
        else:
            above, below = (sum(part) for part in zip(*(weighted(model, d) for d in mine))) if mine else [torch.zeros(())] * 2
            part = above / of_step(below).clamp(min=1e-9)
        (loss + (part if how == "right" else part / size)).backward()
        averaged(model, 1)

    def truth(model, samples):
        return (token_mean(model, samples) + 0.05 * by_features(balance, routed)(model, samples) if term else
                quotient(weighted)(model, samples))
    options = {"loss": token_losses, "terms": [isograd.Term(balance, 0.05, features=routed)]} if term else {
        "loss": weighted, "mean": "weighted"}
    return judged(rank, lambda all_of: true_gradient(truth, all_of), [mine], step, everything, **options)


def uneven(size):
    cases = {f"contrastive_{how}": lambda rank, how=how: uneven_pairs(rank, size, info_nce, how, features=two_towers, loss=info_nce)
             for how in ("right", "averaged", "weighted", "summed")}
    cases |= {f"mined_{how}": lambda rank, how=how: uneven_pairs(rank, size, hinge_of_rows, how, loss=hinge, mean="batch")
              for how in ("right", "averaged", "weighted")}
    cases |= {f"{name}_{how}": lambda rank, term=name == "term", how=how: uneven_documents(rank, size, term, how)
              for name in ("weights", "term") for how in ("right", "averaged")}
    return lambda rank: {name: case(rank) for name, case in cases.items()}


# ---- bad input ----

def watched(rank, loss=info_nce, features=two_towers, model=None, **options):
    model = model or make_model()
    with isograd.watch(model, None, micro_batches=options.pop("micro_batches", [pairs(rank)]), loss=loss, features=features, **options):
        contrast(*model(*map(torch.stack, zip(*pairs(rank)))), 1.0).backward()


class Remembers(nn.Module):
    """Its features are those of a sample and a share of the one before: in a buffer, or next to it."""

    def __init__(self, in_buffer):
        super().__init__()
        self.image, self.text, self.scale = nn.Linear(6, 8), nn.Linear(5, 8), nn.Parameter(torch.tensor(1.0))
        if in_buffer:
            self.register_buffer("before", torch.zeros(6))
        else:
            self.before = torch.zeros(6)

    def forward(self, images, texts):
        return self.image(images), self.text(texts)

    def features(self, image):
        other = image + 0.1 * self.before.to(image.dtype)
        self.before.copy_(image)
        return self.image(other)


def remembering(rank, in_buffer):
    torch.manual_seed(0)
    watched(rank, features=lambda model, pair: (model.features(pair[0]), model.text(pair[1])), model=Remembers(in_buffer))


def around(rank, what):
    """A loss that computes with the model of the run."""
    trained = DistributedDataParallel(make_model()) if what == "wrapped" else make_model()
    plain = getattr(trained, "module", trained)
    watched(rank, model=trained, features=None, loss={
        "called": lambda model, pair: plain.image(pair[0]), "wrapped": lambda model, pair: trained(*pair)[0],
        "weight": lambda model, pair: F.linear(pair[0].to(plain.image[0].weight.dtype), plain.image[0].weight)}[what])


def noisy(model, features):
    return info_nce(model, features) + torch.randn(())


def without_memory(model, samples):
    """As a whole batch on one process asks for: 8 PiB."""
    return torch.stack([model.image(a).sum() for a, _ in samples]).sum() + torch.empty(2**50, dtype=torch.float64)[0]


def one_cannot_be_sent(rank):
    watched(rank, micro_batches=[[*pairs(rank), (x for x in ())]])


BAD = {
    "closes_over_the_model": lambda rank: around(rank, "called"),
    "closes_over_the_wrapper": lambda rank: around(rank, "wrapped"),
    "closes_over_a_weight": lambda rank: around(rank, "weight"),
    "make_model_gives_the_trained_one": lambda rank: (lambda model: watched(rank, model=model, make_model=lambda: model))(make_model()),
    "does_not_pickle": one_cannot_be_sent,
    "batch_does_not_fit": lambda rank: watched(rank, features=None, mean="batch", loss=without_memory),
    "features_do_not_fit": lambda rank: watched(rank, loss=lambda model, features: info_nce(model, features) + torch.empty(2**50)[0]),
    "order_in_a_buffer": lambda rank: remembering(rank, True),
    "order_in_an_attribute": lambda rank: remembering(rank, False),
    "random_features": lambda rank: watched(rank, features=lambda m, s: two_towers(m, (F.dropout(s[0], 0.3), s[1]))),
    "random_loss": lambda rank: watched(rank, loss=noisy),
    "random_batch": lambda rank: watched(rank, features=None, mean="batch", loss=lambda m, s: hinge(m, s) * torch.rand(())),
    "no_single_number": lambda rank: watched(rank, loss=lambda m, f: torch.stack([a for a, _ in f])),
    "features_and_mean": lambda rank: watched(rank, mean="sample"),
    "no_weight": lambda rank: watched(rank, features=None, mean="weighted", loss=lambda m, s: m.image(s[0])),
    "weight_with_gradient": lambda rank: watched(rank, features=None, mean="weighted", loss=lambda m, s: (m.image(s[0]).sum(), m.scale.exp())),
    "features_without_gradient": lambda rank: watched(rank, features=lambda m, s: tuple(f.detach() for f in two_towers(m, s)),
                                                      loss=lambda m, f: sum(a.sum() for a, _ in f)),
    "features_raise": lambda rank: watched(rank, features=lambda m, s: m.image(s[2])),
    "no_mean": lambda rank: watched(rank, features=None, mean="batches"),
}


if __name__ == "__main__":
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    if sys.argv[1:]:
        print(json.dumps({size: on_ranks(int(size), uneven(int(size)))[0] for size in sys.argv[1:]}))
        sys.exit()
    first, second = on_ranks(2, lambda rank: results_of(rank, CASES, BAD))
    print(json.dumps({**{name: first[name] for name in CASES}, **{name: [first[name], second[name]] for name in BAD}}))
