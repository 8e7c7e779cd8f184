"""Two versions of the tinker client, 0.38.0 and 0.25.0, see the same server over two transports: each over one of them, in full
runs over both."""
import json
import os
import subprocess
import sys

import pytest
from conftest import BUILD, FULL, ROOT
from serve_files import NAME, environment, server, write_model

WALK = ROOT / "tests/programs/serve_walk.py"
TRANSPORTS = {"rust": {"use_pyqwest_transport": True},
              "httpx in chunks": {"use_pyqwest_transport": False, "fwdbwd_max_chunk_len": 2}}


@pytest.fixture(scope="module")
def walked(tmp_path_factory):
    folder = tmp_path_factory.mktemp("versions")
    write_model(folder / NAME)
    older = environment(BUILD / "tinker-0.25.0", "tinker==0.25.0")
    found = {}
    for place, (transport, config) in enumerate(TRANSPORTS.items()):
        with server(folder, folder / transport, "--dtype", "float64", "--client-config", json.dumps(config)) as running:
            pythons = [sys.executable, older]
            for python in pythons if FULL else [pythons[place]]:
                done = subprocess.run([python, WALK, running.url], capture_output=True, text=True, timeout=60,
                                      env={**os.environ, "TINKER_TELEMETRY": "0", "OMP_NUM_THREADS": "1"})
                assert done.returncode == 0, done.stderr[-3000:]
                said = json.loads(done.stdout.splitlines()[-1])
                found[said["version"], transport] = said["seen"]
    return found


def test_each_version_and_each_transport_was_run(walked):
    every = [(version, transport) for version in ("0.38.0", "0.25.0") for transport in TRANSPORTS]
    assert walked.keys() == set(every if FULL else [every[0], every[-1]])


def test_all_see_the_same(walked):
    one, *others = walked.values()
    assert one["refused"] and one["supported"] == [NAME] and one["checkpoints"] == ["sampler_weights/named", "weights/half"]
    assert one["of a path"] == one["log probabilities"] and len({*one["norms"]}) == len(one["norms"]) == 3
    for other in others:
        assert other.pop("norms") == pytest.approx(one["norms"], rel=1e-9)  # chunks are added in another order
        assert other == {key: value for key, value in one.items() if key != "norms"}
