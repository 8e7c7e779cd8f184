"""A Hugging Face tokenizer.json from packing to sampling, compared with the packages `tokenizers` and `transformers`."""
import json
import os
import pathlib
import struct
import subprocess
import sys

import numpy
import pytest
import tokenizers
import torch
from conftest import BINARY, full, isograd
from run_files import text_tables, write_run
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

TEXTS = ["the gradient of many ranks", "is the gradient of one rank", "ünïcode, and 数 too\n", "a" * 300]


@pytest.fixture
def run(tmp_path):
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
    write_run(tmp_path / "run.toml", CONFIG)
    return tmp_path


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


CONFIG = text_tables(
    5, 1, 32, (32, 1, 2, 1, 16, 48), data={"tokenizer": "{folder}/tokenizer.json"},
    model={"vocabulary": 300, "max_positions": 64}, train={"steps": 4, "evaluate_every": 0}, verify={"at_end": False},
    sample={"prompt": "the gradient", "tokens": 8})


def ok(*arguments, **variables):
    return isograd(*arguments, status=0, **{"PYTHON": sys.executable, **variables}).stdout


def bad(*arguments, **variables):
    return isograd(*arguments, status=2, **{"PYTHON": sys.executable, **variables}).stderr


def documents_of(folder):
    return sum((read_shard(shard)[1] for shard in sorted(folder.glob("*.isograd"))), [])


def test_packing_gives_the_tokens_of_the_package(run):
    tokenizer = tokenizers.Tokenizer.from_file(str(run / "tokenizer.json"))
    ok("data", "pack", run / "text", "--tokenizer", run / "tokenizer.json", "--out", run / "ours")
    assert documents_of(run / "ours") == [tokenizer.encode(text).ids for text in TEXTS]
    ours, = (run / "ours").glob("*.isograd")
    shown = ok("data", "show", ours, "--tokenizer", run / "tokenizer.json")
    assert TEXTS[0] in shown and "数" in shown


END = "<|endoftext|>"


