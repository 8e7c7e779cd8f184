"""python means.py: means under DDP, FSDP2 and a loop of one's own, compared with one process; errors as JSON.

Once as is, on each number of ranks, and on three with a planted fault: "averaged" (sum_gradients is left out),
"own_count" (each rank counts for itself). The reference is plain PyTorch on the whole batch in fp64.
"""
import contextlib
import json
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import isograd

IGNORED, CLASSES, WIDTH = -100, 11, 6
# [rank][micro-batch] -> lengths of samples; ranks hold uneven amounts, and nothing at all.
ASSIGNMENTS = {2: [[[5, 9], [2]], [[1]]], 3: [[[4], [7, 1], [3]], [[]], [[6], [2, 2]]],
         4: [[[3], [2]], [[8], [1]], [[2, 2, 2]], [[12]]]}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.norm = nn.Embedding(CLASSES, WIDTH), nn.LayerNorm(WIDTH)
        self.hidden = nn.Linear(WIDTH, 7)
        self.out, self.frozen = nn.Linear(7, WIDTH), nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, tokens):
        x = self.frozen(self.out(torch.tanh(self.hidden(self.norm(self.embedding(tokens))))))
        return F.linear(x, self.embedding.weight)  # tied


def make_model():
    torch.manual_seed(3)
    return Model().double()


def micro_batch(numbers, lengths):
    """Tokens, targets, weights and sample ids [T] of one micro-batch."""
    parts = []
    for number, length in zip(numbers, lengths):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(CLASSES, (length,), generator=generator)
        targets = torch.randint(CLASSES, (length,), generator=generator)
        targets[torch.rand(length, generator=generator) < 0.2] = IGNORED
        weights = torch.rand(length, generator=generator, dtype=torch.float64) * (targets != IGNORED)
        parts.append((tokens, targets, weights, torch.full((length,), number)))
    empty = (torch.zeros(0, dtype=torch.int64),) * 2 + (torch.zeros(0, dtype=torch.float64), torch.zeros(0, dtype=torch.int64))
    return tuple(torch.cat(column) for column in zip(empty, *parts))


def assigned(size, cut):
    """[rank][micro-batch]; cut: the last sample of each rank goes on as the first of the next."""
    count, assignment = 0, []
    for lengths in ASSIGNMENTS[size]:
        micros = []
        for some in lengths:
            micros.append(micro_batch(range(count, count + len(some)), some))
            count += len(some)
        assignment.append(micros)
    if cut:
        for rank in range(size - 1):
            *columns, ids = assignment[rank + 1][0]
            if len(ids) and len(assignment[rank][-1][3]):
                assignment[rank + 1][0] = *columns, torch.where(ids == ids[0], assignment[rank][-1][3][-1], ids)
    return assignment


def losses(model, tokens, targets):
    return F.cross_entropy(model(tokens), targets, ignore_index=IGNORED, reduction="none")


def one_process(assignment, kind):
    model = make_model()
    tokens, targets, weights, ids = (torch.cat(column) for column in zip(*[m for micros in assignment for m in micros]))
    if kind in ("token", "deferred"):
        loss = F.cross_entropy(model(tokens), targets, ignore_index=IGNORED)
    elif kind in ("weighted", "deferred_weighted"):
        loss = (losses(model, tokens, targets) * weights).sum() / weights.sum()
    elif kind == "fixed":
        loss = losses(model, tokens, targets).sum() / 37
    else:
        of_samples = [F.cross_entropy(model(tokens[ids == i]), targets[ids == i], ignore_index=IGNORED)
                      for i in ids.unique() if bool((targets[ids == i] != IGNORED).any())]
        loss = torch.stack(of_samples).mean()
    loss.backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.requires_grad}


