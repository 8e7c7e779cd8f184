"""Mistakes that `isograd.watch` finds by the outputs of the model, on 2, 3 and 4 ranks: each is named where it is, and the step without it
passes (tests/python_package/outputs.py)."""
import json
import re

import pytest
from conftest import ROOT, run_python

CASES = re.findall(r'(?m)^    "([^"]+)": ', (ROOT / "tests/python_package/outputs.py").read_text().partition("\nCASES = {")[2])


@pytest.fixture(scope="module", params=[2, 3, 4])
def outputs(warm, request):
    return json.loads(run_python(warm, "outputs.py", request.param))


@pytest.mark.parametrize("name", CASES)
def test_the_mistake_is_named_and_the_step_without_it_passes(outputs, name):
    (right, none, said), (wrong, findings, text) = outputs[name]
    assert (right, none) == (True, []), said
    assert (wrong, findings) == (False, [name.split(" ")[0]]), text


@pytest.mark.parametrize("name, parts", {
    "other_loss of other logits": ["arrives at 33 of 33", "the gradient of all parameters is what the model makes of it", "(model, sample).sum() for sample in"],
    "other_loss divided": ["logits are divided by 2 times what `loss` divides them by"],
    "other_loss recomputed": ["logits are divided by 2 times"], "other_loss in 32 bits": ["logits are divided by 2 times"],
    "other_loss of a parameter in it": ["those of scale, which the loss takes by itself, are not"],
    "other_targets of neighbours": ["is trained toward", "and by `loss` toward"],
    "other_targets of a sample without them": ["at which the declared loss has none: row 1 of sample 0 of micro-batch 1 on rank 0"],
    "other_backward of ranks with the same samples": ["arrives at each, 23 times"],
    "extra_rows_counted": ["rows of outputs that no sample has", "`losses[real].sum()`"],
    "other_outputs": ["nowhere in the step", "the nearest one there is off by"],
    "missing_data_part": ["such as row 0 of sample 0 of micro-batch 0 on rank 0"],
    "other_backward": ["the gradient of the declared loss arrives at each", "is not what the model makes of that"]}.items())
def test_it_is_said_where_it_is(outputs, name, parts):
    text = outputs[name][1][2]
    assert all(part.replace("33", "[0-9]+") in text or re.search(part.replace("33", "[0-9]+"), text) for part in parts), text


def test_of_a_backward_that_is_wrong_too_nothing_is_said(outputs):
    assert "what the model makes of it" not in outputs["other_loss and another backward"][1][2]


def test_each_case_was_made(outputs):
    assert sorted(CASES) == sorted(outputs) and len(CASES) >= 14