@pytest.mark.parametrize("config, template, front, back", [
    full({"eos_token": END}, None, [], [0]),
    ({"eos_token": {"content": END, "lstrip": False}}, None, [], [0]),
    ({"eos_token": END, "bos_token": END, "add_bos_token": True}, None, [0], [0]),
    ({"eos_token": END, "bos_token": END}, None, [], [0]),
    (None, f"{END} $A", [0], []),
    full(None, f"$A {END}", [], [0]),
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
    ok("data", "pack", run / "text", "--tokenizer", file, "--out", run / "ours")
    assert documents_of(run / "ours") == [front + ids + back for ids in plain]


def test_a_tokenizer_config_that_changes_packs_the_text_again(run):
    command = ("data", "pack", run / "text", "--tokenizer", run / "tokenizer.json", "--out", run / "ours")
    ok(*command)
    assert "unchanged" in ok(*command)
    (run / "tokenizer_config.json").write_text(json.dumps({"eos_token": END}))
    assert "unchanged" not in ok(*command, "--overwrite")
    assert all(document[-1] == 0 for document in documents_of(run / "ours"))


@pytest.mark.parametrize("config", [full(None), {"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}])
def test_from_text_to_samples_and_back_into_transformers(run, config):
    if config:
        (run / "tokenizer_config.json").write_text(json.dumps(config))
    ok("train", run / "run.toml", "--ranks", 2, "checkpoint.every=2")
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
    ok("train", run / "run.toml", "--ranks", 3, f"data.tokenizer={checkpoint}/tokenizer.json", "train.steps=6", "checkpoint.resume=latest")


TEMPLATE = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}\n"
KEPT = {"generation_config.json": None,
        "special_tokens_map.json": json.dumps({"eos_token": END, "pad_token": END}, indent=4),
        "chat_template.jinja": TEMPLATE,
        "chat_template.json": json.dumps({"chat_template": TEMPLATE}),
        "added_tokens.json": json.dumps({END: 0})}


def llama_folder(run, **config):
    """A Hugging Face directory of an untrained model, with the tokenizer and all that transformers reads with it."""
    torch.manual_seed(3)
    folder = run / "llama"
    model = LlamaForCausalLM(LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, initializer_range=0.5,
        **{**dict(max_position_embeddings=128, bos_token_id=None, eos_token_id=None, pad_token_id=None), **config}))
    model.save_pretrained(folder)
    (run / "tokenizer.json").rename(folder / "tokenizer.json")
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": END, "tokenizer_class": "PreTrainedTokenizerFast"}))
    for name, content in KEPT.items():
        if content:
            (folder / name).write_text(content)
    (folder / "generation_config.json").unlink(missing_ok=True)
    return folder


def greedy(folder, tokens=43):
    """The text that transformers writes, and those of its tokens that are new."""
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    prompt = tokenizer("the gradient of", return_tensors="pt").input_ids
    written = model.generate(prompt, max_new_tokens=tokens, do_sample=False, attention_mask=prompt * 0 + 1, pad_token_id=299)[0]
    new = written[prompt.shape[1]:].tolist()
    ended = model.generation_config.eos_token_id
    ends = ended if isinstance(ended, list) else [ended]
    # An end that is an ordinary token is in what generate() gives; `sample` leaves every end out.
    text = tokenizer.decode(written[:-1] if new[-1] in ends else written, skip_special_tokens=True)
    return text, new


def sampled(folder, tokens=43):
    return ok("sample", folder, "--prompt", "the gradient of", "--tokens", tokens, "--temperature", 0)[:-1]


@pytest.mark.parametrize("ends", ["list", full("one"), "of config.json", full("none")])
def test_a_directory_is_sampled_and_carried_as_transformers_has_it(run, ends):
    folder = llama_folder(run)
    new = greedy(folder)[1]
    assert len(new) == 43 and sampled(folder) == greedy(folder)[0]
    # Tokens that come for the first time at these places.
    early, later = (next(token for i, token in enumerate(new) if i >= at and token not in new[:i]) for at in (7, 12))
    kept = dict(KEPT)
    if ends == "of config.json":
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "eos_token_id": [later, early]}))
        del kept["generation_config.json"]
    else:
        # The other keys of the file are kept and not read.
        kept["generation_config.json"] = json.dumps({"temperature": 0.6, "do_sample": True, **{
            "list": {"eos_token_id": [299, later, early]}, "one": {"eos_token_id": early}, "none": {}}[ends]}, indent=3)
        (folder / "generation_config.json").write_text(kept["generation_config.json"])
    text, new = greedy(folder)
    assert len(new) == (43 if ends == "none" else new.index(early) + 1) and (ends == "none" or 7 < len(new) < 43)
    assert sampled(folder) == text
    if ends == "none":  # and the tokenizer's end token is what a model trained with it ends texts with
        assert json.loads((folder / "config.json").read_text())["eos_token_id"] is None

    write_run(run / "load.toml", {table: keys for table, keys in CONFIG.items() if table != "model"})
    loads = ("model.load={0}", "data.tokenizer={0}/tokenizer.json")
    ok("train", run / "load.toml", "--ranks", 2, *(each.format(folder) for each in loads), "train.steps=2")
    checkpoint = run / "run/checkpoints/step-00000002"
    for name, content in kept.items():
        assert (checkpoint / name).read_text() == content, name
    assert set(kept) == {file.name for file in checkpoint.iterdir()} & set(KEPT)
    assert AutoTokenizer.from_pretrained(checkpoint).chat_template == AutoTokenizer.from_pretrained(folder).chat_template
    wanted = [later, early] if ends == "of config.json" else 0
    assert json.loads((checkpoint / "config.json").read_text())["eos_token_id"] == wanted
    assert sampled(checkpoint) == greedy(checkpoint)[0]
    # The same of a checkpoint's checkpoint.
    ok("train", run / "load.toml", *(each.format(checkpoint) for each in loads), "train.steps=1", f"run.directory={run}/next")
    for name, content in kept.items():
        assert (run / "next/checkpoints/step-00000001" / name).read_text() == content, name


@pytest.mark.parametrize("content, said", [("[]", "no JSON object"), ("{", "JSON"), ('{"eos_token_id": "</s>"}', "eos_token_id"),
                                           ('{"eos_token_id": [0, 1.5]}', "eos_token_id")])
