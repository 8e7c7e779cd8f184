"""Scenarios: PyTorch's ways to train on several ranks. They return the weights after some steps.

Weights must be equal bit by bit. A sum of two numbers is the same in any order, so on more than two ranks only two
ranks have a loss that is not multiplied by zero, in turn: the sums that Gloo and isograd form then agree whatever
the order, over any number of steps and with any optimizer. `gradients_of_all_ranks` holds the sums of all ranks to
the bound of summation.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel

from collectives import scenario
from context import Close, sum_bound

STEPS = 5


class Uneven(nn.Module):
    """Parameters of very different sizes, in several types of layer, one of them used only now and then."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(31, 12)
        self.wide = nn.Linear(12, 257)
        self.norm = nn.LayerNorm(257)
        self.narrow = nn.Linear(257, 3, bias=False)
        self.sometimes = nn.Linear(12, 257)
        self.scale = nn.Parameter(torch.tensor([1.5]))

    def forward(self, tokens, extra=False):
        x = self.embedding(tokens)
        y = self.wide(x)
        if extra:
            y = y + self.sometimes(x)
        return self.narrow(torch.relu(self.norm(y))) * self.scale


def model():
    torch.manual_seed(11)  # the same weights on all ranks and in both runs
    return Uneven()


def batch(c, step):
    tokens = torch.randint(0, 31, (4, 9), generator=c.generator(c.rank, step))
    return tokens, c.normal(4, 9, 3, salt=step)


def active(c, step):
    return c.size == 2 or c.rank in (step % c.size, (step + 1) % c.size)


def loss_of(c, network, step, *arguments, only=None):
    tokens, target = batch(c, step)
    loss = (network(tokens, *arguments) - target).square().mean()
    return loss * float(active(c, step) if only is None else only)


def weights(network):
    assert all(tensor.isfinite().all() for tensor in network.state_dict().values()), "the training diverged"
    return {name: tensor.detach().clone() for name, tensor in network.state_dict().items()}


def train(c, wrapped, optimizer, *, extra=lambda c, step: True, clip=False):
    for step in range(STEPS):
        loss_of(c, wrapped, step, extra(c, step)).backward()
        if clip:
            nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return weights(wrapped)


def ddp(c, *, hook=None, extra=lambda c, step: True, **options):
    network = DistributedDataParallel(model(), bucket_cap_mb=0.004, **options)
    if hook:
        network.register_comm_hook(None, hook)
    return train(c, network, torch.optim.AdamW(network.parameters(), lr=1e-2), extra=extra, clip=True)


@scenario
def ddp_with_bucket_views(c):
    return ddp(c, gradient_as_bucket_view=True)


@scenario
def ddp_with_copied_buckets(c):
    return ddp(c, gradient_as_bucket_view=False)


@scenario
def ddp_with_unused_parameters(c):
    """Which parameters are used depends on the step and on the rank."""
    return ddp(c, find_unused_parameters=True, extra=lambda c, step: (c.rank + step) % 3 == 0)


@scenario
def ddp_with_a_static_graph(c):
    return ddp(c, static_graph=True)


@scenario
def ddp_with_a_compressing_hook(c):
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
    return ddp(c, hook=lambda state, bucket: fp16_compress_hook(dist.group.WORLD, bucket))


@scenario
def ddp_with_a_gathering_hook(c):
    """Another collective than all-reduce, with arithmetic in the future's callback."""
    def hook(_, bucket):
        every = [torch.zeros_like(bucket.buffer()) for _ in range(c.size)]
        future = dist.all_gather(every, bucket.buffer(), async_op=True).get_future()
        return future.then(lambda _: torch.stack(every).sum(0).div_(c.size))
    return ddp(c, hook=hook)


