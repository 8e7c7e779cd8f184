"""Samples of `isograd serve`: greedy ones are those of transformers.generate in fp64 with the same adapter in PEFT, log-probabilities those
of transformers and of the trainer, and a seed has its tokens alone, in company and after a kill.

Log-probabilities come as fp32: one that is right to 1e-12 is at most that and half a unit of its last place from the reference. Of many
values some lie next to a tie of this rounding, and these see a difference far below one unit.
"""
import collections

import numpy as np
import pytest
import torch
from conftest import FULL, full
from fp64_transformers import in_fp64
from serve_client import LIMIT, datum, exported, limited_to, model, prompt, session, text, uneven
from serve_files import FAMILIES, NAME, Server, write_families
from tinker import types

PROMPTS, LENGTH = (200, 64) if FULL else (8, 12)
DTYPES = ("float64", "float32")
EXACT, APART = 5e-13, 1e-5  # in fp64 sampler and trainer are each EXACT from the reference; in fp32 APART from each other
families = pytest.mark.parametrize("base", [NAME, *(full(base) for base in FAMILIES if base != NAME)])
limited = limited_to(6 * LIMIT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("sampling")


@pytest.fixture(scope="module")
def servers(folder):
    more = write_families(folder)
    running = {dtype: Server(folder, folder / dtype, "--dtype", dtype, *more) for dtype in DTYPES}
    try:
        yield {dtype: one.start() for dtype, one in running.items()}
    finally:
        for one in running.values():
            one.kill()


def prompts():
    """Of few lengths, so that the reference takes many at once."""
    rng = np.random.default_rng(8)
    return [text(rng, 3 + 5 * (i % 8))[0].tolist() for i in range(PROMPTS)]


def greedy(sampler):
    params = types.SamplingParams(max_tokens=LENGTH, temperature=0, stop=[])
    waiting = [sampler.sample(prompt(each), 1, params) for each in prompts()]
    return [each.result().sequences[0] for each in waiting]


def adapted(service, base):
    """A training client of which every matrix is trained a little, and a sampler of it and of before the last step."""
    training, samplers = model(service, 8, base=base), []
    for _ in range(2):
        training.forward_backward(uneven(np.random.default_rng(3)), "cross_entropy")
        training.optim_step(types.AdamParams(learning_rate=1e-2))
        samplers.append(training.save_weights_and_get_sampling_client().result())
    return training, *samplers


def of_training(training, sequences):
    """The log-probabilities of samples by a forward pass of the trainer."""
    data = []
    for asked, sequence in zip(prompts(), sequences):
        whole = np.array(asked + list(sequence.tokens))
        data.append(datum(whole[:-1], target_tokens=whole[1:], weights=np.ones(len(whole) - 1, np.float32)))
    return [np.array(one["logprobs"].data[-LENGTH:]) for one in training.forward(data, "cross_entropy").result().loss_fn_outputs]


def generated(folder, base, directory):
    """By transformers: the tokens for each prompt and their log-probabilities."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM
    tokens, values = {}, {}
    with in_fp64([FAMILIES[base][0].lower()]), torch.no_grad():
        whole = AutoModelForCausalLM.from_pretrained(folder / base, dtype=torch.float64, attn_implementation="eager")
        peft = PeftModel.from_pretrained(whole, directory, autocast_adapter_dtype=False).double().eval()
        whole.generation_config.eos_token_id = None
        of_length = collections.defaultdict(list)
        for i, each in enumerate(prompts()):
            of_length[len(each)].append((i, each))
        for length, group in of_length.items():
            asked = torch.tensor([each for _, each in group])
            said = peft.generate(input_ids=asked, attention_mask=torch.ones_like(asked), do_sample=False, max_new_tokens=LENGTH,
                                 pad_token_id=0)
            rows = peft(said).logits.log_softmax(-1)[:, length - 1:-1].gather(2, said[:, length:, None])[:, :, 0]
            for (i, _), one, its in zip(group, said, rows):
                tokens[i], values[i] = one[length:].tolist(), its.numpy()
    return [tokens[i] for i in range(PROMPTS)], [values[i] for i in range(PROMPTS)]


def beyond_rounding(found, expected):
    """How far values that were rounded to fp32 are from the expected ones, less what rounding explains."""
    found, expected = np.concatenate(found).astype(np.float64), np.concatenate(expected)
    assert found.shape == expected.shape and (found == found.astype(np.float32)).all()
    return (abs(found - expected) - np.spacing(abs(expected).astype(np.float32)) / 2).max()


@families
def test_greedy_samples_are_those_of_transformers(folder, servers, tmp_path, base):
    running = servers["float64"]
    with session(running.url) as service:
        training, before, sampler = adapted(service, base)
        sequences, stale = greedy(sampler), greedy(before)
        trained = of_training(training, sequences)
        for name, content in exported(running.url, training).items():
            (tmp_path / name).write_bytes(content)
    tokens, expected = generated(folder, base, tmp_path)
    assert [list(each.tokens) for each in sequences] == tokens
    found = [np.array(each.logprobs) for each in sequences]
    differ = sum((one != other).sum() for one, other in zip(found, trained))
    print(f"{base}: {PROMPTS} x {LENGTH} tokens, beyond rounding {beyond_rounding(found, expected):.1e}; {differ} are others in the trainer")
    assert max(beyond_rounding(found, expected), beyond_rounding(trained, expected)) <= EXACT
    # A difference of ten units of the last place, divided by the number of values, is seen by the luckiest of them.
    seen = 10 * np.spacing(np.float32(4)) / (PROMPTS * LENGTH)
    assert beyond_rounding(found, [each + seen for each in expected]) > EXACT
    assert [list(each.tokens) for each in stale] != tokens  # a sampler of older weights would be found


@families
def test_a_sampler_in_fp32_agrees_with_its_trainer(servers, base):
    with session(servers["float32"].url) as service:
        training, _, sampler = adapted(service, base)
        sequences = greedy(sampler)
        apart = max(abs(np.array(each.logprobs) - other).max() for each, other in zip(sequences, of_training(training, sequences)))
        print(f"{base}: {apart:.1e} apart in fp32")
        assert apart <= APART


DRAWS = 100_000
# How tokens are drawn, and from which of them: of a distribution, the chance of each as the likeliest come first.
WAYS = {"cold": {"temperature": 0.3}, "warm": {"temperature": 1.0}, "hot": {"temperature": 1.7}, "top-k": {"temperature": 1.0, "top_k": 7},
        "top-p": {"temperature": 1.3, "top_p": 0.6}}


def chances(logits, temperature=1.0, top_k=None, top_p=1.0):
    """Of each token, by the definition."""
    ordered, tokens = (logits / temperature).softmax(-1).sort(descending=True, stable=True)
    before = ordered.cumsum(0) - ordered
    ordered = ordered * (before < top_p) * (torch.arange(len(tokens)) < (top_k or len(tokens)))
    return torch.zeros_like(logits).scatter(0, tokens, ordered / ordered.sum())


def likelihood(counts, expected):
    """The chance of counts that are as far from the expected ones, by Pearson's chi-squared; tokens that are expected less than five times
    are one cell."""
    if counts[expected == 0].any():
        return 0.0
    often = expected >= 5
    found, means = (torch.cat([each[often], each[~often].sum()[None]]) for each in (counts, expected))
    if means[-1] < 5:
        found, means = found[:-1], means[:-1]
    statistic = ((found - means) ** 2 / means).sum()
    return torch.special.gammaincc(torch.tensor((len(means) - 1) / 2, dtype=statistic.dtype), statistic / 2).item()


@pytest.mark.parametrize("way", ["warm", *(full(way) for way in WAYS if way != "warm")])
def test_draws_follow_the_distribution(folder, servers, tmp_path, way):
    from transformers import AutoModelForCausalLM
    asked, of_request = [5, 6, 7], 2000
    with session(servers["float64"].url) as service:
        sampler = service.create_sampling_client(base_model=NAME).result()

        def drawn(seed):
            params = types.SamplingParams(max_tokens=1, seed=seed, stop=[], **WAYS[way])
            return [each.tokens[0] for each in sampler.sample(prompt(asked), of_request, params).result().sequences]
        tokens = torch.tensor([token for seed in range(DRAWS // of_request) for token in drawn(seed)])
    with in_fp64(["qwen3"]), torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(folder / NAME, dtype=torch.float64, attn_implementation="eager")
        logits = base(torch.tensor([asked])).logits[0, -1]
    counts, right = tokens.bincount(minlength=len(logits)).double(), chances(logits, **WAYS[way])
    found = likelihood(counts, DRAWS * right)
    print(f"{way}: {len(tokens)} draws of {(right > 0).sum()} tokens, p = {found:.3f}")
    assert found > 1e-3
    other = {**WAYS[way], "temperature": 1.1 * WAYS[way]["temperature"]}
    assert likelihood(counts, DRAWS * chances(logits, **other)) < 1e-3
    half = tokens[:DRAWS // 2].bincount(minlength=len(logits)).double()  # as if each draw were made twice
    assert way == "top-k" or likelihood(2 * half, DRAWS * right) < 1e-3


@pytest.mark.parametrize("dtype", ["float32", full("float64")])
def test_a_seed_has_its_tokens_alone_in_company_and_after_a_kill(servers, dtype):
    running = servers[dtype]
    with session(running.url) as service:
        _, _, sampler = adapted(service, NAME)

        def drawn(seed, **more):
            params = types.SamplingParams(**{"max_tokens": LENGTH, "seed": seed, "temperature": 1, "stop": [], **more})
            return sampler.sample(prompt([5, 6, 7]), 4, params)

        def tokens(waiting):
            return [list(each.tokens) for each in waiting.result().sequences]
        ways = [{"temperature": 0.3}, {}, {"temperature": 1.7}, {"top_k": 5}, {"top_p": 0.7}]
        alone = [tokens(drawn(11, **way)) for way in ways]
        assert all(len({tuple(each) for each in four}) == 4 for four in alone[1:])  # samples of a request differ

        def in_company():
            company = [sampler.sample(prompt(each), 2, types.SamplingParams(max_tokens=LENGTH, seed=1)) for each in prompts()[:8]]
            found = [tokens(each) for each in [drawn(11, **way) for way in ways]]
            for each in company:
                each.result()
            return found
        assert in_company() == alone
        running.restart()
        assert in_company() == alone
        assert [tokens(drawn(11, **way)) for way in ways] == alone
        assert tokens(drawn(12)) != alone[1]
