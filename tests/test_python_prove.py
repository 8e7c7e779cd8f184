"""isograd.watch and isograd.prove on ranks, by the installed wheel: what they name, what they pass, what they refuse.

ISOGRAD_FULL_TESTS=1: all trainers of compare_trials that run as processes; else a mistake for each diagnosis.
"""
import html
import json
import os
import re
import shutil
import socket

import pytest
from conftest import FULL, ROOT, full, isograd, run_python, two_ranks
from safetensors.torch import load_file, save_file
from serve_files import packages_of

PROGRAMS = ROOT / "tests/python_package"
# Under DDP or FSDP2, with the name that the verdict has to give.
MISTAKES = {
    "RankMeans": "mean_of_rank_means", "RankMeansOfNearlyEqualRanks": "mean_of_rank_means",
    "MicroBatchMeans": "mean_of_micro_batch_means_by_rank", "AccumulationUndivided": "summed_over_micro_batches",
    "SumInsteadOfMean": "unscaled_sum", "WorldSizeTooMuch": "multiplied_by_axis", "WorldSizeForgotten": "averaged_over_axis",
    "SamplerPads": "sample_twice", "BucketOfOneRankLost": "missing_rank_part", "GradientLost": "gradient_lost",
    "GroupsClippedApart": "groups_clipped_apart", "ClipNotApplied": "clip_not_applied",
    "EmptyMicroBatch": "not_finite_empty_micro_batch", "LogSummedOverRanks": "loss_scaled",
    "OptimizerOfAnotherModel": "not_in_optimizer", "OptimizerBeforeSharding": "not_in_optimizer",
    "HeadNotInOptimizer": "not_in_optimizer", "FrozenByMistake": "frozen_otherwise", "RankDoesNotStep": "updates_differ",
    "ShardDoesNotStep": "updates_differ", "LearningRateOfRank": "updates_differ", "StateOnRankZeroAlone": "updates_differ",
    "PutBackAfterUpdate": "not_updated", "NormLoggedAfterClipping": "norm_differs",
    "SameSamplesAndNoReduction": "reduction_not_proven"}
# Written without a look at how a diagnosis works. `undecided` lists causes of which one is right, `unknown` gives no name.
BLIND = {
    "ClipsWhileScaled": "scaled_by_factor", "NeverSynchronised": "not_summed_over_axis", "SynchronisedFirst": "micro_batches_not_reduced",
    "ClipsEachMicroBatch": "clipped_before_reduction", "ZeroesInTheLoop": "micro_batches_lost",
    "DividedByTheMostMicroBatches": "mean_of_micro_batch_means", "CountOfTheStepBefore": "scaled_by_factor",
    "ShiftedOverThePack": "other_targets", "MeanOfSampleMeans": "other_mean", "SmoothedLabels": "other_targets",
    "UnfrozenAfterWrapping": "not_summed_over_axis", "TieLost": "gradient_lost", "BiasesInNoGroup": "not_in_optimizer",
    "EmbeddingAveragedTwice": "some_parameters_scaled", "IgnoredByFsdp": "not_summed_over_axis",
    "DividedByRanksOnceMore": "averaged_over_axis", "OtherOrderOnOneRank": "replicas_differ",
    "OtherSeedsNoBroadcast": "initial_parameters_differ", "ValuesClipped": "values_clipped",
    "LastBatchFilledUp": "sample_twice"}
MISTAKES.update(BLIND)
# Tried by default: the first with each diagnosis.
SOME_MISTAKES = [name for i, (name, said) in enumerate(MISTAKES.items()) if said not in list(MISTAKES.values())[:i]]
RIGHT = ["DdpUneven", "DdpExact", "DdpAutocast", "DdpAutocastAlone", "DdpLowPrecisionParameters", "DdpAccumulated",
         "DdpEmptyRank", "DdpUnusedParameter", "DdpBucketViews", "FsdpTied", "FsdpOddShards", "FsdpMixedPrecision",
         "FsdpLowPrecisionParameters", "HybridShards", "FsdpAccumulatedCheckpointed", "FlatAllReduce", "ClippedAndApplied",
         "FrozenEmbedding", "GradientOfZero", "DropoutBySample", "SeveralOptimizers", "AdamDecaysWhatHasNoGradient", "WarmUp",
         "StepsLater", "Foreach", "Fused", "FusedShards", "Scaled", "ScaledAndFused", "SecondLoop", "ZeroRedundancy",
         "OptimizerInAWrapper", "RateBelowRounding", "Masters", "UpdatedByHand", "UnusedInNoGroup", "ClipsOnce", "ShardsClipOnce",
         "ValuesClippedAsMeant", "ZeroesBeforeTheLoop", "SampleMeans", "UnfrozenBeforeWrapping", "FlatInOneOrder",
         "BroadcastFromRankZero", "AllGroups", "StaticGraph", "ReducedByHookInDouble"]
# The verdict says what is proven of the update.
UPDATES = {
    "DdpUneven": "8 of 8 trained parameters moved, alike on every rank",
    "DdpUnusedParameter": "nothing is proven of unused.weight, unused.bias: a gradient of 0",
    "AdamDecaysWhatHasNoGradient": "31 of 31 trained parameters moved, alike on every rank",
    "WarmUp": "0 of 8 trained parameters moved; nothing is proven of", "StepsLater": "not looked at: the optimizer did not step",
    "SecondLoop": "nothing is proven of head.weight, head.bias: its optimizer steps later, as was said",
    "RateBelowRounding": "an update that rounding may hide", "UpdatedByHand": "8 of 8 trained parameters moved, alike",
    "LearningRateOfRank": "8 of 8 trained parameters moved"}
SOME = {*SOME_MISTAKES, *UPDATES, *RIGHT[::3]}


def by_default(names):
    return [name if name in SOME else full(name) for name in names]

# Other true diagnoses of a trial, where a watched step shows more than its dump: the rank that was left out has another gradient.
MORE = {"RankLeftOut": ["replicas_differ"], "TieLost": ["unknown"], "MaskedPositionsCounted": ["samples_weighted_differently"],
        # Rows of the step before have a gradient; a rank that draws by itself gives other outputs.
        "StaleGradients": ["extra_rows_counted"], "DropoutByRank": ["other_outputs"]}


