"""Runs of `isograd` with model.lora: proved, saved, continued on other axes, exported."""
import json

import pytest
from conftest import FULL, ROOT, full, ran, refused
from safetensors.torch import load_file

SMALL = ("data.pack_length=48", "batch.packs_per_step=6", "batch.packs_per_micro_batch=2", "model.hidden=96", "model.layers=2",
         "model.head_dim=16", "model.feed_forward=96", "train.evaluate_packs=4", "sample.tokens=8")
EXPERTS = ("model.family=qwen2_moe", "model.query_key_norm=false", "model.attention_bias=true", "model.experts=5", "model.expert_feed_forward=32",
           "model.shared_expert_feed_forward=48", "model.experts_every=2")
EXAMPLE = ROOT / "examples/lora.toml"
BOUND = 1e-10
CONSTANT = ("train.dtype=float64", "optimizer.kind=sgd", "optimizer.momentum=0.9", "schedule.kind=constant", "schedule.warmup=0",
            "schedule.peak=0.3", "model.lora.b_range=0.05")
# Ranks and their layout; the first ones are of two ranks.
CELLS = {name: (ranks, sets) for ranks, sets, name in [
    (2, ["parallel.tp=2"], "tp"), (2, ["parallel.pp=2"], "pp"), (2, ["parallel.ep=2"], "ep"), (2, ["parallel.cp_ring=2"], "cp"),
    (2, ["parallel.strategy=zero3"], "zero3"), (2, ["parallel.strategy=zero3", "parallel.ep=2"], "zero3 ep"),
    (2, ["parallel.strategy=zero1"], "zero1"), (2, ["parallel.strategy=zero2"], "zero2"), (2, ["parallel.cp_ulysses=2"], "cp ulysses"),
    (2, ["parallel.pp=2", "parallel.schedule=zb-h1"], "pp zb-h1"), (4, ["parallel.pp=2", "parallel.tp=2"], "pp tp"),
    (4, ["parallel.tp=2", "parallel.ep=2"], "tp ep"), (4, ["parallel.pp=2", "parallel.ep=2"], "pp ep"),
    (4, ["parallel.cp_ring=2", "parallel.strategy=zero3"], "zero3 cp"), (4, ["parallel.tp=2", "parallel.strategy=zero3"], "zero3 tp"),
    (4, ["parallel.replicas=2", "parallel.strategy=zero3"], "zero3 replicas"), (4, ["parallel.pp=2", "parallel.cp_ring=2"], "pp cp")]}
FEW = ("pp", "zero3 ep")


def adapter_at(run, step):
    return load_file(run / f"checkpoints/step-{step:08}/adapter_model.safetensors")


def apart(found, expected, before):
    """The largest distance of a matrix, relative to its change since `before`."""
    assert found.keys() == expected.keys()
    return max(((found[name] - value).norm() / (value - before[name]).norm()).item() for name, value in expected.items())


