"""Forty trainers with one mistake each, as people make it. `names` are the diagnoses that would be true of it.

Where no diagnosis of docs/museum.md describes the mistake, `undecided` is the right answer: what the dumps show cannot
be told from something else.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from problem import IGNORED, WIDTH, Problem, num_targets
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler
from trainers import ByHand, Ddp, Fsdp, Trainer, coefficient
from trial import Trial, one_by_one, planted


# The divisor of the loss.
def micro_mean(self, nll, micro, rank, j):
    return nll.sum() / num_targets(micro.targets)


def mean_of_ranks(self, records):
    """The logged loss."""
    return sum(sum(record["losses"]) for record in records) / len(records)


class WorldSizeTooMuch(Fsdp):
    """The loss makes up for an average over ranks that the reducer was told not to take."""

    def wrap(self, model, group):
        model = super().wrap(model, group)
        for module in model.modules():
            if hasattr(module, "set_gradient_divide_factor"):
                module.set_force_sum_reduction_for_comms(True)  # Gloo has no scaled sum
                module.set_gradient_divide_factor(1.0)
        return model


def counts(count):
    """The divisor is the sum of count(micro)."""
    def __init__(self, *arguments):
        Trainer.__init__(self, *arguments)
        self.total = sum(count(micro) for rank in range(self.ranks) for micro in self.micros(rank))
    return __init__


class WorldSizeForgotten(Ddp):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.factor = 1


# Whose samples.
class RankLeftOut(ByHand):
    """Gradients are summed over a group that was made before the last rank came."""

    def reduce_gradients(self, model, group):
        if dist.get_rank() < self.ranks - 1:
            super().reduce_gradients(model, self.groups.first[self.ranks - 1])


def padded_by_the_sampler(self):
    samples = self.problem.samples()
    return [[[samples[i] for i in DistributedSampler(samples, self.problem.ranks, rank, shuffle=False)]]
            for rank in range(self.problem.ranks)]


# The reduction: of which gradients, and when.
class ParameterIgnoredByReducer(Ddp):
    def wrap(self, model, group):
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["head.weight"])
        return super().wrap(model, group)


class BucketOfOneRankLost(Ddp):
    options = {"bucket_cap_mb": 0.002, "find_unused_parameters": True}  # else a first step has one bucket

    def wrap(self, model, group):
        model = super().wrap(model, group)

        def hook(_, bucket):
            flat = bucket.buffer() / self.ranks
            if bucket.index() == 1 and dist.get_rank(group) == 1:
                flat.zero_()
            return dist.all_reduce(flat, group=group, async_op=True).get_future().then(lambda f: f.value()[0])

        model.register_comm_hook(None, hook)
        return model


class StaleGradients(Ddp):
    """The step before, on other samples, was not followed by zero_grad."""

    def before_rank(self, model, rank):
        before = type(self).__mro__[1](Problem(**{**vars(self.problem), "seed": self.problem.seed + 1}), self.precision)
        Trainer.work(before, model, rank)


class TiedWeightAccumulatedTwice(Trainer):
    """Each micro-batch's gradients go to buffers in fp32, one visit for each name: the tied weight has two."""

    def after_backward(self, model, rank, j):
        named = dict(model.named_parameters())
        self.buffers = {} if j == 0 else self.buffers
        for name in [*named, "head.weight"]:
            p = named["embedding.weight" if name == "head.weight" else name]
            self.buffers[p] = self.buffers.get(p, 0) + p.grad
        for p in named.values():
            p.grad = None

    def after_rank(self, model, rank):
        for p, buffer in self.buffers.items():
            p.grad = buffer


class SignFlipped(Ddp):
    def make_model(self, rank):
        model = super().make_model(rank)
        model.second.bias.register_hook(lambda gradient: -gradient)
        return model


class GradientLost(Fsdp):
    """A layer's weight is used through a detached copy."""

    def make_model(self, rank):
        model = super().make_model(rank)
        layer = model.layers[3]
        layer.forward = lambda x: F.linear(x, layer.weight.detach(), layer.bias)
        return model


