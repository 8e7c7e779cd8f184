"""Models that draw random numbers, under isograd.watch and isograd.prove on two ranks: refused by name where another process
would draw others, judged rightly where a sample's numbers are its own. The generators of the run go on as if unwatched."""
import json

import pytest
from test_python_prove import run

TORCH, PYTHON, NUMPY, OWN = "of torch,", "of Python's random,", "of numpy.random,", "that is none of torch's"
# Settings of python_package/random_models.py, and what the refusal names.
REFUSED = {
    "functional_dropout": TORCH + " first in body (Body)",
    "alpha_dropout": TORCH,
    "feature_dropout": TORCH,
    "dropout_module": "dropout of 0.2 in body.1",
    "encoder_layer": "dropout of 0.1 in body.dropout",
    "attention": TORCH + " first in body.a (MultiheadAttention)",
    "scaled_dot_product": TORCH,
    "attention_dropout_of_llama": TORCH + " first in model.layers.0.self_attn (LlamaAttention)",
    "neftune": TORCH + " first in e (Embedding)",
    "neftune_while_trained_alone": "forward draws random numbers on rank 0 (from a generator of torch)",
    "lstm": TORCH + " first in body.cell (LSTM)",
    "gru": TORCH,
    "weight_dropout": TORCH,
    "drop_path": TORCH,
    "layer_left_out_seldom": PYTHON,
    "layer_left_out_seldom_by_torch": TORCH,
    "of_longer_samples_alone": TORCH,
    "numpy_noise": NUMPY,
    "sampled": TORCH,
    "gumbel": TORCH,
    "router_jitter": TORCH,
    "shuffled": TORCH,
    "rounded_at_random": TORCH,
    "leaky_at_random": TORCH,
    "pooled_at_random": TORCH,
    "checkpointed": TORCH,
    "targets_chosen": PYTHON + " first in the loss",
    "tokens_replaced": TORCH + " first in the loss",
    "gradient_noise": "the gradient of body.up.weight is off by",
    "own_generator": OWN,
    "own_numpy_generator": OWN,
    "system_noise": OWN,
    "sharded": TORCH,
    "in_fp64": TORCH,
    "proved": TORCH,
}
# What is drawn is the same for a sample wherever it is, has no effect, or nothing is drawn.
JUDGED = ["keyed_by_sample", "keyed_in_the_model", "keyed_by_its_own_generator", "module_in_evaluation",
          "model_in_evaluation", "no_dropout_in_attention", "no_attention_dropout_in_llama", "drawn_without_effect",
          "proved_keyed_by_sample"]


@pytest.fixture(scope="module")
def found(warm):
    return json.loads(run(warm, "random_models.py"))


@pytest.mark.parametrize("name", REFUSED)
def test_a_random_model_is_refused_by_name(found, name):
    """With a gradient thrown away, too: the noise of a random reference would hide it."""
    for passed, said, _ in (found[name]["right"], found[name]["mistaken"]):
        assert passed is None and said.startswith("isograd.watch: found ") and REFUSED[name] in said, said


@pytest.mark.parametrize("name", JUDGED)
def test_a_model_that_draws_the_same_for_a_sample_is_judged(found, name):
    (right, said, _), (mistaken, wrong, _) = found[name]["right"], found[name]["mistaken"]
    assert right and mistaken is False and "gradient_lost" in wrong, said + wrong
    assert ("the loss draws from a generator" in said) == (name == "drawn_without_effect"), said


def test_the_generators_of_the_run_go_on_as_if_nobody_watched(found):
    assert [name for name, one in found.items() if not one["kept"]] == []


def test_all_settings_are_listed(found):
    assert list(found) == [*REFUSED, *JUDGED] and len(found) >= 25
