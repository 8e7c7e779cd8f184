"""Trainers whose optimizer, logged norm or batch is wrong, or looks so: a dump does not show it.

For isograd.watch alone (tests/python_package/watched.py), which is given `self.optimizer` and calls `update`.
"""
import torch
import torch.distributed as dist
from problem import Problem, num_targets
from torch.distributed.optim import ZeroRedundancyOptimizer
from trainers import ByHand, Ddp, Fsdp
from trial import Trial


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


# Which parameters an optimizer holds.
class OptimizerOfAnotherModel(Ddp):
    def make_optimizer(self, model):
        return torch.optim.SGD(trained(self.make_model(0)), lr=0.1)


class OptimizerBeforeSharding(Fsdp):
    def wrap(self, model, group):
        self.early = trained(model)
        return super().wrap(model, group)

    def make_optimizer(self, model):
        return torch.optim.AdamW(self.early, lr=0.1)


class HeadNotInOptimizer(Ddp):
    def make_optimizer(self, model):
        return torch.optim.SGD([p for name, p in model.named_parameters() if "head" not in name], lr=0.1)


class FrozenByMistake(Ddp):
    def make_model(self, rank):
        model = super().make_model(rank)
        model.layers[0].weight.requires_grad_(False)
        return model


# Who updates, and by how much.
class RankDoesNotStep(Ddp):
    def update(self, model):
        if dist.get_rank() != 1:
            super().update(model)


class ShardDoesNotStep(Fsdp):
    def update(self, model):
        if dist.get_rank() != 1:
            super().update(model)


class LearningRateOfRank(Ddp):
    def make_optimizer(self, model):
        return torch.optim.SGD(trained(model), lr=0.1 / (1 + dist.get_rank()))


class StateOnRankZeroAlone(Ddp):
    """Rank 0 resumes with its moments, the others begin with none."""

    def make_optimizer(self, model):
        optimizer = torch.optim.SGD(trained(model), lr=0.1, momentum=0.9)
        if dist.get_rank() == 0:
            for p in trained(model):
                optimizer.state[p]["momentum_buffer"] = torch.ones_like(p)
        return optimizer


class PutBackAfterUpdate(Ddp):
    def update(self, model):
        weight = model.module.head.weight
        before = weight.detach().clone()
        super().update(model)
        with torch.no_grad():
            weight.copy_(before)


# The log, the batch.
class NormLoggedAfterClipping(Ddp):
    tells_ranks = True

    def norm_on(self, rank, gradients, records):
        return min(self.norm(gradients, records), self.problem.max_norm)


class SameSamplesAndNoReduction(ByHand):
    """A sampler without the rank; nothing is reduced, and every rank has the whole gradient."""

    watch_options = {"ids": None}

    def deal(self):
        return [super(SameSamplesAndNoReduction, self).deal()[0]] * self.problem.ranks

    def loss(self, nll, micro, rank, j):
        return nll.sum() / num_targets(micro.targets)

    def reduce_gradients(self, model, group):
        pass

    def logged(self, records):
        return records[0]["losses"][0]


# Right ones.
class SeveralOptimizers(Ddp):
    def make_optimizer(self, model):
        self.second = torch.optim.SGD(trained(model.module.head), lr=0.1)
        return torch.optim.AdamW(trained(model.module.layers), lr=0.1)

    def update(self, model):
        for optimizer in (self.second, self.optimizer):
            optimizer.step()
            optimizer.zero_grad()


class AdamDecaysWhatHasNoGradient(Fsdp):
    def make_optimizer(self, model):
        return torch.optim.AdamW(trained(model), lr=0.1, weight_decay=0.1)


