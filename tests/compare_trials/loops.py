"""Twenty trainers with one mistake each, written from what loops of real projects get wrong without a look at how a
diagnosis works, and eleven right ones like them. For isograd.watch alone, as those of steps.py.

`names` are the diagnoses that are true of a mistake. `undecided`, where it is among them, is half a name: the mistake is
one of those that the verdict lists.
"""
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from problem import IGNORED, Problem, num_targets
from steps import Scaled, trained
from torch.distributed.fsdp import fully_shard
from trainers import ByHand, Ddp, Fsdp
from trial import Trial


# Loss scale, accumulation, synchronisation.
class ClipsWhileScaled(Scaled):
    """No unscale_ before the clip: the limit is that of the gradient times 1024."""

    def clip(self, model, norm):
        return Ddp.clip(self, model, norm)


class NeverSynchronised(Ddp):
    """no_sync around every micro-batch, the last one too."""

    def forward_of(self, model, last):
        return model.no_sync()


class SynchronisedFirst(Ddp):
    """The condition of no_sync is turned round: the first micro-batch is reduced, the others are not."""

    def work(self, model, rank):
        self.model, self.begun = model, False
        return super().work(model, rank)

    def forward_of(self, model, last):
        first, self.begun = not self.begun, True
        return contextlib.nullcontext() if first else model.no_sync()


class ClipsEachMicroBatch(Ddp):
    def after_backward(self, model, rank, j):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.03)


class ZeroesInTheLoop(Ddp):
    """zero_grad stands in the loop over micro-batches."""

    def forward_of(self, model, last):
        model.zero_grad()
        return super().forward_of(model, last)


class DividedByTheMostMicroBatches(Ddp):
    """A mean over each micro-batch / G, G that of a full step: a rank at the end of its data has fewer."""

    def loss(self, nll, micro, rank, j):
        return nll.sum() / num_targets(micro.targets) / max(len(micros) for micros in self.dealt)


class CountOfTheStepBefore(Ddp):
    """The count is all-reduced in the background and comes one step late."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.total = int(self.total * 1.37)


# Targets, and the mean over them.
class ShiftedOverThePack(Ddp):
    """Labels of the whole row are shifted: a document's last token predicts the first one of the next."""

    def targets(self, micro):
        return torch.cat([micro.labels[1:], torch.tensor([IGNORED])])


class MeanOfSampleMeans(Ddp):
    """Each document counts the same, where each token was to."""

    def loss(self, nll, micro, rank, j):
        return (nll * micro.shares).sum() / self.with_loss * self.factor


class SmoothedLabels(Ddp):
    def cross_entropy(self, logits, targets):
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none", label_smoothing=0.1)


# Parameters: frozen, tied, cut.
class UnfrozenAfterWrapping(Ddp):
    """DDP was made while the head was frozen, and does not reduce it."""

    def wrap(self, model, group):
        model.head.requires_grad_(False)
        model = super().wrap(model, group)
        model.module.head.requires_grad_(True)
        return model


class TieLost(Ddp):
    """The head computes with a copy of the embedding, as it was loaded."""

    def make_model(self, rank):
        model = super().make_model(rank)
        copy = model.embedding.weight.detach().clone()
        real = model.forward

        def forward(*arguments, **named):
            plain, held = F.linear, model.embedding.weight
            F.linear = lambda x, weight, *more: plain(x, copy if weight is held else weight, *more)
            try:
                return real(*arguments, **named)
            finally:
                F.linear = plain

        model.forward = forward
        return model


