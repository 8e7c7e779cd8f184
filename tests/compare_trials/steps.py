"""Trainers whose optimizer, logged norm or batch is wrong, or looks so: a dump does not show it.

For isograd.watch alone (tests/python_package/watched.py), which is given `self.optimizer` and calls `update`.
"""
import torch
import torch.distributed as dist
from problem import Problem, num_targets
from torch.distributed.optim import ZeroRedundancyOptimizer
from trainers import ByHand, Ddp, Fsdp
from trial import Trial, planted


def trained(model):
    return [p for p in model.parameters() if p.requires_grad]


def sgd(parameters, lr=0.1):
    return torch.optim.SGD(parameters, lr=lr)


def adamw(model, **options):
    return torch.optim.AdamW(trained(model), lr=0.1, **options)


def without(model, word):
    return [p for name, p in model.named_parameters() if word not in name]


class OptimizerBeforeSharding(Fsdp):
    def wrap(self, model, group):
        self.early = trained(model)
        return super().wrap(model, group)

    def make_optimizer(self, model):
        return torch.optim.AdamW(self.early, lr=0.1)


class FrozenByMistake(Ddp):
    def make_model(self, rank):
        model = super().make_model(rank)
        model.layers[0].weight.requires_grad_(False)
        return model


def all_but_rank_1(base):
    return lambda self, model: base.update(self, model) if dist.get_rank() != 1 else None


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

    def assign(self):
        return [super(SameSamplesAndNoReduction, self).assign()[0]] * self.problem.ranks

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


class WarmUp(Fsdp):
    def make_optimizer(self, model):
        optimizer = torch.optim.AdamW(trained(model), lr=0.1)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 100)
        return optimizer

    def update(self, model):
        super().update(model)
        self.schedule.step()


class Scaled(Ddp):
    """The loss is multiplied by GradScaler, the gradient divided by it before or in the update."""

    implementation = {"foreach": True}

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def make_optimizer(self, model):
        return adamw(model, **self.implementation)

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


class SecondLoop(Ddp):
    """Another loop trains the head, with an optimizer of its own that does not step here."""

    def make_optimizer(self, model):
        self.other = torch.optim.SGD(trained(model.module.head), lr=0.1)
        self.watch_options = {"later": [self.other]}
        return torch.optim.SGD(trained(model.module.layers), lr=0.1)


class Wrapped:
    """Not an optimizer: it has one."""

    def __init__(self, optimizer):
        self.inner = optimizer

    def step(self):
        self.inner.step()


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
    planted("OptimizerOfAnotherModel", Ddp, Problem("mlp", two), "the optimizer is another model's", ("not_in_optimizer",),
            make_optimizer=lambda self, model: sgd(trained(self.make_model(0)))),
    Trial(OptimizerBeforeSharding, Problem("mlp", two, max_norm=0.1), "the optimizer is made, then fully_shard replaces the "
          "parameters", ("not_in_optimizer",)),
    planted("HeadNotInOptimizer", Ddp, Problem("mlp", uneven, max_norm=0.1), "no group has the head", ("not_in_optimizer",),
            make_optimizer=lambda self, model: sgd(without(model, "head"))),
    Trial(FrozenByMistake, Problem("mlp", two), "one weight is frozen, and make_model trains it", ("frozen_otherwise",)),
    planted("RankDoesNotStep", Ddp, Problem("mlp", uneven, max_norm=0.1), "rank 1 leaves out step()", ("updates_differ",),
            update=all_but_rank_1(Ddp)),
    planted("ShardDoesNotStep", Fsdp, Problem("mlp", uneven, max_norm=0.1), "the same: FSDP2", ("updates_differ",),
            update=all_but_rank_1(Fsdp)),
    planted("LearningRateOfRank", Ddp, Problem("mlp", two), "each rank has a learning rate of its own", ("updates_differ",),
            make_optimizer=lambda self, model: sgd(trained(model), 0.1 / (1 + dist.get_rank()))),
    Trial(StateOnRankZeroAlone, Problem("mlp", uneven), "rank 0 alone resumes with the optimizer's state",
          ("updates_differ",)),
    Trial(PutBackAfterUpdate, Problem("mlp", two), "after step() one weight is what it was", ("not_updated",)),
    Trial(NormLoggedAfterClipping, Problem("mlp", two, max_norm=0.1), "the norm is logged after clipping",
          ("norm_differs",)),
    Trial(SameSamplesAndNoReduction, Problem("mlp", ((2,), (2,), (2,))), "ranks read the same samples, and nothing is "
          "reduced", ("reduction_not_proven",)),
    Trial(SeveralOptimizers, Problem("mlp", uneven, max_norm=0.1), "two optimizers, each zeroes its gradients"),
    planted("AdamDecaysWhatHasNoGradient", Fsdp, Problem("transformer", uneven, extras=("gate",)), "AdamW moves what has a gradient "
            "of 0", make_optimizer=lambda self, model: adamw(model, weight_decay=0.1)),
    Trial(WarmUp, Problem("mlp", uneven), "a learning rate of 0"),
    planted("StepsLater", Ddp, Problem("mlp", two), "the optimizer steps after the block", update=lambda self, model: None),
    *[planted(name, base, Problem("mlp", assignment), about, make_optimizer=make) for name, base, assignment, about, make in (
        ("Foreach", Ddp, two, "AdamW, foreach", lambda self, model: adamw(model, foreach=True)),
        ("Fused", Ddp, two, "AdamW, fused", lambda self, model: adamw(model, fused=True)),
        ("FusedShards", Fsdp, uneven, "the same: FSDP2", lambda self, model: adamw(model, fused=True)),
        ("ZeroRedundancy", Ddp, uneven, "ZeroRedundancyOptimizer", lambda self, model: ZeroRedundancyOptimizer(
            trained(model), torch.optim.AdamW, process_group=self.groups.first[self.ranks], lr=0.1)),
        ("OptimizerInAWrapper", Ddp, two, "an object that has an optimizer", lambda self, model: Wrapped(
            Ddp.make_optimizer(self, model))))],
    Trial(Scaled, Problem("mlp", two, max_norm=0.1), "GradScaler, unscaled before the clip"),
    planted("ScaledAndFused", Scaled, Problem("mlp", two), "GradScaler, the fused update divides", implementation={"fused": True}),
    planted("UnusedInNoGroup", Ddp, Problem("transformer", two, extras=("unused",)), "a layer that nothing uses is in no group",
            options={"find_unused_parameters": True}, make_optimizer=lambda self, model: sgd(without(model, "unused"))),
    Trial(SecondLoop, Problem("mlp", two), "another loop trains the head"),
    planted("RateBelowRounding", Ddp, Problem("mlp", two, precision="bf16_parameters"), "bf16 does not hold so small an update",
            make_optimizer=lambda self, model: sgd(trained(model), 1e-7)),
    Trial(Masters, Problem("mlp", two, precision="bf16_parameters"), "copies in fp32 are updated"),
    Trial(UpdatedByHand, Problem("mlp", two), "no optimizer"),
]
