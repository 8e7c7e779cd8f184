"""One unchanged command starts a run, continues it after signals and kills, and ends it with the bits of a run without them.

`checkpoint.resume = "auto"`, `run.on_signal`, exit status 75, `checkpoint.every_seconds` and `checkpoint.keep_best`."""
import contextlib
import json
import os
import pathlib
import random
import re
import shutil
import signal
import time

import pytest
from conftest import BINARY, FULL, ROOT, full, isograd
from test_train import LIMIT, finish, place, ranks_of, shm, stopped_after, whole  # noqa: F401  # place and shm are fixtures

AGAIN = 75  # saved, run the same command again (docs/errors.md)
STEADY = {"schedule__kind": "constant"}  # whatever train.steps is
AUTO = {"checkpoint__resume": "auto", **STEADY}


def started(place, *args, **changes):
    return place.begin(place.command(*args, **changes))


def ends_alike(place, name, other, step):
    """The last checkpoints of two runs, and the losses of all their steps, of validation too."""
    for file in ("model.safetensors", "optimizer.safetensors"):
        one, two = (place.folder / run / f"checkpoints/step-{step:08}" / file for run in (name, other))
        assert one.read_bytes() == two.read_bytes(), file
    one, two = ([(row["step"], row["loss"], row["norm"]) for row in place.steps(run)] for run in (name, other))
    assert [step for step, *_ in one] == list(range(1, step + 1)) and one == two
    assert validations_of(place, name) == validations_of(place, other)


# ---- checkpoint.resume = "auto" ----

def test_one_command_starts_continues_and_says_when_nothing_is_left(place):
    first = "".join(place.run(**AUTO, train__steps=12))
    assert "continuing" not in first and "were made before" not in first
    again = "".join(place.run(**AUTO, train__steps=12))
    assert "all 12 steps were made before: this run repeats its end alone" in again, again
    place.saved([8, 12])
    longer = "".join(place.run(**AUTO, train__steps=14))
    assert "continuing after step 12" in longer, longer
    place.run("straight", **STEADY, train__steps=14)
    ends_alike(place, "run", "straight", 14)


@pytest.mark.parametrize("left", ["an empty folder", "an incomplete checkpoint", "rows of metrics"])
def test_what_a_run_without_a_checkpoint_has_left_is_begun_anew(shm, left):
    run = shm.folder / "run"
    run.mkdir()
    if left == "an incomplete checkpoint":
        shm.run("other")
        for name in ("step-00000004", ".step-00000008.partial"):
            shutil.copytree(shm.checkpoints("other")[-1], run / "checkpoints" / name)
            (run / "checkpoints" / name / "checksums.json").unlink()
    if left == "rows of metrics":
        process = shm.start(**AUTO)
        os.kill(process.pid, signal.SIGKILL)
        finish(process, -signal.SIGKILL)
        assert len(shm.metrics()) > 5
    said = "".join(shm.run(**AUTO))
    assert "continuing after" not in said
    assert ("ended before its first checkpoint; this one begins anew" in said) == (left == "rows of metrics"), said
    shm.saved([8, 12])
    assert [row["step"] for row in shm.steps()] == list(range(1, 13))


def test_another_run_is_refused_by_its_key(shm):
    shm.run(**AUTO)
    assert "run.seed: found 6; expected 5, as in checkpoint" in shm.run(**AUTO, run__seed=6, status=2)[1]
    assert "model.feed_forward" in shm.run(**AUTO, model__feed_forward=40, status=2)[1]
    for path in shm.checkpoints():
        shutil.rmtree(path)
    said = shm.run(**AUTO, status=2)[1]
    assert "report.html of an earlier run" in said, said  # a run that has ended, not one that was cut short
    (shm.folder / "run/report.html").unlink()
    said = shm.run(**AUTO, model__feed_forward=40, status=2)[1]
    assert f"model.feed_forward: found 40; expected 48, as in {shm.folder}/run/config.toml" in said, said
    said = shm.run(**AUTO, loss__label_smoothing=0.1, status=2)[1]
    assert "loss.label_smoothing: found 0.1; expected 0" in said, said
    assert len(shm.steps()) == 12, "a refused run has removed the rows of another"
    shm.run(**AUTO, checkpoint__every=3)  # a key that a resume may change


def test_overwrite_with_auto_is_refused(shm):
    shm.run(**AUTO)
    done = isograd(*shm.command(**AUTO)[1:], "--overwrite", status=2)
    assert 'found checkpoint.resume = "auto" in the same command' in done.stderr, done.stderr
    shm.saved([8, 12])


