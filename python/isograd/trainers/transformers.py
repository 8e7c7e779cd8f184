"""transformers.Trainer and what is built on it, TRL's SFTTrainer: one step of its loop compared with the same on one device.

    from isograd.trainers.transformers import StepCheck

    check = StepCheck(trainer)      # of a causal language model; of another one loss=
    trainer.train()
    print(check.verdict)
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typing_extensions import Unpack

from .._ranks import refuse
from .._reference import Loss
from ..watching import WatchOptions
from ._one_step import OneStep, Split

_TARGETS = ("labels", "shift_labels", "num_items_in_batch")


def causal_lm_loss(model: nn.Module, sample: Mapping[str, Any]) -> torch.Tensor:
    """Losses [targets] of a sample {"input_ids": [1, n], "labels": [1, n], ...}; label i + 1 is the target of position i.

    Labels of -100 are no targets. Of `shift_labels` [1, n] label i is the target of position i.
    """
    logits = model(**{key: value for key, value in sample.items() if key not in _TARGETS}).logits
    if sample.get("shift_labels") is not None:
        targets = sample["shift_labels"]
    elif sample.get("labels") is not None:
        logits, targets = logits[:, :-1], sample["labels"][:, 1:]
    else:
        refuse("causal_lm_loss", f"a sample of {', '.join(sample)}", "labels among them", "Give loss= to StepCheck")
    valid = targets != -100
    return F.cross_entropy(logits[valid], targets[valid], reduction="none")


class StepCheck(OneStep, TrainerCallback):
    """Compares one step of `trainer`, a transformers.Trainer or SFTTrainer, with the same step on one device.

    trainer:    before train() is called; the callback adds itself.
    loss:       loss(model, sample) as `isograd.watch` has it; of a causal language model `causal_lm_loss`.
    step:       which update is compared, counted from 1 in the trainer's global_step.
    samples:    micro-batch -> its samples; None: its rows, and the documents of a padding-free row.
    make_model: () -> the model before it was sharded; needed with FSDP.
    options:    those of `isograd.watch`: mean, ids, data, report, folder, reference, ...

    The gradient before clipping, what the optimizer takes, and, where the trainer logs at this step and has logged at
    the one before, its `loss` and `grad_norm`. Errors are those of `watch`, and come out of train(); ConfigError: another
    model without loss=.
    """

    def __init__(self, trainer: Trainer, *, loss: Loss | None = None, step: int = 1, samples: Split | None = None,
                 **options: Unpack[WatchOptions]) -> None:
        if loss is None and type(trainer.model).__name__ not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values():
            refuse("StepCheck", f"a {type(trainer.model).__name__} and no loss", "what one sample's loss is",
                   "Give loss=lambda model, sample: (sum of its losses, how many)")
        super().__init__(type(trainer).__name__, loss or causal_lm_loss, step, samples, options)
        self._logged = 0  # the last step that was in a log
        original = trainer.training_step

        def training_step(model: nn.Module, inputs: Any, *arguments: Any, **more: Any) -> torch.Tensor:
            if not self._watch:
                return original(model, inputs, *arguments, **more)
            try:
                self._add(inputs)
                return original(model, inputs, *arguments, **more)
            except BaseException as error:
                self._abandon(error)
                raise

        trainer.training_step = training_step
        trainer.add_callback(self)
        self._trainer = trainer

    def _begin(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        super()._begin(self._trainer.deepspeed or model, optimizer)  # its engine has the gradients

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._logged = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step + 1 == self._step and self._verdict is None:
            self._begin(more["model"], more["optimizer"])

    def on_step_end(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        # A log of several steps is a mean over them. The callback that decides on logging comes before this one.
        if self._watch and not (control.should_log and self._logged + 1 == state.global_step):
            self._end()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **more: Any) -> None:
        if "loss" not in (logs or {}):
            return
        self._logged = state.global_step
        if self._watch:
            self._end(loss=logs["loss"], norm=logs.get("grad_norm"))
