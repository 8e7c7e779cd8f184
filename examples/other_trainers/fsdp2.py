"""One step of PyTorch's FSDP2 as a dump: torchrun --nproc-per-node 3 fsdp2.py --loss mean --dump dumps/fsdp2

--loss as in ddp.py: FSDP2 averages over the ranks as well. Gradients are sharded, so each is gathered for the dump.
"""
import torch
import torch.distributed as dist
from ddp import arguments, dump, leave, local_loss
from model_and_data import make_model, pack_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    options = arguments(__doc__)
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    model = make_model(getattr(torch, options.dtype))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    tokens, targets, samples = pack_of(dist.get_rank())
    loss = local_loss(model, options.loss, tokens, targets)
    loss.backward()
    gradients = {name: p.grad.full_tensor() for name, p in model.named_parameters()}  # collective
    dump(options.dump, gradients, loss, "dp_shard", options.dtype, tokens, targets, samples)
    leave()


if __name__ == "__main__":
    main()
