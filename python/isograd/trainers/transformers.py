"""transformers.Trainer and what is built on it, TRL's trainers: one step of its loop compared with the same on one device.

    from isograd.trainers.transformers import StepCheck

    check = StepCheck(trainer)      # of a causal language model, an adapter of PEFT on it too; of another one loss=
    trainer.train()
    print(check.verdict)
"""
from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Trainer, TrainerCallback
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from typing_extensions import Unpack

from .._ranks import refuse
from .._reference import Loss, Term
from ..watching import Figure, WatchOptions
from ._one_step import OneStep, Split

_TARGETS = ("labels", "shift_labels", "num_items_in_batch")
_OWN_LOOP = "Compare the gradient that its loss should have in a loop of your own: isograd.watch with"
_REFUSED = {  # of TRL: why no sample has a loss of its own there, and what to do
    "KTOTrainer": ("each loss takes the mean KL divergence of the micro-batches that all ranks have at that moment",
                   f"{_OWN_LOOP} features= (docs/python_prove.md#losses-over-the-whole-batch), or train on pairs by DPOTrainer"),
    **dict.fromkeys(("GRPOTrainer", "RLOOTrainer"), (
        "it draws its completions in the step, and the micro-batches of its loop are prompts",
        f"{_OWN_LOOP} completions that were drawn before, and advantages of their groups by features= "
        "(docs/python_prove.md#losses-over-the-whole-batch)"))}


def causal_lm_loss(model: nn.Module, sample: Mapping[str, Any], *, label_smoothing: float = 0.0, dft: bool = False) -> torch.Tensor:
    """Losses [targets] of a sample {"input_ids": [1, n], "labels": [1, n], ...}; label i + 1 is the target of position i.

    Labels of -100 are no targets. Of `shift_labels` [1, n] label i is the target of position i. dft: each times the
    probability of its target, which is not differentiated (dynamic fine-tuning).
    """
    logits = model(**_inputs(sample)).logits
    if sample.get("shift_labels") is not None:
        targets = sample["shift_labels"]
    elif sample.get("labels") is not None:
        logits, targets = logits[:, :-1], sample["labels"][:, 1:]
    else:
        refuse("causal_lm_loss", f"a sample of {', '.join(sample)}", "labels among them", "Give loss= to StepCheck")
    valid = targets != -100
    losses = F.cross_entropy(logits[valid], targets[valid], reduction="none", label_smoothing=label_smoothing)
    return losses * (-losses.detach()).exp() if dft else losses


def _inputs(sample: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sample.items() if key not in _TARGETS}


def _router_logits(model: nn.Module, sample: Mapping[str, Any]) -> list[torch.Tensor]:
    """[tokens, experts] of each layer of a mixture of experts, without what fills the sample up."""
    mask = sample.get("attention_mask")
    found = model(**_inputs(sample), output_router_logits=True).router_logits
    return [logits if mask is None else logits[mask.flatten() == 1] for logits in found]


def _load_balance(model: nn.Module, samples: Sequence[list[torch.Tensor]], *, top: int) -> torch.Tensor:
    """The load balance of Switch Transformers (arXiv 2101.03961, equations 4 to 6) over all tokens of the step and all layers."""
    probabilities = torch.cat([logits.softmax(-1) for sample in samples for logits in sample])
    chosen = F.one_hot(probabilities.topk(top).indices, probabilities.size(-1)).to(probabilities).sum(1)
    return probabilities.size(-1) * (chosen.mean(0) * probabilities.mean(0)).sum()


def _base_of(model: nn.Module) -> nn.Module:
    """The model in an adapter of PEFT."""
    base: nn.Module = model.get_base_model() if hasattr(model, "get_base_model") else model
    return base


