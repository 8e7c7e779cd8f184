"""isograd's side of `isograd bench serve` (turns.py): `isograd serve` on loopback, driven by the unmodified tinker client.

    python serve_isograd.py EXCHANGE 1 SIDE prepare | step | sample | own

case.json has what serve_peft.py reads, and
    program           isograd
    shape             the arguments of transformers' Qwen3Config
    rank, seed        of the adapter

prepare writes the base, with random weights, and the adapter that all sides start from. step and sample do what the peer's
step and generating do; a step's parts are the seconds that the server's engine did not compute in. own makes calls of
one request each, without the client, on a model that is asked for next to nothing: its seconds are those between POST and
result in which the engine did not compute, its parts those in which it did.
"""
import contextlib
import functools
import http.client
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tempfile
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
        server = subprocess.Popen(command, stdout=open(f"{state}/said", "w"), env=dict(os.environ, OMP_NUM_THREADS=str(case["threads"])),
                                  preexec_fn=functools.partial(turns.end_with, os.getpid()))
        try:
            said = pathlib.Path(state, "said")
            while not (found := re.search(r"serving \S+ on (\S+)\n", said.read_text())):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    sys.exit(f"isograd serve ended with status {server.wait(timeout=0.05)}")
            yield found[1]
        finally:
            server.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(timeout=30)
            server.kill()
            server.wait()


def get(url):
    with urllib.request.urlopen(urllib.request.Request(url, headers={"X-API-Key": "tml-local"}), timeout=LIMIT) as reply:
        return reply.read()


def computed(url, model):
    """Seconds that the server has computed for the model."""
    found = re.search(rf'isograd_compute_seconds_total{{model="{re.escape(model)}",[^}}]*}} (\S+)', get(url + "/metrics").decode())
    return float(found[1])


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
        before = computed(url, model.model_id)
        seconds, (loss, norm) = turns.timed(step)
        others = seconds - (computed(url, model.model_id) - before)
        rank.answer(seconds=[seconds], losses=[loss], norms=[norm], parts=[others])


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
        seconds, parts = [], []
        for call in (make() for _ in range(CALLS) for make in (lambda: calls.forward_backward(data), lambda: calls.optim_step(adam))):
            before = computed(url, model.model_id)
            whole, _ = turns.timed(call)
            parts.append(computed(url, model.model_id) - before)
            seconds.append(whole - parts[-1])
        rank.answer(seconds=seconds, losses=[], norms=[], parts=parts)


def run(rank, kind):
    case = rank.case()
    if kind == "prepare":
        write_base(case)
    with served(case) as url:
        service = tinker.ServiceClient(base_url=url)
        model = started(case, service)
        if kind == "prepare":
            write_adapter(case, url, model)
            for _ in rank.turns():
                rank.answer(seconds=[0.0], losses=[], norms=[])
        elif kind == "step":
            train(case, rank, url, model)
        elif kind == "sample":
            sample(case, rank, model)
        else:
            own(case, rank, url, model)
        service.close("success").result(LIMIT)


if __name__ == "__main__":
    turns.main(run)
