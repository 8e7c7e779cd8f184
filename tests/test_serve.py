"""`isograd serve` with the unmodified tinker client, over both of its transports; one of the two cuts every batch into chunks.

The numbers themselves are in test_serve_parity.py, all methods of the client in test_serve_methods.py.
"""
import contextlib
import http.client
import http.server
import json
import math
import os
import random
import re
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
import tinker
import torch
from conftest import ROOT, full
from safetensors.torch import load
from serve_client import ADAM, KEY, LIMIT, adapter, datum, exported, furthest, model, prompt, rest, session, text, uneven, within
from serve_files import NAME, Server, server, write_model
from tinker import types

TRANSPORTS = {"rust": {"use_pyqwest_transport": True},
              "httpx": {"use_pyqwest_transport": False, "fwdbwd_max_chunk_len": 2}}
SLOW = 120  # seconds, of the loops that a server is killed in


@pytest.fixture(autouse=True)
def limited(request):
    with within(SLOW if "kills" in request.fixturenames else LIMIT):
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    write_model(folder / NAME)
    return folder


@pytest.fixture(scope="module")
def urls(folder):
    with contextlib.ExitStack() as running:
        yield {name: running.enter_context(server(folder, folder / name, "--dtype", "float64",
                                                  "--client-config", json.dumps(config))).url
               for name, config in TRANSPORTS.items()}


@pytest.fixture(params=TRANSPORTS)
def url(request, urls):
    return urls[request.param]


@pytest.fixture
def service(url):
    with session(url) as service:
        yield service


@pytest.fixture
def rng(request):
    return np.random.default_rng(48)


def stepped(url, training, calls, loss="cross_entropy"):
    """The adapter after one update."""
    for data in calls:
        training.forward_backward(data, loss)
    training.optim_step(ADAM).result()
    return adapter(url, training)


def refused(call, *says):
    """The message of what the server refuses: at once, where the client would retry other failures for minutes."""
    start = time.monotonic()
    with pytest.raises((tinker.RequestFailedError, tinker.APIStatusError)) as error:
        call()
    assert time.monotonic() - start < 5
    for word in says:
        assert word in str(error.value)
    return error.value


# ---- training ----

def test_calls_chunks_and_transports_do_not_change_an_update(urls, rng):
    data = uneven(rng)
    updates = []
    for url in urls.values():
        with session(url) as service:
            for calls in ([data], [[one] for one in data], [data[:4], data[4:]]):
                updates.append(stepped(url, model(service), calls))
    assert max(furthest(other, updates[0]) for other in updates[1:]) <= 1e-12
    with session(url) as service:  # a datum that counts twice would be found
        assert furthest(stepped(url, model(service), [data, data[:1]]), updates[0]) > 1e-7


@contextlib.contextmanager
def wavering(url, config, disturbs):
    """The address of a proxy that gives the client this configuration. One that disturbs sends each request twice, each time
    after a while that is drawn, so that they overtake each other, and loses the first answer."""
    port, rng = int(url.rpartition(":")[2]), random.Random(48)

    class Passing(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self):
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            headers = {name: value for name, value in self.headers.items() if name.lower() not in ("host", "connection")}
            for _ in range(2 if disturbs else 1):
                time.sleep(rng.uniform(0, 0.05) if disturbs else 0)
                connection = http.client.HTTPConnection("127.0.0.1", port, timeout=2 * LIMIT)
                connection.request(self.command, self.path, body, headers)
                reply = connection.getresponse()
                status, kind, content = reply.status, reply.headers["Content-Type"], reply.read()
                connection.close()
            if self.path.endswith("/client/config"):
                content = json.dumps(config).encode()
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", len(content))
            self.end_headers()
            self.wfile.write(content)
        do_GET = do_PUT = do_DELETE = do_POST

        def log_message(self, *_):
            pass
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Passing) as proxy:
        thread = threading.Thread(target=proxy.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_port}"
        finally:
            proxy.shutdown()
            thread.join()


