"""`isograd bench` measures both sides, checks that they compute the same, and writes its records."""
import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release"))
ENVIRONMENT = dict(os.environ, PYTHON=sys.executable)


def bench(*arguments, **options):
    return subprocess.run([BUILD / "bin/isograd", "bench", "step", *map(str, arguments)], cwd=ROOT, text=True,
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