# Norm, clip, update.
class GroupsClippedApart(Ddp):
    def clip(self, model, norm):
        for group in self.parameter_groups(model):
            torch.nn.utils.clip_grad_norm_(group["params"], self.problem.max_norm)
        return coefficient(self.problem.max_norm, norm)


class UpdatedTwice(Ddp):
    def update(self, model):
        super().update(model)
        super().update(model)


# Ranks that differ.
class ReplicaDiverges(ByHand):
    """One rank goes on adding to a gradient after it was reduced."""

    tells_ranks = True

    def after_reduction(self, model, rank):
        if rank == 2:
            model.head.bias.grad.mul_(1.5)


class DropoutByRank(Ddp):
    def noise(self, micro, rank):
        generator = torch.Generator().manual_seed(rank)
        kept = torch.rand(1, micro.inputs.size(1), WIDTH, generator=generator) >= self.problem.dropout
        return (kept / (1 - self.problem.dropout)).to(torch.float64 if self.precision == "fp64" else torch.float32)


# Values that are not finite, and logs.
class EmptyMicroBatch(Ddp):
    """(loss * mask).sum() / mask.sum(): without a target, 0 / 0 of the loss and 0 * inf of its gradient."""

    def cross_entropy(self, logits, targets):
        return F.cross_entropy(logits, targets.clamp(min=0), reduction="none")

    def loss(self, nll, micro, rank, j):
        mask = (micro.targets != IGNORED).to(nll.dtype)
        return (nll * mask).sum() / mask.sum() / len(self.assigned[rank])


def mean_of_means(self, records):
    """The log; one rank has no target."""
    means = [torch.tensor(sum(r["losses"])) / torch.tensor(float(sum(r["counts"]))) for r in records]
    return float(sum(means) / len(means))


