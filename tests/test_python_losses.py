"""isograd.ranking and isograd.focal on 1 to 3 ranks, compared with the C++ losses on one process and the package
imbalanced-losses, neither of which shares code with them.

ISOGRAD_FULL_TESTS=1: every case in both types, and on one rank too; else every sixth in each.
"""
import itertools
import json
import subprocess

import numpy as np
import pytest
import torch
from conftest import BINARY, FULL, full, run_python
from test_ranking import focal_cases, make_step, numbers, options_of_ranking

# Relative to the largest element of a value or gradient; to 1 where that is less. fp32: sums of some 40 terms of a unit roundoff,
# which a power gamma multiplies by gamma (the condition of x^gamma).
ALLOWED = {"float64": 1e-12, "float32": 4e-6}


def made_cases():
    """Those of test_ranking.py, which has them in C++ on one process, with queues and rows of several ranks."""
    rng = np.random.default_rng(5)
    for (loss, options), classes, (reduction, weights, queue) in itertools.product(
            options_of_ranking(), (1, 3), (("mean", True, 0), ("none", False, 32))):
        if options.get("pos_numerator") == "live" and not queue:
            continue
        steps = [make_step(rng, rows, classes, ties=True, ignored=True, empty_class=False, weights=weights, iid=queue > 0)
                 for rows in (40, 9, 1)]
        yield {"loss": loss, "steps": steps,
               "options": {"num_classes": classes, "queue_size": queue, "reduction": reduction, **options}}
    yield from itertools.islice(focal_cases(rng), 0, None, 3)


