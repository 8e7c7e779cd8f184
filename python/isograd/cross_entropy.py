"""isograd.linear_cross_entropy: a head's matrix product and its cross entropy in one, without the logits."""
from __future__ import annotations

import dataclasses

import torch

from ._errors import refuse
from ._native.isograd_comm import linear_cross_entropy as _fused

IGNORED = -100  # what the extension leaves out


@dataclasses.dataclass(frozen=True)
class LinearCrossEntropy:
    """Of the tokens with a target and a weight above 0.

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

    What it is divided by is its user's affair: TokenMean().scale(loss.sum). Gradients are made in the forward and
    multiplied by a scalar in backward; that of weight is added up in fp32 (fp64 in fp64). First derivatives only.

    ConfigError: targets outside the vocabulary, weights that are negative or not finite, shapes or types that do not fit;
    a backward with create_graph is a RuntimeError.
    """
    if ignore_index != IGNORED and bool((targets == IGNORED).any()):
        refuse("isograd.linear_cross_entropy", f"targets of {IGNORED} beside ignore_index={ignore_index}",
               "targets in [0, V), or ignore_index", f"Give the ignored tokens {ignore_index} alone")
    wanted = targets if ignore_index == IGNORED else targets.masked_fill(targets == ignore_index, IGNORED)
    if hidden.dim() > 2 and hidden.shape[:-1] == targets.shape:
        hidden, wanted = hidden.flatten(0, -2), wanted.flatten()
        weights = weights.flatten() if weights is not None and weights.shape == targets.shape else weights
    found = _fused(hidden, weight, wanted, weights, bias, label_smoothing, z_loss)
    return LinearCrossEntropy(*found[:3], found[3].view(targets.shape))
