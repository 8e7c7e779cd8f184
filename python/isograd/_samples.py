"""Samples as they travel from the ranks to the reference: on the CPU, comparable, in another precision."""
from __future__ import annotations

import dataclasses
from typing import Any, Callable

import torch

from ._native.isograd_comm import checksum


def mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """`value` with `change` of each tensor in it: lists, tuples, dictionaries, dataclasses."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(mapped(entry, change) for entry in value))
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(entry, change) for entry in value)
    if isinstance(value, dict):
        return {key: mapped(entry, change) for key, entry in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: mapped(getattr(value, field.name), change) for field in dataclasses.fields(value) if field.init}
        return dataclasses.replace(value, **fields)
    return value


def on_cpu(value: Any) -> Any:
    """A sample's tensors on the CPU, apart from the graph and from what the step may change."""
    return mapped(value, lambda tensor: tensor.detach().cpu().clone())


def in_precision(value: Any, dtype: torch.dtype) -> Any:
    """A sample's tensors of real numbers in that type."""
    return mapped(value, lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor)


def digest(value: Any) -> str:
    """The same for samples of the same content."""
    parts: list[str] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        parts.append(f"{tensor.dtype} {tuple(tensor.shape)} {checksum(tensor)}")
        return tensor.new_zeros(0)

    rest = repr(mapped(value, note))
    return f"{rest} {parts}"
