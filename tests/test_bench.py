"""`isograd bench` measures both sides, checks that they compute the same, and writes its records."""
import json
import os
import pathlib
import subprocess
import sys
from xml.etree import ElementTree

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release"))
ENVIRONMENT = dict(os.environ, PYTHON=sys.executable)


def bench(*arguments, of="step", **options):
    return subprocess.run([BUILD / "bin/isograd", "bench", of, *map(str, arguments)], cwd=ROOT, text=True,
                          capture_output=True, timeout=300, env=ENVIRONMENT, **options)


@pytest.mark.parametrize("ranks", [1, 2])
def test_step_is_compared_with_pytorch(tmp_path, ranks):
    """The peer starts from our weights through a Hugging Face directory: equal losses over several optimizer
    steps mean equal models, gradients, clipping and AdamW."""
    result = bench("--case", "tiny", "--ranks", ranks, "--seconds", 0.2, "--json", tmp_path / "step.json")
    assert result.returncode == 0, result.stdout + result.stderr
    (record,) = json.loads((tmp_path / "step.json").read_text())
    assert set(record) == {"bench", "case", "ours", "peer", "peer_name", "unit", "ratio"}
    assert record["bench"] == "step" and record["unit"] == "tokens/s"
    assert record["peer_name"] == ("PyTorch eager" if ranks == 1 else "PyTorch DDP over Gloo")
    assert record["ratio"] == pytest.approx(record["ours"] / record["peer"], rel=1e-9)
    assert "NOT COMPARABLE" not in result.stdout


@pytest.mark.parametrize("right, wrong", [
    ("torch.cat((-b, a), dim=-1)", "torch.cat((b, a), dim=-1)"),
    ('lr=c["learning_rate"]', 'lr=2 * c["learning_rate"]'),
], ids=["rotary embedding", "optimizer"])
def test_a_peer_that_computes_something_else_is_not_compared(tmp_path, right, wrong):
    script = (ROOT / "bench/peers/llama_step.py").read_text()
    broken = script.replace(right, wrong)
    assert broken != script
    (tmp_path / "broken.py").write_text(broken)
    python = tmp_path / "python"  # runs the broken script, whatever script it is given
    python.write_text(f'#!/bin/sh\nshift\nexec "{sys.executable}" "{tmp_path}/broken.py" "$@"\n')
    python.chmod(0o755)
    result = bench("--case", "tiny", "--ranks", 1, "--seconds", 0.2, "--python", python)
    assert result.returncode == 1
    assert "NOT COMPARABLE" in result.stdout


def test_a_python_without_torch_is_named(tmp_path):
    result = bench("--case", "tiny", "--ranks", 1, "--python", "/bin/false")
    assert result.returncode == 2
    assert "side 'peer' (/bin/false)" in result.stderr and "PYTHON" in result.stderr


def test_an_unknown_case_is_refused():
    result = bench("--case", "huge")
    assert result.returncode == 2 and "small" in result.stderr


without_module = pytest.mark.skipif((BUILD / "python/isograd_comm.missing").exists(), reason="isograd_comm was not built")


@without_module
def test_collectives_are_compared_with_gloo_and_memcpy(tmp_path):
    """Each contestant's first result is checked against the closed form; the figures are written thrice."""
    files = {kind: tmp_path / f"comm.{kind}" for kind in ("json", "svg", "html")}
    command = [BUILD / "bin/isograd", "bench", "comm", "--quick", "--patience", "0.01", "--operation", "barrier",
               "--operation", "reduce_scatter", "--operation", "round_trip"]
    for kind, file in files.items():
        command += [f"--{kind}", file]
    result = subprocess.run([*map(str, command)], cwd=ROOT, text=True, capture_output=True, timeout=300,
                            env=ENVIRONMENT)
    assert result.returncode == 0, result.stdout + result.stderr
    records = json.loads(files["json"].read_text())
    for record in records:
        assert set(record) == {"bench", "case", "ours", "peer", "peer_name", "unit", "ratio"}
        assert record["bench"] == "comm" and record["unit"] == "us"
        assert record["ratio"] == pytest.approx(record["peer"] / record["ours"], rel=1e-9)
    cases = {record["case"] for record in records}
    assert "reduce_scatter fp32 64 KB, 2 ranks, ordinary tensors" in cases
    assert "barrier, 2 ranks, shared memory" in cases
    assert {record["peer_name"] for record in records} - {"MPI"} == {"Gloo", "memcpy", "its c10d backend"}
    assert "reduce_scatter fp32 4 MB" in result.stdout and " ns " in result.stdout
    ElementTree.fromstring(files["svg"].read_text())
    assert files["svg"].read_text().strip() in files["html"].read_text()


@without_module
@pytest.mark.parametrize("wrapper", ["ddp", "fsdp2"])
def test_wrapped_steps_differ_in_the_backends_name_alone(tmp_path, wrapper):
    result = subprocess.run([BUILD / "bin/isograd", "bench", "wrapped", "--case", wrapper, "--size", "tiny", "--seconds",
                             "0.2", "--json", tmp_path / "wrapped.json"], cwd=ROOT, text=True, capture_output=True,
                            timeout=300, env=ENVIRONMENT)
    assert result.returncode == 0, result.stdout + result.stderr  # equal losses, bit by bit
    (record,) = json.loads((tmp_path / "wrapped.json").read_text())
    assert record["bench"] == "wrapped" and record["peer_name"] == "Gloo" and record["unit"] == "ms"


@without_module
def test_a_collective_with_a_wrong_result_ends_the_comparison(tmp_path):
    """The script that makes the groups is replaced by one whose Gloo has its ranks in reverse."""
    script = (ROOT / "bench/peers/collectives.py").read_text()
    reverse = 'dist.ProcessGroupGloo(dist.PrefixStore("reverse", store), size - 1 - rank, size, TIMEOUT)'
    broken = script.replace("dist.group.WORLD._get_backend(CPU)", reverse)
    assert broken != script
    (tmp_path / "broken.py").write_text(broken)
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 3\nexec "{sys.executable}" "{tmp_path}/broken.py" "$@"\n')
    python.chmod(0o755)
    result = subprocess.run([BUILD / "bin/isograd", "bench", "comm", "--quick", "--patience", "0.01", "--operation",
                             "all_to_all", "--python", python], cwd=ROOT, text=True, capture_output=True, timeout=300,
                            env=ENVIRONMENT)
    assert result.returncode == 2, result.stdout
    assert "gave a wrong result" in result.stderr
def test_the_fused_loss_is_compared_in_time_and_memory(tmp_path):
    result = bench("--case", "tiny", "--seconds", 0.1, "--json", tmp_path / "loss.json", of="loss")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "NOT COMPARABLE" not in result.stdout
    records = json.loads((tmp_path / "loss.json").read_text())
    assert [(r["unit"], r["peer_name"].split()[0]) for r in records] == [
        ("tokens/s", "LibTorch"), ("MiB", "LibTorch"), ("tokens/s", "isograd"), ("MiB", "isograd")]
    for record in records:
        assert set(record) == {"bench", "case", "ours", "peer", "peer_name", "unit", "ratio"}
        assert record["bench"] == "loss" and record["case"] == "tiny"
        better = record["ours"] / record["peer"] if record["unit"] == "tokens/s" else record["peer"] / record["ours"]
        assert record["ratio"] == pytest.approx(better, rel=1e-9)
    assert bench("--case", "huge", of="loss").returncode == 2
