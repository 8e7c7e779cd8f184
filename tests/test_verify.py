"""`isograd verify` from the command line, on process ranks."""
import contextlib
import json
import os
import pathlib
import re
import subprocess

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release"))

CONFIG = """
[run]
directory = "{folder}/run"
[data]
text = ["{folder}/text"]
cache = "{folder}/cache"
pack_length = 48
[batch]
packs_per_step = 7
packs_per_micro_batch = 2
[model]
hidden = 32
layers = 2
heads = 4
key_value_heads = 2
head_dim = 8
feed_forward = 48
"""


@pytest.fixture
def config(tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(12):
        (tmp_path / f"text/{i}.txt").write_text(f"document {i} counts " + " ".join(map(str, range(10 * i))))
    path = tmp_path / "small.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def verify(*arguments):
    return subprocess.run([BUILD / "bin/isograd", "verify", *map(str, arguments)], cwd=ROOT, text=True,
                          capture_output=True, timeout=300)


@pytest.mark.parametrize("ranks", [1, 3])
def test_verify_proves_the_configured_run(config, tmp_path, ranks, backend):
    result = verify(config, "--ranks", ranks, "--backend", backend, "--json", tmp_path / "v.json", "--report",
                    tmp_path / "v.html")
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"parity PASS: {ranks} rank" in result.stdout
    document = json.loads((tmp_path / "v.json").read_text())
    assert document["verdict"] == "pass" and document["diagnosis"] == []
    assert document["ranks"] == ranks
    assert document["grades"]["E1"]["state"] == document["grades"]["E2"]["state"] == "pass"
    assert document["grades"]["E3"]["state"] == "pass"
    for parameter in document["parameters"]:
        assert {"name", "ratio", "cosine", "error", "allowed"} <= set(parameter)
        assert parameter["error"] <= 1e-10
    page = (tmp_path / "v.html").read_text()
    assert "<html" in page and "parity PASS" in page


def test_verify_tries_every_layout_asked_for(config, tmp_path, backend):
    result = verify(config, "--ranks", 2, "--backend", backend, "--layout", "bucketed", "--layout", "naive", "--json",
                    tmp_path / "v.json")
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads((tmp_path / "v.json").read_text())
    assert set(document["grades"]) == {"bucketed", "naive"}


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("train", [False, True])
def test_the_sample_mean_of_documents_longer_than_the_pack(config, tmp_path, ranks, train):
    changes = ["--set", "loss.kind=sample_mean", "--set", "data.shuffle_packs=false", "--set", "data.pack_length=20"]
    if not train:
        result = verify(config, "--ranks", ranks, *changes, "--json", tmp_path / "v.json")
        document = json.loads((tmp_path / "v.json").read_text())
        assert document["verdict"] == "pass" and document["loss"] == "sample mean"
        assert "sample mean" in result.stdout
    else:
        result = subprocess.run([BUILD / "bin/isograd", "train", str(config), "--ranks", str(ranks), *changes, "--set",
                                 "train.steps=6", "--set", "sample.tokens=0"], cwd=ROOT, text=True, capture_output=True,
                                timeout=300)
        assert f"parity PASS: {ranks} ranks = 1 device" in result.stdout + result.stderr
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("tied", ["false", "true"])
@pytest.mark.parametrize("kind", ["token_mean", "sample_mean"])
def test_the_fused_loss_has_the_gradient_of_its_logits(config, tmp_path, ranks, tied, kind):
    result = verify(config, "--ranks", ranks, "--set", "loss.fused=on", "--set", f"model.tied_output={tied}", "--set",
                    f"loss.kind={kind}", "--set", "data.shuffle_packs=false", "--json", tmp_path / "v.json")
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads((tmp_path / "v.json").read_text())
    assert document["verdict"] == "pass"
    assert max(parameter["error"] for parameter in document["parameters"]) <= 1e-10


def test_a_run_with_the_fused_loss_is_the_run_without(config, tmp_path):
    losses = {}
    for fused in ["on", "off"]:
        log = tmp_path / f"{fused}.jsonl"
        result = subprocess.run([BUILD / "bin/isograd", "train", str(config), "--ranks", "2", "--json-log", str(log),
                                 "--set", f"loss.fused={fused}", "--set", "train.dtype=float64", "--set",
                                 "train.steps=5", "--set", "sample.tokens=0", "--set",
                                 f"run.directory={tmp_path}/{fused}"], cwd=ROOT, text=True, capture_output=True,
                                timeout=300)
        assert result.returncode == 0, result.stdout + result.stderr
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        losses[fused] = [line["loss"] for line in lines if "loss" in line]
    assert len(losses["on"]) == 5
    assert losses["on"] == pytest.approx(losses["off"], rel=1e-10)


def test_the_mean_of_per_replica_means_is_compared_as_such(config, tmp_path):
    result = verify(config, "--ranks", 2, "--set", 'loss.normalise_over=["dp_shard", "cp_ring", "cp_ulysses"]')
    assert result.returncode == 0, result.stdout + result.stderr
    assert "mean of per-replica token means, which depends on the layout" in result.stdout


def test_a_contradictory_loss_is_explained(config):
    result = verify(config, "--ranks", 2, "--set", "loss.dp_replicate_reduction=mean")
    assert result.returncode == 2
    assert "one of two readings" in result.stderr


def test_verify_refuses_an_unknown_layout(config):
    result = verify(config, "--ranks", 2, "--layout", "magic")
    assert result.returncode == 2
    assert "magic" in result.stderr and "bucketed" in result.stderr


@pytest.mark.parametrize("layout", [(), ("--set", "parallel.cp_ring=3", "--set", "data.pack_length=96")])
def test_dynamic_scaling_acts_in_packs_beyond_the_positions(config, layout):
    beyond = ("--set", "model.max_positions=16", "--set", "data.pack_length=64")
    refused = verify(config, "--ranks", 3, *beyond, *layout)
    assert refused.returncode == 2 and "the model's positions" in refused.stderr
    result = verify(config, "--ranks", 3, *beyond, *layout, "--set", "model.rope_scaling.kind=dynamic",
                    "--set", "model.rope_scaling.factor=2")
    assert result.returncode == 0, result.stdout + result.stderr


def test_verify_says_how_far_it_is(config):
    """A line at once in a pipe; on a terminal one that renews itself and counts the layouts of all proofs, once each."""
    result = verify(config, "--ranks", 2, "--layout", "all")
    assert result.returncode == 0, result.stdout + result.stderr
    total = int(re.match(r"(\d+) layouts: a plain step in fp64 on one process comes first, ", result.stderr).group(1))
    assert len(result.stderr.splitlines()) < 5, result.stderr  # one each half minute
    assert total > 5

    master, slave = os.openpty()
    process = subprocess.Popen([BUILD / "bin/isograd", "verify", config, "--ranks", "2", "--layout", "all"], cwd=ROOT,
                               stdout=subprocess.PIPE, stderr=slave)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the other end has closed
        while part := os.read(master, 65536):
            shown += part
    out = process.communicate(timeout=300)[0]
    os.close(master)
    assert process.returncode == 0, out
    seen = re.findall(r"layout (\d+) of (\d+): ", shown.decode())
    assert {int(of) for _, of in seen} == {total}
    numbers = [int(number) for number, _ in seen]
    assert numbers == sorted(numbers) and set(numbers) == set(range(1, total + 1)), numbers
    assert b" left" in shown and shown.endswith(b"\r\x1b[K")
