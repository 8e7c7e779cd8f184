"""Means over the whole batch, for a PyTorch loop of any kind: count before the first backward, divide once, then only sum.

    mean = isograd.TokenMean(group)            # the ranks that see different tokens
    isograd.sum_gradients(model)               # DDP and FSDP2 average unless they are told
    step = mean.count(batch.targets for batch in micro_batches)
    for batch in micro_batches:
        step.scale(cross_entropy(model(batch.tokens), batch.targets, reduction="sum")).backward()

Then the gradient is that of one device on the whole batch, however it is dealt to ranks and micro-batches
(docs/losses.md has the reasons). `count` is collective: every rank of `group` calls it once a step, one without data
too. `group` is a process group, or a device mesh of all axes along which tokens differ; None is the world.
"""
from __future__ import annotations

import math
from typing import Iterable, Sequence, Union

import torch

from ._errors import ConfigError, refuse
from ._groups import Group, all_sum, gather, gather_rows

Counts = Union[torch.Tensor, int]
IGNORED = -100
_COUNTED, _WEIGHED, _REFUSED = range(3)


class Step:
    """One optimizer step: what its loss is divided by. `count` of a mean makes it.

    denominator: of the whole step, over all ranks and micro-batches; 0 where nothing carries loss.
    targets:     targets of the whole step, where the mean counts them, else 0.
    global_micro_batches: most micro-batches of a rank. FSDP2 and pipelines want as many on every rank: go on with empty ones.
    """

    def __init__(self, group: Group, denominator: float, targets: int, global_micro_batches: int,
                 weights: Sequence[torch.Tensor] | None = None) -> None:
        self.denominator, self.targets, self.global_micro_batches = denominator, targets, global_micro_batches
        self._group, self._weights = group, weights
        self._shares: list[torch.Tensor] = []  # where they are: read one by one they would hold up a GPU

    @property
    def gradient_scale(self) -> float:
        """What the gradient of the undivided sum is multiplied by; 0 in a step without any target."""
        return 1.0 / self.denominator if self.denominator > 0 else 0.0

    def scale(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """A micro-batch's share of the step's loss: `loss_sum` [], fp32 or fp64, over the denominator.

        ConfigError: it is no single number, or one of 16 bits, in which the denominator would be rounded.
        """
        _check_sum(loss_sum)
        share = loss_sum / self.denominator if self.denominator > 0 else loss_sum * 0.0
        self._shares.append(share.detach())
        return share

    def weights(self, micro_batch: int) -> torch.Tensor:
        """Of SampleMean: the weight of each token's loss in the micro-batch's sum, fp64, in the shape of its samples.

        Of an empty one, which this rank goes on with after its own: [0].
        """
        if self._weights is None:
            refuse("Step.weights", "a mean without weights of its own", "the step of a SampleMean",
                   "Take the sum of the losses as it is")
        if not 0 <= micro_batch < max(self.global_micro_batches, 1):
            refuse("Step.weights", f"micro-batch {micro_batch}", f"one of the {self.global_micro_batches} of this step", "Count it too")
        return self._weights[micro_batch] if micro_batch < len(self._weights) else torch.zeros(0, dtype=torch.float64)

    def loss(self) -> float:
        """The loss that was differentiated: what `scale` gave so far, summed over all ranks. Collective."""
        own = math.fsum(float(share) for share in self._shares)
        return float(all_sum(torch.tensor(own, dtype=torch.float64), self._group))


class TokenMean:
    """Σ ℓ_i / N over the N valid targets of all ranks and micro-batches of a step."""

    def __init__(self, group: Group = None, ignore_index: int = IGNORED) -> None:
        self.group, self.ignore_index = group, ignore_index

    def count(self, targets: Iterable[Counts]) -> Step:
        """Of each micro-batch of this rank, in order: its targets, of any shape, or how many are valid. Collective."""
        with _Exchange("TokenMean.count", self.group) as exchange:
            exchange.counts = [self.own(each) for each in targets]
        return Step(self.group, exchange.targets, int(exchange.targets), exchange.global_micro_batches)

    def own(self, targets: Union[Counts, float]) -> int:
        """How many targets of a micro-batch are valid."""
        if isinstance(targets, torch.Tensor):
            _check_integers("TokenMean.count", "targets", targets)
            if targets.dim() == 0:
                refuse("TokenMean.count", "a tensor without dimensions, which may be one target or a number of targets",
                       "a tensor of targets or how many are valid", "Give .item() of a count, reshape(1) of a target")
            return int((targets != self.ignore_index).sum())
        if not isinstance(targets, int) or targets < 0:
            refuse("TokenMean.count", repr(targets), "a tensor of targets or how many are valid",
                   "Count before backward, every micro-batch by itself")
        return targets


class WeightedMean:
    """Σ w_i ℓ_i / Σ w_i over all ranks and micro-batches of a step."""

    def __init__(self, group: Group = None) -> None:
        self.group = group

    def count(self, weights: Iterable[Union[torch.Tensor, float]]) -> Step:
        """Of each micro-batch the weights w_i >= 0 of its valid targets, of any shape, or their sum. Collective.

        A target without loss has weight 0. `scale` takes Σ w_i ℓ_i.
        """
        with _Exchange("WeightedMean.count", self.group) as exchange:
            exchange.weights = [self.own(each) for each in weights]
        return Step(self.group, exchange.weight, 0, exchange.global_micro_batches)

    def own(self, weights: Union[torch.Tensor, float]) -> float:
        """The sum of a micro-batch's weights, in fp64."""
        values = torch.as_tensor(weights, dtype=torch.float64)
        if not bool(torch.isfinite(values).all()) or bool((values < 0).any()):
            refuse("WeightedMean.count", "a weight that is negative or not finite", "weights >= 0",
                   "A mean over weights of both signs may divide by zero: take FixedDenominator")
        return float(values.sum())


class FixedDenominator:
    """Σ ℓ_i / D, where D is yours and the same on every rank and in every step."""

    def __init__(self, denominator: float, group: Group = None) -> None:
        if not denominator > 0 or not math.isfinite(denominator):
            refuse("FixedDenominator", str(denominator), "a number above zero", "Give the number to divide by")
        self.group, self.denominator = group, float(denominator)

    def count(self, micro_batches: Iterable[object] = ()) -> Step:
        """Counts the micro-batches, and compares D between the ranks. Collective."""
        with _Exchange("FixedDenominator.count", self.group) as exchange:
            exchange.weights = [self.denominator]
            exchange.rounds_here = sum(1 for _ in micro_batches)
        if float(exchange.rows[:, _WEIGHED].max()) != float(exchange.rows[:, _WEIGHED].min()):
            refuse("FixedDenominator.count", f"the denominators {exchange.rows[:, _WEIGHED].tolist()} by rank",
                   "one number", "Give every rank the same")
        return Step(self.group, self.denominator, 0, exchange.global_micro_batches)


class SampleMean:
    """(1/B) Σ_b (1/T_b) Σ_{i in b} ℓ_i: T_b valid targets of sample b, B samples that have any.

    cut=False: each sample lies whole on one rank, and ids are that rank's own. cut=True: ids are the batch's, and a
    sample's pieces may lie on several ranks and in several micro-batches.
    """

    def __init__(self, group: Group = None, ignore_index: int = IGNORED, cut: bool = False) -> None:
        self.group, self.ignore_index, self.cut = group, ignore_index, cut

    def count(self, samples: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> Step:
        """Of each micro-batch, in one shape: the id of each token's sample, and its targets. Collective.

        `scale` then takes (losses * step.weights(j)).sum() of micro-batch j.
        """
        ids: list[torch.Tensor] = []
        valid: list[torch.Tensor] = []
        with _Exchange("SampleMean.count", self.group) as exchange:
            for each, wanted in zip(samples, targets, strict=True):
                ids.append(each)
                valid.append(self.valid(each, wanted))
            here = self.lengths(ids, valid)
            exchange.counts = [int(each.sum()) for each in valid]
            exchange.weights = [float(here.size(0))]
        count = exchange.weight
        if self.cut:
            rows = gather_rows(here, self.group)
            names, place = rows[:, 0].unique(return_inverse=True)
            lengths = torch.zeros(len(names), dtype=torch.int64).index_add_(0, place, rows[:, 1])
            here, count = torch.stack([names, lengths], 1), float(len(names))
        return Step(self.group, count, int(exchange.targets), exchange.global_micro_batches,
                    [self.shares(i, v, here) for i, v in zip(ids, valid)])

    def valid(self, samples: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Which tokens carry loss, bool."""
        _check_integers("SampleMean.count", "samples", samples)
        _check_integers("SampleMean.count", "targets", targets)
        if samples.shape != targets.shape:
            refuse("SampleMean.count", f"samples {tuple(samples.shape)} and targets {tuple(targets.shape)}",
                   "one id for each target", "Give both in the shape of the losses")
        return targets != self.ignore_index

    @staticmethod
    def lengths(ids: Sequence[torch.Tensor], valid: Sequence[torch.Tensor]) -> torch.Tensor:
        """[samples, 2] on the CPU: id and valid targets of each sample with any."""
        flat = torch.cat([torch.zeros(0, dtype=torch.int64), *(i[v].reshape(-1).long().cpu() for i, v in zip(ids, valid))])
        names, counts = flat.unique(return_counts=True)
        return torch.stack([names, counts], 1)

    @staticmethod
    def shares(ids: torch.Tensor, valid: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """1/T_b of each token, 0 where it carries no loss."""
        weights = torch.zeros(ids.shape, dtype=torch.float64, device=ids.device)
        place = torch.searchsorted(lengths[:, 0].contiguous(), ids[valid].reshape(-1).long().cpu())
        weights[valid] = lengths[place, 1].double().reciprocal().to(weights.device)
        return weights


class Deferred:
    """A mean whose step is known only when it ends: sums are differentiated as they are, the gradient is scaled once.

        deferred = isograd.Deferred(isograd.TokenMean(group))
        for batch in as_they_come:
            deferred.add(batch.targets)
            loss_sum(batch).backward()         # fp32: a sum over many tokens overflows fp16
        step = deferred.finish()               # collective, after the last backward
        isograd.clip_grad_norm_(model, 1.0, scale=step.gradient_scale)

    `mean`: TokenMean, WeightedMean or FixedDenominator. Gradients are reduced once, at the end of the step.
    """

    def __init__(self, mean: Union[TokenMean, WeightedMean, FixedDenominator]) -> None:
        if not isinstance(mean, (TokenMean, WeightedMean, FixedDenominator)):
            refuse("Deferred", type(mean).__name__, "TokenMean, WeightedMean or FixedDenominator",
                   "A sample mean needs its samples before backward: count them first")
        self.mean = mean
        self._calls: list[float] = []

    def add(self, counted: Union[torch.Tensor, float, None] = None) -> None:
        """What `count` of the mean takes of one micro-batch: nothing for a FixedDenominator."""
        if isinstance(self.mean, FixedDenominator):
            self._calls.append(0.0)
        elif counted is None:
            refuse("Deferred.add", "nothing", f"what {type(self.mean).__name__}.count takes of a micro-batch",
                   "Give its targets, or its weights")
        else:
            self._calls.append(self.mean.own(counted))

    def finish(self) -> Step:
        """The step, over all ranks; the next one begins. Collective."""
        calls, self._calls = self._calls, []
        if isinstance(self.mean, TokenMean):
            return self.mean.count(int(each) for each in calls)
        return self.mean.count(calls)


class _Exchange:
    """What each rank counted, as one small all-gather; input that one rank refuses is refused on all."""

    def __init__(self, where: str, group: Group) -> None:
        self.where, self.group = where, group
        self.counts: Sequence[int] = ()
        self.weights: Sequence[float] = ()
        self.rounds_here: int | None = None

    def __enter__(self) -> _Exchange:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None and not isinstance(error, Exception):
            return  # interrupted, as others are too
        rounds = self.rounds_here if self.rounds_here is not None else max(len(self.counts), len(self.weights))
        own = [float(sum(self.counts)), math.fsum(self.weights), float(error is not None), float(rounds)]
        self.rows = gather(torch.tensor(own, dtype=torch.float64), self.group)  # exact below 2^53
        refused = self.rows[:, _REFUSED].nonzero().flatten().tolist()
        if error is None and refused:
            raise ConfigError(f"{self.where}: found input that rank {refused[0]} refuses; expected input "
                              "that every rank can count. Look at that rank's own message.")
        self.targets, self.weight = float(self.rows[:, _COUNTED].sum()), float(self.rows[:, _WEIGHED].sum())
        self.global_micro_batches = int(self.rows[:, -1].max())


def _check_sum(loss_sum: torch.Tensor) -> None:
    if loss_sum.numel() != 1:
        refuse("Step.scale", f"losses of shape {tuple(loss_sum.shape)}", "their sum, a single number",
               'Take reduction="sum"; a mean would be divided twice')
    if loss_sum.dtype not in (torch.float32, torch.float64):
        refuse("Step.scale", f"a sum in {loss_sum.dtype}", "fp32 or fp64, for 1/N would be rounded with it",
               "Compute the loss from logits.float()")


def _check_integers(where: str, what: str, values: torch.Tensor) -> None:
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        refuse(where, f"{what} in {values.dtype}", "integers", "Give class or token numbers, ignore_index where none")
