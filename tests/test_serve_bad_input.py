"""`isograd serve` against requests that no client should send, by plain HTTP.

Each is answered by a status 4xx with a length, or by a promise whose future is a user's error; never by what the clients
of tinker retry for minutes: 408 (but of a long poll), 409, 429, 5xx. Other models go on, and the model itself where
nothing was accepted.
"""
import contextlib
import http.client
import itertools
import json
import pathlib
import re
import resource
import shutil
import socket
import threading

import numpy as np
import pytest
import tinker
from conftest import FULL
from serve_client import ADAM, KEY, LIMIT, exported, limited_to, session, uneven, within
from serve_client import model as trained
from serve_files import NAME, server, write_model
from tinker.proto import tinker_public_pb2 as pb

JSON, PROTOBUF = "application/json", "application/x-protobuf"
RETRIED = (408, 409, 429)
OTHER = "org/other"
limited = limited_to(LIMIT)


class Wire:
    """One connection."""

    def __init__(self, running):
        self.port, self.state, self.pid, self.models = running.port, running.state, running.process.pid, itertools.count()
        self.session = self.sent("create_session", {"tags": [], "sdk_version": "0.38.0"})["session_id"]
        self.witness = self.model()

    def reply(self, verb, path, body=b"", kind=JSON, **headers):
        """Status, content type and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=LIMIT)
        headers = {"X-API-Key": KEY, **({"Content-Type": kind} if kind else {}), **headers}
        connection.request(verb, path if path.startswith("/") else f"/api/v1/{path}", body, headers)
        reply = connection.getresponse()
        content = reply.read()
        connection.close()
        assert int(reply.headers["Content-Length"]) == len(content)
        return reply.status, reply.headers["Content-Type"], content

    def posted(self, path, body):
        if isinstance(body, pb.ForwardBackwardRequest):
            body = body.SerializeToString()
        return self.reply("POST", path, *((body, PROTOBUF) if isinstance(body, bytes) else (json.dumps(body), JSON)))

    def sent(self, path, body):
        status, _, content = self.posted(path, body)
        assert status == 200, content
        return json.loads(content)

    def future(self, promise):
        """The content type and body of a result, however long its poll."""
        while True:
            status, kind, content = self.posted("retrieve_future", {"request_id": promise["request_id"], "allow_metadata_only": False})
            if status != 408:
                assert status == 200, content
                return kind, content

    def model(self, **more):
        promise = self.sent("create_model", creation(self, **more))
        kind, content = self.future(promise)
        assert "error" not in json.loads(content), content
        return promise["model_id"]

    def error(self, status, kind, content):
        """What is wrong, as the user is told."""
        if status == 200 and "request_id" in (promise := json.loads(content)):
            kind, content = self.future(promise)
            assert kind.startswith(JSON), "no error"
            said = json.loads(content)
            assert said.get("category") == "user", said
            return said["error"]
        assert 400 <= status < 500 and status not in RETRIED, (status, content)
        return json.loads(content)["detail"]

    def loss_of(self, promise):
        kind, content = self.future(promise)
        assert kind == PROTOBUF, content
        return pb.ForwardBackwardOutput.FromString(content).metrics["loss:sum"]

    def loss(self, model, sequence):
        return self.loss_of(self.sent("forward_backward", call(model, sequence, forward_only=True)))


@pytest.fixture(scope="module")
def wire(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    write_model(folder / NAME)
    write_model(folder / OTHER, layers=1)
    with server(folder, folder / "state", "--model", f"{OTHER}={folder / OTHER}", "--limit", "dump-bytes=1") as running:
        yield Wire(running)


@pytest.fixture(scope="module")
def witness(wire):
    """Another model, and its loss, which nothing changes."""
    sequences = itertools.count(1)
    expected = wire.loss(wire.witness, next(sequences))
    return lambda: wire.loss(wire.witness, next(sequences)) == expected


# ---- requests, right except for what a case changes ----

def creation(wire, **more):
    return {"type": "create_model", "session_id": wire.session, "model_seq_id": next(wire.models), "base_model": NAME,
            "lora_config": {"rank": 4, "seed": 3, "train_unembed": True, "train_mlp": True, "train_attn": True},
            "optimizer_config": {"type": "adamw"}, **more}


def tensor(values, shape=None, dtype=None, raw=None):
    values = np.asarray(values)
    whole = values.dtype.kind == "i"
    values = values.astype("<i8" if whole else "<f4")
    return pb.Tensor(dense=values.tobytes() if raw is None else raw, shape=values.shape if shape is None else shape,
                     dtype=(pb.DTYPE_INT64 if whole else pb.DTYPE_FLOAT32) if dtype is None else dtype)


def sparse(starts, columns, values, shape):
    rows = pb.SparseCsr(values=np.asarray(values, "<f4").tobytes(), crow_indices=np.asarray(starts, "<i8").tobytes(),
                        col_indices=np.asarray(columns, "<i8").tobytes())
    return pb.Tensor(sparse_csr=rows, shape=shape, dtype=pb.DTYPE_FLOAT32)


def datum(tokens=(5, 6, 7), chunk=None, **inputs):
    text = pb.EncodedTextChunk(tokens=np.asarray(tokens, "<i4").tobytes())
    return pb.Datum(model_input=[chunk or pb.Chunk(encoded_text=text)], loss_fn_inputs=inputs)


RIGHT = {"target_tokens": tensor([6, 7, 8]), "weights": tensor([0.0, 1.0, 0.5])}
SAMPLED = {"target_tokens": tensor([6, 7, 8]), "logprobs": tensor([-5.0, -6.0, -7.0]), "advantages": tensor([1.0, 0.0, -1.0])}


def call(model, sequence=1, loss="cross_entropy", config=None, data=None, forward_only=False):
    request = pb.ForwardBackwardRequest(model_id=model, seq_id=sequence, loss_fn=loss, forward_only=forward_only,
                                        data=[datum(**RIGHT)] if data is None else data)
    for key, value in (config or {}).items():
        request.loss_fn_config_v2[key].number = value
    return request


def with_data(tokens=(5, 6, 7), **inputs):
    return lambda model: call(model, data=[datum(tokens, **{**RIGHT, **inputs})])


def with_loss(loss, config=None, **inputs):
    return lambda model: call(model, loss=loss, config=config, data=[datum(**{**SAMPLED, **inputs})])


def with_bytes(change):
    return lambda model: change(call(model).SerializeToString())


def operation(**body):
    return lambda model: {"model_id": model, "seq_id": 1, **body}


def adam(**more):
    return operation(adam_params={"learning_rate": 1e-4, "beta1": 0.9, "beta2": 0.95, "eps": 1e-12, "weight_decay": 0.0,
                                  "grad_clip_norm": 0.0, **more})


IMAGE = pb.Chunk(image=pb.ImageChunk(data=b"\x89PNG", format="png"))
LONG = (5,) * 4097
INFINITE, NAN = float("inf"), float("nan")
WEIGHTS = {"NaN": [0.0, NAN, 1.0], "inf": [0.0, INFINITE, 1.0], "-inf": [0.0, -INFINITE, 1.0]}
NAMES = {"empty": "", "dot": ".", "dots": "..", "slash": "a/b", "encoded": "%2e%2e", "nul": "a\0b", "long": "a" * 300, "control": "a\nb"}
OPERATIONS = {
    "forward_backward": {
        "fewer targets": with_data(target_tokens=tensor([6, 7])),
        "more weights": with_data(weights=tensor([1.0] * 4)),
        "token beyond the vocabulary": with_data(tokens=(5, 10 ** 6, 7)),
        "negative token": with_data(tokens=(5, -1, 7)),
        "target beyond the vocabulary": with_data(target_tokens=tensor([6, 10 ** 6, 8])),
        "negative target": with_data(target_tokens=tensor([6, -1, 8])),
        "empty datum": with_data(tokens=(), target_tokens=tensor(np.zeros(0, int)), weights=tensor(np.zeros(0))),
        "no datum": lambda model: call(model, data=[]),
        "no targets": lambda model: call(model, data=[datum(weights=RIGHT["weights"])]),
        **{f"weight {name}": with_data(weights=tensor(values)) for name, values in WEIGHTS.items()},
        **{f"{key} {name}": with_loss("ppo", **{key: tensor(values)}) for name, values in WEIGHTS.items() for key in ("logprobs", "advantages")},
        "rows of two dimensions": with_data(target_tokens=tensor(np.full((2, 4), 6)), weights=tensor(np.ones((2, 4)))),
        "columns that differ": with_data(target_tokens=tensor(np.full((3, 4), 6)), weights=tensor(np.ones((3, 2)))),
        "three dimensions": with_data(target_tokens=tensor(np.full((3, 2, 2), 6)), weights=tensor(np.ones((3, 2, 2)))),
        "rows that end before they begin": with_data(target_tokens=tensor(np.full((3, 4), 6)), weights=sparse([0, 2, 1, 3], [0, 1, 2], [1, 1, 1], [3, 4])),
        "column beyond the shape": with_data(target_tokens=tensor(np.full((3, 4), 6)), weights=sparse([0, 1, 1, 1], [4], [1], [3, 4])),
        "negative column": with_data(target_tokens=tensor(np.full((3, 4), 6)), weights=sparse([0, 1, 1, 1], [-1], [1], [3, 4])),
        "fewer rows than the shape": with_data(target_tokens=tensor(np.full((3, 4), 6)), weights=sparse([0, 1, 2], [0, 1], [1, 1], [3, 4])),
        "rows that end before the values do": with_data(target_tokens=tensor(np.full((3, 4), 6)), weights=sparse([0, 1, 1, 1], [0, 1], [1, 1], [3, 4])),
        "sparse NaN": with_data(target_tokens=tensor(np.full((3, 4), 6)), weights=sparse([0, 1, 1, 1], [0], [NAN], [3, 4])),
        "fewer columns than values": with_data(target_tokens=tensor(np.full((3, 4), 6)), weights=sparse([0, 1, 2, 2], [0], [1, 1], [3, 4])),
        "more cells than memory": with_data(target_tokens=tensor(np.full((3, 4), 6)), weights=sparse([0, 0, 0, 0], [], [], [3, 2 ** 62])),
        "no dtype": with_data(weights=tensor([1.0, 1.0, 1.0], dtype=0)),
        "unknown dtype": with_data(weights=tensor([1.0, 1.0, 1.0], dtype=9)),
        "targets as fractions": with_data(target_tokens=tensor([6.0, 7.0, 8.0])),
        "part of a number": with_data(weights=tensor([1.0, 1.0, 1.0], raw=b"\0" * 11)),
        "shape of another size": with_data(weights=tensor([1.0, 1.0, 1.0], shape=[4])),
        "negative shape": with_data(weights=tensor([1.0, 1.0, 1.0], shape=[-3])),
        "longer than the context": with_data(LONG, target_tokens=tensor(np.array(LONG)), weights=tensor(np.ones(4097))),
        "image": lambda model: call(model, data=[datum(chunk=IMAGE, **RIGHT)]),
        "audio": lambda model: call(model, data=[datum(chunk=pb.Chunk(dmel=pb.DmelChunk(dmel=b"12")), **RIGHT)]),
        "unknown loss": with_loss("hinge"),
        "stable_reinforce": with_loss("stable_reinforce"),
        "custom": with_loss("custom"),
        "no loss": with_loss(""),
        "unknown key": with_loss("ppo", {"clip": 0.2}),
        "unknown input": with_loss("ppo", reward=tensor([1.0, 1.0, 1.0])),
        "clip thresholds as inputs": with_loss("ppo", clip_low_threshold=tensor([0.8] * 3)),
        "dro without beta": with_loss("dro"),
        "beta below zero": with_loss("dro", {"beta": -1.0}),
        "beta NaN": with_loss("dro", {"beta": NAN}),
        "thresholds the wrong way": with_loss("ppo", {"clip_low_threshold": 1.2, "clip_high_threshold": 0.8}),
        "no advantages": lambda model: call(model, loss="ppo", data=[datum(**RIGHT)]),
        "sequence 0": lambda model: call(model, 0),
        "negative sequence": lambda model: call(model, -1),
        "half a message": with_bytes(lambda bytes: bytes[:len(bytes) // 2]),
        "no message": with_bytes(lambda bytes: b"\xff" * 100),
        "nothing": with_bytes(lambda bytes: b""),
        "group": with_bytes(lambda bytes: bytes + b"\x53"),
        "length of 2^63": with_bytes(lambda bytes: bytes + b"\x1a" + b"\xff" * 8 + b"\x7f"),
        "ten million empty datums": with_bytes(lambda bytes: bytes + b"\x1a\0" * 10 ** 7),
    },
    "optim_step": {
        "negative rate": adam(learning_rate=-1e-4),
        "beta1 of 1": adam(beta1=1.0),
        "beta2 of 1": adam(beta2=1.0),
        "negative epsilon": adam(eps=-1e-12),
        "negative decay": adam(weight_decay=-0.1),
        "rate as text": adam(learning_rate="1e-4"),
        "rate null": adam(learning_rate=None),
        "no gradient": adam(),
        "no options": operation(),
        "dimuon": operation(optimizer_params={"type": "dimuon", "learning_rate": 0.1}),
        "sequence of 2^31": lambda model: {**adam()(model), "seq_id": 2 ** 31},
        "sequence as text": lambda model: {**adam()(model), "seq_id": "1"},
        "no sequence": lambda model: {"model_id": model, "adam_params": adam()(model)["adam_params"]},
    },
    "save_weights": {
        **{f"{name} name": operation(path=text) for name, text in NAMES.items()},
        "name as a number": operation(path=1),
        "expires in a second": operation(path="a", ttl_seconds=1),
        "expires in 30,000 years": operation(path="a", ttl_seconds=10 ** 12),
    },
    "save_weights_for_sampler": {
        "weights in flight": operation(sampling_session_seq_id=10 ** 6, kind="inflight"),
        "neither name nor sampler": operation(),
        "slash": operation(path="../a"),
    },
    "save_weights_external": {"age": operation(path="a", age_encryption_recipients=["age1xyz"])},
    "load_weights": {
        "unknown": operation(path="tinker://nobody:train:0/weights/a", optimizer=True),
        "two parts": operation(path="tinker://nobody:train:0/a", optimizer=True),
        "four parts": operation(path="tinker://nobody:train:0/weights/a/b", optimizer=True),
        "file": operation(path="file:///etc/passwd", optimizer=True),
        "climbing": operation(path="tinker://../weights/..", optimizer=True),
    },
}


@pytest.mark.parametrize("path, name", [pytest.param(path, name, id=f"{path}: {name}") for path in OPERATIONS for name in OPERATIONS[path]])
def test_operation(wire, witness, path, name):
    model = wire.model()
    reply = wire.posted(path, OPERATIONS[path][name](model))
    said = wire.error(*reply)
    assert len(said) > 10
    if reply[0] != 200:  # nothing was accepted
        assert np.isfinite(wire.loss(model, 1))
    assert witness()


def test_refusals_name_what_is_known(wire):
    def said(request):
        return wire.error(*wire.posted("forward_backward", request(wire.model())))
    for text, words in ((said(with_loss("hinge")), ("hinge", "cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo")),
                        (said(with_loss("ppo", {"clip": 0.2})), ("clip_low_threshold", "clip_high_threshold")),
                        (said(with_loss("stable_reinforce")), ("stable_reinforce",))):
        assert all(word in text for word in words), text


def test_an_advantage_of_zero_counts_for_nothing_however_unlikely_the_token(wire):
    model = wire.model()
    inputs = {**SAMPLED, "logprobs": tensor([-1e30, -6.0, -7.0]), "advantages": tensor([0.0, 0.0, 0.0])}
    assert wire.loss_of(wire.sent("forward_backward", call(model, loss="importance_sampling", data=[datum(**inputs)]))) == 0


def test_a_sequence_that_is_used_again_is_the_first_request(wire):
    model = wire.model()
    first = wire.sent("forward_backward", call(model))
    assert wire.sent("forward_backward", call(model, loss="ppo", data=[datum(**SAMPLED)]))["request_id"] == first["request_id"]
    assert wire.sent("optim_step", adam()(model))["request_id"] == first["request_id"]
    assert wire.future(first)[0] == PROTOBUF


def test_a_failed_operation_fails_what_waits_behind_it(wire):
    model = wire.model()
    second = wire.sent("optim_step", {**adam()(model), "seq_id": 2})
    said = wire.error(*wire.posted("forward_backward", with_loss("hinge")(model)))
    kind, content = wire.future(second)
    assert kind.startswith(JSON) and "hinge" in json.loads(content)["error"] and said


def test_weights_in_bfloat16_are_the_numbers_that_they_are(wire):
    model = wire.model()
    narrow = tensor([0.0, 1.0, 0.5], dtype=pb.DTYPE_BFLOAT16, raw=np.array([0, 0x3f80, 0x3f00], "<u2").tobytes())
    one, other = (wire.loss_of(wire.sent("forward_backward", call(model, sequence, data=[datum(**{**RIGHT, "weights": weights})])))
                  for sequence, weights in ((1, RIGHT["weights"]), (2, narrow)))
    assert one == other


def test_a_name_of_a_device_is_a_name(wire):
    """Some systems have no file of this name; state folders are on those that have."""
    model = wire.model()
    _, content = wire.future(wire.sent("save_weights", {"model_id": model, "seq_id": 1, "path": "CON"}))
    assert json.loads(content)["path"] == f"tinker://{model}/weights/CON"


def saved(wire, model):
    _, content = wire.future(wire.sent("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}))
    return json.loads(content)["path"]


def test_a_checkpoint_of_another_base_is_not_loaded(wire, witness):
    path = saved(wire, wire.model(base_model=OTHER))
    said = wire.error(*wire.posted("load_weights", {"model_id": wire.model(), "seq_id": 1, "path": path, "optimizer": True}))
    assert OTHER in said and NAME in said
    said = wire.error(*wire.posted("load_weights", from_state(path, base_model=NAME)(wire)[1]))
    assert OTHER in said and NAME in said
    assert witness()


@pytest.mark.parametrize("file", ["adapter_model.safetensors", "isograd.json", "info.json"])
def test_a_damaged_checkpoint_is_not_loaded(wire, witness, file):
    path = saved(wire, wire.model())
    _, _, run, kind, name = path.split("/")
    damaged = wire.state / "checkpoints" / "~".join((run.replace(":", "+"), kind, name)) / file
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    for request in (from_state(path)(wire), ("load_weights", {"model_id": wire.model(), "seq_id": 1, "path": path, "optimizer": True})):
        assert file in wire.error(*wire.posted(*request))
    assert witness()


def test_a_name_that_is_taken(wire):
    model = wire.model()
    for sequence in (1, 2):
        wire.future(wire.sent("save_weights", {"model_id": model, "seq_id": sequence, "path": f"name{sequence}"}))
    assert "name1" in wire.error(*wire.posted("save_weights", {"model_id": model, "seq_id": 3, "path": "name1"}))


def test_a_sampler_checkpoint_is_not_trained(wire):
    model, other = wire.model(), wire.model()
    _, content = wire.future(wire.sent("save_weights_for_sampler", {"model_id": model, "seq_id": 1, "path": "a"}))
    saved = json.loads(content)["path"]
    assert wire.error(*wire.posted("load_weights", {"model_id": other, "seq_id": 1, "path": saved, "optimizer": True}))


# ---- models, samplers, futures, listings ----

def lora(**more):
    return lambda wire: ("create_model", creation(wire, lora_config={"rank": 4, "train_unembed": True, "train_mlp": True, "train_attn": True, **more}))


def created(**more):
    return lambda wire: ("create_model", creation(wire, **more))


def opened(**more):
    return lambda wire: ("create_sampling_session", {"session_id": wire.session, "sampling_session_seq_id": 10 ** 7, **more})


def from_state(path, **more):
    return lambda wire: ("load_weights", {"session_id": wire.session, "model_seq_id": 10 ** 6 + next(wire.models), "path": path, "optimizer": True, **more})


NOBODY = "tinker://nobody:train:0/weights/a"
REQUESTS = {
    "negative rank": lora(rank=-1), "rank of a million": lora(rank=10 ** 6), "rank as text": lora(rank="4"),
    "rank of 513": lora(rank=513), "whole weights without some": lora(rank=0, train_mlp=False),
    "nothing trained": lora(train_unembed=False, train_mlp=False, train_attn=False),
    "unknown base": created(base_model="nobody/none"), "no base": created(base_model=""), "dimuon": created(optimizer_config={"type": "dimuon", "version": 1}),
    "unknown session": created(session_id="nobody"), "negative model": created(model_seq_id=-1),
    "unknown normaliser": created(user_metadata={"isograd.normalise": "average"}),
    "create from an unknown state": from_state(NOBODY), "create from a file": from_state("file:///etc/passwd"),
    "create from two parts": from_state("tinker://nobody/a"), "create from four parts": from_state(NOBODY + "/b"),
    "sampler of nothing": opened(), "sampler of an unknown base": opened(base_model="nobody/none"), "sampler of an unknown state": opened(model_path=NOBODY),
    "sampler of a file": opened(model_path="file:///etc/passwd"), "sampler of an unknown session": opened(session_id="nobody", base_model=NAME),
    "unknown model": lambda wire: ("optim_step", adam()("nobody:train:0")), "model without a name": lambda wire: ("optim_step", adam()("")),
    "model as a number": lambda wire: ("optim_step", adam()(7)), "unknown model's call": lambda wire: ("forward_backward", call("nobody:train:0")),
    "information on an unknown model": lambda wire: ("get_info", {"model_id": "nobody:train:0"}),
    "unknown weights": lambda wire: ("weights_info", {"tinker_path": NOBODY}), "weights of a file": lambda wire: ("weights_info", {"tinker_path": "file:///a"}),
    "unknown future": lambda wire: ("retrieve_future", {"request_id": "nobody"}), "future as a number": lambda wire: ("retrieve_future", {"request_id": 1}),
    "no future": lambda wire: ("retrieve_future", {}), "heartbeat of an unknown session": lambda wire: ("session_heartbeat", {"session_id": "nobody"}),
    "end of an unknown session": lambda wire: ("sessions/nobody/finish", {"reason": {"type": "success"}, "detail": None}),
    "publication of an unknown state": lambda wire: ("training_runs/nobody:train:0/checkpoints/weights/a/publish", {}),
    "list": lambda wire: ("create_session", [1]), "number": lambda wire: ("create_session", 1), "null": lambda wire: ("optim_step", None),
}


@pytest.mark.parametrize("name", REQUESTS)
def test_request(wire, witness, name):
    said = wire.error(*wire.posted(*REQUESTS[name](wire)))
    assert len(said) > 10
    assert witness()


SAMPLES = {
    "no tokens asked for": {"sampling_params": {"max_tokens": 0}}, "a billion tokens": {"sampling_params": {"max_tokens": 10 ** 9}},
    "negative temperature": {"sampling_params": {"temperature": -1}}, "top_p 0": {"sampling_params": {"top_p": 0}},
    "top_p above 1": {"sampling_params": {"top_p": 1.5}}, "top_k below -1": {"sampling_params": {"top_k": -2}},
    "100,000 stops": {"sampling_params": {"stop": ["x"] * 10 ** 5}},
    "empty stop": {"sampling_params": {"stop": [""]}},
    "no samples": {"num_samples": 0}, "a million samples": {"num_samples": 10 ** 6},
    "empty prompt": {"prompt": {"chunks": []}}, "empty chunk": {"prompt": {"chunks": [{"type": "encoded_text", "tokens": []}]}},
    "token beyond the vocabulary": {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [10 ** 6]}]}},
    "negative token": {"prompt": {"chunks": [{"type": "encoded_text", "tokens": [-1]}]}},
    "token as text": {"prompt": {"chunks": [{"type": "encoded_text", "tokens": ["a"]}]}},
    "longer than the context": {"prompt": {"chunks": [{"type": "encoded_text", "tokens": list(LONG)}]}},
    "image": {"prompt": {"chunks": [{"type": "image", "data": "AAAA", "format": "png"}]}},
    "pointer": {"prompt": {"chunks": [{"type": "image_asset_pointer", "location": "x", "format": "png"}]}},
    "other tokens": {"prompt_alt_tokens_k": 2}, "record for stable_reinforce": {"record_stability_info": True},
    "negative top": {"topk_prompt_logprobs": -1}, "unknown sampler": {"sampling_session_id": "nobody:sample:0"}, "negative sequence": {"seq_id": -1},
}


@pytest.fixture(scope="module")
def sampler(wire):
    return wire.sent("create_sampling_session", {"session_id": wire.session, "sampling_session_seq_id": 0, "base_model": NAME})["sampling_session_id"]


samples = itertools.count()


def sampling(sampler, **more):
    request = {"sampling_session_id": sampler, "seq_id": next(samples), "num_samples": 1, "prompt": {"chunks": [{"type": "encoded_text", "tokens": [5, 6, 7]}]},
               "prompt_logprobs": False, **more}
    return {**request, "sampling_params": {"max_tokens": 3, "temperature": 1, "top_k": -1, "top_p": 1, **more.get("sampling_params", {})}}


@pytest.mark.parametrize("name", SAMPLES)
def test_sample(wire, sampler, name):
    assert len(wire.error(*wire.posted("asample", sampling(sampler, **SAMPLES[name])))) > 10
    kind, _ = wire.future(wire.sent("asample", sampling(sampler)))
    assert kind == PROTOBUF


# ---- bodies and headers ----

DEEP = b'{"tags": ' + b"[" * 10 ** 6 + b"]" * 10 ** 6 + b"}"
BODIES = {
    "a million brackets": ("create_session", DEEP), "key given twice": ("create_session", b'{"tags": [], "tags": []}'),
    "number beyond all": ("optim_step", b'{"model_id": "x", "seq_id": 1e400}'), "not UTF-8": ("create_session", b'{"display_name": "\xff\xfe"}'),
    "half": ("create_session", b'{"tags": ['), "empty": ("create_session", b""), "two": ("create_session", b"{} {}"),
    "NaN": ("optim_step", b'{"model_id": "x", "seq_id": 1, "adam_params": {"learning_rate": NaN}}'),
    "sampling of NaN": ("asample", b'{"sampling_session_id": "x", "seq_id": 1, "sampling_params": {"temperature": NaN}}'),
    "protobuf where JSON is due": ("create_session", b"\x0a\x01a"),
}


@pytest.mark.parametrize("name", BODIES)
def test_body(wire, witness, name):
    path, body = BODIES[name]
    assert wire.error(*wire.reply("POST", path, body))
    assert witness()


def test_other_content_types_verbs_and_paths(wire, witness):
    session = json.dumps({"tags": []}).encode()
    for kind in (None, "text/plain", "multipart/form-data; boundary=x", "application/octet-stream"):
        assert wire.error(*wire.reply("POST", "create_session", session, kind)), kind
    for verb, path in (("GET", "create_session"), ("GET", "asample"), ("PUT", "optim_step"), ("DELETE", "create_model"), ("POST", "nothing"),
                       ("GET", "/"), ("GET", "/etc/passwd"), ("GET", "training_runs/nobody:train:0"), ("GET", "samplers/nobody"), ("GET", "sessions/nobody"),
                       ("DELETE", "training_runs/nobody:train:0/checkpoints/weights/a"), ("DELETE", "training_runs/x/checkpoints/weights/%2e%2e"),
                       ("GET", "training_runs?limit=-1"), ("GET", "training_runs?limit=x"), ("GET", "checkpoints?offset=99999999999999999999")):
        assert wire.error(*wire.reply(verb, path)), (verb, path)
    assert witness()


def test_a_body_of_65_megabytes(wire, witness):
    body = b'{"tags": ["' + b"a" * (65 * 10 ** 6 + (3 << 20)) + b'"]}'
    assert wire.error(*wire.reply("POST", "create_session", body))
    assert witness()


def test_an_operation_that_is_too_large_uses_its_number_and_the_model_goes_on(wire, witness):
    """Chunked, and as JSON; in both what names the operation comes last."""
    model = wire.model()
    parts = [b"\x1a\x80\x80\x40" + b"\0" * 2 ** 20] * 65 + [call(model, 1, forward_only=True).SerializeToString()]
    assert "at most" in wire.error(*wire.reply("POST", "forward_backward", iter(parts), PROTOBUF))
    body = {"user_metadata": {"a": "x" * (65 << 20)}, "path": "a", "model_id": model, "seq_id": 2}
    assert "at most" in wire.error(*wire.posted("save_weights", body))
    assert np.isfinite(wire.loss(model, 3)) and witness()


@contextlib.contextmanager
def idle_and_slow(port):
    """2,000 connections that were served once, and 100 whose headers do not end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    over = threading.Event()
    with contextlib.ExitStack() as open_ones:
        def connected(text):
            one = open_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=LIMIT))
            one.sendall(text)
            return one
        idle = [connected(b"GET /api/v1/healthz HTTP/1.1\r\nHost: localhost\r\n\r\n") for _ in range(2000)]
        assert all(one.recv(1000).startswith(b"HTTP/1.1 200") for one in idle)
        slow = [connected(b"POST /api/v1/create_session HTTP/1.1\r\nX: ") for _ in range(100)]

        def drip():
            while not over.wait(0.5):
                for one in slow:
                    with contextlib.suppress(OSError):  # the server ends it
                        one.sendall(b"x")
        thread = threading.Thread(target=drip)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_neither_many_connections_nor_a_body_of_many_gigabytes_takes_memory(wire, witness):
    """Of 10 GB in full runs. It uses its operation's number, and others are served meanwhile."""
    def resident():
        return int(re.search(r"VmRSS:\s+(\d+) kB", pathlib.Path(f"/proc/{wire.pid}/status").read_text())[1]) * 1024
    model, part = wire.model(), b"\x1a\x80\x80\x40" + b"\0" * 2 ** 20
    last = call(model, 1, forward_only=True).SerializeToString()
    count = (10 ** 10 if FULL else 2 ** 31) // len(part) + 1
    served, memory = [], [resident()]

    def parts():
        for i in range(count):
            yield part
            if i % 100 == 0:
                memory.append(resident())
                served.append(witness())
        yield last
    with within(10 * LIMIT), idle_and_slow(wire.port):
        size = str(count * len(part) + len(last))
        assert "at most" in wire.error(*wire.reply("POST", "forward_backward", parts(), PROTOBUF, **{"Content-Length": size}))
    grown = max(memory) - memory[0]
    print(f"{int(size) / 1e9:.1f} GB with 2,100 connections open: {grown / 2 ** 20:.1f} MiB")
    assert all(served) and grown <= 64 << 20
    assert np.isfinite(wire.loss(model, 2)) and witness()


