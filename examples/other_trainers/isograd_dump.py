"""Writes one step of any trainer for `isograd compare` (docs/dump.md has the format)."""
import json
import math
import os
import pathlib
import shutil
import tempfile

from safetensors.torch import save_file


def as_json(value):
    """JSON has no NaN and no infinity: "nan", "inf" and "-inf", wherever they stand."""
    if isinstance(value, dict):
        return {key: as_json(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(entry) for entry in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def write_dump(folder, gradients, shares={}, **step):
    """`gradients`: {name: tensor}, whole, as the optimizer sees them. `step`: loss=, targets=, samples=, counts=, ...

    `shares`: {(rank, micro_batch): the part of the gradient that those tokens made}, where the writer knows it.
    Call it on one rank.
    """
    folder = pathlib.Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    partial.chmod(0o755)
    parts = {f"share-{rank}-{micro_batch}": share for (rank, micro_batch), share in shares.items()}
    for name, tensors in {"gradients": gradients, **parts}.items():
        save_file({key: value.detach().cpu().contiguous() for key, value in tensors.items()},
                  str(partial / f"{name}.safetensors"))
    step = as_json({"format": "isograd-dump", "version": 1, **step})
    (partial / "step.json").write_text(json.dumps(step, allow_nan=False))
    shutil.rmtree(folder, ignore_errors=True)
    os.rename(partial, folder)
