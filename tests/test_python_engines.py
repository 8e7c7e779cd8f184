"""isograd.watch on engines that keep parameters and gradients elsewhere than PyTorch does: each right setting passes, each planted
mistake is named, and an engine that is not known is refused. FullyShardedDataParallel, main_grad and buffers of a loop's own by
default; DeepSpeed and 8-bit optimizers in the full suite, in an environment that is made once."""
import json
import os
import re
from unittest import mock

import pytest
from conftest import BUILD, ROOT, full, run_python
from serve_files import packages_of

# Cases of python_package/engines.py, and what the verdict names: nothing, where the step is right.
ENGINES = {
    "fsdp1": [], "fsdp1_original_parameters": [], "fsdp1_blocks": [], "fsdp1_blocks_original_parameters": [], "fsdp1_tied_and_frozen": [],
    "fsdp1_gradients_alone": [], "fsdp1_whole": [], "fsdp1_bf16": [], "fsdp1_scaled": [], "fsdp1_in_backward": [], "fsdp1_proved": [],
    "fsdp1_rank_means": ["mean_of_rank_means"], "fsdp1_last_micro_batch_alone": ["micro_batches_lost"],
    "fsdp1_clipped_by_the_local_norm": ["norm_of_own_shard"], "fsdp1_clipped_while_scaled": ["scaled_by_factor"],
    "fsdp1_optimizer_before_wrapping": ["not_in_optimizer"], "fsdp1_rank_1_does_not_step": ["updates_differ"],
    "fsdp1_in_backward_accumulated": ["micro_batches_lost"], "fsdp1_proved_wrong": ["mean_of_micro_batch_means"],
    "main_grad": [], "main_grad_copies": [], "main_grad_bf16_copies": [], "main_grad_clipped": [], "main_grad_bf16_copies_clipped": [],
    "fsdp1_reduced_in_bf16": [], "fsdp1_reduced_in_bf16_rank_means": ["mean_of_rank_means"], "fsdp1_rate_0": [],
    "fsdp1_put_back": ["not_updated"], "fsdp1_put_back_original_parameters": ["not_updated"],
    "fsdp2_reduced_in_bf16": [], "fsdp2_reduced_in_bf16_rank_means": ["mean_of_rank_means"],
    **{f"{engine}_of_the_step_before": ["gradient_of_earlier_step"] for engine in ("ddp", "fsdp1", "fsdp2")}, "ddp_zeroed": [],
    "ddp_optimizer_calls_its_parent": [],
    "main_grad_of_the_step_before": ["gradient_of_earlier_step"], "main_grad_last_micro_batch_alone": ["micro_batches_lost"],
    "main_grad_not_reduced": ["not_summed_over_axis"], "main_grad_optimizer_takes_another": ["optimizer_differs"],
    "main_grad_optimizer_takes_nothing": ["not_updated"],
    "own_buffers": [], "own_copies": [], "own_copies_bf16_clipped": [],
    "own_buffers_last_micro_batch_alone": ["micro_batches_lost"], "own_copies_last_micro_batch_alone": ["micro_batches_lost"],
    "own_buffers_optimizer_takes_another": ["optimizer_differs"]}
REFUSED = {
    "own_buffers_not_given": ["no gradient in `.grad` of any parameter", "gradient=lambda name, parameter"],
    "own_buffers_of_another_shape": ["a gradient of up.weight that is (128,)", "(16, 8)"],
    "refused_horovod": ["found Horovod, which has no adapter", "isograd compare"], "refused_fairscale": ["found FairScale"],
    "refused_deepspeed_of_another_version": ["found deepspeed 0.17.6; expected deepspeed 0.19", "deepspeed==0.19.*"],
    "refused_gradient_of_a_known_engine": ["gradient= and FullyShardedDataParallel"],
    "refused_without_make_model": ["a model that is sharded over ranks", "make_model=lambda"]}
# Those of python_package/engine_libraries.py.
LIBRARIES = {
    **{f"zero{stage}{name}": [] for stage in (0, 1, 2, 3) for name in ("", "_clipped", "_tied_and_frozen", "_unused")},
    **{f"zero{stage}{name}": [] for stage in (1, 2, 3) for name in ("_bf16", "_fp16")},
    "zero2_overlapped": [], "zero2_not_contiguous": [], "zero3_small_parameters_cut": [], "bitsandbytes": [], "torchao": [],
    **{f"zero{stage}_micro_batch_means": ["mean_of_micro_batch_means"] for stage in (0, 1, 2, 3)},
    **{f"zero{stage}_divided_twice": ["averaged_over_micro_batches"] for stage in (0, 1, 2, 3)},
    **{f"zero{stage}_updates_each_micro_batch": ["micro_batches_lost"] for stage in (0, 1, 2, 3)},
    **{f"zero{stage}_clipped_twice": ["optimizer_differs"] for stage in (1, 2, 3)},
    "zero2_last_micro_batch_alone": ["micro_batches_lost"],
    "trainer_zero2": [], "trainer_zero3": [], "trainer_zero2_own_counts": ["mean_of_rank_means"],
    "megatron": [], "megatron_last_micro_batch_alone": ["micro_batches_lost"], "megatron_not_summed": ["not_summed_over_axis"],
    "megatron_of_the_step_before": ["gradient_of_earlier_step"],
    "bitsandbytes_micro_batch_means": ["mean_of_micro_batch_means"], "torchao_micro_batch_means": ["mean_of_micro_batch_means"]}
