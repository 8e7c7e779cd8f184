"""A Hugging Face tokenizer.json from packing to sampling, beside the packages `tokenizers` and `transformers`."""
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer

from test_pack_tokenizer_json import pack as pack_by_tool
from test_pack_tokenizer_json import TEXTS, corpus, read_shard  # noqa: F401  (a fixture)

ROOT = pathlib.Path(__file__).resolve().parent.parent
ISOGRAD = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release")) / "bin/isograd"

CONFIG = """
[run]
directory = "{folder}/run"
[data]
text = ["{folder}/text"]
tokenizer = "{folder}/tokenizer.json"
cache = "{folder}/cache"
pack_length = 32
[batch]
packs_per_step = 5
packs_per_micro_batch = 1
[model]
vocabulary = 300
hidden = 32
layers = 1
heads = 2
key_value_heads = 1
head_dim = 16
feed_forward = 48
max_positions = 64
[train]
steps = 4
evaluate_every = 0
[verify]
at_end = false
[sample]
prompt = "the gradient"
tokens = 8
"""


def isograd(*arguments, **variables):
    return subprocess.run([str(ISOGRAD), *map(str, arguments)], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "PYTHON": sys.executable, **variables})


def ok(*arguments, **variables):
    done = isograd(*arguments, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def documents_of(folder):
    return sum((read_shard(shard)[1] for shard in sorted(folder.glob("*.isograd"))), [])


@pytest.fixture()
def run(corpus):  # noqa: F811
    (corpus / "run.toml").write_text(CONFIG.format(folder=corpus))
    return corpus


def test_packing_gives_the_tokens_of_the_package(run):
    tokenizer = tokenizers.Tokenizer.from_file(str(run / "tokenizer.json"))
    ok("data", "pack", run / "text", "--tokenizer", run / "tokenizer.json", "--out", run / "ours")
    assert documents_of(run / "ours") == [tokenizer.encode(text).ids for text in TEXTS]
    assert pack_by_tool(run, run / "text").returncode == 0  # to run/out
    assert documents_of(run / "out") == documents_of(run / "ours")
    ours, = (run / "ours").glob("*.isograd")
    theirs, = (run / "out").glob("*.isograd")
    assert read_shard(ours)[0] == read_shard(theirs)[0]
    shown = ok("data", "show", ours, "--tokenizer", run / "tokenizer.json")
    assert TEXTS[0] in shown and "数" in shown


END = "<|endoftext|>"


@pytest.mark.parametrize("config, template, front, back", [
    ({"eos_token": END}, None, [], [0]),
    ({"eos_token": {"content": END, "lstrip": False}}, None, [], [0]),
    ({"eos_token": END, "bos_token": END, "add_bos_token": True}, None, [0], [0]),
    ({"eos_token": END, "bos_token": END}, None, [], [0]),
    (None, f"{END} $A", [0], []),
    (None, f"$A {END}", [], [0]),
    ({"eos_token": END}, f"$A {END}", [], [0]),
    ({"bos_token": END, "eos_token": END, "add_bos_token": True}, f"{END} $A", [0], [0]),
    (None, None, [], []),
])
def test_what_stands_around_a_document(run, config, template, front, back):
    file = run / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(file))
    plain = [tokenizer.encode(text).ids for text in TEXTS]
    if template:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single=template, special_tokens=[(END, 0)])
        tokenizer.save(str(file))
    if config is not None:
        (run / "tokenizer_config.json").write_text(json.dumps(config))
    # Packed twice into one folder: the marks are part of what the shards were made from.
    ok("data", "pack", run / "text/b.txt", "--tokenizer", file, "--out", run / "ours")
    ok("data", "pack", run / "text", "--tokenizer", file, "--out", run / "ours", "--overwrite")
    assert documents_of(run / "ours") == [front + ids + back for ids in plain]


