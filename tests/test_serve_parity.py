"""`isograd serve` against PEFT and transformers, from the same initial adapter: all losses, several calls a step, options of the
optimizer that change at every step. In fp64 the trained matrices are equal to 1e-10; in fp32 gradients are within E2 of DESIGN.md.
The reference shares nothing with the server but the numbers that the client sends, which are rounded to fp32.
"""
import collections
import contextlib
import functools
import itertools
import json
import sys

import numpy as np
import pytest
import torch
from conftest import FULL, ROOT, full, isograd
from fp64_transformers import in_fp64
from safetensors.torch import load_file
from serve_client import LIMIT, adapter, datum, exported, furthest, limited_to, model, session, text
from serve_files import FAMILIES, NAME, server, write_families
from tinker import types

sys.path.insert(0, str(ROOT / "examples/other_trainers"))
from isograd_dump import write_dump  # noqa: E402

BOUND = 1e-10
CLIP = {"clip_low_threshold": 0.7, "clip_high_threshold": 1.6}
STEPS = 20 if FULL else 6
RANKS = (1, 8, 64, 512)
PARTS = [tuple(part for part, taken in zip(("attn", "mlp", "unembed"), which) if taken)
         for which in itertools.product((True, False), repeat=3) if any(which)]
# Each two of base, rank and parts are in a case together: (base, rank, parts).
CASES = [(base, RANKS[(i + j) % len(RANKS)], parts) for i, base in enumerate(FAMILIES) for j, parts in enumerate(PARTS)]
DEFAULT = [(NAME, 1, PARTS[0]), ("org/qwen3-tied", 64, PARTS[1])]
assert set(DEFAULT) < set(CASES)
cases = pytest.mark.parametrize("case", [(pytest.param if case in DEFAULT else full)(case, id=" ".join((case[0], str(case[1]), *case[2])))
                                         for case in CASES])
limited = limited_to(6 * LIMIT)


# ---- what the client sends ----

def weighted(rng, length, least, most):
    tokens, targets = text(rng, length)
    return tokens, {"target_tokens": targets, "weights": rng.uniform(least, most, length).astype(np.float32)}


def sampled(rng, length, spread, shift=0.0):
    tokens, targets = text(rng, length)
    return tokens, {"target_tokens": targets, "logprobs": (-5.9 - shift + spread * rng.normal(size=length)).astype(np.float32),
                    "advantages": rng.normal(size=length).astype(np.float32)}


def of_sequence(rng, length, shift):
    tokens, inputs = sampled(rng, length, 0.2, shift)
    return tokens, {**inputs, "sequence_ratio_mask": (np.arange(length) >= 3).astype(np.float32)}


def distribution(rng, length, count):
    tokens, _ = text(rng, length)
    weights = (rng.uniform(size=(length, count)) * (rng.uniform(size=(length, count)) < 0.3)).astype(np.float32)
    return tokens, {"target_tokens": torch.from_numpy(rng.integers(3, 300, (length, count))), "weights": torch.from_numpy(weights)}


def preference(data, log_probabilities):
    """DPO of the first text over the second, against a uniform reference; its slopes are weights of both signs."""
    chosen, rejected = (each.sum() for each in log_probabilities)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)), {}


def calls_of(step):
    """[(loss, its configuration, data)]"""
    rng = np.random.default_rng([9, step])
    return [
        [("cross_entropy", {}, [weighted(rng, 3, 0, 1), weighted(rng, 20, 0, 1)]), ("cross_entropy", {}, [weighted(rng, 9, 0, 1)])],
        [("importance_sampling", {}, [sampled(rng, 50, 0.2)]), ("ppo", CLIP, [sampled(rng, 27, 1), sampled(rng, 60, 1)])],
        [("cispo", CLIP, [sampled(rng, 45, 1)]), ("dro", {"beta": 0.05}, [sampled(rng, 26, 0.5)])],
        [("gspo", CLIP, [of_sequence(rng, 8, shift) for shift in np.arange(-1, 2.5, 0.5)]), ("cross_entropy", {}, [distribution(rng, 5, 40)])],
        [(preference, {}, [weighted(rng, 9, 0, 1), weighted(rng, 4, 0, 1)]), ("cross_entropy", {}, [weighted(rng, 14, -1, 1)])],
        [("cross_entropy", {}, [weighted(rng, 30, 0, 1)]), ("cross_entropy", {}, [weighted(rng, 2, 0, 1)])],
    ][step % 6]