@pytest.fixture(scope="module")
def watched(warm):
    """All trials of one number of ranks go through the same processes."""
    return json.loads(run_python(warm, "watched.py", *([] if FULL else sorted(SOME))))


@pytest.mark.parametrize("name", by_default(MISTAKES))
def test_a_planted_mistake_is_named(watched, name):
    assert not watched[name]["passed"] and watched[name]["said"] == [MISTAKES[name]], watched[name]["text"]


@pytest.mark.full
def test_of_mistakes_written_blindly_most_are_named_and_none_wrongly(watched):
    rows = [watched[name] for name in BLIND]
    assert len(rows) == 20 and not any(row["passed"] for row in rows)
    named = [set(row["said"]) <= set(row["names"]) for row in rows]
    assert all(is_named or row["said"] == ["unknown"] for is_named, row in zip(named, rows))
    assert sum(named) >= 0.85 * len(rows)


@pytest.mark.parametrize("name", by_default(RIGHT))
def test_a_right_step_raises_no_alarm(watched, name):
    assert watched[name]["passed"] and not watched[name]["said"], watched[name]["text"]


@pytest.mark.parametrize("name", UPDATES)
def test_the_verdict_says_what_is_proven_of_the_update(watched, name):
    assert UPDATES[name] in watched[name]["update"] and f"\nupdate: {watched[name]['update']}" in watched[name]["text"]
    assert ("alike" in watched[name]["update"]) == ("alike" in UPDATES[name]) or "proven" in UPDATES[name]


@pytest.mark.full
def test_all_other_trainers_are_judged_rightly(watched):
    rows = watched
    for name, row in rows.items():
        print(f"{name:28} {'pass' if row['passed'] else 'FAIL'}  {', '.join(row['said']) or '-':34} {row['about']}")
    assert len(rows) == 113
    alarms = [name for name, row in rows.items() if not row["names"] and (not row["passed"] or row["said"])]
    missed = [name for name, row in rows.items() if row["names"] and row["passed"]]
    wrongly = {name: row["said"] for name, row in rows.items()
               if row["names"] and not set(row["said"]) & {*row["names"], *MORE.get(name, [])}}
    assert (alarms, missed, wrongly) == ([], [], {})


@pytest.fixture(scope="module")
def changed(warm, tmp_path_factory):
    """By mistake of python_package/changed.py what the verdict says, and then that of the step in which it was followed."""
    folder = tmp_path_factory.mktemp("changed")
    first, second = json.loads(run_python(warm, "changed.py", folder))
    assert first == second
    return first, folder


def test_each_mistake_passes_once_its_verdict_is_followed(changed):
    """The code between backticks is put into the step, where the right one has it."""
    for name, said in changed[0].items():
        named = ["unscaled_sum", "loss_scaled"] if name == "unscaled_sum" else [] if name[:5] == "right" else [name.split(" ")[0]]
        assert [findings for _, findings, *_ in said] == [*([one] for one in named), []], (name, said)
        assert [passed for passed, *_ in said] == [False] * len(named) + [True]
    assert len(changed[0]) == 43


def test_what_to_change_stands_in_the_terminal_the_page_the_json_and_python(changed):
    said, folder = changed
    for name, ((_, findings, text, changes), *_) in said.items():
        assert set(changes) == set(findings), (name, changes)
        for finding, change in changes.items():
            assert text.count(f"change ({finding}): {change}\n") == 1 and text.count(change) == 1, text
    page = re.sub("</?code>", "`", html.unescape((folder / "page.html").read_text()))
    change = said["mean_of_rank_means"][0][3]["mean_of_rank_means"]
    assert page.count(change) == 1 and page.count("What to change") == 1
    found, = json.loads((folder / "dumps/verdict.json").read_text())["findings"]
    assert (found["id"], found["change"]) == ("mean_of_rank_means", change)


