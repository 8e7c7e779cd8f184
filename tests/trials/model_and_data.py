"""Models and data of the cells: small models with random weights, and documents, images and sounds of random numbers. Nothing is
downloaded."""
import dataclasses
import zlib
from typing import Any, Callable

import torch
import torch.nn.functional as F
import transformers
from table import MICRO_BATCH
from torch import nn

VOCABULARY, PAD, MASK, LONGEST, CLASSES = 64, 0, 1, 48, 5
MAX_NORM = 0.1  # below the norm of every step here: the clip is on


def llama(kind):
    return kind(transformers.LlamaConfig(
        vocab_size=VOCABULARY, num_labels=1, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=4 * LONGEST, bos_token_id=PAD, eos_token_id=PAD, pad_token_id=PAD,
        use_cache=False))


def gpt2():
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=4 * LONGEST, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=PAD, eos_token_id=PAD, pad_token_id=PAD, use_cache=False))


WIDTH = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
NO_DROPOUT = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)


def bert(kind):
    return kind(transformers.BertConfig(vocab_size=VOCABULARY, max_position_embeddings=4 * LONGEST, num_labels=CLASSES, pad_token_id=PAD,
                                        **WIDTH, **NO_DROPOUT))


def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, dropout_rate=0.0, feed_forward_proj="gated-gelu",
        decoder_start_token_id=PAD, pad_token_id=PAD, use_cache=False))


class Frozen(nn.BatchNorm2d):
    """With its running statistics in training too: those of a micro-batch are none that one device has."""

    def train(self, mode=True):
        return super().train(False)


def segformer():
    model = transformers.SegformerForSemanticSegmentation(transformers.SegformerConfig(
        num_encoder_blocks=2, depths=[1, 1], sr_ratios=[2, 1], hidden_sizes=[16, 32], patch_sizes=[3, 3], strides=[2, 2],
        num_attention_heads=[1, 2], mlp_ratios=[2, 2], decoder_hidden_size=32, num_labels=CLASSES, drop_path_rate=0.0,
        classifier_dropout_prob=0.0, semantic_loss_ignore_index=-100, **NO_DROPOUT))
    model.decode_head.batch_norm.__class__ = Frozen
    model.decode_head.batch_norm.eval()
    return model


def wav2vec2(kind):
    return kind(transformers.Wav2Vec2Config(
        vocab_size=VOCABULARY, num_labels=CLASSES, classifier_proj_size=32, conv_dim=(16, 16), conv_stride=(5, 4), conv_kernel=(10, 4),
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8, num_conv_pos_embedding_groups=4, ctc_loss_reduction="mean", pad_token_id=PAD, apply_spec_augment=False,
        **WIDTH, **dict.fromkeys(("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout", "layerdrop",
                                  "final_dropout"), 0.0)))


def vit():
    return transformers.ViTForImageClassification(transformers.ViTConfig(image_size=16, patch_size=8, num_labels=CLASSES, **WIDTH,
                                                                         **NO_DROPOUT))


# ---- samples: (generator, n) -> what a dataset gives; n is how much of it is a target, 24 or 4 to 47 ----

def tokens(generator, n):
    return {"input_ids": torch.randint(1, VOCABULARY, (n,), generator=generator).tolist()}


def with_classes(generator, n):
    return {**tokens(generator, n), "labels": torch.randint(CLASSES, (n,), generator=generator).tolist()}


def with_masks(generator, n):
    """About a third of the tokens is hidden, one at least."""
    ids = tokens(generator, n)["input_ids"]
    hidden = [i == 0 or draw < 1 / 3 for i, draw in enumerate(torch.rand(n, generator=generator).tolist())]
    return {"input_ids": [MASK if hide else word for word, hide in zip(ids, hidden)],
            "labels": [word if hide else -100 for word, hide in zip(ids, hidden)]}


