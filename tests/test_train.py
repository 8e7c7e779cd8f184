"""`isograd train` as processes: what it prints and leaves behind, and what happens to it from outside: signals, lost and hung
ranks, readers, folders and disks that go away. Runs are tiny (one layer, width 32, packs of 64): each takes a second or two.
"""
import contextlib
import json
import math
import os
import pathlib
import random
import re
import resource
import shlex
import signal
import subprocess
import time

import pytest
from conftest import BINARY, by_turns, full, isograd
from run_files import text_tables, write_run

LIMIT = 60  # seconds; a run that takes longer hangs

CONFIG = text_tables(
    6, 2, 64, (32, 1, 2, 1, 16, 48), run={"seed": 5}, data={"validation_fraction": 0.2}, model={"max_positions": 128},
    train={"steps": 12, "evaluate_every": 4, "evaluate_packs": 3}, schedule={"peak": 0.01, "warmup": 2}, checkpoint={"every": 4},
    parallel={"timeout_seconds": 20}, verify={"at_end": False}, sample={"prompt": "ab", "tokens": 8})


class Workplace:
    def __init__(self, folder, backend):
        self.folder = folder
        self.backend = backend
        self.begun = []
        self.text = folder / "text"
        self.text.mkdir(parents=True)
        rng = random.Random(11)
        for i in range(30):
            words = "".join(rng.choice("abcdefg ") for _ in range(rng.randrange(5, 200)))
            (self.text / f"{i:03}.txt").write_text(words)

    def config(self, name="run"):
        return write_run(self.folder / f"{name}.toml", CONFIG, run={"directory": str(self.folder / name)})

    def command(self, name="run", ranks=2, **changes):
        sets = [x for key, value in changes.items() for x in ("--set", f"{key.replace('__', '.')}={value}")]
        return [str(BINARY), "train", str(self.config(name)), "--ranks", str(ranks), "--backend", self.backend,
                *sets]

    def run(self, *args, status=0, **kwargs):
        """Standard output and errors of a run that ends with that status."""
        done = isograd(*self.command(*args, **kwargs)[1:], status=status, limit=LIMIT)
        return done.stdout, done.stderr

    def start(self, *args, **kwargs):
        """A run without end in the background, in its own session; returned once it trains."""
        kwargs = {"train__steps": 1000000, "train__evaluate_every": 0, "checkpoint__every": 0, **kwargs}
        name = kwargs.get("run__directory", args[0] if args else "run")
        rows = len(self.metrics(name))  # of the start that this one continues
        process = self.begin(self.command(*args, **kwargs))
        self.wait(process, lambda: len(self.metrics(name)) > rows + 5)
        return process

    def begin(self, command, **options):
        """A process in a session of its own, which ends with the test at the latest."""
        self.begun.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
                                           **options))
        return self.begun[-1]

    def end(self):
        for process in self.begun:
            for pid in [process.pid, *ranks_of(process)] if process.poll() is None else []:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def wait(self, process, condition):
        end = time.time() + LIMIT
        while not condition():
            if process.poll() is not None:
                pytest.fail(f"ended early with {process.returncode}:\n{process.communicate()[0]}")
            assert time.time() < end, "waited in vain"
            time.sleep(0.02)

    def metrics(self, name="run"):
        path = self.folder / name / "metrics.jsonl"
        if not path.exists():
            return []
        rows = []
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break  # being written
        return rows

    def steps(self, name="run"):
        return [row for row in self.metrics(name) if row.get("loss") is not None]

    def checkpoints(self, name="run"):
        return sorted((self.folder / name / "checkpoints").glob("step-*"))

    def last_saved(self):
        return int(self.checkpoints()[-1].name[5:])

    def trains_on(self, process, steps=0):
        """Returns once it has made more than so many further steps."""
        before = len(self.metrics())
        self.wait(process, lambda: len(self.metrics()) > before + steps)

    def saved(self, steps, name="run"):
        """The checkpoints are those of these steps, and whole."""
        assert [path.name for path in self.checkpoints(name)] == [f"step-{step:08}" for step in steps]
        assert all(whole(path) for path in self.checkpoints(name))


def workplace(folder, backend):
    place = Workplace(folder, backend)
    yield place
    place.end()


@pytest.fixture
def place(tmp_path, backend):
    yield from workplace(tmp_path, backend)


