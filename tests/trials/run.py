"""python run.py [CELL ...] [--json FILE]: which steps of public trainers equal one device (docs/trials.md).

Without a name every cell. A cell is TRAINER-RANKS-ACCUMULATION-DATA-WRAP, transformers-2-4-padded-DDP, or `losses` and `deepspeed`, each
a program with many settings; --list names them. One whose packages are not installed says so, and the status is not 0.
"""
import argparse
import json
import multiprocessing
import os
import pathlib
import queue
import socket
import subprocess
import sys
import tempfile
import time
import traceback

os.environ.update(OMP_NUM_THREADS="1", ACCELERATE_USE_CPU="true", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1",
                  GLOO_SOCKET_IFNAME=os.environ.get("GLOO_SOCKET_IFNAME", "lo"))

import torch  # noqa: E402
import torch._dynamo  # noqa: E402, F401  once here and not once a rank
from table import Cell, cells, PROGRAMS, TRAINERS  # noqa: E402

SECONDS = 120


def _rank(cell, rank, port, folder, results):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(cell.ranks), LOCAL_WORLD_SIZE=str(cell.ranks),
                      MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), NODE_RANK="0", GROUP_RANK="0")
    if cell.ranks == 1:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[name]
    try:
        torch.set_num_threads(1)
        verdict = cell.row.make(cell, folder)
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


def made_by(program, settings):
    """{setting: verdict} of a program that makes all of them; {"": error} where it fails."""
    folder = pathlib.Path(__file__).resolve().parents[1] / "python_package"
    command = [sys.executable, "-W", "ignore", program.file, *program.arguments, *(settings or program.every)]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=20 * SECONDS,
                          env={**os.environ, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0"})
    if done.returncode:
        return {"": {"error": f"{program.file} ended with {done.returncode}: {done.stderr.strip().splitlines()[-1]}"}}
    found = json.loads(done.stdout.splitlines()[-1])
    found = found[0] if isinstance(found, list) else found  # that of rank 0
    return {name: {"passed": said["passed"], "findings": said["said"], "text": said["text"]} for name, said in found.items()}


def results(names):
    """(name, what was said) of cells, and of programs by their settings; PROGRAM/SETTING is one of them."""
    known = {cell.name: cell for cell in cells()}
    for name in names:
        cell, (program, _, setting) = known.get(name), name.partition("/")
        row = cell.row if cell else PROGRAMS[program]
        if row.missing:
            yield name, {"not run": f"needs {row.missing}"}
        elif cell:
            yield name, made(cell)
        else:
            for one, said in made_by(row, [setting] if setting else []).items():
                yield f"{program}/{one}", said


def as_text(said):
    """A cell of the page's tables: equal, or the ratios of the parameters' gradients, the largest distance of one, and the names."""
    if kind(said) != "differs":
        return kind(said)
    parameters = said["json"]["parameters"]
    largest = max(parameter["norm"] for parameter in parameters)  # a key's bias has a gradient of rounding alone
    parameters = [parameter for parameter in parameters if parameter["norm"] > 1e-6 * largest]
    least, most = (of(parameter["ratio"] for parameter in parameters) for of in (min, max))
    names = ", ".join(f"`{name}`" for name in said["findings"])
    if most - least <= 1e-4 * most:
        return f"{round((least + most) / 2, 4):g}: {names}"
    return f"{least:.3f} to {most:.3f}, off by {max(parameter['error'] for parameter in parameters):.2g}: {names}"


def tables(said):
    """The page's two tables: how many cells of each trainer are equal; and the rows of documents and wraps in which one is not, those
    that are the same in one."""
    counts = ["| trainer | loop or model | equal cells |", "|---|---|---|"]
    columns = [(ranks, accumulation) for ranks in (1, 2) for accumulation in (1, 4)]
    rows = {}  # by what the cells say
    for name, trainer in TRAINERS.items():
        of = {cell: said[cell.name] for cell in cells() if cell.trainer == name and cell.name in said}
        counts.append(f"| `{name}` | {trainer.says} | {sum(kind(one) == 'equal' for one in of.values())} of {len(of)} |")
        for wrap in trainer.wraps:
            for data in trainer.data:
                row = [of.get(Cell(name, ranks, accumulation, data, wrap if ranks > 1 else "none")) if ranks > 1 or wrap == trainer.wraps[0]
                       else None for ranks, accumulation in columns]
                if any(one and kind(one) != "equal" for one in row):
                    rows.setdefault(" | ".join(as_text(one) if one else "" for one in row), []).append(
                        f"`{name}`, {data}" if wrap == "DDP" else f"`{name}`, {data}, {wrap}")
    head = " | ".join(["trainer, documents", *(f"{ranks} rank{'s' * (ranks > 1)}, accumulation {accumulation}"
                                               for ranks, accumulation in columns)])
    return "\n".join([*counts, "", f"| {head} |", "|" + "---|" * 5, *(f"| {'; '.join(where)} | {row} |" for row, where in rows.items())])


def kind(said):
    return next((key for key in ("error", "not run") if key in said), "equal" if said.get("passed") else "differs")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", nargs="*")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--tables", type=pathlib.Path, metavar="JSON", help="of verdicts that --json wrote: the page's tables")
    options = parser.parse_args()
    known = [*(cell.name for cell in cells()), *PROGRAMS]
    if options.tables:
        print(tables(json.loads(options.tables.read_text())))
        return
    if options.list:
        print("\n".join(known))
        return
    if unknown := [name for name in options.cells if name not in known and name.partition("/")[0] not in PROGRAMS]:
        sys.exit(f"found no cell {unknown[0]}; expected one of --list, or one of its last two with /SETTING behind it")
    said = {}
    for name, one in results(options.cells or known):
        said[name] = one
        print(f"== {name}\n{one.get('text') or ': '.join(*one.items())}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(said, indent=1))
    kinds = [kind(one) for one in said.values()]
    print(f"{len(said)} cells: " + ", ".join(f"{kinds.count(each)} {each}" for each in ("equal", "differs", "not run", "error")))
    sys.exit("error" in kinds or "not run" in kinds)


if __name__ == "__main__":
    main()
