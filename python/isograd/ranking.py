"""Ranking losses over the rows of all ranks, for PyTorch; docs/ranking.md has the formulas and why no rank ranks alone.

They are the C++ library's, with its queue, subsampling and selected thresholds.
"""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ._errors import refuse
from ._groups import Group
from ._native.isograd_comm import RankingLoss as _Cpp, target_range
from ._replicated import Given, agreed, backend_of, kind_of, pooled, problem_of

_INTERPOLATIONS = ("linear", "lower", "higher", "nearest", "midpoint")


class RankingLoss(nn.Module):
    """What the ranking losses share.

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

    Work is dealt out over the ranks of a process group with a backend for the CPU; over another, or a mesh of several axes,
    all rows go to each rank, which ranks them all.
    """

    def __init__(self, *, num_classes: int = 1, temperature: float = 0.01, reduction: str = "mean", ignore_index: int = -100,
                 group: Group = None, grad_reduction: str = "sum", queue_size: int = 0, update_queue_in_eval: bool = False,
                 max_pool_size: int = 0, seed: int = 0, check_queue: bool = False, thresholds: str = "auto",
                 timeout: float = 600.0, **own: Any) -> None:
        super().__init__()
        self._check("num_classes", num_classes, num_classes >= 1, "at least 1")
        self._check("temperature", temperature, 1.2e-38 <= temperature < math.inf, "a number above 1.2e-38")
        self._check("reduction", reduction, reduction in ("mean", "sum", "none"), '"mean", "sum" or "none"')
        self._check("grad_reduction", grad_reduction, grad_reduction in ("sum", "mean"), '"sum" or "mean"')
        self._check("queue_size", queue_size, queue_size >= 0, "0 or more")
        self._check("max_pool_size", max_pool_size, max_pool_size >= 0, "0 or more")
        self._check("seed", seed, 0 <= seed < 1 << 64, "0 to 2^64 - 1")
        self._check("thresholds", thresholds, thresholds in ("auto", "gather", "select"), '"auto", "gather" or "select"')
        self.num_classes, self.reduction, self.ignore_index = num_classes, reduction, ignore_index
        self.group, self.grad_reduction, self.timeout = group, grad_reduction, timeout
        self._options = {"num_classes": num_classes, "temperature": temperature, "reduction": reduction,
                         "ignore_index": ignore_index, "queue_size": queue_size, "update_queue_in_eval": update_queue_in_eval,
                         "max_pool_size": max_pool_size, "seed": seed, "check_queue": check_queue, "thresholds": thresholds, **own}
        self._cpp: _Cpp | None = None  # made in the first forward, which may wait for ranks
        self._state: list[tuple[str, torch.Tensor]] | None = None  # that it begins with
        self._dealt = True

    def _check(self, name: str, found: Any, holds: bool, expected: str) -> None:
        if not holds:
            refuse(type(self).__name__, f"{name}={found!r}", expected, f"Set {name} so")

    @property
    def temperature(self) -> float:
        return float(self._cpp.temperature if self._cpp else self._options["temperature"])

    @temperature.setter
    def temperature(self, value: float) -> None:
        self._check("temperature", value, 1.2e-38 <= value < math.inf, "a number above 1.2e-38")
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
            self._dealt, backend = backend_of(self.group)
            options = {**self._options, "grad_reduction": self.grad_reduction if self._dealt else "sum"}
            self._cpp = _Cpp(type(self)._name(), options, backend, self.timeout)
            if self._state:
                self._cpp.load_state(self._state)
        return self._cpp

    @classmethod
    def _name(cls) -> str:
        return next(base.__name__ for base in cls.__mro__ if base.__module__ == __name__)  # of a user's own subclass too

    def forward(self, scores: torch.Tensor, targets: torch.Tensor, sample_weight: torch.Tensor | None = None,
                iid_mask: torch.Tensor | None = None) -> torch.Tensor:
        agreed(type(self).__name__, self._problem(scores, targets, sample_weight, iid_mask),
               [len(scores) if scores.dim() else 0, self.num_classes, kind_of(scores), int(sample_weight is not None),
                int(iid_mask is not None)], self.group)
        cpp = self._made()
        if self._dealt:
            return cpp.evaluate(scores, targets, sample_weight, iid_mask, self.training)[0]
        pool = pooled(scores, targets, sample_weight, iid_mask, self.ignore_index, self.group)
        rows = pool.scores.requires_grad_(scores.requires_grad and torch.is_grad_enabled())
        value = cpp.evaluate(rows, pool.targets, None if sample_weight is None else pool.weights,
                             None if iid_mask is None else pool.iid, self.training)[0]
        slopes = torch.zeros_like(scores, dtype=rows.dtype)
        if value.requires_grad:
            slopes[pool.kept] = torch.autograd.grad(value.sum(), rows)[0][pool.own]
        if not bool(torch.isfinite(rows).all()):
            slopes.fill_(math.nan)
        if self.grad_reduction == "mean":
            slopes *= pool.ranks
        given: torch.Tensor = Given.apply(scores, value.detach(), slopes)
        return given

    def _problem(self, scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None,
                 iid_mask: torch.Tensor | None) -> str | None:
        def said(found: str, expected: str, action: str) -> str:
            return problem_of(type(self).__name__, found, expected, action)

        if scores.dim() != 2 or scores.size(1) != self.num_classes or kind_of(scores) < 0:
            return said(f"scores of shape {tuple(scores.shape)} in {scores.dtype}", f"[n, {self.num_classes}] floating",
                        "Give a column of scores for each class")
        if targets.shape != scores.shape[:1] or targets.is_floating_point():
            return said(f"targets of shape {tuple(targets.shape)} in {targets.dtype}", f"[{len(scores)}] integers",
                        "Give one target for each row")
        known = target_range(targets, self.ignore_index)
        most = max(self.num_classes - 1, 1)
        if known and not 0 <= known[0] <= known[1] <= most:
            return said(f"targets from {known[0]} to {known[1]}", f"0 to {most}, or {self.ignore_index}",
                        "Change the targets, or set ignore_index")
        if weights is not None and (weights.shape != targets.shape or not bool((torch.isfinite(weights) & (weights >= 0)).all())):
            return said("sample_weight that does not fit", f"[{len(scores)}] finite numbers >= 0", "Give one for each row")
        if iid_mask is not None and (iid_mask.shape != targets.shape or iid_mask.dtype != torch.bool):
            return said(f"iid_mask of shape {tuple(iid_mask.shape)} in {iid_mask.dtype}", f"[{len(scores)}] bool",
                        "Give one for each row")
        return None


