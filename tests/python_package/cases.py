"""python cases.py: what isograd.watch and isograd.prove say on two ranks of steps that are not plain data parallelism,
and of bad input; as JSON, by case and rank."""
import copy
import json
import os
import sys
import time
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from ranks import on_ranks, results_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import isograd


class Mlp(nn.Module):
    def __init__(self, width=8):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 16), nn.Linear(16, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(self.norm(x))))


def make_model(width=8):
    torch.manual_seed(2)
    return Mlp(width)


def samples(rank, lengths=(3, 5), seed=0):
    generator = torch.Generator().manual_seed(10 * seed + rank)
    return [(torch.randn(n + 2 * rank, 8, generator=generator), torch.randint(6, (n + 2 * rank,), generator=generator))
            for n in lengths]


def sample_loss(model, sample):
    return F.cross_entropy(model(sample[0]), sample[1], reduction="none")


def batch_loss(model, batch, reduction):
    x, y = (torch.cat(column) for column in zip(*batch))
    return F.cross_entropy(model(x), y, reduction=reduction)


def right_step(model, optimizer, micro_batches):
    optimizer.zero_grad()
    step = isograd.TokenMean().count(torch.cat([y for _, y in batch]) for batch in micro_batches)
    for j, batch in enumerate(micro_batches):
        model.require_backward_grad_sync = j + 1 == len(micro_batches)
        step.scale(batch_loss(model, batch, "sum")).backward()
    isograd.clip_grad_norm_(model, 0.1)
    optimizer.step()
    return step.loss()


def mean_step(model, optimizer, micro_batches):
    optimizer.zero_grad()
    for j, batch in enumerate(micro_batches):
        model.require_backward_grad_sync = j + 1 == len(micro_batches)
        (batch_loss(model, batch, "mean") / len(micro_batches)).backward()
    optimizer.step()


def summing(width=8):
    return isograd.sum_gradients(DistributedDataParallel(make_model(width)))


def said(verdict):
    return {"passed": verdict.passed, "said": verdict.findings, "notes": verdict.notes}


def prove_leaves_everything_as_it_was(rank):
    model = summing()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    right_step(model, optimizer, [samples(rank, seed=5)])  # gives the optimizer a state
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    verdict = isograd.prove(right_step, model, optimizer, micro_batches=[samples(rank), samples(rank, (2,), 1)],
                            loss=sample_loss, folder=os.environ["FOLDER"], report=os.environ["FOLDER"] + "/verdict.html")
    after = model.state_dict(), optimizer.state_dict()
    same = all(torch.equal(before[0][name], value) for name, value in after[0].items()) and repr(before[1]) == repr(after[1])
    return {**said(verdict), "same": same, "text": str(verdict), "grades": sorted(verdict.json["grades"]),
            "none": all(p.grad is None for p in model.parameters()), "files": sorted(os.listdir(os.environ["FOLDER"]))}


def prove_tries_other_batches(rank):
    model = DistributedDataParallel(make_model())
    return said(isograd.prove(mean_step, model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sample_loss,
                              micro_batches=[samples(rank), samples(rank, (2,), 1)],
                              empty=(torch.zeros(0, 8), torch.zeros(0, dtype=torch.int64))))


def an_experiment_that_cannot_be_made(rank):
    """A step for two micro-batches: the experiment with one fails, on rank 1 alone; the verdict stands."""
    def step(model, optimizer, micro_batches):
        if len(micro_batches) == 1 and rank == 1:
            raise IndexError("no second one")
        mean_step(model, optimizer, micro_batches)

    model = make_model()
    return said(isograd.prove(step, model, torch.optim.SGD(model.parameters(), lr=0.1), loss=sample_loss,
                              micro_batches=[samples(rank), samples(rank, (2,), 1)]))


