"""Focal losses over the elements of all ranks, for PyTorch; docs/ranking.md has the formulas."""
from __future__ import annotations

import math
from typing import Sequence

import torch
import torch.nn.functional as F

from ._ranks import all_sum, Group, size_of
from ._native.isograd_comm import target_range
from ._replicated import ReplicatedLoss, computed, floating


class _Focal(ReplicatedLoss):
    def __init__(self, gamma: float, reduction: str, group: Group, grad_reduction: str) -> None:
        super().__init__()
        self._check(gamma=gamma, grad_reduction=grad_reduction)
        self.gamma, self.reduction, self.group, self.grad_reduction = gamma, reduction, group, grad_reduction

    def _whole(self, losses: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
        """losses: of this rank's elements, weighted; mass: what of them the mean is over. The whole loss, own gradient."""
        own = losses.sum(dtype=torch.float64)
        total, over = all_sum(torch.stack([own.detach(), mass.double()]), self.group)
        divisor = 1.0 if self.reduction == "sum" else max(float(over), 0.0) or math.inf  # over nothing: 0
        factor = size_of(self.group) if self.grad_reduction == "mean" else 1
        whole = total / divisor + factor * (own - own.detach()) / divisor
        return whole.to(losses.dtype)

    def _elements(self, losses: torch.Tensor) -> torch.Tensor:
        """This rank's own, with the gradient that its trainer's reduction asks for."""
        if self.grad_reduction == "sum":
            return losses
        return losses.detach() + size_of(self.group) * (losses - losses.detach())


class SigmoidFocalLoss(_Focal):
    """alpha_t (1 - p_t)^gamma * binary cross entropy (Lin et al. 2017, eq. 5).

    alpha:     in [0, 1], or -1: no class weight. gamma: >= 0.
    reduction: "mean" over the elements, or their weights, of all ranks (of none: 0), "sum" or "none": this rank's elements.
    group, grad_reduction: as `isograd.ranking` has them.

    forward(scores, targets, sample_weight=None): any shape; targets of that shape in [0, 1]; weights whose first dimension
    is the scores', the others broadcast. Value, gradient, collectives and errors are as of the ranking losses.
    """

    def __init__(self, *, alpha: float = 0.25, gamma: float = 2.0, reduction: str = "mean", group: Group = None,
                 grad_reduction: str = "sum") -> None:
        super().__init__(gamma, reduction, group, grad_reduction)
        self._check(reduction=reduction)
        self._expect(0 <= alpha <= 1 or alpha == -1, f"alpha={alpha!r}", "from 0 to 1, or -1 for none", "Set alpha so")
        self.alpha = alpha

    def forward(self, scores: torch.Tensor, targets: torch.Tensor, sample_weight: torch.Tensor | None = None) -> torch.Tensor:
        self._agree(lambda: self._check_input(scores, targets, sample_weight), 1, scores, sample_weight)
        x, y = computed(scores), targets.to(computed(scores).dtype)
        entropy = F.binary_cross_entropy_with_logits(x, y, reduction="none")
        if self.gamma > 0:  # 1 - p_t by its logarithm: no cancellation, and a slope where it is 0
            wrong = torch.logaddexp(F.logsigmoid(x) + torch.log(1 - y), F.logsigmoid(-x) + torch.log(y))
            entropy = entropy * torch.exp(self.gamma * wrong)
        losses = entropy if self.alpha < 0 else entropy * (self.alpha * y + (1 - self.alpha) * (1 - y))
        mass = torch.tensor(float(losses.numel()), device=x.device)
        if sample_weight is not None:
            weights = sample_weight.reshape(*sample_weight.shape, *[1] * (x.dim() - sample_weight.dim())).to(x).expand_as(x)
            losses, mass = losses * weights, weights.sum(dtype=torch.float64)
        return self._elements(losses) if self.reduction == "none" else self._whole(losses, mass)

    def _check_input(self, scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> None:
        self._expect(floating(scores) and targets.shape == scores.shape,
                     f"scores {tuple(scores.shape)} in {scores.dtype} and targets {tuple(targets.shape)}",
                     "floating scores, and as many targets", "Give one target for each score")
        self._expect(bool(((targets >= 0) & (targets <= 1)).all()), "targets outside [0, 1]", "0, 1 or between", "Change the targets")
        if weights is not None:
            self._expect(scores.dim() > 0 and weights.shape[:1] == scores.shape[:1] and weights.dim() <= scores.dim(),
                         f"sample_weight of shape {tuple(weights.shape)}", f"first dimension {tuple(scores.shape[:1])}",
                         "Give one for each row")


class SoftmaxFocalLoss(_Focal):
    """alpha_y (1 - p_y)^gamma * cross entropy.

    alpha:            a weight for each class, or None. gamma: >= 0. label_smoothing: in [0, 1), of the entropy alone.
    reduction:        "mean" over the valid elements, "mean_positive": by the number of those that are not background_class;
                      weighted, by the weights of these. "sum"; "none": this rank's elements, 0 where ignored.
    group, grad_reduction: as `isograd.ranking` has them.

    forward(scores, targets, sample_weight=None): [n, C] or [n, C, ...]; targets and weights [n] or [n, ...].
    """

    def __init__(self, *, alpha: Sequence[float] | None = None, gamma: float = 2.0, reduction: str = "mean",
                 label_smoothing: float = 0.0, ignore_index: int = -100, background_class: int = 0, group: Group = None,
                 grad_reduction: str = "sum") -> None:
        super().__init__(gamma, reduction, group, grad_reduction)
        self._check(label_smoothing=label_smoothing)
        self._expect(reduction in ("mean", "sum", "none", "mean_positive"), f"reduction={reduction!r}",
                     '"mean", "sum", "none" or "mean_positive"', "Set reduction so")
        self._expect(all(0 <= a < math.inf for a in alpha or ()), f"alpha={alpha!r}", "finite weights >= 0", "Set alpha so")
        self.alpha = None if alpha is None else tuple(alpha)
        self.label_smoothing, self.ignore_index, self.background_class = label_smoothing, ignore_index, background_class

    def forward(self, scores: torch.Tensor, targets: torch.Tensor, sample_weight: torch.Tensor | None = None) -> torch.Tensor:
        self._agree(lambda: self._check_input(scores, targets, sample_weight), scores.size(1) if scores.dim() > 1 else 0, scores,
                    sample_weight)
        x = computed(scores).movedim(1, -1)  # [n, ..., C]
        valid = targets != self.ignore_index
        x, y = x[valid], targets[valid]
        logarithms = F.log_softmax(x, -1)
        entropy = -(1 - self.label_smoothing) * logarithms.gather(1, y.unsqueeze(1)).squeeze(1)
        if self.label_smoothing > 0:
            entropy = entropy - self.label_smoothing * logarithms.mean(1)
        if self.gamma > 0 and x.size(1) == 1:
            entropy = entropy * 0  # 1 - p is 0
        elif self.gamma > 0:  # 1 - p_y is the others' share: by its logarithm, without cancellation
            others = x.scatter(1, y.unsqueeze(1), -math.inf)
            entropy = entropy * torch.exp(self.gamma * (others.logsumexp(1) - x.logsumexp(1)))
        if self.alpha is not None:
            entropy = entropy * x.new_tensor(self.alpha)[y]
        weights = torch.ones_like(entropy) if sample_weight is None else sample_weight.to(x)[valid]
        losses = entropy * weights
        if self.reduction == "none":
            return self._elements(torch.zeros(targets.shape, dtype=x.dtype, device=x.device).masked_scatter(valid, losses))
        counted = weights[y != self.background_class] if self.reduction == "mean_positive" else weights
        return self._whole(losses, counted.sum(dtype=torch.float64))

    def _check_input(self, scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None) -> None:
        self._expect(floating(scores) and scores.dim() > 1 and targets.shape == scores[:, 0].shape
                     and not targets.is_floating_point(),
                     f"scores {tuple(scores.shape)} in {scores.dtype} and targets {tuple(targets.shape)}",
                     "[n, C, ...] floating and [n, ...] integers", "Give one target for each row of scores")
        classes = scores.size(1)
        low, high = target_range(targets, self.ignore_index) or (0, 0)
        self._expect(0 <= low <= high < max(classes, 1), f"targets from {low} to {high}", f"0 to {classes - 1}",
                     "Change the targets, or set ignore_index")
        self._expect(self.alpha is None or len(self.alpha) == classes, f"{len(self.alpha or ())} weights in alpha", f"{classes}",
                     "Give one for each class")
        self._expect(weights is None or weights.shape == targets.shape,
                     f"sample_weight of shape {tuple(weights.shape)}" if weights is not None else "", f"{tuple(targets.shape)}",
                     "Give one for each")
