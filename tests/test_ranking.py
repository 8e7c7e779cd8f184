"""Our ranking and imbalance losses compared with those of the package imbalanced-losses, on one process.

Random inputs with ties, ignored rows, empty classes, flags, weights and queues over 50 steps: values and gradients in
fp32, without what docs/losses_reference.md lists as wrong in the package, or as meant otherwise.
"""
import itertools
import json
import subprocess
import warnings

import imbalanced_losses
import numpy as np
import pytest
import torch
from conftest import BINARY, FULL, ROOT, by_turns, isograd, rows_of

# Errors of values and of gradients: in fp64 relative to the largest element; in fp32 to that or to 1, and the error of the
# package's own fp32 against its fp64 comes on top (gradients of saturated sigmoids are differences of rounded numbers there).
ALLOWED = {"float32": 1e-6, "float64": 1e-9}


def probe(tmp_path, cases):
    cases_file, results_file = tmp_path / "cases.json", tmp_path / "results.json"
    cases_file.write_text(json.dumps(cases))
    run = subprocess.run([BINARY.parent / "ranking_probe", cases_file, results_file], capture_output=True, text=True,
                         timeout=120)
    assert run.returncode == 0, run.stderr
    return json.loads(results_file.read_text())


def numbers(values):
    return np.array([np.nan if v is None else v for v in values], dtype=float)


def make_step(rng, rows, classes, *, ties, ignored, empty_class, weights, iid, dtype=np.float32):
    scores = rng.normal(size=(rows, classes))
    if ties:
        scores = np.round(scores * 4) / 4
    if classes == 1:
        targets = (rng.random(rows) < 0.3).astype(np.int64)
    else:
        targets = rng.integers(0, classes - (1 if empty_class else 0), rows)
    if ignored:
        targets[rng.random(rows) < 0.2] = -100
    step = {"scores": scores.astype(dtype).tolist(), "targets": targets.tolist()}
    if weights:
        step["weight"] = rng.random(rows).astype(dtype).tolist()
    if iid:
        step["iid"] = (rng.random(rows) < 0.7).astype(int).tolist()
    return step


def theirs(case):
    """The package's losses and gradients of a case's steps."""
    dtype = getattr(torch, case["dtype"])
    loss = getattr(imbalanced_losses, case["loss"])(**case["options"])
    loss.to(dtype) if case["loss"] == "SoftmaxFocalLoss" else loss
    results = []
    for step in case["steps"]:
        scores = torch.tensor(step["scores"], dtype=dtype, requires_grad=True)
        kind = dtype if case["loss"] == "SigmoidFocalLoss" else torch.int64
        arguments = {}
        if "weight" in step:
            arguments["sample_weight"] = torch.tensor(step["weight"], dtype=dtype)
        if "iid" in step:
            arguments["iid_mask"] = torch.tensor(step["iid"]).bool()
        if case["loss"] == "PAUCAtBudgetLoss":
            arguments["return_diagnostics"] = True
        value = loss(scores, torch.tensor(step["targets"], dtype=kind), **arguments)
        stats = {}
        if isinstance(value, tuple):
            value, stats = value
        total = torch.nan_to_num(value).sum()
        # With no valid class and reduction "none" its loss hangs on nothing.
        gradient = torch.autograd.grad(total, scores, allow_unused=True)[0] if total.requires_grad else None
        results.append({"loss": value.detach().double().flatten().numpy(),
                        "gradient": np.zeros(scores.numel()) if gradient is None
                        else gradient.double().flatten().numpy(),
                        "diagnostics": {k: v.double().flatten().numpy() for k, v in stats.items()}})
    return results


def compare(tmp_path, cases):
    """Asserts that all values and gradients agree, in both types; the largest distances."""
    worst = {}
    for dtype, allowed in ALLOWED.items():
        cases = [{**case, "dtype": dtype} for case in cases]  # the same numbers, which fp32 can hold
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            wanted = [theirs(case) for case in cases]
        if dtype == "float32":
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                exact = [theirs({**case, "dtype": "float64"}) for case in cases]
        else:
            exact = wanted
        differentiated, distances = 0, [0, 0]
        for case, ours, peer, in_double in zip(cases, probe(tmp_path, cases), wanted, exact):
            for number, (mine, other, true) in enumerate(zip(ours, peer, in_double)):
                where = f"{case['loss']} {case['options']} {dtype} step {number}"
                value, gradient = numbers(mine["loss"]), numbers(mine["gradient"])
                np.testing.assert_array_equal(np.isnan(value), np.isnan(other["loss"]), err_msg=where)
                for i, (found, expected, best) in enumerate([(value, other["loss"], true["loss"]),
                                                             (gradient, other["gradient"], true["gradient"])]):
                    own = np.nanmax(np.abs(expected - best), initial=0)
                    scale = np.nanmax(np.abs(expected), initial=0)
                    far = np.nanmax(np.abs(found - expected), initial=0)
                    if i == 1:
                        differentiated += scale > 0
                    # An element whose terms cancel is off by what they are, about 1 at most, in units of 2^-53.
                    limit = allowed * max(1, scale) + own if dtype == "float32" else allowed * scale + 1e-14
                    assert far <= limit, f"{where}: {far} of {scale}"
                    distances[i] = max(distances[i], far / max(1, scale))
                for name, found in other["diagnostics"].items():
                    np.testing.assert_allclose(numbers(mine["diagnostics"][name]), found, rtol=2 * allowed,
                                               atol=2 * allowed, err_msg=f"{where} {name}")
        assert differentiated > len(cases) / 2
        worst[dtype] = distances
    return worst


