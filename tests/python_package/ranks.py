"""Starts ranks as processes of one Gloo group, which is cheap: they are copies of a process that has torch already."""
import contextlib
import datetime
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import traceback

import torch
import torch._dynamo  # noqa: F401  DDP brings it when it is first used: once here, and not once a rank
import torch.distributed as dist

TIMEOUT = datetime.timedelta(seconds=60)


def _rank(rank, size, store, run, results, backend):
    try:
        torch.set_num_threads(1)
        dist.init_process_group(backend, init_method=f"file://{store}", rank=rank, world_size=size, timeout=TIMEOUT)
        results.put((rank, run(rank)))
        results.close()
        results.join_thread()
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads may abort a process that is taken down in order


def results_of(rank, good, bad):
    """By case: the result of each good one, and the error that each bad one ends with, None where it does not."""
    found = {name: case(rank) for name, case in good.items()}
    for name, case in bad.items():
        try:
            case(rank)
            found[name] = None
        except Exception as error:
            found[name] = f"{type(error).__name__} {error}"
    return found


def on_ranks(size, run, backend="gloo", seconds=120):
    """[what run(rank) gave], a list over the ranks; SystemExit where one failed."""
    context = multiprocessing.get_context("fork")  # before this process has threads of its own
    results = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(rank, size, f"{folder}/store", run, results, backend))
                 for rank in range(size)]
        for rank in ranks:
            rank.start()
        found, deadline = {}, time.monotonic() + seconds
        while len(found) < size and time.monotonic() < deadline and not any(rank.exitcode for rank in ranks):
            with contextlib.suppress(queue.Empty):
                found.update([results.get(timeout=0.2)])
        for rank in ranks:
            rank.join(10 if len(found) == size else 0.1)
            if rank.is_alive():
                rank.kill()
    if len(found) != size:
        sys.exit(f"ranks ended with {[rank.exitcode for rank in ranks]} (above)")
    return [found[rank] for rank in range(size)]
