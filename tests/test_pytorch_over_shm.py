"""torch.distributed over isograd gives what it gives over Gloo: DDP, FSDP2, ZeRO, object collectives, all collectives.

The scenarios are in tests/pytorch_over_shm. Each is run on 2, 3 and 4 processes over both backends and compared, and
once more with a planted fault that the comparison must notice.
"""
import functools
import json
import os
import pathlib
import re
import signal
import subprocess
import tempfile
import time

import pytest
import warm_python
from conftest import BUILD, ROOT, full

MODULE = BUILD / "python"
SCRIPTS = ROOT / "tests/pytorch_over_shm"
MISSING = MODULE / "isograd_comm.missing"
SEED = int(os.environ.get("ISOGRAD_SEED", time.time_ns() % 10**6))

pytestmark = pytest.mark.skipif(MISSING.exists(),
                                reason=f"isograd_comm: {MISSING.read_text() if MISSING.exists() else ''}")

# Named here as well as in the scripts, so that one that disappears is noticed.
COLLECTIVES = re.findall(r"@scenario\ndef (\w+)", (SCRIPTS / "collectives.py").read_text())
TRAINING = re.findall(r"@scenario\ndef (\w+)", (SCRIPTS / "training.py").read_text())


class Store:
    """The store that the ranks meet in, hosted here: the ranks may come and go."""

    def __enter__(self):
        import torch.distributed as dist
        self.store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        return self

    def __exit__(self, *_):
        self.store = None


