"""isograd.trainers in the loops of transformers, TRL, Accelerate and Lightning, by the installed wheel, on two ranks.

The loops are those of tests/trials, some of its cells. In the full suite steps of PEFT's adapters and of TRL's trainers as well, each
right and with a planted mistake, by the recipes of docs/python_prove.md.
"""
import json
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import BUILD, FULL, ROOT, full, run_python
from test_python_engines import engine_packages, is_refused

sys.path.insert(0, str(ROOT / "tests/trials"))
import table  # noqa: E402

LIBRARIES = ("accelerate", "lightning", "transformers", "trl")
# The trainers as they come, and with one option or kind of batch that makes the step another one. By default one of each.
CELLS = {
    "transformers-2-4-padded-DDP": [], "transformers-by-rank-2-4-padded-DDP": ["mean_of_rank_means"],
    "trl-2-4-packed-DDP": [], "trl-by-rank-2-1-padded-DDP": ["mean_of_rank_means"],
    "accelerate-2-4-even-DDP": [], "accelerate-2-4-padded-DDP": ["mean_of_micro_batch_means"],
    "lightning-2-4-even-DDP": [], "lightning-2-4-uneven-DDP": ["mean_of_micro_batch_means"], "lightning-2-1-even-FSDP2": [],
    "transformers-vit-2-4-even-DDP": [], "transformers-bert-2-4-even-DDP": ["summed_over_micro_batches"],
    "transformers-t5-2-4-even-DDP": ["summed_over_micro_batches"], "transformers-bert-means-2-4-even-DDP": [],
    "transformers-bert-counts-2-4-padded-DDP": [], "trl-dpo-2-4-uneven-DDP": [], "trl-reward-2-4-uneven-DDP": []}
DEFAULT = ["transformers-2-4-padded-DDP", "transformers-bert-2-4-even-DDP", "trl-by-rank-2-1-padded-DDP",
           "accelerate-2-4-padded-DDP", "lightning-2-1-even-FSDP2"]


@pytest.fixture(scope="module")
def libraries(installed):
    for name in LIBRARIES:
        if subprocess.run([str(installed), "-c", f"import importlib.util as u; u.find_spec({name!r}).name"],
                          capture_output=True).returncode:
            pytest.skip(f"needs {name}")
    return installed


@pytest.fixture(scope="module")
def judged(libraries):
    """The verdicts of cells and of cases, by one process: the libraries take as long to load as all of them."""
    names = CELLS if FULL else DEFAULT
    return json.loads(run_python(libraries, "trainer_cases.py", *names, timeout=900, HF_HUB_OFFLINE="1").splitlines()[-1])


@pytest.mark.parametrize("cell", [cell if cell in DEFAULT else full(cell) for cell in CELLS])
def test_a_public_trainer_is_judged(judged, cell):
    card = judged[0]
    assert "error" not in card[cell], card[cell]
    assert (card[cell]["passed"], card[cell]["findings"]) == (not CELLS[cell], CELLS[cell]), card[cell]["text"]
    assert ("cannot be called again" in card[cell]["text"]) == bool(CELLS[cell])


def test_the_page_says_the_same():
    """docs/trials.md has every trainer of the table with as many equal cells as its rows say, and the cells of these tests as they
    are judged: equal where they pass, else with the name."""
    page = (ROOT / "docs/trials.md").read_text()
    rows = {}
    for line in page.split("\n## Causes\n")[0].splitlines():
        if line.startswith("| `"):
            where, *row = [part.strip() for part in line.split("|")[1:-1]]
            rows.update(dict.fromkeys(where.split("; "), row))
    for name, trainer in table.TRAINERS.items():
        differ = 0
        for cell in (cells := [cell for cell in table.cells() if cell.trainer == name]):
            where = cell.data if cell.wrap in ("none", "DDP") else f"{cell.data}, {cell.wrap}"
            shown = rows.get(f"`{name}`, {where}", ["equal"] * 4)[2 * cell.ranks - 2 + (cell.accumulation > 1)]
            assert shown == "equal" or re.search(r"`\w+`$", shown), (cell, shown)
            assert cell.name not in CELLS or (shown == "equal" if not CELLS[cell.name] else f"`{CELLS[cell.name][0]}`" in shown), cell
            differ += shown != "equal"
        assert rows[f"`{name}`"] == [trainer.says, f"{len(cells) - differ} of {len(cells)}"]