LIBRARIES_REFUSED = {
    **{f"zero{stage}_without_an_update": ["no update of DeepSpeed's engine", "every 4 micro-batches"] for stage in (0, 1, 2, 3)},
    **{f"zero{stage}_offload": ["DeepSpeed with offload", "isograd compare"] for stage in (1, 2, 3)},
    "zero0_bf16": ["DeepSpeed with FP16_UnfusedOptimizer"], "zero0_fp16": ["DeepSpeed with FP16_UnfusedOptimizer"],
    "zero1_bf16_sums_in_fp32": ["DeepSpeed with BF16_Optimizer"],
    "zero2_fp16_overflows": ["that DeepSpeed's loss scale left out", "not finite"],
    "trainer_without_make_model": ["a model that is sharded over ranks", "make_model=lambda"],
    "megatron_distributed_optimizer": ["Megatron-Core with its distributed optimizer", "isograd compare"],
    "zero2_round_robin": ["DeepSpeed with round_robin_gradients", "isograd compare"],
    "another_version": ["found deepspeed 0.17.6; expected deepspeed 0.19", "deepspeed==0.19.*", "isograd compare"],
    "no_version": ["found deepspeed unknown"], "without_the_engine": ["without its engine", "deepspeed.initialize"],
    "without_the_engine_of_zero3": ["without its engine"], "proved": ["isograd.prove: found a step of DeepSpeed", "isograd.watch"]}
THREE = ["zero1_clipped", "zero2_clipped", "zero3_clipped", "zero2_tied_and_frozen", "zero3_tied_and_frozen",
         "zero2_last_micro_batch_alone", "zero3_small_parameters_cut"]


def is_judged(ranks, name, said):
    for rank in ranks:
        assert isinstance(rank[name], dict), rank[name]
        assert (rank[name]["passed"], rank[name]["said"]) == (not said, said), rank[name]["text"]
    assert said or ("nothing is proven of" if name.endswith("_rate_0") else "moved, alike on every rank") in ranks[0][name]["update"]


def is_refused(ranks, name, parts):
    for rank in ranks:
        assert isinstance(rank[name], str) and re.match("ConfigError (?!ConfigError)", rank[name]), rank[name]
        assert all(part in rank[name] for part in [*parts, "; expected "]), rank[name]


@pytest.fixture(scope="module")
def engines(warm):
    return json.loads(run_python(warm, "engines.py", 2, *ENGINES, *REFUSED))


@pytest.mark.parametrize("name", ENGINES)
def test_a_step_of_an_engine_is_judged(engines, name):
    is_judged(engines, name, ENGINES[name])


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_adapter_is_refused(engines, name):
    is_refused(engines, name, REFUSED[name])


def test_prove_leaves_flat_parameters_as_they_were(engines):
    assert all(rank[name]["same"] for rank in engines for name in ("fsdp1_proved", "fsdp1_proved_wrong"))


@pytest.mark.full
@pytest.mark.parametrize("ranks", [3, 4])
def test_on_more_ranks_and_in_two_groups(warm, ranks):
    names = [name for name in ENGINES if name.startswith("fsdp1")] + ["fsdp1_hybrid"] * (ranks == 4)
    found = json.loads(run_python(warm, "engines.py", ranks, *names))
    for name in names:
        is_judged(found, name, ENGINES.get(name, []))


def engine_packages():
    with mock.patch.dict(os.environ, DS_ACCELERATOR="cpu", DS_BUILD_OPS="0"):  # nothing is compiled
        return packages_of("engines", "--no-build-isolation")


@pytest.fixture(scope="module")
def libraries(installed):
    """The Python with isograd, and the folder of the libraries."""
    folder = engine_packages()

    def run(ranks, *names):
        said = run_python(installed, "engine_libraries.py", ranks, *names, PYTHONPATH=folder, DS_ACCELERATOR="cpu",
                          TORCHINDUCTOR_CACHE_DIR=str(BUILD / "engines/compiled"), timeout=600)  # torchao compiles its update
        return json.loads(said.splitlines()[-1])  # after what the libraries print
    return run


@pytest.fixture(scope="module")
def judged(libraries):
    return libraries(2)


def needs_fp16(name):
    """DeepSpeed takes fp16 on CPUs by what oneDNN says of them."""
    import torch
    if "fp16" in name and not torch.ops.mkldnn._is_mkldnn_fp16_supported():
        pytest.skip("needs a processor with avx512_fp16 or amx_fp16, for DeepSpeed in fp16")


@pytest.mark.parametrize("name", [full(name) for name in LIBRARIES])
def test_a_step_of_a_library_is_judged(judged, name):
    needs_fp16(name)
    is_judged(judged, name, LIBRARIES[name])


@pytest.mark.parametrize("name", [full(name) for name in LIBRARIES_REFUSED])
def test_a_library_without_an_adapter_is_refused(judged, name):
    needs_fp16(name)
    is_refused(judged, name, LIBRARIES_REFUSED[name])


@pytest.mark.full
def test_all_cases_are_listed_and_states_have_8_bits(judged):
    assert set(judged[0]) == {*LIBRARIES, *LIBRARIES_REFUSED}
    assert "Tensor torch.uint8" in judged[0]["bitsandbytes"]["states"] and "OptimState8bit torch.float32" in judged[0]["torchao"]["states"]


@pytest.mark.full
def test_slices_that_three_ranks_cut(libraries):
    found = libraries(3, *THREE)
    for name in THREE:
        is_judged(found, name, LIBRARIES[name])


def test_the_guide_says_what_is_compared():
    """Each engine of the adapters' tables has a row."""
    table = (ROOT / "docs/watch.md").read_text().split("## Engines\n")[1].split("\n## ")[0]
    source = (ROOT / "python/isograd/_engines.py").read_text()
    titles = re.findall(r'title(?:, \w+)* = "(\w+)"', source) + re.findall(r'"(Meg[\w-]+|Horovod|Col[\w-]+|FairScale)"', source)
    assert len(titles) >= 7 and [title for title in titles if title not in table] == []
