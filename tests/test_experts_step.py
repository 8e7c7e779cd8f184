"""A step of SGD with experts sharded over ranks is PyTorch's: from a directory that transformers wrote to one that it loads.

The reference is transformers' model in fp64, one document after another, with PyTorch's autograd, clipping and SGD. Of
isograd it knows which parts of which documents are in the step (`isograd data show`), and nothing else.

Every weight may be off by 1e-9, and every step, (before - after) / learning rate, by 1e-9 of the reference's own, a
matrix or an expert at a time. Both compute in fp64: gradients lie within 4e-14 (test_hf.py), and a weight w is
rounded by at most 2^-53 |w|, which in its step is that over the learning rate. So rounding alone stays below a tenth
of the bound where the step of a matrix is not below 1e-6 of its weights; `Step.check` looks that it is not.
"""
import copy

import pytest
from conftest import full
from experts_reference import (BIAS, BOUND, IDLE, MODELS, RATE, RUNS, SEED, Gradients, Place, Step, is_expert, pieces,
                               routers_with_bias, step_of_pytorch, weights_of)
from test_hf import wide  # noqa: F401  (a fixture)


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    print(f"seed {SEED}")
    return Place(tmp_path_factory.mktemp("experts"))


def check(place, name, label, backend="shm"):
    run = RUNS[label]
    reference = place.gradients(name, run)
    total = reference.total()
    found, norm, row = place.differences(name, run, backend, total)
    print(f"{name}, {label}, {backend}: largest difference of a weight {found.largest()[0]:.1e}, of a step "
          f"{found.largest()[1]:.1e} of it ({max(found.steps, key=found.steps.get)}); norm {norm:.3f}")
    assert not found.beyond()
    # The log is of the same step.
    assert row["targets"] == reference.targets and row["updated"]
    assert row["loss"] == pytest.approx(reference.loss, rel=BOUND) and row["norm"] == pytest.approx(norm, rel=BOUND)
    assert row["learning_rate"] == RATE
    coefficient = run.max_norm / (norm + 1e-6) if run.max_norm > 0 else 1
    assert row["clip_coefficient"] == pytest.approx(coefficient, rel=BOUND)
    assert run.max_norm == 0 or coefficient < 0.5


# By default one run of each kind of mistake: accumulating with a rank out of packs, copies of experts, clipping.
DEFAULT = {("mixtral", "accumulating"), ("mixtral", "two copies of each expert"), ("mixtral", "clipped"),
           ("qwen3-moe", "one rank out of packs, clipped, decaying"), ("dots1", "accumulating")}
MODELS_FULL = [name if name == "mixtral" else full(name) for name in MODELS]


@pytest.mark.parametrize("name, label", [
    (pytest.param if (name, label) in DEFAULT else full)(name, label) for name in MODELS for label in RUNS
    if RUNS[label].ranks > 1])
def test_a_step_is_that_of_pytorch(name, label, place, wide):
    check(place, name, label)


@pytest.mark.full
def test_over_each_backend(place, wide, backend):
    check(place, "mixtral", "one rank out of packs, clipped, decaying", backend)


@pytest.mark.parametrize("name", MODELS_FULL)
def test_one_rank_without_ep_gives_the_same_weights(name, place, wide):
    check(place, name, "without ep")
    alone, assigned = (place.train(name, RUNS[label], "shm")[0] for label in ("without ep", "plain"))
    found = Step.compare(weights_of(place.model(name)), assigned, alone)
    print(f"{name}: with and without ep: {found.largest()[0]:.1e}, {found.largest()[1]:.1e}")
    assert not found.beyond()


@pytest.mark.parametrize("name", MODELS_FULL)
def test_gradients_of_ranks_differ_before_they_are_summed(name, place, wide):
    """And every expert but the idle one has tokens."""
    reference = place.gradients(name, RUNS["plain"])
    first, second, total = (pieces(reference.total(of)) for of in (lambda part: part.rank == 0, lambda part: part.rank == 1,
                                                                    lambda part: True))
    assert {piece for piece, gradient in total.items() if not gradient.any()} == IDLE.get(name, set())
    apart = {piece: ((first[piece] - second[piece]).norm() / gradient.norm()).item() for piece, gradient in total.items()
             if gradient.any()}
    print(f"{name}: gradients of ranks apart by {min(apart.values()):.2f} to {max(apart.values()):.2f} of their sum")
    assert min(apart.values()) > 0.1  # eight orders above the bound