class SmoothAPLoss(RankingLoss):
    """1 - AP with sigmoids for ranks (Brown et al. 2020, eq. 6 and 7). A class is invalid without positives or negatives."""


class RecallAtQuantileLoss(RankingLoss):
    """1 - the mean over positives of sigmoid((s - t) / temperature), t the (1 - quantile) quantile of all scores.

    quantile: in (0, 1), the share of all rows above the threshold. A class is invalid without positives.
    """

    def __init__(self, *, quantile: float = 0.005, interpolation: str = "higher", **options: Any) -> None:
        super().__init__(quantile=quantile, interpolation=interpolation, **options)
        self._check("quantile", quantile, 0 < quantile < 1, "a number between 0 and 1")
        self._check("interpolation", interpolation, interpolation in _INTERPOLATIONS, ", ".join(_INTERPOLATIONS))


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
                 temperature: float = 0.1, **options: Any) -> None:
        super().__init__(temperature=temperature, alpha=alpha, beta=beta, surrogate=surrogate, n_knots=n_knots,
                         tau_scale=tau_scale, budget_basis=budget_basis, pos_numerator=pos_numerator,
                         interpolation=interpolation, **options)
        self._check("alpha, beta", (alpha, beta), 0 <= alpha < beta <= 1, "0 <= alpha < beta <= 1")
        self._check("surrogate", surrogate, surrogate in ("trapezoid", "pairwise"), '"trapezoid" or "pairwise"')
        self._check("n_knots", n_knots, n_knots >= 2, "at least 2")
        self._check("tau_scale", tau_scale, tau_scale in ("iqr", "band"), '"iqr" or "band"')
        self._check("budget_basis", budget_basis, budget_basis in ("fpr", "population"), '"fpr" or "population"')
        self._check("pos_numerator", pos_numerator, pos_numerator in ("pool", "live"), '"pool" or "live"')
        self._check("interpolation", interpolation, interpolation in _INTERPOLATIONS, ", ".join(_INTERPOLATIONS))