@pytest.fixture(scope="module")
def cases(warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept")
    found = json.loads(run_python(warm, "cases.py", FOLDER=str(folder)))
    return found, folder


def test_prove_leaves_model_and_optimizer_as_they_were(cases):
    (first, second), folder = cases
    for rank in (first, second):
        found = rank["prove_leaves_everything_as_it_was"]
        assert found["passed"] and found["same"] and found["none"] and found["notes"] == []
        assert found["text"].startswith("parity PASS: run = one_process") and "clip 0." in found["text"]
    assert set(os.listdir(folder)) == {"alone", "one_process", "run", "verdict.html", "verdict.json"}
    assert "<html" in (folder / "verdict.html").read_text()


def test_dumps_that_are_kept_keep_their_schema_and_are_read_by_others(cases):
    jsonschema, safetensors = pytest.importorskip("jsonschema"), pytest.importorskip("safetensors.torch")
    _, folder = cases
    schema = json.loads((ROOT / "docs/dump.schema.json").read_text())
    for side in ("run", "one_process", "alone"):
        step = json.loads((folder / side / "step.json").read_text())
        jsonschema.validate(step, schema)
        gradients = safetensors.load_file(folder / side / "gradients.safetensors")
        assert list(gradients) and set(gradients) == set(step["parameters"])
        assert all(g.abs().sum() > 0 for g in gradients.values())


def test_after_a_failure_other_batches_are_tried(cases):
    for rank in cases[0]:
        found = rank["prove_tries_other_batches"]
        assert not found["passed"] and found["said"] == ["mean_of_micro_batch_means"]
        assert found["notes"] == ["with one micro-batch a rank: FAIL mean_of_rank_means",
                                  "with the same sample on every rank: PASS",
                                  "with the last rank emptied: FAIL scaled_by_factor"]  # a mean over no row has no gradient


def test_an_experiment_that_cannot_be_made_leaves_the_verdict(cases):
    first, second = (rank["an_experiment_that_cannot_be_made"] for rank in cases[0])
    assert first["said"] == second["said"] != []
    assert second["notes"] == ["with one micro-batch a rank: not to be made: IndexError: no second one"]
    assert len(first["notes"]) == 1 and "found that rank 1 failed: IndexError: no second one" in first["notes"][0]


@pytest.mark.parametrize("name, said", [
    ("tensor_parallel_right", []), ("tensor_parallel_norm_not_summed", ["not_summed_over_axis"]),
    ("tensor_parallel_norm_wrong_on_each", ["replicas_differ"]), ("pipeline_right", []),
    ("pipeline_micro_batches_summed", ["summed_over_micro_batches"]), ("own_clipping", ["optimizer_differs"]),
    ("divided_by_the_wrapper_too", ["averaged_over_axis"]),
    ("divided_by_the_accumulation_too", ["averaged_over_micro_batches"]), ("sample_twice_is_noted", []),
    ("samples_are_objects", [])])
def test_models_that_are_cut_and_steps_of_ones_own(cases, name, said):
    for rank in cases[0]:
        assert (rank[name]["passed"], rank[name]["said"]) == (not said, said), rank[name]
        assert bool(rank[name]["notes"]) == (name == "sample_twice_is_noted")


def test_a_sparse_gradient_is_compared_and_stays_sparse(cases):
    for rank in cases[0]:
        right, wrong = rank["sparse_embedding"], rank["sparse_embedding_not_reduced"]
        assert right["passed"] and right["sparse"] and right["update"].startswith("3 of 3") and not wrong["passed"], (right, wrong)
        assert wrong["said"] == ["not_summed_over_axis"], wrong


def test_threads_that_get_no_processor_are_given_back(cases):
    assert [rank["threads_without_processors"] for rank in cases[0]] == [[2, 1]] * 2


def test_above_the_largest_shares_the_gradient_alone_is_compared(cases):
    for rank in cases[0]:
        assert rank["without_shares"]["right"]["passed"]
        assert not rank["without_shares"]["mean"]["passed"] and rank["without_shares"]["mean"]["said"] == ["samples_weighted_differently"]


@pytest.mark.parametrize("name, parts", {
    "other_models": ["another model on rank 1", "norm.weight is (9,) and (8,)"],
    "other_torches": ["torch 2.12.1+cu130 on rank 1 and ", "one version of torch on all ranks"],
    "no_module": ["found a function as the model", "Give the model that the step trains"],
    "class_of_an_optimizer": ["found the class SGD as the optimizer", "or None"],
    "loss_called": ["found a Tensor where a loss is given", "not what it returns"],
    "no_term": ["found a float where a loss is given", "isograd.Term(loss, weight)"],
    "loss_without_return": ["the loss of a sample as NoneType", 'Take reduction="none"'],
    "no_lists": ["no lists of samples"],
    "other_samples": ["other samples on rank 1 than on rank 0", "`data`"],
    "dropout": ["a loss that is random", "first in 1 (Dropout)", "eval()"],
    "batch_statistics": ["statistics over the batch in 1 (BatchNorm1d)", "`norm.eval().train = lambda mode=True: norm`", 'mean="batch"'],
    "not_in_fp64": ["does not run in fp64: RuntimeError", "reference=torch.float32"],
    "loss_in_fp32": ["a loss in torch.float32 of a model in fp64"],
    "divided_already": ["one number, which may be a mean: divided already", 'reduction="none"'],
    "no_model": ["does not share bias, down.bias"],
    "another_shape": ["norm.weight of shape (9,)", "(8,)"],
    "too_large": ["a model of 262 parameters", "GiB that are free"],
    "batch_too_large": ["a batch of 4 samples", "GiB that are free"],
    "sample_too_large": ["a sample whose forward does not fit", "9007199254740992 bytes"],
    "not_repeatable": ["another gradient when it is made again", "zero_grad()", "torch.manual_seed"],
    "not_finite_again": ["another gradient when it is made again: norm.weight is off by inf"],
    "raises": ["an exception in the loss of a sample: IndexError: no such row; expected its losses"],
    "raises_in_backward": ["an exception in the loss of a sample: IndexError: no such column"],
    "mean": ["mean='average'"],
    "nothing_trained": ["without a parameter that is trained"],
    "not_real": ["parameters that are not real, such as phase"],
    "no_count": ["targets=-1", "a whole number, 0 or more"],
    "half_a_target": ["targets=1.5", "a whole number, 0 or more"],
}.items())
def test_what_cannot_be_compared_is_refused_on_every_rank(cases, name, parts):
    for rank in cases[0]:
        assert rank[name] is not None and re.match("ConfigError (?!ConfigError)", rank[name])
        assert all(part in rank[name] for part in [*parts, "; expected "]), rank[name]
        assert ("fp64" in rank[name]) == (name in ("not_in_fp64", "loss_in_fp32")), rank[name]


@pytest.mark.parametrize("name, refuses, text", [("one_rank_without_lists", 0, "no lists of samples"),
                                                 ("samples_that_one_cannot_send", 1, "found a sample that does not pickle"),
                                                 ("group_of_another", 1, "found `data` as a group without rank 1")])
def test_what_one_rank_refuses_ends_all_in_its_words(cases, name, refuses, text):
    said = [rank[name] for rank in cases[0]]
    assert text in said[refuses] and said[1 - refuses] == said[refuses].replace("ConfigError ", f"ConfigError rank {refuses}: ")


def test_an_exception_in_the_step_leaves_no_rank_waiting(cases):
    first, second = (rank["a_rank_fails"] for rank in cases[0])
    assert second == "ValueError out of cheese"
    assert first.startswith("PeerError isograd.watch: found that rank 1 failed: ValueError: out of cheese")


FAILS = """
import sys, torch, torch.distributed as dist, isograd
dist.init_process_group({backend!r}, init_method="file://{store}", rank=int(sys.argv[1]), world_size=2)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 1))
with isograd.watch(model, None, micro_batches=[[torch.ones(3)]], loss=lambda m, x: (m(x).sum(), 1)):
    loss = model(torch.ones(3)).sum()
    if dist.get_rank() == 1:
        raise ValueError("out of cheese")
    loss.backward()  # waits for the other rank's part
"""


@pytest.mark.parametrize("backend", ["gloo", full("isograd")])
def test_an_exception_ends_also_who_waits_inside_the_step(warm, tmp_path, backend):
    (_, first, status), (_, second, other) = two_ranks(warm, FAILS.format(backend=backend, store=tmp_path / "store"))
    assert status and other and "ValueError: out of cheese" in second, second
    assert "Error" in first and "TimeoutExpired" not in first


CAUSES = """
import os, sys, time, torch, torch.distributed as dist, isograd
rank, case, store = int(sys.argv[1]), sys.argv[2], sys.argv[3]
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model, own = torch.nn.Linear(3, 1), torch.full((3,), 1.0 + rank)
def loss(model, sample):
    return {}["no such row"] if case == "loss" else model(sample)
def make_model():
    return {}["hidden"]
try:
    with isograd.watch(model, None, micro_batches=[[own]], loss=loss, make_model=make_model if case == "make_model" else None,
                       timeout=1 if case == "late" else 30) as step:
        model(own).sum().backward()
        time.sleep(4 * rank * (case == "late"))
        if rank == 1 and case == "refused":
            isograd.clip_grad_norm_(model, -1.0)
except Exception as error:
    print(type(error).__name__, error, type(error.__cause__).__name__, sep="|", flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("case, first, second", [
    ("loss", "ConfigError|isograd.watch: found an exception in the loss of a sample: KeyError: 'no such row'; expected .*|KeyError",
     "ConfigError|isograd.watch: found an exception in the loss of a sample: KeyError: 'no such row'; expected .*|NoneType"),
    ("make_model", "KeyError|'hidden'|NoneType",
     "ConfigError|isograd.watch: found that rank 0 failed: KeyError: 'hidden'; expected .*|NoneType"),
    ("late", "PeerError|isograd.watch: found rank 1 not at the end of its step after [0-9.]+ s; expected .*|.*Error",
     "PeerError|rank 0: isograd.watch: found rank 1 not at the end of its step after [0-9.]+ s; expected .*|NoneType"),
    ("refused", "PeerError|rank 1: isograd.clip_grad_norm_: found max_norm=-1.0; expected [^;]*|NoneType",
     "ConfigError|isograd.clip_grad_norm_: found max_norm=-1.0; expected [^;]*|NoneType")])
def test_a_message_is_said_once_and_has_its_cause(warm, tmp_path, case, first, second):
    """On the other rank in the words of the one that failed; a cause is above it in the traceback, where it was raised."""
    for said, (output, errors, status) in zip((first, second), two_ranks(warm, CAUSES, case, tmp_path / "store")):
        assert status == 0 and re.fullmatch(said.replace("|", r"\|"), output.strip()), output + errors


ONLY_TORCH = """
import isograd, torch
model = torch.nn.Linear(3, 2)
with isograd.watch(model, None, micro_batches=[[torch.ones(3)], [torch.zeros(3)]],
                   loss=lambda m, x: (m(x).square().sum(), 1)) as step:
    (model(torch.stack([torch.ones(3), torch.zeros(3)])).square().sum() / 2).backward()
try:
    torch.ones(3).numpy()
except RuntimeError as error:
    print(step.verdict.passed, error)
"""


def test_one_process_and_nothing_but_torch_will_do(installed):
    assert run_python(installed, "-c", ONLY_TORCH, PYTHONPATH=str(PROGRAMS / "only_torch")) == "True Numpy is not available\n"


CLOSURE = """
import isograd, torch
model = torch.nn.Linear(3, 2)
# Micro-batches as they come, and an optimizer whose closure makes the gradient; then one that is not told.
for told in (True, False):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with isograd.watch(model, optimizer, loss=lambda m, x: (m(x).square().sum(), 1)) as step:
        def closure():
            optimizer.zero_grad()
            for x in (torch.ones(3), torch.zeros(3)):
                if told or x.sum() > 0:
                    step.add([x])
                (model(x).square().sum() / 2).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step(closure)
    print(step.verdict.passed, " clip 0." in step.verdict.text)
"""


STEPS = """
import isograd, torch
torch.manual_seed(0)
def backward(model, _, x):
    model(x).square().mean().backward()
def thrice(model, _, x):
    (3 * model(x).square().mean()).backward()
def in_backward(model):  # each parameter has an optimizer, which steps when its gradient is there
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}
    def update(p):
        optimizers[p].step()
        optimizers[p].zero_grad()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    return list(optimizers.values())[0]
