"""Means over the whole batch, for a PyTorch loop of any kind: count before the first backward, divide once, then only sum.

    mean = isograd.TokenMean(group)            # the ranks that see different tokens
    isograd.sum_gradients(model)               # DDP and FSDP2 average by default
    counted = mean.count(batch.targets for batch in micro_batches)
    for batch in micro_batches:
        counted.scale(cross_entropy(model(batch.tokens), batch.targets, reduction="sum")).backward()

Then the gradient is that of one device on the whole batch, however it is assigned to ranks and micro-batches
(docs/losses.md has the reasons). `count` is collective: every rank of `group` calls it once a step, one without data
too. `group` is a process group, or a device mesh of all axes along which tokens differ; None is the world.
"""
from __future__ import annotations

import dataclasses
import math
from typing import Any, Callable, Iterable, Sequence, Union

import torch

from ._ranks import agreed, all_sum, gather_rows, Group, refuse
from ._native.isograd_comm import linear_cross_entropy as _fused

Counts = Union[torch.Tensor, int]
IGNORED = -100


class CountedStep:
    """One optimizer step: what its loss is divided by. `count` of a mean makes it.

    denominator: that of the whole step, over all ranks and micro-batches; 0 where nothing carries loss.
    targets:     those of the whole step, where the mean counts them, else 0.
    global_micro_batches: most micro-batches of a rank. FSDP2 and pipelines want as many on every rank: go on with empty ones.
    """

    def __init__(self, group: Group, denominator: float, targets: int, global_micro_batches: int,
                 weights: Sequence[torch.Tensor] | None = None) -> None:
        self.denominator, self.targets, self.global_micro_batches = denominator, targets, global_micro_batches
        self._group, self._weights = group, weights
        self._shares: list[torch.Tensor] = []  # on their device: to read each at once would hold up a GPU

    @property
    def gradient_scale(self) -> float:
        """The factor of the undivided sum's gradient; 0 in a step without any target."""
        return 1.0 / self.denominator if self.denominator > 0 else 0.0

    def scale(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """A micro-batch's share of the step's loss: `loss_sum` [], fp32 or fp64, over the denominator.

        ConfigError: it is no single number, or one of 16 bits, in which the denominator would be rounded.
        """
        if loss_sum.numel() != 1:
            refuse("CountedStep.scale", f"losses of shape {tuple(loss_sum.shape)}", "their sum, a single number",
                   'Take reduction="sum"; a mean would be divided twice')
        if loss_sum.dtype not in (torch.float32, torch.float64):
            refuse("CountedStep.scale", f"a sum in {loss_sum.dtype}", "fp32 or fp64, for 1/N would be rounded with it",
                   "Compute the loss from logits.float()")
        share = loss_sum / self.denominator if self.denominator > 0 else loss_sum * 0.0
        self._shares.append(share.detach())
        return share

    def weights(self, micro_batch: int) -> torch.Tensor:
        """A SampleMean's weight of each token's loss in the micro-batch's sum, fp64, in the shape of its samples; [0] of an
        empty micro-batch, which this rank goes on with after its own.
        """
        if self._weights is None:
            refuse("CountedStep.weights", "a mean without weights of its own", "the step of a SampleMean",
                   "Take the sum of the losses as it is")
        if not 0 <= micro_batch < max(self.global_micro_batches, 1):
            refuse("CountedStep.weights", f"micro-batch {micro_batch}", f"one of the {self.global_micro_batches} of this step",
                   "Count it too")
        return self._weights[micro_batch] if micro_batch < len(self._weights) else torch.zeros(0, dtype=torch.float64)

    def loss(self) -> float:
        """The loss that was differentiated: what `scale` gave so far, summed over all ranks. Collective."""
        own = math.fsum(float(share) for share in self._shares)
        return float(all_sum(torch.tensor(own, dtype=torch.float64), self._group))


def _each(where: str, given: Iterable[Any]) -> Iterable[Any]:
    if not isinstance(given, Iterable):
        refuse(where, repr(given), "a list with an entry for each micro-batch", "Write [targets] for one micro-batch")
    return given


class TokenMean:
    """Σ ℓ_i / N over the N valid targets of all ranks and micro-batches of a step."""

    def __init__(self, group: Group = None, ignore_index: int = IGNORED) -> None:
        self.group, self.ignore_index = group, ignore_index

    def count(self, targets: Iterable[Counts]) -> CountedStep:
        """targets: those of each micro-batch of this rank, in order, of any shape, or how many are valid. Collective."""
        count, micro_batches = _counted("TokenMean.count", lambda: map(self.own, _each("TokenMean.count", targets)), self.group)
        return CountedStep(self.group, count, int(count), micro_batches)

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

    def count(self, weights: Iterable[Union[torch.Tensor, float]]) -> CountedStep:
        """weights: for each micro-batch the w_i >= 0 of its valid targets, of any shape, or their sum. Collective.

        A target without loss has weight 0. `scale` takes Σ w_i ℓ_i.
        """
        total, micro_batches = _counted("WeightedMean.count", lambda: map(self.own, _each("WeightedMean.count", weights)), self.group)
        return CountedStep(self.group, total, 0, micro_batches)

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

    def count(self, micro_batches: Iterable[object] = ()) -> CountedStep:
        """Counts the micro-batches, and compares D between the ranks. Collective."""
        rows = agreed("FixedDenominator.count", lambda: (self.denominator, sum(1 for _ in micro_batches)), self.group)
        if float(rows[:, 0].max()) != float(rows[:, 0].min()):
            refuse("FixedDenominator.count", f"the denominators {rows[:, 0].tolist()} by rank", "one number",
                   "Give every rank the same")
        return CountedStep(self.group, self.denominator, 0, int(rows[:, 1].max()))


class SampleMean:
    """(1/B) Σ_b (1/T_b) Σ_{i in b} ℓ_i: T_b valid targets of sample b, B samples that have any.

    cut=False: each sample lies whole on one rank, and ids are that rank's own. cut=True: ids are the batch's, and a
    sample's pieces may lie on several ranks and in several micro-batches.
    """

    def __init__(self, group: Group = None, ignore_index: int = IGNORED, cut: bool = False) -> None:
        self.group, self.ignore_index, self.cut = group, ignore_index, cut

    def count(self, samples: Iterable[torch.Tensor], targets: Iterable[torch.Tensor]) -> CountedStep:
        """For each micro-batch, in one shape: the id of each token's sample, and its targets. Collective.

        `scale` then takes (losses * counted.weights(j)).sum() of micro-batch j.
        """
        ids: list[torch.Tensor] = []
        valid: list[torch.Tensor] = []

        def own() -> tuple[float, float, float]:
            for each, wanted in zip(samples, targets, strict=True):
                ids.append(each)
                valid.append(self.valid(each, wanted))
            return sum(int(each.sum()) for each in valid), self.lengths(ids, valid).size(0), len(valid)

        rows = agreed("SampleMean.count", own, self.group)
        lengths, count = self.lengths(ids, valid), float(rows[:, 1].sum())
        if self.cut:
            pieces = gather_rows(lengths, self.group)
            names, place = pieces[:, 0].unique(return_inverse=True)
            whole = torch.zeros(len(names), dtype=torch.int64).index_add_(0, place, pieces[:, 1])
            lengths, count = torch.stack([names, whole], 1), float(len(names))
        return CountedStep(self.group, count, int(rows[:, 0].sum()), int(rows[:, 2].max()),
                    [self.shares(i, v, lengths) for i, v in zip(ids, valid)])

    def valid(self, samples: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Which tokens carry loss, bool."""
        _check_integers("SampleMean.count", "samples", samples)
        _check_integers("SampleMean.count", "targets", targets)
        if samples.shape != targets.shape:
            refuse("SampleMean.count", f"samples {tuple(samples.shape)} and targets {tuple(targets.shape)}", "one shape",
                   "Give each token its sample")
        return targets != self.ignore_index

    @staticmethod
    def lengths(ids: Sequence[torch.Tensor], valid: Sequence[torch.Tensor]) -> torch.Tensor:
        """[samples, 2] on the CPU: id and valid targets of each sample with any."""
        flat = torch.cat([torch.zeros(0, dtype=torch.int64), *(i[v].reshape(-1).long().cpu() for i, v in zip(ids, valid))])
        return torch.stack(flat.unique(return_counts=True), 1)

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
        counted = deferred.finish()            # collective, after the last backward
        isograd.clip_grad_norm_(model, 1.0, scale=counted.gradient_scale)

    `mean`: TokenMean, WeightedMean or FixedDenominator. Gradients are reduced once, at the end of the step.
    """

    def __init__(self, mean: Union[TokenMean, WeightedMean, FixedDenominator]) -> None:
        if not isinstance(mean, (TokenMean, WeightedMean, FixedDenominator)):
            refuse("Deferred", type(mean).__name__, "TokenMean, WeightedMean or FixedDenominator",
                   "A sample mean needs its samples before backward: count them first")
        self.mean = mean
        self._calls: list[float] = []

    def add(self, counted: Union[torch.Tensor, float, None] = None) -> None:
        """A micro-batch, as `count` of the mean takes it: nothing for a FixedDenominator."""
        if isinstance(self.mean, FixedDenominator):
            self._calls.append(0.0)
        elif counted is None:
            refuse("Deferred.add", "nothing", f"what {type(self.mean).__name__}.count takes of a micro-batch",
                   "Give its targets, or its weights")
        else:
            self._calls.append(self.mean.own(counted))

    def finish(self) -> CountedStep:
        """The step, over all ranks; the next one begins. Collective."""
        calls, self._calls = self._calls, []
        if isinstance(self.mean, TokenMean):
            return self.mean.count(int(each) for each in calls)
        return self.mean.count(calls)


def _counted(where: str, numbers: Callable[[], Iterable[float]], group: Group) -> tuple[float, int]:
    """The sum of all ranks' numbers, one for each micro-batch, and the most micro-batches of a rank. Collective."""
    def own() -> tuple[float, float]:
        found = list(numbers())
        return math.fsum(found), len(found)

    rows = agreed(where, own, group)
    return float(rows[:, 0].sum()), int(rows[:, 1].max())


def _check_integers(where: str, what: str, values: torch.Tensor) -> None:
    if values.is_floating_point() or values.is_complex() or values.dtype == torch.bool:
        refuse(where, f"{what} in {values.dtype}", "integers", "Give class or token numbers, ignore_index where none")


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropy:
    """Sums over the tokens with a target and a weight above 0.

    sum:               differentiable: Σ w (loss + z · lse²), lse = log Σ exp of a token's logits.
    cross_entropy:     detached: Σ w loss. z_loss: detached: Σ w lse², without the coefficient.
    log_probabilities: detached: log p of each target, of the targets' shape; 0 where there is none.
    """

    sum: torch.Tensor
    cross_entropy: torch.Tensor
    z_loss: torch.Tensor
    log_probabilities: torch.Tensor


def linear_cross_entropy(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, *,
                         weights: torch.Tensor | None = None, bias: torch.Tensor | None = None, ignore_index: int = IGNORED,
                         label_smoothing: float = 0.0, z_loss: float = 0.0) -> LinearCrossEntropy:
    """F.cross_entropy(F.linear(hidden, weight, bias), targets, reduction="sum"), 2 to 64 MiB of logits at a time.

    hidden [..., H], weight [V, H], bias [V]: of one of fp64, fp32, bf16 on one device. targets [...]: int64, in [0, V) or
    ignore_index. weights [...]: of the tokens, constants of 0 or more, or a mask. label_smoothing in [0, 1]: as PyTorch's.
    z_loss: the coefficient of the squared log-partition.

    Divide it yourself: `counted.scale(loss.sum)` with what TokenMean().count gave. Gradients are made in the forward and
    multiplied by a scalar in backward; that of weight is added up in fp32 (fp64 in fp64). First derivatives only.

    ConfigError: targets outside the vocabulary, weights that are negative or not finite, shapes or types that do not fit;
    a backward with create_graph is a RuntimeError.
    """
    if ignore_index != IGNORED and bool((targets == IGNORED).any()):
        refuse("isograd.linear_cross_entropy", f"targets of {IGNORED} with ignore_index={ignore_index}",
               "targets in [0, V), or ignore_index", f"Give the ignored tokens {ignore_index} alone")
    kept = targets if ignore_index == IGNORED else targets.masked_fill(targets == ignore_index, IGNORED)
    if hidden.dim() > 2 and hidden.shape[:-1] == targets.shape:
        hidden, kept = hidden.flatten(0, -2), kept.flatten()
        weights = weights.flatten() if weights is not None and weights.shape == targets.shape else weights
    found = _fused(hidden, weight, kept, weights, bias, label_smoothing, z_loss)
    return LinearCrossEntropy(*found[:3], found[3].view(targets.shape))
