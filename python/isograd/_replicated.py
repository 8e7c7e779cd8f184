"""The base of losses over the rows of all ranks: their value is the same on every rank, their gradient each rank's own part."""
from __future__ import annotations

import math
from typing import Any, Callable

import torch
import torch.distributed as dist
from torch import nn

from ._ranks import agreed, device_of, gather_rows, Group, groups_of, refuse, size_of
from ._torch_names import cpu_backend

_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def _one_of(*known: str) -> tuple[Callable[[Any], bool], str]:
    return known.__contains__, ", ".join(f'"{each}"' for each in known)


_NOT_NEGATIVE: tuple[Callable[[Any], bool], str] = (lambda number: number >= 0, "0 or more")
_OPTIONS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "num_classes": (lambda number: number >= 1, "at least 1"),
    "temperature": (lambda number: 1.2e-38 <= number < math.inf, "a number above 1.2e-38"),
    "reduction": _one_of("mean", "sum", "none"), "grad_reduction": _one_of("sum", "mean"),
    "queue_size": _NOT_NEGATIVE, "max_pool_size": _NOT_NEGATIVE,
    "seed": (lambda number: 0 <= number < 1 << 64, "0 to 2^64 - 1"),
    "thresholds": _one_of("auto", "gather", "select"),
    "quantile": (lambda number: 0 < number < 1, "a number between 0 and 1"),
    "interpolation": _one_of("linear", "lower", "higher", "nearest", "midpoint"),
    "surrogate": _one_of("trapezoid", "pairwise"), "n_knots": (lambda number: number >= 2, "at least 2"),
    "tau_scale": _one_of("iqr", "band"), "budget_basis": _one_of("fpr", "population"), "pos_numerator": _one_of("pool", "live"),
    "gamma": (lambda number: 0 <= number < math.inf, "a number >= 0"),
    "label_smoothing": (lambda number: 0 <= number < 1, "from 0 to below 1")}


class ReplicatedLoss(nn.Module):
    """Checks of options and input. ConfigError names the loss."""

    group: Group

    def _check(self, **options: Any) -> None:
        for name, found in options.items():
            holds, expected = _OPTIONS.get(name, (lambda _: True, ""))
            self._expect(holds(found), f"{name}={found!r}", expected, f"Set {name} so")

    def _expect(self, holds: bool, found: str, expected: str, action: str) -> None:
        if not holds:
            refuse(type(self).__name__, found, expected, action)

    def _agree(self, check: Callable[[], None], classes: int, scores: torch.Tensor, *extras: torch.Tensor | None) -> None:
        """ConfigError, on every rank: `check` refuses this rank's input, or ranks give other kinds of it. Collective."""
        def own() -> list[float]:
            check()
            return [classes, _kind_of(scores), *(each is not None for each in extras)]

        if size_of(self.group) == 1:
            return check()
        rows = agreed(type(self).__name__, own, self.group)
        for rank, row in enumerate(rows):
            self._expect(torch.equal(row, rows[0]), f"another number of classes, type, mode, weights or options on rank {rank} "
                         "than on rank 0", "the same on every rank", "Build the loss and its input from the same configuration")


def _kind_of(scores: torch.Tensor) -> int:
    return _TYPES.index(scores.dtype) if scores.dtype in _TYPES else -1


def floating(scores: torch.Tensor) -> bool:
    """Whether a loss takes scores of this type."""
    return scores.dtype in _TYPES


def computed(scores: torch.Tensor) -> torch.Tensor:
    """In fp32 at least."""
    return scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores


def backend_of(group: Group) -> tuple[bool, Any]:
    """Whether a loss in C++ can talk over this group, and the backend; None where there is no other rank."""
    groups = groups_of(group)
    if not groups:
        return True, None
    if len(groups) > 1 or device_of(groups[0]).type != "cpu":
        return False, None
    backend = cpu_backend(groups[0])
    return True, getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it


def pooled(scores: torch.Tensor, kept: torch.Tensor, columns: list[torch.Tensor],
           group: Group) -> tuple[torch.Tensor, list[torch.Tensor], torch.Tensor]:
    """The rows of all ranks where `kept` holds, rank by rank: scores [M, C] in the type that is computed in, columns [M] in fp64, and
    which are this rank's own. Two collectives; rows travel as fp64, which holds all types. scores [n, C], the others [n]."""
    held = computed(scores.detach())
    rank = dist.get_rank() if groups_of(group) else 0
    own = torch.full((int(kept.sum()), 1), rank, dtype=torch.float64, device=held.device)
    rows = torch.cat([held[kept].double(), *(column[kept].double().unsqueeze(1) for column in columns), own], 1)
    rows = gather_rows(rows, group).to(held.device)
    rows = rows[rows[:, -1].argsort(stable=True)]  # rank by rank, in whatever order a mesh's axes brought them
    return rows[:, :held.size(1)].to(held.dtype), list(rows[:, held.size(1):-1].unbind(1)), rows[:, -1] == rank


class Given(torch.autograd.Function):
    """values [C] with the derivative slopes [n, C] of each value by the scores of its column."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor, values: torch.Tensor, slopes: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(slopes)
        ctx.dtype = scores.dtype
        return values.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        slopes, = ctx.saved_tensors
        return (slopes * gradient.to(slopes.dtype)).to(ctx.dtype), None, None
