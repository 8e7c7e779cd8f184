"""Ranking losses over the rows of all ranks, for PyTorch; docs/ranking.md has the formulas and why no rank ranks alone."""
from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from ._errors import refuse
from ._groups import Group, all_sum
from ._replicated import Given, Pool, agreed, computed, kind_of, pooled, problem_of

_PAIRS = 1 << 22  # of a tile
_SMALLEST_SCALE = 1e-12  # a dispersion up to here calibrates no temperature
_INTERPOLATIONS = ("linear", "lower", "higher", "nearest", "midpoint")


class RankingLoss(nn.Module):
    """What the ranking losses share.

    num_classes:    1: targets 0 and 1; more: targets 0 to C - 1, each class against the rest.
    temperature:    in units of the scores; of PAUC of its own scale.
    reduction:      over the classes that are valid on the rows of all ranks: "mean" or "sum", 0 if there is none; "none":
                    [C], NaN where a class is invalid, 0 where no rank has a row.
    ignore_index:   rows with this target take part in nothing.
    group:          process group or mesh of the ranks whose rows are ranked together; None: all ranks.
    grad_reduction: what the trainer does with parameter gradients of ranks: "sum", as `isograd.sum_gradients` makes DDP and
                    FSDP2 do; "mean": the gradient, not the value, is multiplied by the number of ranks.

    forward(scores, targets, sample_weight=None): [n, C] floating, [n] integer, [n] finite and >= 0 of the positives; n is
    the rank's own and may be 0. The value is the whole loss, the same on every rank; each rank's scores get their own
    derivative of it. Collective; backward is not. Scores that are not finite make value and gradient NaN on every rank.
    No second derivatives. ConfigError, on every rank: what one of them is given does not fit.
    """

    def __init__(self, *, num_classes: int = 1, temperature: float = 0.01, reduction: str = "mean", ignore_index: int = -100,
                 group: Group = None, grad_reduction: str = "sum") -> None:
        super().__init__()
        self._check("num_classes", num_classes, num_classes >= 1, "at least 1")
        self._check("temperature", temperature, 1.2e-38 <= temperature < math.inf, "a number above 1.2e-38")
        self._check("reduction", reduction, reduction in ("mean", "sum", "none"), '"mean", "sum" or "none"')
        self._check("grad_reduction", grad_reduction, grad_reduction in ("sum", "mean"), '"sum" or "mean"')
        self.num_classes, self.temperature, self.reduction = num_classes, temperature, reduction
        self.ignore_index, self.group, self.grad_reduction = ignore_index, group, grad_reduction

    def _check(self, name: str, found: Any, holds: bool, expected: str) -> None:
        if not holds:
            refuse(type(self).__name__, f"{name}={found!r}", expected, f"Set {name} so")

    def forward(self, scores: torch.Tensor, targets: torch.Tensor, sample_weight: torch.Tensor | None = None) -> torch.Tensor:
        name = type(self).__name__
        agreed(name, self._problem(scores, targets, sample_weight),
               [len(scores) if scores.dim() else 0, self.num_classes, kind_of(scores), int(sample_weight is not None)],
               self.group)
        pool = pooled(scores, targets, sample_weight, self.ignore_index, self.group)
        values, slopes, valid = [], computed(scores.detach()).new_zeros(scores.shape), []
        finite = bool(torch.isfinite(pool.scores).all())
        for c in range(self.num_classes):
            positive = pool.targets == (1 if self.num_classes == 1 else c)
            value, slope = self._of_class(pool, pool.scores[:, c], positive) if finite else (math.nan, None)
            valid.append(value is not None)
            values.append(math.nan if value is None else value)
            if slope is not None:
                slopes[pool.kept, c] = slope.to(slopes.dtype)
        if not finite:
            slopes.fill_(math.nan)
        if self.grad_reduction == "mean":
            slopes *= pool.ranks
        given = slopes.new_tensor(values)
        if self.reduction == "none":
            return Given.apply(scores, given if len(pool.scores) else torch.zeros_like(given), slopes)
        mask = torch.tensor(valid, device=given.device)
        total = Given.apply(scores, torch.where(mask, given, 0), slopes).sum()
        return total / max(sum(valid), 1) if self.reduction == "mean" else total

    def _problem(self, scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> str | None:
        def said(found: str, expected: str, action: str) -> str:
            return problem_of(type(self).__name__, found, expected, action)

        if scores.dim() != 2 or scores.size(1) != self.num_classes or kind_of(scores) < 0:
            return said(f"scores of shape {tuple(scores.shape)} in {scores.dtype}", f"[n, {self.num_classes}] floating",
                        "Give a column of scores for each class")
        if targets.shape != scores.shape[:1] or targets.is_floating_point():
            return said(f"targets of shape {tuple(targets.shape)} in {targets.dtype}", f"[{len(scores)}] integers",
                        "Give one target for each row")
        known = targets[targets != self.ignore_index]
        most = max(self.num_classes - 1, 1)
        if known.numel() and not 0 <= int(known.min()) <= int(known.max()) <= most:
            return said(f"targets from {int(known.min())} to {int(known.max())}", f"0 to {most}, or {self.ignore_index}",
                        "Mend the targets, or set ignore_index")
        if weights is not None and (weights.shape != targets.shape or not bool((torch.isfinite(weights) & (weights >= 0)).all())):
            return said("sample_weight that does not fit", f"[{len(scores)}] finite numbers >= 0", "Give one for each row")
        return None

    def _of_class(self, pool: Pool, scores: torch.Tensor, positive: torch.Tensor) -> tuple[float | None, torch.Tensor | None]:
        """The value of a class, None where it is invalid, and its derivative by this rank's rows of the pool."""
        raise NotImplementedError


class SmoothAPLoss(RankingLoss):
    """1 - AP with sigmoids for ranks (Brown et al. 2020, eq. 6 and 7). A class is invalid without positives or negatives.

    Pairs of positives and rows are dealt out over the ranks; two numbers a positive are summed over them. Tiles of 4 M
    pairs at a time.
    """

    def _of_class(self, pool: Pool, scores: torch.Tensor, positive: torch.Tensor) -> tuple[float | None, torch.Tensor | None]:
        anchors, weights = scores[positive], pool.weights[positive]
        whole = float(weights.sum())
        if anchors.numel() == 0 or anchors.numel() == len(scores) or whole == 0:
            return None, None
        negatives = scores[~positive]
        mine = pool.own[positive]  # each rank has its own positives for anchors
        sums = torch.zeros(2, len(anchors), dtype=torch.float64, device=scores.device)
        slopes = torch.zeros_like(sums)  # of its own anchors: sums of d over positives and negatives
        for side, rows in enumerate((anchors, negatives)):
            found = [self._ranks(part, rows) for part in anchors[mine].split(max(1, _PAIRS // len(rows)))]
            if found:
                sums[side, mine], slopes[side, mine] = (torch.cat(one) for one in zip(*found))
        sums = all_sum(sums, self.group)
        p = 0.5 + sums[0]  # 1 + the others: the anchor itself gave sigmoid(0) = 0.5
        a = p + sums[1]
        share = weights / whole
        to_positive, to_negative = share * sums[1] / a.square(), -share * p / a.square()
        own = scores[pool.own]
        is_positive = positive[pool.own]
        slope = torch.zeros(len(own), dtype=torch.float64, device=scores.device)
        for chosen, factor in ((is_positive, to_positive), (~is_positive, to_negative)):
            parts = [self._slopes(part.unsqueeze(1) - anchors) @ factor
                     for part in own[chosen].split(max(1, _PAIRS // len(anchors)))]
            if parts:
                slope[chosen] = torch.cat(parts)
        slope[is_positive] -= to_positive[mine] * slopes[0, mine] + to_negative[mine] * slopes[1, mine]
        return float(1 - (share * p / a).sum()), -slope

    def _slopes(self, distances: torch.Tensor) -> torch.Tensor:
        sigma = torch.sigmoid(distances / self.temperature)
        return (sigma * (1 - sigma)).double() / self.temperature

    def _ranks(self, anchors: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[anchors]: sums of sigmoids over the rows, and of their slopes."""
        sigma = torch.sigmoid((rows - anchors.unsqueeze(1)) / self.temperature)
        return sigma.sum(1, dtype=torch.float64), (sigma * (1 - sigma)).sum(1, dtype=torch.float64) / self.temperature


class _Rates(RankingLoss):
    """Soft shares of positives above thresholds that are quantiles of the rows, and are not differentiated."""

    interpolation: str

    def _quantiles(self, values: torch.Tensor, shares: list[float] | torch.Tensor) -> torch.Tensor:
        if len(values) > 1 << 24:
            refuse(type(self).__name__, f"{len(values):,} rows of all ranks", "at most 2^24, as torch.quantile takes them",
                   "Take fewer rows a step, or the C++ loss")
        q = shares if isinstance(shares, torch.Tensor) else torch.tensor(shares, dtype=values.dtype)
        return torch.quantile(values, q.to(values), interpolation=self.interpolation)

    def _above(self, pool: Pool, scores: torch.Tensor, positive: torch.Tensor, thresholds: torch.Tensor,
               shares: torch.Tensor, temperature: float) -> tuple[float | None, torch.Tensor | None]:
        whole = float(pool.weights[positive].sum())
        z = (scores[positive].double().unsqueeze(1) - thresholds.double()) / temperature  # [P, thresholds]
        sigma = torch.sigmoid(z)
        value = float((pool.weights[positive] * (sigma @ shares)).sum() / whole)
        slope = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
        slope[positive] = -pool.weights[positive] * ((sigma * torch.sigmoid(-z)) @ shares) / temperature / whole
        return 1 - value, slope[pool.own]


class RecallAtQuantileLoss(_Rates):
    """1 - the mean over positives of sigmoid((s - t) / temperature), t the (1 - quantile) quantile of all scores.

    quantile: in (0, 1), the share of all rows above the threshold. A class is invalid without positives.
    """

    def __init__(self, *, quantile: float = 0.005, interpolation: str = "higher", **options: Any) -> None:
        super().__init__(**options)
        self._check("quantile", quantile, 0 < quantile < 1, "a number between 0 and 1")
        self._check("interpolation", interpolation, interpolation in _INTERPOLATIONS, ", ".join(_INTERPOLATIONS))
        self.quantile, self.interpolation = quantile, interpolation

    def _of_class(self, pool: Pool, scores: torch.Tensor, positive: torch.Tensor) -> tuple[float | None, torch.Tensor | None]:
        if float(pool.weights[positive].sum()) == 0:
            return None, None
        return self._above(pool, scores, positive, self._quantiles(scores, [1 - self.quantile]),
                           torch.ones(1, dtype=torch.float64, device=scores.device), self.temperature)


class PAUCAtBudgetLoss(_Rates):
    """1 - the partial AUC over the band [alpha, beta] of false-positive rates.

    surrogate:    "trapezoid": over n_knots thresholds, quantiles of the reference scores; "pairwise": positives against
                  negatives in the band.
    tau_scale:    the temperature is multiplied by the reference's interquartile range ("iqr") or by the band's width
                  ("band"); a class without dispersion is invalid, as is one without positives or negatives.
    budget_basis: reference scores: negatives ("fpr") or all rows ("population").
    """

    def __init__(self, *, alpha: float = 0.0, beta: float = 0.005, surrogate: str = "trapezoid", n_knots: int = 2,
                 tau_scale: str = "iqr", budget_basis: str = "fpr", interpolation: str = "higher", temperature: float = 0.1,
                 **options: Any) -> None:
        super().__init__(temperature=temperature, **options)
        self._check("alpha, beta", (alpha, beta), 0 <= alpha < beta <= 1, "0 <= alpha < beta <= 1")
        self._check("surrogate", surrogate, surrogate in ("trapezoid", "pairwise"), '"trapezoid" or "pairwise"')
        self._check("n_knots", n_knots, n_knots >= 2, "at least 2")
        self._check("tau_scale", tau_scale, tau_scale in ("iqr", "band"), '"iqr" or "band"')
        self._check("budget_basis", budget_basis, budget_basis in ("fpr", "population"), '"fpr" or "population"')
        self._check("interpolation", interpolation, interpolation in _INTERPOLATIONS, ", ".join(_INTERPOLATIONS))
        self.alpha, self.beta, self.surrogate, self.n_knots = alpha, beta, surrogate, n_knots
        self.tau_scale, self.budget_basis, self.interpolation = tau_scale, budget_basis, interpolation

    def _of_class(self, pool: Pool, scores: torch.Tensor, positive: torch.Tensor) -> tuple[float | None, torch.Tensor | None]:
        if float(pool.weights[positive].sum()) == 0 or bool(positive.all()):
            return None, None
        reference = scores if self.budget_basis == "population" else scores[~positive]
        t_alpha, t_beta, upper, lower = self._quantiles(reference, [1 - self.alpha, 1 - self.beta, 0.75, 0.25])
        scale = t_alpha - t_beta if self.tau_scale == "band" else upper - lower
        if float(scale) <= _SMALLEST_SCALE:
            return None, None
        temperature = float(self.temperature * scale)
        self._check("temperature", self.temperature, temperature >= 1.2e-38, "a product with the scale above 1.2e-38")
        if self.surrogate == "pairwise":
            return self._pairs(pool, scores, positive, ~positive & (scores >= t_beta) & (scores <= t_alpha), temperature)
        knots = torch.linspace(self.alpha, self.beta, self.n_knots, dtype=scores.dtype, device=scores.device)
        shares = torch.full((self.n_knots,), 1 / (self.n_knots - 1), dtype=torch.float64, device=scores.device)
        shares[0] = shares[-1] = 0.5 / (self.n_knots - 1)
        return self._above(pool, scores, positive, self._quantiles(reference, 1 - knots), shares, temperature)

    def _pairs(self, pool: Pool, scores: torch.Tensor, positive: torch.Tensor, band: torch.Tensor,
               temperature: float) -> tuple[float | None, torch.Tensor | None]:
        if not bool(band.any()):
            return None, None
        weights = pool.weights[positive] / pool.weights[positive].sum() / int(band.sum())
        negatives, value = scores[band], 0.0
        of_band = torch.zeros(len(negatives), dtype=torch.float64, device=scores.device)
        of_positives = []
        for anchors, share in zip(scores[positive].split(tile := max(1, _PAIRS // len(negatives))), weights.split(tile)):
            sigma = torch.sigmoid((anchors.unsqueeze(1) - negatives) / temperature)
            slopes = (sigma * (1 - sigma)).double() / temperature
            value += float(sigma.sum(1, dtype=torch.float64) @ share)
            of_positives.append(-share * slopes.sum(1))
            of_band += share @ slopes
        slope = torch.zeros(len(scores), dtype=torch.float64, device=scores.device)
        slope[positive], slope[band] = torch.cat(of_positives), of_band
        return 1 - value, slope[pool.own]
