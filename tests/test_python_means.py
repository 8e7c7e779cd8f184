"""Means, norm and linear_cross_entropy of the package, compared with one process in fp64: tests/python_package has the programs."""
import json
import re

import pytest
from conftest import full, run_python

U32 = 2.0**-24


def run(python, *arguments):
    return json.loads(run_python(python, *arguments))


def worst(ranks):
    return {name: max(rank[name] for rank in ranks) for name in ranks[0]}


@pytest.fixture(scope="module")
def means(warm):
    return {name: worst(ranks) for name, ranks in run(warm, "means.py").items()}


@pytest.mark.parametrize("size", ["2", "3", full("4")])
def test_every_mean_is_that_of_one_process(means, size):
    """DDP, FSDP2, a plain loop; uneven, an empty rank, accumulation. Sums of some hundred terms in fp64: 1e-12 is a
    hundred times what they round."""
    assert len(means[size]) in (3 * 7 + 3 * 5, 3 * 2 + 3 * 2)
    assert all(error <= 1e-12 for error in means[size].values()), means[size]


@pytest.mark.parametrize("fault", ["averaged", "own_count"])
def test_a_planted_mistake_is_no_mean(means, fault):
    errors = means[fault]
    for name, error in errors.items():
        right = fault == "averaged" and ("plain" in name or "loss" in name)
        assert (error <= 1e-12) if right else (error > 1e-2), (name, error)


def test_rows_that_are_gathered_pass_their_gradient_on(warm):
    found = run(warm, "gathered.py", 2, 3, 4)
    for size in ("2", "3", "4"):
        for rank in found[size]:
            print(size, rank)
            assert rank["rows"] and rank["error"] <= 1e-14 and rank["without_gradient"] > 1e-2
    for rank in found["bad"]:
        assert "found a list; expected a tensor of rows" in rank["list"] and "torch.stack(features)" in rank["list"]
        assert "once_differentiable" in rank["twice"], rank["twice"]
        assert rank["no_rows"].startswith("ConfigError isograd.all_gather_rows: found a tensor [] of torch.float32; expected rows [n, ...]")
        for name in ("other_width", "other_type"):
            assert "where rank 1 has rows of another kind than rank 0" in rank[name] and "reshape(n, -1)" in rank[name], rank


@pytest.fixture(scope="module")
def norms(warm):
    return run(warm, "clip.py")


@pytest.mark.parametrize("name", ["fsdp_and_tp", "fsdp_and_tp_on_one_mesh", "fsdp", "hybrid", "tensor_parallel", "ddp",
                                  "stages_and_experts"])
def test_the_norm_counts_each_element_once(norms, name):
    """Gradients in fp32, squares in fp64: the norm is exact but for fp64's rounding, a clipped element rounds once."""
    for rank in norms:
        print(name, rank[name])  # with PyTorch's own norm of the same gradient
        assert abs(rank[name]["norm"]) <= 1e-12 and rank[name]["clipped"] <= 2 * U32, rank[name]
        if "summed" in rank[name]:  # over both axes of a mesh, at most four gradients in fp32
            assert rank[name]["summed"] <= 64 * U32


def test_pytorchs_own_norm_is_beside_it(norms):
    """It has none where gradients lie on several meshes; else one of the same gradient, in fp32: some ten sums of up to
    1440 squares and one of these."""
    for rank in norms:
        for name in ("fsdp_and_tp_on_one_mesh", "fsdp", "hybrid", "ddp"):
            assert abs(rank[name]["pytorch"]) <= 32 * U32, rank[name]
        assert rank["fsdp_and_tp"]["pytorch"] == rank["tensor_parallel"]["pytorch"] == "RuntimeError"


def test_a_norm_with_the_wrong_owners_is_another_one(norms):
    assert all(abs(rank["stages_and_experts"]["planted"]) > 1e-2 for rank in norms)


def test_a_norm_says_what_it_cannot_take(norms):
    for rank in norms:
        partial, plain, infinite = rank["bad_input"]["said"]
        assert "found a gradient that is P(sum) along axis 0" in partial
        assert "found a Sequential without DDP or FSDP2" in plain and "all_reduce_gradients" in plain
        assert "the norm of the gradient is inf" in infinite and rank["bad_input"]["norm"] == "inf"