# Each makes wrong gradients of those of each rank; the relative error of the experts' steps follows.
def times(factor):
    return lambda reference: {name: gradient * factor if is_expert(name) else gradient
                              for name, gradient in reference.total().items()}


def of_one_rank(reference):
    total, own = reference.total(), reference.total(lambda part: part.rank == 0)
    return {name: own[name] if is_expert(name) else gradient for name, gradient in total.items()}


FAULTS = {"ep": (times(2), 0.5), "one over ep": (times(0.5), 1.0), "a rank's own tokens": (of_one_rank, None)}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("name", MODELS_FULL)
def test_experts_gradients_otherwise_are_noticed(name, fault, place, wide):
    wrong, apart = FAULTS[fault]
    found, _, _ = place.differences(name, RUNS["plain"], "shm", wrong(place.gradients(name, RUNS["plain"])))
    assert found.beyond()
    off = {piece: error for piece, error in found.steps.items() if error > BOUND}
    print(f"{name}, {fault}: steps of experts off by {min(off.values()):.3f} to {max(off.values()):.3f} of theirs, weights by "
          f"{found.largest()[0]:.3f}")
    assert off.keys() == {piece for piece in found.steps if is_expert(piece)} - IDLE.get(name, set())
    assert apart is None or all(error == pytest.approx(apart, rel=1e-6) for error in off.values())


@pytest.mark.parametrize("name", MODELS_FULL)
def test_experts_counted_twice_in_the_norm_are_noticed(name, place, wide):
    """The coefficient is then too small for every parameter."""
    reference = place.gradients(name, RUNS["clipped"])
    twice = times(2 ** 0.5)(reference)
    found, norm, row = place.differences(name, RUNS["clipped"], "shm", reference.total(), norm_of=twice)
    print(f"{name}: norm {norm:.4f} instead of {row['norm']:.4f}, steps off by {max(found.steps.values()):.3f} of theirs")
    assert found.beyond()
    off = norm / row["norm"] - 1
    assert off > 1e-3
    assert all(error == 0 or error == pytest.approx(off, rel=1e-4) for error in found.steps.values())


# A part of a router of dots1, left out: each is another model for these tokens.
def without_bias(model):
    for router in routers_with_bias(model).values():
        router.e_score_correction_bias.zero_()


def without_groups(model):
    for router in routers_with_bias(model).values():
        router.num_group = router.topk_group = 1


def without_scale(model):
    for router in routers_with_bias(model).values():
        router.routed_scaling_factor = 1.0


@pytest.mark.parametrize("change", [without_bias, without_groups, without_scale])
def test_a_sigmoid_router_otherwise_is_noticed(change, place, wide):
    run, model = RUNS["accumulating"], copy.deepcopy(place.model("dots1"))
    change(model)
    other = Gradients(model, place.documents, place.parts(run))
    found, _, _ = place.differences("dots1", run, "shm", other.total())
    print(f"{change.__name__}: steps off by up to {max(found.steps.values()):.3f} of theirs")
    assert max(found.steps.values()) > 0.1


def test_a_selection_bias_that_follows_one_ranks_choices_is_noticed(place, wide):
    run = RUNS["accumulating"]
    own = Gradients(place.model("dots1"), place.documents, [part for part in place.parts(run) if part.rank == 0])
    wrong, _ = step_of_pytorch(place.model("dots1"), place.gradients("dots1", run).total(), run, own.choices)
    found = Step.compare(weights_of(place.model("dots1")), place.train("dots1", run, "shm")[0], wrong)
    assert found.beyond() and all(name.endswith(BIAS) for name in found.beyond())
