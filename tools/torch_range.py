"""`./dev torch-range [VERSION ...]`: builds isograd with other versions of torch and smoke-tests it; prints a table.

    ./dev torch-range 2.15 2.11.0        these; without a version every one that cmake/FindLibTorch.cmake accepts
    ./dev torch-range --keep 2.15        leaves build/torch-2.15 with its environment (4 to 6 GB)

Each has build/torch-VERSION: an environment with that torch from PyPI, the program, two rooms' tests and the Python package, and
log.txt. Most versions come with CUDA alone. Of the packages that they name those are installed without which a CPU cannot load
torch. A version is one row, whose cells are seconds or what went wrong; the status is 0 where all have passed.
"""
import argparse
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
FREE = 9e9  # bytes that an environment and its build take at most
# Named by torch, and loaded only by what runs on a GPU.
UNNEEDED = r"triton|cuda-bindings|.*(cusolver|nvtx).*"
NEEDED = f"""
import importlib.metadata, re
from pip._vendor.packaging.requirements import Requirement
for each in map(Requirement, importlib.metadata.requires("torch")):
    if not re.fullmatch({UNNEEDED!r}, each.name) and (each.marker is None or each.marker.evaluate({{"extra": ""}})):
        each.marker, each.extras = None, {{extra for extra in each.extras if not re.fullmatch({UNNEEDED!r}, extra)}}
        print(each)
"""
SMALL = ["--ranks", "2", *(word for key in (
    "data.pack_length=64", "batch.packs_per_step=4", "batch.packs_per_micro_batch=1", "model.hidden=32", "model.layers=2", "model.heads=2",
    "model.key_value_heads=2", "model.head_dim=16", "model.feed_forward=64", "run.peak_tflops=1") for word in ("--set", key))]
PACKAGE_TESTS = ["tests/test_python_engines.py", "tests/test_python_means.py"]
TESTS = {"test_loss": "src/loss", "test_parallel_data": "src/parallel/data"}


class Failed(Exception):
    """What a step says of itself in the table."""


