"""Our models and transformers' own, from the same directories: logits, loss and gradients."""
import functools
import json
import subprocess
import types

import pytest
import torch
from safetensors.torch import load_file, save_file
import transformers
from conftest import BINARY
from fp64_transformers import in_fp64
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

FAMILIES = ("dots1", "llama", "mistral", "mixtral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe")
VOCABULARY, FRAGMENTS, LENGTH = 97, 3, 40

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
    # Its ramp lies between dims 1.1 and 3.5: whole ones, 1 and 4, are another model.
    "yarn-truncate-null": dict(rope_type="yarn", rope_theta=10000.0, factor=4.0, original_max_position_embeddings=353,
                               beta_fast=16.0, truncate=None),
    "yarn-factor-null": dict(rope_type="yarn", rope_theta=10000.0, factor=None, original_max_position_embeddings=16,
                             beta_fast=None, beta_slow=0, mscale=None, mscale_all_dim=0.5),
}
CASES = {
    "llama": ("Llama", {}),
    "llama-tied": ("Llama", dict(tie_word_embeddings=True)),
    "llama-one-key-head": ("Llama", dict(num_key_value_heads=1)),
    "llama-all-heads": ("Llama", dict(num_key_value_heads=4)),
    "llama-biases": ("Llama", dict(attention_bias=True, mlp_bias=True)),
    "llama-wide-heads": ("Llama", dict(head_dim=24, rms_norm_eps=1e-3)),
    "qwen2": ("Qwen2", {}),
    "qwen2-tied": ("Qwen2", dict(tie_word_embeddings=True)),
    "qwen3": ("Qwen3", {}),
    "qwen3-biases-tied": ("Qwen3", dict(attention_bias=True, tie_word_embeddings=True)),
    "mistral": ("Mistral", dict(sliding_window=None)),
    "mistral-wide-window": ("Mistral", dict(sliding_window=64)),
    # Windows that LENGTH tokens just reach.
    "mistral-window": ("Mistral", dict(sliding_window=40)),
    "qwen2-window": ("Qwen2", dict(use_sliding_window=True, sliding_window=40, max_window_layers=1)),
    "qwen3-window": ("Qwen3", dict(use_sliding_window=True, sliding_window=40, max_window_layers=0)),
    # Its row of the embedding has no gradient as an input; tied, it has the output layer's.
    "llama-pad": ("Llama", dict(pad_token_id=5)),
    "llama-pad-tied": ("Llama", dict(pad_token_id=5, tie_word_embeddings=True)),
    "llama-pad-from-the-end": ("Llama", dict(pad_token_id=-1)),
    "qwen2-pad-tied": ("Qwen2", dict(pad_token_id=0, tie_word_embeddings=True)),
    "qwen3-pad": ("Qwen3", dict(pad_token_id=96)),
    "mistral-pad": ("Mistral", dict(pad_token_id=5, sliding_window=None)),
    "mixtral": ("Mixtral", dict(num_local_experts=4)),
    "mixtral-window-top-3": ("Mixtral", dict(num_local_experts=5, num_experts_per_tok=3, sliding_window=40)),
    "qwen2-moe": ("Qwen2Moe", dict(num_experts=5, num_experts_per_tok=2, moe_intermediate_size=24,
                                                           shared_expert_intermediate_size=40)),
    "qwen2-moe-dense-layer": ("Qwen2Moe", dict(num_experts=6, num_experts_per_tok=4, moe_intermediate_size=24, norm_topk_prob=True,
                                   shared_expert_intermediate_size=40, mlp_only_layers=[1])),
    "qwen3-moe": ("Qwen3Moe", dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=24)),
    "qwen3-moe-every-other": ("Qwen3Moe", dict(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
                                   decoder_sparse_step=2, tie_word_embeddings=True)),
    "dots1": ("Dots1", dict(n_routed_experts=5, num_experts_per_tok=2, moe_intermediate_size=24, n_shared_experts=1)),
    "dots1-groups": ("Dots1", dict(n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=24, n_shared_experts=2, n_group=4,
                          topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5, first_k_dense_replace=1,
                          attention_bias=True)),
    # Longer sequences than max_position_embeddings: the scaling depends on the length.
    "dynamic-beyond": ("Llama", dict(rope_parameters=ROPE["dynamic"], max_position_embeddings=24)),
    **{f"rope-{name}": ("Llama", dict(rope_parameters=rope)) for name, rope in ROPE.items()},
}


