"""Ranking losses over the rows of all ranks, for PyTorch; docs/ranking.md has the formulas and why no rank ranks alone.

They are the C++ library's, with its queue, subsampling and selected thresholds.
"""
from __future__ import annotations

import math
from typing import Any, TypedDict

import torch
from typing_extensions import Unpack

from ._ranks import Group, size_of
from ._native.isograd_comm import RankingLoss as _Cpp, target_range
from ._replicated import Given, ReplicatedLoss, backend_of, floating, pooled


class RankingOptions(TypedDict, total=False):
    """What every loss takes of RankingLoss's options besides `temperature`, whose default is the loss's own."""

    num_classes: int
    reduction: str
    ignore_index: int
    group: Group
    grad_reduction: str
    queue_size: int
    update_queue_in_eval: bool
    max_pool_size: int
    seed: int
    check_queue: bool
    thresholds: str
    timeout: float


class RankingLoss(ReplicatedLoss):
    """The base of the ranking losses.

    num_classes:    1: targets 0 and 1; more: targets 0 to C - 1, each class against the rest.
    temperature:    in units of the scores; of PAUC of its own scale. It may be set between steps, alike on all ranks.
    reduction:      over the classes that are valid on the rows of all ranks: "mean" or "sum", 0 if there is none; "none":
                    [C], NaN where a class is invalid, 0 where no rank has a row.
    ignore_index:   rows with this target take part in nothing.
    group:          process group or mesh of the ranks whose rows are ranked together; None: all ranks.
    grad_reduction: what the trainer does with parameter gradients of ranks: "sum", as `isograd.sum_gradients` makes DDP and
                    FSDP2 do; "mean": the gradient, not the value, is multiplied by the number of ranks.
    queue_size:     rows of earlier steps that take part in the ranking; 0: none. update_queue_in_eval: take rows in eval too.
    max_pool_size:  rows at most, each class keeping a quota; 0: all. seed: of that draw and the queue's, on all ranks.
    check_queue:    compare the queue over ranks in each step.
    thresholds:     of recall and the trapezoid: "gather" rows, "select" by counts, or "auto": the cheaper one.
    timeout:        seconds to wait for another rank.

    forward(scores, targets, sample_weight=None, iid_mask=None): [n, C] floating, [n] integer, [n] finite and >= 0 of the
    positives, [n] bool: rows that PAUC may estimate thresholds from; n is the rank's own and may be 0. The value is the whole
    loss, the same on every rank; each rank's scores get their own derivative of it. Collective; backward is not. Scores that
    are not finite make value and gradient NaN on every rank. No second derivatives. ConfigError, on every rank: what one of
    them is given does not fit. state_dict() holds the queue, the temperature and the number of forwards.

    The ranks of a process group with a backend for the CPU share the work; over another, or a mesh of several axes, each rank
    gets all rows and ranks them all.
    """

    def __init__(self, *, num_classes: int = 1, temperature: float = 0.01, reduction: str = "mean", ignore_index: int = -100,
                 group: Group = None, grad_reduction: str = "sum", queue_size: int = 0, update_queue_in_eval: bool = False,
                 max_pool_size: int = 0, seed: int = 0, check_queue: bool = False, thresholds: str = "auto",
                 timeout: float = 600.0) -> None:
        super().__init__()
        self.num_classes, self.reduction, self.ignore_index = num_classes, reduction, ignore_index
        self.group, self.grad_reduction, self.timeout = group, grad_reduction, timeout
        self._options: dict[str, Any] = {"num_classes": num_classes, "temperature": temperature, "reduction": reduction,
                         "ignore_index": ignore_index, "queue_size": queue_size, "update_queue_in_eval": update_queue_in_eval,
                         "max_pool_size": max_pool_size, "seed": seed, "check_queue": check_queue, "thresholds": thresholds}
        self._check(grad_reduction=grad_reduction, **self._options)
        self._cpp: _Cpp | None = None  # made in the first forward, which may wait for ranks
        self._state: list[tuple[str, torch.Tensor]] | None = None  # that it begins with
        self._over_ranks = True

    def _take(self, **own: Any) -> None:
        """Options of one loss, for C++."""
        self._check(**own)
        self._options.update(own)

    @property
    def temperature(self) -> float:
        return float(self._cpp.temperature if self._cpp else self._options["temperature"])

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._check(temperature=value)
        self._options["temperature"] = value
        if self._cpp:
            self._cpp.temperature = value

    @property
    def queue_rows(self) -> int:
        """Rows of earlier steps that the queue holds."""
        return self._cpp.queue_rows() if self._cpp else 0

    def reset_queue(self) -> None:
        self._made().reset_queue()

    def get_extra_state(self) -> dict[str, torch.Tensor]:
        return dict(self._cpp.state() if self._cpp else self._state or [])

    def set_extra_state(self, state: dict[str, torch.Tensor]) -> None:
        self._state = list(state.items()) or None
        if self._cpp and self._state:
            self._cpp.load_state(self._state)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_cpp": None, "_state": list(self.get_extra_state().items()) or None}

    def _made(self) -> _Cpp:
        if self._cpp is None:
            self._over_ranks, backend = backend_of(self.group)
            options = {**self._options, "grad_reduction": self.grad_reduction if self._over_ranks else "sum"}
            self._cpp = _Cpp(type(self)._name(), options, backend, self.timeout)
            if self._state:
                self._cpp.load_state(self._state)
        return self._cpp

    @classmethod
    def _name(cls) -> str:
        return next(base.__name__ for base in cls.__mro__ if base.__module__ == __name__)  # of a user's own subclass too

    def forward(self, scores: torch.Tensor, targets: torch.Tensor, sample_weight: torch.Tensor | None = None,
                iid_mask: torch.Tensor | None = None) -> torch.Tensor:
        self._agree(lambda: self._check_input(scores, targets, sample_weight, iid_mask), self.num_classes, scores, sample_weight,
                    iid_mask)
        cpp = self._made()
        if self._over_ranks:
            return cpp.evaluate(scores, targets, sample_weight, iid_mask, self.training)[0]
        kept = targets != self.ignore_index
        given = {name: tensor for name, tensor in (("weight", sample_weight), ("iid", iid_mask)) if tensor is not None}
        rows, (label, *columns), own = pooled(scores, kept, [targets, *given.values()], self.group)
        extras = dict(zip(given, columns))
        rows.requires_grad_(scores.requires_grad and torch.is_grad_enabled())
        value = cpp.evaluate(rows, label.long(), extras.get("weight"), extras["iid"] > 0 if "iid" in extras else None,
                             self.training)[0]
        slopes = torch.zeros_like(scores, dtype=rows.dtype)
        if value.requires_grad:
            slopes[kept] = torch.autograd.grad(value.sum(), rows)[0][own]
        if not bool(torch.isfinite(rows).all()):
            slopes.fill_(math.nan)
        if self.grad_reduction == "mean":
            slopes *= size_of(self.group)
        result: torch.Tensor = Given.apply(scores, value.detach(), slopes)
        return result

    def _check_input(self, scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None,
                     iid_mask: torch.Tensor | None) -> None:
        self._expect(scores.dim() == 2 and scores.size(1) == self.num_classes and floating(scores),
                     f"scores of shape {tuple(scores.shape)} in {scores.dtype}", f"[n, {self.num_classes}] floating",
                     "Give a column of scores for each class")
        self._expect(targets.shape == scores.shape[:1] and not targets.is_floating_point(),
                     f"targets of shape {tuple(targets.shape)} in {targets.dtype}", f"[{len(scores)}] integers",
                     "Give one target for each row")
        most = max(self.num_classes - 1, 1)
        low, high = target_range(targets, self.ignore_index) or (0, 0)
        self._expect(0 <= low <= high <= most, f"targets from {low} to {high}", f"0 to {most}, or {self.ignore_index}",
                     "Change the targets, or set ignore_index")
        self._expect(weights is None or weights.shape == targets.shape and bool((torch.isfinite(weights) & (weights >= 0)).all()),
                     "sample_weight that does not fit", f"[{len(scores)}] finite numbers >= 0", "Give one for each row")
        self._expect(iid_mask is None or iid_mask.shape == targets.shape and iid_mask.dtype == torch.bool,
                     f"iid_mask of shape {tuple(iid_mask.shape)} in {iid_mask.dtype}" if iid_mask is not None else "",
                     f"[{len(scores)}] bool", "Give one for each row")