def trained(run, ranks, sets, steps):
    """The adapter of attention, dense and shared networks, experts and unembed at the last step."""
    ran("train", EXAMPLE, "--ranks", ranks, *SMALL, *EXPERTS, *CONSTANT, f"train.steps={steps}", f"run.directory={run}",
        "verify.at_end=false", *sets)
    return adapter_at(run, steps)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The adapter after the first and the last step."""
    run = tmp_path_factory.mktemp("alone")
    found = trained(run, 1, ["checkpoint.every=1", "checkpoint.keep=4"], 4)
    assert {name.split(".")[-3] for name in found} == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"}
    assert any("shared_expert" in name for name in found) and any(".experts.4." in name for name in found)
    return adapter_at(run, 1), found


@pytest.mark.parametrize("cell", [name if name in FEW else full(name) for name in CELLS])
def test_ranks_train_the_adapter_of_one_process(alone, tmp_path, cell):
    whole = trained(tmp_path / "whole", *CELLS[cell], 4)
    distance = apart(whole, alone[1], alone[0])
    print(f"{cell}: {distance:.1e}")
    assert distance <= BOUND
    if FULL or cell == "zero3 ep":
        trained(tmp_path / "parts", *CELLS[cell], 2)
        parts = trained(tmp_path / "parts", CELLS[cell][0], [*CELLS[cell][1], "checkpoint.resume=latest"], 4)
        assert all(value.equal(whole[name]) for name, value in parts.items())


def test_an_adapter_of_another_rate_is_another(alone, tmp_path):
    assert apart(trained(tmp_path / "other", 1, ["schedule.peak=0.3003"], 4), alone[1], alone[0]) > 1e4 * BOUND


@pytest.mark.parametrize("layout", [[], ["parallel.tp=2"], ["parallel.strategy=zero3"], ["parallel.pp=2"],
                                    ["parallel.tp=2", "model.lora.dropout=0.2"],
                                    ["parallel.cp_ring=2", "loss.fused=on", "model.lora.dropout=0.2"],
                                    ["parallel.ep=2", "parallel.strategy=zero3", *EXPERTS]], ids=" ".join)
def test_the_gradient_is_that_of_one_process(layout):
    said = ran("verify", EXAMPLE, "--ranks", 2, *SMALL, "model.lora.b_range=0.05", *layout).stdout
    assert "parity PASS" in said and "gradient of zero" not in said


def test_a_run_goes_on_with_its_adapter_and_is_exported(tmp_path):
    base = tmp_path / "base"
    ran("train", EXAMPLE, *SMALL, "model.lora.rank=0", "model.lora.alpha=32", "model.lora.targets=[\"attention\",\"mlp\"]",
        "train.steps=1", f"run.directory={tmp_path / 'full'}", "verify.at_end=false")
    (tmp_path / "full/checkpoints/step-00000001").rename(base)
    # model.load describes the model, so that its keys are left out.
    text = EXAMPLE.read_text()
    config = tmp_path / "lora.toml"
    config.write_text(text[:text.index("[model]")] + f'[model]\nload = "{base}"\n\n' + text[text.index("[model.lora]"):])
    small = [*(key for key in SMALL if not key.startswith("model.")), *CONSTANT]

    def train(folder, steps, *more):
        return ran("train", config, "--ranks", 2, *small, f"train.steps={steps}", f"run.directory={tmp_path / folder}", *more).stdout
    assert "parity PASS" in train("whole", 4, "parallel.strategy=zero3", "checkpoint.every=1", "checkpoint.keep=4")
    train("parts", 2, "parallel.strategy=zero3")
    train("parts", 4, "parallel.tp=2", "checkpoint.resume=latest")
    whole = adapter_at(tmp_path / "whole", 4)
    assert apart(adapter_at(tmp_path / "parts", 4), whole, adapter_at(tmp_path / "whole", 1)) <= BOUND
    saved = json.loads((tmp_path / "whole/checkpoints/step-00000004/adapter_config.json").read_text())
    assert (saved["r"], saved["lora_alpha"], saved["base_model_name_or_path"]) == (8, 16, str(base))
    assert not (tmp_path / "whole/checkpoints/step-00000004/model.safetensors").exists()

    ran("export", tmp_path / "whole", tmp_path / "adapter")
    assert load_file(tmp_path / "adapter/adapter_model.safetensors").keys() == whole.keys()
    ran("export", tmp_path / "whole", tmp_path / "merged", "--merge")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "merged/model.safetensors")
    name = "model.layers.1.mlp.down_proj"
    update = whole[f"base_model.model.{name}.lora_B.weight"] @ whole[f"base_model.model.{name}.lora_A.weight"] * 2
    assert (after[f"{name}.weight"] - before[f"{name}.weight"] - update).abs().max() < 1e-6 < update.abs().max()
    assert after["model.norm.weight"].equal(before["model.norm.weight"])
    greedy = ("--tokens", 12, "--temperature", 0)
    assert (ran("sample", tmp_path / "whole", *greedy).stdout
            == ran("sample", tmp_path / "merged", *greedy, "--tokenizer", "bytes").stdout)

    assert "a new folder" in refused("export", tmp_path / "whole", tmp_path / "merged")
    assert "without an adapter" in refused("export", base, tmp_path / "other")
    assert "model.lora of this run" in refused("train", config, *small, f"run.directory={tmp_path / 'whole'}",
                                               "checkpoint.resume=latest", "model.lora.alpha=8", "train.steps=5")


@pytest.mark.full
def test_the_whole_example_is_proved_and_its_adapter_is_that_of_peft(tmp_path):
    import torch
    from fp64_transformers import in_fp64
    from test_lora import BOUND, TOKENS, error, ours, peft
    from transformers import AutoModelForCausalLM
    for layout in ([], ["parallel.tp=2"], ["parallel.strategy=zero3"]):
        assert "parity PASS" in ran("verify", EXAMPLE, "--ranks", 2, *layout, limit=900).stdout
    ran("train", EXAMPLE, "--ranks", 2, f"run.directory={tmp_path / 'run'}", limit=3000)
    ran("export", tmp_path / "run", tmp_path / "adapter")
    # The base has fresh weights: those of a run of all parameters whose one step is far below their last place.
    ran("train", EXAMPLE, "model.lora.rank=0", "model.lora.alpha=32", "model.lora.targets=[\"attention\",\"mlp\"]", "train.steps=1",
        "schedule.warmup=0", "schedule.peak=1e-30", f"run.directory={tmp_path / 'base'}", "verify.at_end=false", limit=900)
    base = tmp_path / "base/checkpoints/step-00000001"
    with in_fp64(["qwen3"]), torch.no_grad():
        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float64, attn_implementation="eager")
        plain = model(TOKENS).logits
        theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter", autocast_adapter_dtype=False).double().eval()(TOKENS).logits
    assert error(theirs, plain) > 1e-2
    apart = error(ours("logits", base, tmp_path / "adapter", tmp_path), theirs)
    print(f"logits {apart:.1e} of the largest apart")
    assert apart < BOUND
    ran("export", tmp_path / "run", tmp_path / "merged", "--merge")  # shows that this base is the run's own
    adapter = load_file(tmp_path / "adapter/adapter_model.safetensors")
    before, after = load_file(base / "model.safetensors"), load_file(tmp_path / "merged/model.safetensors")
    assert before.keys() == after.keys() and len(adapter) == 2 * (7 * 4 + 1)
    for name, value in before.items():
        a, b = (adapter.get(f"base_model.model.{name.removesuffix('.weight')}.lora_{one}.weight") for one in "AB")
        assert (after[name] - value - (0 if a is None else 2 * b @ a)).abs().max() <= (0 if a is None else 1e-6), name


@pytest.mark.parametrize("changes, said", [
    (["model.lora.targets=[\"router\"]"], "q_proj"),
    (["model.lora.targets=[]"], "model.lora.targets"),
    (["model.lora.rank=600"], "512"),
    (["model.lora.rank=0"], "no effect"),
    (["model.lora.dropout=0.1", *EXPERTS], "drops inputs of experts"),
    (["model.lora.targets=[\"up_proj\"]", *EXPERTS], "all three or none")])
def test_bad_input_is_refused(changes, said):
    assert said in refused("verify", EXAMPLE, *SMALL, *changes)
