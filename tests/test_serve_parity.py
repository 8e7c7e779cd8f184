"""`isograd serve --dtype float64` against PEFT and transformers in fp64, from the same initial adapter: all losses, several
calls a step, options of the optimizer that change at every step. The reference shares nothing with the server but the
numbers that the client sends, which are rounded to fp32.
"""
import numpy as np
import pytest
import torch
from fp64_transformers import in_fp64
from safetensors.torch import load_file
from serve_client import LIMIT, adapter, datum, exported, furthest, model, session, text, within
from serve_files import NAME, server, write_model
from tinker import types

BOUND = 1e-10
CLIP = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.6}


@pytest.fixture(autouse=True)
def limited():
    with within(3 * LIMIT):
        yield


def weighted(rng, length, least, most):
    tokens, targets = text(rng, length)
    return tokens, {"target_tokens": targets, "weights": rng.uniform(least, most, length).astype(np.float32)}


def sampled(rng, length, spread):
    tokens, targets = text(rng, length)
    return tokens, {"target_tokens": targets, "logprobs": (-5.9 + spread * rng.normal(size=length)).astype(np.float32),
                    "advantages": rng.normal(size=length).astype(np.float32)}


def of_sequence(rng, length):
    tokens, inputs = sampled(rng, length, 0.2)
    return tokens, {**inputs, "sequence_ratio_mask": (np.arange(length) >= 3).astype(np.float32)}


def distribution(rng, length, count):
    tokens, _ = text(rng, length)
    weights = (rng.uniform(size=(length, count)) * (rng.uniform(size=(length, count)) < 0.3)).astype(np.float32)
    return tokens, {"target_tokens": torch.from_numpy(rng.integers(3, 300, (length, count))), "weights": torch.from_numpy(weights)}


def preference(data, log_probabilities):
    """DPO of the first text over the second, against a uniform reference; its slopes are weights of both signs."""
    chosen, rejected = (each.sum() for each in log_probabilities)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)), {}


def steps():
    """[(calls, options)]; a call is a loss, its configuration and its data."""
    rng = np.random.default_rng(9)

    def call(loss, config, *data):
        return loss, config, data
    return [
        ([call("cross_entropy", {}, weighted(rng, 3, 0, 1), weighted(rng, 20, 0, 1)), call("cross_entropy", {}, weighted(rng, 9, 0, 1))],
         dict(learning_rate=2e-2, beta1=0.9, beta2=0.95, eps=1e-8)),
        ([call("importance_sampling", {}, sampled(rng, 12, 0.2)), call("ppo", CLIP, sampled(rng, 7, 1), sampled(rng, 15, 1))],
         dict(learning_rate=1e-2, beta1=0.8, beta2=0.9, eps=1e-8, weight_decay=0.1)),
        ([call("cispo", CLIP, sampled(rng, 11, 1)), call("dro", {"beta": 0.05}, sampled(rng, 6, 0.5))],
         dict(learning_rate=5e-3, beta1=0.9, beta2=0.95, eps=1e-6, grad_clip_norm=0.5)),
        ([call("gspo", CLIP, of_sequence(rng, 10), of_sequence(rng, 8)), call("cross_entropy", {}, distribution(rng, 5, 40))],
         dict(learning_rate=1e-2, beta1=0.9, beta2=0.99, eps=1e-8, grad_clip_norm=1e4)),
        ([call(preference, {}, weighted(rng, 9, 0, 1), weighted(rng, 4, 0, 1)), call("cross_entropy", {}, weighted(rng, 14, -1, 1))],
         dict(learning_rate=1e-2, beta1=0.5, beta2=0.95, eps=1e-8, weight_decay=0.05)),
        ([call("cross_entropy", {}, weighted(rng, 30, 0, 1)), call("cross_entropy", {}, weighted(rng, 2, 0, 1))],
         dict(learning_rate=1e-2, beta1=0.9, beta2=0.95, eps=1e-12, grad_clip_norm=1.0)),
    ]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """The folder of the base, and for each group of modules the initial adapter's folder and the trained matrices."""
    folder = tmp_path_factory.mktemp("parity")
    write_model(folder / NAME)
    trained = {}
    with server(folder, folder / "state", "--dtype", "float64") as running, session(running.url) as service:
        for part in ("all", "attention"):
            others = {} if part == "all" else {"train_mlp": False, "train_unembed": False}
            training = model(service, rank=4, **others)
            (folder / part).mkdir()
            for name, content in exported(running.url, training).items():
                (folder / part / name).write_bytes(content)
            for calls, options in steps():
                for loss, config, data in calls:
                    data = [datum(tokens, **inputs) for tokens, inputs in data]
                    training.forward_backward_custom(data, loss) if callable(loss) else training.forward_backward(data, loss, config)
                training.optim_step(types.AdamParams(**options)).result()
            trained[part] = adapter(running.url, training)
    return folder, trained


