"""Our models and transformers' own, from the same directories: logits, loss and gradients."""
import json
import os
import pathlib
import subprocess

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, Qwen2Config,
                          Qwen2ForCausalLM, Qwen3Config, Qwen3ForCausalLM)

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release"))
VOCABULARY, FRAGMENTS, LENGTH = 97, 3, 40

# Both sides compute in fp32 and add in different orders. The logits pass through some 20 products and sums of up
# to 100 terms; each rounds at 6e-8 of its size: well below 1e-5 of the logits' root mean square.
TOLERANCE = 1e-5

SMALL = dict(vocab_size=VOCABULARY, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, head_dim=16, max_position_embeddings=64,
             initializer_range=0.2)
ROPE = {
    "linear": dict(rope_type="linear", rope_theta=10000.0, factor=4.0),
    "dynamic": dict(rope_type="dynamic", rope_theta=10000.0, factor=2.0),
    "llama3": dict(rope_type="llama3", rope_theta=500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                   original_max_position_embeddings=32),
    "yarn": dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=16),
    "yarn2": dict(rope_type="yarn", rope_theta=50000.0, factor=8.0, original_max_position_embeddings=32,
                  beta_fast=16.0, beta_slow=2.0, mscale=1.0, mscale_all_dim=0.7, truncate=False),
}
CASES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {}),
    "llama-tied": (LlamaForCausalLM, LlamaConfig, dict(tie_word_embeddings=True)),
    "llama-one-key-head": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=1)),
    "llama-all-heads": (LlamaForCausalLM, LlamaConfig, dict(num_key_value_heads=4)),
    "llama-biases": (LlamaForCausalLM, LlamaConfig, dict(attention_bias=True, mlp_bias=True)),
    "llama-wide-heads": (LlamaForCausalLM, LlamaConfig, dict(head_dim=24, rms_norm_eps=1e-3)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config, {}),
    "qwen2-tied": (Qwen2ForCausalLM, Qwen2Config, dict(tie_word_embeddings=True)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {}),
    "qwen3-biases-tied": (Qwen3ForCausalLM, Qwen3Config, dict(attention_bias=True, tie_word_embeddings=True)),
    "mistral": (MistralForCausalLM, MistralConfig, dict(sliding_window=None)),
    "mistral-wide-window": (MistralForCausalLM, MistralConfig, dict(sliding_window=64)),
    # Longer sequences than max_position_embeddings: the scaling depends on the length.
    "dynamic-beyond": (LlamaForCausalLM, LlamaConfig, dict(rope_parameters=ROPE["dynamic"], max_position_embeddings=24)),
    **{f"rope-{name}": (LlamaForCausalLM, LlamaConfig, dict(rope_parameters=rope)) for name, rope in ROPE.items()},
}


def probe(*arguments):
    return subprocess.run([BUILD / "bin/hf_probe", *map(str, arguments)], capture_output=True, text=True)


def make(case):
    model_class, config_class, changes = CASES[case]
    # transformers fills in rope_parameters in place.
    changes = {key: dict(value) if isinstance(value, dict) else value for key, value in changes.items()}
    torch.manual_seed(0)
    model = model_class(config_class(**{**SMALL, **changes}))
    with torch.no_grad():  # norms and biases away from one and zero, so that leaving one out cannot pass
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model.eval()


def tokens_for(folder):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (FRAGMENTS, LENGTH), generator=generator)
    save_file({"tokens": tokens}, folder / "tokens.safetensors")
    return tokens


def distance(ours, theirs):
    assert ours.shape == theirs.shape
    return ((ours.double() - theirs.double()).abs().max() / theirs.double().square().mean().sqrt()).item()


def ours(folder, directory, verb="logits"):
    done = probe(verb, directory, folder / "tokens.safetensors", folder / "out.safetensors")
    assert done.returncode == 0, done.stderr
    return load_file(folder / "out.safetensors")


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_of_what_transformers_wrote(case, tmp_path):
    model = make(case)
    model.save_pretrained(tmp_path / "model")
    tokens = tokens_for(tmp_path)
    found = ours(tmp_path, tmp_path / "model", "loss")
    out = model(tokens, labels=tokens)
    assert distance(found["logits"], out.logits.detach()) < TOLERANCE
    assert abs(found["loss"].item() - out.loss.item()) < 1e-5 * abs(out.loss.item())
    out.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert {f"gradient {name}" for name in gradients} == {name for name in found if name.startswith("gradient ")}
    for name, gradient in gradients.items():
        error = (found[f"gradient {name}"] - gradient).norm() / gradient.norm()
        assert error < 2e-5, name


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_what_we_wrote(case, tmp_path):
    model_class = CASES[case][0]
    make(case).config.save_pretrained(tmp_path / "config")
    created = probe("create", tmp_path / "config/config.json", tmp_path / "model", 5)
    assert created.returncode == 0, created.stderr
    model, report = model_class.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.float32
    tokens = tokens_for(tmp_path)
    with torch.no_grad():
        theirs = model.eval()(tokens).logits
    assert distance(ours(tmp_path, tmp_path / "model")["logits"], theirs) < TOLERANCE


def test_shards_are_read(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    assert (tmp_path / "model/model.safetensors.index.json").exists()
    tokens = tokens_for(tmp_path)
    with torch.no_grad():
        assert distance(ours(tmp_path, tmp_path / "model")["logits"], model(tokens).logits) < TOLERANCE


def test_the_comparison_can_fail(tmp_path):
    """One norm weight changed by 1 % is seen; so is a rotary base changed by 1 %."""
    model = make("llama")
    tokens = tokens_for(tmp_path)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[0] *= 1.01
        assert distance(ours(tmp_path, tmp_path / "model")["logits"], model(tokens).logits) > TOLERANCE
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 1.01
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[0] /= 1.01
        assert distance(ours(tmp_path, tmp_path / "model")["logits"], model(tokens).logits) > TOLERANCE


@pytest.mark.parametrize("key, value", [("hidden_act", "gelu"), ("attention_dropout", 0.1),
                                        ("rope_parameters", {"rope_type": "longrope", "rope_theta": 1e4}),
                                        ("quantization_config", {"quant_method": "fp8"}), ("unheard_of", 1),
                                        ("vocab_size", VOCABULARY + 1)])
def test_a_model_that_computes_something_else_is_refused(key, value, tmp_path):
    make("llama").save_pretrained(tmp_path / "model")
    config = json.loads((tmp_path / "model/config.json").read_text())
    config[key] = value
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    tokens_for(tmp_path)
    done = probe("logits", tmp_path / "model", tmp_path / "tokens.safetensors", tmp_path / "out.safetensors")
    assert done.returncode == 2
    assert ("rope_type" if key == "rope_parameters" else key) in done.stderr
