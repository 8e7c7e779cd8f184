"""`isograd verify` from the command line, on process ranks."""
import json
import os
import pathlib
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
def test_verify_proves_the_configured_run(config, tmp_path, ranks):
    result = verify(config, "--ranks", ranks, "--json", tmp_path / "v.json", "--report", tmp_path / "v.html")
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


def test_verify_tries_every_layout_asked_for(config, tmp_path):
    result = verify(config, "--ranks", 2, "--layout", "bucketed", "--layout", "naive", "--json", tmp_path / "v.json")
    assert result.returncode == 0, result.stdout + result.stderr
    document = json.loads((tmp_path / "v.json").read_text())
    assert set(document["grades"]) == {"bucketed", "naive"}


def test_verify_refuses_an_unknown_layout(config):
    result = verify(config, "--ranks", 2, "--layout", "magic")
    assert result.returncode == 2
    assert "magic" in result.stderr and "bucketed" in result.stderr
