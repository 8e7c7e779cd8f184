"""isograd.linear_cross_entropy of the installed wheel, beside the formula in fp64, token after token."""
import json
import re

import pytest
from test_python_prove import run

# Of the largest element. 37 tokens and 29 logits are added up; bf16 rounds each gradient and product of a tile once, 2^-8.
ALLOWED = {"float64": 1e-13, "float32": 3e-6, "bfloat16": 3e-2}


@pytest.fixture(scope="module")
def found(warm):
    return json.loads(run(warm, "cross_entropy.py"))


@pytest.mark.parametrize("dtype", ALLOWED)
def test_value_and_gradients_are_those_of_the_plain_pair(found, dtype):
    assert len(found[dtype]) == 9
    for name, apart in found[dtype].items():
        assert apart.pop("shapes")
        assert max(apart.values()) <= ALLOWED[dtype], (name, apart)


def test_leading_dimensions_are_tokens_too(found):
    assert found["leading"].pop("shapes") and max(found["leading"].values()) <= ALLOWED["float64"]


def test_a_smoothing_that_is_off_by_a_thousandth_shows(found):
    assert min(found["fault"][name] for name in ("sum", "gradient_0", "gradient_1")) > 1e-5


def test_a_tied_weight_gets_both_parts(found):
    assert found["tied"] <= ALLOWED["float64"] and found["no_gradient"] is False


@pytest.mark.parametrize("name, parts", {
    "target": ["targets[0] = 1028", "vocabulary"], "shape": ["hidden [T, H] and weight [V, H]"], "type": ["of one type"],
    "negative": ["weights"], "smoothing": ["label_smoothing"], "bias": ["bias [V]"], "length": ["targets"],
    "hidden_index": ["-100", "ignore_index"]}.items())
def test_bad_input_is_refused(found, name, parts):
    said = found["refused"][name]
    assert said and re.match("ConfigError (?!ConfigError)", said) and all(part in said for part in parts), said


def test_a_second_derivative_is_refused(found):
    assert "create_graph" in found["refused"]["twice"]
