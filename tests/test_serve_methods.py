"""Every public method of the tinker client's four classes against `isograd serve`, over both transports: it works, or it is
refused by a message that says why. None waits for ever. A method that the table lacks is a failure: a new version of the
client has to be looked at. An older version, in an environment of its own, goes through the same table.
"""
import asyncio
import inspect
import itertools
import json
import re
import subprocess
import types
import warnings

import numpy as np
import pytest
import tinker
from conftest import BUILD, ROOT
from serve_client import ADAM, KEY, LIMIT, model, prompt, rest, session, settled, uneven, within
from serve_files import NAME, environment, server, write_model
from tinker.lib.api_future_impl import QueueState
from tinker.lib.public_interfaces.rest_client import RestClient
from tinker.types import SamplingParams

names = map("name-{}".format, itertools.count())
NOT_OFFERED = re.compile("not (offered|served)")
OLDER = "0.25.0"


def twice_negative(logprobs):
    loss = -(logprobs * 2).sum()
    return loss, {"custom/mine:sum": loss}


def thrice_negative(logprobs):
    loss = -(logprobs * 3).sum()
    return loss, {"custom/mine:sum": loss}


def minus_sum(data, log_probabilities):
    return -sum(each.sum() for each in log_probabilities), {}


def after_gradient(call, c):
    c.training.forward_backward(c.data, "cross_entropy").result()
    return call(ADAM)


def closes_another(call, c):
    other = tinker.ServiceClient(base_url=c.url, api_key=KEY)
    model(other)
    return other.close("success", "done")


def deletes(call, c):
    run, _, checkpoint = c.training.save_state(next(names)).result().path.removeprefix("tinker://").partition("/")
    return call(run, checkpoint)


# By class and method: how to call it, and the refusal, if it is one. A method with the ending _async is called alike.
# Some methods are of one of the two versions alone.
TABLE = {
    tinker.ServiceClient: {
        "close": closes_another,
        "copy_weights": (lambda call, c: call(c.state), NOT_OFFERED),
        "create_custom_loss": lambda call, c: call(thrice_negative, {"logprobs": 1}),
        "create_lora_training_client": lambda call, c: call(NAME, rank=4),
        "create_rest_client": lambda call, c: call().get_training_run(c.training.model_id),
        "create_sampling_client": lambda call, c: call(base_model=NAME),
        "create_training_client_from_state": lambda call, c: call(c.state),
        "create_training_client_from_state_with_optimizer": lambda call, c: call(c.state),
        "get_console_url": lambda call, c: call(),
        "get_server_capabilities": lambda call, c: call(),
        "get_telemetry": lambda call, c: call(),
    },
    tinker.TrainingClient: {
        "create_sampling_client": lambda call, c: call(c.sampler_weights),
        "forward": lambda call, c: call(c.data, "cross_entropy"),
        "forward_backward": lambda call, c: call(c.data, "cross_entropy"),
        "forward_backward_custom": lambda call, c: call(c.data, c.loss),
        "get_console_url": lambda call, c: call(),
        "get_info": lambda call, c: call(),
        "get_telemetry": lambda call, c: call(),
        "get_tokenizer": lambda call, c: call(),
        "load_state": lambda call, c: call(c.state),
        "load_state_with_optimizer": lambda call, c: call(c.state),
        "optim_step": after_gradient,
        "save_state": lambda call, c: call(next(names)),
        "save_weights_and_get_sampling_client": lambda call, c: call(),
        "save_weights_external": lambda call, c: call(next(names)),
        "save_weights_for_sampler": lambda call, c: call(next(names)),
    },
    tinker.SamplingClient: {
        "compute_logprobs": lambda call, c: call(prompt([5, 6, 7])),
        "create": lambda call, c: call(c.service.holder, base_model=NAME),
        "from_sampler_handle": lambda call, c: call(c.sampling.get_sampler_handle(), api_key=KEY).compute_logprobs(prompt([5, 6])),
        "get_base_model": lambda call, c: call(),
        "get_sampler_handle": lambda call, c: call(),
        "get_telemetry": lambda call, c: call(),
        "get_tokenizer": lambda call, c: call(),
        "on_queue_state_change": lambda call, c: call(QueueState.ACTIVE, None),
        "sample": lambda call, c: call(prompt([5, 6, 7]), 2, SamplingParams(max_tokens=4)),
    },
    RestClient: {
        "assign_session_project": (lambda call, c: call(c.session, "project"), NOT_OFFERED),
        "copy_weights": (lambda call, c: call(c.state, "project"), NOT_OFFERED),
        "delete_checkpoint": deletes,
        "delete_checkpoint_from_tinker_path": lambda call, c: call(c.training.save_state(next(names)).result().path),
        "export_session_trace": (lambda call, c: call(c.session), NOT_OFFERED),
        "get_audit_log": (lambda call, c: call(), NOT_OFFERED),
        # 0.25.0 asks no server: it refuses the loop that it is called from.
        "get_audit_log_async": (lambda call, c: call(), re.compile(f"{NOT_OFFERED.pattern}|incorrect event loop")),
        "get_billing_usage": (lambda call, c: call("2026-11-01", "2026-11-02"), NOT_OFFERED),
        "get_checkpoint_archive_url": (lambda call, c: call(c.training.model_id, "weights/state"), NOT_OFFERED),
        "get_checkpoint_archive_url_from_tinker_path": (lambda call, c: call(c.state), NOT_OFFERED),
        "get_current_checkpoint_storage_usage": (lambda call, c: call(), NOT_OFFERED),
        "get_external_weights_urls": lambda call, c: call(c.external),
        "get_sampler": lambda call, c: call(c.sampler),
        "get_server_capabilities": lambda call, c: call(),
        "get_session": lambda call, c: call(c.session),
        "get_telemetry": lambda call, c: call(),
        "get_training_run": lambda call, c: call(c.training.model_id),
        "get_training_run_by_tinker_path": lambda call, c: call(c.state),
        "get_weights_info_by_tinker_path": lambda call, c: call(c.state),
        "list_checkpoints": lambda call, c: call(c.training.model_id),
        "list_sessions": lambda call, c: call(),
        "list_training_runs": lambda call, c: call(),
        "list_user_checkpoints": lambda call, c: call(),
        "publish_checkpoint_from_tinker_path": lambda call, c: call(c.state),
        "search_sessions": (lambda call, c: call(tinker.types.SessionSearchRequest()), NOT_OFFERED),
        "set_checkpoint_ttl_from_tinker_path": lambda call, c: call(c.state, 7200),
        "unpublish_checkpoint_from_tinker_path": lambda call, c: call(c.state),
        "whoami": (lambda call, c: call(), re.compile("JWT")),  # the client asks no server
    },
}