def tensor_parallel(rank, summed, factor=1.0):
    """DTensor's sequence parallelism: each rank's norm sees its own tokens, so that its weight's gradient is a part, which
    SequenceParallel sums and a norm left plain does not."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    model = make_model()
    norm = {"norm": SequenceParallel(sequence_dim=0)} if summed else {}
    parallelize_module(model, mesh["tp"], {**norm, "up": ColwiseParallel(input_layouts=Shard(0)), "down": RowwiseParallel()})
    whole = model.forward
    model.forward = lambda x: whole(x.tensor_split(2)[rank])
    batch = [[(torch.randn(6, 8, generator=torch.Generator().manual_seed(3)), torch.tensor([0, 1, 2, 3, 4, 5]))]]
    with isograd.watch(model, None, micro_batches=batch, loss=sample_loss, make_model=make_model, data=mesh["dp"]) as step:
        batch_loss(model, batch[0], "mean").backward()
        for p in model.norm.parameters():
            p.grad *= factor
    return said(step.verdict)


class Stages(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 12), nn.Linear(12, 6)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def make_stages():
    torch.manual_seed(4)
    return Stages()


class Stage(nn.Module):
    """The first or the second half, under the names of the whole."""

    def __init__(self, rank):
        super().__init__()
        whole = make_stages()
        if rank == 0:
            self.first = whole.first
        else:
            self.second = whole.second

    def forward(self, x):
        return torch.tanh(self.first(x)) if hasattr(self, "first") else self.second(x)


def pipeline(rank, scaled):
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    generator = torch.Generator().manual_seed(6)
    x, y = torch.randn(8, 8, generator=generator), torch.randint(6, (8,), generator=generator)
    model = Stage(rank)
    stage = PipelineStage(model, rank, 2, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, 4, loss_fn=F.cross_entropy, scale_grads=scaled)
    batch = [[(x[i:i + 1], y[i:i + 1]) for i in range(j, j + 2)] for j in range(0, 8, 2)]
    with isograd.watch(model, None, micro_batches=batch, loss=sample_loss, make_model=make_stages, data=alone,
                       stages=True) as step:
        schedule.step(x) if rank == 0 else schedule.step(target=y, losses=[])
    return said(step.verdict)


def own_clipping(rank):
    """By code of its own, seen through before_clipping and max_norm; the coefficient is applied twice."""
    model = summing()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with isograd.watch(model, optimizer, micro_batches=[samples(rank)], loss=sample_loss, max_norm=0.05) as step:
        mean = isograd.TokenMean().count([torch.cat([y for _, y in samples(rank)])])
        mean.scale(batch_loss(model, samples(rank), "sum")).backward()
        step.before_clipping()
        norm = float(isograd.clip_grad_norm_(model, float("inf")))
        for p in model.parameters():
            p.grad *= (0.05 / norm)**2
        optimizer.step()
        step.log(norm=norm)
    return said(step.verdict)


def sample_twice_is_noted(rank):
    model = summing()
    same = [samples(0)[0], samples(rank)[1]]  # one of two
    with isograd.watch(model, None, micro_batches=[same], loss=sample_loss) as step:
        mean = isograd.TokenMean().count([torch.cat([y for _, y in same])])
        mean.scale(batch_loss(model, same, "sum")).backward()
    return said(step.verdict)


def sparse_embedding(rank, reduced=True):
    """Ranks have gradients of other rows, some twice, and rank 1's are added up to rank 0's."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.Embedding(20, 8, sparse=True), nn.Tanh(), nn.Linear(8, 6))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    batch = [(torch.randint(20, (n,), generator=generator), torch.randint(6, (n,), generator=generator)) for n in (3, 9 + rank)]
    with isograd.watch(model, optimizer, micro_batches=[batch[:1], batch[1:]], loss=sample_loss) as step:
        counted = isograd.TokenMean().count(y for _, y in batch)
        for sample in batch:
            counted.scale(batch_loss(model, [sample], "sum")).backward()
        if reduced:
            isograd.all_reduce_gradients(model)
        norm = isograd.clip_grad_norm_(model, 0.05)
        optimizer.step()
        step.log(norm=norm)
    return {**said(step.verdict), "sparse": model[0].weight.grad.is_sparse, "update": step.verdict.update}


def without_shares(rank):
    """Above LARGEST_SHARES only the sum of the micro-batches' gradients is kept: what is wrong is found, and not why."""
    most = isograd._reference.LARGEST_SHARES
    isograd._reference.LARGEST_SHARES = 0
    try:
        found = {}
        for name, step, model in (("right", right_step, summing()), ("mean", mean_step, DistributedDataParallel(make_model()))):
            batch = [samples(rank), samples(rank, (2,), 1)]
            with isograd.watch(model, None, micro_batches=batch, loss=sample_loss) as watched:
                step(model, torch.optim.SGD(model.parameters(), lr=0.1), batch)
            found[name] = said(watched.verdict)
        return found
    finally:
        isograd._reference.LARGEST_SHARES = most


