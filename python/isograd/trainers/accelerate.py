"""A loop of one's own over accelerate.Accelerator: one step of it compared with the same on one device.

    from isograd.trainers.accelerate import StepCheck

    check = StepCheck(accelerator, model, optimizer, loss=sample_loss)   # after accelerator.prepare
    for batch in check.over(loader):                                     # in place of: for batch in loader
        ...
    print(check.verdict)
"""
from __future__ import annotations

from typing import Any, Iterable, Iterator

import torch
from accelerate import Accelerator
from torch import nn
from typing_extensions import Unpack

from .._reference import Loss
from ..watching import WatchOptions
from ._one_step import OneStep, Split


class StepCheck(OneStep):
    """Compares one step of a loop with the same step on one device.

    model, optimizer: what accelerator.prepare gave.
    loss:             loss(model, sample) as `isograd.watch` has it.
    step:             which update is compared, counted from 1; samples, make_model and options as in
                      `isograd.trainers.transformers`.

    The step ends, and is compared, inside the optimizer's step(); what the loop logs is its own and is not compared.
    Errors are those of `watch`.
    """

    def __init__(self, accelerator: Accelerator, model: nn.Module, optimizer: torch.optim.Optimizer, *, loss: Loss,
                 step: int = 1, samples: Split | None = None, **options: Unpack[WatchOptions]) -> None:
        super().__init__("the loop over Accelerator", loss, step, samples, options)
        self._model, self._optimizer = accelerator.unwrap_model(model, keep_fp32_wrapper=True), optimizer
        self._made = 0  # updates
        getattr(optimizer, "optimizer", optimizer).register_step_post_hook(self._stepped)

    def over(self, loader: Iterable[Any]) -> Iterator[Any]:
        """The loader's batches, each a micro-batch of this rank.

        Where the loop ends inside the step (an exception in it or in the loader, `break`), the other ranks end with PeerError.
        """
        try:
            for batch in loader:
                if self._made + 1 == self._step and not self._watch:
                    self._begin(self._model, self._optimizer)
                if self._watch:
                    self._add(batch)
                yield batch
        except GeneratorExit:  # an iterator does not learn what raised in the loop's body
            self._abandon(RuntimeError("the loop ended before the step did"))
            raise
        except BaseException as error:
            self._abandon(error)
            raise

    def _stepped(self, *_: Any) -> None:
        self._made += 1
        if self._watch:
            self._end()