def test_the_client_shows_a_limit_at_once_and_loses_nothing(wire, witness):
    url, data = f"http://127.0.0.1:{wire.port}", uneven(np.random.default_rng(6))
    with session(url) as service:
        def accumulated(user_metadata):
            training = trained(service, user_metadata=user_metadata)
            for _ in range(2):
                training.forward_backward(data, "cross_entropy").result(LIMIT)
                step = training.optim_step(ADAM)
            return training, step
        limited, step = accumulated({"isograd.dump": "true"})
        with pytest.raises(tinker.RequestFailedError, match="dump-bytes"):
            step.result(LIMIT)
        with pytest.raises(tinker.RequestFailedError, match="dump-bytes"):
            limited.forward_backward(data, "cross_entropy").result(LIMIT)
        saved = limited.save_state("limited").result(LIMIT).path
        shutil.rmtree(wire.state / "dumps")
        resumed = service.create_training_client_from_state_with_optimizer(saved).result(LIMIT)
        assert resumed.optim_step(ADAM).result(LIMIT).metrics["step"] == 2
        unlimited, step = accumulated({})
        step.result(LIMIT)
        assert exported(url, resumed)["adapter_model.safetensors"] == exported(url, unlimited)["adapter_model.safetensors"]
    assert witness()


def test_a_body_that_is_too_large_is_refused_before_it_is_read(wire, witness):
    connection = http.client.HTTPConnection("127.0.0.1", wire.port, timeout=LIMIT)
    connection.putrequest("POST", "/api/v1/forward_backward")
    for header, value in (("X-API-Key", KEY), ("Content-Type", PROTOBUF), ("Content-Length", str(10 ** 10))):
        connection.putheader(header, value)
    connection.endheaders(b"\0" * 1000)
    reply = connection.getresponse()
    assert reply.status == 413 and int(reply.headers["Content-Length"]) == len(reply.read())
    connection.close()
    assert witness()


def test_a_host_that_is_not_this_one(wire):
    assert wire.error(*wire.reply("GET", "healthz", Host="attacker.example"))
