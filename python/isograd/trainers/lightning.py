"""lightning.pytorch.Trainer: one step of its loop compared with the same on one device.

    from isograd.trainers.lightning import StepCheck

    check = StepCheck(loss=sample_loss)
    Trainer(..., callbacks=[check]).fit(module, loader)
    print(check.verdict)
"""
from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

from typing_extensions import Unpack

if TYPE_CHECKING or importlib.util.find_spec("lightning"):
    from lightning.pytorch.callbacks import Callback
else:  # the same under its older name
    from pytorch_lightning.callbacks import Callback

from .._ranks import refuse
from .._reference import Loss
from ..watching import WatchOptions
from ._one_step import OneStep, Split


class StepCheck(OneStep, Callback):
    """Compares one step of automatic optimization with the same step on one device.

    loss:   loss(module, sample) as `isograd.watch` has it; `module` is a copy of the LightningModule without a trainer.
    step:   which update is compared, counted from 1 in the trainer's global_step; samples, make_model and options as
            in `isograd.trainers.transformers`.
    logged: name of the metric that is this step's loss, of callback_metrics; None: no log is compared.

    Errors are those of `watch`, and come out of fit(); ConfigError: several optimizers, manual optimization.
    """

    def __init__(self, *, loss: Loss, step: int = 1, samples: Split | None = None, logged: str | None = None,
                 **options: Unpack[WatchOptions]) -> None:
        super().__init__("lightning's Trainer", loss, step, samples, options)
        self._logged = logged

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step + 1 == self._step and not self._watch:
            if len(trainer.optimizers) != 1 or not pl_module.automatic_optimization:
                refuse("StepCheck", f"{len(trainer.optimizers)} optimizers"
                       + ("" if pl_module.automatic_optimization else " and manual optimization"),
                       "one optimizer and automatic optimization", "Put isograd.watch around the step in training_step")
            self._begin(pl_module, trainer.optimizers[0])
        if self._watch:
            self._add(batch)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self._watch and trainer.global_step >= self._step:
            self._end(loss=trainer.callback_metrics.get(self._logged) if self._logged else None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self._abandon(exception)
