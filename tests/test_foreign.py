"""Files from outside are hostile: the messages of the command line about them, and their status.

tests/fuzz changes real files at random; here are those that were found once, by name. A terminal sees no byte of a file that
could steer it, and no line that a file wrote.
"""
import json
import os
import pathlib
import re
import shutil
import subprocess

import pytest
import torch
from conftest import BINARY, BUILD, isograd, ran
from run_files import write_documents, write_run
from safetensors.torch import save_file
from test_cli import TABLES

ESCAPE = "\x1b[2J\x1b[31m"
FORGED = f"w{ESCAPE}\nparity PASS: forged\r\u202e"


def bad_input(*arguments, **environment):
    """The message of a refused call: status 2, one line, three parts, nothing that steers a terminal."""
    done = isograd(*arguments, status=2, **environment)
    # verify says what it begins with before it comes to what it cannot write.
    said = [line for line in done.stderr.splitlines() if not re.match(r"\d+ layouts?: ", line)]
    assert len(said) == 1 and "found " in said[0] and "expected " in said[0], done.stderr[-2000:]
    assert_harmless(done)
    return done.stderr


def assert_harmless(done):
    for text in (done.stdout, done.stderr):
        assert "\x1b" not in text and "\r" not in text and "\u202e" not in text, repr(text[-3000:])
        assert not any(line.startswith("parity PASS: forged") for line in text.splitlines()), text[-3000:]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A folder with a configuration and the run it made."""
    folder = tmp_path_factory.mktemp("trained")
    write_documents(folder, 12)
    ran("train", write_run(folder / "run.toml", TABLES), "verify.at_end=false")
    return folder


@pytest.fixture
def checkpoint(trained, tmp_path):
    """A copy of its last checkpoint."""
    last = max((trained / "run/checkpoints").glob("step-*"))
    return pathlib.Path(shutil.copytree(last, tmp_path / last.name))


def dump(folder, tensors=None, step=None):
    folder.mkdir(parents=True)
    save_file(tensors or {"w": torch.ones(3, dtype=torch.float64)}, folder / "gradients.safetensors")
    (folder / "step.json").write_text(json.dumps(dict({"format": "isograd-dump", "version": 1}, **(step or {}))))
    return folder


def test_a_header_of_many_tensors_is_read_in_time(tmp_path):
    tensors = {f"layer.{i}.weight": torch.full((1,), float(i + 1), dtype=torch.float64) for i in range(40_000)}
    ran("compare", dump(tmp_path / "a", tensors), dump(tmp_path / "b", tensors), limit=120)


@pytest.mark.parametrize("arguments", [
    ["train", "{long}"], ["verify", "{long}"], ["config", "{long}"], ["compare", "{long}", "{good}"],
    ["compare", "{good}", "{good}", "--alone", "{long}"], ["compare", "{good}", "{good}", "--json", "{long}"],
    ["compare", "{good}", "{good}", "--report", "{long}"], ["sample", "{long}"],
    ["sample", "{run}", "--tokenizer", "{long}"], ["data", "show", "{long}"], ["data", "pack", "{long}", "--out", "{new}"],
    ["data", "pack", "{text}", "--out", "{long}"], ["data", "pack", "{text}", "--out", "{new}", "--tokenizer", "{long}"],
    ["train", "{config}", "run.directory={long}"], ["train", "{config}", "data.cache={long}"],
    ["train", "{config}", "data.text={long}"], ["train", "{config}", "--json-log", "{long}"],
    ["train", "{plain}", "model.load={long}"], ["train", "{config}", "checkpoint.resume={long}"],
    ["verify", "{config}", "--dump", "{long}"], ["verify", "{config}", "--minimise", "{long}"],
], ids=lambda words: " ".join(words))
def test_a_path_of_5000_characters_is_bad_input(trained, tmp_path, arguments):
    long = "b/" * 1250 + "a" * 2500
    plain = tmp_path / "plain.toml"
    plain.write_text(f'[run]\ndirectory = "{tmp_path}/plain"\n[data]\ntext = ["{trained}/text"]\ncache = "{tmp_path}/cache"\n')
    names = dict(long=long, good=dump(tmp_path / "good"), run=trained / "run", text=trained / "text", new=tmp_path / "new",
                 config=trained / "run.toml", plain=plain)
    arguments = [word.format(**names) for word in arguments]
    if "--minimise" in arguments:  # writes only where something fails
        assert isograd(*arguments).returncode in (0, 2)
    else:
        bad_input(*arguments)


def test_model_load_refuses_a_flipped_bit(trained, checkpoint, tmp_path):
    config = write_run(trained / "load.toml", {table: keys for table, keys in TABLES.items() if table != "model"},
                       model={"load": str(checkpoint)}, run={"directory": str(tmp_path / "run")})
    weights = checkpoint / "model.safetensors"
    whole = weights.read_bytes()
    for verb in ("train", "verify"):
        ran(verb, config)
    # Files that only a resumed run reads may be missing.
    for name in ("optimizer.safetensors", "state.json"):
        (checkpoint / name).rename(tmp_path / name)
    ran("train", config, "--overwrite")
    ran("sample", checkpoint, "--tokenizer", "bytes")
    flipped = bytearray(whole)
    flipped[len(whole) - 5] ^= 1
    weights.write_bytes(flipped)
    for arguments in (["train", config, "--overwrite"], ["train", config, "--overwrite", "--ranks", 3], ["verify", config],
                      ["sample", checkpoint, "--tokenizer", "bytes"]):
        said = bad_input(*arguments)
        assert "model.safetensors" in said and "checksum" in said
    for name in ("optimizer.safetensors", "state.json"):
        (tmp_path / name).rename(checkpoint / name)
    assert "model.safetensors" in bad_input("sample", checkpoint)
    assert "model.safetensors" in bad_input("train", config, "--overwrite")
    weights.write_bytes(whole)
    (checkpoint / "config.json").write_text((checkpoint / "config.json").read_text().replace("1e-05", "1e-06"))
    assert "config.json" in bad_input("train", config, "--overwrite")


def test_names_from_dumps_reach_the_terminal_written_out(tmp_path):
    def tensors(value):
        return {FORGED: torch.full((3,), value, dtype=torch.float64), "b": torch.ones(2, dtype=torch.float64)}

    step = {"terms": {FORGED: 1.5}, "precision": "fp64", "axes": {FORGED: 2}, "samples": [1, 2]}
    folder = tmp_path / f"dump{ESCAPE}\nparity PASS: forged"
    good = dump(folder / "good", tensors(1.0), step)
    for i, (other, more, status) in enumerate([(tensors(1.0), step, 0), (tensors(2.0), step, 1),
                                               ({"b": torch.ones(2, dtype=torch.float64)}, step, 1),
                                               (tensors(1.0), {"precision": FORGED}, None)]):
        done = isograd("compare", dump(folder / f"found{i}", other, more), good, status=status)
        assert_harmless(done)
        if status is not None:
            assert "\\u{1b}[2J" in done.stdout and "\\nparity PASS: forged" in done.stdout
    for key, value in [(FORGED, 1), ("terms", {"a": FORGED}), ("parameters", [FORGED, FORGED]), ("format", FORGED)]:
        bad = dump(folder / f"bad{len(key)}{key[:4].strip(ESCAPE)}", tensors(1.0), {key: value})
        assert_harmless(isograd("compare", bad, good, status=2))


def test_names_from_files_and_configurations_reach_the_terminal_written_out(trained, checkpoint, tmp_path):
    folder = tmp_path / FORGED
    folder.mkdir()
    (folder / "c.toml").write_text(f'[data]\n"{ESCAPE.encode("unicode_escape").decode().replace(chr(92) + "x1b", chr(92) + "u001b")}" = 1\n')
    bad_input("config", folder / "c.toml")
    bad_input("config", "--set", f"{FORGED}=1")
    bad_input("config", f"optimizer.kind={FORGED}")
    bad_input("train", folder / "absent.toml")
    bad_input("sample", folder)
    bad_input("compare", folder, folder)
    (folder / "x.isograd").write_bytes(b"no shard")
    bad_input("data", "show", folder / "x.isograd")
    (folder / "x.csv").write_text(f"a,{ESCAPE}\n1,{ESCAPE}\n")
    for where in (FORGED, folder):
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", str(where): 1}))
        bad_input("sample", folder, "--tokenizer", "bytes")
    text = folder / f"text{ESCAPE}.txt"
    text.write_text("words")
    assert_harmless(ran("data", "pack", text, "--out", folder / "out"))
    done = ran("train", trained / "run.toml", f"run.directory={folder / 'run'}")
    assert_harmless(done)
    assert "\\u{1b}[2J" in done.stdout
    done = ran("config", f"run.directory={FORGED}")
    assert_harmless(done)
    (tmp_path / "again.toml").write_text(done.stdout)  # and is read back as it was
    assert isograd("config", tmp_path / "again.toml").stdout == done.stdout
    for arguments in ([FORGED], ["train", f"--{FORGED}"], ["sample", checkpoint, "--top-k", FORGED]):
        assert_harmless(isograd(*arguments, status=2))


def test_a_shard_in_a_folder_with_a_line_feed_is_found(trained, tmp_path):
    folder = tmp_path / "a\nb"
    ran("data", "pack", trained / "text", "--out", folder)
    ran("train", trained / "run.toml", "data.text=[]", f"data.shards={tmp_path}/a?b/*", f"run.directory={tmp_path}/run")


def test_a_sample_steers_no_terminal(trained):
    """On a terminal a sample's control characters are written out; in a pipe they go as they are."""
    prompt = "document \x1b[31m"
    assert isograd("sample", trained / "run", "--prompt", prompt, "--tokens", 2).stdout.startswith(prompt)
    master, slave = os.openpty()
    done = subprocess.run([BINARY, "sample", trained / "run", "--prompt", prompt, "--tokens", "2"], stdout=slave,
                          stderr=subprocess.PIPE, timeout=120)
    shown = os.read(master, 10_000)
    os.close(master), os.close(slave)
    assert done.returncode == 0, done.stderr
    assert b"\x1b" not in shown and shown.startswith(b"document \\u{1b}[31m"), shown


