"""A model that no rank could hold: made, trained, saved, resumed on another mesh, and never whole on any rank.

Memory is what the ranks have together, private and shared (proportional set size, sampled), over their number. What
a rank has in addition to its shards (the process, its libraries, one unit's values, activations) does not grow with the
layers, so that models of two sizes are compared: what the larger one takes beyond the smaller one.
"""
import pathlib
import subprocess
import threading
import time

import pytest
from safetensors import safe_open

from test_train import Workplace, finish, ranks_of

MB = 1e6
HIDDEN, FORWARD, VOCABULARY = 512, 1536, 258
SMALL, LARGE = 2, 6  # layers


def parameters(layers):
    return layers * (4 * HIDDEN**2 + 3 * HIDDEN * FORWARD + 2 * HIDDEN) + 2 * VOCABULARY * HIDDEN + HIDDEN


def memory_of(pid):
    try:
        lines = pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(("Pss_Anon:", "Pss_Shmem:")))


def peak_of(command, ranks):
    """Runs it to its end; the most bytes that a rank had on average, over time."""
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                               start_new_session=True)
    most, done = [0], threading.Event()

    def watch():
        while not done.is_set():
            most[0] = max(most[0], sum(memory_of(pid) for pid in ranks_of(process)) / ranks)
            time.sleep(0.02)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        out = finish(process)
    finally:
        done.set()
        watcher.join()
        process.kill()
    return most[0], out


def settings(layers, **changes):
    return {"model__hidden": HIDDEN, "model__layers": layers, "model__heads": 8, "model__key_value_heads": 8,
            "model__head_dim": HIDDEN // 8, "model__feed_forward": FORWARD, "model__tied_output": "false",
            "batch__packs_per_step": 4, "batch__packs_per_micro_batch": 1, "train__steps": 2,
            "train__evaluate_every": 0, "schedule__warmup": 0, "run__peak_tflops": 1, "checkpoint__every": 1,
            "parallel__strategy": "zero3", "parallel__share_parameters": "off", "parallel__prefetch": "false",
            "parallel__checkpoint_activations": "true", "data__pack_length": 16,
            "verify__checksums_every": 0, "sample__tokens": 0, "sample__prompt": "", **changes}


def growth_of(peaks):
    """Bytes a rank for each parameter that the larger model has more."""
    return (peaks[LARGE] - peaks[SMALL]) / (parameters(LARGE) - parameters(SMALL))


# Parameter, gradient and two moments in fp32, a quarter of each: 4 bytes. A rank that had the whole parameters once,
# in whatever form, would have 3 more. The bound lies in the middle.
ALLOWED = 16 / 4 + 3 / 2


def test_no_rank_ever_holds_the_model(tmp_path):
    made, resumed = {}, {}
    for layers in (SMALL, LARGE):
        place = Workplace(tmp_path / str(layers), "shm")
        made[layers], _ = peak_of(place.command("made", ranks=4, **settings(layers)), 4)
        first = place.checkpoints("made")[0]
        assert first.name == "step-00000001"
        # Two rows of tp with two shards: each rank has half of half.
        resumed[layers], out = peak_of(place.command("resumed", ranks=4, **settings(
            layers, parallel__tp=2, checkpoint__resume=str(first))), 4)
        loss = [row["loss"] for name in ("made", "resumed") for row in place.metrics(name) if row.get("step") == 2 and "loss" in row]
        assert loss[1] == pytest.approx(loss[0], rel=1e-5), out
        # The checkpoint is a directory that others load, however the ranks held the model.
        with safe_open(place.checkpoints("resumed")[-1] / "model.safetensors", "pt") as file:
            assert file.get_tensor("model.layers.0.mlp.down_proj.weight").shape == (HIDDEN, FORWARD)
            assert sum(file.get_tensor(name).numel() for name in file.keys()) == parameters(layers)
    for peaks in (made, resumed):
        print({layers: f"{peak / MB:.0f} MB" for layers, peak in peaks.items()}, f"{growth_of(peaks):.2f} bytes a parameter")
        assert growth_of(peaks) <= ALLOWED


def test_the_bound_is_one_that_a_whole_model_breaks(tmp_path):
    peaks = {}
    for layers in (SMALL, LARGE):
        place = Workplace(tmp_path / str(layers), "shm")
        peaks[layers], _ = peak_of(place.command("whole", ranks=4, **settings(
            layers, sample__tokens=40, sample__prompt="a")), 4)
    print({layers: f"{peak / MB:.0f} MB" for layers, peak in peaks.items()}, f"{growth_of(peaks):.2f} bytes a parameter")
    assert growth_of(peaks) > ALLOWED
