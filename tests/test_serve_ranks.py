"""`isograd serve --ranks N`: the unmodified client trains on several ranks what it trains on one, also after a kill; adapters of
experts are those of plain torch.
"""
import collections
import time

import numpy as np
import pytest
import torch
import transformers
from conftest import full, refused
from fp64_transformers import in_fp64
from safetensors.torch import load
from serve_client import LIMIT, adapter, datum, exported, furthest, limited_to, model, prompt, session, text, uneven
from serve_files import NAME, server, write_model
from test_serve_parity import STEPS, call, calls_of, export_to, losses_of_call, options_of
from tinker import types

BOUND = 1e-10
SPREADS = {"one": (), "zero3": ("--ranks", 2, "--set", "parallel.strategy=zero3"),
           "four": ("--ranks", 4, "--set", "parallel.tp=2", "--set", "parallel.cp_ring=2")}
limited = limited_to(6 * LIMIT)


def odd(rng):
    """One token with several targets, one of them twice; weights that sum to zero; weights of zero."""
    tokens, targets = text(rng, 4)
    return [datum(tokens[:1], target_tokens=torch.tensor([[7, 9, 7]]), weights=torch.tensor([[0.5, -1.0, 0.25]])),
            *(datum(tokens, target_tokens=targets, weights=np.array(weights, np.float32)) for weights in ([1, -1, 1, -1], [0] * 4))]


def train(url, training, steps, seed):
    """Steps of three uneven calls, of cross entropy and of ppo, then the clip."""
    rng = np.random.default_rng(seed)
    said = []
    for _ in range(steps):
        calls = [(uneven(rng), "cross_entropy"), (uneven(rng, (11, 2)) + odd(rng), "cross_entropy")]
        data = []
        for length in (4, 25, 7):
            tokens, targets = text(rng, length)
            data.append(datum(tokens, target_tokens=targets, logprobs=(-5.9 + 0.2 * rng.normal(size=length)).astype(np.float32),
                              advantages=rng.normal(size=length).astype(np.float32)))
        calls.append((data, "ppo"))
        waiting = [training.forward_backward(data, loss) for data, loss in calls]
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5))
        said += [result.result(LIMIT).metrics["loss:sum"] for result in waiting]
        said.append(stepped.result(LIMIT).metrics["grad_norm"])
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("ranks")
    write_model(made / NAME)
    return made


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """By kind of server: what was said, the adapter, the whole weights, a greedy sample."""
    found = {}
    for name, flags in SPREADS.items():
        with server(folder, tmp_path_factory.mktemp(name) / "state", "--dtype", "float64", *flags) as one, session(one.url) as service:
            low, whole = (model(service, rank=rank, user_metadata={"isograd.normalise": "tokens"}) for rank in (4, 0))
            said = train(one.url, low, 2, 5) + train(one.url, whole, 1, 6)
            sampler = low.save_weights_and_get_sampling_client().result(LIMIT)
            drawn = sampler.sample(prompt([5, 9, 17]), 1, types.SamplingParams(max_tokens=8, temperature=0)).result(LIMIT)
            found[name] = said, adapter(one.url, low), load(exported(one.url, whole)["model.safetensors"]), drawn.sequences[0].tokens
    return found


@pytest.mark.parametrize("name", [name for name in SPREADS if name != "one"])
def test_ranks_train_what_one_trains(trained, name):
    said, low, whole, drawn = trained[name]
    expected = trained["one"]
    assert np.allclose(said, expected[0], rtol=BOUND, atol=BOUND)
    assert furthest(low, expected[1]) < BOUND and furthest(whole, expected[2]) < BOUND
    assert drawn == expected[3]


def test_a_kill_changes_no_bit(folder, tmp_path):
    found = []
    for kills in (False, True):
        with server(folder, tmp_path / f"{kills}", *SPREADS["zero3"]) as one, session(one.url) as service:
            training = model(service)
            train(one.url, training, 2, 7)
            waiting = [training.forward_backward(uneven(np.random.default_rng(8)), "cross_entropy") for _ in range(2)]
            if kills:
                waiting[0].result(LIMIT)
                one.kill()
                time.sleep(1)  # the ranks end when their launcher has
                one.start()
            for result in waiting:
                result.result(2 * LIMIT)
            train(one.url, training, 1, 9)
            found.append(adapter(one.url, training))
    assert found[0].keys() == found[1].keys() and all(found[0][name].equal(found[1][name]) for name in found[0])


# ---- experts ----

