"""The ranks of `isograd bench comm`: Gloo, isograd and, under mpirun, MPI, in the same processes, taking turns.

    python collectives.py EXCHANGE      started once for each rank, by isograd or by mpirun

Every contestant is a c10d backend and is timed by one loop in C++ (python/isograd_comm/timing.cpp).

EXCHANGE holds
    cases.json       {"module": folder of isograd_comm, "cases": [{"operation", "bytes", "dtype", "seconds", ...}]}
    results.jsonl    written by rank 0, a line for each case: {..., "round_trip": s, "seconds": {contestant: [s, ...]}}
"""
import datetime
import json
import os
import pathlib
import sys

import torch
import torch.distributed as dist

CPU = torch.device("cpu")
TIMEOUT = datetime.timedelta(minutes=3)


def backend_of(name):
    return dist.new_group(backend=name, timeout=TIMEOUT)._get_backend(CPU)


def sizes_of(operation, numel, ranks):
    """Elements of a rank's input and output, of which the larger has `numel` at most; an output of 0: in place."""
    part = numel // ranks
    if operation.startswith("all_gather"):
        return part, part * ranks
    return {"reduce_scatter": (part * ranks, part), "all_to_all": (part * ranks, part * ranks)}.get(operation, (numel, 0))


def pattern(numel, rank, dtype):
    """Element i of rank r: i mod 32, plus r. In bf16 too their sum over the ranks is exact."""
    return (torch.arange(32.0) + rank).to(dtype).repeat(numel // 32 + 1)[:numel]


def right_result(operation, sizes, rank, ranks, dtype):
    if operation in ("broadcast", "round_trip"):
        return pattern(sizes[0], 0 if operation == "broadcast" or rank < 2 else rank, dtype)
    parts = (pattern(sizes[0], other, dtype) for other in range(ranks))
    if operation in ("all_reduce", "reduce_scatter"):
        total = sum(parts)
        return total if operation == "all_reduce" else total.view(ranks, -1)[rank]
    return torch.cat(list(parts) if operation.startswith("all_gather") else [part.view(ranks, -1)[rank] for part in parts])


def run_case(isograd_comm, meeting, case, contestants):
    operation, dtype = case["operation"], getattr(torch, case["dtype"])
    rank, ranks = dist.get_rank(), dist.get_world_size()
    sizes = sizes_of(operation, case["bytes"] // dtype.itemsize, ranks)
    race = isograd_comm._Race(meeting, operation)

    def enter(add, name, backend, input=None, output=None):
        """A first call, not timed, whose result must be right."""
        add(name, backend, input, output)
        if input is None:
            return race.call()
        if output is not None:
            output.fill_(-1)
        input.copy_(pattern(sizes[0], rank, dtype))
        race.call()
        if not torch.equal(input if output is None else output, right_result(operation, sizes, rank, ranks, dtype)):
            raise RuntimeError(f"{operation} of {name} gave a wrong result on rank {rank}")

    def buffers(make):
        if operation == "all_gather_in_place":
            output = make(sizes[1])
            return output.narrow(0, rank * sizes[0], sizes[0]), output
        return make(sizes[0]), make(sizes[1]) if sizes[1] else None

    ordinary = shared = (None, None)
    if operation != "barrier":
        ordinary = buffers(lambda numel: torch.zeros(numel, dtype=dtype))
        shared = buffers(lambda numel: isograd_comm.empty_shared(numel, dtype, case["group"]))
        enter(race.add_backend, "shared", contestants["ordinary"], *shared)
    enter(race.add_group, "group", contestants["ordinary"], *shared)
    for name, backend in contestants.items():
        enter(race.add_backend, name, backend, *ordinary)
    if operation != "barrier":
        race.add_memcpy("memcpy", *(torch.zeros(max(sizes), dtype=dtype) for _ in range(2)))
        race.call()
    return race.run(case["seconds"], case["fewest"], case["most"])


def main():
    exchange = pathlib.Path(sys.argv[1])
    plan = json.loads((exchange / "cases.json").read_text())
    sys.path.insert(0, plan["module"])
    import isograd_comm
    under_mpi = "OMPI_COMM_WORLD_RANK" in os.environ
    rank, size = (int(os.environ["OMPI_COMM_WORLD_" + name if under_mpi else variable])
                  for name, variable in (("RANK", "RANK"), ("SIZE", "WORLD_SIZE")))
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    store = dist.FileStore(str(exchange / "store"), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size, timeout=TIMEOUT)
    group = dist.new_group(backend="isograd", timeout=TIMEOUT)
    contestants = {"ordinary": group._get_backend(CPU), "gloo": dist.group.WORLD._get_backend(CPU)}
    if under_mpi:
        contestants["mpi"] = backend_of("isograd_mpi")
    meeting = isograd_comm._Meeting(dist.PrefixStore("meeting", store), rank, size)
    with open(exchange / "results.jsonl" if rank == 0 else os.devnull, "w") as results:
        for number, case in enumerate(plan["cases"], 1):
            if rank == 0 and sys.stderr.isatty():
                print(f"\r{number}/{len(plan['cases'])} {case['operation']} {case['bytes']} bytes\033[K", end="",
                      file=sys.stderr, flush=True)
            trip = meeting.round_trip()
            seconds = run_case(isograd_comm, meeting, dict(case, group=group), contestants)
            if rank == 0:
                results.write(json.dumps({**case, "round_trip": trip, "seconds": seconds}) + "\n")
                results.flush()
    if rank == 0 and sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