def test_a_cell_without_its_package_is_not_run(installed):
    program = """import dataclasses, sys, table
table.TRAINERS["transformers"] = dataclasses.replace(table.TRAINERS["transformers"], needs=("no_such_package",))
sys.argv = ["run.py", "transformers-1-1-even-none"]
import run
run.main()"""
    done = subprocess.run([str(installed), "-c", program], cwd=ROOT / "tests/trials", capture_output=True, text=True, timeout=120)
    assert done.returncode == 1 and "not run: needs no_such_package" in done.stdout, done.stderr
    assert done.stdout.endswith("1 cells: 0 equal, 0 differs, 1 not run, 0 error\n")


@pytest.fixture(scope="module")
def cases(judged):
    return judged[1]


@pytest.mark.parametrize("name, said", {
    "the_second_step": [], "no_log_of_one_step": [], "a_wrong_log": ["loss_scaled"], "bf16": [],
    "accelerated_by_counts": [], "lightning_logs": ["loss_scaled"]}.items())
def test_steps_logs_and_precisions(cases, name, said):
    for rank in cases:
        assert isinstance(rank[name], dict), rank[name]
        assert (rank[name]["passed"], rank[name]["said"]) == (not said, said), rank[name]["text"]


@pytest.mark.parametrize("name", ["bf16", "accelerated_by_counts"])
def test_autocast_inside_the_trainer_is_seen(cases, name):
    assert "(bf16, " in cases[0][name]["text"].splitlines()[0]


def test_the_log_of_several_steps_is_not_compared(cases):
    assert "  run                 loss" not in cases[0]["no_log_of_one_step"]["text"]
    assert "  run                 loss" in cases[0]["the_second_step"]["text"]


def test_a_step_that_is_not_reached_has_no_verdict(cases):
    for rank in cases:
        assert rank["a_step_that_is_not_reached"].startswith("ConfigError StepCheck: found no verdict: Trainer has not made its step 2")


@pytest.mark.parametrize("name, ratio", {"bert_in_plain_torch": 4, "bert_whose_loss_is_said_to_be_a_mean": 1}.items())
def test_bert_gets_accumulation_times_ranks_its_gradient(cases, name, ratio):
    """Two micro-batches on two ranks, in fp32, whose rounding is some 1e-6 here. The first row of docs/trainers.md."""
    for rank in cases:
        found, rest = rank[name]
        assert abs(found / ratio - 1) <= 1e-5 and rest <= 1e-5, rank[name]


def test_the_page_tells_how_to_see_which_losses_take_the_count(cases):
    assert all(rank["which_losses_take_the_count"] == {"llama": 2.0, "bert-tokens": 1.0} for rank in cases)


def test_the_page_cites_lines_of_the_library(libraries):
    """`FILE:LINE`, `CODE`, of the version that the page names."""
    page = (ROOT / "docs/trainers.md").read_text()
    version, folder = run_python(libraries, "-c", "import transformers\nprint(transformers.__version__, *transformers.__path__)").split()
    assert f"transformers {version}" in page
    cited = re.findall(r"`([\w/]+\.py):(\d+)`, `([^`]+)`", page)
    assert len(cited) >= 4
    for file, line, code in cited:
        assert code in pathlib.Path(folder, file).read_text().splitlines()[int(line) - 1], (file, line)


