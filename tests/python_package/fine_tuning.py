"""python fine_tuning.py [CASE ...]: steps of PEFT's adapters and of TRL's trainers under isograd, on two ranks; as JSON, by case and rank.

Recipes of trainers are run as docs/python_prove.md has them, from the page.
"""
import contextlib
import json
import os
import pathlib
import sys
import tempfile
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "tests/trials"))
os.environ.update(ACCELERATE_USE_CPU="true", LOCAL_WORLD_SIZE="2", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1",
                  TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")

import accelerate  # noqa: E402
import datasets  # noqa: E402
import peft  # noqa: E402
import tokenizers  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
import torch.nn as nn  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import transformers  # noqa: E402
import transformers.models.mixtral.modeling_mixtral as mixtral  # noqa: E402
import transformers_loops  # noqa: E402
import trl  # noqa: E402
from model_and_data import documents, id_of, make_model, padded  # noqa: E402
from ranks import on_ranks  # noqa: E402
from torch.distributed.fsdp import fully_shard, FullyShardedDataParallel  # noqa: E402
from torch.distributed.fsdp.wrap import ModuleWrapPolicy  # noqa: E402
from table import Cell  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402
from transformers.models.llama.modeling_llama import LlamaDecoderLayer  # noqa: E402

import isograd  # noqa: E402
from isograd.trainers import rows  # noqa: E402
from isograd.trainers.transformers import causal_lm_loss, StepCheck  # noqa: E402

CELL = Cell("trl", 2, 2, "padded", "DDP")
ONE, FOUR = (Cell("trl", 2, accumulation, "padded", "DDP") for accumulation in (1, 4))
ADAPTERS = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False}
CASES = {}


def case(*names):
    """The function makes the case of each name, which it is given."""
    def keep(make):
        CASES.update((name, make) for name in names)
        return make
    return keep


def adapted(model=None, **more):
    """With adapters in the attention that are not zero."""
    torch.manual_seed(5)
    return peft.get_peft_model(model or make_model(), peft.LoraConfig(**ADAPTERS, **more))


def mine():
    """This rank's two micro-batches of rows."""
    rank = dist.get_rank()
    return [rows(padded(documents(CELL)[at:at + 2])) for at in (4 * rank, 4 * rank + 2)]


def step_of(model, optimizer, wrong, reduce=None):
    """Two micro-batches, of whose mean loss over all targets `reduce` sums the gradient over ranks; wrong: each rank's own mean."""
    batch = mine()
    count = torch.tensor(float(sum((row["labels"][:, 1:] != -100).sum() for rows in batch for row in rows)))
    if not wrong:
        dist.all_reduce(count)
        count /= 2  # ranks are averaged
    optimizer.zero_grad()
    all_rows = [row for micro in batch for row in micro]
    for row in all_rows:
        waits = isinstance(model, DistributedDataParallel) and row is not all_rows[-1]
        with model.no_sync() if waits else contextlib.nullcontext():
            (causal_lm_loss(model, row).sum() / count).backward()
    if reduce:
        reduce(model)
    optimizer.step()


def watched(model, wrong=False, reduce=None, make=None):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    with isograd.watch(model, optimizer, micro_batches=mine(), loss=causal_lm_loss, make_model=make) as step:
        step_of(model, optimizer, wrong, reduce)
    return step.verdict


@case("lora_ddp", "lora_ddp_rank_means")
def lora_ddp(name):
    return watched(DistributedDataParallel(adapted()), name.endswith("means"))


def sharded(model):
    for block in model.get_submodule("base_model.model.model" if hasattr(model, "peft_config") else "model").layers:
        fully_shard(block)
    return fully_shard(model)


@case("lora_fsdp2", "lora_fsdp2_rank_means")
def lora_fsdp2(name):
    return watched(sharded(adapted()), name.endswith("means"), make=adapted)


def flat(model, **more):
    return FullyShardedDataParallel(model, auto_wrap_policy=ModuleWrapPolicy({LlamaDecoderLayer}), device_id=torch.device("cpu"), **more)


