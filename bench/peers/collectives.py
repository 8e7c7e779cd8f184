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


def run_case(isograd_comm, meeting, case, contestants):
    dtype = getattr(torch, case["dtype"])
    race = isograd_comm._Race(meeting, case["operation"], case["bytes"], dtype)
    input_numel, output_numel = race.numel()
    if case["operation"] == "barrier":
        for name, backend in contestants.items():
            race.add_backend(name, backend, None, None)
        race.add_group("group", contestants["ordinary"], None, None)
    else:
        def buffers(make):
            if case["operation"] == "all_gather_in_place":
                output = make(output_numel)
                return output.narrow(0, dist.get_rank() * input_numel, input_numel), output
            return make(input_numel), make(output_numel) if output_numel else None
        ordinary = buffers(lambda numel: torch.zeros(numel, dtype=dtype))
        shared = buffers(lambda numel: isograd_comm.empty_shared(numel, dtype, case["group"]))
        numel = max(input_numel, output_numel)
        race.add_backend("shared", contestants["ordinary"], *shared)
        race.add_group("group", contestants["ordinary"], *shared)
        for name, backend in contestants.items():
            race.add_backend(name, backend, *ordinary)
        race.add_memcpy("memcpy", torch.zeros(numel, dtype=dtype), torch.zeros(numel, dtype=dtype))
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
