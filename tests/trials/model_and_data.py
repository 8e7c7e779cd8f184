"""Model and data of every cell: a small Llama or GPT-2 with random weights, and documents of random tokens. Nothing is downloaded."""
import dataclasses
import zlib

import torch
import transformers

VOCABULARY, PAD, LONGEST = 64, 0, 48
MICRO_BATCH = 2  # documents; one where `data` is "uneven"
MAX_NORM = 0.1  # below the norm of every step here: the clip is on


@dataclasses.dataclass(frozen=True)
class Cell:
    """One step of one trainer. data: "even", "padded", "packed", "uneven", "remainder"; wrap: "none", "DDP", "FSDP2"."""

    trainer: str
    ranks: int
    accumulation: int
    data: str
    wrap: str

    @property
    def name(self):
        return f"{self.trainer}-{self.ranks}-{self.accumulation}-{self.data}-{self.wrap}"

    @property
    def micro_batch(self):
        return 1 if self.data == "uneven" else MICRO_BATCH

    @property
    def step(self):
        """Which update is compared: the one that the remainder of the documents is left for, else the first."""
        return 2 if self.data == "remainder" else 1

    @property
    def documents(self):
        """[{"input_ids": [...]}, ...]: two steps of them; with a remainder one step and two micro-batches."""
        a_step = self.micro_batch * self.ranks * self.accumulation
        count = a_step + 2 * MICRO_BATCH if self.data == "remainder" else 2 * a_step
        if self.data == "packed" and self.trainer.startswith("trl"):
            count *= 4  # some of them make a row
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(4, LONGEST, (count,), generator=generator).tolist()
        if self.data in ("even", "remainder"):
            lengths = [24] * count
        return [{"input_ids": torch.randint(1, VOCABULARY, (n,), generator=generator).tolist()} for n in lengths]


def make_model(kind="llama"):
    torch.manual_seed(1)
    if kind == "llama":
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=4 * LONGEST, bos_token_id=PAD, eos_token_id=PAD, pad_token_id=PAD,
            use_cache=False))
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=4 * LONGEST, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0,
        attn_pdrop=0.0, bos_token_id=PAD, eos_token_id=PAD, pad_token_id=PAD, use_cache=False))


def padded(documents):
    """A micro-batch [documents, longest], filled up on the right; what fills it is no target."""
    rows = [torch.tensor(document["input_ids"]) for document in documents]
    pad = torch.nn.utils.rnn.pad_sequence
    return {"input_ids": pad(rows, batch_first=True, padding_value=PAD),
            "attention_mask": pad([torch.ones_like(row) for row in rows], batch_first=True),
            "labels": pad(rows, batch_first=True, padding_value=-100)}


def collator(data):
    """Documents -> a micro-batch; packed: one row of all documents, by transformers' own collator."""
    return transformers.DataCollatorWithFlattening() if data == "packed" else padded


def id_of(sample):
    """A number for the document: one that comes twice is one sample."""
    kept = sample["input_ids"][sample["attention_mask"] == 1] if "attention_mask" in sample else sample["input_ids"]
    return zlib.crc32(kept.flatten().numpy().tobytes())
