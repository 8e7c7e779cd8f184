"""Rows of all ranks, of which each has another number, in a loss that compares every row with every other: the gradient against one
process, of a plain all_gather and over a mesh of two axes too; and what is refused. One argument each: a number of ranks."""
import json
import sys
import warnings

import torch
import torch.distributed as dist
from ranks import on_ranks, results_of
from torch.distributed.device_mesh import init_device_mesh

import isograd

COUNTS = [0, 4, 3, 1]  # rows of each rank
WIDE = [3, 5]  # what a row is


def loss_of(features):
    flat = features.flatten(1)
    return torch.logsumexp(flat @ flat.T, 1).mean()


def without_gradient(rows):
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, rows.detach())
    return torch.cat(parts)


def gradients(rank, size):
    generator = torch.Generator().manual_seed(11)
    weight = torch.randn(*WIDE, generator=generator, dtype=torch.float64)
    rows = [torch.randn(n, *WIDE, generator=generator, dtype=torch.float64) for n in COUNTS[:size]]

    def of(features, gather, over):
        leaf = weight.clone().requires_grad_()
        gathered = gather(features * torch.tanh(leaf))
        loss_of(gathered).backward() if gathered.requires_grad else None
        found = torch.zeros_like(leaf) if leaf.grad is None else leaf.grad
        dist.all_reduce(found)
        return gathered.detach(), found / over

    wanted_rows, wanted = of(torch.cat(rows), lambda rows: rows, size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found_rows, found = of(rows[rank], isograd.all_gather_rows, size)
    _, detached = of(rows[rank], without_gradient, size)
    if size == 4:
        mesh = init_device_mesh("cpu", (2, 2))
        mesh_rows, mesh_found = of(rows[rank], lambda rows: isograd.all_gather_rows(rows, mesh), size)
        assert torch.equal(mesh_rows, wanted_rows), "rows in another order than that of ranks"
        assert (mesh_found - wanted).norm() <= 1e-14 * wanted.norm()
    return {"rows": torch.equal(found_rows, wanted_rows), "error": float((found - wanted).norm() / wanted.norm()),
            "without_gradient": float((detached - wanted).norm() / wanted.norm())}


def differentiated_twice(rank):
    rows = torch.ones(2, 3, requires_grad=True)
    first, = torch.autograd.grad(isograd.all_gather_rows(rows).square().sum(), [rows], create_graph=True)
    first.sum().backward()


BAD = {"other_width": lambda rank: isograd.all_gather_rows(torch.zeros(2, 3 + rank)),
       "list": lambda rank: isograd.all_gather_rows([torch.zeros(3)]),
       "twice": differentiated_twice,
       "no_rows": lambda rank: isograd.all_gather_rows(torch.zeros(())),
       "other_type": lambda rank: isograd.all_gather_rows(torch.zeros(2, 3, dtype=[torch.float32, torch.float64][rank % 2]))}


if __name__ == "__main__":
    print(json.dumps({size: on_ranks(size, lambda rank: gradients(rank, size)) for size in map(int, sys.argv[1:])}
                     | {"bad": on_ranks(2, lambda rank: results_of(rank, {}, BAD))}))
