"""Gradients as sums over ranks: DDP and FSDP2 told not to average, and a loop of one's own."""
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ._assemble import gradient_of
from ._errors import refuse
from ._groups import Group, Parameters, groups_of, listed, local


def sum_gradients(model: nn.Module) -> nn.Module:
    """Makes DDP and FSDP2 sum gradients over their ranks instead of averaging them; returns `model`.

    Call it once, after wrapping and before the first backward. ConfigError: nothing in `model` reduces gradients, or
    DDP has a communication hook already, which may average.
    """
    found = False
    for module in model.modules():
        if isinstance(module, DistributedDataParallel):
            if module._comm_hooks:
                refuse("isograd.sum_gradients", "DDP with a communication hook", "DDP as it was made",
                       "A model has one hook: call sum_gradients in its place, or let it sum")
            module.register_comm_hook(module.process_group, _summing)
            found = True
        elif hasattr(module, "set_gradient_divide_factor"):  # FSDP2
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # else NCCL's scaled sum, which no other backend has
            found = True
    if not found:
        refuse("isograd.sum_gradients", f"a {type(model).__name__} without DDP or FSDP2", "a wrapped model",
               "Give it what DistributedDataParallel or fully_shard made; for a plain model take all_reduce_gradients "
               "after backward")
    return model


def _summing(group: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    return dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future().then(lambda f: f.value()[0])


def all_reduce_gradients(parameters: Parameters, group: Group = None) -> None:
    """Sums the gradients of a plain model over the ranks of `group`, in place; after the last backward of a step.

    A parameter that got no gradient here takes part with zeros: another rank may have one. A tied one is summed once;
    of a DTensor its part, over ranks that hold the same part. A sparse one (nn.Embedding(sparse=True)) is sparse again
    afterwards, and takes a dense copy meanwhile. Collective: the same parameters in the same order on
    every rank.
    """
    for parameter in listed(parameters):
        if not parameter.requires_grad:
            continue
        sparse = parameter.grad is not None and parameter.grad.is_sparse
        parameter.grad = gradient_of(parameter)  # ranks have other rows: the sum is made of whole tensors
        for each in groups_of(group):
            dist.all_reduce(local(parameter.grad), group=each)
        if sparse:
            parameter.grad = parameter.grad.to_sparse(1)
