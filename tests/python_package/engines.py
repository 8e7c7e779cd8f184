"""python engines.py [CASE ...]: steps of engines that keep parameters or gradients elsewhere than PyTorch does, under isograd.watch,
on 2 and 3 ranks; as JSON, by case and rank. Each engine has right settings, and mistakes that people make with it."""
import contextlib
import functools
import json
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from cases import batch_loss, make_model, Mlp, sample_loss, samples
from ranks import on_ranks
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import _apply_optimizer_in_backward

import isograd

CASES = {}


def case(name, **options):
    """Adds a case: a function of the rank and these."""
    def add(function):
        CASES[name] = functools.partial(function, **options)
        return function
    return add


def batches(rank, micros=3):
    """Of uneven length, other ones on each rank."""
    return [samples(rank, (3, 5), seed) for seed in range(micros)]


def result(step, **more):
    verdict = step.verdict
    return {"passed": verdict.passed, "said": verdict.findings, "update": verdict.update, "text": str(verdict), **more}


def total_of(batch):
    """The targets of all ranks."""
    count = torch.tensor([float(sum(len(y) for micro in batch for _, y in micro))])
    dist.all_reduce(count)
    return float(count)


def train(model, optimizer, batch, norm=None, how=None, scaler=None, zeroes=False, syncs_last=True, clip=None):
    """A step as most loops have it. how: what a micro-batch's loss is divided by; the sum over ranks is averaged by the wrapper."""
    total, logged = total_of(batch), 0.0
    optimizer.zero_grad()
    for j, micro in enumerate(batch):
        if zeroes:
            optimizer.zero_grad()
        last = j + 1 == len(batch)
        with contextlib.nullcontext() if last == syncs_last else model.no_sync():
            loss = batch_loss(model, micro, "mean") / len(batch) if how == "means" else (
                batch_loss(model, micro, "sum") / total * dist.get_world_size())
            (loss if scaler is None else scaler.scale(loss)).backward()
        logged += float(loss.detach())
    if scaler is not None and clip != "while scaled":
        scaler.unscale_(optimizer)
    if clip is not None:
        norm = (torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1) if clip == "by the local norm" else
                model.clip_grad_norm_(0.1))
    optimizer.step() if scaler is None else scaler.step(optimizer)
    if scaler is not None:
        scaler.update()
    return logged / dist.get_world_size(), norm


# ---- FullyShardedDataParallel ----

class Tied(nn.Module):
    """Weights that are no multiple of any number of ranks, one of them tied and one frozen."""

    def __init__(self):
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(8, 7), nn.LayerNorm(7), nn.Linear(7, 7)
        self.head = nn.Linear(7, 6)
        self.second.weight = nn.Parameter(torch.randn(7, 7) / 3)
        self.third = nn.Linear(7, 7, bias=False)
        self.third.weight = self.second.weight
        self.scale = nn.Parameter(torch.ones(7), requires_grad=False)

    def forward(self, x):
        return self.head(torch.tanh(self.third(torch.tanh(self.second(self.norm(self.first(x) * self.scale))))))


def make_tied():
    torch.manual_seed(3)
    return Tied()


SGD = functools.partial(torch.optim.SGD, lr=0.1)
ADAMW = functools.partial(torch.optim.AdamW, lr=0.01)


@case("fsdp1", make_optimizer=ADAMW, clip="whole")
@case("fsdp1_original_parameters", original=True, make_optimizer=ADAMW, clip="whole")
@case("fsdp1_blocks", inner=["up", "norm"], clip="whole")
@case("fsdp1_blocks_original_parameters", inner=["up", "norm"], original=True)
@case("fsdp1_tied_and_frozen", make=make_tied, original=True, clip="whole")
@case("fsdp1_gradients_alone", strategy=ShardingStrategy.SHARD_GRAD_OP, original=True, clip="whole")
@case("fsdp1_whole", strategy=ShardingStrategy.NO_SHARD, clip="whole")
@case("fsdp1_bf16", mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
@case("fsdp1_scaled", scaled=True, original=True, clip="whole")
@case("fsdp1_rank_means", how="means", micros=1)
@case("fsdp1_micro_batch_means", how="means", original=True)
@case("fsdp1_last_micro_batch_alone", zeroes=True)
@case("fsdp1_clipped_by_the_local_norm", clip="by the local norm")
@case("fsdp1_clipped_while_scaled", scaled=True, original=True, clip="while scaled")
@case("fsdp1_optimizer_before_wrapping", early=True)
@case("fsdp1_rank_1_does_not_step", idle=True)
def fsdp1(rank, make=make_model, inner=(), original=False, strategy=ShardingStrategy.FULL_SHARD, mixed_precision=None, scaled=False,
          make_optimizer=SGD, micros=3, early=False, idle=False, **how):
    model = make()
    optimizer = make_optimizer(model.parameters()) if early else None
    options = {"use_orig_params": original, "sharding_strategy": strategy, "mixed_precision": mixed_precision,
               "device_id": torch.device("cpu")}
    for name in inner:
        setattr(model, name, FSDP(getattr(model, name), **options))
    model = FSDP(model, **options)
    optimizer = optimizer or make_optimizer(model.parameters())
    if idle and rank == 1:
        optimizer.step = lambda: None
    scaler = ShardedGradScaler("cpu", init_scale=1024.0) if scaled else None
    batch = batches(rank, micros)
    with isograd.watch(model, optimizer, micro_batches=batch, loss=sample_loss, make_model=make) as step:
        loss, norm = train(model, optimizer, batch, scaler=scaler, **how)
        step.log(loss=loss, norm=norm)
    return result(step)


def run(rank, names):
    found = {}
    for name in names:
        try:
            found[name] = CASES[name](rank)
        except Exception as error:
            found[name] = f"{type(error).__name__} {error}"
    return found


def main():
    names = sys.argv[2:] or list(CASES)
    json.dump(on_ranks(int(sys.argv[1]), lambda rank: run(rank, names)), sys.stdout)


if __name__ == "__main__":
    main()
