"""Mistakes that a type checker has to report, each on the line that says `wrong`, and nothing else here."""
from __future__ import annotations

import accelerate  # type: ignore[import-untyped]
import torch
import transformers
from torch import nn

import isograd
import isograd.planning
from isograd import focal, ranking
from isograd.trainers.accelerate import StepCheck as AccelerateCheck
from isograd.trainers.lightning import StepCheck as LightningCheck
from isograd.trainers.transformers import StepCheck as TransformersCheck


def losses(model: nn.Linear, sample: torch.Tensor) -> torch.Tensor:
    return model(sample).square().flatten()  # type: ignore[no-any-return]


def mean(model: nn.Linear, sample: torch.Tensor) -> float:
    return losses(model, sample).mean().item()


def train_step(model: nn.Linear, optimizer: torch.optim.SGD, micro_batches: list[list[torch.Tensor]]) -> None:
    optimizer.step()


def proved(model: nn.Linear, optimizer: torch.optim.SGD, samples: list[torch.Tensor]) -> None:
    with isograd.watch(model, optimizer, micro_batches=[samples], loss=losses) as step:
        step.log(loss="0.5")  # wrong
        step.add(3)  # wrong
    print(step.verdict.passes)  # wrong
    print(step.verdict.findings["0"])  # wrong
    isograd.watch(model, optimizer, micro_batches=samples, loss=losses)  # wrong
    isograd.watch(model, optimizer, micro_batches=[samples], loss=mean)  # wrong
    isograd.watch(model, optimizer, micro_batches=[samples])  # wrong
    isograd.watch(model, optimizer, loss=losses, means="token")  # wrong
    isograd.prove(train_step, optimizer, model, micro_batches=[samples], loss=losses)  # wrong
    isograd.prove(train_step, model, optimizer, micro_batches=[samples])  # wrong
    isograd.prove(train_step, model, optimizer, micro_batches=[samples], loss=losses, mean=None)  # wrong
    isograd.prove(train_step, model, optimizer, micro_batches=[samples], loss=losses, max_nrom=1.0)  # wrong
    isograd.prove(train_step, model, optimizer, micro_batches=[samples], loss=losses, make_model=model.weight)  # wrong
    isograd.prove(train_step, model, optimizer, micro_batches=[samples], loss=losses, reference="fp64")  # wrong


def counted(model: nn.Linear, samples: list[torch.Tensor]) -> isograd.CountedStep:
    found: nn.Bilinear = isograd.sum_gradients(model)  # wrong
    isograd.all_reduce_gradients(3)  # wrong
    isograd.clip_grad_norm_(found, "1.0")  # wrong
    isograd.clip_grad_norm_(model, 1.0, expert=[])  # wrong
    isograd.TokenMean().count(7)  # wrong
    isograd.SampleMean().count(samples)  # wrong
    isograd.Deferred(isograd.SampleMean())  # wrong
    isograd.TokenMean().count(samples).scale(0.5)  # wrong
    isograd.empty_shared(4, "float32")  # wrong
    isograd.linear_cross_entropy(samples[0], model, samples[1])  # wrong
    print(isograd.Step)  # wrong
    return isograd.FixedDenominator(4096)  # wrong


def ranked() -> list[nn.Module]:
    return [ranking.SmoothAPLoss(temprature=0.1),  # wrong
            ranking.RecallAtQuantileLoss(queue_size="16"),  # wrong
            ranking.PAUCAtBudgetLoss(alpha=0.0, gamma=2.0),  # wrong
            focal.SigmoidFocalLoss(alpha="auto"),  # wrong
            focal.SoftmaxFocalLoss(weights=[1.0])]  # wrong


def planned() -> dict[str, str]:
    isograd.planning.plan(3, "h100")  # wrong
    isograd.planning.plan("model.toml", "h100", gpus=8)  # wrong
    return isograd.planning.plan("model.toml")  # wrong


def trained(trainer: transformers.Trainer, accelerator: accelerate.Accelerator, model: nn.Linear, optimizer: torch.optim.SGD) -> bool:
    TransformersCheck(trainer, steps=2)  # wrong
    TransformersCheck(model)  # wrong
    LightningCheck(logged="loss")  # wrong
    LightningCheck(loss=losses, timeout="60")  # wrong
    AccelerateCheck(accelerator, model, loss=losses)  # wrong
    AccelerateCheck(accelerator, model, optimizer, loss=losses, samples=3)  # wrong
    return LightningCheck(loss=losses).verdict.pased  # wrong