class Plain:
    """A model with experts in torch, in fp64: each adapted matrix is the base's and its update, so that autograd does the rest."""

    def __init__(self, base, weights, scale, fault=None):
        self.model = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager",
                                                                       experts_implementation="eager")
        self.frozen = {name: value.detach() for name, value in self.model.named_parameters()}
        self.parameters = {name: value.clone().requires_grad_() for name, value in weights.items()}
        self.scale, self.fault, self.seen = scale, fault, collections.Counter()

    def merged(self):
        updates = {name.removeprefix("base_model.model.").removesuffix(".lora_A.weight"):
                   self.scale * self.parameters[name.replace("lora_A", "lora_B")] @ value
                   for name, value in self.parameters.items() if "lora_A" in name}
        changed = {}
        for name, value in self.frozen.items():
            if name.endswith("mlp.experts.gate_up_proj"):
                gates, ups = (torch.stack([updates.pop(name.replace("gate_up_proj", f"{expert}.{part}_proj"))
                                           for expert in range(len(value))]) for part in ("gate", "up"))
                changed[name] = value + torch.cat([ups, gates] if self.fault == "swapped" else [gates, ups], 1)
            elif name.endswith("mlp.experts.down_proj"):
                changed[name] = value + torch.stack([updates.pop(name.replace("down_proj", f"{expert}.down_proj"))
                                                     for expert in range(len(value))])
            elif name.removesuffix(".weight") in updates:
                changed[name] = value + updates.pop(name.removesuffix(".weight"))
        assert not updates
        return changed

    def logits(self, tokens):
        return torch.func.functional_call(self.model, self.merged(), (torch.as_tensor(tokens)[None],)).logits[0]

    def log_probabilities(self, tokens, targets):
        targets = torch.as_tensor(targets)
        return self.logits(tokens).log_softmax(-1).gather(1, targets.reshape(len(tokens), -1)).reshape(targets.shape)


class Whole(Plain):
    """All of its weights are trained."""

    def __init__(self, base):
        super().__init__(base, {}, 0)
        self.parameters = dict(self.model.named_parameters())

    def merged(self):
        return {}


def counted(loss, data, mode):
    """What divides the sum, of one call."""
    if mode == "sequences":
        return len(data)
    rows = [torch.as_tensor(inputs["weights"]).reshape(len(tokens), -1).ne(0).any(1).sum().item() if loss == "cross_entropy" else len(tokens)
            for tokens, inputs in data]
    return sum(rows) if mode == "tokens" else 0


def train_plainly(plain, mode, rank, steps, divides_calls=False):
    parameters = list(plain.parameters.values())
    optimizer = torch.optim.AdamW(parameters)
    for step in range(steps):
        for each in calls_of(step):
            of_call = counted(each[0], each[2], mode) if divides_calls else 1
            (sum(losses_of_call(plain.log_probabilities, *each, plain.seen)) / of_call).backward()
        for value in parameters:
            value.grad /= 1 if divides_calls else sum(counted(loss, data, mode) for loss, _, data in calls_of(step)) or 1
        options = options_of(step, rank)
        if limit := options["grad_clip_norm"]:
            torch.nn.utils.clip_grad_norm_(parameters, limit)
        optimizer.param_groups[0].update(lr=options["learning_rate"], betas=(options["beta1"], options["beta2"]), eps=options["eps"],
                                         weight_decay=options["weight_decay"])
        optimizer.step()
        optimizer.zero_grad()
    return {name: value.detach() for name, value in plain.parameters.items()}


@pytest.fixture(scope="module")
def with_experts(tmp_path_factory):
    """The second of two layers has four experts and one that all tokens go through."""
    made = tmp_path_factory.mktemp("experts")
    torch.manual_seed(21)
    config = transformers.Qwen2MoeConfig(
        vocab_size=320, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
        moe_intermediate_size=24, shared_expert_intermediate_size=40, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[0],
        max_position_embeddings=256, initializer_range=0.1, tie_word_embeddings=False)
    transformers.Qwen2MoeForCausalLM(config).save_pretrained(made / NAME)
    return made


@pytest.mark.parametrize("mode, flags", [
    ("tokens", ("--ranks", 2, "--set", "parallel.ep=2")), full("sequences", ()),
    full("none", ("--ranks", 4, "--set", "parallel.ep=2", "--set", "parallel.strategy=zero3"))], ids=["ep", "one", "zero3-ep"])
