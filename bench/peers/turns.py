"""The peers of `isograd bench` share this: how their ranks start, take turns and end.

    python PEER.py EXCHANGE RANKS SIDE [...]      starts the ranks

EXCHANGE is a folder with what the peer's own description names, and
    case.json     what to compute
    SIDE.go.R     one byte per turn for rank R, "p" for one under the profiler; end of file: done
    SIDE.done     one JSON line per turn, from rank 0: {"seconds": [...], "losses": [...], "norms": [...]}
"""
import argparse
import contextlib
import ctypes
import functools
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import torch
import torch.distributed as dist

LIBC = ctypes.CDLL(None)


class Rank:
    """One process of a side."""

    def __init__(self, exchange, rank, ranks, side):
        self.exchange, self.rank, self.ranks, self.side = pathlib.Path(exchange).resolve(), rank, ranks, side
        torch.set_num_threads(1)

    def case(self):
        return json.loads((self.exchange / "case.json").read_text())

    def meet(self, backend="gloo", **how):
        """Joins the other ranks in a process group."""
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        how = how or {"init_method": f"file://{self.exchange}/{self.side}.store"}
        dist.init_process_group(backend, rank=self.rank, world_size=self.ranks, **how)

    def turns(self):
        """The byte of each turn; sleeps until it comes."""
        with open(self.exchange / f"{self.side}.go.{self.rank}", "rb", buffering=0) as go:
            self.done = open(self.exchange / f"{self.side}.done", "w") if self.rank == 0 else None
            while turn := go.read(1):
                yield turn

    def answer(self, **turn):
        if self.done:
            self.done.write(json.dumps(turn) + "\n")
            self.done.flush()


def main(run):
    """Starts the ranks; each calls run(Rank, *further arguments)."""
    exchange, ranks, side = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    if ranks == 1 or "RANK" in os.environ:
        run(Rank(exchange, int(os.environ.get("RANK", 0)), ranks, side), *sys.argv[4:])
        if dist.is_initialized():
            leave()
        return
    end = functools.partial(end_with, os.getpid())
    children = [subprocess.Popen([sys.executable, *sys.argv], env=dict(os.environ, RANK=str(rank)), preexec_fn=end)
                for rank in range(ranks)]
    sys.exit(max(abs(child.wait()) for child in children))


def end_with(parent):
    """A rank that still starts would wait at its pipe for ever when the process that started it is gone."""
    LIBC.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG
    if os.getppid() != parent:
        os._exit(1)


def stop(server):
    """Ends a server that a side started: it has 30 s to end by itself."""
    server.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        server.wait(timeout=30)
    server.kill()
    server.wait()


def leave():
    """Ends this process at once, with success. Call it where all that was measured has been written.

    A thread of Gloo that lets go of a tensor while the interpreter is being taken down aborts the process
    (std::terminate), and with it a benchmark that went well: so the interpreter is not taken down.
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def timed(work):
    """Seconds that it takes, and its result."""
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def peak_growth(work):
    """Bytes by which the resident set grows at its peak, and the result of the work."""
    def status_bytes(name):
        for line in pathlib.Path("/proc/self/status").read_text().splitlines():
            if line.startswith(name + ":"):
                return 1024 * int(line.split()[1])
        return 0
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    result = work()
    return status_bytes("VmHWM") - before, result


def arguments(description, **numbers):
    """The options of a comparison that is started by hand: a number each."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    return parser