def options_of_ranking():
    yield "SmoothAPLoss", {"temperature": 0.5}
    yield "SmoothAPLoss", {"temperature": 0.05}
    for mode in ("linear", "lower", "higher", "nearest", "midpoint"):
        yield "RecallAtQuantileLoss", {"temperature": 0.3, "quantile": 0.2, "quantile_interpolation": mode}
        yield "PAUCAtBudgetLoss", {"temperature": 0.4, "beta": 0.3, "quantile_interpolation": mode}
    yield "RecallAtQuantileLoss", {"temperature": 0.05}
    for surrogate, scale, numerator, basis in itertools.product(
            ("trapezoid", "pairwise"), ("iqr", "band"), ("pool", "live"), ("fpr", "population")):
        yield "PAUCAtBudgetLoss", {"temperature": 0.5, "alpha": 0.05, "beta": 0.5, "n_knots": 4, "surrogate": surrogate,
                                   "tau_scale": scale, "pos_numerator": numerator, "budget_basis": basis}


@pytest.mark.parametrize("classes, ties", by_turns([1, 4], [False, True]))
def test_ranking_losses_without_a_queue(tmp_path, classes, ties):
    rng = np.random.default_rng(1)
    cases = []
    for number, ((loss, options), reduction, weights) in enumerate(itertools.product(
            options_of_ranking(), ("mean", "sum", "none"), (False, True))):
        if not FULL and number // 2 % 2 != weights:  # by turns
            continue
        steps = [make_step(rng, int(rows), classes, ties=ties, ignored=True, empty_class=True, weights=weights, iid=True)
                 for rows in rng.integers(4, 60, 4)]
        cases.append({"loss": loss, "dtype": "float32", "steps": steps,
                      "options": {"num_classes": classes, "queue_size": 0, "reduction": reduction, **options}})
    print("worst", compare(tmp_path, cases))


STEPS_WITH_QUEUE = 50 if FULL else 20  # 20 turn a queue of 37 rows over three times


@pytest.mark.parametrize("classes", [1, 3])
def test_ranking_losses_with_a_queue_over_many_steps(tmp_path, classes):
    rng = np.random.default_rng(2)
    cases = []
    for number, ((loss, options), weights) in enumerate(itertools.product(options_of_ranking(), (False, True))):
        if not FULL and number // 4 % 2 != weights:  # by turns
            continue
        # No ignored rows and no batch as large as the queue: the package treats both otherwise (docs/losses_reference.md).
        steps = [make_step(rng, int(rows), classes, ties=True, ignored=False, empty_class=False,
                           weights=weights and number % 3 > 0, iid=True)
                 for number, rows in enumerate(rng.integers(1, 12, STEPS_WITH_QUEUE))]
        cases.append({"loss": loss, "dtype": "float32", "steps": steps,
                      "options": {"num_classes": classes, "queue_size": 37, "reduction": "mean", **options}})
    print("worst", compare(tmp_path, cases))


def focal_cases(rng):
    def step(scores, targets, weights):
        found = {"scores": scores.astype(np.float32).tolist(), "targets": targets.tolist()}
        return found if weights is None else {**found, "weight": rng.random(weights).astype(np.float32).tolist()}

    for alpha, gamma, reduction, weights in itertools.product((-1, 0.25, 0.8), (0.0, 1.0, 2.0, 3.5),
                                                              ("mean", "sum", "none"), (False, True)):
        steps = [step(rng.normal(size=(7, 3)) * 3, targets.astype(np.float32), (7, 1) if weights else None)
                 for targets in (rng.integers(0, 2, (7, 3)), rng.random((7, 3)))]
        yield {"loss": "SigmoidFocalLoss", "dtype": "float32", "steps": steps,
               "options": {"alpha": alpha, "gamma": gamma, "reduction": reduction}}
    for alpha, gamma, smoothing, reduction, weights in itertools.product(
            (None, [0.5, 1.0, 2.0, 0.25]), (0.0, 1.0, 2.0, 10.0), (0.0, 0.1),
            ("mean", "sum", "none", "mean_positive"), (False, True)):
        steps = []
        for shape in ((9, 4), (3, 4, 5)):
            targets = rng.integers(0, 4, (shape[0], *shape[2:]))
            targets[rng.random(targets.shape) < 0.2] = -100
            steps.append(step(rng.normal(size=shape) * 2, targets, targets.shape if weights else None))
        yield {"loss": "SoftmaxFocalLoss", "dtype": "float32", "steps": steps, "options": {
            "gamma": gamma, "reduction": reduction, "label_smoothing": smoothing, "background_class": 1,
            **({} if alpha is None else {"alpha": alpha})}}


