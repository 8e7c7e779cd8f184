"""The unmodified tinker client, as the tests of `isograd serve` use it."""
import asyncio
import contextlib
import functools
import inspect
import itertools
import os
import signal
import urllib.request

os.environ["TINKER_TELEMETRY"] = "0"

import numpy as np
import pytest
import tinker
from safetensors.torch import load
from tinker import types

from serve_files import NAME

KEY, LIMIT = "tml-local", 20  # seconds
exports = itertools.count()
ADAM = types.AdamParams(learning_rate=1e-2, eps=1e-6)


@contextlib.contextmanager
def within(seconds):
    """A call of the client that waits for longer is a failure, not a test that hangs."""
    def late(*_):
        raise TimeoutError(f"still waiting after {seconds} s")
    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def limited_to(seconds):
    """A fixture of a module, each of whose tests may take that long."""
    @pytest.fixture(autouse=True)
    def limited():
        with within(seconds):
            yield
    return limited


@contextlib.contextmanager
def session(url, limit=LIMIT, **options):
    service = tinker.ServiceClient(base_url=url, api_key=KEY, **options)
    try:
        yield service
    finally:
        if hasattr(service, "close"):  # 0.25.0 falls silent
            service.close("success").result(limit)


def settled(result):
    """What a call gives, whether at once, as a future or as a coroutine."""
    if inspect.iscoroutine(result):
        result = asyncio.run(result)
    return result.result() if hasattr(result, "result") else result


@functools.cache
def rest(url):
    return tinker.RestClient(base_url=url, api_key=KEY)


def model(service, rank=4, seed=3, base=NAME, **options):
    return settled(service.create_lora_training_client(base, rank=rank, seed=seed, **options))


def prompt(tokens):
    return types.ModelInput.from_ints([int(token) for token in tokens])


def datum(tokens, **inputs):
    return types.Datum(model_input=prompt(tokens), loss_fn_inputs=inputs)


def text(rng, length):
    """Tokens and, for each, the one that follows."""
    tokens = rng.integers(3, 300, length + 1)
    return tokens[:-1], tokens[1:]


def uneven(rng, lengths=(3, 9, 30, 5, 17, 2, 40, 8)):
    """Datums of cross entropy; a prompt without weight, then weights that sum to one."""
    data = []
    for length in lengths:
        tokens, targets = text(rng, length)
        weights = (np.arange(length) >= length // 3) * rng.uniform(0.5, 1.5, length)
        data.append(datum(tokens, target_tokens=targets, weights=(weights / weights.sum()).astype(np.float32)))
    return data


def exported(url, training):
    """The files of an external export, by name."""
    path = training.save_weights_external(f"exported-{next(exports)}").result().path
    files = {}
    for file, address in rest(url).get_external_weights_urls(path).result().urls.items():
        with urllib.request.urlopen(urllib.request.Request(address, headers={"X-API-Key": KEY}), timeout=LIMIT) as reply:
            files[file] = reply.read()
    return files


def adapter(url, training):
    """The matrices of the model's adapter, by name, as PEFT calls them."""
    return load(exported(url, training)["adapter_model.safetensors"])


def furthest(found, expected):
    """The largest relative distance of a matrix."""
    assert found.keys() == expected.keys()
    return max(((found[name] - expected[name]).norm() / expected[name].norm()).item() if expected[name].any()
               else found[name].abs().max().item() for name in expected)