def start(store, rank, size, *command, **more):
    environment = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1",
                       MASTER_PORT=str(store.store.port), PYTHONPATH=f"{MODULE}", OMP_NUM_THREADS="1",
                       GLOO_SOCKET_IFNAME="lo", **more)
    return subprocess.Popen([warm_python.python(), "-W", "ignore", *map(str, command)], env=environment, cwd=ROOT, text=True,
                            stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finish(processes, seconds):
    """[(status, output, errors)]; a process that does not end is killed, with status None."""
    deadline, results = time.monotonic() + seconds, []
    for process in processes:
        try:
            texts = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            results.append((process.returncode, *texts))
        except subprocess.TimeoutExpired:
            process.kill()
            results.append((None, *process.communicate()))
    return results


@functools.cache
def outcomes(size, faulty=False, names=None, debug="OFF"):
    """{scenario: [what went wrong, by rank]}. debug: what TORCH_DISTRIBUTED_DEBUG says."""
    names = names or (*COLLECTIVES, *TRAINING)
    with tempfile.TemporaryDirectory() as exchange, Store() as store:
        command = [SCRIPTS / "rank.py", exchange, SEED, *(["--faulty"] if faulty else []), *names]
        results = finish([start(store, rank, size, *command, TORCH_DISTRIBUTED_DEBUG=debug) for rank in range(size)], 400)
        assert [status for status, *_ in results] == [0] * size, (SEED, results)
        ranks = [json.loads((pathlib.Path(exchange) / f"{rank}.json").read_text()) for rank in range(size)]
    return {name: [rank[name] for rank in ranks] for name in names}


@pytest.mark.parametrize("size", [full(2), 3, full(4)])
@pytest.mark.parametrize("name", COLLECTIVES + TRAINING)
def test_gives_what_gloo_gives(name, size):
    problems = outcomes(size)[name]
    assert problems == [None] * size, f"seed {SEED}\n" + "\n".join(
        f"rank {rank}: {problem}" for rank, problem in enumerate(problems) if problem)


# One of each way to train: PyTorch wraps each group in one that compares what ranks call, over Gloo.
CHECKED = ("ddp_with_bucket_views", "fsdp2", "tensor_parallel", "pipelining", "checkpoints")


@pytest.mark.parametrize("name", CHECKED)
def test_gives_it_under_torchs_own_checks(name):
    problems = outcomes(2, names=CHECKED, debug="DETAIL")[name]
    assert problems == [None] * 2, (SEED, problems)


@pytest.mark.parametrize("name", COLLECTIVES + TRAINING)
def test_notices_a_rank_that_feeds_wrong_numbers(name):
    problems = outcomes(2, faulty=True)[name]
    assert any(problem and problem.startswith("Gloo and isograd differ") for problem in problems), (SEED, problems)


def test_notices_a_bucket_that_is_not_reduced():
    (problems,) = outcomes(2, names=("skip_a_bucket",)).values()
    assert all(problem and problem.startswith("Gloo and isograd differ") for problem in problems), problems


def run_program(size, text, seconds=60, kill=None, **more):
    """Runs `text` on every rank, after a preamble; `kill`: a rank that is killed once all have said "ready"."""
    preamble = ("import isograd_comm, datetime, os, sys, time, torch, torch.distributed as dist\n"
                "rank, size = int(os.environ['RANK']), int(os.environ['WORLD_SIZE'])\n"
                "def init(seconds=30, backend='isograd'):\n"
                "    dist.init_process_group(backend, timeout=datetime.timedelta(seconds=seconds))\n")
    with Store() as store:
        processes = [start(store, rank, size, "-c", preamble + text, TORCHELASTIC_USE_AGENT_STORE="True", **more)
                     for rank in range(size)]
        killed_at = None
        if kill is not None:
            store.store.wait([f"ready/{rank}" for rank in range(size)])
            killed_at = time.time()
            processes[kill].send_signal(signal.SIGKILL)
        return finish(processes, seconds), killed_at


def assert_all_end_well(results):
    assert all(status == 0 for status, *_ in results), results


WAITS = ["dist.all_reduce(torch.ones(10))", "dist.barrier()", "dist.recv(torch.ones(3), 1)",
         "dist.all_reduce(torch.ones(10), async_op=True).get_future().wait()"]


# 4 ranks wait in the first, 2 in the others; in the full suite both in each.
@pytest.mark.parametrize("size, waits_in", [
    (pytest.param if (size == 4) == (waits_in == WAITS[0]) else full)(size, waits_in)
    for waits_in in WAITS for size in (2, 4)])
def test_a_killed_rank_is_an_exception_within_a_second(size, waits_in):
    results, killed_at = run_program(size, f"""
init()
dist.barrier()
dist.distributed_c10d._get_default_store()  # exists before anyone says that it is ready
from torch.distributed import TCPStore
TCPStore('127.0.0.1', int(os.environ['MASTER_PORT']), None, False).set(f'ready/{{rank}}', '1')
if rank == 1:
    import signal
    signal.pause()
try:
    {waits_in}
except RuntimeError as error:
    print('NOTICED', time.time(), error, flush=True)
    os._exit(7)  # no destructor gets a chance to wait
""", kill=1)
    for rank, (status, output, errors) in enumerate(results):
        if rank == 1:
            assert status == -signal.SIGKILL
            continue
        assert status == 7, output + errors
        seconds = float(re.search(r"NOTICED ([\d.]+)", output)[1]) - killed_at
        assert seconds < 1.0, (rank, seconds)
        assert "rank 1" in output, output


def test_waiting_leaves_other_python_threads_running():
    """Rank 1 joins the collective only after a second thread of rank 0 has run, while rank 0's first one waits."""
    results, _ = run_program(2, """
import threading
init()
store = dist.distributed_c10d._get_default_store()
if rank == 0:
    entered = threading.Event()
    def other():
        entered.wait()
        store.set('other thread', '1')
    thread = threading.Thread(target=other)
    thread.start()
    entered.set()
else:
    store.wait(['other thread'])
tensor = torch.ones(3)
dist.all_reduce(tensor)
assert tensor[0] == 2
dist.destroy_process_group()
""")
    assert_all_end_well(results)


def test_nothing_is_left_after_destroying_the_group():
    results, _ = run_program(2, """
import gc
def shared_mappings():
    return [line for line in open('/proc/self/maps') if 'memfd' in line]
def threads():
    return len(os.listdir('/proc/self/task'))
def descriptors():
    return len(os.listdir('/proc/self/fd'))
def soon(condition):  # threads that let go of a group do so a moment after its end
    deadline = time.monotonic() + 10
    while not condition() and time.monotonic() < deadline:
        os.sched_yield()
    return condition()
def all_gone():
    return soon(lambda: not shared_mappings())
before, opened = threads(), []
for turn in range(8):
    assert all_gone(), shared_mappings()
    init()
    group = dist.new_group([0, 1])
    tensor = isograd_comm.empty_shared(100_000, torch.float32, group)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(torch.ones(4), async_op=True).get_future().then(lambda future: 1).wait()
    assert len(shared_mappings()) > 0
    del tensor, group
    dist.destroy_process_group()
    gc.collect()
    opened.append(descriptors())
assert all_gone(), shared_mappings()
# One thread a process moves futures on: it starts with the first that is not done at once, in any turn, and stays.
assert soon(lambda: threads() <= before + 1), (before, threads())
assert soon(lambda: descriptors() <= opened[1]), opened
""")
    assert_all_end_well(results)


@pytest.mark.parametrize("under_way", [False, True])
def test_a_program_may_end_without_destroying_the_group(under_way):
    results, _ = run_program(2, f"""
init()
shared = isograd_comm.empty_shared(1000, torch.float32)
dist.all_reduce(shared)
work = dist.all_reduce(shared, async_op=True)
work.get_future().then(lambda future: None)
if not {under_way}:
    work.wait()
print('end')
""")
    assert_all_end_well(results)
    assert all(output == "end\n" for _, output, _ in results), results


def test_errors_are_runtime_errors_with_the_whole_text():
    results, _ = run_program(2, """
init()
try:
    dist.all_reduce(torch.ones(4 + rank))
except RuntimeError as error:
    text = str(error)
    assert 'all_reduce(sum) of 4 Float' in text and 'all_reduce(sum) of 5 Float' in text, text
    assert 'expected' in text, text
    print('refused', type(error).__name__)
try:
    dist.barrier()
except RuntimeError as error:
    assert 'all_reduce' in str(error), error  # the group stays poisoned, with the first reason
    print('poisoned')
""")
    assert_all_end_well(results)
    assert all(output.startswith("refused") and "poisoned" in output for _, output, _ in results), results


def test_a_late_rank_is_named_after_the_groups_timeout():
    # The short timeout is that of a second group: its ranks join it together, however far apart they started.
    results, _ = run_program(2, """
init()
group = dist.new_group(timeout=datetime.timedelta(seconds=3))
if rank == 0:
    try:
        dist.all_reduce(torch.ones(4), group=group)
    except RuntimeError as error:
        assert 'rank 1' in str(error) and '3000 ms' in str(error), error
        print('late')
    dist.distributed_c10d._get_default_store().set('over', '1')
else:
    dist.distributed_c10d._get_default_store().wait(['over'], datetime.timedelta(seconds=30))
""")
    assert_all_end_well(results)
    assert results[0][1] == "late\n", results


@pytest.mark.parametrize("backend", ["isograd", "cpu:isograd", "ISOGRAD"])
def test_the_backend_is_chosen_by_name_alone(backend):
    results, _ = run_program(2, f"""
def threads():
    return [open(f'/proc/self/task/{{task}}/comm').read().strip() for task in os.listdir('/proc/self/task')]
init(backend={backend!r})
assert isinstance(dist.group.WORLD._get_backend(torch.device('cpu')), isograd_comm.ShmBackend)
gloo = dist.new_group(backend='gloo')
mine = dist.new_group(backend='isograd')
for group in (gloo, mine, None):
    tensor = torch.arange(4.0) + rank
    dist.all_reduce(tensor, group=group)
    assert tensor.tolist() == [1, 3, 5, 7]
assert 'pt_gloo_runloop' in threads(), threads()
try:
    isograd_comm.empty_shared(4, torch.float32, gloo)
except isograd_comm.ConfigError as error:
    assert 'gloo' in str(error)
    print('refused')
# Gloo's worker thread may be the last to hold a tensor that Python has seen. To let go of it, the thread takes the
# interpreter's lock, which ends the process (std::terminate) once the interpreter is finalising. The group's
# destructor joins the thread: it must run before that.
dist.destroy_process_group()
del gloo, mine, group, tensor
assert 'pt_gloo_runloop' not in threads(), threads()
""")
    assert_all_end_well(results)
    assert all(output == "refused\n" for _, output, _ in results), results


@pytest.mark.full
def test_torchs_own_checks_can_be_wrapped_around_it():
    results, _ = run_program(2, """
init()
shared = isograd_comm.empty_shared(10, torch.int64)
shared += rank + 1
dist.all_reduce(shared)
assert shared.tolist() == [3] * 10
dist.destroy_process_group()
""", TORCH_DISTRIBUTED_DEBUG="DETAIL")
    assert_all_end_well(results)


def test_shared_tensors_outlive_their_group_and_hold_each_type():
    results, _ = run_program(2, """
import gc
init()
kept = []
for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8):
    tensor = isograd_comm.empty_shared(33, dtype)
    assert tensor.dtype == dtype and tensor.shape == (33,) and not tensor.any()
    tensor.view(3, 11)[1] = rank + 1
    dist.all_reduce(tensor)
    kept.append(tensor)
assert isograd_comm.empty_shared(0, torch.float32).numel() == 0
dist.destroy_process_group()
gc.collect()
assert all(tensor.sum() == 33 for tensor in kept)
kept[1].add_(1)
""")
    assert_all_end_well(results)
