"""A loss whose derivative jumps, some of whose units lie at zero: right steps pass, mistakes are named all the same."""
import json

import pytest
from test_python_prove import run


@pytest.fixture(scope="module")
def found(warm):
    return json.loads(run(warm, "jumps.py"))


def test_a_right_step_raises_no_alarm_where_units_turn_on_and_off(found):
    """The planted fault of this test: without what is measured the same step fails, and the verdict says why it may."""
    assert found["right"]["passed"] and found["right"]["moves"] and found["right"]["rounding"], found["right"]["text"]
    assert "the right gradient itself moves, by up to" in found["right"]["text"]
    without = found["not_measured"]
    assert not without["passed"] and without["said"] == ["unknown"] and not without["moves"], without["text"]
    assert "compare a run in fp64" in without["text"]


def test_jumps_that_hide_a_tenth_of_a_gradient_are_no_pass(found):
    """Twelve of 64 units at zero."""
    many = found["many_at_zero"]
    assert not many["passed"] and many["said"] == ["unresolved"] and many["moves"], many["text"]
    assert "0.weight, 0.bias. Compare a run in fp64" in many["text"].splitlines()[0], many["text"]


def test_no_note_names_what_the_model_may_not_have(found):
    assert [name for name, one in found.items() if "ReLU" in one["text"]] == []


def test_in_fp64_nothing_is_measured_and_all_is_proved(found):
    assert found["in_fp64"]["passed"] and not found["in_fp64"]["moves"], found["in_fp64"]["text"]


@pytest.mark.parametrize("name, said", [("rank_means", "mean_of_rank_means"), ("scaled", None), ("lost", None)])
def test_mistakes_are_found_beside_jumps(found, name, said):
    assert not found[name]["passed"], found[name]["text"]
    assert said is None or found[name]["said"] == [said], found[name]["text"]


def test_a_smooth_loss_keeps_its_bounds(found):
    assert found["smooth"]["passed"] and not found["smooth"]["moves"], found["smooth"]["text"]
    noisy = found["smooth_and_noisy"]
    assert not noisy["passed"] and not noisy["moves"] and noisy["said"] == ["unknown"], noisy["text"]