def test_a_damaged_generation_config_is_named(run, content, said):
    folder = llama_folder(run)
    (folder / "generation_config.json").write_text(content)
    message = bad("sample", folder)
    assert str(folder / "generation_config.json") in message and said in message


def test_a_directory_without_a_tokenizer_says_what_to_add(run):
    folder = llama_folder(run)
    (folder / "tokenizer.json").unlink()
    message = bad("sample", folder)
    assert "tokenizer.model" in message and "--tokenizer" in message


def test_a_sample_is_shown_while_it_is_generated_by_one_thread(run):
    """Threads that wait for one another at every small product made it many times slower."""
    folder = llama_folder(run, max_position_embeddings=100000)
    environment = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"}
    process = subprocess.Popen([BINARY, "sample", folder, "--tokens", "50000"], stdout=subprocess.PIPE,
                               env={**environment, "PYTHON": sys.executable})
    try:
        assert process.stdout.read(100)
        threads = len(list(pathlib.Path(f"/proc/{process.pid}/task").iterdir()))
        assert process.poll() is None and threads == 1
    finally:
        process.kill()
        process.wait()


def test_shards_of_the_tokenizer_are_trained_with_and_without_it(run):
    ok("data", "pack", run / "text", "--tokenizer", run / "tokenizer.json", "--out", run / "shards")
    shards = ("data.text=[]", f"data.shards={run}/shards/*.isograd")
    with_it = ok("train", run / "run.toml", *shards)
    assert "the gradient" in with_it  # the sample's prompt
    ok("train", run / "run.toml", *shards, "data.tokenizer=bytes", f"run.directory={run}/without",
       "sample.prompt=''", PYTHON="/nonexistent")
    other = json.loads((run / "tokenizer.json").read_text())
    (run / "other.json").write_text(json.dumps(other))  # the same tokenizer, other bytes
    assert "which these shards were packed with" in bad("train", run / "run.toml", "--overwrite", *shards,
                                                        f"data.tokenizer={run}/other.json")


def test_a_proof_with_it(run):
    assert "PASS" in ok("verify", run / "run.toml", "--ranks", 3)


@pytest.mark.parametrize("python", ["/nonexistent/python", "/bin/false", "no package"])
def test_a_python_without_the_package_is_an_error_that_says_how_to_get_it(run, tmp_path, python):
    if python == "no package":
        python = tmp_path / "bare"
        python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -I -S "$@"\n')
        python.chmod(0o755)
    for ranks in (1, 2):
        message = bad("train", run / "run.toml", "--ranks", ranks, PYTHON=str(python))
        assert message.count("pip install tokenizers") == 1 and str(python) in message


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b"[" * 100000, b'{"version": "1.0", "model": {"type": "BPE"}}'])
def test_a_damaged_file_is_named(run, content):
    (run / "tokenizer.json").write_bytes(content)
    message = bad("train", run / "run.toml", "--ranks", 2)
    assert str(run / "tokenizer.json") in message and "Traceback" not in message


def test_an_end_token_that_the_vocabulary_lacks_is_named(run):
    (run / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
    assert "eos_token '</s>'" in bad("train", run / "run.toml")


def test_nothing_of_the_working_folder_is_executed(run, tmp_path):
    place, witness = tmp_path / "somebody's", tmp_path / "executed"
    (place / ".venv/bin").mkdir(parents=True)
    for name in ("tokenizers", "json", "struct", "array"):
        (place / f"{name}.py").write_text(f"open({str(witness)!r}, 'a').write({name!r})\n")
    python = place / ".venv/bin/python"
    python.write_text(f"#!/bin/sh\necho python >>'{witness}'\n")
    python.chmod(0o755)

    def pack(out, chosen):
        return subprocess.run([str(BINARY), "data", "pack", str(run / "text"), "--tokenizer", str(run / "tokenizer.json"),
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
    done = isograd(*sample, "ab ça", status=0, PYTHON=sys.executable)
    assert done.stdout.startswith("ab a"), done.stderr
    assert 'does not keep all of the prompt: the model is given "ab a"' in done.stderr, done.stderr
    assert isograd(*sample, "ab a", PYTHON=sys.executable).stderr == ""