@functools.cache
def probe_process():
    return subprocess.Popen([BINARY.parent / "hf_probe"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def probe(*arguments):
    process = probe_process()
    process.stdin.write("\t".join(map(str, arguments)).encode() + b"\n")
    process.stdin.flush()
    answer = process.stdout.readline()
    if not answer:
        probe_process.cache_clear()
        pytest.fail(f"hf_probe ended with {process.wait()}")
    status, length = map(int, answer.split())
    return types.SimpleNamespace(returncode=status, stderr=process.stdout.read(length).decode())


def class_of(family, kind="ForCausalLM"):
    return getattr(transformers, family + kind)


def make(case):
    family, changes = CASES[case]
    # transformers fills in rope_parameters in place.
    changes = {key: dict(value) if isinstance(value, dict) else value for key, value in changes.items()}
    torch.manual_seed(0)
    model = class_of(family)(class_of(family, "Config")(**{**SMALL, **changes}))
    with torch.no_grad():  # norms and biases away from one and zero, so that leaving one out cannot pass
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.3 * torch.randn_like(parameter))
        for name, buffer in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.add_(0.3 * torch.randn_like(buffer))
    model.config._experts_implementation = "eager"  # its grouped products have no fp64
    return model.eval()


def tokens_for(folder, pad=None):
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (FRAGMENTS, LENGTH), generator=generator)
    if pad is not None:
        tokens[0, 3] = tokens[1, 7:9] = tokens[2, 0] = pad
    save_file({"tokens": tokens}, folder / "tokens.safetensors")
    return tokens


def distance(ours, theirs):
    assert ours.shape == theirs.shape
    return ((ours.double() - theirs.double()).abs().max() / theirs.double().square().mean().sqrt()).item()


def allowed(theirs, folder, directory):
    """Both compute in fp32 and add in different orders, which costs more on a processor of narrow registers: ours may be
    off from the logits in fp64 (which are theirs in fp64 to 1e-13, below) by four times what transformers is."""
    rounding = distance(theirs.detach(), ours(folder, directory, "logits", "float64")["logits"])
    assert 0 < rounding < 1e-4  # else the files hold other weights, and this says nothing
    return 5 * rounding


def ours(folder, directory, verb="logits", *dtype):
    done = probe(verb, directory, folder / "tokens.safetensors", folder / "out.safetensors", *dtype)
    assert done.returncode == 0, done.stderr
    found = load_file(folder / "out.safetensors")
    for name in [name for name in found if name.endswith("experts.gate_proj")]:  # one tensor in transformers
        up = found.pop(name.replace("gate_proj", "up_proj"))
        found[name.replace("gate_proj", "gate_up_proj")] = torch.cat((found.pop(name), up), dim=1)
    return found


@pytest.mark.parametrize("case", CASES)
def test_logits_and_gradients_of_what_transformers_wrote(case, tmp_path):
    model = make(case)
    model.save_pretrained(tmp_path / "model")
    tokens = tokens_for(tmp_path)
    found = ours(tmp_path, tmp_path / "model", "loss")
    out = model(tokens, labels=tokens)
    assert distance(found["logits"], out.logits.detach()) < allowed(out.logits, tmp_path, tmp_path / "model")
    assert abs(found["loss"].item() - out.loss.item()) < 1e-5 * abs(out.loss.item())
    out.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert {f"gradient {name}" for name in gradients} == {name for name in found if name.startswith("gradient ")}
    for name, gradient in gradients.items():
        error = (found[f"gradient {name}"] - gradient).norm() / gradient.norm()
        assert error < 2e-5, name


@pytest.mark.parametrize("case", CASES)
def test_transformers_loads_what_we_wrote(case, tmp_path):
    make(case).config.save_pretrained(tmp_path / "config")
    created = probe("create", tmp_path / "config/config.json", tmp_path / "model", 5)
    assert created.returncode == 0, created.stderr
    model, report = class_of(CASES[case][0]).from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.float32
    tokens = tokens_for(tmp_path)
    with torch.no_grad():
        theirs = model.eval()(tokens).logits
    assert distance(ours(tmp_path, tmp_path / "model")["logits"], theirs) < allowed(theirs, tmp_path, tmp_path / "model")


def test_transformers_loads_several_files_of_ours(tmp_path):
    case = next(iter(CASES))
    make(case).config.save_pretrained(tmp_path / "config")
    for folder, file_bytes in (("whole", []), ("several", [20000])):
        created = probe("create", tmp_path / "config/config.json", tmp_path / folder, 5, *file_bytes)
        assert created.returncode == 0, created.stderr
    assert len(list((tmp_path / "several").glob("model-*-of-*.safetensors"))) > 2
    several, report = class_of(CASES[case][0]).from_pretrained(tmp_path / "several", output_loading_info=True)
    assert not any(report.values()), report
    whole = class_of(CASES[case][0]).from_pretrained(tmp_path / "whole")
    for (name, theirs), (_, ours) in zip(several.named_parameters(), whole.named_parameters(), strict=True):
        assert torch.equal(theirs, ours), name


