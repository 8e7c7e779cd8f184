"""python clip.py: clip_grad_norm_ compared with the fp64 norm of the assembled gradient, on 4 ranks; figures as JSON."""
import json
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel,
                                               parallelize_module)
from torch.nn.parallel import DistributedDataParallel

import isograd


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 60), nn.Linear(60, 24, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(self.norm(x))))


def make_model(dtype=torch.float32):
    torch.manual_seed(5)
    return nn.Sequential(Mlp(), Mlp()).to(dtype)


def backward(model, rank, dtype=torch.float32):
    x = torch.randn(7, 24, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype)
    (model(x) * torch.arange(24.0, dtype=dtype)).square().sum().mul(1e3).backward()


def whole(gradient):
    return (gradient.full_tensor() if isinstance(gradient, DTensor) else gradient).double()


def norm_of(parameters):
    return sum(float(whole(p.grad).square().sum()) for p in parameters) ** 0.5


def judged(model, parameters=None, **more):
    """Norm and clipped gradient, relative to those of the assembled gradient; and PyTorch's own norm."""
    parameters = list(model.parameters())
    expected = norm_of(parameters)
    before = [whole(p.grad) for p in parameters]
    try:
        theirs = nn.utils.get_total_norm([p.grad for p in parameters])
        theirs = float(whole(theirs)) / expected - 1
    except Exception as error:  # it refuses gradients of several meshes
        theirs = type(error).__name__
    limit = expected / 3
    norm = float(isograd.clip_grad_norm_(model, limit, **more))
    clipped = max(float((whole(p.grad) - g * (limit / (expected + 1e-6))).abs().max() / g.abs().max())
                  for p, g in zip(parameters, before))
    return {"norm": norm / expected - 1, "clipped": clipped, "pytorch": theirs}


def fsdp_and_tp(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make_model()
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    isograd.sum_gradients(model)
    backward(model, mesh["dp"].get_local_rank())
    return judged(model)


def fsdp_and_tp_on_one_mesh(rank):
    """The norm's weights are DTensors too, whose gradients are summed along tp: PyTorch's own norm has one mesh there."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make_model()
    for block in model:
        parallelize_module(block, mesh["tp"], PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(0)))
        parallelize_module(block, mesh["tp"], {"norm": SequenceParallel(sequence_dim=0), "down": RowwiseParallel(),
                                               "up": ColwiseParallel(input_layouts=Shard(0))})
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    isograd.sum_gradients(model)
    backward(model, mesh["dp"].get_local_rank())
    alone = make_model()
    for other in range(2):
        backward(alone, other)
    apart = max(float((whole(p.grad) - q.grad).norm() / q.grad.norm())
                for p, q in zip(model.parameters(), alone.parameters()))
    return {**judged(model), "summed": apart}


def fsdp(rank):
    model = make_model()
    for block in model:
        fully_shard(block, mesh=init_device_mesh("cpu", (4,)))
    fully_shard(model, mesh=init_device_mesh("cpu", (4,)))
    backward(model, rank)
    return judged(model)


def hybrid(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = isograd.sum_gradients(fully_shard(make_model(), mesh=mesh))
    backward(model, rank)
    alone = make_model()
    for other in range(4):
        backward(alone, other)
    apart = max(float((whole(p.grad) - q.grad).norm() / q.grad.norm())
                for p, q in zip(model.parameters(), alone.parameters()))
    return {**judged(model), "summed": apart}


def tensor_parallel(rank):
    """Norm weights plain, matrices DTensors on one axis of a mesh; the other axis holds copies."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = make_model()
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    backward(model, 0)
    return judged(model)


def ddp(rank):
    model = DistributedDataParallel(make_model())
    backward(model, rank)
    return judged(model)


def stages_and_experts(rank):
    """Two stages of two ranks each; a tied weight lies in both, and each rank has an expert of its own."""
    stage, place = divmod(rank, 2)
    pipelines = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    ep = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    generator = torch.Generator().manual_seed(1)
    tied, first, second, *experts = [torch.randn(5, 3, generator=generator) for _ in range(7)]
    mine = [tied.clone(), (first, second)[stage].clone(), experts[rank].clone()]
    parameters = [nn.Parameter(torch.zeros(5, 3)) for _ in mine]
    for p, g in zip(parameters, mine):
        p.grad = g.clone()
    experts[3].zero_()
    if rank == 3:
        parameters[2].grad = None  # no token chose it
    expected = sum(float(g.double().square().sum()) for g in (tied, first, second, *experts)) ** 0.5
    norm = float(isograd.clip_grad_norm_(
        parameters, 0.5, scale=0.25, experts=[([parameters[2]], ep[stage])], stages=pipelines[place],
        counted_elsewhere=[parameters[0]] if stage else []))
    factor = 0.25 * 0.5 / (0.25 * expected)
    clipped = max(float((p.grad - factor * g).abs().max()) for p, g in zip(parameters, mine) if p.grad is not None)
    # Planted: the copy counted in both stages, the experts on their own rank alone.
    for p, g in zip(parameters, mine):
        p.grad = g.clone()
    wrong = float(isograd.clip_grad_norm_(parameters, float("inf"), stages=pipelines[place]))
    return {"norm": norm / (0.25 * expected) - 1, "clipped": clipped, "planted": wrong / expected - 1}


def bad_input(rank):
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    p = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh))
    p.grad = DTensor.from_local(torch.ones(4, 4), mesh, [Partial()])
    said = []
    for wrong in (lambda: isograd.clip_grad_norm_([p], 1.0), lambda: isograd.sum_gradients(make_model())):
        try:
            wrong()
        except isograd.ConfigError as error:
            said.append(str(error))
    q = nn.Parameter(torch.ones(3))
    q.grad = torch.tensor([1.0, float("inf"), 0.0])
    norm = float(isograd.clip_grad_norm_([q], 1.0))
    try:
        isograd.clip_grad_norm_([q], 1.0, error_if_nonfinite=True)
    except RuntimeError as error:
        said.append(str(error))
    return {"said": said, "norm": str(norm)}


SCENARIOS = [fsdp_and_tp, fsdp_and_tp_on_one_mesh, fsdp, hybrid, tensor_parallel, ddp, stages_and_experts, bad_input]

if __name__ == "__main__":
    json.dump(on_ranks(4, lambda rank: {run.__name__: run(rank) for run in SCENARIOS}), sys.stdout)
