"""Adapters in isograd and in PEFT, from the same directories: logits in fp64."""
import json
import subprocess

import pytest
import torch
import transformers
from conftest import BINARY
from safetensors.torch import load_file, save_file
from test_hf import wide  # noqa: F401, a fixture

peft = pytest.importorskip("peft", reason="peft is in tests/requirements.txt")

SMALL = dict(vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
             num_key_value_heads=2, head_dim=16, max_position_embeddings=64, initializer_range=0.2)
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head"]
FEW = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24)
EXPERTS = {"Mixtral": dict(num_local_experts=4), "Qwen2Moe": FEW | dict(shared_expert_intermediate_size=40, mlp_only_layers=[1]),
           "Qwen3Moe": FEW, "Dots1": dict(n_routed_experts=4, n_shared_experts=2, num_experts_per_tok=2, moe_intermediate_size=24,
                                          first_k_dense_replace=1, n_group=2, topk_group=1)}
TOKENS = torch.randint(0, 97, (2, 24), generator=torch.Generator().manual_seed(1))
BOUND = 1e-12  # of the largest logit
pytestmark = pytest.mark.usefixtures("wide")


def probe(*arguments, check=True):
    return subprocess.run([BINARY.parent / "lora_probe", *map(str, arguments)], check=check, capture_output=True, text=True)


def base(folder, family):
    torch.manual_seed(0)
    config = getattr(transformers, family + "Config")(**SMALL, **EXPERTS.get(family, {}), experts_implementation="eager")
    model = getattr(transformers, family + "ForCausalLM")(config).double().eval()
    model.save_pretrained(folder)
    return model


def ours(verb, model, adapter, folder):
    save_file({"tokens": TOKENS}, folder / "tokens.safetensors")
    probe(verb, model, adapter, folder / "tokens.safetensors", folder / "logits.safetensors")
    return load_file(folder / "logits.safetensors")["logits"]


def error(a, b):
    return ((a - b).abs().max() / b.abs().max()).item()


def trained(model, modules, rank=4, alpha=10):
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=alpha, target_modules=modules,
                                                         task_type="CAUSAL_LM")).double().eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_B" in name:
                parameter.normal_(0, 0.2)
    return adapted


@pytest.mark.parametrize("family, modules", [("Llama", MODULES), ("Qwen2", MODULES[:4]), ("Qwen3", ["v_proj", "down_proj"]),
                                             ("Mistral", MODULES), ("Mixtral", MODULES[4:7]), ("Qwen2Moe", MODULES),
                                             ("Qwen3Moe", MODULES), ("Dots1", MODULES)], ids=lambda value: value if isinstance(value, str) else len(value))
def test_our_directory_in_peft(tmp_path, family, modules):
    model = base(tmp_path / "base", family)
    probe("create", tmp_path / "base", tmp_path / "adapter", 4, 10, ",".join(modules))
    plain = model(TOKENS).logits
    loaded = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").double().eval()
    theirs = loaded(TOKENS).logits.detach()
    assert error(theirs, plain) > 1e-2
    assert error(ours("logits", tmp_path / "base", tmp_path / "adapter", tmp_path), theirs) < BOUND
    assert error(ours("merged", tmp_path / "base", tmp_path / "adapter", tmp_path), theirs) < BOUND


@pytest.mark.parametrize("family, modules", [("Llama", MODULES), ("Qwen3", MODULES[4:7]), ("Qwen2", ["q_proj"])],
                         ids=lambda value: value if isinstance(value, str) else len(value))
def test_their_directory_in_isograd(tmp_path, family, modules):
    adapted = trained(base(tmp_path / "base", family), modules)
    adapted.save_pretrained(tmp_path / "adapter")
    theirs = adapted(TOKENS).logits.detach()
    assert error(ours("logits", tmp_path / "base", tmp_path / "adapter", tmp_path), theirs) < BOUND


def test_a_planted_swap_of_experts_is_found(tmp_path):
    model = base(tmp_path / "base", "Qwen3Moe")
    probe("create", tmp_path / "base", tmp_path / "adapter", 4, 10, ",".join(MODULES))
    theirs = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").double().eval()(TOKENS).logits.detach()
    file = tmp_path / "adapter/adapter_model.safetensors"
    weights = load_file(file)
    first, second = (f"base_model.model.model.layers.1.mlp.experts.{expert}.up_proj.lora_B.weight" for expert in (0, 1))
    weights[first], weights[second] = weights[second], weights[first]
    save_file(weights, file)
    assert error(ours("logits", tmp_path / "base", tmp_path / "adapter", tmp_path), theirs) > 1e-3


@pytest.mark.parametrize("change", [dict(lora_alpha=5), dict(r=4, swap=True)], ids=["scale", "ranks reversed"])
def test_a_planted_fault_is_found(tmp_path, change):
    adapted = trained(base(tmp_path / "base", "Llama"), MODULES)
    adapted.save_pretrained(tmp_path / "adapter")
    theirs = adapted(TOKENS).logits.detach()
    file = tmp_path / "adapter/adapter_config.json"
    if change.pop("swap", False):
        weights = load_file(tmp_path / "adapter/adapter_model.safetensors")
        weights = {name: value.flip(0).contiguous() if "lora_A" in name else value for name, value in weights.items()}
        save_file(weights, tmp_path / "adapter/adapter_model.safetensors")
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    assert error(ours("logits", tmp_path / "base", tmp_path / "adapter", tmp_path), theirs) > 1e-3


# The others are in src/lora/lora_test.cpp; here with the values that PEFT itself writes.
@pytest.mark.parametrize("option, key", [(dict(use_dora=True), "use_dora"), (dict(rank_pattern={"q_proj": 2}), "rank_pattern"),
                                         (dict(modules_to_save=["embed_tokens"]), "modules_to_save")])
def test_what_changes_the_mathematics_is_refused(tmp_path, option, key):
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM", **option)
    peft.get_peft_model(base(tmp_path / "base", "Llama"), config).save_pretrained(tmp_path / "adapter")
    result = probe("logits", tmp_path / "base", tmp_path / "adapter", "none", "none", check=False)
    assert result.returncode == 2 and key in result.stderr
