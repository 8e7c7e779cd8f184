"""One rank of the tests of torch.distributed over isograd: runs scenarios over Gloo and over isograd, compares.

    python rank.py EXCHANGE SEED [--faulty] SCENARIO ...

RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say who it is. It writes EXCHANGE/RANK.json: what went wrong in each
scenario, null where nothing did. A scenario is a function of a Context that returns what it computed: tensors,
Close, or lists, tuples and dicts of them. It is run twice, with a world of one backend each; what comes out must be
equal. With --faulty the last rank feeds wrong numbers into the run over isograd: the comparison has to notice.
"""
import datetime
import gc
import json
import os
import pathlib
import random
import sys
import traceback

import torch
import torch.distributed as dist

import isograd_comm  # noqa: F401  (registers the backend)
from context import Context, difference

TIMEOUT = datetime.timedelta(seconds=60)  # for busy machines; nothing here waits that long


def scenarios():
    import collectives
    import training
    found = {}
    for module in (collectives, training):
        found.update({name: function for name, function in vars(module).items()
                      if getattr(function, "is_scenario", False)})
    return found


def run_over(backend, name, store, rank, size, seed, faulty):
    context = Context(rank, size, backend, seed, faulty)
    torch.manual_seed(seed)
    random.seed(seed)
    if backend == "gloo":
        dist.set_debug_level(dist.DebugLevel.OFF)  # DDP over Gloo on the CPU is a segmentation fault under DETAIL (torch 2.13)
    else:
        dist.set_debug_level_from_env()
    dist.init_process_group(backend, store=dist.PrefixStore(f"{name}/{backend}/{faulty}", store), rank=rank,
                            world_size=size, timeout=TIMEOUT)
    checked = backend != "gloo" and os.environ.get("TORCH_DISTRIBUTED_DEBUG") == "DETAIL"
    assert checked == hasattr(dist.group.WORLD._get_backend(torch.device("cpu")), "wrapped_pg")
    try:
        result = scenarios()[name](context)
        dist.barrier()  # Gloo may still be connecting elsewhere
    finally:
        dist.destroy_process_group()
    assert bool(context.planted) == context.faulty, "the scenario gave no place to the planted fault"
    return result


def main():
    exchange, seed = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    faulty = sys.argv[3] == "--faulty"
    names = sys.argv[4 if faulty else 3:]
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), None, False, TIMEOUT)
    outcomes = {}
    for name in names:
        try:
            results = [run_over(backend, name, store, rank, size, seed, faulty) for backend in ("gloo", "isograd")]
            found = difference(*results)
            outcomes[name] = found and f"Gloo and isograd differ: {found}"
        except Exception:
            outcomes[name] = "raised " + traceback.format_exc()
        # A rank that failed must not start the next scenario while another still waits in this one.
        store.set(f"over/{name}/{rank}", "")
        store.wait([f"over/{name}/{r}" for r in range(size)], 2 * TIMEOUT)
    (exchange / f"{rank}.json").write_text(json.dumps(outcomes))
    # Hosted by the test, and stopped as soon as it has all answers.
    del store
    # A group of Gloo's that a wrapper's cycle of references keeps would otherwise live until the interpreter ends,
    # where its thread may no longer let go of a tensor (the test of the backend's name says why).
    gc.collect()


if __name__ == "__main__":
    main()
