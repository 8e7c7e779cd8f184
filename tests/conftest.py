"""The backends that process ranks talk through: every test of process ranks runs once with each."""
import functools
import os
import pathlib
import re
import signal
import subprocess

import pytest

# A hang-up that is ignored (under nohup) stays ignored in what the tests start, which would then outlive it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARY = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release")) / "bin/isograd"


@functools.cache
def built_backends():
    text = subprocess.run([str(BINARY), "launch", "--help"], capture_output=True, text=True, timeout=60).stdout
    found = re.search(r"build has the backends ([a-z, ]+)", text)
    return [name for name in ("shm", "mpi") if re.search(rf"\b{name}\b", found.group(1))]


@pytest.fixture(params=["shm", "mpi"])
def backend(request):
    if request.param not in built_backends():
        pytest.skip("needs an MPI (libopenmpi-dev and openmpi-bin), which this build was configured without")
    return request.param


def pytest_configure(config):
    config.addinivalue_line("markers", "full: left out of the default suite, for time (docs/testing.md)")


def pytest_collection_modifyitems(config, items):
    if os.environ.get("ISOGRAD_FULL_TESTS"):
        return
    left_out = [item for item in items if item.get_closest_marker("full")]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
