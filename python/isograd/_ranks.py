"""Values on several ranks: errors, small exchanges, whole tensors out of the parts of ranks, samples that travel."""
from __future__ import annotations

import copy
import dataclasses
import io
import math
import operator
import sys
from collections.abc import Mapping
from typing import Any, Callable, Iterable, NoReturn, Sequence, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from ._native.isograd_comm import ConfigError, checksum
from ._torch_names import CHECKPOINTED, COMPILED, device_types, FSDP1, hooks_of

Buffer = Union[bytearray, memoryview]
Group = Union[ProcessGroup, DeviceMesh, None]
Parameters = Union[nn.Module, Iterable[torch.Tensor]]
_MOST_NUMBERS = 8  # that `agreed` exchanges
_ENGINES = ("deepspeed.", "megatron.core.distributed.")  # whose wrappers have the model as `module`
_WRAPPERS = (f"{COMPILED}.", f"{CHECKPOINTED}.", f"{FSDP1}.")


def refuse(where: str, found: str, expected: str, action: str, cause: BaseException | None = None) -> NoReturn:
    """Raises a ConfigError in its parts (docs/errors.md); its traceback has that of the cause above it."""
    said = ConfigError(f"{where}: found {found}; expected {expected}. {action}.")
    if cause is not None:
        raise said from cause
    raise said


def listed(parameters: Parameters) -> list[torch.Tensor]:
    """The parameters of a module, a list or one tensor; a tied one once."""
    if isinstance(parameters, torch.Tensor):
        return [parameters]
    given = parameters.parameters() if isinstance(parameters, nn.Module) else parameters
    found = list(given) if isinstance(given, Iterable) else [given]
    if bad := [p for p in found if not isinstance(p, torch.Tensor)]:
        refuse("isograd", f"a {type(bad[0]).__name__} among the parameters", "a module, its parameters, or a list of tensors",
               "Give the model, or model.parameters()")
    return list({id(p): p for p in found}.values())


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def groups_of(group: Group) -> list[ProcessGroup]:
    """The groups of several ranks that an exchange passes one after the other: one for each axis of a mesh. None: the world."""
    if isinstance(group, DeviceMesh):
        groups = [group.get_group(axis) for axis in range(group.ndim)]
    elif isinstance(group, (str, int, list, tuple)):
        refuse("isograd", f"group={group!r}", "a process group or a device mesh", 'Give torch.distributed.group.WORLD, or mesh["dp"]')
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


def parts_of(tensor: torch.Tensor, group: ProcessGroup) -> list[torch.Tensor]:
    """`tensor` of each rank, of one shape."""
    held = tensor.to(device_of(group)).contiguous()
    parts = [torch.empty_like(held) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, held, group=group)
    return parts


def gather(values: torch.Tensor, group: Group) -> torch.Tensor:
    """values [n] of each rank -> [ranks, n], on the CPU, on every rank. Collective: n and the dtype are the same."""
    rows = values.unsqueeze(0)
    for each in groups_of(group):
        rows = torch.cat(parts_of(rows, each)).cpu()
    return rows


def gather_rows(rows: torch.Tensor, group: Group) -> torch.Tensor:
    """rows [n, k] of each rank, each with its own n -> all rows, rank by rank. Collective."""
    for each in groups_of(group):
        counts = gather(torch.tensor([rows.size(0)]), each).flatten().tolist()
        filled = torch.cat([rows, rows.new_zeros(max(counts) - rows.size(0), rows.size(1))])
        rows = torch.cat([part[:count].cpu() for part, count in zip(parts_of(filled, each), counts)])
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


def ranks() -> tuple[int, int]:
    """This rank and how many there are."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return 0, 1


def plain(model: nn.Module) -> nn.Module:
    """The model that DDP, DeepSpeed, Megatron-Core's DDP or torch.compile was given."""
    while True:
        if isinstance(model, DistributedDataParallel) or type(model).__module__.startswith(_ENGINES):
            model = model.module
        elif isinstance(inner := getattr(model, COMPILED, None), nn.Module):
            model = inner
        else:
            return model


def copied(model: nn.Module) -> nn.Module:
    """A copy with the hooks of its parameters, which copy.deepcopy leaves out."""
    other = copy.deepcopy(model)
    for own, new in zip(model.parameters(), other.parameters()):
        for hook in hooks_of(own):
            new.register_hook(hook)
    return other


def plain_name(name: str) -> str:
    """The name of a parameter, buffer or module in the model before it was wrapped."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters that get a gradient, a tied one once."""
    return {plain_name(name): p for name, p in plain(model).named_parameters() if p.requires_grad}


def gradient_of(parameter: torch.Tensor) -> torch.Tensor:
    """Zeros where there is none; of an embedding with sparse=True dense, as one that is not sparse has it."""
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad


def held(tensor: torch.Tensor) -> torch.Tensor:
    """A copy of what this rank has: no communication, for it is taken in the middle of a step."""
    return tensor.detach().clone()


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """On the CPU, quantised weights as numbers. Collective over a DTensor's mesh."""
    full = tensor.full_tensor() if isinstance(tensor, DTensor) else dequantised(tensor)
    return full.detach().cpu()