def options_of(step, rank):
    """Of cycles of other lengths, so that they meet differently each time. An update of the weights is 32 / rank times that of the
    adapter's product, and the rates are less by as much: else a few steps of rank 1 make models in which any rounding grows fast.
    """
    cycles = dict(learning_rate=(2e-2, 1e-2, 5e-3, 1e-2, 3e-3), beta1=(0.9, 0.8, 0.9, 0.5), beta2=(0.95, 0.9, 0.99),
                  eps=(1e-8, 1e-8, 1e-6, 1e-12), weight_decay=(0.0, 0.1), grad_clip_norm=(0.0, 0.5, 1e4, 0.0, 1.0))
    options = {name: values[step % len(values)] for name, values in cycles.items()}
    return options | {"learning_rate": options["learning_rate"] * min(1, rank / 32)}


def call(training, loss, config, data):
    data = [datum(tokens, **inputs) for tokens, inputs in data]
    return training.forward_backward_custom(data, loss) if callable(loss) else training.forward_backward(data, loss, config)


def created(service, base, rank, parts):
    return model(service, rank, base=base, **{f"train_{part}": part in parts for part in ("attn", "mlp", "unembed")})


def export_to(directory, url, training):
    directory.mkdir()
    for name, content in exported(url, training).items():
        (directory / name).write_bytes(content)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def more_models(folder):
    return write_families(folder)


@pytest.fixture(scope="module")
def trained(folder, more_models):
    """For each case, made once, the folder of the initial adapter and the trained matrices."""
    with server(folder, folder / "state", "--dtype", "float64", *more_models) as running, session(running.url) as service:
        @functools.cache
        def of_case(case):
            training, initial = created(service, *case), folder / f"initial-{CASES.index(case)}"
            export_to(initial, running.url, training)
            for step in range(STEPS):
                for each in calls_of(step):
                    call(training, *each)
                training.optim_step(types.AdamParams(**options_of(step, case[1]))).result()
            return initial, adapter(running.url, training)
        yield of_case


# ---- the reference ----

def loss_of(name, config, p, inputs, seen):
    """The sum over the targets, whose log-probabilities are p. `seen` counts on which side of the clip ratios are."""
    wide = {key: torch.as_tensor(value).to(p.dtype if torch.as_tensor(value).is_floating_point() else torch.int64)
            for key, value in inputs.items()}
    if name == "cross_entropy":
        return -(wide["weights"] * p).sum()
    a, q = wide["advantages"], wide["logprobs"]
    ratio = (p - q).exp()
    if name == "importance_sampling":
        return -(ratio * a).sum()
    if name == "dro":
        return -(p * a - config["beta"] / 2 * (p - q) ** 2).sum()
    if name == "gspo":
        of_text = (p - q)[wide["sequence_ratio_mask"] != 0].mean().exp().detach()
        ratio = of_text * (p - p.detach()).exp()
    clamped = ratio.clamp(config["clip_low_threshold"], config["clip_high_threshold"])
    for inside in (clamped == ratio).tolist():
        seen[name, "inside" if inside else "outside"] += 1
    if name == "cispo":
        return -(clamped.detach() * p * a).sum()
    assert name in ("ppo", "gspo")
    return -torch.minimum(ratio * a, clamped * a).sum()


def losses_of_call(log_probabilities, loss, config, data, seen):
    found = [log_probabilities(tokens, inputs["target_tokens"]) for tokens, inputs in data]
    if not callable(loss):
        return [loss_of(loss, config, p, inputs, seen) for p, (_, inputs) in zip(found, data)]
    narrow = [p.detach().to(torch.float32).requires_grad_() for p in found]  # as the client has them
    loss(data, narrow)[0].backward()
    return [(p * of.grad.to(p.dtype)).sum() for p, of in zip(found, narrow)]