@scenario
def ddp_accumulating(c):
    network = DistributedDataParallel(model(), bucket_cap_mb=0.004, gradient_as_bucket_view=True)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9)
    for step in range(STEPS):
        with network.no_sync():
            loss_of(c, network, 2 * step, True, only=active(c, step)).backward()
        loss_of(c, network, 2 * step + 1, True, only=active(c, step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return weights(network)


@scenario
def ddp_with_uneven_inputs(c):
    """Ranks run out of batches at different times; join() goes on for them."""
    network = DistributedDataParallel(model(), bucket_cap_mb=0.004)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    with network.join():
        for step in range(2 + c.rank):
            loss_of(c, network, step, True).backward()
            optimizer.step()
            optimizer.zero_grad()
    return weights(network)


@scenario
def gradients_of_all_ranks(c):
    """One backward pass in which every rank counts: DDP's mean is a sum of the ranks' shares, within the bound."""
    shares = model()
    loss_of(c, shares, 0, True, only=True).backward()
    magnitudes = {}
    for name, parameter in shares.named_parameters():
        every = [torch.zeros_like(parameter) for _ in range(c.size)]
        dist.all_gather(every, parameter.grad / c.size)
        magnitudes[name] = sum(share.abs() for share in every)
    network = DistributedDataParallel(model(), bucket_cap_mb=0.004)
    loss_of(c, network, 0, True, only=True).backward()
    return {name: Close(parameter.grad, sum_bound(magnitudes[name], c.size))
            for name, parameter in network.module.named_parameters()}


def skip_a_bucket(c):
    """A fault of its own: over isograd the second bucket of every step is not reduced."""
    def hook(_, bucket):
        buffer = bucket.buffer()
        if bucket.index() == 1 and not c.over_gloo:
            future = torch.futures.Future()
            future.set_result(buffer)
            return future
        return dist.all_reduce(buffer, async_op=True).get_future().then(lambda done: done.value()[0])
    return ddp(c, hook=hook)


skip_a_bucket.is_scenario = True  # run by name only: Gloo and isograd must differ


def zero(c, **options):
    from torch.distributed.optim import ZeroRedundancyOptimizer
    network = DistributedDataParallel(model(), bucket_cap_mb=0.004, gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(network.parameters(), optimizer_class=torch.optim.AdamW, lr=1e-2, **options)
    result = train(c, network, optimizer)
    optimizer.consolidate_state_dict(to=c.size - 1)
    state = optimizer.state_dict()["state"] if c.rank == c.size - 1 else {}
    return result, {i: {key: value for key, value in entry.items()} for i, entry in state.items()}


@scenario
def zero_redundancy_optimizer(c):
    return zero(c)


@scenario
def zero_redundancy_optimizer_with_bucket_views(c):
    return zero(c, parameters_as_bucket_view=True)


def fsdp(c, mesh=None, clip=False, precision=None, only_sums=False, **options):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    network = model()
    mesh = mesh or init_device_mesh("cpu", (c.size,))
    if precision:
        options["mp_policy"] = precision
    for part in (network.wide, network.narrow, network):
        fully_shard(part, mesh=mesh, **options)
    if only_sums:
        for part in (network.wide, network.narrow, network):
            part.set_force_sum_reduction_for_comms(True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    train(c, network, optimizer, clip=clip)
    return {name: parameter.full_tensor() for name, parameter in network.named_parameters()}


@scenario
def fsdp2(c):
    # The norm that clipping needs adds up a number from each rank.
    return fsdp(c, clip=c.size == 2)


@scenario
def fsdp2_without_resharding(c):
    return fsdp(c, reshard_after_forward=False)


@scenario
def fsdp2_in_mixed_precision(c):
    from torch.distributed.fsdp import MixedPrecisionPolicy
    return fsdp(c, precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))


@scenario
def fsdp2_reducing_in_bf16(c):
    from torch.distributed.fsdp import MixedPrecisionPolicy
    # Gloo's mean rounds the sum to bf16, then the quotient; ours rounds once. That differs where the division is
    # not exact. `average_and_premultiplied_sum` checks ours.
    return fsdp(c, precision=MixedPrecisionPolicy(param_dtype=torch.bfloat16), only_sums=c.size == 3)


@scenario
def fsdp2_in_two_dimensions(c):
    """Sharded within pairs, replicated across them: collectives of subgroups. Needs an even number of ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    shape = (c.size // 2, 2) if c.size % 2 == 0 else (1, c.size)
    return fsdp(c, mesh=init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")))


@scenario
def tensor_parallel(c):
    """DTensor's collectives, on whole numbers: exact in any order."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    mesh = init_device_mesh("cpu", (c.size,))
    width = 4 * c.size
    first = distribute_tensor(c.whole(width, 6, rank=0), mesh, [Shard(0)])
    second = distribute_tensor(c.whole(5, width, rank=0, slot=1), mesh, [Shard(1)])
    x = DTensor.from_local(c.whole(3, 6), mesh, [Shard(0)])
    hidden = torch.relu(x.redistribute(placements=[Replicate()]) @ first.t())
    y = hidden @ second.t()  # a sum over ranks that is still to be formed
    return y.redistribute(placements=[Shard(0)]).full_tensor(), y.full_tensor()


@scenario
def pipelining(c):
    """A stage on each rank, four micro-batches: what stages send each other is a message."""
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
    torch.manual_seed(7)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(c.size)]
    inputs, target, results = torch.randn(8, 6), c.normal(8, 6), []
    for kind in (ScheduleGPipe, Schedule1F1B):
        layer = layers[c.rank]
        layer.zero_grad()
        schedule = kind(PipelineStage(layer, c.rank, c.size, torch.device("cpu")), 4, loss_fn=nn.functional.mse_loss)
        losses = []
        last = {"target": target, "losses": losses} if c.rank == c.size - 1 else {}
        schedule.step(*([inputs] if c.rank == 0 else []), **last)
        results += [*losses, *(p.grad.clone() for p in layer.parameters())]
    return results


@scenario
def checkpoints(c):
    """Distributed checkpoints: saved in shards, by a thread too, and loaded whole."""
    import tempfile
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard
    mesh = init_device_mesh("cpu", (c.size,))
    folder = [tempfile.mkdtemp() if c.rank == 0 else None]
    dist.broadcast_object_list(folder)
    saved = {"cut": DTensor.from_local(c.whole(3, 4), mesh, [Shard(0)]), "plain": torch.arange(5.0), "step": 17}
    dcp.save(saved, checkpoint_id=f"{folder[0]}/now")
    dcp.async_save(saved, checkpoint_id=f"{folder[0]}/later").result()
    results = []
    for name in ("now", "later"):
        whole = DTensor.from_local(torch.zeros(3 * c.size, 4), mesh, [Replicate()])
        loaded = {"cut": whole, "plain": torch.zeros(5), "step": 0}
        dcp.load(loaded, checkpoint_id=f"{folder[0]}/{name}")
        results.append([loaded["cut"].to_local(), loaded["plain"], loaded["step"]])
    dist.barrier()
    if c.rank == 0:
        import shutil
        shutil.rmtree(folder[0])
    return results
