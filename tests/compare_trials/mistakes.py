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
from trial import Trial, one_by_one


# What the loss is divided by.
class RankMeans(Ddp):
    def loss(self, nll, micro, rank, j):
        return nll.sum() / num_targets(micro.targets)


class RankMeansOfNearlyEqualRanks(Fsdp):
    loss = RankMeans.loss


class MicroBatchMeans(Ddp):
    def loss(self, nll, micro, rank, j):
        return nll.sum() / num_targets(micro.targets) / len(self.dealt[rank])


class AccumulationUndivided(Ddp):
    loss = RankMeans.loss


class DividedTwice(Trainer):
    def loss(self, nll, micro, rank, j):
        return super().loss(nll, micro, rank, j) / len(self.dealt[rank])


class SumInsteadOfMean(Ddp):
    def loss(self, nll, micro, rank, j):
        return nll.sum()

    def logged(self, records):
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


class WorldSizeForgotten(Ddp):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.factor = 1


class CountOfOwnRank(ByHand):
    def loss(self, nll, micro, rank, j):
        return nll.sum() / sum(num_targets(m.targets) for m in self.micros(rank))

    def logged(self, records):
        return sum(sum(record["losses"]) for record in records) / len(records)


class PaddingCounted(Trainer):
    padded = True

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.total = sum(micro.inputs.numel() for rank in range(self.ranks) for micro in self.micros(rank))

    def targets_logged(self, records):
        return self.total


class FirstLabelCounted(Ddp):
    """The count looks at labels; the first of each sample is lost when they are shifted."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.total = sum(num_targets(micro.labels) for rank in range(self.ranks) for micro in self.micros(rank))


class MaskedPositionsCounted(Ddp):
    """(loss * mask).mean() on each rank."""

    def loss(self, nll, micro, rank, j):
        return nll.mean()


# What is predicted.
class PaddingTrained(Trainer):
    padded = True

    def targets(self, micro):
        return torch.where(micro.documents.flatten() < 0, 0, micro.targets)


class LabelsNotShifted(Ddp):
    def targets(self, micro):
        return micro.labels


class LabelsShiftedTwice(Ddp):
    def targets(self, micro):
        return torch.cat([part for s in micro.samples for part in (s.targets[1:], torch.tensor([IGNORED]))])


# Whose samples.
class RankLeftOut(ByHand):
    """Gradients are summed over a group that was made before the last rank came."""

    def reduce_gradients(self, model, group):
        if dist.get_rank() < self.ranks - 1:
            super().reduce_gradients(model, self.groups.first[self.ranks - 1])


class RankLeftOutDealtOtherwise(Trainer):
    def reduce(self, parts):
        return super().reduce([parts[0], parts[2]])


class ShardReadTwice(Ddp):
    """Two ranks open the first rank's part of the data."""

    def deal(self):
        deal = super().deal()
        return [deal[0], deal[0], *deal[2:]]


class SamplerPads(Ddp):
    def deal(self):
        samples = self.problem.samples()
        return [[[samples[i] for i in DistributedSampler(samples, self.problem.ranks, rank, shuffle=False)]]
                for rank in range(self.problem.ranks)]


# What is reduced, and when.
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


class AccumulatorReducedEachTime(ByHand):
    def after_backward(self, model, rank, j):
        super().reduce_gradients(model, self.groups.first[self.ranks])

    def reduce_gradients(self, model, group):
        pass


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


class FrozenParameterTrained(Ddp):
    def make_model(self, rank):
        return super().make_model(rank).requires_grad_(True)


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


class LossScaleKept(Ddp):
    scale = 4096.0

    def loss(self, nll, micro, rank, j):
        return super().loss(nll, micro, rank, j) * self.scale

    def logged(self, records):
        return super().logged(records) / self.scale


class LearningRateInGradient(Trainer):
    def reduced(self, gradients):
        return {name: 0.03 * g for name, g in gradients.items()}


# Norm, clip, update.
class ClipBeforeReduction(ByHand):
    def after_rank(self, model, rank):
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)


class GroupsClippedApart(Ddp):
    def clip(self, model, norm):
        for group in self.parameter_groups(model):
            torch.nn.utils.clip_grad_norm_(group["params"], self.problem.max_norm)
        return coefficient(self.problem.max_norm, norm)


