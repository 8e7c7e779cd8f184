"""Proves that a distributed PyTorch step has the gradient of one device, and makes it so.

    import isograd
    torch.distributed.init_process_group("isograd")  # collectives over shared memory, between the ranks of one host

docs/python.md of the repository is the guide, with a page for each topic. Importing raises ImportError, with both versions,
with another torch than the package was built with.
"""
from __future__ import annotations

from ._native.built import ISOGRAD as __version__
from ._native import load as _load

_load()  # gives torch.distributed the backend "isograd"

from ._native.isograd_comm import ConfigError, PeerError, checksum, empty_shared  # noqa: E402
from .gradients import all_gather_rows, all_reduce_gradients, clip_grad_norm_, sum_gradients  # noqa: E402
from .losses import (CountedStep, Deferred, FixedDenominator, LinearCrossEntropy, SampleMean, TokenMean, WeightedMean,  # noqa: E402
                     linear_cross_entropy)
from ._reference import Term  # noqa: E402
from .watching import Verdict, prove, watch  # noqa: E402

__all__ = ["ConfigError", "CountedStep", "Deferred", "FixedDenominator", "LinearCrossEntropy", "PeerError", "SampleMean", "Term",
           "TokenMean", "Verdict", "WeightedMean", "__version__", "all_gather_rows", "all_reduce_gradients", "checksum", "clip_grad_norm_",
           "empty_shared", "linear_cross_entropy", "prove", "sum_gradients", "watch"]
