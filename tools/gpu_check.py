"""`./dev gpu-check`: checks and benchmarks for a machine with a GPU, parts in an order of value, until a time limit.

    python3 tools/gpu_check.py --built build/release [--out DIR] [--limit SECONDS]     runs them
    python3 tools/gpu_check.py --built build/release --pack DIR                        makes a folder for another machine

--built names a build folder, or a folder that --pack made: the programs with the libraries that a machine with torch may
lack. They find LibTorch where this Python has torch. Parts that check run side by side; so do the first compilations of
torch.compile, whose results the bench finds in a cache. Then each case of the bench runs alone. Every part is a child with
a limit of its own. DIR gets result.json, anew after every part, and log.txt.
"""
import argparse
import importlib.util
import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Cases of the bench, the most important first.
BENCH = [("large", "bfloat16", ["eager", "compiled", "autocast", "autocast-compiled"]),
         ("8B-layer", "bfloat16", ["eager", "compiled", "autocast", "autocast-compiled"]),
         ("medium", "bfloat16", ["eager", "autocast"]), ("small", "bfloat16", ["eager", "autocast"]),
         ("compute", "bfloat16", ["eager", "autocast"]), ("compute", "float32", ["eager"]),
         ("large", "float32", ["eager", "compiled"]), ("communication", "bfloat16", ["eager", "autocast"]),
         ("medium", "float32", ["eager"]), ("small", "float32", ["eager"]), ("communication", "float32", ["eager"]),
         ("medium", "bfloat16", ["compiled"]), ("small", "bfloat16", ["compiled"]), ("8B-layer", "float32", ["eager"])]
# Measures the machine's peaks in a process of its own.
PEAKS = r"""
import json, statistics, sys, time, torch
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "name": torch.cuda.get_device_name(),
         "memory_bytes": torch.cuda.get_device_properties(0).total_memory, "gpus": torch.cuda.device_count()}
def rate(work, amount):
    times = []
    for i in range(13):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record(); work(); end.record(); torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return amount / statistics.median(times[3:])
def product(dtype, n):
    a, b = torch.randn(n, n, device="cuda").to(dtype), torch.randn(n, n, device="cuda").to(dtype)
    return rate(lambda: a @ b, 2 * n ** 3 / 1e12)
found["bf16_tflops"] = product(torch.bfloat16, 8192)
found["fp32_tflops"] = product(torch.float32, 4096)
torch.backends.cuda.matmul.allow_tf32 = True
found["tf32_tflops"] = product(torch.float32, 8192)
a = torch.randn(1 << 28, device="cuda"); b = torch.empty_like(a)
found["copy_tb_per_s"] = rate(lambda: b.copy_(a), 2 * a.nbytes / 1e12)
print(json.dumps(found))
"""


class Part:
    """A child, its limit in seconds, and what came of it."""

    def __init__(self, name, command, limit, environment=None, value=None):
        self.name, self.command, self.limit = name, [str(word) for word in command], limit
        self.environment, self.value = environment or {}, value
        self.status, self.seconds, self.output, self.found, self.child = "not run", 0.0, "", None, None

    def run(self, environment, until):
        """Until it ends, its own limit or `until` (a time of the clock) is over; what it printed is kept."""
        begin = time.monotonic()
        limit = min(self.limit, until - begin)
        if limit < 2:
            return
        with tempfile.TemporaryFile() as out:
            self.child = child = subprocess.Popen(self.command, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, cwd=ROOT,
                                                  env=dict(environment, **self.environment), start_new_session=True)
            try:
                status = child.wait(limit)
                self.status = "passed" if status == 0 else f"failed ({status})"
            except subprocess.TimeoutExpired:
                self.status = f"out of time ({limit:.0f} s)"
            finally:
                end_group(child)
            out.seek(0)
            self.output = out.read().decode(errors="replace")
        if self.status == "passed" and "nothing was checked" in self.output:
            self.status = "failed (no GPU)"
        self.seconds = time.monotonic() - begin
        try:
            self.found = self.value(self.output) if self.value else None
        except (OSError, ValueError, IndexError, AttributeError) as problem:
            self.found = {"problem": f"no result: {problem}"}

    def record(self):
        return {"part": self.name, "status": self.status, "seconds": round(self.seconds, 1), "command": " ".join(self.command)[:300],
                "found": self.found, "output": self.output[-3000:]}