class Reference:
    """The base with an adapter of a directory, in PEFT."""

    def __init__(self, folder, base, directory, dtype=torch.float64):
        from peft import PeftModel
        from transformers import AutoModelForCausalLM
        whole = AutoModelForCausalLM.from_pretrained(folder / base, dtype=dtype, attn_implementation="eager")
        self.peft = PeftModel.from_pretrained(whole, directory, is_trainable=True, autocast_adapter_dtype=False)
        self.parameters = {name.replace(".default.", "."): value.requires_grad_(True) for name, value in self.peft.named_parameters()
                           if ".lora_" in name}
        with torch.no_grad():
            for value in self.parameters.values():
                value.data = value.data.to(dtype)
        assert furthest({name: value.detach() for name, value in self.parameters.items()},
                        {name: value.to(dtype) for name, value in load_file(directory / "adapter_model.safetensors").items()}) == 0
        self.seen = collections.Counter()

    def log_probabilities(self, tokens, targets):
        rows = self.peft(torch.as_tensor(tokens)[None]).logits[0].log_softmax(-1)
        targets = torch.as_tensor(targets)
        return rows.gather(1, targets.reshape(len(tokens), -1)).reshape(targets.shape)

    def loss(self, each):
        return sum(losses_of_call(self.log_probabilities, *each, self.seen))


FAULTS = ("a division per call", "a call counted twice", "weights below zero dropped", "the second beta of torch", "no decay",
          "a clip of each matrix by itself", "the rate of the step before")


def trained_by_peft(folder, case, initial, fault=None):
    assert fault is None or fault in FAULTS
    with in_fp64([FAMILIES[case[0]][0].lower()]):
        reference = Reference(folder, case[0], initial)
        parameters = list(reference.parameters.values())
        optimizer = torch.optim.AdamW(parameters)
        for step in range(STEPS):
            for i, (loss, config, data) in enumerate(calls_of(step)):
                if fault == "weights below zero dropped" and loss == "cross_entropy":
                    data = [(tokens, {**inputs, "weights": torch.as_tensor(inputs["weights"]).clamp(min=0)}) for tokens, inputs in data]
                total = reference.loss((loss, config, data))
                if fault == "a division per call":
                    total = total / sum(len(tokens) for tokens, _ in data)
                (total * (2 if fault == "a call counted twice" and (step, i) == (1, 1) else 1)).backward()
            options = options_of(step, case[1])
            if limit := options["grad_clip_norm"]:
                groups = [[each] for each in parameters] if fault == "a clip of each matrix by itself" else [parameters]
                for group in groups:
                    norm = torch.nn.utils.clip_grad_norm_(group, limit)
                    reference.seen["norm", "outside" if norm > limit else "inside"] += 1
            optimizer.param_groups[0].update(
                lr=options_of(max(step - 1, 0) if fault == "the rate of the step before" else step, case[1])["learning_rate"],
                betas=(options["beta1"], 0.999 if fault == "the second beta of torch" else options["beta2"]), eps=options["eps"],
                weight_decay=0 if fault == "no decay" else options["weight_decay"])
            optimizer.step()
            optimizer.zero_grad()
        for name in ("ppo", "cispo", "gspo", "norm"):  # clips bind, and do not
            assert fault or reference.seen[name, "inside"] and reference.seen[name, "outside"], name
        return {name: value.detach() for name, value in reference.parameters.items()}


@cases
def test_every_matrix_is_that_of_peft(folder, trained, case):
    initial, found = trained(case)
    assert all(value.dtype == torch.float64 for value in found.values())
    distance = furthest(found, trained_by_peft(folder, case, initial))
    print(f"{case}: {distance:.1e} after {STEPS} steps")
    assert distance <= BOUND


@pytest.mark.parametrize("fault", [FAULTS[0], *map(full, FAULTS[1:])])
def test_a_fault_would_be_found(folder, trained, fault):
    initial, found = trained(DEFAULT[0])
    assert furthest(found, trained_by_peft(folder, DEFAULT[0], initial, fault)) > 1e4 * BOUND


# ---- fp32: gradients of single steps, by `isograd compare` ----

