"""One step of another library's loop: its micro-batches come one by one, and it is made once."""
from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Callable, Sequence

import torch
from torch import nn

from .._engines import is_sharded
from .._ranks import plain, refuse
from .._reference import Loss
from ..watching import Figure, Verdict, WatchOptions, watch

Split = Callable[[Any], Sequence[Any]]


def rows(batch: Any) -> list[Any]:
    """Samples of a micro-batch: its rows along the first dimension of its tensors, each kept as a batch of one.

    A row of documents laid one after the other, [1, n] with `position_ids` that begin anew at 0 (padding-free batches),
    is cut into them. ConfigError: nothing in it is a tensor with rows.
    """
    size = _rows_of(batch)
    if isinstance(batch, Mapping) and size == 1 and isinstance(batch.get("position_ids"), torch.Tensor):
        begins = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
        length = batch["position_ids"].size(-1)
        if begins and begins[0] == 0 and length == _length_of(batch):
            return [_part(batch, 1, begin, end, length) for begin, end in zip(begins, [*begins[1:], length])]
    return [_part(batch, 0, i, i + 1, size) for i in range(size)]


def _tensors(batch: Any) -> list[torch.Tensor]:
    if isinstance(batch, torch.Tensor):
        return [batch] if batch.dim() else []
    entries = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, (list, tuple)) else []
    return [tensor for entry in entries for tensor in _tensors(entry)]


def _rows_of(batch: Any) -> int:
    tensors = _tensors(batch)
    if not tensors:
        refuse("isograd.trainers", f"a micro-batch as {type(batch).__name__}, of which it cannot tell the samples",
               "tensors with a row for each sample, in a dictionary, list or tuple",
               "Give samples=lambda batch: [one, two, ...]")
    return tensors[0].size(0)


def _length_of(batch: Mapping[Any, Any]) -> int:
    ids = batch.get("input_ids")
    return ids.size(-1) if isinstance(ids, torch.Tensor) and ids.dim() == 2 else -1


def _part(batch: Any, dim: int, begin: int, end: int, size: int) -> Any:
    """Elements begin to end of what has `size` along `dim`; of documents in a row, what tells where they lie is left out."""
    if isinstance(batch, torch.Tensor):
        return batch.narrow(dim, begin, end - begin) if batch.dim() > dim and batch.size(dim) == size else batch
    if isinstance(batch, Mapping):
        kept = {key: entry for key, entry in batch.items()
                if not (dim == 1 and key in ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx"))}
        return {key: _part(entry, dim, begin, end, size) for key, entry in kept.items()}
    if isinstance(batch, (list, tuple)):
        entries = [_part(entry, dim, begin, end, size) for entry in batch]
        return type(batch)(*entries) if hasattr(batch, "_fields") else type(batch)(entries)
    return batch


def unpatched(model: nn.Module) -> nn.Module:
    """A copy of the plain model with its class's own forward: what a trainer puts over it belongs to the original."""
    own = copy.deepcopy(plain(model))
    for module in own.modules():
        for name in ("forward", "_original_forward"):
            module.__dict__.pop(name, None)
    return own


class OneStep:
    """The part of a StepCheck that no loop changes: opens `watch` when a loop comes to its step `step`, counted from 1.

    Errors are those of `watch`.
    """

    def __init__(self, loop: str, loss: Loss, step: int, samples: Split | None, options: WatchOptions) -> None:
        if not isinstance(step, int) or step < 1:
            refuse("StepCheck", f"step={step!r}", "a number from 1 on", "Say which step of the optimizer is compared")
        self._loop, self._loss, self._step, self._options = loop, loss, step, options
        self._split = samples or rows
        self._verdict: Verdict | None = None
        self._watch: watch | None = None  # while the step is being made

    @property
    def verdict(self) -> Verdict:
        """ConfigError: the loop has not made the step."""
        if self._verdict is None:
            refuse("StepCheck", f"no verdict: {self._loop} has not made its step {self._step}, or it ended with an exception",
                   "a loop that makes it", "Read it after the loop, and let it make as many steps, or give step= another number")
        return self._verdict

    def _begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Before the step's first forward. Collective."""
        more: WatchOptions = {**self._options}
        if more.get("make_model") is None and not is_sharded(model):
            more["make_model"] = lambda: unpatched(model)
        self._watch = watch(model, getattr(optimizer, "optimizer", optimizer), loss=self._loss, **more).__enter__()

    def _add(self, batch: Any) -> None:
        """A micro-batch, before its forward."""
        assert self._watch is not None
        self._watch.add(self._split(batch))

    def _end(self, **logged: Figure) -> None:
        """After the update, with what the loop logs of this step. Collective."""
        opened, self._watch = self._watch, None
        assert opened is not None
        opened.log(**logged)
        opened.__exit__(None, None, None)
        self._verdict = opened.verdict
        if not self._verdict.passed:
            self._verdict.notes.append(
                f"step {self._step} of {self._loop} was compared, which cannot be called again: not tried were other "
                "numbers of micro-batches, the same sample on every rank and a rank without targets")

    def _abandon(self, error: BaseException) -> None:
        """The step failed here: tells the other ranks."""
        opened, self._watch = self._watch, None
        if opened is not None:
            opened.__exit__(type(error), error, error.__traceback__)
