"""isograd's side of `isograd bench serve` (turns.py): `isograd serve` on loopback, driven by the unmodified tinker client.

    python serve_isograd.py EXCHANGE 1 SIDE prepare | step | sample | own | polls

case.json has what serve_peft.py reads, and
    program           isograd
    shape             the arguments of transformers' Qwen3Config
    rank, seed        of the adapter

prepare writes the base, with random weights, and the adapter that all sides start from; its loss is the base's. step and
sample do what the peer's step and generating do; a step's parts are the server's own seconds (its counter, from the last
byte of a request to its result, without the engine's) and the others, the client's. own makes calls of one request each,
without the client, on a model that is asked for next to nothing: its seconds are the server's own of a call, its parts
those between POST and result without the engine's. polls asks for one result that never comes on many connections: its
seconds are the processor's in a second, its parts the bytes that the server has grown by.
"""
import contextlib
import functools
import http.client
import json
import os
import pathlib
import re
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request

os.environ.update(TINKER_TELEMETRY="0", TINKER_API_KEY="tml-local")

import turns

try:
    import tinker
    from tinker import types
except ModuleNotFoundError as error:
    sys.exit(f"this Python has no {error.name}: run {sys.executable} -m pip install tinker==0.38.0")

NAME = "bench"
LIMIT = 600  # seconds that any call may take
CALLS = 50   # of each kind in a turn of `own`
POLLS, POLLED = 950, 30  # connections of `polls`, seconds of a turn: longer than the server lets a poll wait


def write_base(case):
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM
    torch.manual_seed(case["seed"])
    Qwen3ForCausalLM(Qwen3Config(**case["shape"], eos_token_id=None, bos_token_id=None, pad_token_id=None)).save_pretrained(case["model"])


@contextlib.contextmanager
def served(case):
    """The address of a server that ends with this side."""
    with tempfile.TemporaryDirectory() as state:
        command = [case["program"], "serve", "--model", f"{NAME}={case['model']}", "--state", state, "--port", "0"]
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), str(case["threads"]))  # the bench has set both to 1
        server = subprocess.Popen(command, stdout=open(f"{state}/said", "w"), env={**os.environ, **threads},
                                  preexec_fn=functools.partial(turns.end_with, os.getpid()))
        try:
            said = pathlib.Path(state, "said")
            while not (found := re.search(r"serving \S+ on (\S+)\n", said.read_text())):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    sys.exit(f"isograd serve ended with status {server.wait(timeout=0.05)}")
            yield found[1], server.pid
        finally:
            turns.stop(server)


def get(url):
    with urllib.request.urlopen(urllib.request.Request(url, headers={"X-API-Key": "tml-local"}), timeout=LIMIT) as reply:
        return reply.read()


def counted(url):
    """The server's own seconds so far, and its engine's."""
    found = get(url + "/metrics").decode()
    return [float(re.search(rf"^isograd_{name}_seconds_total (\S+)$", found, re.MULTILINE)[1]) for name in ("own", "engine")]


def parts_of(url, work):
    """Seconds that the work takes, those that are the server's own and its engine's, and its result."""
    before = counted(url)
    seconds, result = turns.timed(work)
    own, engine = (after - earlier for after, earlier in zip(counted(url), before))
    return seconds, own, engine, result


def data_of(case):
    return [types.Datum(model_input=types.ModelInput.from_ints(datum["tokens"]),
                        loss_fn_inputs={"target_tokens": datum["targets"], "weights": datum["weights"]}) for datum in case["datums"]]


def adam_of(case, **changed):
    adam = case["adam"] | changed
    return types.AdamParams(learning_rate=adam["learning_rate"], beta1=adam["beta1"], beta2=adam["beta2"], eps=adam["epsilon"],
                            weight_decay=adam["weight_decay"])


def started(case, service):
    """The model that every side starts from: both matrices of its adapters are other than zero, and its moments are zero."""
    first = service.create_lora_training_client(NAME, rank=case["rank"], seed=case["seed"]).result(LIMIT)
    first.forward_backward(data_of(case)[:1], "cross_entropy").result(LIMIT)
    first.optim_step(adam_of(case, learning_rate=1e-2)).result(LIMIT)
    return service.create_training_client_from_state(first.save_state("start").result(LIMIT).path)


def write_adapter(case, url, model):
    path = model.save_weights_external("start").result(LIMIT).path
    folder = pathlib.Path(case["adapter"])
    folder.mkdir()
    for file, address in tinker.RestClient(base_url=url, api_key="tml-local").get_external_weights_urls(path).result().urls.items():
        (folder / file).write_bytes(get(address))


def train(case, rank, url, model):
    data, adam = data_of(case), adam_of(case)

    def step():
        loss, made = model.forward_backward(data, "cross_entropy"), model.optim_step(adam)
        return loss.result(LIMIT).metrics["loss:sum"], made.result(LIMIT).metrics["grad_norm"]
    for _ in rank.turns():
        seconds, its_own, engine, (loss, norm) = parts_of(url, step)
        rank.answer(seconds=[seconds], losses=[loss], norms=[norm], parts=[its_own, seconds - its_own - engine])


