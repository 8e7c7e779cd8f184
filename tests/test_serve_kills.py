"""`isograd serve` is killed 500 times, at random and at the calls that change its state folder (kill_at_call.c), while unmodified tinker
clients train, save, load, sample and delete: they see no error, and the same bits as without kills."""
import collections
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import threading
import time
import urllib.error
import urllib.request

import numpy as np
import pytest
from conftest import ROOT
from serve_client import ADAM, KEY, model, prompt, rest, session, uneven
from serve_files import NAME, Server, write_model
from tinker import types

KILLS_AT_CALLS, KILLS_AT_RANDOM = 300, 200
CLIENTS = 6  # threads
PROGRAMS = 3  # what clients do, by its seed
LONGEST = 2400  # seconds
REACHABLE = 3  # seconds without a server at most: the client repeats creating a session or a model for some seconds only
TRANSPORTS = [{"use_pyqwest_transport": True}, {"use_pyqwest_transport": False}]


def fetched(address):
    """A GET of the test's own, which asks again while there is no server."""
    end = time.monotonic() + 120
    while True:
        try:
            with urllib.request.urlopen(urllib.request.Request(address, headers={"X-API-Key": KEY}), timeout=30) as reply:
                return reply.read()
        except urllib.error.HTTPError:
            raise
        except OSError:
            assert time.monotonic() < end
            time.sleep(0.1)


def run_of(url, seed, again=False):
    """All that a client sees of one run, and what the server counted of it. `again`: the first call is made twice."""
    rng, norms, samples = np.random.default_rng(seed), [], []

    def steps(training, count):
        for _ in range(count):
            calls = [training.forward_backward(uneven(rng, (3, 9, 5)), "cross_entropy"),
                     training.forward_backward(uneven(rng, (8, 4)), "cross_entropy"), training.optim_step(ADAM)]
            norms.append([call.result().metrics for call in calls])

    def sample(sampler):
        reply = sampler.sample(prompt([5, 6, 7]), 2, types.SamplingParams(max_tokens=6, seed=len(samples))).result()
        samples.append([(each.tokens, each.logprobs) for each in reply.sequences])
    with session(url, limit=LONGEST) as service:
        training, client = model(service, rank=2, seed=seed), rest(url)
        if again:
            training.forward_backward(uneven(np.random.default_rng(seed), (3, 9, 5)), "cross_entropy")
        steps(training, 2)
        saved = training.save_state("half").result().path
        sample(training.save_weights_and_get_sampling_client().result())
        resumed = service.create_training_client_from_state_with_optimizer(saved).result()
        steps(resumed, 1)
        steps(training, 1)
        training.save_state("half", overwrite=True).result()  # after a snapshot: no replay may need the former one
        named = resumed.save_weights_for_sampler("named").result().path
        client.publish_checkpoint_from_tinker_path(named).result()
        sample(service.create_sampling_client(model_path=named).result())
        client.delete_checkpoint_from_tinker_path(named).result()
        steps(resumed, 1)
        outside = resumed.save_weights_external("outside").result().path
        files = {file: fetched(address) for file, address in client.get_external_weights_urls(outside).result().urls.items()}
        status = {each["model"]: each for each in json.loads(fetched(f"{url}/isograd/status"))["models"]}
        counted = [[status[each.model_id][name] for name in ("steps", "tokens", "next", "last")] for each in (training, resumed)]
        checkpoints = [sorted(each.checkpoint_id for each in client.list_checkpoints(one.model_id).result().checkpoints)
                       for one in (training, resumed)]
    return {"norms": norms, "samples": samples, "files": files, "counted": counted, "checkpoints": checkpoints}