def lbfgs(model, optimizer, x):
    def closure():
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss
    optimizer.step(closure)
def overflows(model, optimizer, x):
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    scaler.scale(1e6 * model(x).square().mean()).backward()
    scaler.step(optimizer)
    scaler.update()
for make, step in ((in_backward, backward), (in_backward, thrice),
                   (lambda model: torch.optim.LBFGS(model.parameters(), lr=1e-3, max_iter=1), lbfgs),
                   (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), overflows),
                   (lambda model: torch.optim.AdamW(model.parameters(), fused=True), overflows)):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    optimizer, samples = make(model), [torch.randn(3) for _ in range(4)]
    try:
        with isograd.watch(model, optimizer, micro_batches=[samples], loss=lambda m, x: m(x).square()) as watched:
            step(model, optimizer, torch.stack(samples))
        print(watched.verdict.passed, watched.verdict.findings, watched.verdict.update)
    except isograd.ConfigError as error:
        print("found a step that GradScaler left out" in str(error))
"""


def test_optimizers_that_step_in_backward_by_a_closure_or_not_at_all(warm):
    moved = "4 of 4 trained parameters moved"
    assert run_python(warm, "-c", STEPS).splitlines() == [f"True [] {moved}", f"False ['scaled_by_factor'] {moved}", f"True [] {moved}",
                                                   "True", "True"]


def test_micro_batches_are_told_as_they_come_and_closures_make_gradients(warm):
    assert run_python(warm, "-c", CLOSURE).splitlines() == ["True True", "False True"]


LEAVES = """
import os, sys, time, torch, torch.distributed as dist, isograd, isograd.watching as watching
rank, port = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
if rank == 1:
    soon = watching._get
    watching._get = lambda store, key, seconds: (time.sleep(2 * key.endswith("verdict")), soon(store, key, seconds))[1]