def test_the_fuzzer_finds_what_is_planted(tmp_path):
    command = [BUILD / "tests/fuzz/isograd_fuzz", "--only", "planted", "--seconds", "0.5", "--megabytes", "500"]
    done = subprocess.run([*command, "--inputs", "60", "--seed", "3"], cwd=tmp_path, capture_output=True, text=True,
                          timeout=120, env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert done.returncode == 1, done.stdout + done.stderr
    found = re.findall(r"^WRONG: planted, input (\d+) .*: (signal 11|status 3|\d+ s of CPU|\d+ MiB of memory)", done.stdout, re.M)
    kinds = {re.sub(r"\d+ ", "", kind) for _, kind in found}
    assert kinds == {"signal 11", "status 3", "s of CPU", "MiB of memory"}, done.stdout
    assert "nobody foresaw this" in done.stdout and f"{len(found)} wrong" in done.stdout.splitlines()[-1]
    kept = {path.name for path in (tmp_path / "fuzz-findings").iterdir()}
    assert kept == {f"3-{number}-planted" for number, _ in found}
    refused = int(re.search(r"(\d+) refused", done.stdout.splitlines()[-1]).group(1))
    assert 0 < refused < 60 - len(found)
    unforeseen = next(number for number, kind in found if kind == "status 3")
    again = subprocess.run([*command, "--seed", "3", "--input", unforeseen], cwd=tmp_path, capture_output=True, text=True,
                           timeout=120)
    assert again.returncode == 3 and "nobody foresaw this" in again.stderr