def test_models_wait_for_the_base_that_they_were_made_on(tmp_path):
    """One of two bases is overwritten between two starts, and put back."""
    write_model(tmp_path / NAME, layers=1)
    write_model(tmp_path / "other", layers=1)
    weights = (tmp_path / NAME / "model.safetensors").read_bytes()
    served = Server(tmp_path, tmp_path / "state", "--model", f"org/other={tmp_path / 'other'}")

    def restart():
        served.process.terminate()
        served.process.wait(timeout=20)
        served.start()

    def step(training):
        return training.forward_backward(uneven(np.random.default_rng(1), (3, 9)), "cross_entropy").result().metrics, \
            training.optim_step(ADAM).result().metrics
    try:
        served.start()
        with session(served.url) as service:
            ours, twin, others = model(service), model(service, base="org/other"), model(service, base="org/other")
            expected = [step(twin) for _ in range(3)]
            assert step(ours) == step(others) == expected[0]
            path = ours.save_state("kept").result().path
            (tmp_path / NAME / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
            restart()
            body = json.dumps({"model_id": ours.model_id, "seq_id": 4, "adam_params": ADAM.model_dump()}).encode()
            with pytest.raises(urllib.error.HTTPError) as refused:
                urllib.request.urlopen(urllib.request.Request(f"{served.url}/api/v1/optim_step", body, {
                    "X-API-Key": KEY, "Content-Type": "application/json"}), timeout=30)
            said = refused.value.read().decode()
            for word in (NAME, "found", "expected", "digest", "Put them back"):
                assert word in said
            assert refused.value.code == 400 and said.split("digest ")[1][:16] in served.errors.read_text()
            assert step(others) == expected[1]
            with pytest.raises(Exception, match="Put them back"):
                service.create_training_client_from_state_with_optimizer(path).result()
            (tmp_path / NAME / "model.safetensors").write_bytes(weights)
            restart()
            assert step(ours) == expected[1] and step(others) == expected[2]
            assert step(service.create_training_client_from_state_with_optimizer(path).result()) == expected[1]
    finally:
        served.kill()


def ended(server, seconds):
    try:
        return server.process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None


@pytest.mark.full
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_clients_do_not_notice_hundreds_of_kills(tmp_path):
    library = tmp_path / "kill_at_call.so"
    subprocess.run(["cc", "-O1", "-shared", "-fPIC", ROOT / "tests/kill_at_call.c", "-o", library, "-ldl"], check=True, timeout=60)
    write_model(tmp_path / NAME)

    def preloaded(state):
        return {"LD_PRELOAD": str(library), "KILL_STATE": str(state), "KILL_LOG": f"{state}.calls"}
    quiet = Server(tmp_path, tmp_path / "quiet", "--sync")
    try:
        quiet.start(**preloaded(quiet.state))
        pathlib.Path(f"{quiet.state}.calls").unlink()  # those of a new folder
        expected = [run_of(quiet.url, seed) for seed in range(PROGRAMS)]
        twice = run_of(quiet.url, 0, again=True)
    finally:
        quiet.kill()
    assert all(twice[part] != expected[0][part] for part in ("norms", "files", "counted"))
    calls = collections.Counter(pathlib.Path(f"{quiet.state}.calls").read_text().splitlines())

    seed = int(os.environ.get("ISOGRAD_SEED", time.time_ns() % 10**6))
    rng = random.Random(seed)
    disturbed = Server(tmp_path, tmp_path / "disturbed")
    over, runs, failures = threading.Event(), collections.Counter(), []

    def client(first):
        program = first
        while not over.is_set():
            try:
                found = run_of(disturbed.url, program % PROGRAMS)
                assert found == expected[program % PROGRAMS]
            except BaseException as error:  # of the client or of the comparison: the first is shown
                failures.append(error)
                return over.set()
            runs[program % PROGRAMS] += 1
            program += 1
    clients = [threading.Thread(target=client, args=(i,), daemon=True) for i in range(CLIENTS)]
    end = time.monotonic() + LONGEST
    served = time.monotonic()  # when there last was one for a second
    tried, killed, left = collections.Counter(), collections.Counter(), {"call": KILLS_AT_CALLS, "random": KILLS_AT_RANDOM}
    try:
        disturbed.start()
        for thread in clients:
            thread.start()
        disturbed.kill()
        while (any(left.values()) or calls.keys() - killed.keys()) and not over.is_set():
            assert time.monotonic() < end, (left, calls.keys() - killed.keys())
            kind = rng.choices(["call", "random"], [max(left["call"], 1), left["random"]])[0]
            environment, rests = {}, time.monotonic() - served > REACHABLE
            if rests:
                kind = "random"
            if kind == "call":
                chosen = min(calls, key=lambda call: (tried[call] if killed[call] else tried[call] // 4, rng.random()))
                tried[chosen] += 1
                number = rng.randint(1, 1 + calls[chosen] // (3 * PROGRAMS)) if tried[chosen] > 2 else 1
                at = f"{chosen}\t{number}\t{rng.choice(['before', 'half', 'after'])}"
                environment = {**preloaded(disturbed.state), "KILL_AT": at}
            syncs = ["--sync"] if kind == "call" and "fdatasync" in chosen or rng.random() < 0.5 else []
            disturbed.launch("--client-config", json.dumps(rng.choice(TRANSPORTS)), *syncs, **environment)
            if disturbed.serves():
                began = time.monotonic()
                status = ended(disturbed, rng.uniform(1, 1.5) if rests else rng.uniform(0, 1.5))
                if time.monotonic() - began > 1:
                    served = time.monotonic()
                if kind == "call" and status is None and "checkpoints/" not in chosen and "pwritev" not in chosen:
                    disturbed.process.terminate()  # a server that ends writes a snapshot
                    status = ended(disturbed, 5)
            else:
                status = disturbed.process.returncode
            disturbed.kill()
            assert status in (None, 0, -signal.SIGKILL), disturbed.errors.read_text()[-2000:]
            if status == -signal.SIGKILL:
                killed[chosen] += 1
            if status != 0:
                left["random" if status is None else "call"] -= left["random" if status is None else "call"] > 0
        disturbed.start()
        over.set()
        for thread in clients:
            thread.join(timeout=120)
            assert not thread.is_alive()
    finally:
        over.set()
        disturbed.kill()
    print(f"ISOGRAD_SEED={seed}: runs {dict(runs)}, kills {dict(killed)}")
    if failures:
        raise failures[0]
    assert len(runs) == PROGRAMS