def _loss_of(trainer: Trainer, terms: bool) -> tuple[Loss, list[Term]]:
    """The loss of one sample and the terms that are added, by the trainer's arguments; terms: the user gives them."""
    of_trl = next((kind.__name__ for kind in type(trainer).__mro__ if kind.__module__.startswith("trl.")), "SFTTrainer")
    base = _base_of(trainer.model)
    kind = type(base).__name__
    why = (f"a {of_trl}" if of_trl != "SFTTrainer" else f"a compute_loss_func in {type(trainer).__name__}" if trainer.compute_loss_func
           else f"a {kind}" if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() else None)
    if why is not None:
        refuse("StepCheck", f"{why} and no loss", "what one sample's loss is", "Give loss=lambda model, sample: (sum of its losses, how "
               "many), and samples= if a sample is more than a row: docs/python_prove.md#fine-tuning has those of TRL's trainers")
    dft = getattr(trainer.args, "loss_type", "nll") == "dft"
    smoothing = float(trainer.label_smoother.epsilon) if trainer.label_smoother is not None and not dft else 0.0
    config = base.config.get_text_config()
    weight = float(getattr(config, "router_aux_loss_coef", 0.0)) if getattr(config, "output_router_logits", False) else 0.0
    balance = []
    if weight and not smoothing and not terms:  # with smoothed labels both trainers take the logits alone
        balance = [Term(functools.partial(_load_balance, top=config.num_experts_per_tok), weight, features=_router_logits)]
    return functools.partial(causal_lm_loss, label_smoothing=smoothing, dft=dft), balance


class StepCheck(OneStep, TrainerCallback):
    """Compares one step of `trainer`, a transformers.Trainer or one of TRL, with the same step on one device.

    trainer:    before train() is called; the callback adds itself.
    loss:       loss(model, sample) as `isograd.watch` has it. None: of a causal language model, with PEFT's adapters or
                without, `causal_lm_loss` with the trainer's label_smoothing_factor and SFTTrainer's loss_type, and of a mixture
                of experts that gives its router's logits the load balance of the whole step.
    step:       which update is compared, counted from 1 in the trainer's global_step.
    samples:    micro-batch -> its samples; None: its rows, and the documents of a padding-free row.
    make_model: () -> the model before it was sharded; needed with FSDP.
    options:    those of `isograd.watch`: mean, terms, ids, data, report, folder, reference, ...

    The gradient before clipping, what the optimizer takes, and, where the trainer logs at this step and has logged at
    the one before, its `loss` and `grad_norm`. Errors are those of `watch`, and come out of train(); ConfigError: another
    model or trainer without loss=, TRL's KTOTrainer, GRPOTrainer and RLOOTrainer.
    """

    def __init__(self, trainer: Trainer, *, loss: Loss | None = None, step: int = 1, samples: Split | None = None,
                 **options: Unpack[WatchOptions]) -> None:
        for kind in type(trainer).__mro__:
            if kind.__name__ in _REFUSED and kind.__module__.startswith("trl."):
                why, action = _REFUSED[kind.__name__]
                refuse("StepCheck", f"TRL's {kind.__name__}: {why}", "a trainer whose loss is told of a sample, or of features of all", action)
        if loss is None:
            loss, terms = _loss_of(trainer, "terms" in options)
            if terms:
                options["terms"] = terms
        super().__init__(type(trainer).__name__, loss, step, samples, options)
        self._by_rank = trainer.args.average_tokens_across_devices is False
        self._logged = 0  # the last step that was in a log
        self._trainer = trainer
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

    def on_train_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        self._logged = state.global_step

    def on_step_begin(self, args: Any, state: Any, control: Any, **more: Any) -> None:
        if state.global_step + 1 == self._step and self._verdict is None:
            model = self._trainer.deepspeed or more["model"]  # the engine has the gradients
            model.train()  # as each training_step of the trainer does: its first one has not yet
            self._begin(model, more["optimizer"])

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

    def _end(self, **logged: Figure) -> None:
        super()._end(**logged)
        if self._by_rank and "mean_of_rank_means" in self.verdict.findings:
            self.verdict.notes.append("average_tokens_across_devices=False of the trainer's arguments has each rank divide by its own "
                                      "targets: leave it out")
