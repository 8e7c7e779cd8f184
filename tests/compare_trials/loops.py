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
from trial import Trial, planted


def summed_flat(self, model, group, backwards):
    """One flat buffer for all gradients, of the parameters in their order or backwards."""
    parameters = trained(model)[::-1] if backwards else trained(model)
    flat = torch.cat([p.grad.flatten() for p in parameters])
    dist.all_reduce(flat, group=group)
    for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
        p.grad.copy_(part.view_as(p))


def seeded_by_rank(base):
    """Each rank begins with other weights."""
    def make_model(self, rank):
        model = base.make_model(self, rank)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.02 * rank)
        return model
    return make_model


def two_groups(holds):
    """AdamW with a group of the matrices, which decay, and one of the others for which `holds`."""
    def make_optimizer(self, model):
        named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        return torch.optim.AdamW([{"params": [p for _, p in named if p.dim() > 1], "weight_decay": 0.1},
                                  {"params": [p for name, p in named if p.dim() <= 1 and holds(name)]}], lr=0.1)
    return make_optimizer


class SynchronisedFirst(Ddp):
    """The condition of no_sync is turned round: the first micro-batch is reduced, the others are not."""

    def work(self, model, rank):
        self.model, self.begun = model, False
        return super().work(model, rank)

    def forward_of(self, model, last):
        first, self.begun = not self.begun, True
        return contextlib.nullcontext() if first else model.no_sync()


class ZeroesInTheLoop(Ddp):
    """zero_grad stands in the loop over micro-batches."""

    def forward_of(self, model, last):
        model.zero_grad()
        return super().forward_of(model, last)


