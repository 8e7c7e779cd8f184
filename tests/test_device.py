"""`isograd train` and `verify` with parallel.device = "cuda", on GPUs that are none (tests/standin_gpu.cpp): host memory
that passes for CUDA's and is as strict about devices. A real GPU is `./dev gpu-check`'s (docs/gpu.md).
"""
import functools
import json
import os
import pathlib
import re
import subprocess
import sys

import conftest
import pytest
from conftest import BUILD, FULL, LIMIT, ROOT, by_turns, full, rows_of
from run_files import text_tables, write_documents, write_run, write_video

STANDIN = BUILD / "tests/libisograd_standin_gpu.so"

COMMON = {"run": {"directory": "{folder}/run", "peak_tflops": 1}, "data": {"validation_fraction": 0.2},
          "train": {"steps": 3, "evaluate_every": 2, "evaluate_packs": 2}, "parallel": {"timeout_seconds": 60}}
TABLES = {
    "text": text_tables(5, 1, 32, (16, 2, 4, 2, 4, 24), **COMMON, model={"max_positions": 64},
                        loss={"kind": "sample_mean", "label_smoothing": 0.1, "z_loss": 0.01}, sample={"tokens": 8},
                        optimizer={"groups": ["*.mlp.*: rate=2 weight_decay=0.3", "*norm.weight: rate=0.5 weight_decay=0.2"]}),
    "video": {**COMMON, "batch": {"videos_per_step": 5, "tokens_per_micro_batch": 30},
              "model": {"kind": "video", "hidden": 16, "layers": 2, "heads": 4, "head_dim": 4, "feed_forward": 24,
                        "initializer_range": 0.1},
              "video": {"files": ["{folder}/videos"], "height": 12, "frames_per_second": 0, "patch_height": 4, "patch_width": 4,
                        "timestep_features": 8, "gate_init": 0.5}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if not STANDIN.exists():
        torch = re.search(r"ISOGRAD_TORCH:PATH=(.*)", (BUILD / "CMakeCache.txt").read_text()).group(1)
        if (pathlib.Path(torch) / "lib/libtorch_cuda.so").exists():
            pytest.skip("needs a build without CUDA: a real GPU is ./dev gpu-check's")
        pytest.fail(f"{STANDIN} is not built")
    path = tmp_path_factory.mktemp("device")
    write_documents(path, 20)
    (path / "videos").mkdir()
    for i, shape in enumerate([(2, 8, 8), (4, 8, 12), (8, 12, 16), (3, 8, 8), (6, 12, 8), (2, 12, 12)]):
        write_video(path / "videos" / f"clip{i}.y4m", *shape, i)
    return path


def config(folder, kind, dtype="float32"):
    return write_run(folder / f"{kind}-{dtype}.toml", TABLES[kind], train={"dtype": dtype})


def isograd(*arguments, gpu=True, status=None):
    return conftest.isograd(*arguments, status=status, **({"LD_PRELOAD": str(STANDIN)} if gpu else {}))


def train(path, name, *arguments, gpu=True):
    """The finished process, its folder and its losses. The proof is of what runs on the stand-in, not of the CPU's run."""
    run = path.parent / name
    proof = [] if gpu else ["verify.at_end=false"]
    done = isograd("train", path, "--overwrite", f"run.directory={run}", *proof, *arguments, gpu=gpu, status=0)
    return done, run, [row["loss"] for row in rows_of(run)]


@functools.cache
def losses_on_cpu(path, *arguments):
    return train(path, "on_cpu", *arguments, gpu=False)[2]


LAYOUTS = [("text", "float32", 1, "bucketed", []), ("text", "bfloat16", 1, "zero3", []),
           ("text", "float64", 3, "naive", []), ("text", "float32", 3, "zero3", ["parallel.checkpoint_activations=true"]),
           ("text", "bfloat16", 2, "zero2", []), ("text", "float64", 2, "zero1", ["parallel.cp_ring=2"]),
           ("text", "float32", 2, "bucketed", ["parallel.cp_ulysses=2", "loss.fused=on"]),
           ("video", "float32", 1, "bucketed", []), ("video", "float64", 2, "zero3", ["parallel.cp_ring=2"])]


@pytest.mark.parametrize("kind, dtype, ranks, strategy, sets", LAYOUTS)
def test_a_run_on_gpus_is_the_run_on_the_cpu(folder, kind, dtype, ranks, strategy, sets, monkeypatch):
    """The same losses, the parity line at the end (the oracle is on the CPU), and work done on each rank's own GPU."""
    log = folder / "used.txt"
    log.unlink(missing_ok=True)
    monkeypatch.setenv("ISOGRAD_STANDIN_GPU", str(log))
    path = config(folder, kind, dtype)
    common = ["--ranks", ranks, f"parallel.strategy={strategy}", *sets]
    done, run, losses = train(path, "on_gpu", "--device", "cuda", "--backend", "shm", "--memory", *common)
    assert re.search(r"parity\s+.*PASS", done.stdout), done.stdout
    assert "on GPUs over shm" in done.stdout
    assert "one copy of the parameters" not in done.stdout
    page = (run / "report.html").read_text()
    assert "cuda:0 on rank 0" in page

    used = [dict(zip(words[::2], map(int, words[1::2]))) for words in map(str.split, log.read_text().splitlines())]
    assert len(used) == ranks
    assert all(each["pinned"] > 0 and each["unpinned"] == 0 for each in used), used
    for gpu in ("gpu0", "gpu1"):  # rank 2 shares the first one's
        assert sum(each[gpu] > 0 for each in used) == len(range(0 if gpu == "gpu0" else 1, ranks, 2)), used

    assert len(losses) == 3
    if dtype == "float64":  # below it the parity line has said how far they may be apart
        assert losses == pytest.approx(losses_on_cpu(path, *common), rel=1e-9)


LOSSES_ALONE = ("schedule.kind=constant", "verify.at_end=false")  # compared; each layout is proved above and below


def test_checkpoints_load_on_either(folder):
    path = config(folder, "text", "float64")
    for first, then in [("cuda", "cpu"), ("cpu", "cuda")]:
        name = f"{first}_{then}"
        train(path, name, "--device", first, "train.steps=3", *LOSSES_ALONE)
        done, run, losses = train(path, name, "--device", then, "train.steps=6", "checkpoint.resume=latest", *LOSSES_ALONE)
        assert "continuing after step 3" in done.stderr and len(losses) == 6
        assert losses == pytest.approx(losses_on_cpu(path, "train.steps=6", *LOSSES_ALONE), rel=1e-9)
        assert isograd("sample", run, "--tokens", 4, gpu=False).returncode == 0


@pytest.mark.parametrize("dtype, graphs", by_turns(["float64", "bfloat16"], ["true", "false"]))
def test_a_step_waits_for_the_device_once(folder, dtype, graphs, monkeypatch):
    """Whatever the micro-batches and terms: what is read of a step is read together. Between two runs that differ in
    their number of steps alone; a wait more in each step would be 20 more."""
    log = folder / "waits.txt"
    monkeypatch.setenv("ISOGRAD_STANDIN_GPU", str(log))
    waits, losses = [], []
    for steps in (4, 24):
        log.unlink(missing_ok=True)
        _, _, found = train(config(folder, "text", dtype), f"waits_{graphs}", "--device", "cuda", "--ranks", 1,
                            f"parallel.cuda_graphs={graphs}", f"train.steps={steps}", "train.evaluate_every=99",
                            "checkpoint.every=0", "sample.tokens=0", *LOSSES_ALONE)
        words = log.read_text().split()
        waits.append(int(words[words.index("waits") + 1]))
        losses.append(found)
    assert losses[0] == losses[1][:4]
    assert waits[1] - waits[0] < 20 + 10, waits  # some are of the clock: the peak of products, lines of progress


def test_batches_of_a_recorded_form_train_as_on_the_cpu(folder):
    """Filled up with tokens and fragments that carry no loss, their documents known to the device alone."""
    path = config(folder, "text", "float64")
    for sets in (["loss.kind=sample_mean"], ["loss.kind=token_mean", "loss.fused=on"],
                 ["batch.packs_per_micro_batch=2", "train.max_norm=0.5"]):
        sets = ["--ranks", 1, "train.steps=5", *sets]
        _, _, losses = train(path, "recorded", "--device", "cuda", *sets)
        assert losses == pytest.approx(losses_on_cpu(path, *sets), rel=1e-9)


# Every strategy, type and number of ranks; their other combinations in the full suite.
OFFLOADED = [("float64", 1, "bucketed", []), ("float64", 3, "zero2", []),
             ("bfloat16", 2, "zero2", ["train.fp32_gradients=false"]), ("float64", 2, "zero1", []),
             ("float32", 2, "zero3", ["parallel.reduce_once=true"]), ("float64", 4, "zero3", ["parallel.replicas=2"])]
OFFLOADED += [full(*case) for case in [
    ("bfloat16", 1, "zero3", []), ("float64", 2, "naive", []), ("float32", 3, "bucketed", []),
    ("float64", 2, "zero2", ["parallel.reduce_once=true"]), ("float64", 3, "zero3", []),
    ("float64", 4, "zero2", ["parallel.replicas=2"])]]


@pytest.mark.parametrize("dtype, ranks, strategy, sets", OFFLOADED)
def test_an_offloaded_run_is_the_run_on_the_cpu(folder, dtype, ranks, strategy, sets):
    """Five packs a step, one to a micro-batch: every rank accumulates, not all of them equally often."""
    path = config(folder, "text", dtype)
    common = ["--ranks", ranks, f"parallel.strategy={strategy}", *sets]
    done, _, losses = train(path, "offloaded", "--device", "cuda", "--backend", "shm", "parallel.offload=true", *common)
    assert re.search(r"parity\s+.*PASS", done.stdout), done.stdout
    assert "gradients and states in host memory" in done.stdout
    assert len(losses) == 3
    if dtype == "float64":
        assert losses == pytest.approx(losses_on_cpu(path, *common), rel=1e-9)


# Gradients stay on the GPU where backward needs them whole there; all the rest leaves it.
@pytest.mark.parametrize("strategy, ranks, leaves", [
    ("bucketed", 1, ["masters", "state"]), full("zero1", 2, ["masters", "state"]),
    full("zero2", 2, ["gradients", "masters", "state"]),
    ("zero3", 2, ["gradients", "masters", "state"])])
def test_offload_takes_its_bytes_off_the_gpu(folder, strategy, ranks, leaves):
    path = config(folder, "text", "bfloat16")

    def memory(*arguments):
        done, _, _ = train(path, "memory", "--device", "cuda", "--backend", "shm", "--memory", "--ranks", ranks,
                           f"parallel.strategy={strategy}", "model.hidden=128", "model.feed_forward=512", "verify.at_end=false",
                           *arguments)
        text = done.stdout + done.stderr
        row, formula = (list(map(float, re.search(rf"^{head} +(.*)$", text, re.MULTILINE).group(1).split()))
                        for head in ("rank 0", "formula"))
        assert row[:5] == pytest.approx(formula[:5], abs=0.01)
        names = ["parameters", "gradients", "masters", "state", "total", "other"]
        host = re.search(r"offload: ([\d.]+) MB of rank 0.* its GPU keeps ([\d.]+) MB", text)
        return dict(zip(names, row), host=float(host.group(1)) if host else 0, stays=float(host.group(2)) if host else None)

    here, away = memory(), memory("parallel.offload=true")
    assert here["host"] == 0 and away["host"] == pytest.approx(away["total"], abs=0.01)
    moved = sum(here[name] for name in leaves)
    assert moved > 1
    assert here["total"] + here["other"] - away["other"] == pytest.approx(moved, abs=0.05)
    assert away["stays"] == pytest.approx(here["total"] - moved, abs=0.03)  # five numbers, each off by at most 0.005
    assert [away[name] for name in ("masters", "state")] == [here[name] for name in ("masters", "state")]


def test_offloaded_checkpoints_load_on_either(folder):
    path = config(folder, "text", "float64")
    places = [["cuda", "true"], ["cuda", "false"], ["cuda", "true"], ["cpu", "false"]]
    for i, (device, offload) in enumerate(places, 1):
        _, _, losses = train(path, "moving", "--device", device, f"parallel.offload={offload}", f"train.steps={2 * i}", *LOSSES_ALONE,
                             *(["checkpoint.resume=latest"] if i > 1 else []))
    assert len(losses) == 2 * len(places)
    assert losses == pytest.approx(losses_on_cpu(path, f"train.steps={2 * len(places)}", *LOSSES_ALONE), rel=1e-9)

    path = config(folder, "text", "bfloat16")  # with masters of its own: the same bits
    offloaded = ["--device", "cuda", "--backend", "shm", "--ranks", 2, "parallel.strategy=zero1", "parallel.offload=true", *LOSSES_ALONE]
    train(path, "halves", *offloaded)
    _, _, losses = train(path, "halves", *offloaded, "train.steps=6", "checkpoint.resume=latest")
    _, _, expected = train(path, "whole", *offloaded, "train.steps=6")
    assert len(losses) == 6 and losses == expected


# By default of text with offload, on fewer packs: the layouts of the runs above are proved at their ends.
@pytest.mark.parametrize("kind, offload", [full("text", "false"), full("video", "false"), ("text", "true")])
def test_verify_of_every_layout(folder, kind, offload):
    verdict = folder / "verdict.json"
    isograd("verify", config(folder, kind), "--device", "cuda", "--backend", "shm", "--ranks", 2, "--layout", "all",
            "--json", verdict, "model.layers=1", f"parallel.offload={offload}", *([] if FULL else ["batch.packs_per_step=3"]), status=0)
    grades = json.loads(verdict.read_text())["grades"]
    assert len(grades) > 5 and not any("share=on" in name for name in grades)


GPUS = ["--device", "cuda", "--backend", "shm", "--ranks", 2]


@pytest.mark.parametrize("verb, arguments, parts", [
    ("train", ["--device", "cuda", "--ranks", 2], ["parallel.backend", "nccl", "ISOGRAD_CUDA=ON"]),
    ("train", ["--device", "cuda", "parallel.share_parameters=on"], ["parallel.share_parameters"]),
    ("verify", ["--device", "cuda", "--minimise", "least.toml"], ["--device cpu"]),
    ("train", ["parallel.offload=true"], ["parallel.offload", "where they already are", 'parallel.device = "cuda"']),
    ("verify", ["parallel.offload=true", "--ranks", 2], ["parallel.offload", "where they already are"]),
    *((verb, [*GPUS, "parallel.offload=true", "parallel.share_parameters=on"], ["parallel.share_parameters", '"off"'])
      for verb in ("train", "verify"))], ids=str)
def test_what_cannot_be_done_on_gpus_is_said_once(folder, verb, arguments, parts):
    said = isograd(verb, config(folder, "text"), *arguments, status=2).stderr
    assert all(part in said for part in parts) and said.count("ConfigError") == 1 and len(said.splitlines()) <= 4, said


def test_auto_takes_the_gpu_that_is_there(folder):
    path = config(folder, "text")
    assert "on GPUs" in train(path, "auto", "--device", "auto")[0].stdout
    assert "on GPUs" not in train(path, "auto", "--device", "auto", gpu=False)[0].stdout


def test_the_stand_in_refuses_mixed_devices(folder):
    """Planted: without it, a tensor left on the CPU would pass unseen."""
    probe = BUILD / "tests/device_check"
    done = subprocess.run([str(probe), "--device", "cuda", "--plant", "left-behind"], capture_output=True, text=True, timeout=LIMIT,
                          env=dict(os.environ, LD_PRELOAD=str(STANDIN), OMP_NUM_THREADS="1"))
    assert done.returncode == 1 and "of tensors on cuda:0 and cpu" in done.stderr, done.stderr


def gpu_check(folder, out, *arguments):
    """`./dev gpu-check` with the stand-in for a GPU, and what it wrote."""
    done = subprocess.run([sys.executable, str(ROOT / "tools/gpu_check.py"), "--built", str(BUILD), "--stand-in", str(STANDIN),
                           "--out", str(out), "--config", str(config(folder, "text")), "--seconds", "0.1", *map(str, arguments)],
                          capture_output=True, text=True, timeout=LIMIT)
    return done, json.loads((out / "result.json").read_text())


def test_gpu_check_runs_on_the_stand_in(folder, tmp_path):
    done, result = gpu_check(folder, tmp_path, "--parts", "^device_check$|^bench tiny" if FULL else "^bench tiny")
    assert done.returncode == 0, done.stdout + done.stderr
    *device, bench = result["parts"]  # CTest runs device_check
    assert {part["status"] for part in result["parts"]} == {"passed"}, result
    assert all(re.search(r"^cuda:0, 1 rank\(s\): \d+ cases, 0 failed$", part["found"]) for part in device), device
    assert [record["peer_name"] for record in bench["found"]] == ["PyTorch eager", "PyTorch eager, autocast"]
    for record in bench["found"]:
        assert record["dtype"] == "bfloat16" and record["flops"] > 0 and record["ours_ms"] > 0
        assert record["ours_device"]["peak_bytes"] > 0 and "problem" not in record["ours_device"], record
    assert all(line in done.stdout for line in result["table"])
    assert "not run: none" in done.stdout and "==== bench tiny bfloat16: passed" in (tmp_path / "log.txt").read_text()


def test_gpu_check_ends_at_its_limit_with_what_it_has(folder, tmp_path):
    """Two layouts of verify take longer than it has: that part is ended, and what comes after it is named."""
    done, result = gpu_check(folder, tmp_path, "--limit", 8, "--parts", "verify|bench")
    assert result["seconds"] < 12
    assert [part["status"].split(" (")[0] for part in result["parts"]] == ["out of time", "not run"], result
    assert "not run: bench tiny bfloat16" in done.stdout and result["limit"] == 8
