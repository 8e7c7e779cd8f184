"""A step checked in the loops of public trainers, as a user writes it with types."""
from __future__ import annotations

from typing import Any

import lightning.pytorch
import torch
import torch.nn.functional as F
import transformers
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import nn
from torch.utils.data import DataLoader
from typing_extensions import assert_type

import isograd
from isograd.trainers import rows
from isograd.trainers.accelerate import StepCheck as AccelerateCheck
from isograd.trainers.lightning import StepCheck as LightningCheck
from isograd.trainers.transformers import StepCheck as TransformersCheck, causal_lm_loss


def squares(model: Any, sample: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, int]:
    loss = F.mse_loss(model(sample[0]), sample[1], reduction="sum")
    return loss, sample[1].numel()


def with_transformers(model: transformers.PreTrainedModel, documents: Any) -> isograd.Verdict:
    trainer = transformers.Trainer(model, transformers.TrainingArguments(output_dir="out"), train_dataset=documents)
    check = TransformersCheck(trainer, step=2, mean="token", ids=lambda sample: int(sample["id"]), report="verdict.html")
    other = TransformersCheck(trainer, loss=causal_lm_loss, samples=rows, timeout=60.0)
    trainer.train()
    assert_type(other.verdict, isograd.Verdict)
    return check.verdict


def with_lightning(module: lightning.pytorch.LightningModule, loader: DataLoader[torch.Tensor]) -> bool:
    check = LightningCheck(loss=squares, step=3, logged="loss", make_model=lambda: nn.Linear(2, 2), folder="dumps")
    lightning.pytorch.Trainer(callbacks=[check]).fit(module, loader)
    return check.verdict.passed


def with_accelerate(model: nn.Module, loader: DataLoader[tuple[torch.Tensor, torch.Tensor]]) -> list[str]:
    accelerator = Accelerator(gradient_accumulation_steps=2)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    check = AccelerateCheck(accelerator, model, optimizer, loss=squares, samples=lambda batch: list(zip(*batch)), alone=False)
    for rows_in, wanted in check.over(loader):
        with accelerator.accumulate(model):
            accelerator.backward(F.mse_loss(model(rows_in), wanted))
            optimizer.step()
            optimizer.zero_grad()
    return check.verdict.findings