@pytest.fixture
def shm(tmp_path):
    """mpirun is a reader of its own, and ends survivors itself."""
    yield from workplace(tmp_path, "shm")


def ranks_of(process):
    """Process ids of the ranks, in order of rank."""
    found = {}
    for path in pathlib.Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            session = int((path / "stat").read_text().rsplit(")", 1)[1].split()[3])
            if session != process.pid:
                continue
            environment = dict(x.split("=", 1) for x in (path / "environ").read_text().split("\0") if "=" in x)
        except OSError:
            continue
        for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
            if name in environment:
                found[int(environment[name])] = int(path.name)
    return [found[rank] for rank in sorted(found)]


def finish(process, status=0):
    """Its output."""
    out, _ = process.communicate(timeout=LIMIT)
    assert process.returncode == status, out
    return out


def stopped_after(out):
    return int(re.search(r"stopped after step (\d+)", out).group(1))


def whole(checkpoint):
    """Every file of a checkpoint is as its listing says, and the weights can be read."""
    from safetensors import safe_open
    listing = json.loads((checkpoint / "checksums.json").read_text())
    for name, facts in listing["files"].items():
        assert (checkpoint / name).stat().st_size == facts["bytes"], name
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        assert len(list(file.keys())) > 5
    return True


def test_trains_and_says_what_it_did_and_a_damaged_checkpoint_is_named(place):
    text = "".join(place.run())
    steps = place.steps()
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert [row["step"] for row in place.metrics() if row.get("validation_loss") is not None] == [4, 8, 12]
    for word in ("validation loss", "unigram entropy", "tokens/s", "sample", "report", "checkpoint"):
        assert word in text
    html = (place.folder / "run/report.html").read_text()
    assert "<svg" in html and "pack_length" in html
    place.saved([8, 12])
    first, last = place.checkpoints()
    weights = last / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    _, said = place.run(checkpoint__resume="latest", train__steps=14, status=2)
    assert f"{weights}: found checksum" in said and f"resume from {first}" in said
    place.run(checkpoint__resume=first, train__steps=14)


ZERO3 = dict(parallel__strategy="zero3")
BF16 = dict(train__dtype="bfloat16", train__fp32_gradients="false")


@pytest.mark.parametrize("changes, keeps, rounds", [
    (dict(parallel__strategy="bucketed"), "16Ψ", 1), full(dict(parallel__strategy="zero1"), "8Ψ + 8Ψ/N", 1),
    (dict(parallel__strategy="zero2"), "4Ψ + 12Ψ/N", 2),  # two micro-batches a step: gradients are sent twice
    # The root stays whole from forward to the end of backward; with reshard_after_forward = false everything does.
    full(ZERO3, "", 0), (ZERO3 | dict(parallel__reshard_after_forward="false"), "", 0),
    (ZERO3 | dict(parallel__share_parameters="auto"), "", 0),  # MPI: not shared
    full(ZERO3 | BF16, "", 0), (dict(parallel__strategy="zero1") | BF16, "", 0)], ids=str)
def test_memory_and_traffic_are_those_of_the_formulas(place, changes, keeps, rounds):
    _, text = place.run(train__steps=3, run__memory="true", batch__packs_per_step=8, model__hidden=64,
                        **{"parallel__share_parameters": "off", **changes})
    assert not keeps or f"keeps {keeps}" in text
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    (formula,) = [list(map(float, row[1:])) for row in rows if row[0] == "formula"]
    measured = [list(map(float, row[1:])) for row in rows if re.fullmatch(r"rank \d", row[0])]
    assert len(measured) == 2
    page = (place.folder / "run/report.html").read_text()
    table = re.sub(r' data-h="[a-z ]+"', "", page[page.index("<h2>Memory and traffic of the last step</h2>"):])
    assert all("".join(f'<td class="number">{each:.2f}</td>' for each in row) in table for row in measured)
    assert "<title>parameters: " in page and table.index("</table>") < table.index("<h2>Layout and data</h2>")
    for row in measured:
        parameters, gradients, masters, state, total, other, passing, sent = row
        assert total == pytest.approx(formula[4], rel=0.03) and (passing > 0 or not keeps)
        assert sent == pytest.approx(formula[5], rel=0.03)  # the counts and the norm travel too
    if rounds:
        psi = formula[0] / 4  # in millions of parameters, in fp32
        assert formula[5] == pytest.approx(psi * 4 * (rounds + 1) / 2, abs=0.01)
    gathered = re.search(r"gathered: at most ([\d.]+) MB of parameters at a time, of ([\d.]+) that", text)
    assert (gathered is not None) == ("zero3" in changes.values() and "one copy of the parameters: keeps" not in text)
    assert not gathered or 0 < float(gathered[1]) <= float(gathered[2])


