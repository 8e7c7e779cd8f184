"""The step with sharded experts that test_experts_step.py compares: PyTorch's, in fp64, and that of `isograd train`."""
import copy
import functools
import json
import random
import re
from dataclasses import dataclass

import torch
from transformers import (AutoModelForCausalLM, Dots1Config, Dots1ForCausalLM, MixtralConfig, MixtralForCausalLM, Qwen3MoeConfig,
                          Qwen3MoeForCausalLM)

from conftest import ran, rows_of
from run_files import write_run

SEED, LIMIT, PACK, PACKS, RATE, BOUND = 25, 60, 37, 7, 0.5, 1e-9
BOS, EOS = 256, 257

SMALL = dict(vocab_size=259, hidden_size=33, num_attention_heads=6, num_key_value_heads=2, head_dim=10,
             max_position_embeddings=40, initializer_range=0.2)
MODELS = {
    "mixtral": (MixtralForCausalLM, MixtralConfig, dict(num_hidden_layers=2, intermediate_size=21, num_local_experts=5,
                                                        num_experts_per_tok=2)),
    "qwen3-moe": (Qwen3MoeForCausalLM, Qwen3MoeConfig, dict(num_hidden_layers=3, intermediate_size=45, mlp_only_layers=[1],
                                                            moe_intermediate_size=19, num_experts=7, num_experts_per_tok=3)),
    "qwen3-moe-normalised": (Qwen3MoeForCausalLM, Qwen3MoeConfig,
                             dict(num_hidden_layers=2, intermediate_size=45, decoder_sparse_step=2, moe_intermediate_size=17,
                                  num_experts=5, num_experts_per_tok=2, norm_topk_prob=True, tie_word_embeddings=True)),
    # Sigmoid routers: groups, a selection bias, an expert that every token goes through.
    "dots1": (Dots1ForCausalLM, Dots1Config,
              dict(num_hidden_layers=3, intermediate_size=45, moe_intermediate_size=19, n_shared_experts=2, n_routed_experts=9,
                   num_experts_per_tok=2, n_group=3, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
                   first_k_dense_replace=1)),
}
BIAS, BIAS_RATE = "e_score_correction_bias", 0.001  # loss.selection_bias_rate as it is unless set
# No token chooses it (make(), below): its gradient is zero, and weight decay applies.
IDLE = {"mixtral": {"model.layers.0.mlp.experts.gate_up_proj[4]", "model.layers.0.mlp.experts.down_proj[4]"}}


@dataclass(frozen=True)
class Run:
    """The difference between runs. Two ranks have 3 and 4 of the 7 packs, of which one is short."""
    ranks: int = 2
    ep: int = 2
    micro_batch: int = 4  # packs
    max_norm: float = 0  # not clipped
    decay: float = 0


RUNS = {
    "plain": Run(),
    "clipped": Run(max_norm=0.25),
    "accumulating": Run(micro_batch=2),
    "one rank out of packs, clipped, decaying": Run(micro_batch=1, max_norm=0.25, decay=0.1),
    "two copies of each expert": Run(ranks=4, micro_batch=1, max_norm=0.25),
    "three ranks": Run(ranks=3, ep=3, micro_batch=2),
    "without ep": Run(ranks=1, ep=1),
}


def routers_with_bias(model):
    return {name: module for name, module in model.named_modules() if hasattr(module, BIAS)}


def make(name):
    model_class, config_class, changes = MODELS[name]
    torch.manual_seed(SEED)
    model = model_class(config_class(**SMALL, **changes)).double()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms away from one
                parameter.add_(0.3 * torch.randn_like(parameter))
        for router in routers_with_bias(model).values():
            router.e_score_correction_bias.copy_(0.05 * torch.randn(router.num_experts))
        if name in IDLE:  # what all tokens have in common contributes against the first layer's last expert, and for none
            first = model.model.layers[0]
            model.model.embed_tokens.weight[:, 0] = 0.5
            first.self_attn.o_proj.weight[0] = 0
            first.post_attention_layernorm.weight[0] = 1
            first.mlp.gate.weight[-1] = 0
            for layer in model.model.layers:
                layer.mlp.gate.weight[:, 0] = 0
            first.mlp.gate.weight[-1, 0] = -40
    model.config._experts_implementation = "eager"  # its grouped products have no fp64
    return model.eval()