@pytest.fixture(scope="module")
def found(warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("losses")
    cases = [{**case, "dtype": dtype} for number, case in enumerate(made_cases()) for turn, dtype in enumerate(ALLOWED)
             if FULL or (number + number // 3) % 6 == turn]  # not in step with a product of four
    (folder / "cases.json").write_text(json.dumps(cases))
    ours = run_python(warm, "losses.py", folder / "cases.json", *(["1"] if FULL else []), "2", "3")
    subprocess.run([BINARY.parent / "ranking_probe", folder / "cases.json", folder / "said.json"], check=True, timeout=120)
    return cases, json.loads((folder / "said.json").read_text()), json.loads(ours)


@pytest.mark.parametrize("size", [full(1), 2, 3])
def test_all_ranks_have_the_loss_and_the_gradient_of_one_process_in_cpp(found, size):
    cases, wanted, ours = found
    differentiated = 0
    for number, (case, steps) in enumerate(zip(cases, wanted)):
        for at, want in enumerate(steps):
            where = f"{case['loss']} {case['options']} {case['dtype']} step {at}"
            ranks = [rank[number][at] for rank in ours["ranks"][str(size)]]
            value, gradient = numbers(want["loss"]), numbers(want["gradient"])
            elements = "Focal" in case["loss"] and case["options"]["reduction"] == "none"
            values = [numbers(sum((rank["loss"] for rank in ranks), []))] if elements else [numbers(r["loss"]) for r in ranks]
            for mine, other in [*((mine, value) for mine in values), (numbers(sum((r["gradient"] for r in ranks), [])), gradient)]:
                np.testing.assert_array_equal(np.isnan(mine), np.isnan(other), err_msg=where)
                scale = max(1, np.nanmax(np.abs(other), initial=0))
                assert np.nanmax(np.abs(mine - other), initial=0) <= ALLOWED[case["dtype"]] * max(1, case["options"].get("gamma", 0)) * scale, where
            differentiated += np.abs(gradient).max(initial=0) > 0
    assert differentiated > len(cases)


def test_the_weight_of_a_scorer_under_ddp_gets_the_gradient_of_one_process(found):
    imbalanced_losses = pytest.importorskip("imbalanced_losses")
    for said in found[2]["model"]:
        weight, bias = torch.tensor([said["weight"]], dtype=torch.float64, requires_grad=True), said["bias"]
        scores = torch.tensor(said["rows"], dtype=torch.float64) @ weight.T + bias
        loss = imbalanced_losses.SmoothAPLoss(num_classes=1, queue_size=0, temperature=0.3)
        loss(scores, torch.tensor(said["targets"])).backward()
        right = weight.grad.flatten()
        for mode in ("sum", "mean"):
            assert torch.allclose(torch.tensor(said[mode], dtype=torch.float64), right, rtol=0, atol=1e-12 * float(right.norm()) + 1e-13)
        apart = torch.tensor(said["apart"], dtype=torch.float64)  # each rank ranks its own rows: another loss
        assert float((apart - right).norm() / right.norm()) > 0.1


@pytest.mark.parametrize("name, text", {
    "target": "targets from 2 to 3", "shape": "scores of shape (4,)", "weight": "sample_weight that does not fit",
    "iid": "iid_mask of shape (4,)", "alpha": "2 weights in alpha", "soft": "targets outside [0, 1]"}.items())
def test_what_one_rank_gives_wrongly_is_refused_on_both(found, name, text):
    first, second = (rank[name] for rank in found[2]["refused"])
    assert text in second and "; expected " in second and "found that rank 1 refuses its input" in first


def test_a_mesh_of_two_axes_ranks_what_a_group_does(found):
    """All rows go to each rank there: the same value, gradient and queue, whoever averages."""
    for said in found[2]["mesh"]:
        (value, gradient, queue), *others = said
        assert queue == 8
        for other in others:
            np.testing.assert_allclose(other[0], value, rtol=1e-13)
            np.testing.assert_allclose(other[1], gradient, rtol=1e-11, atol=1e-15)
            assert other[2] == queue


def test_a_state_goes_on_where_it_was_left(found):
    for said in found[2]["state"]:
        assert said["rows"] == [8, 8] and said["loaded"] == said["went_on"] == said["copied"] != said["fresh"]
        assert said["temperature"] == 0.125


@pytest.mark.parametrize("name", ["type", "weights"])
def test_ranks_that_differ_are_refused(found, name):
    for rank in found[2]["refused"]:
        assert "on rank 1 than on rank 0" in rank[name] and "ConfigError" not in rank[name]


def test_steps_without_a_value_are_zero_and_not_finite_ones_are_said(found):
    for rank in found[2]["refused"]:
        assert (rank["none_valid"], rank["no_rows"], rank["elements_0"]) == (0, 0, 0) and np.isnan(rank["not_finite"])


OUT_OF_RANGE = [
    ("SmoothAPLoss", {"temperature": 0}), ("SmoothAPLoss", {"reduction": "average"}), ("SmoothAPLoss", {"num_classes": 0}),
    ("SmoothAPLoss", {"grad_reduction": "max"}), ("RecallAtQuantileLoss", {"quantile": 1.0}),
    ("RecallAtQuantileLoss", {"interpolation": "next"}), ("PAUCAtBudgetLoss", {"beta": 0.0}),
    ("PAUCAtBudgetLoss", {"n_knots": 1}), ("PAUCAtBudgetLoss", {"surrogate": "exact"}),
    ("SmoothAPLoss", {"queue_size": -1}), ("SmoothAPLoss", {"thresholds": "sort"}), ("SmoothAPLoss", {"max_pool_size": -1}),
    ("PAUCAtBudgetLoss", {"pos_numerator": "none"}), ("SmoothAPLoss", {"seed": -1}),
    ("SigmoidFocalLoss", {"alpha": 2.0}), ("SigmoidFocalLoss", {"gamma": -1.0}), ("SoftmaxFocalLoss", {"label_smoothing": 1.0}),
    ("SoftmaxFocalLoss", {"alpha": [-1.0]})]


@pytest.fixture(scope="module")
def refusals(warm):
    """All messages, by one process: to load torch takes longer."""
    program = """import json, sys
from isograd import ConfigError, focal, ranking
for name, options in json.load(sys.stdin):
    try:
        getattr(focal if 'Focal' in name else ranking, name)(**options)
        print()
    except ConfigError as error:
        print(str(error).replace(chr(10), ' '))"""
    done = subprocess.run([str(warm), "-c", program], input=json.dumps(OUT_OF_RANGE), capture_output=True, text=True,
                          timeout=60, check=True)
    return done.stdout.splitlines()


@pytest.mark.parametrize("place", range(len(OUT_OF_RANGE)), ids=lambda place: str(OUT_OF_RANGE[place]))
def test_options_out_of_range_are_refused(refusals, place):
    name, options = OUT_OF_RANGE[place]
    assert len(refusals) == len(OUT_OF_RANGE)
    said = refusals[place]
    assert said.startswith(f"{name}: found") and "; expected " in said and next(iter(options)) in said
