"""Plans, the demo's parts and the version, as a user writes them with types."""
from __future__ import annotations

import pathlib

import torch

import isograd
import isograd.demo
import isograd.planning


def seconds(model: pathlib.Path | str | dict[str, int]) -> float | None:
    try:
        found = isograd.planning.plan(model, "h100", tokens=4 << 20, devices=8, dtype="bfloat16", top=1, scaling=False, timeout=60)
    except isograd.ConfigError as error:
        print(error)
        return None
    return float(found["top"][0]["seconds"]["value"]) if found["top"] else None


def main() -> None:
    print(isograd.__version__, seconds({"layers": 2, "hidden": 64, "heads": 4, "vocabulary": 256}), seconds(pathlib.Path("nowhere")))
    model = isograd.demo.make_model()
    samples = isograd.demo.samples_of(1)
    losses = torch.cat([isograd.demo.sample_loss(model, sample) for sample in samples])
    print(losses.numel())


if __name__ == "__main__":
    main()