def gradients_of(folder, base, directory, step, dtype):
    """Of the step's calls together and of the last one, from the adapter in the directory; and their loss."""
    with in_fp64([FAMILIES[base][0].lower()]) if dtype == torch.float64 else contextlib.nullcontext():
        reference = Reference(folder, base, directory, dtype)

        def taken():
            return {name: value.grad.clone() for name, value in reference.parameters.items()}
        loss = 0
        for each in calls_of(step):
            before = taken() if loss else None
            one = reference.loss(each)
            one.backward()
            loss += one.item()
        return taken(), {name: value - before[name] for name, value in taken().items()}, loss


def dumped(folder, gradients, step, **more):
    counts = [sum(inputs["target_tokens"].numel() if torch.is_tensor(inputs["target_tokens"]) else len(inputs["target_tokens"])
                  for _, inputs in data) for _, _, data in calls_of(step)]
    write_dump(folder, gradients, targets=sum(counts), counts=[counts], **more)
    return folder


def compared_with(reference, dump):
    """The verdict of `isograd compare`. By itself it has a bound for any loss; that of DESIGN.md knows one process's own errors, which are
    larger where a ratio of few tokens is most of a gradient: it is exp of a difference, whose rounding all parameters share."""
    isograd("compare", dump, reference, "--json", dump.with_suffix(".json"))
    return json.loads(dump.with_suffix(".json").read_text())


def within_e2(found, alone, calls):
    """E2 of DESIGN.md: each parameter, and the scale of the whole gradient."""
    own = {each["name"]: each["run_precision"]["error"] for each in alone["parameters"]}
    used = [each["run_precision"]["error"] / (4 * own[each["name"]] + 2 ** -24 * calls ** 0.5) for each in found["parameters"]]
    scale, of_alone = (each["grades"]["E2"]["scale"] for each in (found, alone))  # "allowed": 4 (u0 + its standard error)
    scales = abs(scale["error"]) / (scale["allowed"] + 4 * abs(of_alone["error"]))
    print(f"of E2 {max(used):.2f} in a parameter, {scales:.2f} in the scale")
    return max(*used, scales) <= 1


@pytest.fixture(scope="module")
def in_fp32(folder, more_models):
    with server(folder, folder / "narrow", *more_models) as running, session(running.url) as service:
        yield running.url, service


@pytest.mark.parametrize("base", [NAME, *(full(base) for base in FAMILIES if base != NAME)])
def test_a_gradient_in_fp32_is_within_rounding(folder, in_fp32, tmp_path, base):
    url, service = in_fp32
    rank = 8
    training = created(service, base, rank, PARTS[0])
    compared = range(STEPS) if FULL else [3]
    for step in range(compared[-1] + 1):
        results = [call(training, *each) for each in calls_of(step)]
        if step in compared:  # a checkpoint with sums has them as they are
            saved = training.save_state(f"step-{step}").result().path.split("/")[2:]
            sums = load_file(folder / "narrow/checkpoints" / "~".join((saved[0].replace(":", "+"), *saved[1:])) / "gradient.safetensors")
            found = {f"base_model.model.{name.removesuffix('.gradient')}": value for name, value in sums.items()}
            metrics = [result.result().metrics for result in results]
            loss = sum(each.get("surrogate_loss:sum", each["loss:sum"]) for each in metrics)
            directory = tmp_path / f"adapter-{step}"
            export_to(directory, url, training)
            expected, last, its_loss = gradients_of(folder, base, directory, step, torch.float64)
            alone, _, alone_loss = gradients_of(folder, base, directory, step, torch.float32)
            reference = dumped(tmp_path / "expected", expected, step, loss=its_loss, precision="fp64")
            rounding = compared_with(reference, dumped(tmp_path / "alone", alone, step, loss=alone_loss, precision="fp32"))

            def within_rounding(gradients):
                its = compared_with(reference, dumped(tmp_path / "found", gradients, step, loss=loss, precision="fp32"))
                return within_e2(its, rounding, len(results))
            print(base, step)
            assert within_rounding(found)
            if step == 3:
                assert not within_rounding({name: value * (1 + 1e-5) for name, value in found.items()})
                assert not within_rounding({name: value - last[name].float() for name, value in found.items()})  # a call lost
        training.optim_step(types.AdamParams(**options_of(step, rank))).result()