@case("lora_fsdp1", "lora_fsdp1_rank_means")
def lora_fsdp1(name):
    return watched(flat(adapted(), use_orig_params=True), name.endswith("means"), make=adapted)


def averaged(model):
    for p in model.parameters():
        if p.requires_grad:
            dist.all_reduce(p.grad)
            p.grad /= 2


@case("lora_after_fsdp2", "lora_after_fsdp2_not_reduced")
def lora_after_fsdp2(name):
    """Adapters that come after sharding belong to no shard, and FSDP reduces none of their gradients."""
    return watched(adapted(sharded(make_model())), reduce=None if name.endswith("reduced") else averaged, make=adapted)


@case("lora_after_fsdp1", "lora_after_fsdp1_not_reduced")
def lora_after_fsdp1(name):
    model = adapted(flat(make_model(), use_orig_params=True))
    for own, p in model.named_parameters():
        p.requires_grad_("lora_" in own)  # PEFT freezes adapters in a model that is flat already
    return watched(model, reduce=None if name.endswith("reduced") else averaged, make=adapted)


def with_layers(make, seed=1):
    """A model whose attention's layers are others with the same weights: make(linear) -> empty."""
    model = make_model(seed=seed)
    for block in model.model.layers:
        for part in ("q_proj", "k_proj", "v_proj", "o_proj"):
            old = getattr(block.self_attn, part)
            new = make(old)
            new.load_state_dict(old.state_dict())
            setattr(block.self_attn, part, new.to("cpu"))  # which quantises
    return model


@case("qlora", "qlora_rank_means", "qlora_bf16", "qlora_fsdp2", "qlora_fsdp2_another_base", "qlora_8_bits")
def qlora(name):
    from bitsandbytes.nn import Linear4bit, Linear8bitLt

    def four_bits(old):
        return Linear4bit(old.in_features, old.out_features, bias=False, quant_type="nf4", compress_statistics=True,
                          compute_dtype=torch.bfloat16 if "bf16" in name else torch.float32)

    if "8_bits" in name:
        return watched(adapted(with_layers(lambda old: Linear8bitLt(old.in_features, old.out_features, False, has_fp16_weights=False))))
    model = with_layers(four_bits)
    assert model.model.layers[0].self_attn.q_proj.weight.dtype == torch.uint8
    if "fsdp2" in name:
        return watched(sharded(adapted(model)), make=lambda: adapted(with_layers(four_bits, 2 if name.endswith("base") else 1)))
    if "bf16" in name:
        model = model.to(torch.bfloat16)
    return watched(DistributedDataParallel(adapted(model)), name.endswith("means"))


@case("torchao", "torchao_rank_means", "torchao_activations")
def torchao(name):
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, Int8WeightOnlyConfig, quantize_
    model = make_model()
    quantize_(model, (Int8DynamicActivationInt8WeightConfig if name.endswith("activations") else Int8WeightOnlyConfig)(),
              filter_fn=lambda module, name: name.endswith(("q_proj", "v_proj", "up_proj")))
    assert type(model.model.layers[0].mlp.up_proj.weight.data).__module__.startswith("torchao.")
    # DDP would broadcast the base from rank 0 in views that torchao's tensors have none of.
    return watched(DistributedDataParallel(adapted(model), init_sync=False), name.endswith("means"))


# ---- trainers ----

def recipe(trainer):
    """The code of the page for it, up to train(), with what the recipes begin with."""
    section = (ROOT / "docs/python_prove.md").read_text().split("\n## Fine-tuning\n")[1].split("\n## ")[0]
    blocks = [part.split("\n```")[0] for part in section.split("```python\n")[1:]]
    begin = blocks[0].split("\nbefore = ")[0]
    return begin + "\n" + next(block for block in blocks if f"= {trainer}(" in block).replace(begin, "").split("trainer.train()")[0]


def tokenizer():
    words = {"[PAD]": 0, "[EOS]": 1, **{str(i): i for i in range(2, 64)}}
    own = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[PAD]"))
    own.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=own, pad_token="[PAD]", eos_token="[EOS]")


