"""What a verdict says to change, followed: by mistake the code that it prints, as it stands in the trainer, and methods in place of its own.
With isograd installed.
"""
import dataclasses
import inspect
import math

import torch
import torch.nn.functional as F
from problem import IGNORED
from torch.utils.data import DistributedSampler
from trainers import ByHand, Ddp, Fsdp, Trainer, coefficient

import isograd


@dataclasses.dataclass
class Change:
    """codes: as printed between backticks: as in what is written, or is left out. methods: in place of the trainer's, by name, or in a
    class."""

    codes: dict
    methods: "dict | type"
    reference_assignment: object = None

    def apply(self, trial):
        """The trial whose trainer is changed, the codes that stand nowhere in the change."""
        own = methods_of(self.methods)
        old = [vars(trial.trainer)[name] for name in own if name in vars(trial.trainer)]
        # A code is written where the new methods have it more often than the old ones, and is left out where less often.
        after, before = ("\n".join(inspect.getsource(one) for one in some if callable(one)) for some in (own.values(), old))
        left = [code for code, mine in self.codes.items() if after.count(mine) == before.count(mine)]
        title = f"{trial.name}Changed"
        return dataclasses.replace(trial, trainer=type(title, (trial.trainer,), own), names=(), title=title,
                                   alone=trial.alone or trial.problem.precision == "bf16",  # without it bf16 resolves too little
                                   reference_assignment=self.reference_assignment or trial.reference_assignment), left


def methods_of(some):
    """By name; some: they, or a class."""
    every = some if isinstance(some, dict) else vars(some)
    return {name: value for name, value in every.items() if callable(value) and (name[:2] != "__" or name == "__init__")}


# What is written in place of a mistake.
class Counted:
    def before_rank(self, model, rank):
        self.factor = 1
        self.counted = isograd.TokenMean(self.groups.first[self.ranks]).count([micro.targets for micro in self.micros(rank)])

    def loss(self, nll, micro, rank, j):
        return self.counted.scale(nll.sum())

    def logged(self, records):
        return self.counted.loss()


def summed(base, more=Counted):
    def wrap(self, model, group):
        return isograd.sum_gradients(base.wrap(self, model, group))

    return {**methods_of(more), "wrap": wrap}


class ByDocument:
    def nll(self, model, micro, rank):
        every = []
        for sample in micro.samples:
            logits, labels = model(sample.inputs[None], torch.zeros_like(sample.inputs)[None])[0], sample.labels
            every.append(F.cross_entropy(logits[:-1].float(), labels[1:], reduction="none", ignore_index=IGNORED))
        return torch.cat(every)

    def targets(self, micro):
        return micro.targets


class CountedByTrainer:
    """Its ranks are one process: what isograd.TokenMean counts on several."""

    def __init__(self, *arguments):
        Trainer.__init__(self, *arguments)
        self.total = sum(isograd.TokenMean().count([micro.targets for micro in self.micros(rank)]).targets for rank in range(self.ranks))

    def targets_logged(self, records):
        return self.total


def sampled(drop_last):
    def assign(self):
        samples = self.problem.samples()
        return [[[samples[i] for i in DistributedSampler(samples, self.problem.ranks, rank, shuffle=False, drop_last=drop_last)]]
                for rank in range(self.problem.ranks)]

    def reference(problem):
        return assign(type("", (), {"problem": problem}))

    return {"assign": assign}, reference


class Reduced:
    def reduce_gradients(self, model, group):
        isograd.all_reduce_gradients(model, group)


class ReducedOnce:
    reduce_gradients = Reduced.reduce_gradients

    def after_backward(self, model, rank, j):
        """No reduction."""


class AddedUpOnce:
    def after_backward(self, model, rank, j):
        self.buffers = {} if j == 0 else self.buffers
        for _, p in model.named_parameters():
            self.buffers[p] = self.buffers.get(p, 0) + p.grad
            p.grad = None


class Frozen:
    def make_model(self, rank):
        model = Ddp.make_model(self, rank)
        for parameter in model.positions.parameters():
            parameter.requires_grad_(False)
        return model


class Unscaled:
    def after_rank(self, model, rank):
        for p in model.parameters():
            p.grad /= 4096.0


class Clipped:
    def clip(self, model, norm):
        norm = isograd.clip_grad_norm_(model, self.problem.max_norm)
        return coefficient(self.problem.max_norm, float(norm))


class WholeNorm:
    def after_rank(self, model, rank):
        """No clip."""

    def after_reduction(self, model, rank):
        norm = isograd.clip_grad_norm_(model, math.inf)
        self.whole_norm = float(norm)

    def norm(self, gradients, records):
        return self.whole_norm

    def norm_on(self, rank, gradients, records):
        return self.whole_norm


