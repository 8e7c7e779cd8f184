"""`isograd train` as processes: what it prints and leaves behind, and what happens to it from outside.

Runs are tiny (one layer, width 32, packs of 64), so that each takes a second or two. The binary comes from
ISOGRAD_BUILD_DIR (default build/release).
"""
import json
import math
import os
import pathlib
import random
import re
import subprocess
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
BINARY = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release")) / "bin/isograd"
LIMIT = 60  # seconds; a run that takes longer hangs

CONFIG = """
[run]
directory = "{run}"
seed = 5
[data]
text = ["{text}"]
cache = "{cache}"
pack_length = 64
validation_fraction = 0.2
[batch]
packs_per_step = 6
packs_per_micro_batch = 2
[model]
hidden = 32
layers = 1
heads = 2
key_value_heads = 1
head_dim = 16
feed_forward = 48
max_positions = 128
[train]
steps = 12
evaluate_every = 4
evaluate_packs = 3
[schedule]
peak = 0.01
warmup = 2
[checkpoint]
every = 4
[parallel]
timeout_seconds = 20
[verify]
at_end = false
[sample]
prompt = "ab"
tokens = 8
"""


class Workplace:
    def __init__(self, folder, backend):
        self.folder = folder
        self.backend = backend
        self.text = folder / "text"
        self.text.mkdir(parents=True)
        rng = random.Random(11)
        for i in range(30):
            words = "".join(rng.choice("abcdefg ") for _ in range(rng.randrange(5, 200)))
            (self.text / f"{i:03}.txt").write_text(words)

    def config(self, name="run"):
        path = self.folder / f"{name}.toml"
        path.write_text(CONFIG.format(run=self.folder / name, text=self.text, cache=self.folder / "cache"))
        return path

    def command(self, name="run", ranks=2, **changes):
        sets = [x for key, value in changes.items() for x in ("--set", f"{key.replace('__', '.')}={value}")]
        return [str(BINARY), "train", str(self.config(name)), "--ranks", str(ranks), "--backend", self.backend,
                *sets]

    def run(self, *args, **kwargs):
        return subprocess.run(self.command(*args, **kwargs), capture_output=True, text=True, timeout=LIMIT)

    def start(self, *args, **kwargs):
        """A run without end in the background, in its own session; returned once it trains."""
        kwargs = {"train__steps": 1000000, "train__evaluate_every": 0, "checkpoint__every": 0, **kwargs}
        process = subprocess.Popen(self.command(*args, **kwargs), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                   text=True, start_new_session=True)
        name = kwargs.get("run__directory", args[0] if args else "run")
        self.wait(process, lambda: len(self.metrics(name)) > 5)
        return process

    def wait(self, process, condition):
        end = time.time() + LIMIT
        while not condition():
            if process.poll() is not None:
                pytest.fail(f"ended early with {process.returncode}:\n{process.communicate()[0]}")
            assert time.time() < end, "waited in vain"
            time.sleep(0.02)

    def metrics(self, name="run"):
        path = self.folder / name / "metrics.jsonl"
        if not path.exists():
            return []
        rows = []
        for line in path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                break  # being written
        return rows

    def checkpoints(self, name="run"):
        folder = self.folder / name / "checkpoints"
        return sorted(path for path in folder.glob("step-*")) if folder.exists() else []


@pytest.fixture
def place(tmp_path, backend):
    return Workplace(tmp_path, backend)


def ranks_of(process):
    """Process ids of the ranks, in order of rank."""
    found = {}
    for path in pathlib.Path("/proc").iterdir():
        if not path.name.isdigit():
            continue
        try:
            session = int((path / "stat").read_text().rsplit(")", 1)[1].split()[3])
            if session != process.pid:
                continue
            environment = dict(x.split("=", 1) for x in (path / "environ").read_text().split("\0") if "=" in x)
        except OSError:
            continue
        for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK"):
            if name in environment:
                found[int(environment[name])] = int(path.name)
    return [found[rank] for rank in sorted(found)]


def finish(process):
    out, _ = process.communicate(timeout=LIMIT)
    return process.returncode, out


def whole(checkpoint):
    """Every file of a checkpoint is as its listing says, and the weights can be read."""
    from safetensors import safe_open
    listing = json.loads((checkpoint / "checksums.json").read_text())
    for name, facts in listing["files"].items():
        assert (checkpoint / name).stat().st_size == facts["bytes"], name
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        assert len(list(file.keys())) > 5
    return True


