"""Conversations, prompts with completions and weights: tokens, masks and packs are those of TRL's SFTTrainer, gradients those of one process;
files are streamed."""
import collections
import gzip
import json
import pathlib
import random
import re
import struct
import subprocess
import time

import numpy as np
import pytest
from conftest import BINARY, FULL, isograd

TEMPLATE = ("{% for message in messages %}{% if message['role'] == 'assistant' %}<|assistant|> {% generation %}{{ message['content'] }}<|end|>"
            "{% endgeneration %}{% else %}<|{{ message['role'] }}|> {{ message['content'] }}<|end|>{% endif %}{% endfor %}"
            "{% if add_generation_prompt %}<|assistant|> {% endif %}")
WORDS = "the a model learns what one two three ask tell rank gradient batch loss sum mean exactly never often again".split()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast
    folder = tmp_path_factory.mktemp("tokenizer")
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer, bpe.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    bpe.train_from_iterator([" ".join(WORDS)] * 20, trainers.BpeTrainer(
        vocab_size=400, special_tokens=["<eos>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, eos_token="<eos>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)
    return folder


def conversations(form, count=40, seed=3):
    draw = random.Random(seed)

    def says(role):
        return {"role": role, "content": " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))}
    for _ in range(count):
        turns = [says("system")] if draw.random() < 0.3 else []
        for _ in range(draw.randint(1, 4)):
            turns += [says("user"), says("assistant")]
        if form == "messages":
            yield {"messages": turns}
        elif form == "prompt messages":
            yield {"prompt": turns[:-1], "completion": turns[-1:]}
        else:
            yield {"prompt": turns[-2]["content"], "completion": " " + turns[-1]["content"]}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read_shard(path):
    """[(tokens, weights)] by the format that src/data/store.hpp specifies."""
    data = path.read_bytes()
    version, width, documents, tokens, _, name = struct.unpack_from("<IIQQQQ", data, 8)
    at = 64 + (name + 7) // 8 * 8
    ids = np.frombuffer(data, "<u2" if width == 2 else "<u4", tokens, at)
    at += (tokens * width + 7) // 8 * 8
    offsets = np.frombuffer(data, "<u8", documents + 1, at)
    weights = np.ones(tokens, "f4")
    if version == 2:
        at += 8 * (documents + 1)
        runs, = struct.unpack_from("<Q", data, at)
        ends = np.frombuffer(data, "<u8", runs, at + 8)
        for begin, end, weight in zip([0, *ends[:-1]], ends, np.frombuffer(data, "<f4", runs, at + 8 + 8 * runs)):
            weights[int(begin):int(end)] = weight
    return [(ids[b:e].tolist(), weights[b:e].tolist()) for b, e in zip(offsets[:-1].astype(int), offsets[1:].astype(int))]


def packed(folder, tokenizer, records, *options):
    text = write(folder / "text.jsonl", records)
    done = isograd("data", "pack", str(text), "--out", str(folder / "shards"), "--tokenizer", str(tokenizer / "tokenizer.json"), *options)
    assert done.returncode == 0, done.stderr
    return [document for shard in sorted((folder / "shards").glob("*.isograd")) for document in read_shard(shard)]


def of_trl(tokenizer, records, folder, **options):
    """The data set that SFTTrainer prepares."""
    from datasets import Dataset
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer
    theirs = AutoTokenizer.from_pretrained(tokenizer)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(theirs), hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                         num_attention_heads=2, num_key_value_heads=2))
    config = SFTConfig(output_dir=str(folder / "trl"), use_cpu=True, report_to=[], bf16=False, **options)
    return SFTTrainer(model=model, args=config, train_dataset=Dataset.from_list(list(records)), processing_class=theirs).train_dataset


@pytest.mark.parametrize("form", ["messages", "prompt messages", "prompt texts"])
def test_tokens_and_masks_are_those_of_trl(tokenizer, tmp_path, form):
    records = list(conversations(form))
    ours = packed(tmp_path, tokenizer, records)
    theirs = of_trl(tokenizer, records, tmp_path, assistant_only_loss=form == "messages", packing=False, max_length=512)
    assert len(ours) == len(theirs) == 40
    for (tokens, weights), example in zip(ours, theirs):
        assert tokens == example["input_ids"]
        assert [token if weight else -100 for token, weight in zip(tokens, weights)] == example["labels"]


def test_packs_are_those_of_trl(tokenizer, tmp_path):
    records = list(conversations("prompt texts", 40, seed=8))
    theirs = of_trl(tokenizer, records, tmp_path, packing=True, packing_strategy="bfd", max_length=64)
    config = tmp_path / "run.toml"
    config.write_text(f"""
[data]
text = ["{write(tmp_path / 'text.jsonl', records)}"]
tokenizer = "{tokenizer / 'tokenizer.json'}"
cache = "{tmp_path / 'cache'}"
validation_fraction = 0
pack_length = 64
packing = "best_fit"
[batch]
packs_per_step = 100
[model]
vocabulary = 512
max_positions = 64
""")
    shown = isograd("data", "show", str(config), "--step", "1")
    assert shown.returncode == 0, shown.stderr
    packs = [sorted(int(end) - int(begin) + 1 for begin, end in re.findall(r"tokens (\d+) to (\d+) of", pack))
             for pack in shown.stdout.partition("pack ")[2].split("\npack ")]
    assert collections.Counter(map(tuple, packs)) == collections.Counter(tuple(sorted(pack)) for pack in theirs["seq_lengths"])
    assert "[[" in shown.stdout


def run_config(folder, text, tokenizer, **more):
    loss = more.get("loss", "token_mean")
    config = folder / "run.toml"
    config.write_text(f"""
[run]
directory = "{folder / 'run'}"
[data]
text = ["{text}"]
tokenizer = "{tokenizer / 'tokenizer.json'}"
cache = "{folder / 'cache'}"
validation_fraction = 0
pack_length = 48
packing = "{more.get('packing', 'best_fit')}"
[batch]
packs_per_step = 7
packs_per_micro_batch = 2
[loss]
kind = "{loss}"
[model]
vocabulary = 512
hidden = 32
layers = 2
heads = 4
key_value_heads = 2
head_dim = 8
feed_forward = 48
max_positions = 64
""")
    return config


@pytest.mark.parametrize("loss", ["token_mean", "weighted_mean", "sample_mean"])
def test_the_gradient_is_that_of_one_process(tokenizer, tmp_path, loss):
    records = list(conversations("messages", 30))
    if loss == "weighted_mean":
        for i, record in enumerate(records):
            record["weight"] = [0.25, 1, 3][i % 3]
    config = run_config(tmp_path, write(tmp_path / "text.jsonl", records), tokenizer, loss=loss)
    done = isograd("verify", str(config), "--ranks", "3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "PASS" in done.stdout


def test_weights_need_a_mean_that_divides_by_them(tokenizer, tmp_path):
    records = [{"prompt": "one", "completion": " two", "weight": 0.5}, {"prompt": "one", "completion": " two"}]
    config = run_config(tmp_path, write(tmp_path / "text.jsonl", records), tokenizer)
    done = isograd("train", str(config))
    assert done.returncode == 2 and "weighted_mean" in done.stderr


@pytest.mark.parametrize("problem", ["no generation marks", "no template", "no assistant", "template refuses"])
def test_what_has_no_targets_is_refused(tokenizer, tmp_path, problem):
    folder = tmp_path / "tokenizer"
    subprocess.run(["cp", "-r", str(tokenizer), str(folder)], check=True)
    template = folder / "chat_template.jinja"
    records = [{"messages": [{"role": "user", "content": "ask"}, {"role": "assistant", "content": "tell"}]}]
    expected = []
    if problem == "no generation marks":
        template.write_text(TEMPLATE.replace("{% generation %}", "").replace("{% endgeneration %}", ""))
        expected = ["generation", "data.train_on"]
    elif problem == "no template":
        template.unlink()
        expected = ["no chat template"]
    elif problem == "no assistant":
        records = [{"messages": [{"role": "user", "content": "ask"}]}]
        expected = ["text.jsonl:1", "without a message of the assistant"]
    else:
        template.write_text("{{ raise_exception('Conversation roles must alternate') }}" + TEMPLATE)
        expected = ["text.jsonl:1", "Conversation roles must alternate"]
    text = write(tmp_path / "text.jsonl", records)
    done = isograd("data", "pack", str(text), "--out", str(tmp_path / "shards"), "--tokenizer", str(folder / "tokenizer.json"))
    assert done.returncode == 2
    for phrase in expected:
        assert phrase in done.stderr


def test_another_template_packs_again(tokenizer, tmp_path):
    folder = tmp_path / "tokenizer"
    subprocess.run(["cp", "-r", str(tokenizer), str(folder)], check=True)
    records = list(conversations("messages", 3))
    first = packed(tmp_path, folder, records)
    (folder / "chat_template.jinja").write_text(TEMPLATE.replace("<|end|>", "<|end|><eos>"))
    assert packed(tmp_path, folder, records) != first


def test_a_corpus_is_streamed(tmp_path):
    """Lines of 2 kB, one in a thousand of them bad: 2 GB in the full tests."""
    count = 1_000_000 if FULL else 60_000
    line = json.dumps({"text": "x" * 1985}) + "\n"
    path = tmp_path / "large.jsonl.gz"
    with gzip.open(path, "wt", compresslevel=1) as out:
        for i in range(count):
            out.write("{broken\n" if i % 1000 == 999 else line)
    peak = 0
    with (tmp_path / "out").open("w+") as out, subprocess.Popen(
            [BINARY, "data", "pack", str(path), "--out", str(tmp_path / "shards"), "--skip-bad-lines"], stdout=out,
            stderr=subprocess.STDOUT) as process:
        status = pathlib.Path(f"/proc/{process.pid}/status")  # getrusage() would count the memory of the process that it is a copy of
        while process.poll() is None:
            peak = max([peak, *map(int, re.findall(r"VmHWM:\s*(\d+)", status.read_text()))])
            time.sleep(0.02)
        err = (out.seek(0), out.read())[1]
    assert process.returncode == 0, err
    assert f"{count // 1000} bad lines were left out" in err
    listed = (tmp_path / "shards" / ".bad-lines.txt").read_text().splitlines()
    assert len(listed) == count // 1000 and ":1000: " in listed[0]
    print(f"peak memory {peak / 1024:.0f} MiB")
    assert 0 < peak <= 200 * 1024