def test_adapters_of_experts_are_those_of_plain_torch(with_experts, tmp_path, mode, flags):
    rank, words = 8, [5, 9, 17, 4, 30]

    def step(training, i):
        for each in calls_of(i):
            call(training, *each)
        return training.optim_step(types.AdamParams(**options_of(i, rank)))
    with server(with_experts, tmp_path / "state", "--dtype", "float64", *flags) as one, session(one.url) as service:
        training = model(service, rank=rank, user_metadata={"isograd.normalise": mode})
        initial = adapter(one.url, training)
        step(training, 0)
        first = adapter(one.url, training)
        for i in range(1, STEPS):
            step(training, i)
        found = adapter(one.url, training)
        sampler = training.save_weights_and_get_sampling_client().result(LIMIT)
        said = sampler.compute_logprobs(prompt(words)).result(LIMIT)
        greedy = sampler.sample(prompt(words), 1, types.SamplingParams(max_tokens=6, temperature=0, stop=[])).result(LIMIT)
        other = service.create_training_client_from_state_with_optimizer(training.save_state("end").result(LIMIT).path).result()
        for each in (training, other):
            step(each, 1).result(LIMIT)
        went_on, resumed = (adapter(one.url, each) for each in (training, other))
    assert {"experts.3.down_proj", "shared_expert.up_proj"} <= {".".join(name.split(".")[-5 if "experts" in name else -4:-2]) for name in found}
    assert all(value.equal(resumed[name]) for name, value in went_on.items())

    with in_fp64(["qwen2_moe"]):
        plain = Plain(with_experts / NAME, initial, 32 / rank)
        distance = furthest(found, train_plainly(plain, mode, rank, STEPS))
        print(f"{mode} {flags}: {distance:.1e} after {STEPS} steps")
        assert distance <= BOUND
        with torch.no_grad():
            expected = plain.log_probabilities(words[:-1], words[1:])
            text_so_far = list(words)
            for _ in range(6):
                text_so_far.append(plain.logits(text_so_far)[-1].argmax().item())
        assert torch.tensor(said[1:]).sub(expected).abs().max() <= 2 ** -23 * expected.abs().max()  # they are sent in fp32
        assert greedy.sequences[0].tokens == text_so_far[len(words):]
        swapped = train_plainly(Plain(with_experts / NAME, initial, 32 / rank, "swapped"), mode, rank, 1)
        assert furthest(first, swapped) > 1e4 * BOUND


@pytest.mark.parametrize("strategy", ["bucketed", full("zero3")])
def test_whole_weights_with_experts_are_those_of_plain_torch(with_experts, tmp_path, strategy):
    rank = 1  # of whose rates there are options
    flags = ("--ranks", 2, "--set", "parallel.ep=2", "--set", f"parallel.strategy={strategy}")
    with server(with_experts, tmp_path / "state", "--dtype", "float64", *flags) as one, session(one.url) as service:
        training = model(service, rank=0, user_metadata={"isograd.normalise": "tokens"})
        for i in range(STEPS):
            for each in calls_of(i):
                call(training, *each)
            training.optim_step(types.AdamParams(**options_of(i, rank)))
        export_to(tmp_path / "trained", one.url, training)
    with in_fp64(["qwen2_moe"]):
        found = {name: value.detach() for name, value in Whole(tmp_path / "trained").parameters.items()}
        before = Whole(with_experts / NAME).parameters
        expected, wrong = (train_plainly(Whole(with_experts / NAME), "tokens", rank, STEPS, divides_calls) for divides_calls in (False, True))

    def apart(one):  # of their change
        return max(((found[name] - value).norm() / (value - before[name]).norm()).item() for name, value in one.items())
    print(f"{strategy}: {apart(expected):.1e} after {STEPS} steps")
    assert apart(expected) <= BOUND and apart(wrong) > 1e4 * BOUND


@pytest.mark.parametrize("flags, said", [
    (("--set", "parallel.tp=2"), "--ranks"),
    (("--ranks", "2", "--set", "model.hidden=8"), "parallel.KEY=VALUE"),
    (("--ranks", "3", "--set", "parallel.tp=2"), "parallel"),
    (("--ranks", "2", "--set", "parallel.pp=2", "--set", "parallel.stages_per_rank=2", "--set", "parallel.schedule=interleaved"),
     "parallel.stages_per_rank"),
])
def test_flags_that_do_not_fit_are_refused(folder, tmp_path, flags, said):
    assert said in refused("serve", "--model", f"{NAME}={folder / NAME}", "--state", tmp_path / "state", *flags)