def two_steps(url, service):
    """What two steps of eight datums leave: the adapter and samples."""
    training, rng = model(service), np.random.default_rng(6)
    for _ in range(2):
        training.forward_backward(uneven(rng), "cross_entropy")
        training.optim_step(ADAM)
    sampler = training.save_weights_and_get_sampling_client().result()
    reply = sampler.sample(prompt([5, 6, 7]), 4, types.SamplingParams(max_tokens=8, seed=2, stop=[])).result()
    return adapter(url, training), [(each.tokens, each.logprobs) for each in reply.sequences]


@contextlib.contextmanager
def busy(url):
    """Another client trains and samples without a pause."""
    over, failed = threading.Event(), []

    def work():
        try:
            with session(url) as service:
                while not over.is_set():
                    two_steps(url, service)
        except BaseException as error:
            failed.append(error)
    thread = threading.Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failed, failed


def test_chunks_of_any_length_in_any_order_sent_twice_and_among_others(urls):
    url = urls["rust"]

    def trained(chunk, parallel=True, disturbs=False):
        config = {"fwdbwd_max_chunk_len": chunk, "parallel_fwdbwd_chunks": parallel}
        with wavering(url, config, disturbs) as address, session(address) as service:
            return two_steps(url, service)
    plain = {(chunk, parallel): trained(chunk, parallel) for chunk in (1, 2, 3, 1024) for parallel in (True, False)}
    for found, _ in plain.values():
        assert furthest(found, plain[1024, True][0]) <= 1e-12
    with busy(url):
        for case in ((3, True), (1024, False)):
            found, samples = trained(*case, disturbs=True)
            assert all(value.equal(plain[case][0][name]) for name, value in found.items()) and samples == plain[case][1]


def test_outputs_are_those_of_each_datum_alone_in_their_order(service, rng):
    data, training = uneven(rng), model(service)
    together = training.forward_backward(data, "cross_entropy").result()
    assert [one["logprobs"].shape for one in together.loss_fn_outputs] == [[one.model_input.length] for one in data]
    alone = [training.forward([one], "cross_entropy").result() for one in data]
    for one, other in zip(together.loss_fn_outputs, alone):
        np.testing.assert_allclose(one["logprobs"].data, other.loss_fn_outputs[0]["logprobs"].data, rtol=1e-6)
    assert together.metrics["loss:sum"] == pytest.approx(sum(one.metrics["loss:sum"] for one in alone), rel=1e-9)


def test_a_custom_loss_is_cross_entropy_with_its_slopes_as_weights(service, url, rng):
    data = uneven(rng)

    def squares(_, log_probabilities):
        loss = sum((each ** 2).sum() for each in log_probabilities)
        return loss, {"mine": loss.item()}
    custom, by_hand = model(service), model(service)
    found = custom.forward_backward_custom(data, squares)
    custom.optim_step(ADAM)  # is queued before the loss is known
    assert found.result().metrics["mine"] == found.result().metrics["loss:sum"]
    outputs = by_hand.forward(data, "cross_entropy").result().loss_fn_outputs
    weighted = [types.Datum(model_input=one.model_input, loss_fn_inputs={
        "target_tokens": one.loss_fn_inputs["target_tokens"], "weights": -2 * output["logprobs"].to_numpy()})
        for one, output in zip(data, outputs)]
    assert found.result().metrics["surrogate_loss:sum"] == by_hand.forward(weighted, "cross_entropy").result().metrics["loss:sum"]
    assert furthest(adapter(url, custom), stepped(url, by_hand, [weighted])) == 0


def test_targets_in_two_dimensions_dense_and_sparse(service, url, rng):
    tokens, targets = text(rng, 6)
    many = rng.integers(3, 300, (6, 50))
    weights = np.zeros((6, 50), np.float32)
    weights[np.arange(6), np.arange(6)] = 0.5
    dense = datum(tokens, target_tokens=many, weights=weights)
    sparse = datum(tokens, target_tokens=torch.from_numpy(many), weights=torch.from_numpy(weights))
    assert sparse.loss_fn_inputs["weights"].sparse_crow_indices and not dense.loss_fn_inputs["weights"].sparse_crow_indices
    shape = model(service).forward([sparse], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].shape
    assert shape == [6, 50]
    assert furthest(stepped(url, model(service), [[sparse]]), stepped(url, model(service), [[dense]])) == 0
    single = datum(tokens, target_tokens=targets, weights=np.ones(6, np.float32))
    column = datum(tokens, target_tokens=targets[:, None], weights=np.ones((6, 1), np.float32))
    assert furthest(stepped(url, model(service), [[column]]), stepped(url, model(service), [[single]])) <= 1e-12