REFUSED = """
import json, torch, isograd
from isograd import *
def said(call):
    try:
        call()
    except isograd.ConfigError as error:
        return str(error)
step = TokenMean().count([torch.tensor([1, -100, 3]), 4])
assert (step.denominator, step.targets, step.global_micro_batches) == (6, 6, 2)
nothing = TokenMean().count([])
one = SampleMean().count([torch.zeros(2, dtype=torch.int64)], [torch.ones(2, dtype=torch.int64)])
one.global_micro_batches = 2  # as if another rank had two
assert one.weights(0).tolist() == [0.5, 0.5] and one.weights(1).shape == (0,)
loss = nothing.scale(torch.zeros((), requires_grad=True))
loss.backward()
assert nothing.gradient_scale == 0 and loss.item() == 0 and nothing.loss() == 0
print(json.dumps([said(call) for call in [
    lambda: step.scale(torch.ones(3)),
    lambda: step.scale(torch.ones((), dtype=torch.bfloat16)),
    lambda: step.weights(0),
    lambda: TokenMean().count([torch.ones(3)]),
    lambda: TokenMean().count([-1]),
    lambda: WeightedMean().count([torch.tensor([1.0, -1.0])]),
    lambda: WeightedMean().count([float("nan")]),
    lambda: FixedDenominator(0.0),
    lambda: SampleMean().count([torch.zeros(3, dtype=torch.int64)], [torch.zeros(4, dtype=torch.int64)]),
    lambda: Deferred(SampleMean()),
    lambda: one.weights(2),
    lambda: TokenMean().count([torch.tensor(17)]),
    lambda: Deferred(TokenMean()).add(),
    lambda: clip_grad_norm_(torch.nn.Linear(2, 2), -1.0),
    lambda: clip_grad_norm_(torch.nn.Linear(2, 2), float("nan")),
    lambda: clip_grad_norm_(torch.nn.Linear(2, 2), "1"),
    lambda: clip_grad_norm_(None, 1.0),
    lambda: all_reduce_gradients([3]),
    lambda: all_reduce_gradients(torch.nn.Linear(2, 2), group="dp"),
    lambda: sum_gradients(None),
    lambda: TokenMean().count(3),
]]))
"""


def test_what_cannot_be_counted_is_refused(warm):
    said = run(warm, "-c", REFUSED)
    for text, part in zip(said, ["losses of shape (3,)", "a sum in torch.bfloat16", "weights of its own",
                                 "targets in torch.float32", "found -1", "negative or not finite", "negative or not finite",
                                 "found 0.0", "samples (3,) and targets (4,)", "found SampleMean", "found micro-batch 2",
                                 "without dimensions", "found nothing", "max_norm=-1.0", "max_norm=nan",
                                 "max_norm='1'", "a NoneType among the parameters", "a int among the parameters", "group='dp'",
                                 "a NoneType without DDP", "found 3; expected a list"], strict=True):
        assert text is not None and part in text and "; expected " in text, (text, part)


ELSEWHERE = """
import json, sys, torch
sys.path.insert(0, ".")
from ranks import on_ranks
import isograd
def run(rank):
    said = []
    for call in (lambda: isograd.TokenMean().count([torch.ones(2)] if rank == 1 else [torch.ones(2, dtype=torch.int64)]),
                 lambda: isograd.FixedDenominator(1.0 + rank).count()):
        try:
            call()
        except isograd.ConfigError as error:
            said.append(str(error))
    return said
json.dump(on_ranks(3, run), sys.stdout)
"""


def test_input_that_one_rank_refuses_is_refused_on_all(warm):
    first, second, third = run(warm, "-c", ELSEWHERE)
    assert "targets in torch.float32" in second[0]
    assert "rank 1 refuses" in first[0] and "rank 1 refuses" in third[0]
    assert all("found the denominators [1.0, 2.0, 3.0] by rank" in said[1] for said in (first, second, third))


# ---- isograd.linear_cross_entropy: the formula in fp64, token after token ----

# Relative to the largest element. 37 tokens and 29 logits are added up; bf16 rounds each gradient and product of a tile once, 2^-8.
ALLOWED = {"float64": 1e-13, "float32": 3e-6, "bfloat16": 3e-2}


@pytest.fixture(scope="module")
def cross_entropy(warm):
    return run(warm, "cross_entropy.py")


@pytest.mark.parametrize("dtype", ALLOWED)
def test_value_and_gradients_are_those_of_the_plain_pair(cross_entropy, dtype):
    assert len(cross_entropy[dtype]) == 9
    for name, apart in cross_entropy[dtype].items():
        assert apart.pop("shapes")
        assert max(apart.values()) <= ALLOWED[dtype], (name, apart)


def test_leading_dimensions_are_tokens_too(cross_entropy):
    assert cross_entropy["leading"].pop("shapes") and max(cross_entropy["leading"].values()) <= ALLOWED["float64"]


def test_a_smoothing_that_is_off_by_a_thousandth_shows(cross_entropy):
    assert min(cross_entropy["fault"][name] for name in ("sum", "gradient_0", "gradient_1")) > 1e-5


def test_a_tied_weight_gets_both_parts(cross_entropy):
    assert cross_entropy["tied"] <= ALLOWED["float64"] and cross_entropy["no_gradient"] is False


@pytest.mark.parametrize("name, parts", {
    "target": ["targets[0] = 1028", "vocabulary"], "shape": ["hidden [T, H] and weight [V, H]"], "type": ["of one type"],
    "negative": ["weights"], "smoothing": ["label_smoothing"], "bias": ["bias [V]"], "length": ["targets"],
    "hidden_index": ["-100", "ignore_index"]}.items())
def test_bad_input_is_refused(cross_entropy, name, parts):
    said = cross_entropy["refused"][name]
    assert said and re.match("ConfigError (?!ConfigError)", said) and all(part in said for part in parts), said


def test_a_second_derivative_is_refused(cross_entropy):
    assert "create_graph" in cross_entropy["refused"]["twice"]