def counted_and_divided_again(rank, model, by):
    """The loss is divided by the step's count, and by the trainer once more."""
    batch = [samples(rank, (3,), seed) for seed in range(3)]
    with isograd.watch(model, None, micro_batches=batch, loss=sample_loss) as step:
        counted = isograd.TokenMean().count(micro[0][1] for micro in batch)
        for j, micro in enumerate(batch):
            model.require_backward_grad_sync = j == 2
            (counted.scale(batch_loss(model, micro, "sum")) / by).backward()
        step.log(loss=counted.loss())
    return said(step.verdict)


def threads_without_processors(rank):
    """Rank 0 takes the threads of ranks that wait, until it finds that they get nothing: here it sleeps.
    What comes before the first look, when the model is copied, says nothing of that."""
    found = []
    with isograd._reference.threads(2) as look:
        time.sleep(0.3)
        look()
        found.append(torch.get_num_threads())
        time.sleep(0.3)
        look()
        found.append(torch.get_num_threads())
    return found


class Document:
    """Without a repr of its own: what two ranks hold is compared by content."""

    def __init__(self, inputs, targets):
        self.inputs, self.targets = inputs, targets


def samples_are_objects(rank):
    model, batch = make_model(), samples(0)
    with isograd.watch(model, None, micro_batches=[[Document(*sample) for sample in batch]],
                       loss=lambda model, document: sample_loss(model, (document.inputs, document.targets)),
                       data=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["dp"]) as step:
        batch_loss(model, batch, "mean").backward()
    return said(step.verdict)


# Bad input.
class Converts(Mlp):
    def forward(self, x):
        return super().forward(x.float())


class Loses(Mlp):
    def forward(self, x):
        return super().forward(x).float()


def watched(rank, model=None, batch=None, step=None, **more):
    model = make_model() if model is None else model
    more = {"micro_batches": [samples(rank)], "loss": sample_loss, **more}
    with isograd.watch(model, None, **more):
        (step or (lambda: batch_loss(model, samples(rank), "mean").backward()))()


def with_a_phase(model):
    model.phase = torch.nn.Parameter(torch.ones(3, dtype=torch.complex64))
    return model


def raised(error):
    raise error


def proved_with(spoil):
    """A step that `spoil` changes: of its model, its input and how often it was made before."""
    def proved(rank):
        made = []

        def step(model, optimizer, micro_batches):
            optimizer.zero_grad()
            x, y = (torch.cat(column) for column in zip(*micro_batches[0]))
            noise = spoil(None, x, len(made))
            F.cross_entropy(model(x if noise is None else x + noise), y).backward()
            spoil(model, None, len(made))
            made.append(None)

        model = make_model()
        isograd.prove(step, model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=[samples(rank)], loss=sample_loss)
    return proved


def noise(model, x, before):
    return None if x is None else torch.randn_like(x)


def not_finite_again(model, x, before):
    """Each time another gradient, of which the second is not finite."""
    if model is not None and before > 0:
        next(model.parameters()).grad[0] = float("nan")


def raises(model, sample):
    return sample_loss(model, sample) if len(sample[1]) <= 4 else raised(IndexError("no such row"))


def raises_in_backward(model, sample):
    losses = sample_loss(model, sample)
    losses.register_hook(lambda grad: raised(IndexError("no such column")))
    return losses


def too_large(rank, free, **more):
    available = isograd._reference.available
    isograd._reference.available = lambda: free
    try:
        watched(rank, **more)
    finally:
        isograd._reference.available = available


def activations_too_large(model, sample):
    """On rank 0, which makes the reference: 8 PiB."""
    return sample_loss(model, sample) + torch.empty(2**50, dtype=torch.float64)[0]


def on_another_torch(rank):
    with mock.patch.object(torch, "__version__", "2.12.1+cu130" if rank else torch.__version__):
        watched(rank)