class ClipNotApplied(Fsdp):
    def clip(self, model, norm):
        return coefficient(self.problem.max_norm, norm)


class NormOfOwnShard(Fsdp):
    tells_ranks = True

    def norm(self, gradients, records):
        return records[0]["held_norm"]

    def norm_on(self, rank, gradients, records):
        return records[rank]["held_norm"]


class UpdatedTwice(Ddp):
    def update(self, model):
        super().update(model)
        super().update(model)


class DecayOnEverything(Trainer):
    def parameter_groups(self, model):
        return [{"params": list(model.parameters()), "weight_decay": self.problem.decay}]


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


# What is not finite, what is logged.
class EmptyMicroBatch(Ddp):
    """(loss * mask).sum() / mask.sum(): without a target, 0 / 0 of the loss and 0 * inf of its gradient."""

    def cross_entropy(self, logits, targets):
        return F.cross_entropy(logits, targets.clamp(min=0), reduction="none")

    def loss(self, nll, micro, rank, j):
        mask = (micro.targets != IGNORED).to(nll.dtype)
        return (nll * mask).sum() / mask.sum() / len(self.dealt[rank])


class LogNotFinite(Ddp):
    """The log is a mean of the ranks' means, and one rank has no target."""

    def logged(self, records):
        means = [torch.tensor(sum(r["losses"])) / torch.tensor(float(sum(r["counts"]))) for r in records]
        return float(sum(means) / len(means))


class LogSummedOverRanks(Fsdp):
    def logged(self, records):
        return super().logged(records) * self.ranks