def test_a_tokenizer_config_that_changes_packs_the_text_again(run):
    command = ("data", "pack", run / "text", "--tokenizer", run / "tokenizer.json", "--out", run / "ours")
    ok(*command)
    assert "unchanged" in ok(*command)
    (run / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    assert "unchanged" not in ok(*command, "--overwrite")
    assert all(document[-1] == 0 for document in documents_of(run / "ours"))


@pytest.mark.parametrize("config", [None, {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}])
def test_from_text_to_samples_and_back_into_transformers(run, config):
    if config:
        (run / "tokenizer_config.json").write_text(json.dumps(config))
    settings = ("--set", "checkpoint.every=2")
    ok("train", run / "run.toml", "--ranks", 2, *settings)
    checkpoint = run / "run/checkpoints/step-00000004"
    assert json.loads((checkpoint / "state.json").read_text())["tokenizer"].startswith("tokenizer.json:")
    assert (checkpoint / "tokenizer.json").read_bytes() == (run / "tokenizer.json").read_bytes()
    if config:
        assert json.loads((checkpoint / "tokenizer_config.json").read_text()) == config

    ours = tokenizers.Tokenizer.from_file(str(run / "tokenizer.json"))
    theirs = AutoTokenizer.from_pretrained(checkpoint)
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    for text in TEXTS:
        assert theirs(text).input_ids == ours.encode(text).ids
        assert theirs.decode(theirs(text).input_ids, skip_special_tokens=True) == text
    assert model.config.eos_token_id == theirs.eos_token_id == (0 if config else None)

    # The checkpoint alone is enough: greedy text is what transformers writes with it.
    (run / "tokenizer.json").unlink()
    text = ok("sample", checkpoint, "--prompt", "the gradient of", "--tokens", 8, "--temperature", 0).rstrip("\n")
    prompt = theirs("the gradient of", return_tensors="pt").input_ids
    written = model.generate(prompt, max_new_tokens=8, do_sample=False, attention_mask=prompt * 0 + 1, pad_token_id=299)
    assert text == theirs.decode(written[0], skip_special_tokens=True).rstrip("\n")
    # The run goes on with the checkpoint's tokenizer, which is the same one.
    ok("train", run / "run.toml", "--ranks", 3, "--set", f"data.tokenizer={checkpoint}/tokenizer.json", "--set",
       "train.steps=6", "--set", "checkpoint.resume=latest")


def test_shards_of_the_tokenizer_are_trained_with_and_without_it(run):
    ok("data", "pack", run / "text", "--tokenizer", run / "tokenizer.json", "--out", run / "shards")
    shards = ("--set", "data.text=[]", "--set", f"data.shards={run}/shards/*.isograd")
    with_it = ok("train", run / "run.toml", *shards)
    assert "the gradient" in with_it  # the sample's prompt
    ok("train", run / "run.toml", *shards, "--set", "data.tokenizer=bytes", "--set", f"run.directory={run}/without",
       "--set", "sample.prompt=''", PYTHON="/nonexistent")
    other = json.loads((run / "tokenizer.json").read_text())
    (run / "other.json").write_text(json.dumps(other))  # the same tokenizer, other bytes
    refused = isograd("train", run / "run.toml", "--overwrite", *shards, "--set", f"data.tokenizer={run}/other.json")
    assert refused.returncode == 2 and "which these shards were packed with" in refused.stderr


def test_a_proof_with_it(run):
    assert "PASS" in ok("verify", run / "run.toml", "--ranks", 3)


@pytest.mark.parametrize("python", ["/nonexistent/python", "/bin/false", "no package"])
def test_a_python_without_the_package_is_an_error_that_says_how_to_get_it(run, tmp_path, python):
    if python == "no package":
        python = tmp_path / "bare"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
        python.chmod(0o755)
    for ranks in (1, 2):
        done = isograd("train", run / "run.toml", "--ranks", ranks, PYTHON=str(python))
        assert done.returncode == 2, done.stdout + done.stderr
        assert "pip install tokenizers" in done.stderr and str(python) in done.stderr
        assert done.stderr.count("pip install tokenizers") == 1


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[" * 100000, b'{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_damaged_file_is_named(run, content):
    (run / "tokenizer.json").write_bytes(content)
    done = isograd("train", run / "run.toml", "--ranks", 2)
    assert done.returncode == 2, done.stdout + done.stderr
    assert str(run / "tokenizer.json") in done.stderr and "Traceback" not in done.stderr


def test_an_end_token_that_the_vocabulary_lacks_is_named(run):
    (run / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    done = isograd("train", run / "run.toml")
    assert done.returncode == 2 and "eos_token '</s>'" in done.stderr


def test_nothing_of_the_working_folder_is_executed(run, tmp_path):
    place, witness = tmp_path / "somebody's", tmp_path / "executed"
    (place / ".venv/bin").mkdir(parents=True)
    for name in ("tokenizers", "json", "struct", "array"):
        (place / f"{name}.py").write_text(f"open({str(witness)!r}, 'a').write({name!r})\n")
    python = place / ".venv/bin/python"
    python.write_text(f"#!/bin/sh\necho python >>'{witness}'\n")
    python.chmod(0o755)

    def pack(out, chosen):
        return subprocess.run([str(ISOGRAD), "data", "pack", str(run / "text"), "--tokenizer", str(run / "tokenizer.json"),
                               "--out", str(run / out)], capture_output=True, text=True, timeout=120, cwd=place,
                              env={**os.environ, "PYTHON": chosen})
    done = pack("ours", sys.executable)
    assert done.returncode == 0, done.stderr
    tokenizer = tokenizers.Tokenizer.from_file(str(run / "tokenizer.json"))
    assert documents_of(run / "ours") == [tokenizer.encode(text).ids for text in TEXTS]
    pack("others", "")  # whether a Python that it finds then has the package is the machine's affair
    assert not witness.exists(), witness.read_text()


def test_what_the_tokenizer_lacks_of_a_prompt_is_said(run):
    ok("train", run / "run.toml")
    few = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"<e>": 0, "a": 1, "b": 2, " ": 3}, merges=[]))
    few.decoder = tokenizers.decoders.Fuse()
    few.save(str(run / "few.json"))
    sample = ("sample", run / "run", "--tokenizer", run / "few.json", "--tokens", 2, "--prompt")
    done = isograd(*sample, "ab ça")
    assert done.returncode == 0 and done.stdout.startswith("ab a"), done.stderr
    assert 'does not keep all of the prompt: the model is given "ab a"' in done.stderr, done.stderr
    assert isograd(*sample, "ab a").stderr == ""