def documents_of(packs):
    """Documents of a short pack less than `packs`: some longer than a pack, some of one letter."""
    rng, left, documents = random.Random(SEED), PACK * packs - 20, []
    while left > 0:
        length = min(rng.choice((3, 4, 11, 23, 40, 83)), left)
        if left - length in (1, 2):  # no room for marks and a letter
            length = left
        documents.append("".join(rng.choice("abcdefgh ") for _ in range(length - 2)))
        left -= length
    assert left == 0 and max(map(len, documents)) > 2 * PACK
    return documents


@dataclass
class Part:
    """Tokens [begin, end) of a document, on a rank."""
    rank: int
    micro_batch: int
    document: int
    begin: int
    end: int


class Gradients:
    """Gradients of the mean over the step's targets, by part of a document, and summed as asked for."""

    def __init__(self, model, documents, parts):
        self.parameters = dict(model.named_parameters())
        self.parts, self.by_part, self.loss = parts, [], 0.0
        self.choices = {name: torch.zeros(router.num_experts) for name, router in routers_with_bias(model).items()}
        hooks = [router.register_forward_hook(functools.partial(self.count, name))
                 for name, router in routers_with_bias(model).items()]
        tokens = [[BOS, *text.encode(), EOS] for text in documents]
        # The last token of a part predicts the document's next one, wherever that lies.
        targets = [torch.tensor(tokens[part.document][part.begin + 1:part.end + 1], dtype=torch.long)
                   for part in parts]
        self.targets = sum(map(len, targets))
        for part, own in zip(parts, targets, strict=True):
            model.zero_grad()
            inputs = torch.tensor([tokens[part.document][part.begin:part.end]])
            logits = model(inputs).logits[0, :len(own)]
            loss = torch.nn.functional.cross_entropy(logits, own, reduction="sum") / self.targets
            loss.backward()
            self.loss += loss.item()
            self.by_part.append({name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
                                 for name, parameter in self.parameters.items()})
        for hook in hooks:
            hook.remove()

    def count(self, name, router, inputs, outputs):
        self.choices[name] += outputs[2].flatten().bincount(minlength=router.num_experts)

    def total(self, of=lambda part: True):
        chosen = [gradients for part, gradients in zip(self.parts, self.by_part, strict=True) if of(part)]
        return {name: sum(gradients[name] for gradients in chosen) for name in self.parameters}


def is_expert(name):
    return ".experts." in name


def pieces(weights):
    """By name; of stacked experts each by itself, as the others' may be much larger."""
    result = {}
    for name, weight in weights.items():
        if is_expert(name):
            result.update({f"{name}[{expert}]": part for expert, part in enumerate(weight)})
        else:
            result[name] = weight
    return result


def weights_of(model):
    """And selection biases, which are buffers there."""
    return {**{name: parameter.detach().clone() for name, parameter in model.named_parameters()},
            **{f"{name}.{BIAS}": router.e_score_correction_bias.clone() for name, router in routers_with_bias(model).items()}}


def step_of_pytorch(model, gradients, run, choices, norm_of=None):
    """Weights and the norm. `choices` of the whole step, by router with a selection bias and expert. `norm_of`: other gradients,
    whose norm is taken instead (a fault)."""
    model = copy.deepcopy(model)
    for name, parameter in model.named_parameters():
        parameter.grad = gradients[name].clone()
    norm = torch.nn.utils.get_total_norm((norm_of or gradients).values())
    if run.max_norm > 0:
        torch.nn.utils.clip_grads_with_norm_(model.parameters(), run.max_norm, norm)
    decays = [[p for p in model.parameters() if (p.dim() > 1) == matrix] for matrix in (True, False)]
    torch.optim.SGD([{"params": decays[0], "weight_decay": run.decay}, {"params": decays[1], "weight_decay": 0}],
                    lr=RATE).step()
    for name, router in routers_with_bias(model).items():  # up where an expert got less than the mean
        router.e_score_correction_bias.add_(torch.sign(choices[name].mean() - choices[name]) * BIAS_RATE)
    return weights_of(model), norm.item()


@dataclass
class Step:
    """Differences by name, a stacked expert's by itself."""
    weights: dict  # largest of any weight
    steps: dict  # of the step, relative to the reference's

    @classmethod
    def compare(cls, before, found, expected):
        assert before.keys() == found.keys() == expected.keys()
        weights, steps = {}, {}
        for (name, start), ours, theirs in zip(pieces(before).items(), pieces(found).values(), pieces(expected).values(),
                                               strict=True):
            assert ours.dtype == theirs.dtype == torch.float64 and ours.shape == theirs.shape
            weights[name] = (ours - theirs).abs().max().item()
            own, off = (start - theirs).norm().item() / RATE, (ours - theirs).norm().item() / RATE
            rounding = 2 ** -53 * start.norm().item() / RATE
            assert own == 0 or rounding < BOUND / 10 * own, f"{name}: too small a step to compare"
            steps[name] = off / own if own > 0 else 0.0 if off == 0 else float("inf")
        return cls(weights, steps)

    def largest(self):
        return max(self.weights.values()), max(self.steps.values())

    def beyond(self):
        return {name: (self.weights[name], self.steps[name]) for name in self.steps
                if max(self.weights[name], self.steps[name]) > BOUND}