# ---- the reference ----

def ratio_clamped(ratio, config):
    return ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])


def loss_of(name, config, p, inputs):
    """The sum over the targets, whose log-probabilities are p."""
    wide = {key: torch.as_tensor(value).double() for key, value in inputs.items()}
    if name == "cross_entropy":
        return -(wide["weights"] * p).sum()
    a, q = wide["advantages"], wide["logprobs"]
    ratio = (p - q).exp()
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "ppo":
        return -torch.minimum(ratio * a, ratio_clamped(ratio, config) * a).sum()
    if name == "cispo":
        return -(ratio_clamped(ratio, config).detach() * p * a).sum()
    if name == "dro":
        return -(p * a - config["beta"] / 2 * (p - q) ** 2).sum()
    assert name == "gspo"
    of_text = (p - q)[wide["sequence_ratio_mask"] != 0].mean().exp().detach()
    ratio = of_text * (p - p.detach()).exp()
    return -torch.minimum(ratio * a, ratio_clamped(ratio, config) * a).sum()


def losses_of_call(log_probabilities, loss, config, data):
    found = [log_probabilities(tokens, inputs["target_tokens"]) for tokens, inputs in data]
    if not callable(loss):
        return [loss_of(loss, config, p, inputs) for p, (_, inputs) in zip(found, data)]
    narrow = [p.detach().to(torch.float32).requires_grad_() for p in found]  # as the client has them
    loss(data, narrow)[0].backward()
    return [(p * of.grad.double()).sum() for p, of in zip(found, narrow)]


def trained_by_peft(folder, part, divide_each_call=False):
    from peft import PeftModel, get_peft_model_state_dict
    from transformers import Qwen3ForCausalLM
    with in_fp64(["qwen3"]):
        base = Qwen3ForCausalLM.from_pretrained(folder / NAME, dtype=torch.float64, attn_implementation="eager")
        peft = PeftModel.from_pretrained(base, folder / part, is_trainable=True)
        initial = load_file(folder / part / "adapter_model.safetensors")
        assert all(value.dtype == torch.float64 for value in initial.values())
        assert furthest(get_peft_model_state_dict(peft, save_embedding_layers=False), initial) == 0
        parameters = [each for each in peft.parameters() if each.requires_grad]
        optimizer = torch.optim.AdamW(parameters)

        def log_probabilities(tokens, targets):
            rows = peft(torch.as_tensor(tokens)[None]).logits[0].log_softmax(-1)
            targets = torch.as_tensor(targets)
            return rows.gather(1, targets.reshape(len(tokens), -1)).reshape(targets.shape)
        for calls, options in steps():
            for loss, config, data in calls:
                total = sum(losses_of_call(log_probabilities, loss, config, data))
                (total / sum(len(tokens) for tokens, _ in data) if divide_each_call else total).backward()
            if limit := options.get("grad_clip_norm"):
                torch.nn.utils.clip_grad_norm_(parameters, limit)
            optimizer.param_groups[0].update(lr=options["learning_rate"], betas=(options["beta1"], options["beta2"]),
                                             eps=options["eps"], weight_decay=options.get("weight_decay", 0))
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.detach() for name, value in get_peft_model_state_dict(peft, save_embedding_layers=False).items()}


@pytest.mark.parametrize("part", ["all", "attention"])
def test_every_matrix_is_that_of_peft(served, part):
    folder, trained = served
    assert all(value.dtype == torch.float64 for value in trained[part].values())
    assert furthest(trained[part], trained_by_peft(folder, part)) <= BOUND


def test_a_division_per_call_would_be_found(served):
    folder, trained = served
    assert furthest(trained["all"], trained_by_peft(folder, "all", divide_each_call=True)) > 1e4 * BOUND