@pytest.mark.parametrize("ranks", [full(2), 3])
def test_bytes_to_experts_are_those_of_the_formula(place, ranks):
    """Each rank its own, as its tokens' choices are uneven."""
    _, text = place.run(ranks=ranks, train__steps=2, run__memory="true", parallel__ep=ranks, model__family="qwen3_moe",
                        model__query_key_norm="true", model__experts=5, model__expert_feed_forward=24, loss__balance=0.01)
    (line,) = [line for line in text.splitlines() if line.startswith("to other ranks' experts and back")]
    sent = re.findall(r"rank (\d): (\d+) \((\d+)\)", line)
    assert [int(rank) for rank, _, _ in sent] == list(range(ranks))
    assert all(int(measured) == int(formula) > 0 for _, measured, formula in sent)


def test_a_trained_model_gives_the_same_loss_in_transformers(place):
    """20 steps; then transformers' loss on the held-out tokens equals ours to 1e-5 relative.

    All documents are the same and, with bos and eos, exactly one pack long: whichever is held out, its loss is
    the loss on that one pack.
    """
    import torch
    from transformers import AutoModelForCausalLM
    for path in place.text.iterdir():
        path.unlink()
    body = "".join(random.Random(3).choice("abcdefg ") for _ in range(62))
    for i in range(20):
        (place.text / f"{i}.txt").write_text(body)
    place.run(train__steps=20)
    ours = [row["validation_loss"] for row in place.metrics() if row.get("validation_loss") is not None][-1]
    model = AutoModelForCausalLM.from_pretrained(place.checkpoints()[-1], dtype=torch.float32)
    tokens = torch.tensor([[256, *body.encode(), 257]])
    with torch.no_grad():
        theirs = model(tokens, labels=tokens).loss.item()
    assert abs(ours - theirs) <= 1e-5 * theirs, (ours, theirs)
    assert theirs < math.log(258) - 0.5, "nothing was learnt: the comparison would show little"


def test_divergence_fails_and_keeps_the_checkpoint(place):
    text = "".join(place.run(optimizer__kind="sgd", schedule__peak=1e12, schedule__warmup=0, train__max_norm=0,
                             checkpoint__every=1, train__steps=200, train__evaluate_every=0, status=1))
    assert "not finite" in text and "nothing was updated" in text
    page = (place.folder / "run/report.html").read_text()
    (banner,) = re.findall(r'<p class="verdict bad">(.*?)</p>', page)
    assert "Lower schedule.<wbr>peak" in banner and "checkpoint.<wbr>resume=" in banner and "<dd>not finite</dd>" in page and "nan<" not in page, banner
    assert all(whole(path) for path in place.checkpoints())


def test_context_ranks_say_how_level_their_cuts_are(place):
    """With the first step, in the summary and in the report; without context ranks there is nothing to say."""
    out, text = place.run(parallel__cp_ring=2)
    assert text.count("first step: cut over 2 ring ranks: tokens ") == 1
    (said,) = re.findall(r"^context ranks +highest cost (([\d.]+) of the mean, ([\d.]+) at worst)$", out, re.M)
    assert 1 <= float(said[1]) <= float(said[2]) < 2
    html = (place.folder / "run/report.html").read_text()
    assert "highest cost" in html and said[0] in html
    assert "highest cost" not in place.run("alone")[0]


# ---- readers and ranks that go away: on one host ----

def through_a_shell(redirection, command):
    return subprocess.run(["sh", "-c", f'exec "$@" {redirection}', "sh", *map(str, command)], capture_output=True,
                          text=True, timeout=LIMIT)


def is_complete(shm, name="run"):
    """A run of all 12 steps, and nothing that it prints in any of its files."""
    shm.saved([8, 12], name)
    assert len(shm.steps(name)) == 12 and (shm.folder / name / "report.html").exists()
    for path in (shm.folder / name).rglob("*"):
        assert not path.is_file() or not re.search(rb"step 12/12|tokens/s on ", path.read_bytes()), path
    return True


