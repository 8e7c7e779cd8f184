"""What a training server shows of its gradients: norms of matrices, dumps for `isograd compare`, `isograd verify --server`."""
import json

import numpy as np
import pytest
import tinker
import torch
from conftest import isograd
from safetensors.torch import load_file
from serve_client import ADAM, KEY, LIMIT, furthest, limited_to, model, session, uneven
from serve_files import NAME, server, write_model

BOUND = 1e-12
SHOWN = {"isograd.dump": "true", "isograd.norms": "true"}
limited = limited_to(4 * LIMIT)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("dumps")
    write_model(made / NAME, layers=1, hidden=32)
    return made


@pytest.fixture(scope="module")
def running(folder):
    with server(folder, folder / "state", "--dtype", "float64") as one:
        yield one


def stepped(running, service, mode, calls):
    """The metrics of a step on the same eight datums, and the folder of its dump."""
    training = model(service, user_metadata={"isograd.normalise": mode, **SHOWN})
    data = uneven(np.random.default_rng(4))
    for first in range(0, len(data), len(data) // calls):
        training.forward_backward(data[first:first + len(data) // calls], "cross_entropy").result(LIMIT)
    metrics = training.optim_step(ADAM).result(LIMIT).metrics
    return metrics, running.state / "dumps" / training.model_id / str(round(metrics["dump"]))


def gradients(dump):
    return load_file(dump / "gradients.safetensors")


@pytest.fixture(scope="module")
def steps(running):
    with session(running.url) as service:
        return {(mode, calls): stepped(running, service, mode, calls) for mode, calls in (("none", 1), ("tokens", 1), ("tokens", 4))}


def test_norms_are_those_of_the_dumped_gradient(steps):
    for metrics, dump in steps.values():
        found = gradients(dump)
        assert {name: value for name, value in metrics.items() if name.startswith("norm/")} == pytest.approx(
            {f"norm/{name}": gradient.norm().item() for name, gradient in found.items()}, rel=BOUND)
        whole = torch.cat([gradient.flatten() for gradient in found.values()]).norm().item()
        assert whole > 0 and metrics["grad_norm"] == pytest.approx(whole, rel=BOUND)
        assert metrics["grad_norm_sum"] == pytest.approx(whole * metrics["denominator"], rel=BOUND)
        said = json.loads((dump / "step.json").read_text())
        assert said["norm"] == metrics["grad_norm"] and said["scales"]["denominator"] == metrics["denominator"]


def test_mode_tokens_is_the_sum_divided_by_the_tokens(steps):
    whole, (metrics, dump) = gradients(steps["none", 1][1]), steps["tokens", 1]
    rows = sum(length - length // 3 for length in (3, 9, 30, 5, 17, 2, 40, 8))  # of weight other than 0
    assert metrics["denominator"] == rows
    assert furthest({name: gradient * rows for name, gradient in gradients(dump).items()}, whole) <= BOUND
    assert furthest({name: gradient * (rows + 1) for name, gradient in gradients(dump).items()}, whole) > 1e6 * BOUND


def test_compare_reads_the_dumps(steps):
    once, four, undivided = (steps[key][1] for key in (("tokens", 1), ("tokens", 4), ("none", 1)))
    assert "PASS" in isograd("compare", four, once, status=0).stdout
    assert "FAIL" in isograd("compare", undivided, once, status=1).stdout


def test_what_is_not_true_or_false_is_refused(running):
    with session(running.url) as service, pytest.raises(tinker.TinkerError, match="true or false"):
        model(service, user_metadata={"isograd.dump": "yes"})


def test_verify_asks_a_server(running, tmp_path):
    (tmp_path / "key").write_text(KEY + "\n")
    for more in ((), ("--base", running.folder / NAME, "--adapters")):
        said = isograd("verify", "--server", running.url, "--api-key-file", tmp_path / "key", *more, status=0).stdout
        assert said.startswith("PASS") and "allowed: 1.0e-10" in said and ("rank 0" in said) == (not more)
    isograd("verify", "--server", "http://127.0.0.1:1", status=2)
    isograd("verify", "--server", running.url, "--layout", "all", status=2)
    isograd("verify", status=2)


@pytest.mark.full
@pytest.mark.parametrize("layout, refused", [("parallel.strategy=zero3", []), ("parallel.tp=2", []),
                                             ("parallel.cp_ring=2", ["gspo"])])
def test_verify_asks_ranks(folder, tmp_path, layout, refused):
    with server(folder, tmp_path / "state", "--dtype", "float64", "--ranks", 2, "--set", layout) as ranks:
        said = isograd("verify", "--server", ranks.url, status=1 if refused else 0, TINKER_API_KEY=KEY).stdout
    assert [line.split(": ")[2].split(",")[0] for line in said.splitlines() if "not judged: " in line] == refused and "wrong: " not in said
    assert said.count("allowed: ") == 30  # of five models two steps, what they return, and two samplers


@pytest.mark.full
def test_ranks_dump_what_one_dumps(folder, steps, tmp_path):
    with server(folder, tmp_path / "state", "--dtype", "float64", "--ranks", 2, "--set", "parallel.strategy=zero3") as ranks:
        with session(ranks.url) as service:
            metrics, dump = stepped(ranks, service, "tokens", 4)
    assert furthest(gradients(dump), gradients(steps["tokens", 1][1])) <= 1e-10
    assert metrics == pytest.approx(steps["tokens", 1][0], rel=1e-10)