def methods(kind):
    return [name for name, _ in inspect.getmembers(kind, callable) if not name.startswith("_")]


def base_of(kind, name):
    """The method of which an _async one is the other form."""
    base = name.removesuffix("_async")
    return base if base in methods(kind) else name


@pytest.fixture(scope="module", params=[True, False], ids=["rust", "httpx"])
def c(request, tmp_path_factory):
    """The clients, with something of everything there is."""
    folder = tmp_path_factory.mktemp("methods")
    write_model(folder / NAME)
    with pytest.MonkeyPatch.context() as patch, \
            server(folder, folder / "state", "--client-config", json.dumps({"use_pyqwest_transport": request.param})) as running, \
            session(running.url, project_id="project") as service:
        patch.chdir(folder)  # where a sampler's tokenizer lies
        training = model(service)
        data = uneven(np.random.default_rng(3), (4, 7))
        training.forward_backward(data, "cross_entropy")
        training.optim_step(ADAM)
        sampling = settled(training.save_weights_and_get_sampling_client())
        client = service.create_rest_client() if tinker.__version__ == OLDER else rest(running.url)
        training_session = training.model_id.partition(":")[0]
        made = types.SimpleNamespace(
            url=running.url, service=service, training=training, sampling=sampling, rest=client, data=data,
            session=training_session, loss=minus_sum, sampler=client.get_session(training_session).result().sampler_ids[0],
            state=training.save_state("state").result().path,
            sampler_weights=training.save_weights_for_sampler("state").result().path)
        if tinker.__version__ != OLDER:
            made.loss = service.create_custom_loss(twice_negative, {"logprobs": 1}).result()
            made.external = training.save_weights_external("state").result().path
        yield made


@pytest.mark.parametrize("kind, name", [pytest.param(kind, name, id=f"{kind.__name__}.{name}")
                                        for kind in TABLE for name in methods(kind)])
def test_each_method_works_or_says_why_not(c, kind, name):
    row = TABLE[kind].get(name) or TABLE[kind][base_of(kind, name)]
    call, refusal = row if isinstance(row, tuple) else (row, None)
    client = {tinker.ServiceClient: c.service, tinker.TrainingClient: c.training, tinker.SamplingClient: c.sampling,
              RestClient: c.rest}[kind]
    with within(LIMIT), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the SDK's own, of what it deprecates
        if refusal is None:
            settled(call(getattr(client, name), c))
        else:
            with pytest.raises((tinker.APIStatusError, RuntimeError, AssertionError), match=refusal):
                settled(call(getattr(client, name), c))


def test_each_method_of_the_older_client_works_or_says_why_not_too():
    older = environment(BUILD / f"tinker-{OLDER}", f"tinker=={OLDER}")

    def ran(*words):
        done = subprocess.run([older, *words], cwd=ROOT / "tests", capture_output=True, text=True, timeout=6 * LIMIT)
        assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
        return done.stdout
    its = json.loads(ran("-c", "import json, test_serve_methods as t; print(json.dumps([t.methods(kind) for kind in t.TABLE]))"))
    for (kind, rows), names in zip(TABLE.items(), its):  # the table has no more than the two versions
        assert not rows.keys() - {*methods(kind), *names}
    said = ran("-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "test_each_method_works", __file__)
    assert f"\n{2 * sum(map(len, its))} passed" in said  # over each transport