BAD = {
    "other_models": lambda rank: watched(rank, make_model(8 + rank)),
    "other_torches": on_another_torch,
    "no_module": lambda rank: watched(rank, lambda x: x, step=lambda: None),
    "class_of_an_optimizer": lambda rank: isograd.watch(make_model(), torch.optim.SGD, micro_batches=[[]], loss=sample_loss).__enter__(),
    "loss_called": lambda rank: watched(rank, loss=sample_loss(make_model(), samples(0)[0])),
    "no_term": lambda rank: watched(rank, terms=[0.1]),
    "loss_without_return": lambda rank: watched(rank, loss=lambda model, sample: None),
    "no_lists": lambda rank: watched(rank, micro_batches=samples(rank)),
    "one_rank_without_lists": lambda rank: watched(rank, micro_batches=[samples(rank)] if rank else samples(rank)),
    "other_samples": lambda rank: watched(rank, data=init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))["dp"]),
    "samples_that_one_cannot_send": lambda rank: watched(rank, micro_batches=[[*samples(rank), (lambda: 0) if rank else 0]]),
    "group_of_another": lambda rank: watched(rank, data=dist.new_group([0])),
    "dropout": lambda rank: watched(rank, nn.Sequential(make_model(), nn.Dropout(0.1))),
    "batch_statistics": lambda rank: watched(rank, nn.Sequential(make_model(), nn.BatchNorm1d(6))),
    "not_in_fp64": lambda rank: watched(rank, (torch.manual_seed(2), Converts())[1]),
    "loss_in_fp32": lambda rank: watched(rank, (torch.manual_seed(2), Loses())[1]),
    "divided_already": lambda rank: watched(rank, loss=lambda m, s: F.cross_entropy(m(s[0]), s[1])),
    "no_model": lambda rank: watched(rank, make_model=lambda: nn.Linear(8, 6)),
    "another_shape": lambda rank: watched(rank, make_model=lambda: make_model(9)),
    "too_large": lambda rank: too_large(rank, 8000, micro_batches=[samples(rank, (1,))]),
    "batch_too_large": lambda rank: too_large(rank, 1000),
    "sample_too_large": lambda rank: watched(rank, loss=activations_too_large),
    "not_repeatable": proved_with(noise),
    "not_finite_again": proved_with(not_finite_again),
    "raises": lambda rank: watched(rank, loss=raises),
    "raises_in_backward": lambda rank: watched(rank, loss=raises_in_backward),
    "mean": lambda rank: watched(rank, mean="average"),
    "nothing_trained": lambda rank: watched(rank, make_model().requires_grad_(False), step=lambda: None),
    "not_real": lambda rank: watched(rank, with_a_phase(make_model()), make_model=lambda: with_a_phase(make_model())),
    "no_count": lambda rank: isograd.watch(make_model(), None, micro_batches=[samples(rank)], loss=sample_loss).log(targets=-1),
    "half_a_target": lambda rank: isograd.watch(make_model(), None, micro_batches=[samples(rank)], loss=sample_loss).log(targets=1.5),
    "a_rank_fails": lambda rank: watched(rank, step=lambda: rank and raised(ValueError("out of cheese")), timeout=20),
}
GOOD = {case.__name__: case for case in (
    prove_leaves_everything_as_it_was, prove_tries_other_batches, own_clipping, sample_twice_is_noted, samples_are_objects,
    sparse_embedding, an_experiment_that_cannot_be_made, without_shares, threads_without_processors)} | {
    "tensor_parallel_right": lambda rank: tensor_parallel(rank, True),
    "tensor_parallel_norm_not_summed": lambda rank: tensor_parallel(rank, False),
    "tensor_parallel_norm_wrong_on_each": lambda rank: tensor_parallel(rank, False, 1.5),  # no sum of these is right
    "pipeline_right": lambda rank: pipeline(rank, True),
    "pipeline_micro_batches_summed": lambda rank: pipeline(rank, False),
    "sparse_embedding_not_reduced": lambda rank: sparse_embedding(rank, False),
    # DDP averages: nobody called sum_gradients. And as Accelerate's and transformers' backward do.
    "divided_by_the_wrapper_too": lambda rank: counted_and_divided_again(rank, DistributedDataParallel(make_model()), 1),
    "divided_by_the_accumulation_too": lambda rank: counted_and_divided_again(rank, summing(), 3)}


if __name__ == "__main__":
    json.dump(on_ranks(2, lambda rank: results_of(rank, GOOD, BAD)), sys.stdout)