def test_trains_and_says_what_it_did(place):
    done = place.run()
    text = done.stdout + done.stderr
    assert done.returncode == 0, text
    rows = place.metrics()
    steps = [row for row in rows if row.get("loss") is not None]
    assert [row["step"] for row in steps] == list(range(1, 13))
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert [row["step"] for row in rows if row.get("validation_loss") is not None] == [4, 8, 12]
    for word in ("validation loss", "unigram entropy", "tokens/s", "sample", "report", "checkpoint"):
        assert word in text
    html = (place.folder / "run/report.html").read_text()
    assert "<svg" in html and "pack_length" in html
    assert [path.name for path in place.checkpoints()] == ["step-00000008", "step-00000012"]
    assert all(whole(path) for path in place.checkpoints())


@pytest.mark.parametrize("strategy, keeps, rounds", [("bucketed", "16Ψ", 1), ("zero1", "8Ψ + 8Ψ/N", 1),
                                                     ("zero2", "4Ψ + 12Ψ/N", 2)])
def test_memory_and_traffic_stand_beside_the_formulas(place, strategy, keeps, rounds):
    """Two micro-batches a step: zero2 sends gradients twice."""
    result = place.run(train__steps=3, run__memory="true", parallel__strategy=strategy, batch__packs_per_step=8,
                       parallel__share_parameters="off", model__hidden=64)
    assert result.returncode == 0, result.stdout + result.stderr
    assert f"keeps {keeps}" in result.stderr
    rows = [re.split(r"\s{2,}", line.strip()) for line in result.stderr.splitlines()]
    (formula,) = [list(map(float, row[1:])) for row in rows if row[0] == "formula"]
    measured = [list(map(float, row[1:])) for row in rows if re.fullmatch(r"rank \d", row[0])]
    assert len(measured) == 2
    for row in measured:
        parameters, gradients, masters, state, total, other, passing, sent = row
        assert total == pytest.approx(formula[4], rel=0.03)
        assert passing > 0
        assert sent == pytest.approx(formula[5], rel=0.03)  # the counts and the norm travel too
    psi = formula[0] / 4  # in millions of parameters, in fp32
    assert formula[5] == pytest.approx(psi * 4 * (rounds + 1) / 2, abs=0.01)


@pytest.mark.parametrize("ranks", [2, 3])
def test_bytes_to_experts_are_printed_beside_the_formula(place, ranks):
    """Each rank its own, as its tokens' choices are uneven."""
    result = place.run(ranks=ranks, train__steps=2, run__memory="true", parallel__ep=ranks, model__family="qwen3_moe",
                       model__query_key_norm="true", model__experts=5, model__expert_feed_forward=24, loss__balance=0.01)
    assert result.returncode == 0, result.stdout + result.stderr
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("to other ranks' experts and back")]
    sent = re.findall(r"rank (\d): (\d+) \((\d+)\)", line)
    assert [int(rank) for rank, _, _ in sent] == list(range(ranks))
    assert all(int(measured) == int(formula) > 0 for _, measured, formula in sent)


def test_memory_under_zero3_and_with_bf16_gradients(place):
    """The root stays whole from forward to the end of backward; with reshard_after_forward = false everything does."""
    zero3 = dict(parallel__strategy="zero3")
    for more in (zero3, zero3 | dict(parallel__reshard_after_forward="false"),
                 zero3 | dict(parallel__share_parameters="auto"),  # MPI: not shared
                 zero3 | dict(train__dtype="bfloat16", train__fp32_gradients="false"),
                 dict(parallel__strategy="zero1", train__dtype="bfloat16", train__fp32_gradients="false")):
        options = dict(parallel__share_parameters="off") | more
        result = place.run(train__steps=3, run__memory="true", batch__packs_per_step=8, model__hidden=64,
                           run__directory=place.folder / ("memory-" + "-".join(f"{k}-{v}" for k, v in more.items())), **options)
        assert result.returncode == 0, result.stdout + result.stderr
        rows = [re.split(r"\s{2,}", line.strip()) for line in result.stderr.splitlines()]
        (formula,) = [list(map(float, row[1:])) for row in rows if row[0] == "formula"]
        measured = [list(map(float, row[1:])) for row in rows if re.fullmatch(r"rank \d", row[0])]
        assert len(measured) == 2
        gathered = re.search(r"gathered: at most ([\d.]+) MB of parameters at a time, of ([\d.]+) that", result.stderr)
        shared = "one copy of the parameters: keeps" in result.stderr
        assert (gathered is not None) == ("zero3" in more.values() and not shared)
        if gathered:
            assert 0 < float(gathered[1]) <= float(gathered[2])
        for row in measured:
            assert row[4] == pytest.approx(formula[4], rel=0.03)
            assert row[7] == pytest.approx(formula[5], rel=0.03)