def wrap(kind, fault):
    model = make_model()
    if kind == "ddp":
        model = DistributedDataParallel(model)
    elif kind == "fsdp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("data",))
        fully_shard(model.hidden, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if kind != "plain" and fault != "averaged":
        isograd.sum_gradients(model)
    return model


def counted(kind, group, micros, own):
    """The step, and what to give to scale for micro-batch j. The empty ones behind this rank's `own` are not counted."""
    if kind == "token":
        return isograd.TokenMean(group).count(m[1] for m in micros[:own]), lambda nll, j: nll.sum()
    if kind == "weighted":
        return isograd.WeightedMean(group).count(m[2] for m in micros[:own]), lambda nll, j: (nll * micros[j][2]).sum()
    if kind == "fixed":
        return isograd.FixedDenominator(37, group).count(micros[:own]), lambda nll, j: nll.sum()
    mean = isograd.SampleMean(group, cut=kind == "sample_cut")
    step = mean.count([m[3] for m in micros[:own]], [m[1] for m in micros[:own]])
    return step, lambda nll, j: (nll * step.weights(j)).sum()


def forward_of(model, last):
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(last)
    return model.no_sync() if isinstance(model, DistributedDataParallel) and not last else contextlib.nullcontext()


def train(model, micros, own, kind, group):
    """One step; the loss that was differentiated."""
    deferred = kind.startswith("deferred")
    if deferred:
        later = isograd.Deferred((isograd.WeightedMean if "weighted" in kind else isograd.TokenMean)(group))
        rounds = max(len(assignment) for assignment in ASSIGNMENTS[dist.get_world_size()])
    else:
        step, value = counted(kind, group, micros, own)
        rounds = step.global_micro_batches
    for j in range(rounds):
        tokens, targets, weights, _ = micros[j]
        with forward_of(model, j + 1 == rounds):
            nll = losses(model, tokens, targets)
            if deferred:
                later.add(weights if "weighted" in kind else targets)
                (nll * weights if "weighted" in kind else nll).sum().backward()
            else:
                step.scale(value(nll, j)).backward()
    if isinstance(model, Model) and not hasattr(model, "set_requires_gradient_sync"):
        isograd.all_reduce_gradients(model)
    if deferred:
        isograd.clip_grad_norm_(model, float("inf"), scale=later.finish().gradient_scale)
        return None
    return step.loss()


def assembled(model):
    return {name.removeprefix("module."): p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            for name, p in model.named_parameters() if p.requires_grad}


WRAPPERS = ("ddp", "fsdp", "plain")
KINDS = ("token", "weighted", "fixed", "sample", "sample_cut", "deferred", "deferred_weighted")


def scenarios(rank, fault, kinds):
    size, errors = dist.get_world_size(), {}
    alone = [dist.new_group([r]) for r in range(size)][rank]
    for kind in kinds:
        assignment = assigned(size, kind == "sample_cut")
        loss, expected = one_process(assignment, kind)
        rounds = max(len(micros) for micros in assignment)
        micros = assignment[rank] + [micro_batch([], [])] * (rounds - len(assignment[rank]))
        for wrapper in WRAPPERS:
            model = wrap(wrapper, fault)
            if fault == "own_count":  # which knows of no other rank's rounds either
                found = train(model, micros, rounds, kind, alone)
            else:
                found = train(model, micros, len(assignment[rank]), kind, None)
            gradients = assembled(model)
            worst = max(float((gradients[name] - g).norm() / g.norm()) for name, g in expected.items())
            errors[f"{kind} {wrapper}"] = worst
            if found is not None:
                errors[f"{kind} {wrapper} loss"] = abs(found - loss) / loss
    return errors


def main():
    full = bool(os.environ.get("ISOGRAD_FULL_TESTS"))
    kinds = {2: KINDS if full else ("token", "sample_cut"), 3: KINDS, **({4: KINDS} if full else {})}
    found = {size: on_ranks(size, lambda rank: scenarios(rank, "", kinds[size])) for size in kinds}
    for fault in ("averaged", "own_count"):
        found[fault] = on_ranks(3, lambda rank: scenarios(rank, fault, ("token", "sample", "deferred")))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