model = torch.nn.Linear(3, 1, bias=False)
with torch.no_grad():
    model.weight.fill_(1.0)
own = torch.full((3,), 1.0 + rank)
with isograd.watch(model, None, micro_batches=[[own]], loss=lambda m, x: (m(x).sum(), 1), timeout=30) as step:
    (model(own).sum() / 2).backward()
    isograd.all_reduce_gradients(model)
print(step.verdict.passed, flush=True)
os._exit(0)  # with rank 0 its store goes
"""


def over_tcp(python, program, *more):
    """The outputs of two ranks whose store listens on a port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    return [output for output, *_ in two_ranks(python, program, port, *more)]


def test_rank_0_leaves_when_the_others_have_its_verdict(warm):
    assert over_tcp(warm, LEAVES) == ["True\n", "True\n"]


PLANTED = """
import pathlib, pickle, sys, time, torch, torch.distributed as dist, isograd
rank, port, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
class Runs:
    def __reduce__(self):
        return pathlib.Path.touch, (pathlib.Path(file),)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
if rank == 1:  # as anyone can who reaches the port
    key = "isograd/watch/1/verdict"
    dist.TCPStore("127.0.0.1", port, is_master=False).set("default_pg/0//" + key, pickle.dumps(Runs()))
    assert dist.distributed_c10d._get_default_store().get(key) == pickle.dumps(Runs())
model = torch.nn.Linear(3, 1)
def loss(model, sample):
    time.sleep(0.5)  # the planted verdict is there before rank 0's
    return model(sample).square().sum(), 1
try:
    with isograd.watch(model, None, micro_batches=[[torch.ones(3)]], loss=loss, timeout=4) as step:
        model(torch.ones(3)).square().sum().backward()
except isograd.PeerError as error:
    print("no verdict" if "found no verdict of rank 0" in str(error) else error, flush=True)
try:
    isograd._ranks.gather_objects(Runs() if rank == 1 else 0)
except pickle.UnpicklingError:
    print("refused", flush=True)
"""


def test_a_pickle_in_the_store_is_not_executed(warm, tmp_path):
    """Anyone on the host can write into the store that ranks meet in."""
    said = over_tcp(warm, PLANTED, tmp_path / "ran")
    assert not (tmp_path / "ran").exists(), said
    assert said == ["refused\n", "no verdict\nrefused\n"]


def test_the_demo_names_the_mistake_and_passes_the_cure_with_nothing_but_torch(installed):
    said = run_python(installed, "-m", "isograd.demo", PYTHONPATH=str(PROGRAMS / "only_torch"))
    wrong, right = said.split("== Counted first, summed")
    assert "diagnosis (mean_of_rank_means)" in wrong and "with the same sample on every rank: PASS" in wrong
    assert "parity PASS" in right and "diagnosis" not in right


def test_the_quick_start_is_pasted_and_catches_its_mistake(warm, tmp_path):
    guide = (ROOT / "docs/python.md").read_text()
    script, = re.findall(r"<!-- script -->\n```python\n(.*?)```", guide, re.S)
    assert len(script.splitlines()) <= 40
    cure, = re.findall(r"<!-- cure -->\n```python\n(.*?)```", guide, re.S)
    (tmp_path / "both.py").write_text("import os, sys\nfor name in sys.argv[1:]:\n"
                                      "    if os.environ['RANK'] == '0':\n        print('==', name, flush=True)\n"
                                      "    exec(compile(open(name).read(), name, 'exec'), {'__name__': '__main__'})\n")
    names = {"train.py": script, "right.py": corrected(script, cure)}
    for name, text in names.items():
        (tmp_path / name).write_text(text)
    said = run_python(warm, "-m", "torch.distributed.run", "--nproc-per-node", "2", tmp_path / "both.py",
               *(tmp_path / name for name in names))
    numbers = re.compile(r"-?\d+(\.\d+)?(e[-+]\d+)?")
    for name, part in zip(names, re.split(r"== \S+right.py\n", said, maxsplit=1), strict=True):
        shown, = re.findall(rf"<!-- says: {name} -->\n```\n(.*?)```", guide, re.S)
        for line in shown.splitlines():
            assert " ".join(numbers.sub("#", line).split()) in " ".join(numbers.sub("#", part).split()), said


def corrected(script, cure):
    """The script with the cure's lines: what stands between its comments `# in place of: LINE`, or `// in place of: LINE`."""
    for line, instead in re.findall(r"(?:#|//) in place of: (.*)\n((?:(?!(?:#|//) in place of).*\n)*)", cure):
        at, = [found for found in script.splitlines() if found.strip() == line]
        indent = at[:len(at) - len(at.lstrip())]
        script = script.replace(at + "\n", "".join(indent + new + "\n" for new in instead.rstrip("\n").split("\n")))
    return script


# ---- a loss whose derivative jumps, some of whose units lie at zero ----

@pytest.fixture(scope="module")
def jumps(warm):
    return json.loads(run_python(warm, "jumps.py"))


def test_a_right_step_raises_no_alarm_where_units_turn_on_and_off(jumps):
    """The planted fault of this test: without what is measured the same step fails, and the verdict says why it may."""
    assert jumps["right"]["passed"] and jumps["right"]["moves"] and jumps["right"]["rounding"], jumps["right"]["text"]
    assert "the right gradient itself moves, by up to" in jumps["right"]["text"]
    without = jumps["not_measured"]
    assert not without["passed"] and without["said"] == ["unknown"] and not without["moves"], without["text"]
    assert "compare a run in fp64" in without["text"]


def test_jumps_that_hide_a_tenth_of_a_gradient_are_no_pass(jumps):
    """Twelve of 64 units at zero."""
    many = jumps["many_at_zero"]
    assert not many["passed"] and many["said"] == ["unresolved"] and many["moves"], many["text"]
    assert "0.weight, 0.bias. Compare a run in fp64" in many["text"].splitlines()[0], many["text"]


