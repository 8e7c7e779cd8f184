"""The unmodified xorl-client over `isograd serve`: its training is that of the tinker client in mode `tokens` and that of plain torch and
PEFT on the same data, in fp64; what else it calls."""
import contextlib
import sys

import numpy as np
import pytest
import torch
from conftest import BUILD
from fp64_transformers import in_fp64
from safetensors.torch import load_file
from serve_client import LIMIT, datum, furthest, limited_to, session, text
from serve_files import NAME, environment, server, write_model
from tinker import types

BOUND = 1e-12
# Where a gradient is near 0, Adam's update changes by lr / eps times the gradient's rounding. Every run has other initial factors, and
# with eps = 1e-8 one run in fourteen has such an entry and is 2e-12 off; with 1e-4 they are at most 6e-15 off.
ADAM = dict(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-4, weight_decay=0.1, grad_clip_norm=0.05)
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
limited = limited_to(3 * LIMIT)


@pytest.fixture(scope="module")
def xorl():
    folder = BUILD / "xorl-client-0.1.0"
    environment(folder, "xorl-client==0.1.0")
    sys.path.append(str(next(folder.glob("lib/python*/site-packages"))))  # what it depends on is here
    import xorl_client
    assert xorl_client.__version__ == "0.1.0"
    return xorl_client


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("xorl")
    write_model(folder / NAME)
    with server(folder, folder / "state", "--dtype", "float64") as running:
        yield folder, running.url


@contextlib.contextmanager
def client_of(xorl, url):
    service = xorl.ServiceClient(base_url=url, api_key="any", timeout=LIMIT)
    try:
        yield service
    finally:
        service.shutdown()


def result(future):
    return future.result(timeout=LIMIT)