@pytest.mark.parametrize("ranks", [full(1), 2])
def test_a_run_outlives_the_reader_of_what_it_prints(shm, ranks):
    """`isograd train ... 2>&1 | head`: it trains on, saves as it would, and its status is that of the run."""
    process = shm.start(ranks=ranks, checkpoint__every=10)  # a line is printed with each checkpoint
    process.stdout.close()
    shm.trains_on(process, 50)
    os.kill(process.pid, signal.SIGTERM)
    assert process.wait(LIMIT) == 0
    assert shm.checkpoints()[-1].name == f"step-{shm.steps()[-1]['step']:08}" and whole(shm.checkpoints()[-1])
    process = subprocess.Popen(shm.command("short", ranks=ranks), stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    process.stdout.close()  # before the first line
    assert process.wait(LIMIT) == 0
    assert is_complete(shm, "short")


@pytest.mark.parametrize("redirection, ranks", by_turns([">&-", "2>&-", ">&- 2>&- <&-", "2>/dev/full", ">/dev/full"], [1, 2]))
def test_a_run_whose_standard_streams_are_closed_or_full(shm, redirection, ranks):
    """A closed one is not a file of the run's that is opened next. A full disk has its status, the run is whole."""
    done = through_a_shell(redirection, shm.command(ranks=ranks))
    assert done.returncode == (2 if redirection == ">/dev/full" else 0), done.stdout + done.stderr
    assert is_complete(shm)
    if redirection == ">/dev/full":
        assert done.stderr.count("ConfigError") == 1 and "standard output" in done.stderr, done.stderr


def test_a_verb_that_leaves_no_files_must_print_somewhere(shm):
    for redirection in (">&-", ">/dev/full"):
        done = through_a_shell(redirection, [BINARY, "config", shm.config()])
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
    (0, {}), full(2, {}), (1, {"parallel__strategy": "zero3"}),
    full(0, {"parallel__pp": 3, "model__layers": 3}), (2, {"parallel__pp": 3, "model__layers": 3})])
def test_a_terminal_is_told_of_a_lost_rank_in_a_few_lines(shm, victim, changes):
    """Which one, in what, what the others waited in, how to continue; the last operations are in a file."""
    process = shm.start(ranks=3, checkpoint__every=20, **changes)
    shm.wait(process, lambda: len(shm.checkpoints()) > 0)
    lost = ranks_of(process)[victim]
    os.kill(lost, signal.SIGKILL)
    out = finish(process, 3)
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
    operations = shm.folder / "run/last_operations.txt"
    assert re.search(rf"^isograd: the last operations of rank \d in group '.*': {operations}$", out, re.M), out
    assert re.search(r"^  #\d+ ", operations.read_text(), re.M)
    command = shlex.split(re.search(r"; to continue: (isograd .*) \(from the last checkpoint", error).group(1))
    done = subprocess.run([BINARY, *command[1:], "--set", f"train.steps={shm.last_saved() + 3}"], capture_output=True, text=True,
                          timeout=LIMIT)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_rank_that_is_lost_before_a_checkpoint_says_that_there_is_none(shm):
    process = shm.start(ranks=2)
    os.kill(ranks_of(process)[1], signal.SIGKILL)
    out = finish(process, 3)
    assert "; no checkpoint had been saved yet." in out, out


def test_data_that_is_cut_short_in_mid_run_is_named(shm):
    """Instead of a SIGBUS without words, or of zeros that are trained on."""
    process = shm.start(ranks=1, checkpoint__every=5)
    (shard,) = [path for path in (shm.folder / "cache").rglob("*") if path.suffix in (".bin", ".isograd")]
    size = shard.stat().st_size
    os.truncate(shard, 0)
    out = finish(process, 2)
    assert out.count("ConfigError") == 1 and str(shard) in out, out
    assert "found 0 bytes: it was truncated" in out and f"the {size} bytes" in out, out
    assert whole(shm.checkpoints()[-1])


# ---- ended from outside ----