def clipped(ratio, config):
    return np.clip(ratio, config["clip_low_threshold"], config["clip_high_threshold"])


CLIP = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.6}
LOSSES = {  # configuration; by ratio, log-probability p of the policy and q of the sampler, advantage
    "importance_sampling": ({}, lambda r, p, q, a, c: -r * a),
    "ppo": (CLIP, lambda r, p, q, a, c: -np.minimum(r * a, clipped(r, c) * a)),
    "cispo": (CLIP, lambda r, p, q, a, c: -clipped(r, c) * p * a),
    "dro": ({"beta": 0.1}, lambda r, p, q, a, c: -(p * a - 0.05 * (p - q) ** 2)),
    "gspo": (CLIP, lambda r, p, q, a, c: -np.minimum((s := np.exp(np.mean(p - q))) * a, clipped(s, c) * a)),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_each_loss_is_the_sum_of_its_formula(service, rng, loss):
    config, formula = LOSSES[loss]
    tokens, targets = text(rng, 12)
    inputs = {"target_tokens": targets, "logprobs": (-5.9 + rng.normal(size=12)).astype(np.float32),
              "advantages": rng.normal(size=12).astype(np.float32)}
    if loss == "gspo":
        inputs["sequence_ratio_mask"] = np.ones(12, np.float32)
    found = model(service).forward_backward([datum(tokens, **inputs)], loss, config).result()
    p = found.loss_fn_outputs[0]["logprobs"].to_numpy().astype(float)
    q, advantages = inputs["logprobs"].astype(float), inputs["advantages"].astype(float)
    assert found.metrics["loss:sum"] == pytest.approx(formula(np.exp(p - q), p, q, advantages, config).sum(), rel=1e-5, abs=1e-5)


def test_the_norm_is_reported_and_forward_leaves_no_gradient(service, url, rng):
    training, data = model(service), uneven(rng)
    before = adapter(url, training)
    training.forward_backward(data, "cross_entropy")
    norm = training.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]
    assert norm > 0 and furthest(adapter(url, training), before) == 0
    training.forward_backward(data, "cross_entropy")
    training.forward(data[:2], "cross_entropy")
    assert training.optim_step(ADAM).result().metrics["grad_norm"] == norm
    training.forward(data[:2], "cross_entropy").result()
    refused(lambda: training.optim_step(ADAM).result(), "forward_backward")


def test_a_refused_call_fails_the_later_ones_of_its_model_and_no_other(service, rng):
    poisoned, other, data = model(service), model(service), uneven(rng)
    error = refused(lambda: poisoned.forward_backward(data, "stable_reinforce").result(),
                    "stable_reinforce", "cross_entropy", "gspo")
    assert isinstance(error, tinker.RequestFailedError)
    refused(lambda: poisoned.optim_step(ADAM).result(), "stable_reinforce")
    other.forward_backward(data, "cross_entropy")
    assert math.isfinite(other.optim_step(ADAM).result().metrics["grad_norm"])


# ---- checkpoints ----