def test_no_note_names_what_the_model_may_not_have(jumps):
    assert [name for name, one in jumps.items() if "ReLU" in one["text"]] == []


def test_in_fp64_nothing_is_measured_and_all_is_proved(jumps):
    assert jumps["in_fp64"]["passed"] and not jumps["in_fp64"]["moves"], jumps["in_fp64"]["text"]


@pytest.mark.parametrize("name, said", [("rank_means", "mean_of_rank_means"), ("scaled", None), ("lost", None)])
def test_mistakes_are_found_beside_jumps(jumps, name, said):
    assert not jumps[name]["passed"], jumps[name]["text"]
    assert said is None or jumps[name]["said"] == [said], jumps[name]["text"]


def test_a_smooth_loss_keeps_its_bounds(jumps):
    assert jumps["smooth"]["passed"] and not jumps["smooth"]["moves"], jumps["smooth"]["text"]
    noisy = jumps["smooth_and_noisy"]
    assert not noisy["passed"] and not noisy["moves"] and noisy["said"] == ["unknown"], noisy["text"]


# ---- losses that multiply all of the gradient by one number that rounding makes wrong ----

@pytest.fixture(scope="module")
def conditioned(warm, tmp_path_factory):
    folder = tmp_path_factory.mktemp("conditioned")
    return folder, json.loads(run_python(warm, "conditioned.py", folder))


def recorded(folder, side, **change):
    """step.json of a dump, with these keys changed; None takes one out."""
    file = folder / side / "step.json"
    step = json.loads(file.read_text())
    if change:
        step = {key: value for key, value in {**step, **change}.items() if value is not None}
        file.write_text(json.dumps(step))
    return step


def compared(folder, factor=1.0, alone=True):
    """The verdict of `isograd compare` as JSON, on the run's gradient times a factor; None where it is refused."""
    run = folder / "scaled"
    shutil.copytree(folder / "run", run, dirs_exist_ok=True)
    gradients = load_file(run / "gradients.safetensors")
    save_file({name: gradient.double() * factor for name, gradient in gradients.items()}, run / "gradients.safetensors")
    (run / "applied.safetensors").unlink(missing_ok=True)
    done = isograd("compare", run, folder / "one_process", *(("--alone", folder / "alone") if alone else ()), "--json", folder / "v.json")
    if done.returncode == 2:
        return None
    verdict = json.loads((folder / "v.json").read_text())
    assert (done.returncode == 0) == (verdict["verdict"] == "pass"), done.stdout
    return verdict


@pytest.mark.parametrize("loss", ["dpo", "ctc", "cosines"])
def test_a_right_step_raises_no_alarm_where_one_number_multiplies_all_of_the_gradient(conditioned, loss, tmp_path):
    """The planted faults of this test: without what is measured the same steps fail, and so does an error of scale from where the
    verdict says that it finds one."""
    kept, found = conditioned
    measured, alarms = 0, 0
    for ranks, seed, said in ((ranks, seed, said) for ranks in found for seed, said in found[ranks][loss]["right"].items()):
        where = f"{ranks} ranks, seed {seed}"
        assert said["passed"], f"{where}\n{said['text']}"
        folder = shutil.copytree(kept / f"{ranks}-{loss}-{seed}", tmp_path / f"{ranks}-{seed}")
        if "scale_moves" not in recorded(folder, "one_process"):
            continue
        measured += 1
        assert "in the scale of the whole, where numbers move" in said["text"], where
        right = compared(folder)
        assert right is not None and right["verdict"] == "pass" and right["grades"]["E2"]["scale"]["passed"], where
        finds = right["grades"]["E2"]["finds"]["uniform_scale"]
        assert finds < 1e-5, where
        for sign in (1, -1):
            assert compared(folder, 1 + sign * 1.01 * finds)["verdict"] == "fail", where
        recorded(folder, "one_process", moves=None, scale_moves=None)
        recorded(folder, "alone", rounding=None, scale_rounding=None)
        assert (compared(folder) or {"verdict": "refused"})["verdict"] != "pass", where
        alarms += compared(folder, alone=False)["verdict"] == "fail"
    assert alarms, f"of {measured} steps of {loss} that were measured, none needs it"


@pytest.mark.parametrize("loss", ["dpo", "ctc", "cosines", "token_mean"])
def test_mistakes_are_found_where_one_number_multiplies_all_of_the_gradient(conditioned, loss):
    for ranks, cases in conditioned[1].items():
        for case, seeds in cases[loss].items():
            for seed, said in seeds.items() if case != "right" else ():
                assert not said["passed"], f"{ranks} ranks, {case}, seed {seed}\n{said['text']}"
                assert case == "rank_means" or said["said"] in (["scaled_by_factor"], ["undecided"]), (ranks, case, seed, said["said"])


def test_the_scale_of_an_ordinary_loss_is_not_measured(conditioned):
    folder, found = conditioned
    for ranks in found:
        for seed, said in found[ranks]["token_mean"]["right"].items():
            assert said["passed"] and not {"moves", "scale_moves"} & {*recorded(folder / f"{ranks}-token_mean-{seed}", "one_process")}, said["text"]


# ---- models that draw random numbers: refused where another process would draw others; the run's generators go on ----