class CountOfTheStepBefore(Ddp):
    """The count is all-reduced in the background and comes one step late."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.total = int(self.total * 1.37)


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


def averaged_once_more(parameters):
    """Divided by the ranks after DDP has averaged."""
    def after_reduction(self, model, rank):
        for p in parameters(model):
            p.grad /= self.ranks
    return after_reduction


class LastBatchFilledUp(Ddp):
    """The rank that has one micro-batch less takes its last one again, so that all ranks reduce as often."""

    def assign(self):
        assignment = super().assign()
        most = max(len(micros) for micros in assignment)
        return [micros + [micros[-1]] * (most - len(micros)) for micros in assignment]


# Right ones like them.
class ClipsOnce(Ddp):
    """Accumulates without synchronisation, then clips once and logs the norm that PyTorch returned."""

    tells_ranks = True

    def clip(self, model, norm):
        found = torch.nn.utils.clip_grad_norm_(model.parameters(), self.problem.max_norm)
        self.returned = float(found.full_tensor() if hasattr(found, "full_tensor") else found)

    def norm_on(self, rank, gradients, records):
        return self.returned


class ValuesClippedAsMeant(Ddp):
    """No norm is clipped: the gradient is what it was before."""

    def update(self, model):
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
        super().update(model)


class UnfrozenBeforeWrapping(Ddp):
    def wrap(self, model, group):
        model.head.requires_grad_(False)
        model.head.requires_grad_(True)
        return super().wrap(model, group)


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
    planted("ClipsWhileScaled", Scaled, Problem("mlp", two, max_norm=0.1), "no unscale_ before the clip: the limit is that of "
            "the gradient times 1024", ("scaled_by_factor", "undecided"), clip=Ddp.clip),
    planted("NeverSynchronised", Ddp, Problem("mlp", uneven), "no_sync around the last micro-batch too",
            ("not_summed_over_axis", "replicas_differ"), forward_of=lambda self, model, last: model.no_sync()),
    Trial(SynchronisedFirst, Problem("mlp", twice), "the first micro-batch is reduced, not the last",
          ("micro_batches_not_reduced", "not_summed_over_axis", "replicas_differ")),
    planted("ClipsEachMicroBatch", Ddp, Problem("mlp", twice), "clips after each micro-batch",
            ("clipped_before_reduction", "undecided"),
            after_backward=lambda self, model, rank, j: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.03)),
    Trial(ZeroesInTheLoop, Problem("mlp", uneven), "zero_grad stands in the loop over micro-batches",
          ("micro_batches_lost",)),
    planted("DividedByTheMostMicroBatches", Ddp, Problem("mlp", fewer), "each micro-batch's mean / G of a full step, averaged over "
            "ranks; one at the end of its data has fewer",
            ("mean_of_micro_batch_means", "mean_of_micro_batch_means_by_rank", "undecided"),
            loss=lambda self, nll, micro, rank, j: nll.sum() / num_targets(micro.targets) / max(map(len, self.assigned))),
    Trial(CountOfTheStepBefore, Problem("mlp", three), "divided by the count of the step before",
          ("scaled_by_factor", "undecided")),
    planted("ShiftedOverThePack", Ddp, Problem("transformer", two), "a document's last token predicts the next one's first",
            ("other_targets", "undecided"),
            targets=lambda self, micro: torch.cat([micro.labels[1:], torch.tensor([IGNORED])])),
    planted("MeanOfSampleMeans", Ddp, Problem("mlp", three), "each document counts the same, where each token was to",
            ("mean_of_micro_batch_means", "other_mean", "undecided"),
            loss=lambda self, nll, micro, rank, j: (nll * micro.shares).sum() / self.with_loss * self.factor),
    planted("SmoothedLabels", Ddp, Problem("mlp", two), "labels are smoothed, and the loss that was declared has none",
            ("other_targets", "undecided"), cross_entropy=lambda self, logits, targets: F.cross_entropy(
                logits, targets, ignore_index=IGNORED, reduction="none", label_smoothing=0.1)),
    Trial(UnfrozenAfterWrapping, Problem("mlp", three), "the head is unfrozen after DDP was made",
          ("not_summed_over_axis", "replicas_differ")),
    Trial(TieLost, Problem("transformer", two), "the head computes with a copy of the embedding",
          ("gradient_lost", "some_parameters_scaled", "undecided")),
    planted("BiasesInNoGroup", Ddp, Problem("transformer", two), "biases are in no group of the optimizer", ("not_in_optimizer",),
            make_optimizer=two_groups(lambda name: "norm" in name and "bias" not in name)),
    planted("EmbeddingAveragedTwice", Ddp, Problem("transformer", three), "the embedding's gradient goes another way (sparse once), "
            "which divides by the ranks again", ("some_parameters_scaled", "cut_parameters_scaled"),
            after_reduction=averaged_once_more(lambda model: [model.module.embedding.weight])),
    planted("IgnoredByFsdp", Fsdp, Problem("mlp", three), "FSDP2 ignores a weight, and nobody reduces it",
            ("not_summed_over_axis", "replicas_differ"),
            wrap=lambda self, model, group: fully_shard(model, mesh=self.mesh(group), ignored_params={model.head.weight})),
    planted("DividedByRanksOnceMore", Ddp, Problem("mlp", three), "divided by the ranks after DDP has averaged",
            ("averaged_over_axis",), after_reduction=averaged_once_more(trained)),
    planted("OtherOrderOnOneRank", ByHand, Problem("mlp", two), "one rank flattens its gradients in another order",
            ("replicas_differ",),
            reduce_gradients=lambda self, model, group: summed_flat(self, model, group, dist.get_rank(group) == 1)),
    planted("OtherSeedsNoBroadcast", ByHand, Problem("mlp", three), "ranks begin with other weights",
            ("initial_parameters_differ",), make_model=seeded_by_rank(ByHand)),
    planted("ValuesClipped", Ddp, Problem("mlp", two, max_norm=0.1), "elements are clipped, not the norm", ("values_clipped",),
            clip=lambda self, model, norm: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)),
    Trial(LastBatchFilledUp, Problem("mlp", fewer), "a rank takes its last micro-batch twice", ("sample_twice",)),
    Trial(ClipsOnce, Problem("mlp", twice, max_norm=0.1), "accumulates, clips once, logs PyTorch's norm"),
    planted("ShardsClipOnce", Fsdp, Problem("mlp", uneven, max_norm=0.1), "the same: FSDP2", tells_ranks=True, clip=ClipsOnce.clip,
            norm_on=ClipsOnce.norm_on),
    Trial(ValuesClippedAsMeant, Problem("mlp", two), "elements are clipped, and no norm"),
    planted("ZeroesBeforeTheLoop", Ddp, Problem("mlp", uneven), "zero_grad stands before the loop",
            before_rank=lambda self, model, rank: model.zero_grad()),
    Trial(Ddp, Problem("mlp", three, mean="sample"), "each document counts the same, as was declared", title="SampleMeans"),
    Trial(UnfrozenBeforeWrapping, Problem("mlp", three), "the head is unfrozen before DDP is made"),
    planted("FlatInOneOrder", ByHand, Problem("mlp", two), "one flat buffer, in one order",
            reduce_gradients=lambda self, model, group: summed_flat(self, model, group, True)),
    planted("BroadcastFromRankZero", Ddp, Problem("mlp", three), "other seeds, broadcast by DDP", make_model=seeded_by_rank(Ddp)),
    planted("AllGroups", Ddp, Problem("transformer", two), "two groups that hold everything",
            make_optimizer=two_groups(lambda name: True)),
    planted("StaticGraph", Ddp, Problem("mlp", two), "DDP with a static graph", options={"static_graph": True}),
    Trial(ReducedByHookInDouble, Problem("mlp", three), "a hook that sums in fp64"),
]
