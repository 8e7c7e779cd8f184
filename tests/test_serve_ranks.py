"""`isograd serve --ranks N`: the unmodified client trains on several ranks what it trains on one, also after a kill."""
import time

import numpy as np
import pytest
from conftest import refused
from safetensors.torch import load
from serve_client import LIMIT, adapter, datum, exported, furthest, limited_to, model, prompt, session, text, uneven
from serve_files import NAME, server, write_model
from tinker import types

BOUND = 1e-10
SPREADS = {"one": (), "zero3": ("--ranks", 2, "--set", "parallel.strategy=zero3"),
           "four": ("--ranks", 4, "--set", "parallel.tp=2", "--set", "parallel.cp_ring=2")}
limited = limited_to(4 * LIMIT)


def train(url, training, steps, seed):
    """Steps of three uneven calls, of cross entropy and of ppo, then the clip."""
    rng = np.random.default_rng(seed)
    said = []
    for _ in range(steps):
        calls = [(uneven(rng), "cross_entropy"), (uneven(rng, (11, 2)), "cross_entropy")]
        data = []
        for length in (4, 25, 7):
            tokens, targets = text(rng, length)
            data.append(datum(tokens, target_tokens=targets, logprobs=(-5.9 + 0.2 * rng.normal(size=length)).astype(np.float32),
                              advantages=rng.normal(size=length).astype(np.float32)))
        calls.append((data, "ppo"))
        waiting = [training.forward_backward(data, loss) for data, loss in calls]
        stepped = training.optim_step(types.AdamParams(learning_rate=1e-2, eps=1e-6, weight_decay=0.1, grad_clip_norm=0.5))
        said += [result.result(LIMIT).metrics["loss:sum"] for result in waiting]
        said.append(stepped.result(LIMIT).metrics["grad_norm"])
    return said


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("ranks")
    write_model(made / NAME)
    return made


@pytest.fixture(scope="module")
def trained(folder, tmp_path_factory):
    """By kind of server: what was said, the adapter, the whole weights, a greedy sample."""
    found = {}
    for name, flags in SPREADS.items():
        with server(folder, tmp_path_factory.mktemp(name) / "state", "--dtype", "float64", *flags) as one, session(one.url) as service:
            low, whole = (model(service, rank=rank, user_metadata={"isograd.normalise": "tokens"}) for rank in (4, 0))
            said = train(one.url, low, 2, 5) + train(one.url, whole, 1, 6)
            sampler = low.save_weights_and_get_sampling_client()
            sampler = sampler.result(LIMIT) if hasattr(sampler, "result") else sampler
            drawn = sampler.sample(prompt([5, 9, 17]), 1, types.SamplingParams(max_tokens=8, temperature=0)).result(LIMIT)
            found[name] = said, adapter(one.url, low), load(exported(one.url, whole)["model.safetensors"]), drawn.sequences[0].tokens
    return found


@pytest.mark.parametrize("name", [name for name in SPREADS if name != "one"])
def test_ranks_train_what_one_trains(trained, name):
    said, low, whole, drawn = trained[name]
    expected = trained["one"]
    assert np.allclose(said, expected[0], rtol=BOUND, atol=BOUND)
    assert furthest(low, expected[1]) < BOUND and furthest(whole, expected[2]) < BOUND
    assert drawn == expected[3]


def test_a_kill_changes_no_bit(folder, tmp_path):
    found = []
    for kills in (False, True):
        with server(folder, tmp_path / f"{kills}", *SPREADS["zero3"]) as one, session(one.url) as service:
            training = model(service)
            train(one.url, training, 2, 7)
            waiting = [training.forward_backward(uneven(np.random.default_rng(8)), "cross_entropy") for _ in range(2)]
            if kills:
                waiting[0].result(LIMIT)
                one.kill()
                time.sleep(1)  # the ranks end when their launcher has
                one.start()
            for result in waiting:
                result.result(2 * LIMIT)
            train(one.url, training, 1, 9)
            found.append(adapter(one.url, training))
    assert found[0].keys() == found[1].keys() and all(found[0][name].equal(found[1][name]) for name in found[0])


@pytest.mark.parametrize("flags, said", [
    (("--set", "parallel.tp=2"), "--ranks"),
    (("--ranks", "2", "--set", "model.hidden=8"), "parallel.KEY=VALUE"),
    (("--ranks", "3", "--set", "parallel.tp=2"), "parallel"),
    (("--ranks", "2", "--set", "parallel.pp=2", "--set", "parallel.stages_per_rank=2", "--set", "parallel.schedule=interleaved"),
     "parallel.stages_per_rank"),
])
def test_flags_that_do_not_fit_are_refused(folder, tmp_path, flags, said):
    assert said in refused("serve", "--model", f"{NAME}={folder / NAME}", "--state", tmp_path / "state", *flags)