def test_sigterm_saves_and_the_printed_command_continues_bit_for_bit(place):
    """As it is printed, also where --set changed what the file says, and a shell would change the folder's name."""
    stopped = place.folder / "stopped $(false) here"
    process = place.start("run", schedule__kind="constant", run__directory=stopped)
    ends = []
    for _ in range(2):
        os.kill(process.pid, signal.SIGTERM)
        out = finish(process)
        ends.append(stopped_after(out))
        assert [path.name for path in place.checkpoints(stopped)][-1] == f"step-{ends[-1]:08}"
        command = shlex.split(re.search(r"to continue: (isograd .*)", out).group(1))
        assert command[0] == "isograd"
        if len(ends) == 1:
            process = subprocess.Popen([str(BINARY), *command[1:]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                       text=True, start_new_session=True)
            place.wait(process, lambda: len(place.metrics(stopped)) > ends[0] + 20)
    assert 5 < ends[0] < ends[1] - 20
    assert not (place.folder / "run").exists()
    place.run("straight", schedule__kind="constant", train__steps=ends[1], train__evaluate_every=0, checkpoint__every=0)
    for name in ("model.safetensors", "optimizer.safetensors"):
        files = [place.checkpoints(run)[-1] / name for run in (stopped, "straight")]
        assert files[0].read_bytes() == files[1].read_bytes(), name
    losses = [{row["step"]: row["loss"] for row in place.steps(run)} for run in (stopped, "straight")]
    assert len(losses[0]) == ends[1] and losses[0] == losses[1]


def test_a_hang_up_saves_as_sigterm_does(place):
    process = place.start()
    os.kill(process.pid, signal.SIGHUP)
    out = finish(process)
    place.saved([stopped_after(out)])


def test_a_rank_killed_during_start_ends_the_run_at_once(place):
    """Long before the launcher's grace (10 s), whatever it was doing then."""
    for delay in (0, 0.05, 0.3, 1.0):
        process = subprocess.Popen(place.command(f"start-{delay}", ranks=3, train__steps=1000000), text=True,
                                   stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True)
        place.wait(process, lambda: len(ranks_of(process)) == 3)
        time.sleep(delay)
        started = time.time()
        os.kill(ranks_of(process)[1], signal.SIGKILL)
        out = finish(process, 3)
        if place.backend == "shm":
            assert time.time() - started < 5, out
            assert "rank 1" in out and "signal 9" in out, out
            assert len(re.findall("PeerError", out)) <= 1, out


def test_a_full_disk_has_one_status_whatever_was_being_written(place):
    process = place.start(train__steps=100000)
    for rank in ranks_of(process):
        room = (place.folder / "run/metrics.jsonl").stat().st_size + 2000
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (room, room))
    out = finish(process, 2)
    assert out.count("ConfigError") == 1 and "metrics.jsonl" in out or "tfevents" in out, out


def test_ctrl_c_in_a_terminal_is_one_wish_to_stop(place):
    """The launcher and every rank get it from the terminal, and the ranks a second time from the launcher."""
    process = place.start(ranks=3)
    os.killpg(process.pid, signal.SIGINT)
    out = finish(process)
    place.saved([stopped_after(out)])


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
    place.saved([2])
    os.killpg(process.pid, signal.SIGINT)
    out = finish(process)
    assert out.count("skipped by a signal: nothing is proved") == 1 and "PASS" not in out, out
    assert "skipped by a signal" in (place.folder / "run/report.html").read_text()


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
    process.communicate(timeout=LIMIT)
    assert process.returncode != 0 and time.time() - started < 15


@pytest.mark.both_backends
def test_a_hung_rank_ends_the_run_within_the_timeout(place):
    process = place.start(parallel__timeout_seconds=5)
    ranks = ranks_of(process)
    started = time.time()
    os.kill(ranks[1], signal.SIGSTOP)
    try:
        out = finish(process, 3)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(ranks[1], signal.SIGKILL)
    # The timeout and the end of the others; mpirun takes its time. No grace for one that cannot use it.
    assert time.time() - started < (12 if place.backend == "shm" else 33)
    assert re.search(r"rank 1\b" if place.backend == "shm" else "not complete within 5000 ms", out), out


def test_a_full_disk_while_saving_leaves_the_previous_checkpoint_whole(place):
    process = place.start(checkpoint__every=20, train__steps=100000)
    place.wait(process, lambda: len(place.checkpoints()) > 0)
    for rank in ranks_of(process):
        # As if the disk had this much room left for any one file: metrics fit, weights do not.
        resource.prlimit(rank, resource.RLIMIT_FSIZE, (60000, 60000))
    out = finish(process, 2)
    assert "ConfigError" in out and "step-" in out, out
    assert place.checkpoints() and all(whole(path) for path in place.checkpoints())
    assert not list((place.folder / "run/checkpoints").glob(".*")), "leftovers"
    place.run(checkpoint__resume="latest", train__steps=place.last_saved() + 3)
