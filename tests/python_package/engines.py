"""python engines.py [CASE ...]: steps of engines that keep parameters or gradients elsewhere than PyTorch does, under isograd.watch,
on 2 and 3 ranks; as JSON, by case and rank. Each engine has right settings, and mistakes that people make with it."""
import contextlib
import functools
import json
import sys
import types
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from cases import batch_loss, make_model, sample_loss, samples
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel as FSDP, MixedPrecision, MixedPrecisionPolicy, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel

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
    return [samples(rank, ((3, 5), (2,), (9, 1))[seed], seed) for seed in range(micros)]


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
    logged = torch.tensor(logged / dist.get_world_size())
    dist.all_reduce(logged)
    return logged, norm


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
@case("fsdp1_hybrid", strategy=ShardingStrategy.HYBRID_SHARD, clip="whole")
@case("fsdp1_bf16", mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
@case("fsdp1_reduced_in_bf16", mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16))
@case("fsdp1_reduced_in_bf16_rank_means", mixed_precision=MixedPrecision(reduce_dtype=torch.bfloat16), how="means", micros=1)
@case("fsdp1_put_back", make_optimizer=ADAMW, back=True)
@case("fsdp1_put_back_original_parameters", back=True, original=True)
@case("fsdp1_rate_0", make_optimizer=functools.partial(torch.optim.SGD, lr=0.0))
@case("fsdp1_scaled", scaled=True, original=True, clip="whole")
@case("fsdp1_rank_means", how="means", micros=1)
@case("fsdp1_last_micro_batch_alone", zeroes=True)
@case("fsdp1_clipped_by_the_local_norm", clip="by the local norm")
@case("fsdp1_clipped_while_scaled", scaled=True, original=True, clip="while scaled")
@case("fsdp1_optimizer_before_wrapping", early=True)
@case("fsdp1_rank_1_does_not_step", idle=True)
def fsdp1(rank, make=make_model, inner=(), original=False, strategy=ShardingStrategy.FULL_SHARD, mixed_precision=None, scaled=False,
          make_optimizer=SGD, micros=3, early=False, idle=False, back=False, **how):
    model = make()
    optimizer = make_optimizer(model.parameters()) if early else None
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("replicate", "shard")) if (
        strategy == ShardingStrategy.HYBRID_SHARD) else None
    options = {"device_mesh": mesh, "use_orig_params": original, "sharding_strategy": strategy, "mixed_precision": mixed_precision,
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
        values = [p.detach().clone() for p in model.parameters()]
        loss, norm = train(model, optimizer, batch, scaler=scaler, **how)
        step.log(loss=loss, norm=norm)
        with torch.no_grad():
            for p, value in zip(model.parameters(), values if back else ()):
                p.copy_(value)
    return result(step)


# ---- what PyTorch wraps: a gradient that an earlier step has left, sums in another precision ----

class Derived(torch.optim.AdamW):
    def step(self, closure=None):
        return super().step(closure)


def sharded(model, **policy):
    for part in (model.up, model):
        fully_shard(part, mp_policy=MixedPrecisionPolicy(**policy))
    return model


@case("ddp_of_the_step_before", wrap=DistributedDataParallel, zeroes=False)
@case("ddp_zeroed", wrap=DistributedDataParallel)
@case("ddp_optimizer_calls_its_parent", wrap=DistributedDataParallel, make_optimizer=Derived)
@case("fsdp1_of_the_step_before", wrap=lambda model: FSDP(model, device_id=torch.device("cpu")), zeroes=False)
@case("fsdp2_of_the_step_before", wrap=sharded, zeroes=False)
@case("fsdp2_reduced_in_bf16", wrap=lambda model: sharded(model, reduce_dtype=torch.bfloat16))
@case("fsdp2_reduced_in_bf16_rank_means", wrap=lambda model: sharded(model, reduce_dtype=torch.bfloat16), how="mean")
def wrapped(rank, wrap, zeroes=True, how="sum", make_optimizer=SGD):
    """The step before was on other samples, and leaves its gradient."""
    model = wrap(make_model())
    ADAMW(model.parameters())  # PyTorch puts its hooks into a class's step with the first optimizer of it
    optimizer = make_optimizer(model.parameters())
    before, batch = batches(rank, 2)
    for some, watched in ((before, False), (batch, True)):
        total = total_of([some]) / dist.get_world_size() if how == "sum" else 1
        with isograd.watch(model, optimizer, micro_batches=[some], loss=sample_loss, make_model=make_model) if watched else (
                contextlib.nullcontext()) as step:
            if zeroes:
                optimizer.zero_grad()
            (batch_loss(model, some, how) / total).backward()
            optimizer.step()
    return result(step)


# ---- main_grad, buffers of one's own, copies in fp32, optimizers in backward ----

class Reduced(nn.Module):
    """Adds each micro-batch's gradient to a buffer in fp32, one for all parameters, and averages it over ranks."""

    def __init__(self, model, attribute):
        super().__init__()
        self.module = model
        self.buffer = torch.zeros(sum(p.numel() for p in model.parameters()))
        self.views, at = {}, 0
        for name, p in model.named_parameters():
            self.views[name] = self.buffer[at:at + p.numel()].view_as(p)
            at += p.numel()
            if attribute:
                p.main_grad = self.views[name]
            p.register_post_accumulate_grad_hook(functools.partial(self.add, self.views[name]))

    def add(self, view, p):
        view += p.grad
        p.grad = None

    def forward(self, x):
        return self.module(x)

    def reduce(self):
        dist.all_reduce(self.buffer)
        self.buffer /= dist.get_world_size()


def fill_grad(model):
    for name, p in model.module.named_parameters():
        p.grad = model.views[name].to(p.dtype)


def leaves(model):
    """The .grad of the last micro-batch is there, and nobody looks at main_grad."""
    for name, p in model.module.named_parameters():
        p.grad = model.views[name] / 3


@case("main_grad")
@case("main_grad_copies", copies=True)
@case("main_grad_bf16_copies", copies=True, dtype=torch.bfloat16)
@case("main_grad_clipped", clips=True)
@case("main_grad_bf16_copies_clipped", copies=True, clips=True, dtype=torch.bfloat16)
@case("main_grad_of_the_step_before", stale=True)
@case("main_grad_last_micro_batch_alone", zeroes=True)
@case("main_grad_not_reduced", reduces=False)
@case("main_grad_optimizer_takes_another", fills=leaves)
@case("main_grad_optimizer_takes_nothing", fills=lambda model: None)
@case("own_buffers", attribute=False)
@case("own_buffers_last_micro_batch_alone", attribute=False, zeroes=True)
@case("own_buffers_optimizer_takes_another", attribute=False, fills=leaves)
@case("own_copies", attribute=False, copies=True, gradient=None)
@case("own_copies_bf16_clipped", attribute=False, copies=True, clips=True, gradient=None, dtype=torch.bfloat16)
@case("own_copies_last_micro_batch_alone", attribute=False, copies=True, zeroes=True, gradient=None)
@case("own_buffers_not_given", attribute=False, fills=lambda model: None, by_hand=True, gradient=None)
@case("own_buffers_of_another_shape", attribute=False, gradient=lambda name, p: p.detach().flatten())
def buffers(rank, attribute=True, copies=False, dtype=torch.float32, clips=False, stale=False, zeroes=False, reduces=True,
            fills=fill_grad, by_hand=False, **more):
    model = Reduced(make_model().to(dtype), attribute)
    parameters = [p.detach().float().clone() if copies else p for p in model.module.parameters()]
    optimizer = SGD(parameters)
    batch, total = batches(rank), total_of(batches(rank))
    if not attribute:
        more = {"gradient": lambda name, p: model.views[name], **more}
    if stale:
        model.buffer += 0.01
    with isograd.watch(model.module, None if by_hand else optimizer, micro_batches=batch, loss=sample_loss, make_model=make_model,
                       **more) as step:
        for micro in batch:
            if zeroes:
                model.buffer.zero_()
            x, y = (torch.cat(column) for column in zip(*micro))
            loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), y, reduction="sum") / total * dist.get_world_size()
            loss.backward()
        if reduces:
            model.reduce()
        fills(model) if not copies else [setattr(copy, "grad", view.clone()) for copy, view in zip(parameters, model.views.values())]
        if clips:
            torch.nn.utils.clip_grad_norm_(parameters, 0.1)
        if by_hand:
            with torch.no_grad():
                for p, view in zip(parameters, model.views.values()):
                    p -= 0.1 * view
        else:
            optimizer.step()
        with torch.no_grad():
            for p, copy in zip(model.module.parameters(), parameters if copies else ()):
                p.copy_(copy)
    return result(step)


