"""Runs a command as on a processor with fewer instruction sets than this one has, or of another maker.

    processors.py LEVEL COMMAND...     LEVEL: scalar, avx2, avx512 (without instructions for bf16), intel, intel-avx2

Every library that chooses kernels by the processor is held to the level by its own variable: isograd, LibTorch,
oneDNN, MKL. MKL goes by the maker too: "intel" has it take its way for Intel's processors (standin_intel.cpp), which
rounds differently and by the number of threads. Status: the command's; 77 where this processor or build lacks the
level. `./dev test --as LEVEL` runs the tests so.
"""
import os
import pathlib
import sys

LEVELS = {
    "scalar": dict(ISOGRAD_PROCESSOR="scalar", ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41",
                   MKL_ENABLE_INSTRUCTIONS="SSE4_2"),
    "avx2": dict(ISOGRAD_PROCESSOR="avx2", ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2",
                 MKL_ENABLE_INSTRUCTIONS="AVX2"),
    "avx512": dict(ISOGRAD_PROCESSOR="avx512", ATEN_CPU_CAPABILITY="avx512", ONEDNN_MAX_CPU_ISA="AVX512_CORE",
                   MKL_ENABLE_INSTRUCTIONS="AVX512"),
}
BUILD = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", pathlib.Path(__file__).resolve().parent.parent / "build/release"))
STANDIN = BUILD.resolve() / "tests/libisograd_standin_intel.so"
INTEL = {"intel": {}, "intel-avx2": LEVELS["avx2"]}
NEEDS = {"scalar": set(), "avx2": {"avx2", "fma"}, "intel": set(), "intel-avx2": {"avx2", "fma"},
         "avx512": {"avx2", "fma", "avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512cd"}}


def missing(level):
    """Needs of the level that this processor (instruction sets) or build (the stand-in) lacks."""
    try:
        lines = pathlib.Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    flags = next((set(line.split(":")[1].split()) for line in lines if line.startswith("flags")), set())
    standin = [STANDIN.name] if level in INTEL and not STANDIN.exists() else []
    return sorted(NEEDS[level] - flags) + standin


def environment(level, base=None):
    """The variables of a process held to the level."""
    base = os.environ if base is None else base
    if level in LEVELS:
        return {**base, **LEVELS[level]}
    return {**base, **INTEL[level], "LD_PRELOAD": " ".join([str(STANDIN), base.get("LD_PRELOAD", "")]).strip()}


def main():
    if len(sys.argv) < 3 or sys.argv[1] not in (*LEVELS, *INTEL):
        print(__doc__, file=sys.stderr)
        return 2
    level, command = sys.argv[1], sys.argv[2:]
    if missing(level):
        print(f"skipped: this processor has no {', '.join(missing(level))}")
        return 77
    os.execvpe(command[0], command, environment(level))


if __name__ == "__main__":
    sys.exit(main())