def end_group(child):
    """Also what the child had started: it is the first of a session of its own."""
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    child.wait()


def torch_folder():
    spec = importlib.util.find_spec("torch")
    if spec is None:
        sys.exit(f"gpu-check: no torch in {sys.executable}; expected the one whose LibTorch isograd was built for. Run it with "
                 "that Python, or install torch.")
    return pathlib.Path(spec.submodule_search_locations[0])


def last_line(pattern):
    def value(output):
        lines = [line for line in output.splitlines() if re.search(pattern, line)]
        return lines[-1].strip() if lines else None
    return value


def checks(programs, arguments, folder):
    device, isograd = programs / "tests/device_check", programs / "bin/isograd"
    count = last_line(r"cases, \d+ failed|nothing was checked")
    launch = [isograd, "launch", "-n", 2]
    # On one GPU NCCL runs only between ranks that it takes for those of two hosts.
    hosts = ["sh", "-c", 'if [ "${ISOGRAD_GPUS:-1}" -eq 1 ]; then export NCCL_HOSTID=rank$RANK; fi; exec "$@"', "sh"]
    verdict = folder / "verify.json"

    def grades(_):
        read = json.loads(verdict.read_text())
        return {"layouts": len(read["grades"]), "grades": read["grades"]}

    both_means = {"ISOGRAD_FULL_TESTS": "1"}
    parts = [Part("device_check", [device, "--device", "cuda"], 150, both_means, count),
             Part("device_check, 2 ranks, shm", [*launch, "--", device, "--device", "cuda"], 150, both_means, count),
             Part("device_check, 2 ranks, NCCL", [*launch, "--backend", "nccl", "--", *hosts, device, "--device", "cuda", "--backend",
                                                  "nccl"], 150, {**both_means, "NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1"}, count),
             Part("verify, all layouts, 2 ranks, shm", [
                 isograd, "verify", arguments.config, "--device", "cuda", "--backend", "shm", "--ranks", 2, "--layout", "all",
                 "--json", verdict, "--set", f'run.directory="{folder}/run"',
                 "--set", f'data.cache="{folder}/cache"'], 150, value=grades)]
    return [part for part in parts if not (arguments.stand_in and "NCCL" in part.name)]


def bench_part(programs, folder, case, dtype, peers, seconds, limit=90, name="bench"):
    records = folder / f"{name} {case} {dtype} {len(peers)}.json".replace(" ", "_")

    def value(_):
        return [dict(record, **{"case": case, "dtype": dtype}) for record in json.loads(records.read_text())]

    command = [programs / "bin/isograd", "bench", "step", "--device", "cuda", "--ranks", 1, "--case", case, "--dtype", dtype,
               "--seconds", seconds, "--json", records]
    for peer in peers:
        command += ["--peer", peer]
    return Part(f"{name} {case} {dtype}" + (f" ({', '.join(peers)})" if peers == ["compiled"] else ""), command, limit,
                {"OMP_NUM_THREADS": str(os.cpu_count())}, value)  # for the weights: its sides have one thread each


