"""Losses over the rows of all ranks, and a head without logits, as a user writes them with types."""
from __future__ import annotations

import torch
from torch import nn
from typing_extensions import assert_type

import isograd
from isograd import focal, ranking


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1)
        self.loss: ranking.RankingLoss = ranking.SmoothAPLoss(temperature=0.05, queue_size=16, reduction="mean", seed=3)
        self.others = [ranking.RecallAtQuantileLoss(quantile=0.1, interpolation="linear", temperature=0.1, thresholds="gather"),
                       ranking.PAUCAtBudgetLoss(beta=0.5, surrogate="pairwise", num_classes=1, grad_reduction="sum")]
        self.focal = focal.SigmoidFocalLoss(alpha=-1, gamma=1.5)
        self.by_class = focal.SoftmaxFocalLoss(alpha=[0.5, 1.0], label_smoothing=0.1, reduction="mean_positive")

    def forward(self, rows: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(rows)
        total: torch.Tensor = self.loss(scores, labels, sample_weight=torch.ones(len(rows)))
        for loss in self.others:
            total = total + loss(scores, labels)
        total = total + self.focal(scores, labels.unsqueeze(1).float())
        total = total + self.by_class(torch.cat([-scores, scores], 1), labels)
        return total


def main() -> None:
    torch.manual_seed(0)
    scorer = Scorer()
    torch.autograd.backward(scorer(torch.randn(12, 4), torch.arange(12) % 2))
    scorer.loss.temperature = 0.01
    scorer.loss.reset_queue()
    print(scorer.loss.queue_rows, scorer.loss.temperature)

    head, hidden, targets = nn.Linear(4, 20), torch.randn(2, 6, 4), torch.arange(12).view(2, 6)
    loss = isograd.linear_cross_entropy(hidden, head.weight, targets, bias=head.bias, weights=torch.ones(2, 6), ignore_index=-100,
                                        label_smoothing=0.1, z_loss=1e-4)
    assert_type(loss, isograd.LinearCrossEntropy)
    torch.autograd.backward(isograd.TokenMean().count([targets]).scale(loss.sum))
    print(float(loss.cross_entropy + loss.z_loss), loss.log_probabilities.shape)


if __name__ == "__main__":
    main()