@pytest.mark.parametrize("dtype", ["float32", full("float64")])
@pytest.mark.parametrize("rank", [4, full(0)])
def test_a_model_resumed_with_its_optimizer_goes_on_with_the_same_bits_after_a_kill(folder, tmp_path, rng, dtype, rank):
    data = uneven(rng)

    def ten_steps(url, training):
        norms = []
        for step in range(10):
            training.forward_backward(data[step % 3:][:3], "cross_entropy")
            norms.append(training.optim_step(ADAM).result().metrics["grad_norm"])
        return norms, load(exported(url, training)["adapter_model.safetensors" if rank else "model.safetensors"])
    with server(folder, tmp_path / "state", "--dtype", dtype) as running:
        saved, expected = [], []
        with session(running.url) as service:
            for open_calls in (0, 2):  # the second checkpoint has sums that no step has taken yet
                training = model(service, rank)
                for calls in (2, 1):
                    for _ in range(calls):
                        training.forward_backward(data, "cross_entropy")
                    training.optim_step(ADAM)
                for _ in range(open_calls):
                    training.forward_backward(data[:2], "cross_entropy")
                saved.append(training.save_state("half").result().path)
                assert saved[-1] == f"tinker://{training.model_id}/weights/half"
                expected.append(ten_steps(running.url, training))
        running.restart()
        with session(running.url) as later:
            for path, (norms, weights) in zip(saved, expected):
                resumed = later.create_training_client_from_state_with_optimizer(path).result()
                assert resumed.get_info().lora_rank == (rank or None)
                found = ten_steps(running.url, resumed)
                assert found[0] == norms and found[1].keys() == weights.keys()
                assert all(found[1][name].equal(value) for name, value in weights.items())
                weights_alone = ten_steps(running.url, later.create_training_client_from_state(path).result())
                assert furthest(weights_alone[1], weights) > 1e-3


def test_checkpoints_are_listed_published_expire_and_are_deleted(service, url, rng):
    training, client = model(service, user_metadata={"who": "me"}), rest(url)
    saved = training.save_state("first", ttl_seconds=3600, user_metadata={"step": "1"}).result().path
    sampler = training.save_weights_for_sampler("first").result().path
    assert sampler == f"tinker://{training.model_id}/sampler_weights/first"

    def listed():
        return {each.tinker_path: each for each in client.list_checkpoints(training.model_id).result().checkpoints}
    assert listed().keys() == {saved, sampler}
    assert listed()[saved].checkpoint_id == "weights/first" and listed()[saved].checkpoint_type == "training"
    assert listed()[saved].user_metadata == {"step": "1"} and listed()[saved].expires_at and not listed()[saved].public
    client.set_checkpoint_ttl_from_tinker_path(saved, None).result()
    for _ in range(2):  # the second is no mistake
        client.publish_checkpoint_from_tinker_path(saved).result()
    assert listed()[saved].public and listed()[saved].expires_at is None
    client.unpublish_checkpoint_from_tinker_path(saved).result()
    assert not listed()[saved].public
    run = client.get_training_run(training.model_id).result()
    assert (run.lora_rank, run.base_model, run.user_metadata) == (4, NAME, {"who": "me"})
    assert training.model_id in [each.training_run_id for each in client.list_training_runs(limit=100).result().training_runs]
    info = client.get_weights_info_by_tinker_path(saved).result()
    assert (info.base_model, info.is_lora, info.lora_rank) == (NAME, True, 4)
    client.delete_checkpoint_from_tinker_path(sampler).result()
    assert listed().keys() == {saved}
    training.save_state("first", overwrite=True).result()
    assert listed()[saved].user_metadata != {"step": "1"}
    refused(lambda: training.save_state("first").result(), "first")


# ---- samplers ----

def likeliest(sampler, length=6):
    params = types.SamplingParams(max_tokens=length, temperature=0, stop=[])
    return sampler.sample(prompt([5, 6, 7]), 1, params).result().sequences[0].tokens