def test_a_trained_model_gives_the_same_loss_in_transformers(place):
    """20 steps; then transformers' loss on the held-out tokens equals ours to 1e-5 relative.

    All documents are the same and, with bos and eos, exactly one pack long: whichever is held out, its loss is
    the loss on that one pack.
    """
    import torch
    from transformers import AutoModelForCausalLM
    for path in place.text.iterdir():
        path.unlink()
    body = "".join(random.Random(3).choice("abcdefg ") for _ in range(62))
    for i in range(20):
        (place.text / f"{i}.txt").write_text(body)
    done = place.run(train__steps=20)
    assert done.returncode == 0, done.stdout + done.stderr
    ours = [row["validation_loss"] for row in place.metrics() if row.get("validation_loss") is not None][-1]
    model = AutoModelForCausalLM.from_pretrained(place.checkpoints()[-1], dtype=torch.float32)
    tokens = torch.tensor([[256, *body.encode(), 257]])
    with torch.no_grad():
        theirs = model(tokens, labels=tokens).loss.item()
    assert abs(ours - theirs) <= 1e-5 * theirs, (ours, theirs)
    assert theirs < math.log(258) - 0.5, "nothing was learnt: the comparison would show little"


def test_a_damaged_checkpoint_is_named(place):
    assert place.run().returncode == 0
    last = place.checkpoints()[-1]
    weights = last / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 1
    weights.write_bytes(data)
    done = place.run(checkpoint__resume="latest", train__steps=14)
    assert done.returncode == 2
    assert f"{weights}: found checksum" in done.stderr
    assert f"resume from {place.checkpoints()[0]}" in done.stderr
    done = place.run(checkpoint__resume=place.checkpoints()[0], train__steps=14)
    assert done.returncode == 0, done.stderr


def test_divergence_fails_and_keeps_the_checkpoint(place):
    done = place.run(optimizer__kind="sgd", schedule__peak=1e12, schedule__warmup=0, train__max_norm=0,
                     checkpoint__every=1, train__steps=200, train__evaluate_every=0)
    text = done.stdout + done.stderr
    assert done.returncode == 1, text
    assert "not finite" in text and "nothing was updated" in text
    assert all(whole(path) for path in place.checkpoints())


def test_context_ranks_say_how_level_their_cuts_are(place):
    """With the first step, in the summary and in the report; without context ranks there is nothing to say."""
    done = place.run(parallel__cp_ring=2)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr.count("first step: cut over 2 ring ranks: tokens ") == 1
    (said,) = re.findall(r"^context ranks +highest cost (([\d.]+) of the mean, ([\d.]+) at worst)$", done.stdout, re.M)
    assert 1 <= float(said[1]) <= float(said[2]) < 2
    html = (place.folder / "run/report.html").read_text()
    assert "highest cost" in html and said[0] in html
    done = place.run("alone")
    assert done.returncode == 0 and "highest cost" not in done.stdout


def test_a_document_longer_than_the_context_groups_memory_is_refused(place):
    """On all ranks of all context groups, before the step, in one message."""
    for ranks, axes in ((4, {"parallel__cp_ring": 2}), (2, {})):
        done = place.run(ranks=ranks, batch__max_tokens_per_rank=20, **axes)
        assert done.returncode == 2, done.stdout + done.stderr
        assert done.stderr.count("ConfigError") == 1 and "batch.max_tokens_per_rank" in done.stderr, done.stderr
        assert "context ranks or more" in done.stderr and "at most 20 on a rank" in done.stderr
        assert not place.metrics()


def test_bad_input_is_refused_before_training(place):
    cases = {
        "model.vocabulary": place.run(model__vocabulary=200),
        "batch.packs_per_step": place.run(ranks=3, batch__packs_per_step=2),
        "absent": place.run(data__text=f'["{place.folder}/absent"]'),
        "data.pack_length": place.run(data__pack_length=0),
    }
    for word, done in cases.items():
        assert done.returncode == 2, f"{word}: {done.returncode}\n{done.stdout}{done.stderr}"
        assert word in done.stderr, done.stderr
        assert not place.metrics()
