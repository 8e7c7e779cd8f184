"""The backends that process ranks talk through, and what the default suite leaves out.

Tests of process ranks take turns with the backends; with ISOGRAD_FULL_TESTS=1, and where a backend decides what is
seen (`both_backends`: lost ranks), each runs once with each."""
import functools
import json
import os
import pathlib
import re
import select
import shutil
import signal
import site
import socket
import subprocess
import sys
import tempfile

import pytest

import warm_python

# A hang-up that is ignored (under nohup) stays ignored in what the tests start, which would then outlive it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release")).resolve()
BINARY = BUILD / "bin/isograd"
PROGRAM = BUILD / "libexec/isograd"  # which that becomes
LIMIT = 240  # seconds; a call that takes longer hangs
FULL = os.environ.get("ISOGRAD_FULL_TESTS") == "1"
LAUNCHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "OMPI_COMM_WORLD_", "PMIX_", "PMI_")


def words_of(arguments):
    """An argument "section.key=value" changes the configuration."""
    words = []
    for word in map(str, arguments):
        words += ["--set", word] if re.match(r"[a-z]+(\.\w+)+=", word) and words[-1:] != ["--set"] else [word]
    return words


@functools.lru_cache(maxsize=4)
def warm_isograd(read):
    """A socket to a process of the command line that has its libraries and makes copies (warm_isograd.cpp), for callers who have these
    variables, with what they load in front of it; None in a build without it."""
    library = BUILD / "tests/libisograd_warm.so"
    if not library.exists():
        return None
    read = {name: value for name, value in read if value is not None}
    environment = {**{name: value for name, value in os.environ.items() if name not in read_at_load(os.environ)}, **read}
    environment["LD_PRELOAD"] = " ".join([str(library), *filter(None, [environment.get("LD_PRELOAD")])])
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        subprocess.Popen([PROGRAM], env=environment, stdin=theirs)
    return ours


def read_at_load(environment):
    ours = {name: value for name, value in environment.items() if name.startswith("ISOGRAD_")}
    return {**warm_python.read_at_load(environment), **ours}


def answer_of(warm):
    said = warm.recv(4)
    assert len(said) == 4, "the process that makes copies of the command line has ended"
    return int.from_bytes(said, sys.byteorder)


def finished(words, environment, cwd, limit):
    """As subprocess.run() gives it, by a copy of the process that has the libraries where one fits."""
    warm = warm_isograd(tuple(sorted(read_at_load(environment).items())))
    if warm is None:
        return subprocess.run([PROGRAM, *words], capture_output=True, text=True, timeout=limit, cwd=cwd, env=environment)
    with open(os.devnull) as no_input, tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        command = [str(cwd or os.getcwd()), str(1 + len(words)), str(BINARY), *words]
        request = "\0".join([*command, *(f"{name}={value}" for name, value in environment.items()), ""])
        socket.send_fds(warm, [os.fsencode(request)], [no_input.fileno(), output.fileno(), errors.fileno()])
        copy = answer_of(warm)
        if not select.select([warm], [], [], limit)[0]:
            os.kill(copy, signal.SIGKILL)
            answer_of(warm)
            raise subprocess.TimeoutExpired(words, limit)
        status = os.waitstatus_to_exitcode(answer_of(warm))
        texts = [(file.seek(0), file.read().decode())[1] for file in (output, errors)]
    return subprocess.CompletedProcess([BINARY, *words], status, *texts)


def isograd(*arguments, status=None, cwd=None, limit=LIMIT, **environment):
    """The program of the command line, which has ended: with that status, if one is given."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    done = finished(words_of(arguments), {**clean, "OMP_NUM_THREADS": "1", **environment}, cwd, limit)
    assert status is None or done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


ran = functools.partial(isograd, status=0)


def refused(*arguments, status=2, **options):
    """The message of a refused call: once, on standard error, in few lines."""
    said = isograd(*arguments, status=status, **options).stderr
    assert len(said.splitlines()) <= 4, said
    return said


def rows_of(folder, key="loss"):
    """The log of a run, a row a step; key="figures" or "validation_loss": a row an evaluation."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row for row in rows if row.get(key) is not None]