class BiasesInNoGroup(Ddp):
    """One group has the weights that decay, the other one the norms: biases are in neither."""

    def make_optimizer(self, model):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return torch.optim.AdamW([{"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
                                  {"params": [p for name, p in named if "norm" in name and "bias" not in name]}], lr=0.1)


class EmbeddingAveragedTwice(Ddp):
    """The embedding goes another way (sparse once), which divides by the ranks as DDP did before."""

    def after_reduction(self, model, rank):
        model.module.embedding.weight.grad /= self.ranks


class IgnoredByFsdp(Fsdp):
    """One weight is left out of the shards, and nobody reduces it."""

    def wrap(self, model, group):
        return fully_shard(model, mesh=self.mesh(group), ignored_params={model.head.weight})


# Sums over ranks.
class DividedByRanksOnceMore(Ddp):
    def after_reduction(self, model, rank):
        for p in trained(model):
            p.grad /= self.ranks


class OtherOrderOnOneRank(ByHand):
    """One flat buffer; rank 1 lists the parameters the other way round."""

    def reduce_gradients(self, model, group):
        parameters = trained(model)[::-1] if dist.get_rank(group) == 1 else trained(model)
        flat = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(flat, group=group)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad.copy_(part.view_as(p))


class OtherSeedsNoBroadcast(ByHand):
    def make_model(self, rank):
        model = super().make_model(rank)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.02 * rank)
        return model


# Norm, clip, batch, log.
class ValuesClipped(Ddp):
    """clip_grad_value_ where the norm was to be clipped."""

    def clip(self, model, norm):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)


class LastBatchFilledUp(Ddp):
    """The rank that has one micro-batch less takes its last one again, so that all ranks reduce as often."""

    def deal(self):
        deal = super().deal()
        most = max(len(micros) for micros in deal)
        return [micros + [micros[-1]] * (most - len(micros)) for micros in deal]


# Right ones like them.
class ClipsOnce(Ddp):
    """Accumulates without synchronisation, then clips once and logs the norm that PyTorch returned."""

    tells_ranks = True

    def clip(self, model, norm):
        self.told = float(torch.nn.utils.clip_grad_norm_(model.parameters(), self.problem.max_norm))

    def norm_on(self, rank, gradients, records):
        return self.told


class ShardsClipOnce(Fsdp):
    tells_ranks = True

    def clip(self, model, norm):
        self.told = float(torch.nn.utils.clip_grad_norm_(model.parameters(), self.problem.max_norm).full_tensor())

    norm_on = ClipsOnce.norm_on


class ValuesClippedAsMeant(Ddp):
    """No norm is clipped: the gradient is what it was before."""

    def update(self, model):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        super().update(model)


class ZeroesBeforeTheLoop(Ddp):
    def before_rank(self, model, rank):
        model.zero_grad()


class SampleMeans(Ddp):
    """Each document counts the same, and that is what was declared."""


class UnfrozenBeforeWrapping(Ddp):
    def wrap(self, model, group):
        model.head.requires_grad_(False)
        model.head.requires_grad_(True)
        return super().wrap(model, group)


class FlatInOneOrder(ByHand):
    def reduce_gradients(self, model, group):
        parameters = trained(model)[::-1]
        flat = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(flat, group=group)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad.copy_(part.view_as(p))


class BroadcastFromRankZero(Ddp):
    """Ranks begin with other seeds, and DDP broadcasts rank 0's."""

    def make_model(self, rank):
        model = super().make_model(rank)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.02 * rank)
        return model


