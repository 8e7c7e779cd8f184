"""Plans from Python: which layout to train a model with, how much memory and time it takes, and what limits it.

    import isograd.planning
    plan = isograd.planning.plan("models/Llama-3-8B", "h100", tokens=4 << 20, devices=512)
    plan["top"][0]["layout"], plan["top"][0]["seconds"]["value"]

`isograd plan` in a process of its own, which needs milliseconds; docs/planning_reference.md of the repository has the keys.
The planner knows configurations, and with them all of training: the extension does without.
"""
from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Mapping
from typing import Any

from _isograd_command import command

from ._native.isograd_comm import ConfigError

Model = str | os.PathLike[str] | Mapping[str, int | bool | str]


def plan(model: Model, cluster: str | os.PathLike[str], *, tokens: int | None = None, sequence: int | None = None,
         devices: int | None = None, dtype: str | None = None, strategy: str | None = None, top: int = 5, scaling: bool = False,
         write: str | os.PathLike[str] | None = None, timeout: float = 600) -> dict[str, Any]:
    """The plan as `isograd plan --json` has it. Where nothing fits, "top" is empty and "missing" says what is lacking.

    model:    TOML of a run, Hugging Face directory, or sizes: {"layers": 32, "hidden": 4096, "heads": 32}.
    cluster:  TOML, a name of the table, or "here", what `isograd calibrate` measured.
    tokens:   of the global batch, sequence: of one of its sequences; None: the TOML's, else tokens must be given.
    write:    where the best layout goes as a configuration of `isograd train`.

    ConfigError: what `isograd plan` refuses, in its words.
    """
    sizes = [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in model.items()] if isinstance(
        model, Mapping) else []
    words = ["plan", ",".join(sizes) if isinstance(model, Mapping) else os.fspath(model), "--cluster", os.fspath(cluster), "--json"]
    for flag, value in (("--tokens", tokens), ("--seq", sequence), ("--gpus", devices), ("--dtype", dtype), ("--strategy", strategy),
                        ("--top", top), ("--write", write)):
        words += [] if value is None else [flag, str(value)]
    program, environment = command()
    done = subprocess.run([*program, *words, *(["--scaling"] if scaling else [])], capture_output=True, text=True, timeout=timeout,
                          env=environment)
    if done.returncode == 2:
        raise ConfigError(done.stderr.removeprefix("isograd: ").removeprefix("ConfigError: ").strip())
    if done.returncode not in (0, 1) or not done.stdout:
        raise RuntimeError(f"isograd plan ended with status {done.returncode}: {done.stderr.strip()}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result