def table(parts, device):
    """The one that is printed: checks, then a line for each side of each case."""
    lines = [f"{'part':<46} {'status':<22} {'s':>6}  result"]
    for part in parts:
        found = part.found if isinstance(part.found, str) else ""
        if isinstance(part.found, dict):
            found = f"{part.found['layouts']} layouts and meshes" if "layouts" in part.found else str(part.found)[:150]
        lines.append(f"{part.name:<46} {part.status:<22} {part.seconds:>6.1f}  {found}")
    lines += ["", f"{'case':<14} {'dtype':<9} {'side':<28} {'ms':>9} {'ours x':>7} {'TFLOP/s':>8} {'of peak':>8} {'kernels':>8} "
              f"{'waits':>6} {'to host':>8} {'idle':>6} {'peak MiB':>9}"]
    for part in parts:
        if not isinstance(part.found, list) or part.name.startswith("warm"):
            continue
        ours_shown = False
        for record in part.found:
            peak = (device or {}).get("bf16_tflops" if record["dtype"] == "bfloat16" else "fp32_tflops")
            sides = [("peer", record["peer_name"], f"{record['ratio']:.2f}")]
            if not ours_shown:
                sides.insert(0, ("ours", "isograd", ""))
                ours_shown = True
            for side, title, ratio in sides:
                did, rate = record.get(f"{side}_device", {}), record["flops"] / record[f"{side}_ms"] / 1e9
                lines.append(
                    f"{record['case']:<14} {record['dtype']:<9} {title:<28} {record[f'{side}_ms']:>9.2f} {ratio:>7} {rate:>8.1f} "
                    f"{f'{100 * rate / peak:.0f} %' if peak else '':>8} {did.get('kernels', 0):>8.0f} {did.get('waits', 0):>6.1f} "
                    f"{did.get('copies_to_host', 0):>8.1f} {100 * did.get('idle', 0):>4.0f} % {did.get('peak_bytes', 0) / 2**20:>9.0f}"
                    f" {did.get('problem', '')}")
    return "\n".join(lines)


def longest_kernels(parts):
    lines = []
    for part in parts:
        if isinstance(part.found, list) and part.found and part.found[0].get("ours_device", {}).get("top"):
            did = part.found[0]["ours_device"]
            lines.append(f"\n{part.name}: isograd's kernels of a step, {did['busy_ms']:.2f} of {did['step_ms']:.2f} ms busy")
            lines += [f"  {kernel['ms']:>8.3f} ms {kernel['count']:>6.1f} x  {kernel['name'][:100]}" for kernel in did["top"]]
            lines += [f"  {gap['ms']:>8.3f} ms idle between {gap['before']} and {gap['after']}" for gap in did.get("gaps", [])]
    return "\n".join(lines)


def pack(built, to):
    """Programs without symbols, and the libraries that a machine with torch and glibc may lack."""
    shutil.rmtree(to, ignore_errors=True)
    base = re.compile(r"^(ld-linux|lib(c|m|dl|rt|pthread|util|resolv|gcc_s|gomp|stdc\+\+|torch.*|c10.*|shm|nccl|cu.*|nv.*)\.so)")
    for name in ("bin/isograd", "libexec/isograd", "tests/device_check"):
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["strip", "-o", to / name, built / name], check=True)
        listed = subprocess.run(["ldd", built / name], check=True, capture_output=True, text=True).stdout
        for library, path in re.findall(r"(\S+) => (/\S+)", listed):
            if not base.match(library):
                (to / "lib").mkdir(exist_ok=True)
                shutil.copy(path, to / "lib" / library)
    size = sum(path.stat().st_size for path in to.rglob("*") if path.is_file())
    print(f"packed {to}: {size / 2**20:.1f} MiB, with {', '.join(sorted(p.name for p in (to / 'lib').glob('*'))) or 'no libraries'}")