def change_state(checkpoint, change):
    """state.json after `change`, under checksums that fit."""
    xxhash = pytest.importorskip("xxhash")
    state = json.loads((checkpoint / "state.json").read_text())
    change(state)
    (checkpoint / "state.json").write_text(json.dumps(state))
    listing = json.loads((checkpoint / "checksums.json").read_text())
    text = (checkpoint / "state.json").read_bytes()
    listing["files"]["state.json"] = {"bytes": len(text), "xxh3": xxhash.xxh3_64_hexdigest(text)}
    listing["xxh3_of_files"] = xxhash.xxh3_64_hexdigest(json.dumps(listing["files"], sort_keys=True, separators=(",", ":")).encode())
    (checkpoint / "checksums.json").write_text(json.dumps(listing))


def test_a_snapshot_of_another_version_is_refused(shm):
    shm.run(**AUTO)
    change_state(shm.checkpoints()[-1], lambda state: state.update(format=2))
    said = shm.run(**AUTO, status=2)[1]
    assert "format: found 2; expected 1, the only one this version reads" in said, said


# ---- signals ----

@pytest.mark.parametrize("number, status", [(signal.SIGUSR1, AGAIN), (signal.SIGTERM, AGAIN), (signal.SIGINT, 0), full(signal.SIGHUP, AGAIN)])
@pytest.mark.parametrize("to", ["launcher", "rank"])
def test_a_signal_saves_after_the_same_step_on_all_ranks(place, number, status, to):
    """Ctrl-C is a user's wish that the run ends, also the loop around it. The same command then continues."""
    process = place.start(ranks=3, **AUTO)
    os.kill(process.pid if to == "launcher" else ranks_of(process)[1], number)
    out = finish(process, status)
    end = stopped_after(out)
    assert "to continue, run the same command again" in out, out
    place.saved([end])
    said = "".join(place.run(ranks=3, **AUTO, train__steps=end + 9, train__evaluate_every=0, checkpoint__every=0))
    assert f"continuing after step {end}" in said, said
    place.run("straight", ranks=3, **STEADY, train__steps=end + 9, train__evaluate_every=0, checkpoint__every=0)
    losses = [[row["loss"] for row in place.steps(name)[:end // 2]] for name in ("run", "straight")]
    assert losses[0] == losses[1]


def test_without_auto_a_signal_ends_with_0_and_the_command_to_continue(shm):
    process = shm.start()
    os.kill(process.pid, signal.SIGUSR1)
    out = finish(process)
    assert re.search(r"stopped after step \d+; to continue: isograd train .* --set checkpoint.resume=", out), out


def sent_to_all(process, number):
    """As a batch system does: to the launcher, which passes it on, and to each rank."""
    for pid in (process.pid, *ranks_of(process)):
        os.kill(pid, number)


def test_a_signal_to_save_saves_once_and_the_run_goes_on(place):
    process = place.start(ranks=3, **AUTO, checkpoint__keep=100)
    for times in range(1, 4):
        sent_to_all(process, signal.SIGUSR2)
        place.wait(process, lambda: len(place.checkpoints()) >= times)
        place.trains_on(process, 20)
        time.sleep(1.1)  # within a second it is the same wish
        assert len(place.checkpoints()) == times
    assert all(whole(path) for path in place.checkpoints())
    sent_to_all(process, signal.SIGUSR1)
    sent_to_all(process, signal.SIGUSR1)
    stopped_after(finish(process, AGAIN))
    assert len(place.checkpoints()) == 4


def test_what_a_signal_does_is_configured(shm):
    process = shm.start(**AUTO, run__on_signal__usr1="ignore", run__on_signal__usr2="stop", checkpoint__keep=100)
    sent_to_all(process, signal.SIGUSR1)
    shm.trains_on(process, 20)
    assert not shm.checkpoints()
    sent_to_all(process, signal.SIGUSR2)
    end = stopped_after(finish(process, AGAIN))
    shm.saved([end])
    process = shm.start(**AUTO, run__on_signal__usr1="save")
    os.kill(ranks_of(process)[0], signal.SIGUSR1)
    shm.wait(process, lambda: len(shm.checkpoints()) == 2)
    shm.trains_on(process, 5)
    os.kill(process.pid, signal.SIGKILL)
    finish(process, -signal.SIGKILL)
    assert 'run.on_signal.usr1=none: found "none"' in shm.run(run__on_signal__usr1="none", status=2)[1]


@pytest.mark.parametrize("number, status", [(signal.SIGUSR1, AGAIN), (signal.SIGUSR2, 0)])
def test_a_signal_while_ranks_start_waits_for_the_first_step(shm, number, status):
    long = {**AUTO, "train__steps": 400, "train__evaluate_every": 0}  # more than are made before the last signal
    for delay in (0, 0.1, 0.4):
        name = f"run-{delay}"
        process = started(shm, name, **long, checkpoint__keep=100, checkpoint__every=0)
        shm.wait(process, lambda: len(ranks_of(process)) == 2)
        time.sleep(delay)
        os.kill(process.pid, number)
        out = finish(process, status)
        steps = [int(path.name[5:]) for path in shm.checkpoints(name)]
        if number == signal.SIGUSR1:
            assert steps == [stopped_after(out)] and steps[0] < 400, out
        else:
            assert len(steps) == 2 and steps[1] == 400, out
        shm.run(name, **long)
        assert len(shm.steps(name)) == 400


def test_signals_while_it_saves_and_validates_are_not_lost(shm):
    """A save after each step: almost every moment is one of a save. A second SIGUSR1 does not end the process."""
    for _ in range(4):
        process = shm.start(**AUTO, checkpoint__every=1, train__evaluate_every=1)
        folder = shm.folder / "run/checkpoints"
        shm.wait(process, lambda: any(path.name.endswith(".partial") for path in listed(folder)))
        sent_to_all(process, signal.SIGUSR1)
        time.sleep(1.2)
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)
        end = stopped_after(finish(process, AGAIN))
        shm.saved([end - 1, end])


def listed(folder):
    with contextlib.suppress(FileNotFoundError):
        return list(folder.iterdir())
    return []


def test_a_signal_that_skips_the_proof_asks_for_another_start(shm):
    """A signal but Ctrl-C: the next start makes the proof, and its status is that of the proof."""
    changes = {**AUTO, "verify__at_end": "true", "train__steps": 2, "train__evaluate_every": 0, "data__pack_length": 8,
               "batch__packs_per_step": 300, "batch__packs_per_micro_batch": 1}
    process = started(shm, **changes)
    said = ""
    while "proving the gradient" not in said:
        line = process.stdout.readline()
        assert line, said
        said += line
    os.kill(process.pid, signal.SIGTERM)
    out = finish(process, AGAIN)
    assert "skipped by a signal: nothing is proved" in out and "run the same command again" in out, out
    again = "".join(shm.run(**changes))
    assert "all 2 steps were made before" in again and "PASS" in again, again


# ---- docs/preemption.md ----

def of_the_page(language, number=0):
    return re.findall(rf"^```{language}\n(.*?)^```", (ROOT / "docs/preemption.md").read_text(), re.M | re.S)[number]


def in_the_place(place, tmp_path, script, programs=()):
    """A script of the page as a process, where run.toml is a run that would not end by itself, and with other programs in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "isograd").symlink_to(BINARY)
    for name, text in dict(programs).items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    config = place.config().read_text().replace("steps = 12", "steps = 4000").replace("every = 4\n", "every = 0\n")
    assert "steps = 4000" in config
    (place.folder / "run.toml").write_text(config.replace("evaluate_every = 4", "evaluate_every = 0"))
    return place.begin(["bash", "-c", script], cwd=place.folder,
                       env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"})


def launcher_of(process):
    """The `isograd train` that a script has started."""
    (rank, *_) = ranks_of(process)
    return int(open(f"/proc/{rank}/stat").read().rsplit(")", 1)[1].split()[1])


def test_the_loop_of_the_page_ends_with_the_run(shm, tmp_path):
    process = in_the_place(shm, tmp_path, of_the_page("sh"))
    for _ in range(2):
        saved = len(shm.checkpoints()) and shm.last_saved()
        shm.wait(process, lambda: len(shm.steps()) > saved + 5 and len(ranks_of(process)) == 2)
        os.kill(launcher_of(process), signal.SIGUSR1)
        shm.wait(process, lambda: shm.checkpoints() and shm.last_saved() > saved)
    out, _ = process.communicate(timeout=3 * LIMIT)
    assert process.returncode == 0 and shm.last_saved() == 4000, out
    assert out.count("run the same command again") == 2 and out.count("continuing after step") == 2, out


def test_the_batch_script_of_the_page_is_requeued_until_the_run_has_ended(shm, tmp_path):
    """With an srun that starts its command and a scontrol that writes down what it is asked for."""
    programs = {"srun": 'exec "$@"', "scontrol": f'echo "$@" >> {tmp_path}/asked'}
    process = in_the_place(shm, tmp_path, "export SLURM_JOB_ID=17\n" + of_the_page("sh", 1), programs)
    shm.wait(process, lambda: len(shm.steps()) > 5)
    for pid in (launcher_of(process), *ranks_of(process)):
        os.kill(pid, signal.SIGUSR1)
    finish(process, AGAIN)
    assert (tmp_path / "asked").read_text() == "requeue 17\n"


def test_the_manifest_of_the_page_runs_the_command_of_the_page():
    yaml = pytest.importorskip("yaml")
    pod = yaml.safe_load(of_the_page("yaml"))["spec"]["template"]["spec"]
    assert pod["restartPolicy"] == "OnFailure" and pod["terminationGracePeriodSeconds"] > 30
    command = " ".join(pod["containers"][0]["command"])
    assert command in of_the_page("bash") and command in of_the_page("sh", 1) and command in of_the_page("ini")


# ---- when to save, and what to keep ----

def test_a_save_by_the_clock(shm):
    process = shm.start(**AUTO, checkpoint__every_seconds=0.5, checkpoint__keep=100)
    begun = time.time()
    shm.wait(process, lambda: len(shm.checkpoints()) >= 3)
    assert 0.9 < time.time() - begun
    os.kill(process.pid, signal.SIGUSR1)
    finish(process, AGAIN)
    took = time.time() - begun
    assert 3 <= len(shm.checkpoints()) <= 4 + took / 0.5
    assert all(whole(path) for path in shm.checkpoints())


def validations_of(place, name="run"):
    return [(row["step"], row["validation_loss"]) for row in place.metrics(name) if row.get("validation_loss") is not None]


def test_the_best_by_validation_loss_are_kept_and_named(shm):
    """Also where checkpoint.every and checkpoint.keep would not have kept them. A rate that is too high makes the loss rise again."""
    changes = {"train__steps": 40, "train__evaluate_every": 2, "schedule__peak": 0.3, "checkpoint__every": 0, "checkpoint__keep": 1,
               "checkpoint__keep_best": 1}
    shm.run(**changes)
    losses = dict(validations_of(shm))
    best = sorted(losses, key=lambda step: (losses[step], step))[:1]
    assert best[0] < 38, f"the loss never rose: the test shows nothing: {losses}"
    shm.saved(sorted({*best, 40}))
    for path in shm.checkpoints():
        step = int(path.name[5:])
        assert json.loads((path / "state.json").read_text())["validation_loss"] == losses[step]
    texts = [isograd("sample", folder, "--tokens", 80, status=0).stdout for folder in
             (shm.folder / "run/best", shm.folder / f"run/checkpoints/step-{best[0]:08}", shm.folder / "run")]
    assert texts[0] == texts[1] != texts[2]
    said = "".join(shm.run(**{**changes, "checkpoint__resume": "best", "train__steps": best[0] + 1}))
    assert f"continuing after step {best[0]}" in said, said


def test_there_is_no_best_without_validation(shm):
    shm.run(data__validation_fraction=0)
    said = shm.run(data__validation_fraction=0, checkpoint__resume="best", status=2)[1]
    assert "no complete checkpoint with a validation loss" in said, said
    said = isograd("sample", "org/best", status=2).stderr  # a name, as those of the Hub are
    assert '"org/best", no such folder' in said and "hf download" in said, said


# ---- preempted at random ----

EVERY = 5
WAYS = ["USR1", "TERM", "USR2", "kill the launcher", "kill a rank"]


def newest(place, name="run"):
    complete = [path for path in place.checkpoints(name) if (path / "checksums.json").exists()]
    return int(complete[-1].name[5:]) if complete else 0


def alive(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


def gone(ranks):
    """Ranks whose launcher was killed end with it."""
    end = time.time() + LIMIT
    while any(alive(rank) for rank in ranks):
        assert time.time() < end, "ranks outlive their launcher"
        time.sleep(0.01)


def of_this_start(place, begun):
    """The log is not that of an earlier start, which may have made more steps than it saved."""
    with contextlib.suppress(FileNotFoundError):
        return (place.folder / "run/metrics.jsonl").stat().st_mtime > begun
    return False


def preempted(place, rng, steps, times, plant=lambda checkpoints: None, **changes):
    """Runs one command until it is finished, preempting it so often at random. Returns how often each way."""
    changes = {**AUTO, "train__steps": steps, "train__evaluate_every": 10, "checkpoint__every": EVERY, **changes}
    counts = dict.fromkeys([*WAYS, "while starting", "while saving"], 0)
    last = 0  # of the last checkpoint
    while True:
        begun = time.time()
        process = started(place, **changes)
        left = times - sum(counts[way] for way in WAYS)
        if left == 0:
            out, _ = process.communicate(timeout=LIMIT + steps / 20)
            assert process.returncode == 0, out
            break
        way, when = rng.choice(WAYS), rng.choice(["steps", "steps", "saving", "starting"])
        more = last + rng.randrange(2 * EVERY)
        place.wait(process, lambda: len(ranks_of(process)) == 2)
        ranks = ranks_of(process)
        if when != "starting":
            place.wait(process, lambda: of_this_start(place, begun) and (place.steps() or [{"step": 0}])[-1]["step"] > more)
        if when == "saving":
            end = time.time() + 5
            while time.time() < end and not any(path.name.endswith(".partial") for path in listed(place.folder / "run/checkpoints")):
                pass
        else:
            time.sleep(rng.uniform(0, 0.03))
        counts[way] += 1
        counts["while saving"] += when == "saving"
        counts["while starting"] += when == "starting"
        victim = rng.choice([process.pid, *ranks])
        with contextlib.suppress(ProcessLookupError):
            if way in ("USR1", "TERM", "USR2"):
                os.kill(victim, getattr(signal, f"SIG{way}"))
            if way == "kill the launcher":
                os.kill(process.pid, signal.SIGKILL)
            if way == "kill a rank":
                os.kill(rng.choice(ranks), signal.SIGKILL)
            if way == "USR2":
                time.sleep(rng.uniform(0, 0.1))
                os.kill(process.pid, signal.SIGKILL)
        out, _ = process.communicate(timeout=LIMIT)
        gone(ranks)
        # TERM while ranks start ends them as it ends any program; all others are handled.
        orderly = way == "USR1" or way == "TERM" and when != "starting"
        expected = [AGAIN] if orderly else [AGAIN, 3, 128 + signal.SIGTERM] if way == "TERM" else [3, -signal.SIGKILL]
        assert process.returncode in expected, f"{way}, {when}: {process.returncode}\n{out}"
        made = (place.steps() or [{"step": 0}])[-1]["step"]
        saved = newest(place)
        plant(place.checkpoints())
        # What is lost at most: the steps since the last save, and that save where it was under way.
        least = stopped_after(out) if process.returncode == AGAIN else (made - 1) // EVERY * EVERY
        assert newest(place) >= max(least, last), f"{way}, {when}: step {newest(place)} of {made}, at least {least} and {last}\n{out}"
        assert newest(place) == saved and all(whole(path) for path in place.checkpoints())
        said = re.search(r"continuing after step (\d+)", out)
        assert (int(said[1]) if said else 0) in (last, 0), out
        assert not said or last > 0
        last = newest(place)
        assert last < steps, f"all steps are made after {sum(counts[way] for way in WAYS)} of {times} preemptions"
    return counts


@pytest.mark.parametrize("times", [200 if FULL else 12])
def test_a_run_that_is_preempted_at_random_ends_with_the_same_bits(shm, times):
    seed = int(os.environ.get("PREEMPTION_SEED", random.randrange(1 << 30)))
    print(f"seed {seed}")
    steps = 35 * times
    begun = time.time()
    changes = {"parallel__strategy": "zero1", "train__evaluate_every": 10}
    counts = preempted(shm, random.Random(seed), steps, times, **changes)
    print(f"{times} preemptions in {time.time() - begun:.0f} s: {counts}")
    isograd(*shm.command("straight", **STEADY, **changes, train__steps=steps, checkpoint__every=0)[1:], status=0, limit=LIMIT + steps / 20)
    ends_alike(shm, "run", "straight", steps)
    assert not [path for path in listed(shm.folder / "run/checkpoints") if path.name.startswith(".")]


def removes_the_newest(checkpoints):
    if len(checkpoints) > 1:
        shutil.rmtree(checkpoints[-1])


def test_planted_a_step_that_is_lost_is_seen(shm):
    with pytest.raises(AssertionError, match="at least"):
        preempted(shm, random.Random(1), 200, 8, removes_the_newest)


def test_planted_a_position_that_is_not_restored_changes_the_bits(shm):
    """The loader begins its epoch again after a preemption, whose checkpoint is whole by its checksums."""
    process = shm.start(**AUTO)
    os.kill(process.pid, signal.SIGTERM)
    end = stopped_after(finish(process, AGAIN))
    state = json.loads((shm.checkpoints()[-1] / "state.json").read_text())
    assert state["step_of_epoch"] + state["epoch"] > 0
    change_state(shm.checkpoints()[-1], lambda state: state.update(step_of_epoch=0 if state["step_of_epoch"] else 1))
    changes = {"train__steps": end + 5, "train__evaluate_every": 0, "checkpoint__every": 0}
    shm.run(**AUTO, **changes)
    shm.run("straight", **STEADY, **changes)
    with pytest.raises(AssertionError):
        ends_alike(shm, "run", "straight", end + 5)