class SmoothAPLoss(RankingLoss):
    """1 - AP with sigmoids for ranks (Brown et al. 2020, eq. 6 and 7). A class is invalid without positives or negatives."""


class RecallAtQuantileLoss(RankingLoss):
    """1 - the mean over positives of sigmoid((s - t) / temperature), t the (1 - quantile) quantile of all scores.

    quantile: in (0, 1), the share of all rows above the threshold. A class is invalid without positives.
    """

    def __init__(self, *, quantile: float = 0.005, interpolation: str = "higher", temperature: float = 0.01,
                 **options: Unpack[RankingOptions]) -> None:
        super().__init__(temperature=temperature, **options)
        self._take(quantile=quantile, interpolation=interpolation)


class PAUCAtBudgetLoss(RankingLoss):
    """1 - the partial AUC over the band [alpha, beta] of false-positive rates.

    surrogate:     "trapezoid": over n_knots thresholds, quantiles of the reference scores; "pairwise": positives against
                   negatives in the band.
    tau_scale:     the temperature is multiplied by the reference's interquartile range ("iqr") or by the band's width
                   ("band"); a class without dispersion is invalid, as is one without positives or negatives.
    budget_basis:  reference scores: negatives ("fpr") or all rows ("population"), of those in iid_mask.
    pos_numerator: positives of all rows ("pool") or of this step alone, not of the queue ("live").
    """

    def __init__(self, *, alpha: float = 0.0, beta: float = 0.005, surrogate: str = "trapezoid", n_knots: int = 2,
                 tau_scale: str = "iqr", budget_basis: str = "fpr", pos_numerator: str = "pool", interpolation: str = "higher",
                 temperature: float = 0.1, **options: Unpack[RankingOptions]) -> None:
        super().__init__(temperature=temperature, **options)
        self._take(alpha=alpha, beta=beta, surrogate=surrogate, n_knots=n_knots, tau_scale=tau_scale, budget_basis=budget_basis,
                   pos_numerator=pos_numerator, interpolation=interpolation)
        self._expect(0 <= alpha < beta <= 1, f"alpha={alpha!r} and beta={beta!r}", "0 <= alpha < beta <= 1", "Set them so")