def steps():
    """Three updates; of each the calls, uneven, with prompts that have no weight."""
    rng = np.random.default_rng(48)

    def one(length):
        tokens, targets = text(rng, length)
        weights = (np.arange(length) >= length // 3) * rng.uniform(0.5, 1.5, length)
        return tokens, targets, weights.astype(np.float32)
    return [[[one(length) for length in lengths] for lengths in ((3, 20), (9,), (2, 14, 5))] for _ in range(3)]


def files_of(folder, path):
    run, kind, name = path.partition("://")[2].split("/")
    return folder / "state/checkpoints" / f"{run.replace(':', '+')}~{kind}~{name}"


def weights_of(folder, path):
    files = files_of(folder, path)
    adapter = files / "adapter_model.safetensors"
    return load_file(adapter if adapter.exists() else files / "model.safetensors")


def trained_by_xorl(xorl, folder, url, rank):
    """The paths of the first and the last checkpoint, and the norms. The second update is loaded again before the third."""
    with client_of(xorl, url) as service:
        training = service.create_lora_training_client(NAME, rank=rank, alpha=6, target_modules=ALL, model_id=f"rank-{rank}")
        first, norms = result(training.save_state("first")).path, []

        def data_of(call):
            return [xorl.Datum(model_input=xorl.ModelInput.from_ints([int(token) for token in tokens]),
                               loss_fn_inputs={"target_tokens": targets, "weights": weights}) for tokens, targets, weights in call]
        for number, calls in enumerate(steps()):
            pending = [training.forward_backward(data_of(call), "cross_entropy") for call in calls]
            stepped = training.optim_step(xorl.AdamParams(**ADAM))
            for call, found in zip(calls, map(result, pending)):
                assert [each.logprobs.shape for each in found.loss_fn_outputs] == [[len(tokens)] for tokens, _, _ in call]
                assert found.metrics["valid_tokens:sum"] == sum((weights != 0).sum() for _, _, weights in call)
            norms.append(result(stepped).metrics["grad_norm"])
            if number == 1:
                half = result(training.save_state("half")).path
                result(training.forward_backward(data_of(calls[0]), "cross_entropy"))  # is lost: the checkpoint has no open sums
                assert result(training.load_state_with_optimizer(half)).path == half
        return first, result(training.save_state("last")).path, norms


def trained_by_tinker(folder, url, rank, first):
    with session(url) as service:
        if rank > 0:
            training = service.create_training_client_from_state_with_optimizer(first.replace("xorl://", "tinker://")).result()
        else:
            training = service.create_lora_training_client(NAME, rank=0, user_metadata={"isograd.normalise": "tokens"}).result()
        norms = []
        for calls in steps():
            for call in calls:
                training.forward_backward([datum(tokens, target_tokens=targets, weights=weights) for tokens, targets, weights in call],
                                          "cross_entropy")
            norms.append(training.optim_step(types.AdamParams(**ADAM)).result().metrics["grad_norm"])
        return training.save_state("last").result().path, norms


def trained_locally(folder, rank, first, divide_each_call=False):
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import Qwen3ForCausalLM
    with in_fp64(["qwen3"]):
        module = Qwen3ForCausalLM.from_pretrained(folder / NAME, dtype=torch.float64, attn_implementation="eager")
        if rank > 0:
            module = PeftModel.from_pretrained(module, files_of(folder, first), is_trainable=True)
        parameters, norms = [each for each in module.parameters() if each.requires_grad], []
        optimizer = torch.optim.AdamW(parameters, lr=ADAM["learning_rate"], betas=(ADAM["beta1"], ADAM["beta2"]), eps=ADAM["eps"],
                                      weight_decay=ADAM["weight_decay"])
        for calls in steps():
            counts = [sum((weights != 0).sum() for _, _, weights in call) for call in calls]
            for call, own in zip(calls, counts):
                for tokens, targets, weights in call:
                    rows = module(torch.as_tensor(tokens)[None]).logits[0].log_softmax(-1)
                    picked = rows.gather(1, torch.as_tensor(targets)[:, None])[:, 0]
                    (-(picked * torch.as_tensor(weights).double()).sum() / (own if divide_each_call else sum(counts))).backward()
            norms.append(torch.nn.utils.clip_grad_norm_(parameters, ADAM["grad_clip_norm"]).item())
            optimizer.step()
            optimizer.zero_grad()
        found = get_peft_model_state_dict(module, save_embedding_layers=False) if rank > 0 else module.state_dict()
        return {name: value.detach() for name, value in found.items()}, norms


@pytest.mark.parametrize("rank", [4, 0])
def test_three_calls_and_a_step_are_those_of_tinker_and_of_local_training(xorl, served, rank):
    folder, url = served
    first, last, norms = trained_by_xorl(xorl, folder, url, rank)
    found = weights_of(folder, last)
    assert furthest(found, weights_of(folder, first)) > 1e-3 and min(norms) > ADAM["grad_clip_norm"]
    others = {"tinker": trained_by_tinker(folder, url, rank, first), "local": trained_locally(folder, rank, first)}
    others["tinker"] = weights_of(folder, others["tinker"][0]), others["tinker"][1]
    for expected, expected_norms in others.values():
        assert furthest(found, expected) <= BOUND
        np.testing.assert_allclose(norms, expected_norms, rtol=BOUND)
    assert furthest(found, trained_locally(folder, rank, first, divide_each_call=True)[0]) > 1e4 * BOUND


def test_what_else_the_client_calls(xorl, served):
    folder, url = served
    with client_of(xorl, url) as service:
        training = service.create_lora_training_client(NAME, rank=2, target_modules=ALL, model_id="policy")
        rest = service.create_rest_client()

        def listed():
            return [each.checkpoint_id for each in result(training.list_checkpoints()).checkpoints]
        state = result(training.save_state("state")).path
        named = result(training.save_weights_for_sampler("named")).path
        assert named.startswith("xorl://") and listed() == ["sampler_weights/named", "weights/state"]
        (newest, _) = result(training.list_checkpoints()).checkpoints
        assert (newest.checkpoint_type, newest.path) == ("sampler", named) and newest.size_bytes > 0
        info = result(rest.get_weights_info(state))
        assert (info.base_model, info.is_lora, info.lora_rank) == (NAME, True, 2)
        runs = result(rest.list_training_runs()).training_runs
        assert state in [each.last_checkpoint.path for each in runs if each.last_checkpoint]
        assert result(training.delete_checkpoint("sampler_weights/named")).deleted_path == named
        with pytest.raises(xorl.NotFoundError, match="weights/missing"):
            result(training.delete_checkpoint("weights/missing"))
        assert listed() == ["weights/state"]

        resumed = service.create_training_client_from_state(state, target_modules=ALL)
        forward = [each.forward([xorl.Datum(model_input=xorl.ModelInput.from_ints([5, 6, 7]), loss_fn_inputs={"target_tokens": [6, 7, 8]})],
                                "cross_entropy") for each in (training, resumed)]
        assert result(forward[0]).loss_fn_outputs[0].logprobs.data == result(forward[1]).loss_fn_outputs[0].logprobs.data
        assert result(resumed.unload()).model_id
        assert result(training.delete_checkpoint_from_xorl_path(state)).success and listed() == []
        killed = result(training.kill_session(save_checkpoint=True))
        assert killed.success and killed.checkpoint_path.startswith("xorl://")
        again = result(training.kill_session(save_checkpoint=True))
        assert again.checkpoint_path == killed.checkpoint_path
        with pytest.raises(xorl.BadRequestError, match="closed"):
            result(training.optim_step(xorl.AdamParams()))