def sample(case, rank, model):
    sampler = model.save_weights_and_get_sampling_client()
    prompts = [types.ModelInput.from_ints(prompt) for prompt in case["prompts"]]
    likeliest = types.SamplingParams(max_tokens=case["new_tokens"], temperature=0)

    def generate():
        asked = [sampler.sample(prompt, 1, likeliest) for prompt in prompts]
        return [list(each.result(LIMIT).sequences[0].tokens) for each in asked]
    for _ in rank.turns():
        seconds, tokens = turns.timed(generate)
        (rank.exchange / f"{rank.side}.tokens").write_text(json.dumps({"tokens": tokens}))
        rank.answer(seconds=[seconds], losses=[], norms=[])


class Calls:
    """Requests of one model over a connection that stays open."""

    def __init__(self, url, model):
        self.model, self.last = model, 0
        self.connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=LIMIT)
        self.connection.connect()
        self.connection.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def post(self, path, body, kind="application/json"):
        self.connection.request("POST", "/api/v1/" + path, body, {"Content-Type": kind, "Accept": "application/x-protobuf",
                                                                  "X-API-Key": "tml-local"})
        reply = self.connection.getresponse()
        body = reply.read()
        if reply.status != 200:
            raise RuntimeError(f"{path}: status {reply.status}: {body[:500]!r}")
        return json.loads(body) if "json" in reply.headers["Content-Type"] else {}

    def result(self, path, *request):
        asked = json.dumps({"request_id": self.post(path, *request)["request_id"]})
        while (found := self.post("retrieve_future", asked)).get("type") == "try_again":
            pass
        if "error" in found:
            raise RuntimeError(f"{path}: {found['error']}")

    def forward_backward(self, data):
        from tinker.proto.request_conv import forward_backward_request_to_proto
        self.last += 1
        request = types.ForwardBackwardRequest(model_id=self.model, seq_id=self.last, forward_backward_input=types.ForwardBackwardInput(
            data=data, loss_fn="cross_entropy"))
        body = forward_backward_request_to_proto(request)
        body = body if isinstance(body, bytes) else body.SerializeToString()
        return lambda: self.result("forward_backward", body, "application/x-protobuf")

    def optim_step(self, adam):
        self.last += 1
        body = json.dumps({"model_id": self.model, "seq_id": self.last, "adam_params": adam.model_dump()})
        return lambda: self.result("optim_step", body)


def own(case, rank, url, model):
    calls, data, adam = Calls(url, model.model_id), data_of(case)[:1], adam_of(case)
    for _ in rank.turns():
        made = [make() for _ in range(CALLS) for make in (lambda: calls.forward_backward(data), lambda: calls.optim_step(adam))]
        seconds, its_own, engine, _ = parts_of(url, lambda made=made: [call() for call in made])
        rank.answer(seconds=[its_own / len(made)], losses=[], norms=[], parts=[(seconds - engine) / len(made)])


def processor_seconds(process):
    """Those of all its threads so far, to the nanosecond."""
    return sum(int((thread / "schedstat").read_text().split()[0]) for thread in pathlib.Path(f"/proc/{process}/task").iterdir()) * 1e-9


def resident(process):
    return 1024 * int(re.search(r"VmRSS:\s+(\d+)", pathlib.Path(f"/proc/{process}/status").read_text())[1])


def polls(case, rank, url, process, model):
    """An update whose turn does not come, because the one before it is never sent, and those who wait for it."""
    before = resident(process)
    calls = Calls(url, model.model_id)
    calls.last += 1
    asked = json.dumps({"request_id": calls.post("optim_step", json.dumps({"model_id": model.model_id, "seq_id": calls.last + 1,
                                                                           "adam_params": adam_of(case).model_dump()}))["request_id"]})
    ready = selectors.DefaultSelector()

    def ask(each):
        each.connection.request("POST", "/api/v1/retrieve_future", asked, {"Content-Type": "application/json", "X-API-Key": "tml-local"})
    for each in [Calls(url, model.model_id) for _ in range(POLLS)]:
        ready.register(each.connection.sock, selectors.EVENT_READ, each)
        ask(each)
    time.sleep(1)
    for _ in rank.turns():
        start, until = processor_seconds(process), time.monotonic() + POLLED
        while (left := until - time.monotonic()) > 0:
            for key, _ in ready.select(left):
                reply = key.data.connection.getresponse()
                if reply.status != 408:
                    raise RuntimeError(f"a poll was answered with {reply.status}: {reply.read(500)!r}")
                reply.read()
                ask(key.data)  # again, as the client does
        rank.answer(seconds=[(processor_seconds(process) - start) / POLLED], losses=[], norms=[], parts=[resident(process) - before])


def run(rank, kind):
    case = rank.case()
    if kind == "prepare":
        write_base(case)
    with served(case) as (url, process):
        service = tinker.ServiceClient(base_url=url)
        model = started(case, service)
        if kind == "prepare":
            write_adapter(case, url, model)
            base = service.create_lora_training_client(NAME, rank=case["rank"]).result(LIMIT)  # whose adapter adds nothing yet
            loss = base.forward(data_of(case), "cross_entropy").result(LIMIT).metrics["loss:sum"]
            for _ in rank.turns():
                rank.answer(seconds=[0.0], losses=[loss], norms=[])
        elif kind == "step":
            train(case, rank, url, model)
        elif kind == "sample":
            sample(case, rank, model)
        elif kind == "own":
            own(case, rank, url, model)
        else:
            polls(case, rank, url, process, model)
        service.close("success").result(LIMIT)


if __name__ == "__main__":
    turns.main(run)