def preferences(count=16):
    """Prompts with a chosen and a rejected answer, of other lengths."""
    generator = torch.Generator().manual_seed(9)

    def text():
        return " ".join(str(2 + int(i)) for i in torch.randint(0, 62, (int(torch.randint(3, 20, (1,), generator=generator)),),
                                                               generator=generator))
    return datasets.Dataset.from_list([{"prompt": text() + " ", "chosen": text() + " ", "rejected": text() + " "} for _ in range(count)])


def arguments(kind, cell=CELL, **more):
    if kind is not transformers.TrainingArguments:  # whose defaults TRL changes
        more.update(bf16=False, gradient_checkpointing=False)
    return transformers_loops.arguments(cell, tempfile.gettempdir(), kind, **more)


def checked(source, **names):
    """The verdict of a recipe."""
    names.update(tokenizer=tokenizer())
    exec(source.replace("samples=pairs", f"samples=pairs, step={names.get('step', 1)}"), names)
    trainer = names["trainer"]
    trainer.args.max_steps = names.get("step", 1)
    trainer.loss_is_scaled_for_ga = names.get("scaled")  # True: micro-batches' means are summed
    trainer.train()
    return names["check"].verdict


@case("dpo", "dpo_new_adapter", "dpo_old_adapter", "dpo_old_adapter_told_as_new", "dpo_micro_batches_summed", "dpo_wrong_beta", "dpo_and_sft")
def dpo(name):
    source, more, made = recipe("DPOTrainer"), {}, {}
    model, reference = make_model(), make_model()
    with torch.no_grad():
        for p in reference.parameters():
            p += 0.02 * torch.randn_like(p)
    if "adapter" in name:
        reference = None
        before = 'use_adapter(model, "ref")' if name == "dpo_old_adapter" else "model.disable_adapter()"
        source = source.replace("torch.no_grad():  ", f"torch.no_grad(), {before}:  ").replace("(before,", "(model,").replace(
            "before = copy.deepcopy(reference).double()", "from trl.trainer.utils import use_adapter")
        if name == "dpo_new_adapter":
            source = source.replace("args=arguments", "args=arguments, peft_config=peft_config")
            made["peft_config"] = peft.LoraConfig(**ADAPTERS)
        else:
            model = adapted(model)
    if name == "dpo_and_sft":
        page = (ROOT / "docs/python_prove.md").read_text()
        terms = page.split("```python\ndef chosen_tokens")[1].split("\n```")[0]
        source = f"import isograd, torch\nimport torch.nn.functional as F\ndef chosen_tokens{terms}\n" + source.replace(
            "samples=pairs)", "samples=pairs, terms=terms)")
        more = {"loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 1.0]}
    return checked(source, model=model, reference=reference, dataset=preferences(), beta=0.2 if name.endswith("beta") else 0.1, **made,
                   scaled=True if name.endswith("summed") else None, step=2 if "old" in name else 1,
                   arguments=arguments(trl.DPOConfig, FOUR if name.endswith("summed") else CELL, beta=0.1, **more))


@case("reward", "reward_centred", "reward_lora", "reward_micro_batches_summed", "reward_sampler_pads")
def reward(name):
    source, more, count = recipe("RewardTrainer"), {}, 16
    torch.manual_seed(1)
    model = transformers.LlamaForSequenceClassification(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=192, bos_token_id=1, eos_token_id=1, pad_token_id=0, num_labels=1, use_cache=False))
    if name == "reward_lora":
        model = adapted(model, task_type="SEQ_CLS")
    if name == "reward_centred":
        source = source.replace("rejected), 1", "rejected) + 0.01 * (chosen + rejected) ** 2, 1")
        more = {"center_rewards_coefficient": 0.01}
    if name == "reward_sampler_pads":  # the default: one pair comes twice
        count, source = 7, source.replace("samples=pairs)", "samples=pairs, ids=lambda pair: id_of(pair[0]))")
    return checked(source, model=model, dataset=preferences(count), id_of=id_of, scaled=True if name.endswith("summed") else None,
                   arguments=arguments(trl.RewardConfig, FOUR if name.endswith("summed") else CELL, disable_dropout=True, **more))