# As many roundings as in fp32, whose gradients lie within 2e-5 above, each smaller by the ratio of the units.
TOLERANCE64 = 2e-5 * 2 ** -29


@pytest.fixture
def wide():
    with in_fp64(FAMILIES):
        yield


def gradients_in_fp64(model, tokens):
    """By name: what `hf_probe loss` writes."""
    out = model(tokens, labels=tokens)
    out.loss.backward()
    return {"logits": out.logits.detach(), "loss": out.loss.detach(),
            **{f"gradient {name}": parameter.grad for name, parameter in model.named_parameters()}}


@pytest.mark.parametrize("case", CASES)
def test_in_fp64_every_gradient_is_that_of_transformers(case, wide, tmp_path):
    model = make(case).double()
    model.save_pretrained(tmp_path / "model")
    pad = model.model.embed_tokens.padding_idx
    tokens = tokens_for(tmp_path, pad)
    theirs, found = gradients_in_fp64(model, tokens), ours(tmp_path, tmp_path / "model", "loss", "float64")
    assert found.keys() == theirs.keys()
    for name, value in theirs.items():
        assert found[name].dtype == torch.float64
        assert (found[name] - value).norm() <= TOLERANCE64 * value.norm(), name
    if pad is not None:  # without the row left out the comparison would fail
        row = theirs["gradient model.embed_tokens.weight"][pad]
        model.model.embed_tokens.padding_idx = None
        model.zero_grad()
        other = gradients_in_fp64(model, tokens)["gradient model.embed_tokens.weight"][pad]
        assert (other - row).norm() > 1e-3 * other.norm()
        assert model.config.tie_word_embeddings or not row.any()


@pytest.mark.parametrize("case", [case for case in CASES if "pad" in case or "window" in case])
def test_a_checkpoint_keeps_the_padding_token_and_the_window(case, tmp_path):
    model = make(case)
    model.config.save_pretrained(tmp_path / "config")
    assert probe("create", tmp_path / "config/config.json", tmp_path / "model", 5).returncode == 0
    kept = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    assert kept.model.embed_tokens.padding_idx == model.model.embed_tokens.padding_idx
    for key in ("sliding_window", "layer_types"):
        assert getattr(kept.config, key, None) == getattr(model.config, key, None)


LINEAR = dict(rope_type="linear", factor=2.0)
YARN = dict(rope_type="yarn", factor=4.0, original_max_position_embeddings=16)
ABSENT = object()
CHANGES = {
    **{f"{key} null": {key: None} for key in (
        "hidden_act", "rms_norm_eps", "rope_theta", "tie_word_embeddings", "attention_bias", "mlp_bias",
        "initializer_range", "num_key_value_heads", "head_dim", "attention_dropout", "pretraining_tp",
        "rope_scaling", "rope_parameters", "intermediate_size", "pad_token_id", "bos_token_id", "eos_token_id",
        "sliding_window", "quantization_config")},
    **{f"pad {pad}": dict(pad_token_id=pad) for pad in (0, 96, 97, -1, -97, -98)},
    "harmless": dict(is_llama_config=True, rope_interleaved=False, use_mrope=False, max_length=20, temperature=0.5,
                     model_max_length=16),
    "pretraining_tp 2": dict(pretraining_tp=2),
    "act swish": dict(hidden_act="swish"),
    "yarn": dict(rope_parameters=YARN),
    "yarn finetuned": dict(rope_parameters=YARN | dict(finetuned=True)),
    "yarn truncate null": dict(rope_parameters=ROPE["yarn-truncate-null"]),
    "yarn without factor": dict(rope_parameters={k: v for k, v in YARN.items() if k != "factor"}),
    "yarn factor null": dict(rope_parameters=YARN | dict(factor=None)),
    "yarn original null": dict(rope_parameters=YARN | dict(original_max_position_embeddings=None)),
    "yarn without original": dict(rope_parameters={k: v for k, v in YARN.items() if k[0] != "o"}),
    "yarn betas null": dict(rope_parameters=YARN | dict(beta_fast=None, beta_slow=None)),
    "yarn betas 0": dict(rope_parameters=YARN | dict(beta_fast=0, beta_slow=0)),
    "yarn attention 0": dict(rope_parameters=YARN | dict(attention_factor=0.0)),
    "yarn type null": dict(rope_parameters=YARN | dict(rope_type=None, type="yarn")),
    "yarn theta null": dict(rope_parameters=YARN | dict(rope_theta=None)),
    "linear without factor": dict(rope_parameters=dict(rope_type="linear")),
    "linear factor null": dict(rope_parameters=dict(rope_type="linear", factor=None)),
    "partial null": dict(rope_parameters=dict(rope_type="default", partial_rotary_factor=None)),
    "no type": dict(rope_parameters=dict(rope_theta=5e4)),
    "both, theta in parameters": dict(rope_scaling=LINEAR, rope_parameters=LINEAR | dict(rope_theta=5e5)),
    "both, theta in scaling": dict(rope_scaling=LINEAR | dict(rope_theta=5e5), rope_parameters=LINEAR),
    "both, one theta": dict(rope_scaling=LINEAR | dict(rope_theta=5e5), rope_parameters=LINEAR | dict(rope_theta=5e5)),
    "both, another kind": dict(rope_scaling=LINEAR, rope_parameters=dict(rope_type="default")),
    "both, scaling empty": dict(rope_scaling={}, rope_parameters=LINEAR | dict(rope_theta=5e5)),
    "theta outside": dict(rope_theta=7e4, rope_parameters=LINEAR),
    "theta outside another": dict(rope_theta=7e4, rope_parameters=LINEAR | dict(rope_theta=8e4)),
    "three thetas": dict(rope_theta=7e4, rope_scaling=LINEAR, rope_parameters=LINEAR | dict(rope_theta=8e4)),
    "old form": dict(rope_theta=7e4, rope_scaling=dict(type="linear", factor=2.0), rope_parameters=ABSENT),
    "old form with null": dict(rope_scaling=LINEAR | dict(rope_theta=None), rope_parameters=ABSENT),
}
# Keys in the files of well-known models must not be refused.
ACCEPTED = {"harmless", "pretraining_tp 2", "act swish", "yarn", "yarn finetuned", "yarn truncate null",
            "yarn factor null", "yarn betas null", "no type",
            "num_key_value_heads null", "head_dim null", "rope_scaling null", "rope_parameters null", "pad 0", "pad -1",
            "pad_token_id null", "eos_token_id null", "sliding_window null", "quantization_config null", "old form",
            "both, scaling empty", "both, one theta", "theta outside", "yarn without original"}


