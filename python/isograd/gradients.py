"""Gradients as sums over ranks (DDP and FSDP2 without their average, or a loop of your own), their whole norm, and clipping by it."""
# No `from __future__ import annotations`: DDP reads the annotations of a communication hook.
import math
import zlib
from typing import Any, Callable, Sequence, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.nn.parallel import DistributedDataParallel

from ._ranks import all_sum, device_of, gather, gradient_of, Group, groups_of, listed, local, parts_of, Parameters, refuse
from ._torch_names import has_comm_hook

Wrapped = TypeVar("Wrapped", bound=nn.Module)
# Called with (parameters, max_norm, norm, scale) before gradients are multiplied: isograd.watch listens.
observers: list[Callable[[list[torch.Tensor], float, torch.Tensor, float], None]] = []


def sum_gradients(model: Wrapped) -> Wrapped:
    """Makes DDP and FSDP2 sum gradients over their ranks instead of averaging them; returns `model`.

    Call it once, after wrapping and before the first backward. ConfigError: nothing in `model` reduces gradients, or
    DDP has a communication hook already, which may average.
    """
    found = False
    for module in model.modules() if isinstance(model, nn.Module) else ():
        if isinstance(module, DistributedDataParallel):
            if has_comm_hook(module):
                refuse("isograd.sum_gradients", "DDP with a communication hook", "DDP as it was made",
                       "A model has one hook: call sum_gradients in its place, or let it sum")
            module.register_comm_hook(module.process_group, _summing)
            found = True
        elif hasattr(module, "set_gradient_divide_factor"):  # FSDP2
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else NCCL's scaled sum, which no other backend has
            found = True
    if not found:
        refuse("isograd.sum_gradients", f"a {type(model).__name__} without DDP or FSDP2", "a wrapped model",
               "Give it what DistributedDataParallel or fully_shard made; for a plain model take all_reduce_gradients "
               "after backward")
    return model


