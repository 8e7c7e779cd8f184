"""What `isograd bench optim` is compared with: clip_grad_norm_ and fused AdamW, as a careful PyTorch user calls them.

    python optim_step.py EXCHANGE PROCESSES SIDE      starts the processes

Each process holds all parameters and their gradients already summed over the ranks: the all-reduce that DDP would need
is left out, to the peer's advantage. EXCHANGE holds
    case.json            shapes, options, updates per turn
    SIDE.go.R            one byte per turn for process R; end of file: done
    SIDE.done            one JSON line per turn, from process 0: seconds (of the slower process) and norms of each update
    SIDE.parameters      written after the first turn: fp32, in the order of the shapes
"""
import ctypes
import json
import os
import pathlib
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn

from leaving import leave


def pattern(offset, numel, salt):
    """Whole numbers in [-509, 509], the same as pattern() of src/bench/cases/optim_case.cpp."""
    place = torch.arange(offset, offset + numel, dtype=torch.int64)
    return ((place * 40503 + salt * 7919) % 1019 - 509).to(torch.float32)


def run_process(exchange, rank, processes, side):
    c = json.loads((exchange / "case.json").read_text())
    torch.set_num_threads(1)
    if processes > 1:  # for the barrier before a call and the slower one's time, outside of what is timed
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group("gloo", init_method=f"file://{exchange}/{side}.store", rank=rank, world_size=processes)
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
    go = open(exchange / f"{side}.go.{rank}", "rb", buffering=0)
    done = open(exchange / f"{side}.done", "w") if rank == 0 else None
    update, first = 0, True
    while go.read(1):
        seconds, norms = [], []
        for _ in range(c["updates_per_turn"]):
            for parameter, base in zip(parameters, bases):
                torch.mul(base, (1 + update % 5) * (-1 if update % 3 == 1 else 1), out=parameter.grad)
            update += 1
            if processes > 1:
                dist.barrier()
            start = time.perf_counter()
            norm = nn.utils.clip_grad_norm_(parameters, c["max_norm"])
            optimizer.step()
            seconds.append(time.perf_counter() - start)
            norms.append(norm.item())
        slowest = torch.tensor(seconds, dtype=torch.float64)
        if processes > 1:
            dist.all_reduce(slowest, dist.ReduceOp.MAX)
        if not done:
            continue
        if first:
            with open(exchange / f"{side}.parameters", "wb") as file:
                for parameter in parameters:
                    file.write(memory_of(parameter.detach()))
        first = False
        done.write(json.dumps({"seconds": slowest.tolist(), "losses": [], "norms": norms}) + "\n")
        done.flush()
    if processes > 1:
        leave()


def memory_of(values):
    """A contiguous tensor's bytes (NumPy, which would give them, need not be there)."""
    return (ctypes.c_char * (values.numel() * values.element_size())).from_address(values.data_ptr())


def main():
    exchange, processes = pathlib.Path(sys.argv[1]).resolve(), int(sys.argv[2])
    if processes == 1 or "RANK" in os.environ:
        return run_process(exchange, int(os.environ.get("RANK", 0)), processes, *sys.argv[3:])
    children = [subprocess.Popen([sys.executable, *sys.argv], env=dict(os.environ, RANK=str(rank)))
                for rank in range(processes)]
    sys.exit(max(abs(child.wait()) for child in children))


if __name__ == "__main__":
    main()