class AllGroups(Ddp):
    def make_optimizer(self, model):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return torch.optim.AdamW([{"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
                                  {"params": [p for _, p in named if p.dim() <= 1]}], lr=0.1)


class StaticGraph(Ddp):
    options = {"static_graph": True}


class ReducedByHookInDouble(Ddp):
    """A communication hook that sums in fp64 and divides afterwards."""

    def wrap(self, model, group):
        model = super().wrap(model, group)

        def hook(_, bucket):
            wide = bucket.buffer().double()
            done = dist.all_reduce(wide, group=group, async_op=True).get_future()
            return done.then(lambda f: (f.value()[0] / self.ranks).to(bucket.buffer().dtype))

        model.register_comm_hook(None, hook)
        return model


two, three = ((2,), (3,)), ((2,), (1,), (3,))
twice, uneven = ((2, 1), (1, 2)), ((1, 2), (2, 1), (1, 1))
fewer = ((1, 2, 1), (2, 1))
TRIALS = [
    Trial(ClipsWhileScaled, Problem("mlp", two, max_norm=0.1), "clipped before the loss scale is divided out",
          ("scaled_by_factor", "undecided")),
    Trial(NeverSynchronised, Problem("mlp", uneven), "no_sync around the last micro-batch too",
          ("not_summed_over_axis", "replicas_differ")),
    Trial(SynchronisedFirst, Problem("mlp", twice), "the first micro-batch is reduced, not the last",
          ("not_summed_over_axis", "replicas_differ")),
    Trial(ClipsEachMicroBatch, Problem("mlp", twice), "clips after each micro-batch",
          ("clipped_before_reduction", "undecided")),
    Trial(ZeroesInTheLoop, Problem("mlp", uneven), "zero_grad stands in the loop over micro-batches",
          ("micro_batches_lost",)),
    Trial(DividedByTheMostMicroBatches, Problem("mlp", fewer), "each micro-batch's mean / G of a full step, averaged over ranks",
          ("mean_of_micro_batch_means", "mean_of_micro_batch_means_by_rank", "undecided")),
    Trial(CountOfTheStepBefore, Problem("mlp", three), "divided by the count of the step before",
          ("scaled_by_factor", "undecided")),
    Trial(ShiftedOverThePack, Problem("transformer", two), "a document's last token predicts the next one's first",
          ("other_targets", "undecided")),
    Trial(MeanOfSampleMeans, Problem("mlp", three), "each document counts the same, where each token was to",
          ("mean_of_micro_batch_means", "undecided")),
    Trial(SmoothedLabels, Problem("mlp", two), "labels are smoothed, and the loss that was declared has none",
          ("undecided",)),
    Trial(UnfrozenAfterWrapping, Problem("mlp", three), "the head is unfrozen after DDP was made",
          ("not_summed_over_axis", "replicas_differ")),
    Trial(TieLost, Problem("transformer", two), "the head computes with a copy of the embedding",
          ("gradient_lost", "some_parameters_scaled", "undecided")),
    Trial(BiasesInNoGroup, Problem("transformer", two), "biases are in no group of the optimizer", ("not_in_optimizer",)),
    Trial(EmbeddingAveragedTwice, Problem("transformer", three), "the embedding's gradient is divided by the ranks twice",
          ("some_parameters_scaled", "cut_parameters_scaled")),
    Trial(IgnoredByFsdp, Problem("mlp", three), "FSDP2 ignores a weight, and nobody reduces it",
          ("not_summed_over_axis", "replicas_differ")),
    Trial(DividedByRanksOnceMore, Problem("mlp", three), "divided by the ranks after DDP has averaged",
          ("averaged_over_axis",)),
    Trial(OtherOrderOnOneRank, Problem("mlp", two), "one rank flattens its gradients in another order",
          ("replicas_differ",)),
    Trial(OtherSeedsNoBroadcast, Problem("mlp", three), "ranks begin with other weights", ("initial_parameters_differ",)),
    Trial(ValuesClipped, Problem("mlp", two, max_norm=0.1), "elements are clipped, not the norm",
          ("optimizer_differs",)),
    Trial(LastBatchFilledUp, Problem("mlp", fewer), "a rank takes its last micro-batch twice", ("sample_twice",)),
    Trial(ClipsOnce, Problem("mlp", twice, max_norm=0.1), "accumulates, clips once, logs PyTorch's norm"),
    Trial(ShardsClipOnce, Problem("mlp", uneven, max_norm=0.1), "the same: FSDP2"),
    Trial(ValuesClippedAsMeant, Problem("mlp", two), "elements are clipped, and no norm"),
    Trial(ZeroesBeforeTheLoop, Problem("mlp", uneven), "zero_grad stands before the loop"),
    Trial(SampleMeans, Problem("mlp", three, mean="sample"), "each document counts the same, as was declared"),
    Trial(UnfrozenBeforeWrapping, Problem("mlp", three), "the head is unfrozen before DDP is made"),
    Trial(FlatInOneOrder, Problem("mlp", two), "one flat buffer, in one order"),
    Trial(BroadcastFromRankZero, Problem("mlp", three), "other seeds, broadcast by DDP"),
    Trial(AllGroups, Problem("transformer", two), "two groups that hold everything"),
    Trial(StaticGraph, Problem("mlp", two), "DDP with a static graph"),
    Trial(ReducedByHookInDouble, Problem("mlp", three), "a hook that sums in fp64"),
]
