"""The peer of `isograd bench optim`: clip_grad_norm_ and fused AdamW, as a careful PyTorch user calls them (turns.py).

Each process holds all parameters and their gradients already summed over the ranks: the all-reduce that DDP would need
is left out, to the peer's advantage. case.json has shapes, options and updates per turn. Seconds are those of the slowest
process. SIDE.parameters is written after the first turn: fp32, in the order of the shapes.
"""
import ctypes

import torch
import torch.distributed as dist
import torch.nn as nn

import turns


def pattern(offset, numel, salt):
    """Whole numbers in [-509, 509], the same as pattern() of src/bench/cases/optim.cpp."""
    place = torch.arange(offset, offset + numel, dtype=torch.int64)
    return ((place * 40503 + salt * 7919) % 1019 - 509).to(torch.float32)


def memory_of(values):
    """A contiguous tensor's bytes (NumPy, which would give them, need not be there)."""
    return (ctypes.c_char * (values.numel() * values.element_size())).from_address(values.data_ptr())


def run(rank):
    c = rank.case()
    if rank.ranks > 1:  # for the barrier before a call and the slowest one's time, outside of what is timed
        rank.meet()
    parameters, bases, offset = [], [], 0
    for shape in c["shapes"]:
        numel = torch.Size(shape).numel()
        parameters.append(nn.Parameter((pattern(offset, numel, 0) * 2**-14).reshape(shape)))
        parameters[-1].grad = torch.zeros(shape)
        bases.append(sum(pattern(offset, numel, 1 + r) for r in range(c["ranks"])).reshape(shape) * 2**-20)
        offset += numel
    decayed = [p for p in parameters if p.dim() >= 2]
    others = [p for p in parameters if p.dim() < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": c["weight_decay"]}, {"params": others, "weight_decay": 0.0}],
        lr=c["learning_rate"], betas=(c["beta1"], c["beta2"]), eps=c["epsilon"], fused=True)

    def clip_and_update():
        norm = nn.utils.clip_grad_norm_(parameters, c["max_norm"])
        optimizer.step()
        return norm

    update = 0
    for _ in rank.turns():
        seconds, norms = [], []
        for _ in range(c["updates_per_turn"]):
            for parameter, base in zip(parameters, bases):
                torch.mul(base, (1 + update % 5) * (-1 if update % 3 == 1 else 1), out=parameter.grad)
            update += 1
            if rank.ranks > 1:
                dist.barrier()
            spent, norm = turns.timed(clip_and_update)
            seconds.append(spent)
            norms.append(norm.item())
        slowest = torch.tensor(seconds, dtype=torch.float64)
        if rank.ranks > 1:
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if rank.rank == 0 and update == c["updates_per_turn"]:
            with open(rank.exchange / f"{rank.side}.parameters", "wb") as file:
                for parameter in parameters:
                    file.write(memory_of(parameter.detach()))
        rank.answer(seconds=slowest.tolist(), losses=[], norms=norms)


if __name__ == "__main__":
    turns.main(run)