@case("sft_lora", "sft_lora_by_rank", "sft_dft", "sft_dft_by_rank", "sft_smoothed", "sft_smoothed_by_rank", "sft_packed_lora",
      "sft_dft_told_as_nll")
def sft(name):
    more = {"loss_type": "dft"} if "dft" in name else {"label_smoothing_factor": 0.1} if "smoothed" in name else {}
    if name.endswith("by_rank"):
        more["average_tokens_across_devices"] = False
    trainer = trl.SFTTrainer(adapted() if "lora" in name else make_model(), arguments(
        trl.SFTConfig, packing="packed" in name, max_length=64, **more), train_dataset=datasets.Dataset.from_list(documents(CELL) * 4),
        processing_class=tokenizer())
    return of_trainer(trainer, **({"loss": causal_lm_loss} if name.endswith("nll") else {}))


def of_trainer(trainer, **options):
    check = StepCheck(trainer, **options)
    trainer.train()
    return check.verdict


def trainer_of(model, kind=transformers.Trainer, **more):
    return kind(model, arguments(transformers.TrainingArguments, **more), train_dataset=documents(CELL), data_collator=padded)


@case("trainer_lora", "trainer_lora_by_rank", "trainer_smoothed", "trainer_smoothed_by_rank")
def trainer(name):
    more = {"label_smoothing_factor": 0.1} if "smoothed" in name else {}
    return of_trainer(trainer_of(adapted() if "lora" in name else make_model(),
                                 average_tokens_across_devices=not name.endswith("by_rank"), **more))


@case("kto", "grpo", "rloo", "dpo_without_a_loss", "a_compute_loss_func")
def refused(name):
    pairs = preferences()
    if name == "a_compute_loss_func":
        trainer = trainer_of(make_model())
        trainer.compute_loss_func = lambda outputs, labels, num_items_in_batch: outputs.logits.sum()
        return StepCheck(trainer)
    if name == "dpo_without_a_loss":
        return StepCheck(trl.DPOTrainer(make_model(), make_model(), args=arguments(trl.DPOConfig), train_dataset=pairs,
                                        processing_class=tokenizer()))
    if name == "kto":
        unpaired = datasets.Dataset.from_list([{"prompt": one["prompt"], "completion": one["chosen"], "label": bool(i % 2)}
                                               for i, one in enumerate(pairs)])
        return StepCheck(trl.KTOTrainer(make_model(), make_model(), args=arguments(trl.KTOConfig), train_dataset=unpaired,
                                        processing_class=tokenizer()), loss=causal_lm_loss)
    kind, config = (trl.GRPOTrainer, trl.GRPOConfig) if name == "grpo" else (trl.RLOOTrainer, trl.RLOOConfig)
    return StepCheck(kind(adapted(), reward_funcs=lambda completions, **_: [0.0] * len(completions),
                          args=arguments(config, num_generations=2), train_dataset=pairs.select_columns("prompt"),
                          processing_class=tokenizer()), loss=causal_lm_loss)


# ---- experts, and statistics of the batch ----

def experts(implementation="eager", **more):
    torch.manual_seed(1)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=192, bos_token_id=1, eos_token_id=1, pad_token_id=0,
        use_cache=False, **more)
    config._experts_implementation = implementation
    return transformers.MixtralForCausalLM(config)


def balanced_over_ranks(logits, experts, top, mask):
    """The load balance with each expert's share of the tokens of all ranks, as the rank's part of a sum that DDP averages."""
    kept = [layer[mask.flatten() == 1].softmax(-1) for layer in logits]
    probabilities = torch.cat(kept)
    chosen = F.one_hot(probabilities.topk(top).indices, experts).sum((0, 1)).float()
    rows = torch.tensor(float(len(probabilities)))
    for each in (chosen, rows):
        dist.all_reduce(each)
    return 2 * experts * (chosen / rows * probabilities.sum(0) / rows).sum()


class OverRanks(trl.SFTTrainer):
    def compute_loss(self, *arguments, **more):
        with mock.patch.object(mixtral, "load_balancing_loss_func", balanced_over_ranks):
            return super().compute_loss(*arguments, **more)


