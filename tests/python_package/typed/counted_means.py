"""Means over the whole batch, summed gradients and the norm, as a user writes them with types."""
from __future__ import annotations

import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import assert_type

import isograd


def sum_of_losses(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:-1]), tokens[1:], reduction="sum")


def token_mean(model: DistributedDataParallel, micro_batches: list[torch.Tensor]) -> float:
    counted = isograd.TokenMean().count(tokens[1:] for tokens in micro_batches)
    for tokens in micro_batches:
        torch.autograd.backward(counted.scale(sum_of_losses(model, tokens)))
    norm = isograd.clip_grad_norm_(model, 1.0)
    assert_type(norm, torch.Tensor)
    return counted.loss() + counted.denominator + counted.targets + counted.global_micro_batches + counted.gradient_scale


def other_means(model: nn.Module, tokens: torch.Tensor) -> list[float]:
    targets, ids = tokens[1:], torch.zeros(len(tokens) - 1, dtype=torch.int64)
    losses = F.cross_entropy(model(tokens[:-1]), targets, reduction="none")
    by_sample = isograd.SampleMean(cut=True).count([ids], [targets])
    weighted = isograd.WeightedMean().count([torch.ones(len(targets)), 2.0])
    fixed = isograd.FixedDenominator(4096).count([tokens])
    shares = [by_sample.scale((losses * by_sample.weights(0)).sum()), weighted.scale(losses.sum()), fixed.scale(losses.sum())]
    deferred = isograd.Deferred(isograd.TokenMean(ignore_index=-1))
    deferred.add(targets)
    deferred.add(3)
    return [*(share.item() for share in shares), deferred.finish().gradient_scale]


def by_hand(model: nn.Linear, stages: dist.ProcessGroup | None) -> torch.Tensor:
    torch.autograd.backward(model(torch.ones(2, model.in_features)).sum())
    isograd.all_reduce_gradients(model.parameters())
    isograd.all_reduce_gradients([model.weight], group=stages)
    return isograd.clip_grad_norm_(model.parameters(), 1.0, experts=[([model.bias], stages)], stages=stages,
                                   counted_elsewhere=[model.weight], scale=0.5, error_if_nonfinite=True)


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("isograd", init_method=f"file://{os.path.join(folder, 'store')}", rank=0, world_size=1)
        module = nn.Sequential(nn.Embedding(20, 8), nn.Linear(8, 20))
        model = isograd.sum_gradients(DistributedDataParallel(module))
        assert_type(model, DistributedDataParallel)
        tokens = torch.arange(20)
        with model.no_sync():
            print(token_mean(model, [tokens, tokens[:9]]), *other_means(module, tokens))
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        print(isograd.TokenMean(mesh["dp"]).count([7]).targets, float(by_hand(nn.Linear(2, 2), mesh.get_group("dp"))))
        shared = isograd.empty_shared(4, torch.float32)
        print(isograd.checksum(shared), isograd.checksum(isograd.empty_shared(4, torch.float32, group=dist.group.WORLD)))
        try:
            isograd.sum_gradients(nn.Linear(2, 2))
        except (isograd.ConfigError, isograd.PeerError) as error:
            print(error)
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
