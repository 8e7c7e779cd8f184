"""Errors, and small exchanges between the ranks of a process group or of a device mesh."""
from __future__ import annotations

import io
import math
from typing import Any, Callable, Iterable, NoReturn, Sequence, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._native.isograd_comm import ConfigError
from ._torch_names import device_types

Buffer = Union[bytearray, memoryview]
Group = Union[ProcessGroup, DeviceMesh, None]
Parameters = Union[nn.Module, Iterable[torch.Tensor]]
_MOST_NUMBERS = 8  # that `agreed` exchanges


def refuse(where: str, found: str, expected: str, action: str) -> NoReturn:
    """Raises a ConfigError in its parts (docs/errors.md)."""
    raise ConfigError(f"{where}: found {found}; expected {expected}. {action}.")


def listed(parameters: Parameters) -> list[torch.Tensor]:
    """The parameters of a module, a list or one tensor; a tied one once."""
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    found = list(parameters.parameters() if isinstance(parameters, nn.Module) else parameters)
    return list({id(p): p for p in found}.values())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def groups_of(group: Group) -> list[ProcessGroup]:
    """The groups of several ranks that an exchange passes one after the other: one for each axis of a mesh. None: the world."""
    if isinstance(group, DeviceMesh):
        groups = [group.get_group(axis) for axis in range(group.ndim)]
    elif group is not None:
        groups = [group]
    else:
        groups = [dist.group.WORLD] if dist.is_available() and dist.is_initialized() else []
    return [each for each in groups if dist.get_world_size(each) > 1]


def size_of(group: Group) -> int:
    """How many ranks the group or mesh has; 1 where there is none."""
    return math.prod(dist.get_world_size(each) for each in groups_of(group))


def device_of(group: ProcessGroup) -> torch.device:
    """A device whose tensors the group takes: the CPU where it does."""
    types = device_types(group)
    if "cpu" in types or not types:
        return torch.device("cpu")
    kind = sorted(types)[0]
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _parts(tensor: torch.Tensor, group: ProcessGroup) -> list[torch.Tensor]:
    """`tensor` of each rank, of one shape."""
    held = tensor.to(device_of(group)).contiguous()
    parts = [torch.empty_like(held) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, held, group=group)
    return parts


def gather(values: torch.Tensor, group: Group) -> torch.Tensor:
    """values [n] of each rank -> [ranks, n], on the CPU, on every rank. Collective: n and the dtype are the same."""
    rows = values.unsqueeze(0)
    for each in groups_of(group):
        rows = torch.cat(_parts(rows, each)).cpu()
    return rows


def gather_rows(rows: torch.Tensor, group: Group) -> torch.Tensor:
    """rows [n, k] of each rank, each with its own n -> all rows, rank by rank. Collective."""
    for each in groups_of(group):
        counts = gather(torch.tensor([rows.size(0)]), each).flatten().tolist()
        filled = torch.cat([rows, rows.new_zeros(max(counts) - rows.size(0), rows.size(1))])
        rows = torch.cat([part[:count].cpu() for part, count in zip(_parts(filled, each), counts)])
    return rows


def all_sum(value: torch.Tensor, group: Group) -> torch.Tensor:
    """The sum over all ranks, in place where the device allows it. Collective."""
    for each in groups_of(group):
        held = value.to(device_of(each))
        dist.all_reduce(held, group=each)
        value = held.to(value.device)
    return value


def agreed(where: str, make: Callable[[], Sequence[float]], group: Group) -> torch.Tensor:
    """The numbers that `make` gives on each rank, [ranks, 8] fp64. Collective. ConfigError, on every rank: one refuses its input."""
    row, problem = torch.zeros(1 + _MOST_NUMBERS, dtype=torch.float64), None  # exact below 2^53
    try:
        own = make()
        row[1:1 + len(own)] = torch.tensor(own, dtype=torch.float64)
    except Exception as error:
        row[0], problem = 1, error
    rows = gather(row, group)
    if problem is not None:
        raise problem
    if refused := rows[:, 0].nonzero().flatten().tolist():
        raise ConfigError(f"{where}: found that rank {refused[0]} refuses its input; expected input that every rank can take. "
                          "Look at that rank's own message.")
    return rows[:, 1:]


def gather_objects(value: Any, to: int | None = None) -> list[Any]:
    """The value of each rank of the world, on all of them or on rank `to` alone (elsewhere an empty list). Collective.

    Numbers, texts, tensors, and lists, tuples and dictionaries of them: PyTorch's loader with weights_only makes nothing
    else, and runs no code of the sender, as PyTorch's own collectives of objects do.
    """
    if not groups_of(None):
        return [value]
    file = io.BytesIO()
    torch.save(value, file)
    return [torch.load(io.BytesIO(one), weights_only=True) for one in gather_bytes(file.getbuffer(), to)]


def gather_bytes(data: Buffer, to: int | None = None) -> list[memoryview]:
    """The bytes of each rank of the world, one or more, on the ranks that `gather_objects` names. Collective."""
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
