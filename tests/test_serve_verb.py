"""isograd serve, its keys and its status: flags that are refused, who may ask, and how it ends."""
import contextlib
import hashlib
import os
import signal
import subprocess
import urllib.error
import urllib.request

import pytest
import torch
from conftest import BINARY, isograd, refused
from transformers import LlamaConfig, LlamaForCausalLM

NAME = "org/tiny"


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=48,
                         max_position_embeddings=64, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@contextlib.contextmanager
def served(base, state, *flags, end=signal.SIGTERM):
    """The address of a server, which must end by the signal with status 0."""
    command = [BINARY, "serve", "--model", f"{NAME}={base}", "--state", state, "--port", "0", *flags]
    with subprocess.Popen(list(map(str, command)), stdout=subprocess.PIPE, text=True,
                          env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        try:
            said = [process.stdout.readline() for _ in range(3)]
            assert said[0].startswith(f"serving {NAME} on http://127.0.0.1:"), said
            address = said[0].split()[-1]
            assert f"TINKER_BASE_URL={address}" in said[1] and "tinker.ServiceClient()" in said[2]
            yield address
            process.send_signal(end)
            assert process.wait(timeout=30) == 0
        finally:
            process.kill()


def status_of(address, **headers):
    try:
        return urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=10).status
    except urllib.error.HTTPError as error:
        return error.code


@pytest.mark.parametrize("flags, said", [
    ((), "no --model"),
    (("--model", "tiny"), "NAME=DIR"),
    (("--model", "=tiny"), "NAME=DIR"),
    (("--model", "a=no/such/folder"), "no --state"),
    (("--model", "a=no/such/folder", "--state", "s"), "no/such/folder"),
    (("--model", "a=b", "--state", "s", "--host", "0.0.0.0"), "--insecure"),
    (("--model", "a=b", "--state", "s", "--keys", "none.txt"), "none.txt"),
    (("--model", "a=b", "--state", "s", "--dtype", "float16"), "float16"),
    (("--model", "a=b", "--state", "s", "--port", "70000"), "70000"),
    (("--model", "a=b", "--state", "s", "--limit", "model=1"), "result-bytes"),
    (("--model", "a=b", "--state", "s", "--limit", "models=-1"), "whole number"),
    (("--model", "a=b", "--state", "s", "--limit", "models=1.5"), "whole number"),
    (("status", "foo"), "http://"),
    (("status", "http://127.0.0.1:1"), "refused"),
    (("key", "a/b"), "tenant"),
])
def test_flags_that_are_refused(flags, said, tmp_path):
    assert said in refused("serve", *flags, cwd=tmp_path)


def test_a_name_twice_and_a_state_in_use(base, tmp_path):
    both = ["--model", f"a={base}", "--model", f"a={base}"]
    assert "'a' twice" in refused("serve", *both, "--state", tmp_path / "state", "--port", "0")
    with served(base, tmp_path / "state", end=signal.SIGINT):
        refused("serve", "--model", f"a={base}", "--state", tmp_path / "state", "--port", "0")


def test_keys_decide_who_may_ask(base, tmp_path):
    made = isograd("serve", "key", "alice", status=0)
    key = made.stderr.split()[-1]
    assert key.startswith("tml-") and made.stdout == f"alice {hashlib.sha256(key.encode()).hexdigest()}\n"
    (tmp_path / "keys.txt").write_text(made.stdout)
    with served(base, tmp_path / "state", "--keys", tmp_path / "keys.txt") as address:
        for path in ("/api/v1/healthz", "/metrics", "/no/such/path"):
            assert [status_of(address + path, **headers) for headers in (
                {}, {"X-API-Key": "tml-wrong"}, {"X-API-Key": "tml-\xff"}, {"Authorization": f"Basic {key}"})] == [401] * 4
            assert status_of(address + path, **{"X-API-Key": "k" * 65536}) in (401, 431)
        assert status_of(address + "/api/v1/healthz", **{"X-API-Key": key}) == 200
        assert status_of(address + "/metrics", Authorization=f"Bearer {key}") == 200
        assert "TINKER_API_KEY" in refused("serve", "status", address, TINKER_API_KEY="")
        assert "uptime_seconds" in isograd("serve", "status", address, status=0, TINKER_API_KEY=key).stdout


def test_without_keys_anybody_on_this_machine_may_ask(base, tmp_path):
    for _ in range(2):  # the second goes on from the state of the first
        with served(base, tmp_path / "state") as address:
            assert status_of(address + "/api/v1/healthz") == 200
            assert "models" not in isograd("serve", "status", address + "/", status=0).stdout