def full(*values, **options):
    """A case that is left out of the default suite."""
    return pytest.param(*values, marks=pytest.mark.full, **options)


def by_turns(first, second):
    """Every pair of two dimensions. By default each value of the longer one comes with one value of the other."""
    return [(full if (i + j) % min(len(first), len(second)) else pytest.param)(a, b)
            for i, a in enumerate(first) for j, b in enumerate(second)]


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


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    """The Python package, packed from the build folder as it stands."""
    missing = BUILD / "python/isograd_comm.missing"
    if missing.exists():
        pytest.skip(f"isograd_comm: {missing.read_text()}")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation",
               "-C", f"cmake.define.ISOGRAD_BUILD={BUILD}", "-w", str(folder), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return next(folder.glob("isograd-*.whl"))


@pytest.fixture(scope="session")
def installed(request, tmp_path_factory):
    """The Python of a new environment with the wheel in it, which sees the packages of this one: torch is large.

    Its pip is this one's too, for an older pip cannot install into another environment. ISOGRAD_INSTALLED names the Python
    of an environment that has a wheel, built elsewhere.
    """
    if python := os.environ.get("ISOGRAD_INSTALLED"):
        return pathlib.Path(python)
    wheel = request.getfixturevalue("wheel")
    folder = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True, timeout=60)
    packages = next(folder.glob("lib/python*/site-packages"))
    shutil.copy(ROOT / "tests/orderly_exit.py", packages)
    (packages / "seen.pth").write_text("".join(f"import site; site.addsitedir({path!r})\n"
                                               for path in site.getsitepackages()) + "import orderly_exit\n")
    subprocess.run([str(folder / "bin/python"), "-m", "pip", "install", "-q", "--no-deps", "--no-index",
                    "--disable-pip-version-check", str(wheel)], check=True, timeout=120)
    return folder / "bin/python"


@pytest.fixture(scope="session")
def warm(installed):
    """That Python, for programs on ranks, which need not load torch each (tests/warm_python.py)."""
    return warm_python.python(str(installed))


def on_loopback(**variables):
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **variables}


def run_python(python, *arguments, timeout=300, cwd=ROOT / "tests/python_package", **variables):
    """The standard output of a program of tests/python_package, or of another one."""
    done = subprocess.run([str(python), "-W", "ignore", *map(str, arguments)], env=on_loopback(**variables), cwd=cwd,
                          capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def two_ranks(python, program, *arguments, **variables):
    """[(output, errors, status)] of two processes of the program; its first argument is the rank."""
    ranks = [subprocess.Popen([str(python), "-W", "ignore", "-c", program, str(rank), *map(str, arguments)], text=True,
                              env=on_loopback(**variables), stdout=subprocess.PIPE, stderr=subprocess.PIPE) for rank in range(2)]
    return [(*rank.communicate(timeout=60), rank.returncode) for rank in ranks]


def pytest_configure(config):
    config.addinivalue_line("markers", "full: left out of the default suite, for time (docs/testing.md)")
    config.addinivalue_line("markers", "both_backends: runs with each backend in the default suite too")


def out_of_turn(items):
    """The tests whose turn it is with the other backend. Functions take turns, and their other parameters, by the
    sequence of Thue and Morse: not in step with a list of two values."""
    backends, places, left_out = built_backends(), {}, []
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        if "backend" not in item.fixturenames or parameters.get("backend") not in backends:
            continue
        if item.get_closest_marker("both_backends"):
            continue
        others = tuple(str(value) for name, value in sorted(parameters.items()) if name != "backend")
        place = places.setdefault((item.module.__name__, item.originalname, others), len(places))
        if parameters["backend"] != backends[bin(place).count("1") % len(backends)]:
            left_out.append(item)
    return left_out


def pytest_collection_modifyitems(config, items):
    if FULL:
        return
    left_out = [item for item in items if item.get_closest_marker("full")] + out_of_turn(items)
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]
