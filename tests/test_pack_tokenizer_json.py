"""The packer for Hugging Face tokenizers writes the shards that the C++ side writes and reads."""
import json
import os
import pathlib
import re
import struct
import subprocess
import sys

import numpy
import pytest
import tokenizers

ROOT = pathlib.Path(__file__).resolve().parent.parent
ISOGRAD = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release")) / "bin/isograd"
TEXTS = ["the gradient of many ranks", "is the gradient of one rank", "ünïcode, and 数 too\n", "a" * 300]


@pytest.fixture()
def corpus(tmp_path):
    (tmp_path / "text/sub").mkdir(parents=True)
    (tmp_path / "text/b.txt").write_text(TEXTS[2])
    (tmp_path / "text/sub/c.txt").write_text(TEXTS[3])
    (tmp_path / "text/.hidden").write_bytes(b"\xff")
    lines = [{"text": TEXTS[0]}, {"text": ""}, {"id": 1, "text": TEXTS[1]}]
    (tmp_path / "text/a.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=300, special_tokens=["<|endoftext|>"], show_progress=False,
                                             initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())
    model.train_from_iterator(TEXTS * 10, trainer)
    model.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def pack(corpus, *arguments):
    command = [sys.executable, ROOT / "tools/pack_tokenizer_json.py", corpus / "tokenizer.json", "--out", corpus / "out", *arguments]
    return subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=120)


def read_shard(path):
    """Tokenizer name and documents, read a second time from the written format."""
    data = path.read_bytes()
    magic, version, width, documents, tokens, vocabulary, name, size = struct.unpack_from("<8sII5Q", data)
    assert (magic, version, size) == (b"isograd\x01", 1, len(data))
    at = 64 + (name + 7) // 8 * 8
    ids = numpy.frombuffer(data, f"<u{width}", tokens, at)
    offsets = numpy.frombuffer(data, "<u8", documents + 1, at + (tokens * width + 7) // 8 * 8)
    assert ids.max() < vocabulary
    return data[64:64 + name].decode(), [ids[a:b].tolist() for a, b in zip(offsets, offsets[1:])]


def show(*arguments):
    return subprocess.run([str(ISOGRAD), "data", "show", *map(str, arguments)], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("shard_tokens", [1 << 20, 20])
def test_round_trip(corpus, shard_tokens):
    done = pack(corpus, corpus / "text", "--end", "<|endoftext|>", "--shard-tokens", shard_tokens)
    assert done.returncode == 0, done.stderr
    assert "4 documents" in done.stdout and "1 documents without text were left out" in done.stdout
    tokenizer = tokenizers.Tokenizer.from_file(str(corpus / "tokenizer.json"))
    shards = sorted((corpus / "out").iterdir())
    assert len(shards) == 1 if shard_tokens > 20 else len(shards) > 1
    contents = [read_shard(shard)[1] for shard in shards]
    assert all(len(content) == 1 or sum(map(len, content)) <= shard_tokens for content in contents)
    documents = sum(contents, [])
    assert all(document[-1] == tokenizer.token_to_id("<|endoftext|>") for document in documents)
    assert [tokenizer.decode(document) for document in documents] == TEXTS
    # The C++ side checks every byte, the checksum included.
    shown = show(*shards)
    assert shown.returncode == 0, shown.stderr
    assert re.search(rf"^tokens +{sum(map(len, documents))}$", shown.stdout, re.M), shown.stdout
    assert re.search(r"^documents +4$", shown.stdout, re.M)
    assert re.search(rf"^tokenizer +{read_shard(shards[0])[0]}$", shown.stdout, re.M)
    assert " ".join(map(str, documents[0][:4])) in shown.stdout


def test_wide_vocabulary(corpus):
    tokenizer = tokenizers.Tokenizer.from_file(str(corpus / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<{i}>" for i in range(70000)])
    tokenizer.save(str(corpus / "tokenizer.json"))
    done = pack(corpus, corpus / "text/b.txt", "--begin", "<69999>")
    assert done.returncode == 0, done.stderr
    shard, = (corpus / "out").iterdir()
    _, documents = read_shard(shard)
    assert documents[0][0] == tokenizer.token_to_id("<69999>") > 65535
    assert show(shard).returncode == 0


def test_a_flipped_byte_is_found(corpus):
    assert pack(corpus, corpus / "text").returncode == 0
    shard, = (corpus / "out").iterdir()
    data = bytearray(shard.read_bytes())
    data[100] ^= 1
    shard.write_bytes(data)
    shown = show(shard)
    assert shown.returncode == 2 and "checksum" in shown.stderr and str(shard) in shown.stderr


@pytest.mark.parametrize("content, name, expected", [
    (b"ab\xff", "bad.txt", "0xff at offset 2"),
    (b'{"text": "a"}\n{"txt": 1}\n', "bad.jsonl", "bad.jsonl:2"),
    (b'{"text": "\\ud800"}\n', "bad.jsonl", "bad.jsonl:1"),
    (b'[1]\n', "bad.jsonl", "bad.jsonl:1"),
    (b"", "empty.txt", "empty corpus"),
])
def test_bad_text_is_named(corpus, content, name, expected):
    (corpus / name).write_bytes(content)
    done = pack(corpus, corpus / name)
    assert done.returncode == 2 and expected in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert list((corpus / "out").iterdir()) == []


def test_bad_arguments_are_named(corpus):
    for arguments, expected in [([corpus / "absent*"], "absent*"), ([corpus / "text", "--end", "<nope>"], "<nope>")]:
        done = pack(corpus, *arguments)
        assert done.returncode == 2 and expected in done.stderr, done.stderr
    (corpus / "tokenizer.json").write_text("{}")
    done = pack(corpus, corpus / "text")
    assert done.returncode == 2 and "tokenizer.json" in done.stderr and "Traceback" not in done.stderr
