"""isograd serve, its keys and its status: flags that are refused, who may ask, and how it ends."""
import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
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


# Every path that is served, with the verbs that clients use, and some that are not.
PATHS = {"GET": ["/metrics", "/isograd/status", "/isograd/files/0/a", "/", "/no/such/path", *(f"/api/v1/{path}" for path in (
             "healthz", "get_server_capabilities", "samplers/S:sample:0", "sessions", "sessions/S", "checkpoints", "training_runs", "session_info",
             "training_runs/S:train:0", "training_runs/S:train:0/checkpoints",
             "training_runs/S:train:0/checkpoints/external_weights/a/external_weights_urls"))],
         "POST": ["/", *(f"/api/v1/{path}" for path in (
             "client/config", "client/dynamic_config", "telemetry", "cancel_future", "create_session", "session_heartbeat", "sessions/S/finish",
             "create_model", "load_weights", "forward_backward", "forward", "optim_step", "save_weights", "save_weights_external",
             "save_weights_for_sampler", "unload_model", "abort_gradient_epoch", "kill_session", "delete_checkpoint", "list_checkpoints",
             "create_sampling_session", "asample", "retrieve_future", "get_info", "weights_info", "nothing",
             "training_runs/S:train:0/checkpoints/weights/a/publish"))],
         "DELETE": ["/api/v1/training_runs/S:train:0/checkpoints/weights/a", "/api/v1/training_runs/S:train:0/checkpoints/weights/a/publish"],
         "PUT": ["/api/v1/training_runs/S:train:0/checkpoints/weights/a/ttl"], "PATCH": ["/"], "OPTIONS": ["/"]}
ODD = [b"GET /%zz HTTP/1.1\r\nHost: localhost\r\n\r\n", b"GET /api/v1/healthz HTTP/1.1\r\nHost: attacker.example\r\n\r\n",
       b"GET /api/v1/healthz HTTP/1.0\r\n\r\n", b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}",
       b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Type: text/plain\r\nContent-Length: 2\r\n\r\n{}",
       b"POST / HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 2\r\n\r\n",
       b"POST /api/v1/forward_backward HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-protobuf\r\nContent-Length: 10000000000\r\n\r\n"]


def test_without_a_key_there_is_nothing_but_401(base, tmp_path):
    made = isograd("serve", "key", "alice", status=0)
    key = made.stderr.split()[-1]
    (tmp_path / "keys.txt").write_text(made.stdout)
    with served(base, tmp_path / "state", "--keys", tmp_path / "keys.txt") as address:
        port = int(address.rpartition(":")[2])

        def answer(verb, path, body=b"", **headers):
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
            connection.request(verb, path, body, {"Content-Type": "application/json", **headers})
            reply = connection.getresponse()
            content = reply.read()
            connection.close()
            return reply.status, content
        _, session = answer("POST", "/api/v1/create_session", b'{"tags": [], "sdk_version": "0.38.0"}', **{"X-API-Key": key})
        session = json.loads(session)["session_id"]
        refusal = answer("GET", "/no/such/path")
        assert refusal[0] == 401
        for verb, path in ((verb, path.replace("S", session)) for verb in PATHS for path in PATHS[verb]):
            for headers in ({}, {"X-API-Key": ""}, {"X-API-Key": "tml-wrong"}, {"X-API-Key": key[:-1]}, {"Authorization": f"Bearer {key}x"}):
                assert answer(verb, path, b"{}" if verb == "POST" else b"", **headers) == refusal, (verb, path, headers)
            with_key, _ = answer(verb, path, b"{}" if verb == "POST" else b"", **{"X-API-Key": key})
            assert with_key != 401 and with_key < 500, (verb, path)
        for text in ODD:
            with socket.create_connection(("127.0.0.1", port), timeout=10) as raw:
                raw.sendall(text)
                assert raw.recv(1000).split()[1] == b"401", text


def test_without_keys_anybody_on_this_machine_may_ask(base, tmp_path):
    for _ in range(2):  # the second goes on from the state of the first
        with served(base, tmp_path / "state") as address:
            assert status_of(address + "/api/v1/healthz") == 200
            assert "models" not in isograd("serve", "status", address + "/", status=0).stdout
