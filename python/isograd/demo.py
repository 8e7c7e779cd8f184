"""`python -m isograd.demo`: two ranks, the usual DDP loop, uneven batches; what isograd.prove says of it, and of the cure."""
from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn

import isograd

Sample = tuple[torch.Tensor, torch.Tensor]


def make_model() -> nn.Module:
    """Tokens [T] to logits [T, 50], the same on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(50, 16), nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 50))


def samples_of(rank: int) -> list[Sample]:
    """Rank 0's documents are short, rank 1's long."""
    generator = torch.Generator().manual_seed(rank)
    tokens = [torch.randint(50, (length + 1,), generator=generator) for length in ((5, 8), (40, 60))[rank]]
    return [(each[:-1], each[1:]) for each in tokens]


def sample_loss(model: nn.Module, sample: Sample) -> torch.Tensor:
    """A sample's losses, one for each target."""
    return F.cross_entropy(model(sample[0]), sample[1], reduction="none")


def usual_step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: Any) -> float:
    """The step of most loops: each rank's mean, gradients averaged."""
    optimizer.zero_grad()
    (batch,) = micro_batches
    tokens, targets = (torch.cat(column) for column in zip(*batch))
    loss = F.cross_entropy(model(tokens), targets)
    loss.backward()
    optimizer.step()
    mean = loss.detach().clone()
    dist.all_reduce(mean)
    return mean.item() / dist.get_world_size()


def right_step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: Any) -> float:
    """The same, counted before it is divided."""
    optimizer.zero_grad()
    counted = isograd.TokenMean().count(torch.cat([targets for _, targets in batch]) for batch in micro_batches)
    (batch,) = micro_batches
    tokens, targets = (torch.cat(column) for column in zip(*batch))
    counted.scale(F.cross_entropy(model(tokens), targets, reduction="sum")).backward()
    optimizer.step()
    return counted.loss()


def rank(number: int, store: str) -> None:
    """One of the two processes."""
    torch.set_num_threads(1)
    dist.init_process_group("isograd", init_method=f"file://{store}", rank=number, world_size=2)
    for title, step in (("Each rank's mean, averaged by DDP", usual_step), ("Counted first, summed", right_step)):
        model = nn.parallel.DistributedDataParallel(make_model())
        if step is right_step:
            isograd.sum_gradients(model)
        verdict = isograd.prove(step, model, torch.optim.AdamW(model.parameters()), micro_batches=[samples_of(number)],
                                loss=sample_loss)
        if number == 0:
            print(f"\n== {title}\n{verdict}", flush=True)
        if verdict.passed != (step is right_step):
            sys.exit(1)
    dist.destroy_process_group()


def main() -> None:
    """Starts them; status 0 if the mistake was found and the cure passed."""
    torch.set_num_threads(1)  # a process with threads of its own is not copied
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(rank, (os.path.join(folder, "store"),), 2, start_method="fork")  # they have torch already


if __name__ == "__main__":
    main()
