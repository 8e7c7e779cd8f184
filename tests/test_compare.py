"""`isograd compare` on dumps of real trainers: PyTorch's DDP and FSDP2, as examples/other_trainers writes them."""
import atexit
import functools
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import pytest
import torch
from safetensors.torch import load_file, save_file
import warm_python
from test_compare_more import Steps, base

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release"))
WRITERS = ROOT / "examples/other_trainers"
DUMPS = pathlib.Path(tempfile.mkdtemp(prefix="isograd-dumps-"))
atexit.register(shutil.rmtree, DUMPS, ignore_errors=True)  # also where no test of this file is run


def python(*command):
    done = subprocess.run([warm_python.python(), "-W", "ignore", *map(str, command)], cwd=WRITERS, text=True,
                          capture_output=True, timeout=240, env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert done.returncode == 0, done.stdout + done.stderr


@functools.cache
def dump(trainer, ranks, loss="", dtype="float64"):
    """The folder that a real run of that trainer wrote."""
    folder = DUMPS / f"{trainer}-{ranks}-{loss}-{dtype}"
    if trainer == "one_device":
        python("one_device.py", "--ranks", ranks, "--dump", folder, "--dtype", dtype)
    else:
        python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks, f"{trainer}.py", "--loss", loss,
               "--dump", folder, "--dtype", dtype)
    return folder


def compare(*arguments):
    return subprocess.run([BUILD / "bin/isograd", "compare", *map(str, arguments)], cwd=ROOT, text=True,
                          capture_output=True, timeout=120)


def verdict(tmp_path, *arguments, status):
    done = compare(*arguments, "--json", tmp_path / "v.json")
    assert done.returncode == status, done.stdout + done.stderr
    return json.loads((tmp_path / "v.json").read_text()), done.stdout


def trainers(default):
    return [trainer if trainer == default else pytest.param(*trainer, marks=pytest.mark.full)
            for trainer in (("ddp", 3, "float32"), ("fsdp2", 2, "float64"), ("ddp", 2, "float64"), ("fsdp2", 3, "float32"))]


@pytest.mark.parametrize("trainer, ranks, dtype", trainers(("ddp", 3, "float32")))
def test_the_mean_of_rank_means_is_guilty_and_named(tmp_path, trainer, ranks, dtype):
    document, text = verdict(tmp_path, dump(trainer, ranks, "mean", dtype), dump("one_device", ranks), status=1)
    assert document["verdict"] == "fail"
    assert document["findings"][0]["id"] == "mean_of_rank_means", document["findings"]
    assert "mean of per-rank means" in text and "parity FAIL" in text
    assert not any(parameter["passed"] for parameter in document["parameters"])


@pytest.mark.parametrize("trainer", ["ddp", pytest.param("fsdp2", marks=pytest.mark.full)])
def test_bf16_parameters_are_no_false_alarm(tmp_path, trainer):
    document, text = verdict(tmp_path, dump(trainer, 3, "sum", "bfloat16"), dump("one_device", 3), status=1)
    assert [one["id"] for one in document["findings"]] == ["unresolved"] and "--alone" in text  # of vectors it tells too little
    alone = dump("one_device", 3, dtype="bfloat16")
    verdict(tmp_path, dump(trainer, 3, "sum", "bfloat16"), dump("one_device", 3), "--alone", alone, status=0)
    document, _ = verdict(tmp_path, dump(trainer, 3, "mean", "bfloat16"), dump("one_device", 3), status=1)
    assert document["findings"][0]["id"] == "mean_of_rank_means", document["findings"]


@pytest.mark.parametrize("trainer, ranks, dtype", trainers(("fsdp2", 2, "float64")))
def test_the_sum_over_the_global_count_is_innocent(tmp_path, trainer, ranks, dtype):
    document, text = verdict(tmp_path, dump(trainer, ranks, "sum", dtype), dump("one_device", ranks), status=0)
    assert document["verdict"] == "pass" and document["findings"] == [] and "parity PASS" in text
    grades = document["grades"]
    assert grades["E1" if dtype == "float64" else "E2"]["state"] == "pass"
    assert grades["E2" if dtype == "float64" else "E1"]["state"] == "not claimed"
    if dtype == "float32":  # and with the sharper bound of one process in the same precision
        alone = dump("one_device", ranks, dtype=dtype)
        verdict(tmp_path, dump(trainer, ranks, "sum", dtype), dump("one_device", ranks), "--alone", alone, status=0)