class Grouped:
    def parameter_groups(self, model):
        parameters = list(model.parameters())
        return [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": self.problem.decay},
                {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0}]


COUNT = {"counted = isograd.TokenMean().count(targets)": "counted = isograd.TokenMean(self.groups.first[self.ranks]).count("}
SCALE = {"counted.scale(loss_sum).backward()": "self.counted.scale(nll.sum())"}
SUM = {"isograd.sum_gradients(model)": "isograd.sum_gradients("}
REDUCE = {"isograd.all_reduce_gradients(model)": "isograd.all_reduce_gradients(model, group)"}
CLIP = {"norm = isograd.clip_grad_norm_(model, max_norm)": "norm = isograd.clip_grad_norm_(model, "}
LOG = {"step.log(loss=counted.loss())": "self.counted.loss()"}
ENTROPY = {'F.cross_entropy(model(tokens[:-1]), tokens[1:], reduction="none")':
           'F.cross_entropy(logits[:-1].float(), labels[1:], reduction="none", ignore_index=IGNORED)'}


def of(base, *names):
    """The methods of a right trainer."""
    return {name: getattr(base, name) for name in names}


token_mean = Change({**COUNT, **SCALE, **SUM}, summed(Ddp))
CHANGES = {
    "RankMeans": token_mean,
    "RankMeansOfNearlyEqualRanks": Change({**COUNT, **SCALE, **SUM}, summed(Fsdp)),
    **dict.fromkeys(("MicroBatchMeans", "AccumulationUndivided", "SumInsteadOfMean", "FirstLabelCounted"), token_mean),
    "WorldSizeTooMuch": Change({"counted.scale(loss_sum)": "self.counted.scale(nll.sum())"}, Counted),
    "WorldSizeForgotten": Change(SUM, summed(Ddp, {})),
    "CountOfOwnRank": Change({**COUNT, **SCALE}, Counted),
    "PaddingCounted": Change({"counted = isograd.TokenMean().count(targets)": "isograd.TokenMean().count("}, CountedByTrainer),
    **dict.fromkeys(("PaddingTrained", "LabelsNotShifted", "LabelsShiftedTwice"), Change(ENTROPY, ByDocument)),
    "RankLeftOut": Change(REDUCE, Reduced),
    "ShardReadTwice": Change({"DistributedSampler(dataset)": "DistributedSampler(samples, "}, *sampled(False)),
    "SamplerPads": Change({"DistributedSampler(dataset, drop_last=True)": "drop_last=drop_last"}, *sampled(True)),
    "ParameterIgnoredByReducer": Change({"_set_params_and_buffers_to_ignore_for_model": "_set_params_and_buffers_to_ignore_for_model"},
                                        of(Ddp, "wrap")),
    "BucketOfOneRankLost": Change({"register_comm_hook": "register_comm_hook"}, of(Ddp, "wrap")),
    "AccumulatorReducedEachTime": Change(REDUCE, ReducedOnce),
    "TiedWeightAccumulatedTwice": Change({"model.named_parameters()": "in model.named_parameters()"}, AddedUpOnce),
    "FrozenParameterTrained": Change({"parameter.requires_grad_(False)": "parameter.requires_grad_(False)"}, Frozen),
    "SignFlipped": Change({"register_hook": "register_hook"}, of(Ddp, "make_model")),
    "GradientLost": Change({".detach()": ".detach()"}, of(Fsdp, "make_model")),
    "LossScaleKept": Change({"p.grad /= scale": "p.grad /= 4096.0"}, Unscaled),
    "LearningRateInGradient": Change({"p.grad *= factor": "0.03 * g"}, of(Trainer, "reduced")),
    "ClipBeforeReduction": Change(CLIP, WholeNorm),
    **dict.fromkeys(("GroupsClippedApart", "ClipNotApplied"), Change(CLIP, Clipped)),
    "NormOfOwnShard": Change(CLIP, WholeNorm),
    "UpdatedTwice": Change({"optimizer.step()": "super().update(model)"}, of(Trainer, "update")),
    "DecayOnEverything": Change({'"weight_decay": 0.0': '"weight_decay": 0.0'}, Grouped),
    "ReplicaDiverges": Change({"p.grad.mul_(factor)": "model.head.bias.grad.mul_(1.5)"}, of(ByHand, "after_reduction")),
    "EmptyMicroBatch": Change({**COUNT, **SCALE}, {**summed(Ddp), **of(Trainer, "cross_entropy")}),
    "LogNotFinite": Change(LOG, summed(Ddp)),
    "LogSummedOverRanks": Change(LOG, summed(Fsdp)),
}