def _summing(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(lambda f: f.value()[0])


def all_reduce_gradients(parameters: Parameters, group: Group = None) -> None:
    """Sums the gradients of a plain model over the ranks of `group`, in place; after the last backward of a step.

    A parameter that got no gradient here takes part with zeros: another rank may have one. A tied one is summed once;
    of a DTensor its part, over ranks that hold the same part. A sparse one (nn.Embedding(sparse=True)) is sparse again
    afterwards, and takes a dense copy meanwhile. Collective: the same parameters in the same order on every rank.
    """
    for parameter in listed(parameters):
        if not parameter.requires_grad:
            continue
        sparse = parameter.grad is not None and parameter.grad.is_sparse
        parameter.grad = gradient_of(parameter)  # ranks have other rows: the sum is made of whole tensors
        for each in groups_of(group):
            dist.all_reduce(local(parameter.grad), group=each)
        if sparse:
            parameter.grad = parameter.grad.to_sparse(1)


def all_gather_rows(rows: torch.Tensor, group: Group = None) -> torch.Tensor:
    """The rows of all ranks of `group` in their order there, with their gradient: for a loss that compares samples of all ranks.

    rows: [n, ...] of each rank, each with its own n, 0 included -> [sum of n, ...], on the device of `rows`. Ranks along the last axis of
    a mesh are neighbours.

    Backward gives each rank the sum over the ranks of their gradients of its rows. The whole loss, differentiated on every
    rank and averaged by DDP, then has the gradient of one process. Collective, in forward and in backward: all ranks
    differentiate what they gather, once: a second derivative is a RuntimeError. ConfigError, on every rank: a tensor without
    dimensions, or other dimensions behind the first.
    """
    if not isinstance(rows, torch.Tensor):
        refuse("isograd.all_gather_rows", f"a {type(rows).__name__}", "a tensor of rows [n, ...]", "Give torch.stack(features) of a list")
    for each in reversed(groups_of(group)):  # the last axis first: its ranks are neighbours
        rows = _GatheredRows.apply(rows, each)
    return rows


class _GatheredRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        shape = list(rows.shape)
        kind = zlib.crc32(f"{shape[1:]} {rows.dtype}".encode())
        described = gather(torch.tensor([shape[0] if shape else -1, kind]), group)
        counts = described[:, 0].tolist()
        others = [rank for rank, one in enumerate(described) if one[1] != described[0, 1]]
        if min(counts) < 0 or others:
            refuse("isograd.all_gather_rows", f"a tensor {shape} of {rows.dtype}" + (
                       f", where rank {others[0]} has rows of another kind than rank 0" if others else ""),
                   "rows [n, ...] on every rank, alike in all but n", "Give each sample's features a row: features.reshape(n, -1)")
        rank = dist.get_rank(group)
        ctx.group, ctx.begin, ctx.end = group, sum(counts[:rank]), sum(counts[:rank + 1])
        padding = rows.new_zeros(max(counts) - len(rows), *shape[1:])
        parts = parts_of(torch.cat([rows, padding]), group)
        return torch.cat([part[:count] for part, count in zip(parts, counts)]).to(rows.device)

    @staticmethod
    @once_differentiable  # the exchange in it passes no gradient on
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        gradient, = gradients
        total = gradient.to(device_of(ctx.group), copy=True).contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[ctx.begin:ctx.end].to(gradient.device), None


def clip_grad_norm_(parameters: Parameters, max_norm: float, *, experts: Sequence[tuple[Parameters, Group]] = (),
                    stages: Group = None, counted_elsewhere: Parameters = (), scale: float = 1.0,
                    error_if_nonfinite: bool = False) -> torch.Tensor:
    """Scales gradients so that the norm of the whole gradient is at most `max_norm`. Returns that norm before, [] fp64.

    parameters:        all that this rank holds: plain tensors, DTensors of any mesh (tensor parallelism, FSDP2, both).
    max_norm:          of the gradient times `scale`; infinity only measures.
    experts:           (parameters, group) of plain parameters that differ on each rank of `group`, counted over it. They are among
                       `parameters` too.
    stages:            group over which all of `parameters` differ: a pipeline's ranks.
    counted_elsewhere: parameters of which another rank of `stages` counts the same elements: a tied embedding's copy.
    scale:             multiplied in too, in the same pass: gradient_scale of a deferred step.

    Squares are summed in fp64: along the axes of a DTensor's mesh that cut it, and not along those that copy it; plain
    tensors are whole on each rank. Gradients are reduced already. Collective, in the same order on all ranks. The
    coefficient is PyTorch's, max_norm / (norm + 1e-6) and at most 1; by a norm that is not finite nothing is clipped. A
    parameter without a gradient takes part with zeros; a sparse gradient stays sparse. ConfigError: a limit below zero; a
    DTensor's gradient is a part that is not summed yet. RuntimeError: the norm is not finite and `error_if_nonfinite`.
    """
    if isinstance(max_norm, str) or not max_norm >= 0:
        refuse("isograd.clip_grad_norm_", f"max_norm={max_norm!r}", "a limit of zero or more",
               "Give infinity where the norm is only measured")
    expert_groups = [(listed(some), dist.group.WORLD if group is None else group) for some, group in experts]
    own_group: dict[int, Group] = {id(p): group for some, group in expert_groups for p in some}
    trained = [p for p in listed(parameters) if p.requires_grad or p.grad is not None]
    skipped = {id(p) for p in listed(counted_elsewhere)}
    # Local gradients by the group over which their elements are sharded; None: all of them are here. The groups of experts
    # first, on every rank in one order: one whose experts were all idle takes part.
    sharded: dict[object, tuple[Group, list[torch.Tensor]]] = {("group", id(group)): (group, []) for _, group in expert_groups}
    for parameter in (p for p in trained if id(p) not in skipped):
        gradient = parameter.grad
        key, group = _sharded_over(parameter if gradient is None else gradient, own_group.get(id(parameter)))
        some = sharded.setdefault(key, (group, []))[1]
        if gradient is not None:
            some.append(local(gradient))
    total = torch.zeros((), dtype=torch.float64)
    for group, gradients in sharded.values():
        squares = _sum_of_squares(gradients)
        total = total + (all_sum(squares, group) if group is not None else squares)
    if stages is not None:
        total = all_sum(total, stages)
    norm = total.sqrt() * abs(scale)
    if error_if_nonfinite and not bool(torch.isfinite(norm)):
        raise RuntimeError(f"isograd.clip_grad_norm_: found that the norm of the gradient is {float(norm)}; expected a finite one. "
                           "Look at this step's loss, or leave out error_if_nonfinite.")
    limited = bool(torch.isfinite(norm)) and max_norm != math.inf
    factor = scale * (min(1.0, max_norm / (float(norm) + 1e-6)) if limited else 1.0)
    for tell in observers:
        tell(trained, max_norm, norm, scale)
    if factor != 1.0:
        for parameter in trained:
            if parameter.grad is not None:
                local(parameter.grad).mul_(factor)
    return norm


def _sum_of_squares(gradients: list[torch.Tensor]) -> torch.Tensor:
    """[] fp64 on the CPU; a device is waited for once."""
    by_device: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        if gradient.is_sparse:  # of an embedding: rows that come twice are added up first
            gradient = gradient.coalesce().values()
        by_device.setdefault(gradient.device, []).append(torch.linalg.vector_norm(gradient, dtype=torch.float64).square())
    sums = [torch.stack(some).sum().cpu() for some in by_device.values()]
    return torch.stack([torch.zeros((), dtype=torch.float64), *sums]).sum()


def _sharded_over(gradient: torch.Tensor, expert: Group) -> tuple[object, Group]:
    if not isinstance(gradient, DTensor):
        return ("group", id(expert)), expert
    if expert is not None:
        refuse("isograd.clip_grad_norm_", "experts that are DTensors", "plain tensors in `experts`",
               "Leave them out of it: a DTensor's mesh says where its elements are")
    mesh, axes = gradient.device_mesh, []
    for axis, placement in enumerate(gradient.placements):
        if isinstance(placement, Partial):
            refuse("isograd.clip_grad_norm_", f"a gradient that is {placement} along axis {axis} of its mesh",
                   "gradients that are summed", "Redistribute it to its parameter's placements before clipping")
        if not isinstance(placement, Replicate):
            axes.append(axis)
    if not axes:
        return ("here",), None
    names = mesh.mesh_dim_names
    if names is None:
        if mesh.ndim != len(axes):
            refuse("isograd.clip_grad_norm_", "a mesh without names of its axes", "names, to take a part of the axes",
                   "Give mesh_dim_names to init_device_mesh")
        return (mesh, tuple(axes)), mesh
    return (mesh, tuple(axes)), mesh[tuple(names[axis] for axis in axes)] if len(axes) < mesh.ndim else mesh