class Version:
    """One version in its folder; `row` has what each step took, or what went wrong."""

    def __init__(self, version, jobs):
        self.version, self.jobs, self.row = version, jobs, {"torch": version}
        self.folder = ROOT / f"build/torch-{version}"
        self.python = self.folder / "venv/bin/python"
        self.program = self.folder / "bin/isograd"
        self.folder.mkdir(parents=True, exist_ok=True)
        self.environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH", "ISOGRAD_TORCH")}
        self.environment.update(OMP_NUM_THREADS="1", CCACHE_PCH_EXTSUM="1", PYTHON=str(self.python))

    def ran(self, *command, limit, says=""):
        """The output of a command; Failed, with its first error or last line, where the status is not 0 or `says` is not in it."""
        with (self.folder / "log.txt").open("a") as log:
            log.write(f"\n$ {' '.join(map(str, command))}\n")
            try:
                done = subprocess.run(list(map(str, command)), cwd=ROOT, env=self.environment, text=True, timeout=limit,
                                      stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
            except subprocess.TimeoutExpired:
                raise Failed(f"took more than {limit} s") from None
            log.write(done.stdout)
        if done.returncode or says not in done.stdout:
            lines = done.stdout.splitlines() or ["nothing printed"]
            error = next((line for line in lines if re.search(r"error:|ERROR|Error:|FAILED|parity FAIL", line)), lines[-1])
            raise Failed(f"status {done.returncode}: {error}")
        return done.stdout

    def install(self):
        if shutil.disk_usage(self.folder).free < FREE and not self.python.exists():
            raise Failed(f"not tried: less than {FREE / 1e9:.0f} GB free")
        if not self.python.exists():
            self.ran(sys.executable, "-m", "venv", self.folder / "venv", limit=120)
        exact = self.version if self.version.count(".") > 1 else f"{self.version}.*"
        self.ran(self.python, "-m", "pip", "install", "-q", "--no-deps", f"torch=={exact}", limit=3600)
        needed = self.ran(self.python, "-c", NEEDED, limit=60).splitlines()
        self.ran(self.python, "-m", "pip", "install", "-q", "numpy", "pytest", "safetensors", "scikit-build-core>=0.10", *needed, limit=3600)
        self.row["torch"] = self.ran(self.python, "-c", "import torch; print(torch.__version__)", limit=300).split()[-1]
        bytes_ = sum(path.lstat().st_size for path in (self.folder / "venv").rglob("*"))
        self.row["GB"] = f"{bytes_ / 1e9:.1f}"

    def build(self):
        torch = next((self.folder / "venv/lib").glob("python*/site-packages/torch"))
        self.ran("cmake", "--preset", "release", "-B", self.folder, f"-DISOGRAD_TORCH={torch}", "-DISOGRAD_CUDA=OFF",
                 f"-DPython3_EXECUTABLE={self.python}", limit=300)
        self.ran("cmake", "--build", self.folder, "-j", self.jobs, "--target", "isograd_cli", "isograd_python_comm", *TESTS, limit=7200)
        self.ran(self.program, "--version", limit=60, says=f"LibTorch {self.row['torch'].split('+')[0]}")

    def verify(self):
        self.ran(self.program, "verify", ROOT / "examples/first_light.toml", *SMALL, limit=300, says="parity PASS: 2 ranks")

    def train(self):
        self.ran(self.program, "train", ROOT / "examples/first_light.toml", *SMALL, "--set", "train.steps=4", "--set", "sample.tokens=0",
                 "--set", f"run.directory={self.folder}/run", "--overwrite", limit=300, says="parity PASS: 2 ranks")

    def tests(self):
        for test, room in TESTS.items():
            self.ran(self.folder / room / test, "--gtest_brief=1", limit=1800, says="[  PASSED  ]")

    def demo(self):
        wheels = self.folder / "wheel"
        shutil.rmtree(wheels, ignore_errors=True)
        self.ran(self.python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-C", f"cmake.define.ISOGRAD_BUILD={self.folder}",
                 "-w", wheels, ROOT, limit=300)
        self.ran(self.python, "-m", "pip", "install", "-q", "--no-deps", "--force-reinstall", next(wheels.glob("isograd-*.whl")), limit=120)
        self.ran(self.python, "-m", "isograd.demo", limit=300, says="parity PASS")

    def package(self):
        """The tests of engines and means, which need no library but torch."""
        self.environment.update(ISOGRAD_INSTALLED=str(self.python), ISOGRAD_BUILD_DIR=str(self.folder))
        self.ran(self.python, "-m", "pytest", "-q", "-p", "no:cacheprovider", *PACKAGE_TESTS, limit=1800, says=" passed")

    def tried(self):
        """Whether all steps passed; what comes after one that fails is not tried."""
        for step in STEPS:
            began = time.monotonic()
            print(f"torch {self.version}: {step}", file=sys.stderr, flush=True)
            try:
                getattr(self, step)()
            except Failed as failed:
                self.row[step] = str(failed)[:200]
                return False
            self.row[step] = f"{time.monotonic() - began:.0f} s"
        return True


STEPS = ["install", "build", "verify", "train", "tests", "demo", "package"]


def main():
    parser = argparse.ArgumentParser(usage="./dev torch-range [--keep] [VERSION ...]", description=__doc__.partition("\n")[0])
    parser.add_argument("versions", nargs="*", metavar="VERSION", help="2.15 (the newest of these) or 2.15.0")
    parser.add_argument("--keep", action="store_true", help="leave the environments of versions that pass")
    parser.add_argument("--jobs", default="1", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    accepted = re.search(r"set\(LibTorch_RANGE 2\.(\d+) 2\.(\d+)\)", (ROOT / "cmake/FindLibTorch.cmake").read_text())
    minors = [f"2.{minor}" for minor in range(int(accepted[1]), int(accepted[2]) + 1)]
    for version in asked.versions:
        if not re.fullmatch(r"\d+\.\d+(\.\d+)?", version) or ".".join(version.split(".")[:2]) not in minors:
            parser.exit(2, f"torch-range: found '{version}'; expected {minors[0]} to {minors[-1]}, with or without a third number.\n")
    rows, passed = [], True
    for version in asked.versions or minors:
        one = Version(version, asked.jobs)
        succeeded = one.tried()
        rows.append(one.row)
        passed = passed and succeeded
        if succeeded and not asked.keep:
            shutil.rmtree(one.folder)
    columns = ["torch", "GB", *STEPS]
    cells = [columns, *([row.get(column, "-") for column in columns] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(columns))]
    for row in cells:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    sys.exit(not passed)


if __name__ == "__main__":
    main()