@pytest.mark.parametrize("name, parts", {
    "step_zero": ["step=0", "from 1 on"], "no_loss": ["a Other and no loss", "Give loss="],
    "no_tensors": ["a micro-batch as dict", "samples=lambda batch"],
    "an_object": ["a micro-batch as SimpleNamespace", "samples=lambda batch"], "micro_batches_twice": ["another by `add`"],
    "two_optimizers": ["2 optimizers and manual optimization", "isograd.watch"]}.items())
def test_what_does_not_fit_is_refused(cases, name, parts):
    for rank in cases:
        assert re.match("ConfigError (?!ConfigError)", rank[name]), rank[name]
        assert all(part in rank[name] for part in [*parts, "; expected "]), rank[name]


def test_rows_of_tuples_and_tensors(cases):
    pairs, shapes = cases[0]["a_tuple_and_a_tensor"]
    assert pairs == [f"(tensor([[{2 * i}., {2 * i + 1}.]]), tensor([{i}]))" for i in range(3)] and shapes == [[1, 2]] * 3


def test_a_rank_that_fails_tells_the_other(cases):
    first, second = (rank["a_rank_fails"] for rank in cases)
    assert second == "ValueError out of cheese"
    assert first.startswith("PeerError isograd.watch: found that rank 1 failed: ValueError: out of cheese")


@pytest.mark.parametrize("name, fails, told", [
    ("an_accelerated_rank_fails", "ValueError out of cheese", "the loop ended before the step did"),
    ("an_accelerated_rank_leaves", "ConfigError StepCheck: found no verdict", "the loop ended before the step did"),
    ("an_accelerated_rank_cannot_cut", "KeyError 'no rows'", "KeyError: 'no rows'")])
def test_a_rank_that_leaves_a_loop_over_accelerate_tells_the_other(cases, name, fails, told):
    first, second = (rank[name] for rank in cases)
    assert second.startswith(fails)
    assert first.startswith("PeerError isograd.watch: found that rank 1 failed: ") and told in first, first


def test_nothing_is_imported_that_is_not_asked_for(installed):
    said = subprocess.run([str(installed), "-c", "import sys, isograd, isograd.trainers\n"
                           f"print([name for name in {LIBRARIES!r} if name in sys.modules])"], capture_output=True, text=True)
    assert said.stdout == "[]\n", said.stderr


# ---- PEFT and TRL ----

MEANS = ["mean_of_rank_means"]
# Cases of python_package/fine_tuning.py: nothing where the step is right, else the names.
FINE_TUNING = {
    **{name: [] for name in ("lora_ddp", "lora_fsdp2", "lora_fsdp1", "lora_after_fsdp2", "lora_after_fsdp1", "qlora", "qlora_bf16",
                             "qlora_fsdp2", "torchao", "trainer_lora", "trainer_smoothed", "sft_lora", "sft_packed_lora", "sft_dft",
                             "sft_smoothed", "dpo", "dpo_new_adapter", "dpo_old_adapter", "reward", "reward_centred", "reward_lora",
                             "experts", "experts_balanced", "experts_grouped_told", "batch_norm_frozen", "batch_norm_of_all_ranks")},
    **{f"{name}_rank_means": MEANS for name in ("lora_ddp", "lora_fsdp2", "lora_fsdp1", "qlora", "torchao")},
    **{f"{name}_by_rank": MEANS for name in ("trainer_lora", "trainer_smoothed", "sft_lora", "sft_dft", "sft_smoothed", "experts_balanced")},
    "lora_after_fsdp2_not_reduced": ["not_summed_over_axis"], "lora_after_fsdp1_not_reduced": ["not_summed_over_axis"],
    "dpo_micro_batches_summed": ["summed_over_micro_batches"], "reward_micro_batches_summed": ["summed_over_micro_batches"],
    "dpo_and_sft": ["mean_of_micro_batch_means"],
    "reward_sampler_pads": ["sample_twice"], "experts_balanced_by_micro_batch": ["mean_of_micro_batch_means"],
    "experts_of_transformers": ["loss_over_own_samples"], "batch_norm_of_a_rank": MEANS,
    "batch_norm_of_a_micro_batch": ["mean_of_micro_batch_means"], "batch_norm_frozen_micro_batches_summed": ["summed_over_micro_batches"],
    # Told wrongly: the loss type, the reference or beta is another one.
    **{name: ["samples_weighted_differently"] for name in ("sft_dft_told_as_nll", "dpo_old_adapter_told_as_new", "dpo_wrong_beta")}}
