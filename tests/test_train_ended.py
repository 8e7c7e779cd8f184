"""Runs of `isograd train` that end from outside: signals, lost and hung ranks, folders and disks that go away."""
import errno
import os
import re
import resource
import shlex
import shutil
import signal
import subprocess
import time

import pytest
from test_train import BINARY, finish, place, ranks_of, whole  # noqa: F401  (a fixture)


def names_lost_ranks(backend):
    """What only shm promises. MPI does not know who is missing; mpirun ends the survivors itself."""
    return backend == "shm"


def test_sigterm_saves_and_the_printed_command_continues_bit_for_bit(place):
    """As it is printed, also where --set changed what the file says, and a shell would change the folder's name."""
    stopped = place.folder / "stopped $(false) here"
    process = place.start("run", schedule__kind="constant", run__directory=stopped)
    ends = []
    for _ in range(2):
        os.kill(process.pid, signal.SIGTERM)
        status, out = finish(process)
        assert status == 0, out
        ends.append(int(re.search(r"stopped after step (\d+)", out).group(1)))
        assert [path.name for path in place.checkpoints(stopped)][-1] == f"step-{ends[-1]:08}"
        command = shlex.split(re.search(r"to continue: (isograd .*)", out).group(1))
        assert command[0] == "isograd"
        if len(ends) == 1:
            process = subprocess.Popen([str(BINARY), *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                       text=True, start_new_session=True)
            place.wait(process, lambda: len(place.metrics(stopped)) > ends[0] + 20)
    assert 5 < ends[0] < ends[1] - 20
    assert not (place.folder / "run").exists()
    straight = place.run("straight", schedule__kind="constant", train__steps=ends[1], train__evaluate_every=0,
                         checkpoint__every=0)
    assert straight.returncode == 0, straight.stdout + straight.stderr
    for name in ("model.safetensors", "optimizer.safetensors"):
        files = [place.checkpoints(run)[-1] / name for run in (stopped, "straight")]
        assert files[0].read_bytes() == files[1].read_bytes(), name
    losses = [{row["step"]: row["loss"] for row in place.metrics(run) if row.get("loss") is not None}
              for run in (stopped, "straight")]
    assert len(losses[0]) == ends[1] and losses[0] == losses[1]


def test_a_hang_up_saves_as_sigterm_does(place):
    process = place.start()
    os.kill(process.pid, signal.SIGHUP)
    status, out = finish(process)
    assert status == 0, out
    at = int(re.search(r"stopped after step (\d+)", out).group(1))
    assert [path.name for path in place.checkpoints()] == [f"step-{at:08}"] and whole(place.checkpoints()[0])


@pytest.mark.both_backends
def test_a_rank_killed_during_start_ends_the_run_at_once(place):
    """Long before the launcher's grace (10 s), whatever it was doing then."""
    for delay in (0, 0.05, 0.3, 1.0):
        process = subprocess.Popen(place.command(f"start-{delay}", ranks=3, train__steps=1000000), text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        place.wait(process, lambda: len(ranks_of(process)) == 3)
        time.sleep(delay)
        started = time.time()
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        status, out = finish(process)
        assert status == 3, out
        if place.backend == "shm":
            assert time.time() - started < 5, out
            assert "rank 1" in out and "signal 9" in out, out
            assert len(re.findall("PeerError", out)) <= 1, out


def test_two_runs_in_one_folder(place):
    process = place.start()
    done = place.run(train__steps=1)
    assert done.returncode == 2 and "another run that is writing there" in done.stderr, done.stderr
    assert f"process {ranks_of(process)[0]}" in done.stderr, done.stderr
    steps = len(place.metrics())
    place.wait(process, lambda: len(place.metrics()) > steps)
    os.kill(process.pid, signal.SIGTERM)
    status, out = finish(process)
    assert status == 0, out
    rows = [row["step"] for row in place.metrics() if row.get("loss") is not None]
    assert rows == list(range(1, len(rows) + 1)), "metrics were lost"


def remove_while_written_to(folder):
    """As `rm -r` given again: the run may make a file between the listing of a folder and its removal."""
    for _ in range(100):
        try:
            shutil.rmtree(folder)
        except OSError as error:
            if error.errno not in (errno.ENOTEMPTY, errno.ENOENT):
                raise
        if not folder.exists():
            return
    raise AssertionError(f"{folder} is filled again and again")


def test_a_folder_removed_in_mid_run_is_an_error(place):
    process = place.start()
    remove_while_written_to(place.folder / "run")
    status, out = finish(process)
    assert status == 2, out
    # The folder is emptied file by file: a step may end where its metrics are gone and the folder is not yet.
    removed = r"(a folder that|a folder whose LOCK|a file that) was removed (or moved )?while the run wrote to it"
    assert re.search(removed, out) and out.count("ConfigError") == 1, out
    assert not (place.folder / "run").exists()


def test_a_full_disk_has_one_status_whatever_was_being_written(place):
    process = place.start(train__steps=100000)
    for rank in ranks_of(process):
        room = (place.folder / "run/metrics.jsonl").stat().st_size + 2000
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (room, room))
    status, out = finish(process)
    assert status == 2, out
    assert out.count("ConfigError") == 1 and "metrics.jsonl" in out or "tfevents" in out, out


def test_ctrl_c_in_a_terminal_is_one_wish_to_stop(place):
    """The launcher and every rank get it from the terminal, and the ranks a second time from the launcher."""
    process = place.start(ranks=3)
    os.killpg(process.pid, signal.SIGINT)
    status, out = finish(process)
    assert status == 0, out
    at = int(re.search(r"stopped after step (\d+)", out).group(1))
    assert [path.name for path in place.checkpoints()] == [f"step-{at:08}"]
    assert whole(place.checkpoints()[0])


@pytest.mark.parametrize("ranks", [1, 3])
def test_ctrl_c_skips_the_proof_at_the_end(place, ranks):
    """Which says how long it takes; the checkpoint is whole by then. Many short micro-batches, so that it takes a while."""
    process = subprocess.Popen(place.command(ranks=ranks, verify__at_end="true", train__steps=2, train__evaluate_every=0,
                                             data__pack_length=8, batch__packs_per_step=300, batch__packs_per_micro_batch=1),
                               stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True)
    said = ""
    while "proving the gradient" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    assert re.search(r"about [\dm .]+s; Ctrl-C skips it", said), said
    assert [path.name for path in place.checkpoints()] == ["step-00000002"] and whole(place.checkpoints()[0])
    os.killpg(process.pid, signal.SIGINT)
    status, out = finish(process)
    assert status == 0, said + out
    assert out.count("skipped by a signal: nothing is proved") == 1 and "PASS" not in out, out
    assert "skipped by a signal" in (place.folder / "run/report.html").read_text()


@pytest.mark.both_backends
def test_a_second_signal_ends_at_once(place):
    process = place.start()
    ranks = ranks_of(process)
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGSTOP)  # so that the first wish cannot be carried out
    os.kill(process.pid, signal.SIGINT)
    time.sleep(1.3)
    os.kill(process.pid, signal.SIGINT)
    os.kill(ranks[0], signal.SIGCONT)
    started = time.time()
    status, out = finish(process)
    assert status != 0, out
    assert time.time() - started < 15


