"""One step of PyTorch's DDP, or of FSDP2, as a dump: torchrun --nproc-per-node 3 ddp.py --loss mean --dump dumps/ddp

--loss mean: each rank's loss is the mean over its own targets, as most code has it. With packs of different lengths the
    average of those means is not the mean over all targets, and neither is its gradient.
--loss sum: each rank's sum is divided by the targets of all ranks. Both average over the ranks, hence the world size.
--fsdp2: gradients are sharded, so each is gathered for the dump.
"""
import argparse
import os
import sys

import torch
import torch.distributed as dist
from isograd_dump import write_dump
from model_and_data import PRECISION, cross_entropy, make_model, num_targets, pack_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel


def gathered(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def local_loss(model, kind, tokens, targets):
    """This rank's loss, for a trainer that averages gradients over the ranks."""
    if kind == "mean":
        return cross_entropy(model, tokens, targets, "mean")
    total = sum(gathered(num_targets(targets)))
    return cross_entropy(model, tokens, targets, "sum") / total * dist.get_world_size()


def dump(folder, gradients, loss, axis, dtype, tokens, targets, samples):
    """Collective; rank 0 writes. The loss is what a trainer logs: the mean over ranks of theirs."""
    losses, counts = gathered(loss.item()), gathered(num_targets(targets))
    lengths, ids = gathered(len(tokens)), gathered(samples)
    if dist.get_rank() == 0:
        norm = torch.stack([g.double().square().sum() for g in gradients.values()]).sum().sqrt()
        write_dump(folder, gradients, loss=sum(losses) / len(losses), targets=sum(counts), tokens=sum(lengths),
                   norm=norm.item(), samples=[i for some in ids for i in some], counts=[[n] for n in counts],
                   axes={axis: len(counts)}, precision=PRECISION[dtype])


def leave():
    """Ends this process at once, after all ranks came here.

    Whatever still holds the group keeps Gloo's threads alive. One that lets go of a tensor while the interpreter is
    being taken down aborts the process (std::terminate), after a step that went well: so it is not taken down.
    """
    dist.barrier()
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=["mean", "sum"], required=True)
    parser.add_argument("--dump", required=True)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--fsdp2", action="store_true")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    wrapped = model = make_model(getattr(torch, options.dtype))
    if options.fsdp2:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (*model.blocks, model):
            fully_shard(module, mesh=mesh)
    else:
        wrapped = DistributedDataParallel(model)
    tokens, targets, samples = pack_of(dist.get_rank())
    loss = local_loss(wrapped, options.loss, tokens, targets)
    loss.backward()
    gradients = {name: p.grad.full_tensor() if options.fsdp2 else p.grad for name, p in model.named_parameters()}  # collective
    axis = "dp_shard" if options.fsdp2 else "dp_replicate"
    dump(options.dump, gradients, loss, axis, options.dtype, tokens, targets, samples)
    leave()


if __name__ == "__main__":
    main()
