"""One step of PyTorch's DDP as a dump: torchrun --nproc-per-node 3 ddp.py --loss mean --dump dumps/ddp

--loss mean: each rank's loss is the mean over its own targets, as most code has it. With packs of different lengths the
    average of those means is not the mean over all targets, and neither is its gradient.
--loss sum: each rank's sum is divided by the targets of all ranks. DDP averages over the ranks, hence the world size.
"""
import argparse
import os
import sys

import torch
import torch.distributed as dist
from isograd_dump import write_dump
from model_and_data import PRECISION, cross_entropy, make_model, num_targets, pack_of
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


def arguments(description):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loss", choices=["mean", "sum"], required=True)
    parser.add_argument("--dump", required=True)
    parser.add_argument("--dtype", default="float32")
    return parser.parse_args()


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
    options = arguments(__doc__)
    dist.init_process_group("gloo")
    model = DistributedDataParallel(make_model(getattr(torch, options.dtype)))
    tokens, targets, samples = pack_of(dist.get_rank())
    loss = local_loss(model, options.loss, tokens, targets)
    loss.backward()
    gradients = {name: p.grad for name, p in model.module.named_parameters()}
    dump(options.dump, gradients, loss, "dp_replicate", options.dtype, tokens, targets, samples)
    leave()


if __name__ == "__main__":
    main()
