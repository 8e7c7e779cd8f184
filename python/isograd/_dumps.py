"""Dumps of one step, as docs/verify.md has them: gradients.safetensors, applied, peers, shares, step.json."""
from __future__ import annotations

import ctypes
import json
import math
import pathlib
from typing import Any, BinaryIO, Mapping

import torch

_NAMES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def write_safetensors(path: pathlib.Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """The format of the package safetensors, which need not be installed: a header in JSON, then the bytes."""
    held = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    header: dict[str, Any] = {}
    end = 0
    for name, value in held.items():
        begin, end = end, end + value.nbytes
        header[name] = {"dtype": _NAMES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in held.values():
            _write_bytes(file, value)


def _write_bytes(file: BinaryIO, value: torch.Tensor) -> None:
    if value.nbytes:
        file.write(memoryview((ctypes.c_char * value.nbytes).from_address(value.data_ptr())))


def as_json(value: Any) -> Any:
    """JSON has no NaN and no infinity: "nan", "inf" and "-inf", wherever they stand."""
    if isinstance(value, dict):
        return {key: as_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_dump(folder: pathlib.Path, gradients: Mapping[str, torch.Tensor], step: Mapping[str, Any],
               applied: Mapping[str, torch.Tensor] | None = None,
               shares: Mapping[tuple[int, int], Mapping[str, torch.Tensor]] | None = None,
               peers: Mapping[str, torch.Tensor] | None = None) -> None:
    """`folder` is new. Keys of `step` whose value is None are not recorded."""
    folder.mkdir(parents=True)
    write_safetensors(folder / "gradients.safetensors", gradients)
    if applied is not None:
        write_safetensors(folder / "applied.safetensors", applied)
    if peers:
        write_safetensors(folder / "peers.safetensors", peers)
    for (rank, micro_batch), share in (shares or {}).items():
        write_safetensors(folder / f"share-{rank}-{micro_batch}.safetensors", share)
    write_step(folder, {"format": "isograd-dump", "version": 1, **step})


def write_step(folder: pathlib.Path, step: Mapping[str, Any]) -> None:
    known = {key: value for key, value in step.items() if value is not None}
    (folder / "step.json").write_text(json.dumps(as_json(known), allow_nan=False))


def add_to_step(folder: pathlib.Path, **more: Any) -> None:
    """Further keys of a dump that is written."""
    write_step(folder, {**json.loads((folder / "step.json").read_text()), **more})