def dequantised(weight: torch.Tensor) -> torch.Tensor:
    """The numbers that a weight of bitsandbytes in 4 bits or of torchao stands for; any other as it is."""
    library = type(weight).__module__.partition(".")[0]
    if library in ("torchao", "bitsandbytes") and (type(weight).__name__ == "Int8Params"
                                                   or getattr(weight, "act_quant_kwargs", None) is not None):
        refuse("isograd.watch", f"weights of {library} whose products round what they are multiplied with", "a base whose weights alone "
               "are quantised, so that one process can make it in fp64", "Watch a step on a base of 4 bits (bitsandbytes: "
               "load_in_4bit=True), or of weights alone (torchao: Int8WeightOnlyConfig)")
    if library == "torchao":
        return weight.dequantize()
    if library == "bitsandbytes" and getattr(weight, "quant_state", None) is not None:
        numbers: torch.Tensor = sys.modules[library].functional.dequantize_4bit(weight.data, weight.quant_state)
        return numbers
    return weight


def owned_norm(parts: Mapping[str, torch.Tensor]) -> float | None:
    """The norm of the elements that this rank counts, where some are sharded: the first rank counts copies. No communication."""
    squares, sharded = 0.0, False
    for part in parts.values():
        if isinstance(part, DTensor):
            sharded, place = True, part.device_mesh.get_coordinate() or []
            if all(at == 0 for at, placement in zip(place, part.placements) if placement.is_replicate()):
                squares += float(part.to_local().double().square().sum())
        elif ranks()[0] == 0:
            squares += float(part.double().square().sum())
    return squares**0.5 if sharded else None


def spread(part: Mapping[str, torch.Tensor], first: Mapping[str, torch.Tensor]) -> float:
    """The largest distance from rank 0's gradient, of its norm; 0 where there is none that differs."""
    shares = [0.0]
    for name, gradient in part.items():
        off, norm = (float(g.norm()) for g in (gradient.double() - first[name].double(), first[name].double()))
        share = off / norm if norm > 0 else (0.0 if off == 0 else float("inf"))
        shares.append(share if share == share else float("inf"))
    return max(shares)


def summed(parts: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """In fp64: the sums, over ranks that see the same samples, of those gradients that differ between them."""
    return {name: torch.stack([part[name].double() for part in parts]).sum(0) for name, first in parts[0].items()
            if any(not torch.equal(part[name], first) for part in parts)}


def assembled(parts: Mapping[str, torch.Tensor], stages: bool,
              whole_of: Callable[[str, torch.Tensor], torch.Tensor]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """On rank 0 every tensor whole, elsewhere an empty dictionary; and the checksums of this rank's own. Collective."""
    rank, size = ranks()
    owners: dict[str, int] = {}
    if stages:
        names = gather_objects(list(parts))
        for other in reversed(range(size)):
            owners.update(dict.fromkeys(names[other], other))
    kept: dict[str, torch.Tensor] = {}
    sums = []
    for name, part in parts.items():
        full = whole_of(name, part)
        sums.append(checksum(full))
        if owners.get(name, 0) == rank:
            kept[name] = full.clone()
    if stages:
        kept = {name: value for some in gather_objects(kept, to=0) for name, value in some.items()}
    return kept if rank == 0 else {}, sums


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` of each tensor in it: in lists, tuples, dictionaries, dataclasses, plain objects."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        listed = [mapped(entry, change) for entry in value]
        if all(new is old for new, old in zip(listed, value)):
            return value
        return type(value)(*listed) if hasattr(value, "_fields") else type(value)(listed)
    entries: Mapping[Any, Any]
    put: Callable[[Any, Any, Any], None]
    if isinstance(value, dict):
        entries, put = value, operator.setitem
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries, put = _fields(value), object.__setattr__  # which frozen ones take too
    elif _plain_object(value):
        entries, put = vars(value), setattr
    else:
        return value
    changed = {key: new for key, old in entries.items() if (new := mapped(old, change)) is not old}
    other = copy.copy(value) if changed else value
    for key, new in changed.items():
        put(other, key, new)
    return other


def _fields(value: Any) -> dict[str, Any]:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _plain_object(value: Any) -> bool:
    return hasattr(value, "__dict__") and not callable(value) and type(value).__module__ != "builtins"


def on_cpu(value: Any) -> Any:
    """A sample's tensors on the CPU, apart from the graph and from what the step may change."""
    return mapped(value, lambda tensor: tensor.detach().cpu().clone())


def tensors_in(value: Any) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        found.append(tensor)
        return tensor

    mapped(value, note)
    return found


def like(value: Any, other: Any) -> Any:
    """A sample's tensors on the device of another's."""
    tensors = tensors_in(other)
    return mapped(value, lambda tensor: tensor.to(tensors[0].device)) if tensors else value


def in_precision(value: Any, dtype: torch.dtype) -> Any:
    """A sample's tensors of real numbers in that type."""
    return mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def digest(value: Any) -> str:
    """The same for samples of the same content, in whatever process."""
    if isinstance(value, torch.Tensor):
        return f"{value.dtype} {tuple(value.shape)} {checksum(value)}"
    if hasattr(value, "__array_interface__"):  # of numpy, whose repr leaves out what is long
        return digest(torch.as_tensor(value) if value.dtype.kind in "biufc" else value.tolist())
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(digest, value))}]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key!r}: {digest(entry)}" for key, entry in value.items()) + "}"
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return f"{type(value).__name__} {digest(_fields(value))}"
    if _plain_object(value):  # whose own repr may be an address
        return f"{type(value).__name__} {digest(vars(value))}"
    return repr(value)
