"""Samples as they travel from the ranks to the reference: on the CPU, comparable, in another precision."""
from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, Callable

import torch

from ._native.isograd_comm import checksum


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` of each tensor in it: in lists, tuples, dictionaries, dataclasses, plain objects."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, (list, tuple)):
        entries = [mapped(entry, change) for entry in value]
        if all(new is old for new, old in zip(entries, value)):
            return value
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if isinstance(value, dict):
        return _with(value, value, lambda other, key, entry: other.__setitem__(key, entry), change)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _with(value, _fields(value), object.__setattr__, change)  # of frozen ones too
    if _plain_object(value):
        return _with(value, vars(value), setattr, change)
    return value


def _with(value: Any, entries: Mapping[Any, Any], put: Callable[[Any, Any, Any], None],
          change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """A shallow copy with what `change` changes, or the value itself."""
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


def like(value: Any, other: Any) -> Any:
    """A sample's tensors on the device of another's."""
    devices: list[torch.device] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        devices.append(tensor.device)
        return tensor

    mapped(other, note)
    return mapped(value, lambda tensor: tensor.to(devices[0])) if devices else value


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