class WarmUp(Fsdp):
    def make_optimizer(self, model):
        optimizer = torch.optim.AdamW(trained(model), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
        return optimizer

    def update(self, model):
        super().update(model)
        self.schedule.step()


class StepsLater(Ddp):
    def update(self, model):
        """The gradient is kept for the next micro-batches."""


class Foreach(Ddp):
    implementation = {"foreach": True}

    def make_optimizer(self, model):
        return torch.optim.AdamW(trained(model), lr=0.1, **self.implementation)


class Fused(Foreach):
    implementation = {"fused": True}


class FusedShards(Fsdp):
    implementation = {"fused": True}
    make_optimizer = Foreach.make_optimizer


class Scaled(Foreach):
    """The loss is multiplied by GradScaler, the gradient divided by it before or in the update."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def loss(self, nll, micro, rank, j):
        return self.scaler.scale(super().loss(nll, micro, rank, j))

    def logged(self, records):
        return super().logged(records) / 1024.0

    def clip(self, model, norm):
        self.scaler.unscale_(self.optimizer)
        return super().clip(model, norm)

    def update(self, model):
        self.scaler.step(self.optimizer)
        self.scaler.update()


class ScaledAndFused(Scaled):
    implementation = {"fused": True}


class UnusedInNoGroup(Ddp):
    """A layer that no loss reaches is not in the optimizer."""

    options = {"find_unused_parameters": True}

    def make_optimizer(self, model):
        return torch.optim.SGD([p for name, p in model.named_parameters() if "unused" not in name], lr=0.1)


class SecondLoop(Ddp):
    """Another loop trains the head, with an optimizer of its own that does not step here."""

    def make_optimizer(self, model):
        self.other = torch.optim.SGD(trained(model.module.head), lr=0.1)
        return torch.optim.SGD(trained(model.module.layers), lr=0.1)


class ZeroRedundancy(Ddp):
    def make_optimizer(self, model):
        return ZeroRedundancyOptimizer(trained(model), torch.optim.AdamW, process_group=self.groups.first[self.ranks], lr=0.1)


class Wrapped:
    """Not an optimizer: it has one."""

    def __init__(self, optimizer):
        self.inner = optimizer

    def step(self):
        self.inner.step()


class OptimizerInAWrapper(Ddp):
    def make_optimizer(self, model):
        return Wrapped(super().make_optimizer(model))


class RateBelowRounding(Ddp):
    def make_optimizer(self, model):
        return torch.optim.SGD(trained(model), lr=1e-7)


class Masters(Ddp):
    """Parameters in bf16, updated through copies in fp32."""

    def make_optimizer(self, model):
        self.copies = [p.detach().float() for p in trained(model)]
        return torch.optim.AdamW(self.copies, lr=1e-3)

    def update(self, model):
        for copy, p in zip(self.copies, trained(model)):
            copy.grad = p.grad.float()
        super().update(model)
        with torch.no_grad():
            for copy, p in zip(self.copies, trained(model)):
                p.copy_(copy)


class UpdatedByHand(Ddp):
    def make_optimizer(self, model):
        return None

    def update(self, model):
        with torch.no_grad():
            for p in trained(model):
                p -= 0.1 * p.grad


uneven, two = ((3,), (1,), (2,)), ((2,), (3,))
TRIALS = [
    Trial(OptimizerOfAnotherModel, Problem("mlp", two), "the optimizer is another model's", ("not_in_optimizer",)),
    Trial(OptimizerBeforeSharding, Problem("mlp", two, max_norm=0.1), "the optimizer is made, then fully_shard replaces the "
          "parameters", ("not_in_optimizer",)),
    Trial(HeadNotInOptimizer, Problem("mlp", uneven, max_norm=0.1), "no group has the head", ("not_in_optimizer",)),
    Trial(FrozenByMistake, Problem("mlp", two), "one weight is frozen, and make_model trains it", ("frozen_otherwise",)),
    Trial(RankDoesNotStep, Problem("mlp", uneven, max_norm=0.1), "rank 1 leaves out step()", ("updates_differ",)),
    Trial(ShardDoesNotStep, Problem("mlp", uneven, max_norm=0.1), "the same: FSDP2", ("updates_differ",)),
    Trial(LearningRateOfRank, Problem("mlp", two), "each rank has a learning rate of its own", ("updates_differ",)),
    Trial(StateOnRankZeroAlone, Problem("mlp", uneven), "rank 0 alone resumes with the optimizer's state",
          ("updates_differ",)),
    Trial(PutBackAfterUpdate, Problem("mlp", two), "after step() one weight is what it was", ("not_updated",)),
    Trial(NormLoggedAfterClipping, Problem("mlp", two, max_norm=0.1), "the norm is logged after clipping",
          ("norm_differs",)),
    Trial(SameSamplesAndNoReduction, Problem("mlp", ((2,), (2,), (2,))), "ranks read the same samples, and nothing is "
          "reduced", ("reduction_not_proven",)),
    Trial(SeveralOptimizers, Problem("mlp", uneven, max_norm=0.1), "two optimizers, each zeroes its gradients"),
    Trial(AdamDecaysWhatHasNoGradient, Problem("transformer", uneven, extras=("gate",)), "AdamW moves what has a gradient of 0"),
    Trial(WarmUp, Problem("mlp", uneven), "a learning rate of 0"),
    Trial(StepsLater, Problem("mlp", two), "the optimizer steps after the block"),
    Trial(Foreach, Problem("mlp", two), "AdamW, foreach"),
    Trial(Fused, Problem("mlp", two), "AdamW, fused"),
    Trial(FusedShards, Problem("mlp", uneven), "the same: FSDP2"),
    Trial(Scaled, Problem("mlp", two, max_norm=0.1), "GradScaler, unscaled before the clip"),
    Trial(ScaledAndFused, Problem("mlp", two), "GradScaler, the fused update divides"),
    Trial(UnusedInNoGroup, Problem("transformer", two, extras=("unused",)), "a layer that nothing uses is in no group"),
    Trial(SecondLoop, Problem("mlp", two), "another loop trains the head"),
    Trial(ZeroRedundancy, Problem("mlp", uneven), "ZeroRedundancyOptimizer"),
    Trial(OptimizerInAWrapper, Problem("mlp", two), "an object that has an optimizer"),
    Trial(RateBelowRounding, Problem("mlp", two, precision="bf16_parameters"), "bf16 does not hold so small an update"),
    Trial(Masters, Problem("mlp", two, precision="bf16_parameters"), "copies in fp32 are updated"),
    Trial(UpdatedByHand, Problem("mlp", two), "no optimizer"),
]