TORCH, PYTHON, NUMPY, OWN = "of torch,", "of Python's random,", "of numpy.random,", "that is none of torch's"
# Settings of python_package/random_models.py, and what the refusal names.
REFUSED = {
    "functional_dropout": TORCH + " first in body (Body)",
    "alpha_dropout": TORCH,
    "feature_dropout": TORCH,
    "dropout_module": TORCH + " first in body.1 (Dropout)",
    "encoder_layer": TORCH + " first in body",
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
# The same is drawn for a sample wherever it is, or it has no effect, or nothing is drawn.
JUDGED = ["keyed_by_sample", "keyed_in_the_model", "keyed_by_its_own_generator", "module_in_evaluation",
          "attention_in_evaluation", "no_dropout_in_attention", "no_attention_dropout_in_llama", "drawn_without_effect",
          "proved_keyed_by_sample"]


# Noise of other layers that reaches the same generator of torch as another setting's.
ALIKE = {"alpha_dropout", "feature_dropout", "gru", "sampled", "gumbel", "router_jitter", "shuffled", "rounded_at_random",
         "leaky_at_random", "pooled_at_random"}


@pytest.fixture(scope="module")
def random_models(warm):
    return json.loads(run_python(warm, "random_models.py", *([] if FULL else [n for n in [*REFUSED, *JUDGED] if n not in ALIKE])))


@pytest.mark.parametrize("name", [full(name) if name in ALIKE else name for name in REFUSED])
def test_a_random_model_is_refused_by_name(random_models, name):
    """With a gradient thrown away, too: the noise of a random reference would hide it."""
    for passed, said, _ in (random_models[name]["right"], random_models[name]["mistaken"]):
        assert passed is None and said.startswith("isograd.watch: found ") and REFUSED[name] in said, said


@pytest.mark.parametrize("name", JUDGED)
def test_a_model_that_draws_the_same_for_a_sample_is_judged(random_models, name):
    (right, said, _), (mistaken, wrong, _) = random_models[name]["right"], random_models[name]["mistaken"]
    assert right and mistaken is False and "gradient_lost" in wrong, said + wrong
    assert ("the loss draws from a generator" in said) == (name == "drawn_without_effect"), said


def test_the_generators_of_the_run_go_on_as_if_nobody_watched(random_models):
    assert [name for name, one in random_models.items() if not one["kept"]] == []


def test_all_settings_are_listed(random_models):
    assert list(random_models) == [n for n in [*REFUSED, *JUDGED] if FULL or n not in ALIKE] and len(random_models) >= 25


# ---- losses over the whole batch ----

# Cases of python_package/whole_batch.py: nothing where the step is right, else the names.
WHOLE = {
    "contrastive_right": [], "contrastive_each_rank_alone": ["mean_of_rank_means"],
    "contrastive_gathered_without_gradient": ["not_summed_over_axis"],
    "contrastive_whole_loss_without_gradient": ["some_parameters_scaled", "not_summed_over_axis"],
    "accumulated_right": [], "accumulated_each_alone": ["mean_of_micro_batch_means"],
    "mixture_right": [], "mixture_each_rank_alone": ["mean_of_rank_means"], "mixture_term_forgotten": ["term_scaled"],
    "grouped_right": [], "grouped_by_rank": ["samples_weighted_differently"], "grouped_by_rank_summed": ["samples_weighted_differently"],
    "grouped_by_members_on_the_rank": ["loss_over_own_samples"], "grouped_own_tokens": ["mean_of_rank_means"],
    "decorrelated_right": [], "decorrelated_by_rank": ["loss_over_own_samples"],
    "separable_right": [], "separable_one_rank": ["samples_weighted_differently"],
    "distilled_right": [], "distilled_each_rank_alone": ["mean_of_rank_means"],
    "mined_right": [], "mined_each_rank_alone": ["mean_of_rank_means"],
    "normalised_right": [], "normalised_each_rank_alone": ["mean_of_rank_means"],
    "weighted_right": [], "weighted_by_rank": ["mean_of_rank_means"],
    "confident_right": [], "confident_by_rank": ["mean_of_rank_means"],
    "positives_right": [], "positives_by_rank": ["samples_weighted_differently"]}
E1 = 1e-10  # of the whole gradient (DESIGN.md)
E2 = 32 * 2**-24  # the same in fp32 (docs/bounds.md)


@pytest.fixture(scope="module")
def whole_batches(warm):
    return json.loads(run_python(warm, "whole_batch.py"))


def is_judged(row, said):
    assert "error" not in row, row["error"]
    assert row["reference"] <= E1  # as one forward of all samples by plain torch has it
    assert row["run"] <= E2 if not said else row["run"] > 100 * E2  # which of the steps is right
    assert (row["passed"], row["said"], row["json"]) == (not said, said, said), row["text"]
    assert "is no bound" not in row["text"], row["text"]  # the step of one process in the run's precision
    assert [f"diagnosis ({name})" in row["text"] for name in said] == [True] * len(said)


@pytest.mark.parametrize("name", WHOLE)
def test_a_loss_over_the_whole_batch_is_judged(whole_batches, name):
    is_judged(whole_batches[name], WHOLE[name])


def test_gathers_without_a_gradient_are_named_with_their_line(whole_batches):
    text = whole_batches["contrastive_gathered_without_gradient"]["text"]
    line, = [i for i, text in enumerate((PROGRAMS / "whole_batch.py").read_text().splitlines(), 1) if "dist.all_gather(parts, rows)" in text]
    assert text.splitlines()[0].endswith(f"whole_batch.py, line {line}") and "unknown" not in text, text
    assert text.count("isograd.all_gather_rows(features)") == 1
    assert "terms[0] is 0 times" in whole_batches["mixture_term_forgotten"]["text"]
    assert "isograd.WeightedMean().count(weights)" in whole_batches["weighted_by_rank"]["text"]


# The same on more ranks, each with another number of samples and rank 1 with none.
UNEVEN = {
    "contrastive_right": [], "contrastive_averaged": ["loss_over_own_samples"], "contrastive_weighted": ["loss_over_own_samples"],
    "contrastive_summed": ["loss_over_own_samples"],
    "mined_right": [], "mined_averaged": ["loss_over_own_samples"], "mined_weighted": ["loss_over_own_samples"],
    "weights_right": [], "weights_averaged": ["mean_of_rank_means"], "term_right": [], "term_averaged": ["loss_over_own_samples"]}


@pytest.fixture(scope="module")
def uneven(warm):
    return json.loads(run_python(warm, "whole_batch.py", *([3, 4, 5, 8] if FULL else [3]), timeout=600))


@pytest.mark.parametrize("name", UNEVEN)
@pytest.mark.parametrize("ranks", [3, full(4), full(5), full(8)])
def test_losses_over_the_whole_batch_of_uneven_ranks(uneven, ranks, name):
    is_judged(uneven[str(ranks)][name], UNEVEN[name])


def test_shares_of_ranks_are_said(uneven, whole_batches):
    said = {name: row["text"].splitlines()[0] for name, row in [*uneven["3"].items(), *whole_batches.items()] if "text" in row}
    assert said["contrastive_weighted"].endswith("each weighted by its number of samples"), said["contrastive_weighted"]
    assert said["contrastive_summed"].endswith("summed") and said["contrastive_averaged"].endswith("in the shares 0.3333, 0.3333")


@pytest.mark.parametrize("name, parts", {
    "closes_over_the_model": ["computes with the model that is trained", "loss=lambda model, sample"],
    "closes_over_the_wrapper": ["computes with the model that is trained"],
    "closes_over_a_weight": ["computes with the model that is trained"],
    "make_model_gives_the_trained_one": ["make_model that gives parameters of the model that is trained"],
    "does_not_pickle": ["a sample that does not pickle: TypeError: cannot pickle 'generator' object"],
    "batch_does_not_fit": ["a loss of the whole batch that does not fit in one process", "Give features="],
    "features_do_not_fit": ["a loss of the whole batch that does not fit in one process", "in blocks"],
    "order_in_a_buffer": ["features of a sample that are others when samples come in another order", "a queue"],
    "order_in_an_attribute": ["features of a sample that are others when samples come in another order"],
    "random_features": ["a loss that is random"], "random_loss": ["a loss that is random"], "random_batch": ["a loss that is random"],
    "no_single_number": ["the loss of the whole batch as a tensor of shape (8, 8)"],
    "features_and_mean": ["features= and mean='sample'"],
    "no_weight": ["the loss of a sample as a tensor of shape (8,), without a weight"],
    "weight_with_gradient": ["a weight that parameters have a part in"],
    "features_without_gradient": ["a loss that no parameter has a part in"],
    "features_raise": ["an exception in the features of a sample: IndexError"],
    "no_mean": ["mean='batches'"]}.items())
def test_what_no_loss_over_the_whole_batch_can_be_is_refused(whole_batches, name, parts):
    for said in whole_batches[name]:
        assert said is not None and re.match("ConfigError (?!ConfigError)", said) and "; expected " in said, said
        assert all(part in said for part in parts), said


# Settings of python_package/contrastive.py, as WHOLE has them: how each library's loss is made on a rank.
LIBRARIES = {
    "open_clip.ClipLoss()": ["some_parameters_scaled", "not_summed_over_axis"],
    "open_clip.ClipLoss(local_loss=True, gather_with_grad=True)": [],
    "open_clip.ClipLoss(gather_with_grad=True)": [],
    "open_clip.ClipLoss(local_loss=True)": ["not_summed_over_axis"],
    "open_clip.ClipLoss(world_size=1)": ["mean_of_rank_means"],
    "open_clip.SigLipLoss(dist_impl='bidir')": [],
    "open_clip.SigLipLoss(dist_impl='bidir'), 3 ranks": [],
    "open_clip.SigLipLoss(dist_impl='shift'), 3 ranks": [],
    "open_clip.SigLipLoss(dist_impl='reduce')": [],
    "open_clip.SigLipLoss(dist_impl='gather')": [],
    "open_clip.SigLipLoss(world_size=1)": ["mean_of_rank_means"],
    "lightly.NTXentLoss(gather_distributed=True)": [],
    "lightly.NTXentLoss()": ["mean_of_rank_means"],
    "lightly.DCLLoss(gather_distributed=True)": [],
    "lightly.DCLLoss()": ["mean_of_rank_means"],
    "lightly.VICRegLoss(gather_distributed=True)": [],
    "lightly.VICRegLoss()": ["mean_of_rank_means"],
    "lightly.BarlowTwinsLoss(gather_distributed=True)": ["loss_over_own_samples"],
    "pytorch_metric_learning.NTXentLoss in DistributedLossWrapper": [],
    "pytorch_metric_learning.NTXentLoss in DistributedLossWrapper(efficient=True), 3 ranks": ["not_summed_over_axis"],
    "pytorch_metric_learning.NTXentLoss": ["mean_of_rank_means"],
    "pytorch_metric_learning.TripletMarginLoss in DistributedLossWrapper": [],
    "pytorch_metric_learning.TripletMarginLoss": ["mean_of_rank_means"],
    "sentence_transformers.MultipleNegativesRankingLoss(gather_across_devices=True)": [],
    "sentence_transformers.MultipleNegativesRankingLoss()": ["mean_of_rank_means"],
    "sentence_transformers.MultipleNegativesRankingLoss(gather_across_devices=True), accumulation 2": ["mean_of_micro_batch_means"],
    "sentence_transformers.CachedMultipleNegativesRankingLoss(gather_across_devices=True)": []}


@pytest.fixture(scope="module")
def contrastive(installed):
    return json.loads(run_python(installed, "contrastive.py", PYTHONPATH=packages_of("contrastive")).splitlines()[-1])


@pytest.mark.full
@pytest.mark.parametrize("name", LIBRARIES)
def test_contrastive_losses_of_libraries_are_judged(contrastive, name):
    is_judged(contrastive[name], LIBRARIES[name])


@pytest.mark.full
def test_open_clip_as_it_comes_halves_its_towers_on_two_ranks(contrastive):
    least, most = contrastive["open_clip.ClipLoss()"]["towers"]
    assert abs(least - 0.5) <= E2 and abs(most - 0.5) <= E2, (least, most)
    assert set(contrastive) == set(LIBRARIES) and len(LIBRARIES) >= 20


def test_the_guide_lists_the_settings_of_libraries():
    table = (ROOT / "docs/trials.md").read_text().split("<!-- libraries -->\n")[1].split("\n\n")[0].splitlines()[2:]
    cells = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table]
    assert [(name.replace("`", ""), re.findall(r"`(\w+)`", said)) for name, said in cells] == list(LIBRARIES.items())
    assert all((said == "PASS") == (not LIBRARIES[name.replace("`", "")]) for name, said in cells)