def test_samplers_of_every_origin(service, url, rng):
    training = model(service)
    base = service.create_sampling_client(base_model=NAME).result()
    before = likeliest(base)
    assert likeliest(training.save_weights_and_get_sampling_client().result()) == before  # a new adapter adds nothing
    for _ in range(10):  # one that is taught another answer says it
        training.forward_backward([datum([5, 6, 7], target_tokens=[100] * 3, weights=[1.0] * 3)], "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=0.1))
    unnamed = training.save_weights_and_get_sampling_client().result()
    path = training.save_weights_for_sampler("named").result().path
    named = service.create_sampling_client(model_path=path).result()
    of_training = service.create_sampling_client(model_path=training.save_state("training").result().path).result()
    after = likeliest(unnamed)
    assert before[0] != 100 == after[0] and likeliest(named) == likeliest(of_training) == after
    stepped(url, training, [uneven(rng)])  # does not reach samplers that exist
    assert likeliest(unnamed) == after and likeliest(base) == before
    assert named.get_base_model() == NAME


def test_log_probabilities_of_samplers_are_those_of_training(service, url, rng):
    training = model(service)
    stepped(url, training, [uneven(rng)])
    tokens, targets = text(rng, 12)
    one = datum(tokens, target_tokens=targets, weights=np.ones(12, np.float32))
    trained = training.forward([one], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
    sampler = training.save_weights_and_get_sampling_client().result()
    whole = prompt([*tokens, targets[-1]])
    first, *rest_of_them = sampler.compute_logprobs(whole).result()
    assert first is None
    np.testing.assert_allclose(rest_of_them, trained, rtol=1e-6)

    reply = sampler.sample(whole, 2, types.SamplingParams(max_tokens=5, seed=1, stop=[]), include_prompt_logprobs=True,
                           topk_prompt_logprobs=3, topk_sample_logprobs=2).result()
    np.testing.assert_allclose(reply.prompt_logprobs[1:], trained, rtol=1e-6)
    assert reply.topk_prompt_logprobs[0] is None and all(len(each) == 3 for each in reply.topk_prompt_logprobs[1:])
    for row, value in zip(reply.topk_prompt_logprobs[1:], trained):
        numbers = [number for _, number in row]
        assert numbers == sorted(numbers, reverse=True) and numbers[-1] <= 0 and value <= numbers[0] + 1e-6
    one, two = reply.sequences
    assert one.tokens != two.tokens and one.sequence_id != two.sequence_id and one.stop_reason == "length"
    for sequence in reply.sequences:  # each sampled token as a target
        continued = [*tokens, targets[-1], *sequence.tokens]
        again = datum(continued[:-1], target_tokens=np.array(continued[1:]), weights=np.ones(17, np.float32))
        output = training.forward([again], "cross_entropy").result().loss_fn_outputs[0]["logprobs"].data
        np.testing.assert_allclose(sequence.logprobs, output[-5:], rtol=1e-6)
    last = sampler.compute_logprobs(whole, prompt_logprobs_last_n=4).result()
    assert last[:-4] == [None] * 9
    np.testing.assert_allclose(last[-4:], trained[-4:], rtol=1e-6)


def test_a_seed_fixes_the_samples_and_stops_end_them(service):
    sampler = service.create_sampling_client(base_model=NAME).result()

    def drawn(seed, count=4, **more):
        params = types.SamplingParams(**{"max_tokens": 8, "seed": seed, "stop": [], **more})
        return [each.tokens for each in sampler.sample(prompt([5, 6, 7]), count, params).result().sequences]
    assert drawn(1) == drawn(1) != drawn(2)
    assert drawn(1, 2) == drawn(1)[:2]
    assert len({tuple(each) for each in drawn(1)}) == 4
    assert all(len(each) == 8 for each in drawn(1))
    (greedy,) = drawn(1, 1, temperature=0)
    (stopped,) = drawn(1, 1, temperature=0, stop=[greedy[3]])
    assert stopped == greedy[:greedy.index(greedy[3]) + 1]
    assert drawn(3, 1, top_k=1) == [greedy] == drawn(4, 1, top_p=1e-6)


# ---- what there is not, and the end of a session ----

def test_unknown_names_are_refused_at_once(service, url):
    training = model(service)
    missing = f"tinker://{training.model_id}/weights/missing"
    refused(lambda: service.create_lora_training_client("Qwen/Qwen3-999B").result(), "Qwen/Qwen3-999B", NAME)
    refused(lambda: service.create_sampling_client(base_model="Qwen/Qwen3-999B").result(), "Qwen/Qwen3-999B")
    refused(lambda: service.create_sampling_client(model_path=missing).result(), missing)
    refused(lambda: service.create_training_client_from_state(missing).result(), missing)
    client = rest(url)
    for call in (lambda: client.get_training_run("nobody:train:0").result(), lambda: client.get_session("nobody").result(),
                 lambda: client.get_sampler("nobody:sample:0").result(),
                 lambda: client.delete_checkpoint_from_tinker_path(missing).result()):
        assert isinstance(refused(call), tinker.NotFoundError)


def test_a_finished_session_has_no_heartbeat(url):
    with session(url) as service:
        training = model(service)
    name = training.model_id.partition(":")[0]
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=LIMIT)
    connection.request("POST", "/api/v1/session_heartbeat", json.dumps({"session_id": name}),
                       {"Content-Type": "application/json", "X-API-Key": KEY})
    assert connection.getresponse().status == 410
    connection.close()


# ---- a server that is killed while a client trains ----

def trained_and_sampled(url, disturb=lambda step: None):
    """What eight steps leave: the adapter, norms and samples."""
    rng, norms, samples = np.random.default_rng(1), [], []
    with session(url) as service:
        training = model(service)
        for step in range(8):
            training.forward_backward(uneven(rng, (3, 9, 5)), "cross_entropy")
            calls = [training.forward_backward(uneven(rng, (8, 4)), "cross_entropy"), training.optim_step(ADAM)]
            disturb(step)
            norms.append(calls[1].result().metrics["grad_norm"])
            sampler = training.save_weights_and_get_sampling_client().result()
            reply = sampler.sample(prompt([5, 6, 7]), 2, types.SamplingParams(max_tokens=6, seed=step)).result()
            samples += [each.tokens for each in reply.sequences]
        return adapter(url, training), norms, samples


@pytest.mark.parametrize("kills", [[2], pytest.param(range(8), marks=pytest.mark.full)])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_client_does_not_notice_that_its_server_was_killed(folder, tmp_path, kills, transport):
    config = json.dumps(TRANSPORTS[transport])
    with server(folder, tmp_path / "quiet", "--client-config", config) as quiet:
        expected = trained_and_sampled(quiet.url)
    disturbed = Server(folder, tmp_path / "disturbed", "--client-config", config)
    restarts = []

    def disturb(step):
        if step in kills:
            disturbed.kill()
            restarts.append(threading.Timer(0.3, disturbed.start))
            restarts[-1].start()
    try:
        disturbed.start()
        found = trained_and_sampled(disturbed.url, disturb)
    finally:
        for restart in restarts:
            restart.join()
        disturbed.kill()
    assert found[1:] == expected[1:] and furthest(found[0], expected[0]) == 0


def test_the_program_of_the_documentation_runs_and_each_step_is_a_line(folder, tmp_path):
    program = re.search(r"^```python\n(.*?)^```", (ROOT / "docs/server.md").read_text(), re.M | re.S)[1]
    assert len(program.splitlines()) <= 20
    name = "Qwen/Qwen3-0.6B"
    served = Server(folder, tmp_path / "state", "--model", f"{name}={folder / NAME}")
    with within(3 * LIMIT), subprocess.Popen(served.command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}) as process:
        try:
            assert served.url in "".join(process.stdout.readline() for _ in range(3))
            done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=2 * LIMIT,
                                  env={**os.environ, "TINKER_BASE_URL": served.url, "TINKER_API_KEY": KEY})
            assert done.returncode == 0, done.stderr[-2000:]
            *steps, sample = done.stdout.splitlines()
            losses = [float(line.split()[1]) for line in steps]
            assert len(losses) == 20 and losses[-1] < 0.9 * losses[0] and len(json.loads(sample)) == 4
            for number, line in enumerate(steps, 1):
                norm = f"{float(line.split()[2]):.6g}"
                said = process.stdout.readline()
                assert f" step {number}: " in said and f" grad_norm {norm} " in said and " tokens 8 " in said and " seconds " in said, said
            process.stdout.close()
            with session(served.url) as service:  # it goes on without a reader
                training = model(service, base=name)
                for _ in range(2):
                    training.forward_backward(uneven(np.random.default_rng(1)), "cross_entropy").result()
                    training.optim_step(ADAM).result()
            assert process.poll() is None
        finally:
            process.kill()