def changed(tmp_path, name, step=None, gradients=None):
    """A copy of DDP's right dump with something done to it."""
    folder = tmp_path / name
    shutil.copytree(dump("ddp", 2, "sum"), folder)
    if step:
        content = json.loads((folder / "step.json").read_text())
        step(content)
        (folder / "step.json").write_text(json.dumps(content))
    if gradients:
        tensors = load_file(folder / "gradients.safetensors")
        gradients(tensors)
        save_file(tensors, folder / "gradients.safetensors")
    return folder


def rename(tensors, old, new):
    tensors[new] = tensors.pop(old)


def set_to(tensors, value):
    for tensor in tensors.values():
        tensor.fill_(value)


BAD = {
    "another_step": ("other_batch", {"step": lambda s: s.update(samples=[90, 91, 92, 93])}),
    "a_sample_twice": ("sample_twice", {"step": lambda s: s["samples"].append(2)}),
    "missing": ("parameters_missing", {"gradients": lambda t: t.pop("norm.weight")}),
    "renamed": ("parameters_renamed", {"gradients": lambda t: rename(t, "norm.weight", "final_norm.weight")}),
    "reshaped": ("parameters_reshaped", {"gradients": lambda t: t.update(
        {"blocks.0.up.weight": t["blocks.0.up.weight"].T.contiguous()})}),
    "not_finite": ("not_finite", {"gradients": lambda t: t["norm.weight"][:1].fill_(float("nan"))}),
    "one_parameter_wrong": (None, {"gradients": lambda t: t["blocks.1.down.bias"].mul_(1.0002)}),
    "zero": (None, {"gradients": lambda t: set_to(t, 0)}),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_the_same_step_is_named(tmp_path, name):
    identity, change = BAD[name]
    document, _ = verdict(tmp_path, changed(tmp_path, name, **change), dump("one_device", 2), status=1)
    assert document["verdict"] == "fail" and document["findings"]
    if identity:
        assert document["findings"][0]["id"] == identity, document["findings"]


def test_zero_on_both_sides_proves_nothing(tmp_path):
    zero = changed(tmp_path, "zero", gradients=lambda t: set_to(t, 0))
    document, _ = verdict(tmp_path, zero, zero, status=1)
    assert document["findings"][0]["id"] == "no_gradient"


def test_the_prefix_of_a_wrapper_is_taken_off_and_said(tmp_path):
    def wrap(tensors):
        for name in list(tensors):
            rename(tensors, name, "module." + name)
    _, text = verdict(tmp_path, changed(tmp_path, "wrapped", gradients=wrap), dump("one_device", 2), status=0)
    assert 'begin with "module."' in text


def test_broken_files_are_refused_by_name(tmp_path):
    good = dump("one_device", 2)
    cases = {
        "no such folder": lambda d: shutil.rmtree(d),
        "step.json": lambda d: (d / "step.json").write_text("{"),
        "gradients.safetensors": lambda d: (d / "gradients.safetensors").write_bytes(b"\x00" * 40),
        "truncated": lambda d: (d / "gradients.safetensors").write_bytes(
            (d / "gradients.safetensors").read_bytes()[:-1]),
        "version": lambda d: (d / "step.json").write_text('{"format": "isograd-dump", "version": 9}'),
        "NaN": lambda d: (d / "step.json").write_text('{"format": "isograd-dump", "version": 1, "loss": NaN}'),
    }
    for i, (said, spoil) in enumerate(cases.items()):
        folder = changed(tmp_path, f"broken{i}")
        spoil(folder)
        for arguments in [(folder, good), (good, folder)]:
            done = compare(*arguments)
            assert done.returncode == 2 and said in done.stderr, (said, done.stderr)
            assert "internal" not in done.stderr and "report" not in done.stderr.lower()


def test_the_page_stands_alone(tmp_path):
    page = tmp_path / "page.html"
    done = compare(dump("ddp", 3, "mean"), dump("one_device", 3), "--report", page)
    assert done.returncode == 1
    html = page.read_text()
    assert "mean of per-rank means" in html and "<svg" in html and "isograd compare" in html
    assert not re.search(r"https?:|<script|src=|url\(", html)


def test_a_reference_whose_update_contradicts_its_gradient(tmp_path):
    steps = Steps(tmp_path).reference(clip_coefficient=0.5).run(clip_coefficient=0.5)
    gradients = load_file(tmp_path / "one/gradients.safetensors")
    swapped = {"blocks.0.up.weight": "blocks.1.up.weight", "blocks.1.up.weight": "blocks.0.up.weight"}

    def applied(make, *sides):
        for side in ("run", "one"):
            (tmp_path / side / "applied.safetensors").unlink(missing_ok=True)
        for side in sides:
            save_file({name: make(name, g).contiguous() for name, g in gradients.items()},
                      tmp_path / side / "applied.safetensors")
        ids, text, _ = steps.verdict()
        assert not ids or "one" in sides and "reference contradicts itself" in text, text
        return ids
    for sides in (["one"], ["one", "run"]):
        assert applied(lambda name, g: g / 2, *sides) == []
        for identity, make in [("clip_not_applied", lambda name, g: g), ("optimizer_differs", lambda name, g: -g / 2),
                               ("groups_clipped_apart", lambda name, g: g / (2 if "up" in name else 4)),
                               ("optimizer_differs", lambda name, g: gradients[swapped.get(name, name)] / 2)]:
            assert applied(make, *sides) == [identity] * len(sides), (identity, sides)
    # Weight decay, where both say what was taken away.
    weights = dict(base().named_parameters())
    assert applied(lambda name, g: g / 2 + 0.1 * weights[name].detach() * (g.dim() > 1), "one", "run") == []


def writer():
    text = (ROOT / "docs/verify.md").read_text()
    return re.search(r"<!-- writer -->\n```python\n(.*?)```", text, re.S).group(1)


def test_the_writer_is_short_and_runs_as_the_document_has_it():
    code = writer()
    assert len([line for line in code.splitlines() if line.strip()]) <= 12
    with tempfile.TemporaryDirectory() as folder:
        model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
        model[1].requires_grad_(False)
        model[0](torch.ones(4, 3)).sum().backward()  # the last layer gets no gradient
        exec(code, {"model": model, "folder": folder, "loss": 1.5, "targets": 4, "sample_ids": [0, 1], "rank": 0})
        assert sorted(load_file(f"{folder}/gradients.safetensors")) == ["0.bias", "0.weight", "2.bias", "2.weight"]
        done = compare(folder, folder)
        assert done.returncode == 0, done.stdout + done.stderr


def test_the_writer_works_under_fsdp2(tmp_path):
    program = tmp_path / "fsdp2_writer.py"
    program.write_text(f"""
import sys
sys.path.insert(0, {str(WRITERS)!r})
import torch, torch.distributed as dist
from ddp import leave, local_loss
from model_and_data import make_model, num_targets, pack_of
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
dist.init_process_group("gloo")
rank, folder = dist.get_rank(), {str(tmp_path / "written")!r}
model = make_model(torch.float64)
fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
packs = [pack_of(r) for r in range(2)]
local_loss(model, "sum", *packs[rank][:2]).backward()
loss, targets, sample_ids = 1.5, sum(num_targets(p[1]) for p in packs), [i for p in packs for i in p[2]]
""" + writer() + "\nleave()\n")
    python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2, program)
    step = json.loads((tmp_path / "written/step.json").read_text())
    step["loss"] = json.loads((dump("one_device", 2) / "step.json").read_text())["loss"]
    (tmp_path / "written/step.json").write_text(json.dumps(step))
    verdict(tmp_path, tmp_path / "written", dump("one_device", 2), status=0)