@pytest.mark.parametrize("name", CHANGES)
def test_a_config_means_what_it_means_to_transformers_or_is_refused(name, wide, tmp_path):
    model = make("llama-all-heads").double()
    model.save_pretrained(tmp_path / "model")
    file = tmp_path / "model/config.json"
    config = {**json.loads(file.read_text()), **CHANGES[name]}
    if "rope_scaling" in CHANGES[name] or "rope_theta" in CHANGES[name]:
        config["rope_parameters"] = CHANGES[name].get("rope_parameters", ABSENT)
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not ABSENT}))
    tokens = tokens_for(tmp_path)
    try:
        theirs = LlamaForCausalLM(LlamaConfig.from_pretrained(tmp_path / "model")).double().eval()
        theirs.load_state_dict(model.state_dict())
        with torch.no_grad():
            expected = theirs(tokens).logits
    except Exception:  # of any type: assertions, type errors, their own
        expected = None
    done = probe("logits", tmp_path / "model", tmp_path / "tokens.safetensors", tmp_path / "out.safetensors", "float64")
    if done.returncode == 0:
        assert expected is not None, "transformers refuses it"
        assert distance(load_file(tmp_path / "out.safetensors")["logits"], expected) < TOLERANCE64
    else:
        assert done.returncode == 2 and "config.json" in done.stderr, done.stderr
        assert name not in ACCEPTED, done.stderr


def test_shards_are_read(tmp_path):
    model = make("llama")
    model.save_pretrained(tmp_path / "model", max_shard_size="100KB")
    assert (tmp_path / "model/model.safetensors.index.json").exists()
    tokens = tokens_for(tmp_path)
    with torch.no_grad():
        theirs = model(tokens).logits
    assert distance(ours(tmp_path, tmp_path / "model")["logits"], theirs) < allowed(theirs, tmp_path, tmp_path / "model")


def test_the_comparison_can_fail(tmp_path):
    """One norm weight changed by 1 % is seen; so is a rotary base changed by 1 %."""
    model = make("llama")
    tokens = tokens_for(tmp_path)
    model.save_pretrained(tmp_path / "model")
    with torch.no_grad():
        bound = allowed(model(tokens).logits, tmp_path, tmp_path / "model")
        model.model.layers[1].input_layernorm.weight[0] *= 1.01
        assert distance(ours(tmp_path, tmp_path / "model")["logits"], model(tokens).logits) > bound
    config = json.loads((tmp_path / "model/config.json").read_text())
    config["rope_parameters"]["rope_theta"] *= 1.01
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    with torch.no_grad():
        model.model.layers[1].input_layernorm.weight[0] /= 1.01
        assert distance(ours(tmp_path, tmp_path / "model")["logits"], model(tokens).logits) > bound