@case("fsdp1_in_backward")
@case("fsdp1_in_backward_accumulated", micros=2)
def in_backward(rank, micros=1):
    """Each parameter has an optimizer, which steps as soon as its gradient is reduced: after each micro-batch."""
    model = make_model()
    model = FSDP(model, use_orig_params=True, device_id=torch.device("cpu"))
    _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
    batch, total = batches(rank, micros), total_of(batches(rank, micros))
    with isograd.watch(model, None, micro_batches=batch, loss=sample_loss, make_model=make_model) as step:
        for micro in batch:
            (batch_loss(model, micro, "sum") / total * dist.get_world_size()).backward()
    return result(step)


@case("fsdp1_proved")
@case("fsdp1_proved_wrong", how="means", said=["mean_of_micro_batch_means"])
def proved(rank, how=None, said=()):
    def step(model, optimizer, batch):
        return float(train(model, optimizer, batch, how=how)[0])

    model = FSDP(make_model(), device_id=torch.device("cpu"))
    optimizer = ADAMW(model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    verdict = isograd.prove(step, model, optimizer, micro_batches=[samples(rank), samples(rank, (2,), 1)], loss=sample_loss,
                            make_model=make_model)
    return {"passed": verdict.passed, "said": verdict.findings, "update": verdict.update, "text": str(verdict),
            "same": all(torch.equal(p, old) for p, old in zip(model.parameters(), before))}


# ---- what has no adapter ----

class Foreign(nn.Module):
    """As if from a package."""

    def __init__(self, model):
        super().__init__()
        self.module = model


@case("refused_horovod", package="horovod.torch.optimizer")
@case("refused_fairscale", package="fairscale.nn")
@case("refused_deepspeed_of_another_version", package="deepspeed.runtime.engine", version="0.17.6")
def foreign(rank, package, version=None):
    model = Foreign(make_model())
    type(model).__module__ = package
    module = types.ModuleType("deepspeed")
    module.__version__ = version
    with mock.patch.dict(sys.modules, {"deepspeed": module} if version else {}), isograd.watch(
            model, None, micro_batches=batches(rank), loss=sample_loss):
        pass


@case("refused_gradient_of_a_known_engine")
def known(rank):
    with isograd.watch(FSDP(make_model(), device_id=torch.device("cpu")), None, micro_batches=batches(rank), loss=sample_loss,
                       make_model=make_model, gradient=lambda name, p: p.grad):
        pass


@case("refused_without_make_model")
def no_make_model(rank):
    with isograd.watch(FSDP(make_model(), device_id=torch.device("cpu")), None, micro_batches=batches(rank), loss=sample_loss):
        pass


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
    json.dump(on_ranks(int(sys.argv[1]), lambda rank: run(rank, names), seconds=500), sys.stdout)


if __name__ == "__main__":
    main()