uneven, accumulated = ((3,), (1,), (2,)), ((1, 2, 1), (2, 1, 3))
TRIALS = [
    Trial(RankMeans, Problem("mlp", uneven), "each rank's mean, averaged", ("mean_of_rank_means",)),
    Trial(RankMeansOfNearlyEqualRanks, Problem("transformer", ((3,),) * 4, shortest=39, longest=41, masked=0),
          "the same where ranks hold nearly equally much", ("mean_of_rank_means",)),
    Trial(MicroBatchMeans, Problem("mlp", ((1, 2), (3, 1, 1))), "each micro-batch's mean / G, averaged over ranks",
          ("mean_of_micro_batch_means_by_rank",)),
    Trial(AccumulationUndivided, Problem("transformer", accumulated, precision="bf16"),
          "micro-batches' means are summed, counts are uneven", ("summed_over_micro_batches",), alone=True),
    Trial(DividedTwice, Problem("mlp", ((1, 1, 2), (2, 1, 1), (1, 1, 1)), precision="bf16"),
          "divided by the global count, then by the micro-batches", ("undecided",), alone=True),
    Trial(SumInsteadOfMean, Problem("mlp", uneven), "reduction='sum'", ("unscaled_sum",)),
    Trial(WorldSizeTooMuch, Problem("transformer", uneven), "loss times W, gradients summed", ("multiplied_by_axis",)),
    Trial(WorldSizeForgotten, Problem("convolution", ((9,), (4,), (7,))), "sum / global count, averaged over ranks",
          ("averaged_over_axis",)),
    Trial(CountOfOwnRank, Problem("transformer", uneven), "sum / own rank's count, summed", ("count_not_reduced",)),
    Trial(PaddingCounted, Problem("transformer", ((3,), (2,), (3,))), "the count takes padding along",
          ("other_targets", "undecided")),
    Trial(FirstLabelCounted, Problem("transformer", uneven, precision="bf16", shortest=30, longest=60),
          "the divisor takes each sample's first label along, the logged targets do not",
          ("scaled_by_factor", "undecided"), alone=True),
    Trial(MaskedPositionsCounted, Problem("mlp", uneven, masked=0.5, precision="fp64"),
          "(loss * mask).mean() on each rank, averaged", ("undecided",)),
    Trial(PaddingTrained, Problem("transformer", ((3,), (2,), (3,))), "padding is predicted",
          ("other_targets", "undecided")),
    Trial(LabelsNotShifted, Problem("transformer", ((2,), (2,))), "each token predicts itself",
          ("other_targets", "undecided")),
    Trial(LabelsShiftedTwice, Problem("transformer", ((2,), (2,)), precision="bf16_parameters"),
          "each token predicts the one after the next", ("other_targets", "undecided"), alone=True),
    Trial(RankLeftOut, Problem("mlp", ((2,), (1,), (2,), (3,))), "the last rank is in no sum", ("missing_rank_part",)),
    Trial(RankLeftOutDealtOtherwise, Problem("transformer", ((2,), (1,), (2,)), precision="fp64"),
          "the same, the reference's shares are cut otherwise", ("missing_rank_part", "missing_data_part", "undecided"),
          reference_deal=one_by_one),
    Trial(ShardReadTwice, Problem("mlp", ((2,), (2,), (2,))), "two ranks read the same samples",
          ("sample_twice", "other_batch")),
    Trial(SamplerPads, Problem("convolution", ((3,), (2,), (2,))), "DistributedSampler repeats samples",
          ("sample_twice",)),
    Trial(ParameterIgnoredByReducer, Problem("mlp", uneven), "DDP leaves one parameter to each rank",
          ("not_summed_over_axis", "missing_rank_part", "replicas_differ")),
    Trial(BucketOfOneRankLost, Problem("mlp", uneven), "one rank's part of one bucket is zeros",
          ("missing_rank_part",)),
    Trial(AccumulatorReducedEachTime, Problem("transformer", accumulated), "summed over ranks after each micro-batch",
          ("reduced_while_accumulating", "reduced_every_micro_batch", "composition")),
    Trial(StaleGradients, Problem("mlp", uneven), "no zero_grad after the step before", ("undecided",)),
    Trial(TiedWeightAccumulatedTwice, Problem("transformer", ((1, 2), (2, 1))), "buffers take the tied weight twice",
          ("some_parameters_scaled",)),
    Trial(FrozenParameterTrained, Problem("transformer", ((2,), (1,)), frozen=("positions",)),
          "a parameter was to be frozen", ("parameters_missing", "frozen_otherwise")),
    Trial(SignFlipped, Problem("convolution", ((9,), (4,)), precision="bf16_parameters"),
          "one bias has its gradient's sign wrong", ("some_parameters_scaled",), alone=True),
    Trial(GradientLost, Problem("mlp", uneven), "one weight gets no gradient",
          ("gradient_lost", "some_parameters_scaled")),
    Trial(LossScaleKept, Problem("transformer", uneven, precision="bf16"), "loss scale never divided out",
          ("scaled_by_factor", "undecided")),
    Trial(LearningRateInGradient, Problem("mlp", uneven), "the gradient holds the learning rate",
          ("scaled_by_factor", "undecided")),
    Trial(ClipBeforeReduction, Problem("mlp", uneven), "ranks clip, then gradients are summed",
          ("clipped_before_reduction", "undecided")),
    Trial(GroupsClippedApart, Problem("transformer", uneven, max_norm=0.2), "matrices and the rest clipped apart",
          ("groups_clipped_apart",)),
    Trial(ClipNotApplied, Problem("mlp", uneven, max_norm=0.1), "the coefficient is logged, not applied",
          ("clip_not_applied",)),
    Trial(NormOfOwnShard, Problem("transformer", ((2,), (1,), (2,), (3,))), "the norm of rank 0's shard",
          ("norm_of_own_shard",)),
    Trial(UpdatedTwice, Problem("mlp", uneven, max_norm=0.1), "the optimizer steps twice", ("optimizer_differs",)),
    Trial(DecayOnEverything, Problem("transformer", uneven, decay=0.1), "norms and biases decay too",
          ("optimizer_differs",)),
    Trial(ReplicaDiverges, Problem("mlp", uneven), "one rank changes a gradient after the reduction",
          ("replicas_differ",)),
    Trial(DropoutByRank, Problem("transformer", uneven, dropout=0.2), "dropout is seeded with the rank",
          ("noise_depends_on_layout", "undecided")),
    Trial(EmptyMicroBatch, Problem("mlp", ((2,), (1,)), empty_ranks=(1,)), "a mean over no target",
          ("not_finite_empty_micro_batch", "not_finite")),
    Trial(LogNotFinite, Problem("convolution", ((5,), (3,), (4,)), empty_ranks=(1,)), "the loss in the log is NaN",
          ("not_finite", "not_finite_empty_micro_batch")),
    Trial(LogSummedOverRanks, Problem("transformer", uneven), "the loss in the log is summed over ranks",
          ("loss_scaled",)),
]
