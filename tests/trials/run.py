"""python run.py [CELL ...] [--json FILE]: which steps of public trainers equal one device (docs/trainers.md).

Without a name every cell. A cell is TRAINER-RANKS-ACCUMULATION-DATA-WRAP, transformers-2-4-padded-DDP; --list names them.
"""
import argparse
import json
import multiprocessing
import os
import pathlib
import queue
import socket
import sys
import tempfile
import time
import traceback

os.environ.update(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1",
                  GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))

import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401  once here and not once a rank
from loops import LOOPS, ONLY_ON_2_RANKS, WITHOUT_REMAINDER  # noqa: E402
from model_and_data import Cell  # noqa: E402

SECONDS = 120


def cells():
    """All of them, in the table's order."""
    for trainer in LOOPS:
        for ranks in (1, 2):
            if ranks == 1 and trainer in ONLY_ON_2_RANKS:
                continue
            wraps = ["none"] if ranks == 1 else ["DDP", "FSDP2"] if trainer == "lightning" else ["DDP"]
            for accumulation in (1, 4):
                remainder = ["remainder"] if accumulation > 1 and trainer not in WITHOUT_REMAINDER else []
                for data in ("even", "padded", "packed", "uneven", *remainder):
                    for wrap in wraps:
                        yield Cell(trainer, ranks, accumulation, data, wrap)


def _rank(cell, rank, port, folder, results):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(cell.ranks), LOCAL_WORLD_SIZE=str(cell.ranks),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0", GROUP_RANK="0")
    if cell.ranks == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    try:
        torch.set_num_threads(1)
        verdict = LOOPS[cell.trainer](cell, folder)
        said = {"passed": verdict.passed, "findings": verdict.findings, "text": str(verdict), "json": verdict.json}
    except BaseException as error:
        traceback.print_exc()
        said = {"error": f"{type(error).__name__}: {error}"}
    results.put((rank, said))
    results.close()
    results.join_thread()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # Gloo's threads may abort a process that is taken down in order


def made(cell):
    """Rank 0's verdict on the cell's step, which every rank has to give too."""
    context = multiprocessing.get_context("fork")  # the libraries are there already
    results = context.Queue()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=_rank, args=(cell, rank, port, folder, results)) for rank in range(cell.ranks)]
        for rank in ranks:
            rank.start()
        found, deadline = {}, time.monotonic() + SECONDS
        while len(found) < cell.ranks and time.monotonic() < deadline and any(rank.is_alive() for rank in ranks):
            try:
                found.update([results.get(timeout=0.2)])
            except queue.Empty:
                if any("error" in said for said in found.values()):
                    deadline = min(deadline, time.monotonic() + 20)
        for rank in ranks:
            rank.join(5 if len(found) == cell.ranks else 0.1)
            if rank.is_alive():
                rank.kill()
    failed = [said for _, said in sorted(found.items()) if "error" in said]
    if failed or len(found) < cell.ranks:
        return failed[0] if failed else {"error": f"no rank ended within {SECONDS} s"}
    if any(said["passed"] != found[0]["passed"] or said["findings"] != found[0]["findings"] for said in found.values()):
        return {"error": "ranks have other verdicts"}
    return found[0]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", nargs="*")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args()
    known = {cell.name: cell for cell in cells()}
    if options.list:
        print("\n".join(known))
        return
    if unknown := [name for name in options.cells if name not in known]:
        sys.exit(f"found no cell {unknown[0]}; expected one of --list")
    said = {}
    for name in options.cells or known:
        said[name] = made(known[name])
        print(f"== {name}\n{said[name].get('text') or said[name]['error']}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(said, indent=1))
    sys.exit(any("error" in one for one in said.values()))


if __name__ == "__main__":
    main()
