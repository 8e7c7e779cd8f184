"""transformers in fp64 throughout: by itself it computes norms, angles and the loss in fp32."""
import contextlib
import importlib

import pytest
import torch


class Wide:
    float = float32 = torch.float64

    def __getattr__(self, name):
        return getattr(torch, name)


@contextlib.contextmanager
def in_fp64(families):
    with pytest.MonkeyPatch.context() as patch:
        for module in ("modeling_rope_utils", "generation.utils", *(f"models.{family}.modeling_{family}" for family in families)):
            patch.setattr(importlib.import_module(f"transformers.{module}"), "torch", Wide())
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        torch.set_default_dtype(torch.float64)  # quotients of whole numbers
        try:
            yield
        finally:
            torch.set_default_dtype(torch.float32)
