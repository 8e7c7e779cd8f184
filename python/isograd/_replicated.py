"""Rows and sums of all ranks for losses whose value is the same on every rank and whose gradient is each rank's own part."""
from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from ._errors import ConfigError, refuse
from ._groups import Group, device_of, gather, gather_rows, groups_of

_TYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass
class Pool:
    """The rows of all ranks, rank by rank, without the ignored ones. kept: which own rows are in it, [n] bool."""

    scores: torch.Tensor  # [M, C], of the type that is computed in
    targets: torch.Tensor  # [M]
    weights: torch.Tensor  # [M], fp64
    iid: torch.Tensor  # [M] bool
    own: torch.Tensor  # [M] bool
    kept: torch.Tensor
    ranks: int


def size_of(group: Group) -> int:
    """Ranks of the group or mesh; 1 where there is none."""
    size = 1
    for each in groups_of(group):
        size *= dist.get_world_size(each)
    return size


def agreed(where: str, problem: str | None, header: list[int], group: Group) -> list[list[int]]:
    """`header` of each rank. ConfigError, on every rank: one has a problem, or all but the first number differ. Collective."""
    if size_of(group) == 1 and problem is None:
        return [header]
    said: list[list[int]] = gather(torch.tensor([int(problem is not None), *header]), group).tolist()
    if problem is not None:
        raise ConfigError(problem)
    for rank, (bad, *one) in enumerate(said):
        if bad:
            raise ConfigError(f"{where}: found that rank {rank} refuses its input; expected one that every "
                              "rank can take. Look at that rank's own message.")
        if one[1:] != said[0][2:]:
            refuse(where, f"another number of classes, type, mode, weights or options on rank {rank} than on rank 0",
                   "the same on every rank", "Build the loss and its input from the same configuration")
    return [one[1:] for one in said]


def problem_of(where: str, found: str, expected: str, action: str) -> str:
    """The text that `refuse` raises."""
    try:
        refuse(where, found, expected, action)
    except ConfigError as error:
        return str(error)


def kind_of(scores: torch.Tensor) -> int:
    """Of the type, for a header; -1: none that a loss can take."""
    return _TYPES.index(scores.dtype) if scores.dtype in _TYPES else -1


def computed(scores: torch.Tensor) -> torch.Tensor:
    """In fp32 at least."""
    return scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores


def backend_of(group: Group) -> tuple[bool, Any]:
    """Whether a loss in C++ can talk over this group, and the backend; None where it has nobody to talk to."""
    groups = [each for each in groups_of(group) if dist.get_world_size(each) > 1]
    if not groups:
        return True, None
    if len(groups) > 1 or device_of(groups[0]).type != "cpu":
        return False, None
    backend = groups[0]._get_backend(torch.device("cpu"))
    return True, getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL wraps it


def pooled(scores: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None, iid: torch.Tensor | None,
           ignore_index: int, group: Group) -> Pool:
    """Two collectives of the group; rows travel as fp64, which holds all types. scores [n, C], the others [n]."""
    held = computed(scores.detach())
    kept = targets != ignore_index
    rank = dist.get_rank() if groups_of(group) else 0
    one = torch.ones_like(targets[kept], dtype=torch.float64)
    columns = [held[kept].double(), *(column.unsqueeze(1) for column in (
        targets[kept].double(), one if weights is None else weights[kept].double(), one if iid is None else iid[kept].double(),
        one * rank))]
    rows = gather_rows(torch.cat(columns, 1), group).to(held.device)
    rows = rows[rows[:, -1].argsort(stable=True)]  # rank by rank, in whatever order a mesh's axes brought them
    classes = held.size(1)
    label, weight, flag, owner = rows[:, classes:].unbind(1)
    return Pool(rows[:, :classes].to(held.dtype), label.long(), weight, flag > 0, owner == rank, kept, size_of(group))


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