@case("experts", "experts_balanced", "experts_balanced_by_rank", "experts_balanced_by_micro_batch", "experts_of_transformers",
      "experts_grouped", "experts_grouped_told")
def mixture(name):
    told = {"make_model": experts} if name == "experts_grouped_told" else {}
    if name == "experts_of_transformers":
        return of_trainer(trainer_of(experts(output_router_logits=True, router_aux_loss_coef=0.5)))
    cell = CELL if name.endswith("micro_batch") else ONE
    trainer = (OverRanks if name == "experts_balanced" else trl.SFTTrainer)(experts("grouped_mm" if "grouped" in name else "eager"), arguments(
        trl.SFTConfig, cell, router_aux_loss_coef=0.5 if "balanced" in name else 0.0),
        train_dataset=datasets.Dataset.from_list(documents(CELL)), processing_class=tokenizer())
    return of_trainer(trainer, **told)


class Synchronised(nn.BatchNorm1d):
    """BatchNorm with the statistics of all ranks, as SyncBatchNorm has them on GPUs."""

    def forward(self, x):
        from torch.distributed.nn.functional import all_reduce
        n = dist.get_world_size()
        mean = all_reduce(x.mean(0)) / n
        spread = all_reduce((x - mean).square().mean(0)) / n
        return (x - mean) / (spread + self.eps).sqrt() * self.weight + self.bias


class Normalised(nn.Module):
    """With batch norm, in the shape that transformers' Trainer takes."""

    def __init__(self, norm=nn.BatchNorm1d):
        super().__init__()
        torch.manual_seed(1)
        self.up, self.norm, self.down = nn.Linear(6, 16), norm(16), nn.Linear(16, 3)

    def forward(self, x, labels):
        logits = self.down(torch.tanh(self.norm(self.up(x))))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def of_rows(model, samples):
    """The mean loss of all rows at once."""
    x, labels = (torch.cat([sample[key] for sample in samples]) for key in ("x", "labels"))
    return F.cross_entropy(model(x, labels)["logits"], labels)


@case("batch_norm", "batch_norm_frozen", "batch_norm_frozen_micro_batches_summed", "batch_norm_of_all_ranks", "batch_norm_of_a_rank",
      "batch_norm_of_a_micro_batch")
def normalised(name):
    generator = torch.Generator().manual_seed(2)
    data = [{"x": torch.randn(6, generator=generator), "labels": int(torch.randint(0, 3, (1,), generator=generator))} for _ in range(32)]
    model, told = Normalised(Synchronised if "all_ranks" in name or "micro" in name and "frozen" not in name else nn.BatchNorm1d), {}
    model.eval()  # as from_pretrained() leaves a model: the trainer's first training_step is what trains it
    if "frozen" in name:
        norm = model.norm
        norm.eval().train = lambda mode=True: norm
    if "_of_" in name:
        told = {"loss": of_rows, "mean": "batch", "make_model": Normalised}
    else:
        told = {"loss": lambda model, row: F.cross_entropy(model(**row)["logits"], row["labels"], reduction="none")}
    cell = FOUR if name.endswith("summed") else CELL if name.endswith("micro_batch") else ONE
    trainer = transformers.Trainer(model, arguments(transformers.TrainingArguments, cell), train_dataset=data)
    if name.endswith("summed"):
        trainer.loss_is_scaled_for_ga = True
    return of_trainer(trainer, **told)


def run(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    found = {}
    for name in sys.argv[1:] or CASES:
        try:
            verdict = CASES[name](name)
            found[name] = {"passed": verdict.passed, "said": verdict.findings, "text": str(verdict)}
        except Exception as error:
            import traceback
            traceback.print_exc()
            found[name] = f"{type(error).__name__} {error}"
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=False)
    return found


if __name__ == "__main__":
    output = os.dup(1)  # the libraries print
    os.dup2(2, 1)
    found = on_ranks(2, run, seconds=500)
    with os.fdopen(output, "w") as file:
        json.dump(found, file)