uneven, accumulated = ((3,), (1,), (2,)), ((1, 2, 1), (2, 1, 3))
TRIALS = [
    planted("RankMeans", Ddp, Problem("mlp", uneven), "each rank's mean, averaged", ("mean_of_rank_means",), loss=micro_mean),
    planted("RankMeansOfNearlyEqualRanks", Fsdp, Problem("transformer", ((3,),) * 4, shortest=39, longest=41, masked=0),
            "the same where ranks hold nearly equally much", ("mean_of_rank_means",), loss=micro_mean),
    planted("MicroBatchMeans", Ddp, Problem("mlp", ((1, 2), (3, 1, 1))), "each micro-batch's mean / G, averaged over ranks",
            ("mean_of_micro_batch_means_by_rank",),
            loss=lambda self, nll, micro, rank, j: micro_mean(self, nll, micro, rank, j) / len(self.assigned[rank])),
    planted("AccumulationUndivided", Ddp, Problem("transformer", accumulated, precision="bf16"),
            "micro-batches' means are summed, counts are uneven", ("summed_over_micro_batches",), alone=True, loss=micro_mean),
    planted("DividedTwice", Trainer, Problem("mlp", ((1, 1, 2), (2, 1, 1), (1, 1, 1)), precision="bf16"),
            "divided by the global count, then by the micro-batches", ("undecided",), alone=True,
            loss=lambda self, nll, micro, rank, j: Trainer.loss(self, nll, micro, rank, j) / len(self.assigned[rank])),
    planted("SumInsteadOfMean", Ddp, Problem("mlp", uneven), "reduction='sum'", ("unscaled_sum",),
            loss=lambda self, nll, micro, rank, j: nll.sum(), logged=mean_of_ranks),
    Trial(WorldSizeTooMuch, Problem("transformer", uneven), "loss times W, gradients summed", ("multiplied_by_axis",)),
    Trial(WorldSizeForgotten, Problem("convolution", ((9,), (4,), (7,))), "sum / global count, averaged over ranks",
          ("averaged_over_axis",)),
    planted("CountOfOwnRank", ByHand, Problem("transformer", uneven), "sum / own rank's count, summed", ("count_not_reduced",),
            loss=lambda self, nll, micro, rank, j: nll.sum() / sum(num_targets(m.targets) for m in self.micros(rank)),
            logged=mean_of_ranks),
    planted("PaddingCounted", Trainer, Problem("transformer", ((3,), (2,), (3,))), "the count takes padding along",
            ("other_targets", "undecided"), padded=True, __init__=counts(lambda micro: micro.inputs.numel()),
            targets_logged=lambda self, records: self.total),
    planted("FirstLabelCounted", Ddp, Problem("transformer", uneven, precision="bf16", shortest=30, longest=60),
            "the divisor takes each sample's first label along, which is lost in the shift; the logged targets do not",
            ("scaled_by_factor", "other_denominator", "undecided"), alone=True, __init__=counts(lambda micro: num_targets(micro.labels))),
    planted("MaskedPositionsCounted", Ddp, Problem("mlp", uneven, masked=0.5, precision="fp64"),
            "(loss * mask).mean() on each rank, averaged", ("other_denominator", "undecided"), loss=lambda self, nll, micro, rank, j: nll.mean()),
    # The targets.
    planted("PaddingTrained", Trainer, Problem("transformer", ((3,), (2,), (3,))), "padding is predicted",
            ("other_targets", "undecided"), padded=True,
            targets=lambda self, micro: torch.where(micro.documents.flatten() < 0, 0, micro.targets)),
    planted("LabelsNotShifted", Ddp, Problem("transformer", ((2,), (2,))), "each token predicts itself",
            ("other_targets", "undecided"), targets=lambda self, micro: micro.labels),
    planted("LabelsShiftedTwice", Ddp, Problem("transformer", ((2,), (2,)), precision="bf16_parameters"),
            "each token predicts the one after the next", ("other_targets", "undecided"), alone=True,
            targets=lambda self, micro: torch.cat([
                part for s in micro.samples for part in (s.targets[1:], torch.tensor([IGNORED]))])),
    Trial(RankLeftOut, Problem("mlp", ((2,), (1,), (2,), (3,))), "the last rank is in no sum", ("missing_rank_part",)),
    planted("RankLeftOutAssignedOtherwise", Trainer, Problem("transformer", ((2,), (1,), (2,)), precision="fp64"),
            "the same, the reference's shares are cut otherwise", ("missing_rank_part", "missing_data_part", "undecided"),
            reference_assignment=one_by_one, reduce=lambda self, parts: Trainer.reduce(self, [parts[0], parts[2]])),
    planted("ShardReadTwice", Ddp, Problem("mlp", ((2,), (2,), (2,))), "two ranks read the first rank's samples",
            ("sample_twice", "other_batch"), assign=lambda self: [Ddp.assign(self)[rank] for rank in (0, 0, 2)]),
    planted("SamplerPads", Ddp, Problem("convolution", ((3,), (2,), (2,))), "DistributedSampler repeats samples",
            ("sample_twice",), assign=padded_by_the_sampler),
    Trial(ParameterIgnoredByReducer, Problem("mlp", uneven), "DDP leaves one parameter to each rank",
          ("not_summed_over_axis", "missing_rank_part", "replicas_differ")),
    Trial(BucketOfOneRankLost, Problem("mlp", uneven), "one rank's part of one bucket is zeros", ("missing_rank_part",)),
    planted("AccumulatorReducedEachTime", ByHand, Problem("transformer", accumulated), "summed over ranks after each micro-batch",
            ("reduced_while_accumulating", "reduced_every_micro_batch", "composition"),
            after_backward=lambda self, model, rank, j: ByHand.reduce_gradients(self, model, self.groups.first[self.ranks]),
            reduce_gradients=lambda self, model, group: None),
    Trial(StaleGradients, Problem("mlp", uneven), "no zero_grad after the step before", ("undecided",)),
    Trial(TiedWeightAccumulatedTwice, Problem("transformer", ((1, 2), (2, 1))), "buffers take the tied weight twice",
          ("some_parameters_scaled",)),
    planted("FrozenParameterTrained", Ddp, Problem("transformer", ((2,), (1,)), frozen=("positions",)),
            "a parameter was to be frozen", ("parameters_missing", "frozen_otherwise"),
            make_model=lambda self, rank: Ddp.make_model(self, rank).requires_grad_(True)),
    Trial(SignFlipped, Problem("convolution", ((9,), (4,)), precision="bf16_parameters"),
          "one bias has its gradient's sign wrong", ("some_parameters_scaled",), alone=True),
    Trial(GradientLost, Problem("mlp", uneven), "one weight gets no gradient", ("gradient_lost", "some_parameters_scaled")),
    planted("LossScaleKept", Ddp, Problem("transformer", uneven, precision="bf16"), "loss scale never divided out",
            ("scaled_by_factor", "undecided"), logged=lambda self, records: Ddp.logged(self, records) / 4096.0,
            loss=lambda self, nll, micro, rank, j: Ddp.loss(self, nll, micro, rank, j) * 4096.0),
    planted("LearningRateInGradient", Trainer, Problem("mlp", uneven), "the gradient holds the learning rate",
            ("scaled_by_factor", "undecided"),
            reduced=lambda self, gradients: {name: 0.03 * g for name, g in gradients.items()}),
    planted("ClipBeforeReduction", ByHand, Problem("mlp", uneven), "ranks clip, then gradients are summed",
            ("clipped_before_reduction", "undecided"),
            after_rank=lambda self, model, rank: torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)),
    Trial(GroupsClippedApart, Problem("transformer", uneven, max_norm=0.2), "matrices and the rest clipped apart",
          ("groups_clipped_apart",)),
    planted("ClipNotApplied", Fsdp, Problem("mlp", uneven, max_norm=0.1), "the coefficient is logged, not applied",
            ("clip_not_applied",), clip=lambda self, model, norm: coefficient(self.problem.max_norm, norm)),
    planted("NormOfOwnShard", Fsdp, Problem("transformer", ((2,), (1,), (2,), (3,))), "the norm of rank 0's shard",
            ("norm_of_own_shard",), tells_ranks=True, norm=lambda self, gradients, records: records[0]["held_norm"],
            norm_on=lambda self, rank, gradients, records: records[rank]["held_norm"]),
    Trial(UpdatedTwice, Problem("mlp", uneven, max_norm=0.1), "the optimizer steps twice", ("optimizer_differs",)),
    planted("DecayOnEverything", Trainer, Problem("transformer", uneven, decay=0.1), "norms and biases decay too",
            ("optimizer_differs",), parameter_groups=lambda self, model: [
                {"params": list(model.parameters()), "weight_decay": self.problem.decay}]),
    Trial(ReplicaDiverges, Problem("mlp", uneven), "one rank changes a gradient after the reduction", ("replicas_differ",)),
    Trial(DropoutByRank, Problem("transformer", uneven, dropout=0.2), "dropout is seeded with the rank",
          ("noise_depends_on_layout", "undecided")),
    Trial(EmptyMicroBatch, Problem("mlp", ((2,), (1,)), empty_ranks=(1,)), "a mean over no target",
          ("not_finite_empty_micro_batch", "not_finite")),
    planted("LogNotFinite", Ddp, Problem("convolution", ((5,), (3,), (4,)), empty_ranks=(1,)), "the loss in the log is NaN",
            ("not_finite", "not_finite_empty_micro_batch"), logged=mean_of_means),
    planted("LogSummedOverRanks", Fsdp, Problem("transformer", uneven), "the loss in the log is summed over ranks",
            ("loss_scaled",), logged=lambda self, records: Fsdp.logged(self, records) * self.ranks),
]
