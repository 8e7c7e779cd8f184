"""Small exchanges between the ranks of a process group or of a device mesh, for counts and sums of a few numbers."""
from __future__ import annotations

import io
from typing import Any, Iterable, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

Buffer = Union[bytearray, memoryview]
Group = Union[ProcessGroup, DeviceMesh, None]
Parameters = Union[nn.Module, Iterable[torch.Tensor]]


def listed(parameters: Parameters) -> list[torch.Tensor]:
    """Of a module, a list or one tensor; a tied parameter once."""
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    found = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    return list({id(p): p for p in found}.values())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank has of it."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def groups_of(group: Group) -> list[ProcessGroup]:
    """Groups to go through one after the other: of a mesh one for each axis. None: the world, if there is one."""
    if isinstance(group, DeviceMesh):
        return [group.get_group(axis) for axis in range(group.ndim)]
    if group is not None:
        return [group]
    return [dist.group.WORLD] if dist.is_available() and dist.is_initialized() else []


def device_of(group: ProcessGroup) -> torch.device:
    """A device whose tensors the group takes: the CPU where it does."""
    types = {device.type for device in group._device_types}
    if "cpu" in types or not types:
        return torch.device("cpu")
    kind = sorted(types)[0]
    return torch.device(kind, torch.get_device_module(kind).current_device())


def gather(values: torch.Tensor, group: Group) -> torch.Tensor:
    """values [n] of each rank -> [ranks, n], on the CPU, on every rank. Collective: n and the dtype are the same."""
    rows = values.unsqueeze(0)
    for each in groups_of(group):
        held = rows.to(device_of(each)).contiguous()
        parts = [torch.empty_like(held) for _ in range(dist.get_world_size(each))]
        dist.all_gather(parts, held, group=each)
        rows = torch.cat(parts).cpu()
    return rows


def gather_objects(value: Any, to: int | None = None) -> list[Any]:
    """What each rank of the world has, on all of them or on rank `to` alone (elsewhere an empty list). Collective.

    Numbers, texts, tensors, and lists, tuples and dictionaries of them: PyTorch's loader with weights_only makes nothing
    else, and runs no code of whoever sent it, as PyTorch's own collectives of objects do.
    """
    if not groups_of(None):
        return [value]
    file = io.BytesIO()
    torch.save(value, file)
    return [torch.load(io.BytesIO(one), weights_only=True) for one in gather_bytes(file.getbuffer(), to)]


def gather_bytes(data: Buffer, to: int | None = None) -> list[memoryview]:
    """The bytes of each rank of the world, one or more, on the ranks that `gather_objects` says. Collective."""
    groups = groups_of(None)
    if not groups:
        return [memoryview(data)]
    world, = groups
    device = device_of(world)
    sizes = gather(torch.tensor([len(data)]), world).flatten().tolist()
    held = torch.zeros(max(sizes), dtype=torch.uint8)
    held[:len(data)] = torch.frombuffer(data, dtype=torch.uint8)
    here = to is None or dist.get_rank() == to
    arrived = [bytearray(max(sizes)) for _ in sizes] if here else []
    parts = [torch.frombuffer(one, dtype=torch.uint8) for one in arrived]  # the same memory
    landed = [part if device.type == "cpu" else part.to(device) for part in parts]
    if to is None:
        dist.all_gather(landed, held.to(device), group=world)
    else:
        dist.gather(held.to(device), landed if here else None, dst=to, group=world)
    for part, other in zip(parts, landed):
        if other is not part:
            part.copy_(other)
    return [memoryview(one)[:size] for one, size in zip(arrived, sizes)]


def gather_rows(rows: torch.Tensor, group: Group) -> torch.Tensor:
    """rows [n, k] of each rank, n its own -> all rows, rank by rank. Collective."""
    for each in groups_of(group):
        counts = gather(torch.tensor([rows.size(0)]), each).flatten().tolist()
        filled = torch.cat([rows, rows.new_zeros(max(counts) - rows.size(0), rows.size(1))])
        held = filled.to(device_of(each)).contiguous()
        parts = [torch.empty_like(held) for _ in counts]
        dist.all_gather(parts, held, group=each)
        rows = torch.cat([part[:count].cpu() for part, count in zip(parts, counts)])
    return rows


def all_sum(value: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over all ranks, in place where the device allows it. Collective."""
    for each in groups_of(group):
        held = value.to(device_of(each))
        dist.all_reduce(held, group=each)
        value = held.to(value.device)
    return value