@pytest.mark.both_backends
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_killed_rank_takes_the_others_down_naming_it(place, rank):
    process = place.start(ranks=3, checkpoint__every=50)
    place.wait(process, lambda: len(place.checkpoints()) > 0)
    ranks = ranks_of(process)
    assert len(ranks) == 3
    started = time.time()
    os.kill(ranks[rank], signal.SIGKILL)
    status, out = finish(process)
    assert time.time() - started < 20, "the others waited for longer than the timeout"
    assert status == 3, out
    if names_lost_ranks(place.backend):
        assert re.search(rf"rank {rank}\b", out), out
    assert whole(place.checkpoints()[-1])
    steps = int(place.checkpoints()[-1].name[5:]) + 3
    done = place.run(checkpoint__resume="latest", train__steps=steps, ranks=2)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.both_backends
def test_a_hung_rank_ends_the_run_within_the_timeout(place):
    process = place.start(parallel__timeout_seconds=5)
    ranks = ranks_of(process)
    started = time.time()
    os.kill(ranks[1], signal.SIGSTOP)
    try:
        status, out = finish(process)
    finally:
        try:
            os.kill(ranks[1], signal.SIGKILL)
        except ProcessLookupError:
            pass
    assert status == 3, out
    # The timeout and the end of the others; mpirun takes its time. No grace for one that cannot use it.
    assert time.time() - started < (12 if place.backend == "shm" else 33)
    if names_lost_ranks(place.backend):
        assert re.search(r"rank 1\b", out), out
    else:
        assert "not complete within 5000 ms" in out, out


def test_a_full_disk_while_saving_leaves_the_previous_checkpoint_whole(place):
    process = place.start(checkpoint__every=20, train__steps=100000)
    place.wait(process, lambda: len(place.checkpoints()) > 0)
    for rank in ranks_of(process):
        # As if the disk had this much room left for any one file: metrics fit, weights do not.
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (60000, 60000))
    status, out = finish(process)
    assert status == 2, out
    assert "ConfigError" in out and "step-" in out, out
    assert place.checkpoints() and all(whole(path) for path in place.checkpoints())
    assert not list((place.folder / "run/checkpoints").glob(".*")), "leftovers"
    done = place.run(checkpoint__resume="latest", train__steps=int(place.checkpoints()[-1].name[5:]) + 3)
    assert done.returncode == 0, done.stdout + done.stderr
