"""The extension, loaded once: `isograd_comm` of a build folder is the same one, and only one can be registered."""
from __future__ import annotations

import importlib
import pathlib
import sys

from _isograd_command import torch_problem

from .built import TORCH


def load() -> None:
    """Loads the module isograd_comm; ImportError names both versions of torch where they do not fit."""
    own = f"{__name__}.isograd_comm"
    if "isograd_comm" not in sys.modules:
        import torch

        if problem := torch_problem(pathlib.Path(torch.__file__).parent, TORCH):
            raise ImportError(f"isograd: {problem}.")
        sys.modules["isograd_comm"] = importlib.import_module(own)
    sys.modules[own] = sys.modules["isograd_comm"]