def with_translation(generator, n):
    """As DataCollatorForSeq2Seq has it, that is given the model."""
    words = tokens(generator, n // 2)["input_ids"]
    return {**tokens(generator, n), "labels": words, "decoder_input_ids": [PAD, *words[:-1]]}


def segmented(generator, n):
    """An image of which n of 32 rows are labelled. The trainer counts all labels except -100, so also SegFormer's own sign for none, 255."""
    labels = torch.randint(CLASSES, (32, 32), generator=generator)
    labels[n:] = -100
    return {"pixel_values": torch.randn(3, 32, 32, generator=generator), "labels": labels}


def spoken(generator, n):
    return {"input_values": torch.randn(240, generator=generator), "labels": tokens(generator, n // 8)["input_ids"]}


def of_class(key, *shape):
    return lambda generator, n: {key: torch.randn(*shape, generator=generator), "labels": torch.randint(CLASSES, (), generator=generator)}


def preferred(generator, n):
    """A prompt, with a completion of n tokens that is preferred to another one."""
    words = {key: tokens(generator, size)["input_ids"] for key, size in (("prompt", 3), ("chosen", n), ("rejected", n // 2 + 1))}
    return {key: "".join(f"{word} " for word in some) for key, some in words.items()}


def rewarded(generator, n):
    return {"chosen_ids": tokens(generator, n)["input_ids"], "rejected_ids": tokens(generator, n // 2 + 1)["input_ids"]}


# ---- losses: (model, sample) -> of each target ----

def outputs(model, sample):
    return model(**{key: value for key, value in sample.items() if key != "labels"}).logits


def by_target(model, sample):
    logits, labels = outputs(model, sample), sample["labels"]
    return F.cross_entropy(logits[labels != -100], labels[labels != -100], reduction="none")


def by_pixel(model, sample):
    labels = sample["labels"]
    logits = F.interpolate(outputs(model, sample), size=labels.shape[-2:], mode="bilinear", align_corners=False).movedim(1, -1)
    return F.cross_entropy(logits[labels != -100], labels[labels != -100], reduction="none")


def by_sound(model, sample):
    """A sample's is divided by its own number of labels."""
    words = sample["labels"][sample["labels"] != -100]
    steps = outputs(model, sample).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(steps, words[None], (len(steps),), (len(words),), blank=PAD, reduction="none") / len(words)


def completion(model, sample):
    """log p of the completions in rows of one prompt."""
    taken = outputs(model, {key: sample[key] for key in ("input_ids", "attention_mask")})[:, :-1].log_softmax(-1).gather(
        -1, sample["input_ids"][:, 1:, None])
    return (taken[..., 0] * sample["completion_mask"][:, 1:]).sum(1)


def by_preference(model, sample, beta=0.1):
    """The loss of DPO (arXiv 2305.18290, equation 7)."""
    with torch.no_grad():
        before = completion(make_model(seed=2).to(next(model.parameters()).dtype), sample)
    chosen, rejected = completion(model, sample) - before
    return -F.logsigmoid(beta * (chosen - rejected))[None]


def by_reward(model, sample):
    chosen, rejected = outputs(model, sample)[:, 0]
    return -F.logsigmoid(chosen - rejected)[None]


def pairs(batch):
    """A micro-batch of TRL has all that is chosen first and all that is rejected after it."""
    half = len(batch["input_ids"]) // 2
    return [{key: rows[i::half] for key, rows in batch.items() if isinstance(rows, torch.Tensor)} for i in range(half)]


@dataclasses.dataclass(frozen=True)
class Task:
    make: Callable[[], nn.Module]
    sample: Callable[[torch.Generator, int], dict[str, Any]]
    loss: Callable[[nn.Module, dict[str, Any]], torch.Tensor] | None = None  # None: causal_lm_loss
    cut: Callable[[dict[str, Any]], list[dict[str, Any]]] | None = None  # a micro-batch into samples; None: its rows


TASKS = {"llama": Task(lambda: llama(transformers.LlamaForCausalLM), tokens),
         "dpo": Task(lambda: llama(transformers.LlamaForCausalLM), preferred, by_preference, pairs),
         "reward": Task(lambda: llama(transformers.LlamaForSequenceClassification), rewarded, by_reward, pairs), "gpt2": Task(gpt2, tokens),
         "bert-tokens": Task(lambda: bert(transformers.BertForTokenClassification), with_classes, by_target),
         "bert-masked": Task(lambda: bert(transformers.BertForMaskedLM), with_masks, by_target),
         "t5": Task(t5, with_translation, by_target), "segformer": Task(segformer, segmented, by_pixel),
         "wav2vec2": Task(lambda: wav2vec2(transformers.Wav2Vec2ForSequenceClassification), of_class("input_values", 240), by_target),
         "wav2vec2-ctc": Task(lambda: wav2vec2(transformers.Wav2Vec2ForCTC), spoken, by_sound),
         "vit": Task(vit, of_class("pixel_values", 3, 16, 16), by_target)}


def make_model(task="llama", seed=1):
    torch.manual_seed(seed)
    return TASKS[task].make()


def documents(cell):
    """[{"input_ids": [...]}, ...], or what the task has: two steps of them; with a remainder one step and two micro-batches."""
    a_step = cell.micro_batch * cell.ranks * cell.accumulation
    count = a_step + 2 * MICRO_BATCH if cell.data == "remainder" else 2 * a_step
    if cell.data == "packed" and cell.trainer.startswith("trl"):
        count *= 4  # some of them make a row
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(4, LONGEST, (count,), generator=generator).tolist()
    if cell.data in ("even", "remainder"):
        lengths = [24] * count
    return [TASKS[cell.row.task].sample(generator, n) for n in lengths]


def padded(samples):
    """A micro-batch [samples, longest], filled up on the right; what fills it is no target."""
    columns = {key: [torch.as_tensor(sample[key]) for sample in samples] for key in samples[0]}
    if "input_ids" in columns:
        columns.setdefault("labels", columns["input_ids"])
        columns["attention_mask"] = [torch.ones_like(row) for row in columns["input_ids"]]
    pad = torch.nn.utils.rnn.pad_sequence
    return {key: pad(rows, batch_first=True, padding_value=-100 if key == "labels" else PAD) if rows[0].dim() == 1 else torch.stack(rows)
            for key, rows in columns.items()}


def collator(data):
    """Documents -> a micro-batch; packed: one row of all documents, by transformers' own collator."""
    return transformers.DataCollatorWithFlattening() if data == "packed" else padded


def id_of(sample):
    """A number for the document: one that comes twice is one sample."""
    kept = sample["input_ids"][sample["attention_mask"] == 1] if "attention_mask" in sample else next(
        sample[key] for key in ("input_ids", "pixel_values", "input_values") if key in sample)
    return zlib.crc32(kept.flatten().numpy().tobytes())