def main():
    parser = argparse.ArgumentParser(prog="./dev gpu-check")
    parser.add_argument("--built", type=pathlib.Path, required=True, help="a build folder, or one that --pack made")
    parser.add_argument("--pack", type=pathlib.Path, help="make a folder for another machine, and run nothing")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/gpu-check", help="gets result.json and log.txt")
    parser.add_argument("--limit", type=float, default=540, help="seconds, after which it ends with what it has")
    parser.add_argument("--seconds", type=float, default=4, help="of taking turns in each case of the bench")
    parser.add_argument("--parts", default="", help="only those whose name has this regular expression")
    parser.add_argument("--config", type=pathlib.Path, default=ROOT / "examples/first_light.toml", help="what verify runs")
    parser.add_argument("--stand-in", type=pathlib.Path, help="tests/libisograd_standin_gpu.so in a GPU's place")
    arguments = parser.parse_args()
    begin = time.monotonic()
    arguments.built = arguments.built.resolve()
    if arguments.pack:
        return pack(arguments.built, arguments.pack)
    arguments.out.mkdir(parents=True, exist_ok=True)
    torch = torch_folder()
    folder = pathlib.Path(tempfile.mkdtemp(prefix="isograd-gpu-check-"))
    libraries = [arguments.built / "lib", torch / "lib", *os.environ.get("LD_LIBRARY_PATH", "").split(":")]
    environment = dict(os.environ, LD_LIBRARY_PATH=":".join(str(each) for each in libraries if str(each)), PYTHON=sys.executable,
                       ISOGRAD_PEERS=str(ROOT / "bench/peers"), TORCHINDUCTOR_CACHE_DIR=str(folder / "inductor"),
                       TRITON_CACHE_DIR=str(folder / "triton"), TORCHINDUCTOR_COMPILE_THREADS="4", TMPDIR=str(folder),
                       OMP_NUM_THREADS="1")
    cases = BENCH
    if arguments.stand_in:
        cases = [("tiny", "bfloat16", ["eager", "autocast"])]
        python = folder / "python"  # which torch is not to find the stand-in in
        python.write_text(f'#!/bin/sh\nunset LD_PRELOAD\nexec {sys.executable} "$@"\n')
        python.chmod(0o755)
        environment |= {"LD_PRELOAD": str(arguments.stand_in.resolve()), "ISOGRAD_PEER_DEVICE": "cpu", "PYTHON": str(python)}

    machine = [] if arguments.stand_in else [Part("machine", [sys.executable, "-c", PEAKS], 90,
                                                  value=lambda output: json.loads(output.splitlines()[-1]))]
    warm = [bench_part(arguments.built, folder, case, dtype, [peer for peer in peers if peer.endswith("compiled")], 0.1, 150, "warm")
            for case, dtype, peers in cases[:2] if not arguments.stand_in]
    together = checks(arguments.built, arguments, folder) + warm
    alone = [bench_part(arguments.built, folder, *case, arguments.seconds) for case in cases]
    parts = [part for part in machine + together + alone if re.search(arguments.parts, part.name)]
    until = begin + arguments.limit - 5

    def save(final=False):
        device = next((part.found for part in parts if part.name == "machine" and isinstance(part.found, dict)), None)
        text = table(parts, device)
        result = {"seconds": round(time.monotonic() - begin, 1), "limit": arguments.limit, "device": device,
                  "parts": [part.record() for part in parts], "table": text.splitlines()}
        fresh = arguments.out / "result.json.new"
        fresh.write_text(json.dumps(result, indent=1) + "\n")
        fresh.replace(arguments.out / "result.json")
        log = "".join(f"==== {part.name}: {part.status}, {part.seconds:.1f} s\n$ {' '.join(part.command)[:1000]}\n{part.output}\n"
                      for part in parts)
        (arguments.out / "log.txt").write_text(log[:8 << 20])
        if final:
            for part in parts:
                if part.status.startswith(("failed", "out of time")):
                    print(f"\n==== {part.name}: {part.status}\n{part.output[-1200:]}")
            print(longest_kernels([part for part in parts if part.name.startswith("bench")][:2]))
            print("\n" + text)
            left = [part.name for part in parts if part.status == "not run"]
            print(f"\n{len(parts) - len(left)} of {len(parts)} parts in {time.monotonic() - begin:.0f} s; not run: {', '.join(left) or 'none'}")

    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(f"signal {number}"))
    try:
        for part in [part for part in machine if part in parts]:
            part.run(environment, until)
            environment["ISOGRAD_GPUS"] = str((part.found or {}).get("gpus", 1))
            save()
        threads = [threading.Thread(target=part.run, args=(environment, until), daemon=True) for part in together if part in parts]
        for thread in threads:
            thread.start()
            if arguments.stand_in:
                thread.join()  # the tests have a core
        for thread in threads:
            thread.join()
        save()
        for part in [part for part in alone if part in parts]:
            part.run(environment, until)
            save()
            print(f"{time.monotonic() - begin:5.0f} s  {part.name}: {part.status}", flush=True)
    finally:
        for part in parts:
            if part.child and part.child.returncode is None:
                end_group(part.child)
        save(final=True)
        shutil.rmtree(folder, ignore_errors=True)
    sys.exit(any(part.status.startswith("failed") for part in parts))


if __name__ == "__main__":
    main()