class Place:
    """Runs and references, each made once."""

    def __init__(self, folder):
        self.folder = folder
        self.documents = documents_of(PACKS)
        (folder / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in self.documents))

    @functools.cache
    def model(self, name):
        model = make(name)
        model.save_pretrained(self.folder / name)
        return model

    def config(self, name, run, backend):
        self.model(name)
        label = "-".join(map(str, (name, backend, *vars(run).values())))
        path = write_run(self.folder / f"{label}.toml", {
            "run": {"directory": f"{{folder}}/{label}", "seed": SEED, "peak_tflops": 1},
            "data": {"text": ["{folder}/text.jsonl"], "cache": "{folder}/cache", "pack_length": PACK, "validation_fraction": 0},
            "batch": {"packs_per_step": PACKS, "packs_per_micro_batch": run.micro_batch},
            "model": {"load": f"{{folder}}/{name}"},
            "train": {"steps": 1, "dtype": "float64", "max_norm": run.max_norm, "evaluate_every": 0},
            "optimizer": {"kind": "sgd", "weight_decay": run.decay}, "schedule": {"kind": "constant", "peak": RATE, "warmup": 0},
            "parallel": {"ep": run.ep, "backend": backend, "timeout_seconds": 20}, "verify": {"at_end": False},
            "sample": {"tokens": 0}})
        return path, self.folder / label

    @functools.cache
    def train(self, name, run, backend):
        """The weights that it saved, as transformers loads them, and the line of its log."""
        path, directory = self.config(name, run, backend)
        ran("train", path, "--ranks", run.ranks, limit=LIMIT)
        (checkpoint,) = (directory / "checkpoints").glob("step-*")
        model, report = AutoModelForCausalLM.from_pretrained(checkpoint, dtype="auto", output_loading_info=True)
        assert type(model) is MODELS[name][0] and model.dtype == torch.float64
        assert not any(report.values()), report
        (row,) = rows_of(directory)
        return weights_of(model), row

    @functools.cache
    def parts(self, run):
        path, _ = self.config("mixtral", run, "shm")
        shown = ran("data", "show", path, "--step", 1, "--ranks", run.ranks)
        found, parts = re.search(r"^step 1: step 1 of (\d+) of epoch 1$", shown.stdout, re.M), []
        assert found[1] == "1", shown.stdout
        for line in shown.stdout.splitlines()[1:]:
            if pack := re.fullmatch(r"pack \d+: rank (\d+), micro-batch (\d+), \d+ tokens, \d+ targets", line):
                rank, micro_batch = map(int, pack.groups())
                continue
            document, begin, last, length, text = re.fullmatch(r"  document (\d+), tokens (\d+) to (\d+) of (\d+): (.*)",
                                                               line).groups()
            part = Part(rank, micro_batch, int(document), int(begin), int(last) + 1)
            whole = self.documents[part.document]
            assert int(length) == len(whole) + 2
            assert text == whole[max(part.begin - 1, 0):part.end - 1], line  # after the mark of its beginning
            parts.append(part)
        # The epoch is one step: every token once.
        covered = sorted((part.document, token) for part in parts for token in range(part.begin, part.end))
        assert covered == [(i, token) for i, text in enumerate(self.documents) for token in range(len(text) + 2)]
        return parts

    @functools.cache
    def gradients(self, name, run):
        if run != RUNS["plain"]:  # the same parts, elsewhere
            plain = copy.copy(self.gradients(name, RUNS["plain"]))
            places = {(part.document, part.begin, part.end): part for part in self.parts(run)}
            plain.parts = [places.pop((part.document, part.begin, part.end)) for part in plain.parts]
            assert not places
            return plain
        return Gradients(self.model(name), self.documents, self.parts(run))

    def differences(self, name, run, backend, gradients, norm_of=None):
        choices = self.gradients(name, run).choices
        expected, norm = step_of_pytorch(self.model(name), gradients, run, choices, norm_of)
        found, row = self.train(name, run, backend)
        return Step.compare(weights_of(self.model(name)), found, expected), norm, row


