"""More of `isograd train` as processes: output that nobody reads or takes, what a terminal is told of a lost rank, data
that is truncated during the run.
"""
import os
import re
import shlex
import signal
import subprocess

import pytest
from test_train import BINARY, LIMIT, Workplace, finish, ranks_of, whole


@pytest.fixture
def place(tmp_path):
    return Workplace(tmp_path, "shm")  # mpirun is a reader of its own, and ends survivors itself


def through_a_shell(redirection, command):
    return subprocess.run(["sh", "-c", f'exec "$@" {redirection}', "sh", *map(str, command)], capture_output=True,
                          text=True, timeout=LIMIT)


def is_complete(place, name="run"):
    """A run of all 12 steps, and nothing that it prints in any of its files."""
    assert [path.name for path in place.checkpoints(name)] == ["step-00000008", "step-00000012"]
    assert all(whole(path) for path in place.checkpoints(name))
    assert len([row for row in place.metrics(name) if row.get("loss") is not None]) == 12
    assert (place.folder / name / "report.html").exists()
    for path in (place.folder / name).rglob("*"):
        assert not path.is_file() or not re.search(rb"step 12/12|tokens/s on ", path.read_bytes()), path
    return True


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_run_outlives_the_reader_of_what_it_prints(place, ranks):
    """`isograd train ... 2>&1 | head`: it trains on, saves as it would, and its status is that of the run."""
    process = place.start(ranks=ranks, checkpoint__every=10)  # a line is printed with each checkpoint
    process.stdout.close()
    steps = len(place.metrics())
    place.wait(process, lambda: len(place.metrics()) > steps + 50)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(LIMIT) == 0
    rows = [row["step"] for row in place.metrics() if row.get("loss") is not None]
    assert place.checkpoints()[-1].name == f"step-{rows[-1]:08}" and whole(place.checkpoints()[-1])
    process = subprocess.Popen(place.command("short", ranks=ranks), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process.stdout.close()  # before the first line
    assert process.wait(LIMIT) == 0
    assert is_complete(place, "short")


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("redirection", [">&-", "2>&-", ">&- 2>&- <&-", "2>/dev/full", ">/dev/full"])
def test_a_run_whose_standard_streams_are_closed_or_full(place, redirection, ranks):
    """A closed one is not a file of the run's that is opened next. A full disk has its status, the run is whole."""
    done = through_a_shell(redirection, place.command(ranks=ranks))
    assert done.returncode == (2 if redirection == ">/dev/full" else 0), done.stdout + done.stderr
    assert is_complete(place)
    if redirection == ">/dev/full":
        assert done.stderr.count("ConfigError") == 1 and "standard output" in done.stderr, done.stderr


def test_a_verb_that_leaves_no_files_must_print_somewhere(place):
    for redirection in (">&-", ">/dev/full"):
        done = through_a_shell(redirection, [BINARY, "config", place.config()])
        assert done.returncode == 2 and done.stderr.count("standard output") == 1, done.stderr


def test_a_launcher_outlives_the_reader_of_its_ranks(tmp_path):
    script = 'for i in 1 2 3 4 5 6 7 8; do echo $i; sleep 0.1; done; : > "$0/$RANK"'
    process = subprocess.Popen([BINARY, "launch", "-n", "2", "--prefix", "--", "sh", "-c", script, tmp_path],
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(LIMIT) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0", "1"]


@pytest.mark.parametrize("victim, changes", [
    (0, {}), (2, {}), (1, {"parallel__strategy": "zero3"}),
    (0, {"parallel__pp": 3, "model__layers": 3}), (2, {"parallel__pp": 3, "model__layers": 3})])
def test_a_terminal_is_told_of_a_lost_rank_in_a_few_lines(place, victim, changes):
    """Which one, in what, what the others waited in, how to continue; the last operations are in a file."""
    process = place.start(ranks=3, checkpoint__every=20, **changes)
    place.wait(process, lambda: len(place.checkpoints()) > 0)
    lost = ranks_of(process)[victim]
    os.kill(lost, signal.SIGKILL)
    status, out = finish(process)
    assert status == 3, out
    told = [line for line in out.splitlines() if line and not line.startswith(("step ", "saved ", "continuing "))]
    told = told[next(i for i, line in enumerate(told) if re.match("isograd: |rank ", line)):]
    assert len(told) <= 5, out
    survivors = {0, 1, 2} - {victim}
    (error,) = [line for line in told if "PeerError" in line]
    operation = r"(?:\w+ #\d+(?: to rank \d)?|recv from rank \d)"
    said = re.match(rf"isograd: rank (\d): PeerError: after step \d+: {operation} of group '.*' on rank \1 of 3.*: "
                    rf"found rank {victim} \(host .*, pid {lost}\) has ended; ", error)
    assert said and int(said[1]) in survivors, out
    (other,) = survivors - {int(said[1])}
    assert re.search(rf"^isograd: rank {other} waited: after step \d+: {operation} of group '", out, re.M), out
    assert f"rank {victim} (pid {lost}) was killed by signal 9" in out
    operations = place.folder / "run/last_operations.txt"
    assert re.search(rf"^isograd: the last operations of rank \d in group '.*': {operations}$", out, re.M), out
    assert re.search(r"^  #\d+ ", operations.read_text(), re.M)
    command = shlex.split(re.search(r"; to continue: (isograd .*) \(from the last checkpoint", error).group(1))
    steps = int(place.checkpoints()[-1].name[5:]) + 3
    done = subprocess.run([BINARY, *command[1:], "--set", f"train.steps={steps}"], capture_output=True, text=True,
                          timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rank_that_is_lost_before_a_checkpoint_says_that_there_is_none(place):
    process = place.start(ranks=2)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    status, out = finish(process)
    assert status == 3 and "; no checkpoint had been saved yet." in out, out


def test_data_that_is_cut_short_in_mid_run_is_named(place):
    """Instead of a SIGBUS without words, or of zeros that are trained on."""
    process = place.start(ranks=1, checkpoint__every=5)
    (shard,) = [path for path in (place.folder / "cache").rglob("*") if path.suffix in (".bin", ".isograd")]
    size = shard.stat().st_size
    os.truncate(shard, 0)
    status, out = finish(process)
    assert status == 2, out
    assert out.count("ConfigError") == 1 and str(shard) in out, out
    assert "found 0 bytes: it was truncated" in out and f"the {size} bytes" in out, out
    assert whole(place.checkpoints()[-1])