def test_focal_losses(tmp_path):
    print("worst", compare(tmp_path, list(focal_cases(np.random.default_rng(3)))))


def scorer_table(tmp_path):
    rng = np.random.default_rng(5)
    x = rng.normal(size=(300, 4))
    rare = x @ [1.0, -0.5, 0.2, 0.0] + 0.5 * rng.normal(size=300) > 1.6
    file = tmp_path / "table.csv"
    file.write_text("a,b,c,d,rare\n" + "".join(",".join(map(str, [*row, int(y)])) + "\n" for row, y in zip(x, rare)))
    np.savez(tmp_path / "table.npz", x=x, y=rare)
    return file


def ranked(verb, *sets, ranks=2, status=0):
    return isograd(verb, ROOT / "examples/ranking.toml", "--ranks", ranks, *sets, status=status)


@pytest.mark.parametrize("loss", ["smooth_ap", "pauc"])
def test_a_scorer_trains_on_several_ranks_and_proves_its_gradient(tmp_path, loss):
    table = scorer_table(tmp_path)
    sets = [f"run.directory={tmp_path}/run", f"data.table={table}", "batch.rows_per_step=70", "train.steps=40",
            f"ranking.loss={loss}", "ranking.quantile=0.1"]
    run = ranked("train", *sets, ranks=3)
    assert "parity PASS: 3 ranks = 1 device" in run.stdout
    assert "cross_entropy" in run.stdout
    assert "average precision" in (tmp_path / "run/report.html").read_text()
    for folder in (tmp_path / "run", tmp_path / "run/cross_entropy"):
        steps, figures = rows_of(folder), rows_of(folder, "figures")
        assert len(steps) == 40 and [row["step"] for row in figures] == [40]
        if folder.name == "run":
            assert figures[0]["figures"]["average_precision"] > 0.5
        assert (folder / "checkpoints/step-00000040/checksums.json").exists()
    ranked("train", *sets, f"data.table={tmp_path}/table.npz", "data.target=", f"run.directory={tmp_path}/same", ranks=1)
    ranked("verify", *sets)
    longer = ranked("train", *sets, "train.steps=60", "checkpoint.resume=latest")
    assert "continuing after step 40" in longer.stderr
    assert len(rows_of(tmp_path / "run")) == len(rows_of(tmp_path / "run/cross_entropy")) == 60


def test_what_a_scorer_cannot_do_is_refused(tmp_path):
    table = scorer_table(tmp_path)
    for sets, text in [(["data.table="], "data.table"), ([f"data.table={table}", "data.target=z"], "a column 'z'"),
                       ([f"data.table={table}", "batch.rows_per_step=1"], "more ranks than rows"),
                       ([f"data.table={table}", "checkpoint.resume=latest"], "no complete checkpoint"),
                       ([f"data.table={table}", "verify.every=2"], "verify.every"),
                       ([f"data.table={table}", "parallel.strategy=zero3", "parallel.checkpoint_activations=true"],
                        "fill the loss's queue twice")]:
        assert text in ranked("train", f"run.directory={tmp_path}/run", *sets, status=2).stderr


# Weights of 1e36 give scores that fp32 cannot hold: one rule for all tasks.
@pytest.mark.parametrize("loss, rule", by_turns(["smooth_ap", "sigmoid_focal", "cross_entropy"], ["stop", "skip"]))
def test_scores_that_are_not_finite_are_what_on_non_finite_says(tmp_path, loss, rule):
    table = scorer_table(tmp_path)
    run = ranked("train", f"run.directory={tmp_path}/run", f"data.table={table}", "batch.rows_per_step=70",
                  "train.steps=6", f"ranking.loss={loss}", "ranking.compare=false", "optimizer.kind=sgd",
                  "schedule.kind=constant", "schedule.peak=1e37", "schedule.warmup=0", "train.max_norm=0",
                  "verify.at_end=false", f"train.on_non_finite={rule}", ranks=3, status=1 if rule == "stop" else 0)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if "loss" in row]  # null where it is not finite
    assert rows[0]["updated"] and rows[0]["loss"] is not None
    assert not rows[-1]["updated"] and rows[-1]["loss"] is None
    skipped = sum(not row["updated"] for row in rows)
    if rule == "stop":
        assert skipped == 1 and f"step {len(rows)}: the loss or the gradient is not finite" in run.stderr
    else:
        assert len(rows) == 6 and f"skipped           {skipped} steps, not finite" in run.stdout
    assert (tmp_path / "run/report.html").exists() and (tmp_path / "run/config.toml").exists()