FINE_TUNING_REFUSED = {
    "qlora_fsdp2_another_base": ["make_model: found a quantised base_model.model.model.layers.0.self_attn.q_proj.base_layer.weight with "
                                 "other bytes", "from the same weights"],
    "qlora_8_bits": ["weights of bitsandbytes whose products round", "load_in_4bit=True"],
    "torchao_activations": ["weights of torchao whose products round", "Int8WeightOnlyConfig"],
    "kto": ["TRL's KTOTrainer: each loss takes the mean KL divergence", "features="],
    "grpo": ["TRL's GRPOTrainer: it draws its completions", "features="], "rloo": ["TRL's RLOOTrainer"],
    "dpo_without_a_loss": ["a DPOTrainer and no loss", "samples=", "docs/python_prove.md#fine-tuning"],
    "a_compute_loss_func": ["a compute_loss_func in Trainer and no loss"],
    "experts_grouped": ["does not run in fp64", 'experts_implementation="eager"'],
    "batch_norm": ["statistics over the batch in norm (BatchNorm1d)", "`norm.eval().train = lambda mode=True: norm`", 'mean="batch"']}


@pytest.fixture(scope="module")
def fine_tuning(libraries):
    said = run_python(libraries, "fine_tuning.py", PYTHONPATH=engine_packages(), timeout=900,
                      TORCHINDUCTOR_CACHE_DIR=str(BUILD / "engines/compiled"))
    return json.loads(said.splitlines()[-1])


@pytest.mark.full
@pytest.mark.parametrize("name", FINE_TUNING)
def test_a_fine_tuning_step_is_judged(fine_tuning, name):
    for rank in fine_tuning:
        assert isinstance(rank[name], dict), rank[name]
        assert (rank[name]["passed"], rank[name]["said"]) == (not FINE_TUNING[name], FINE_TUNING[name]), rank[name]["text"]
    assert FINE_TUNING[name] or "moved, alike on every rank" in fine_tuning[0][name]["text"] or "fsdp" in name


@pytest.mark.full
@pytest.mark.parametrize("name", FINE_TUNING_REFUSED)
def test_a_fine_tuning_step_without_a_comparison_is_refused(fine_tuning, name):
    is_refused(fine_tuning, name, FINE_TUNING_REFUSED[name])


@pytest.mark.full
def test_every_case_of_fine_tuning_is_listed(fine_tuning):
    assert set(fine_tuning[0]) == {*FINE_TUNING, *FINE_TUNING_REFUSED}
    assert all("average_tokens_across_devices=False" in fine_tuning[0][name]["text"] for name in ("sft_dft_by_rank", "trainer_lora_by_rank"))
    assert "(bf16, " in fine_tuning[0]["qlora_bf16"]["text"].splitlines()[0]


def test_the_guide_says_how_libraries_differ_from_one_device():
    table = (ROOT / "docs/trials.md").read_text().split("<!-- fine-tuning -->\n")[1].split("\n\n")[0].splitlines()[2:]
    names = ("experts_balanced_by_micro_batch", "experts_of_transformers", "dpo_and_sft", "reward_sampler_pads")
    assert [re.findall(r"`(\w+)`", row.split("|")[2])[:1] for row in table] == [FINE_TUNING[name] for name in names]
