"""isograd layout: what it says of every kind of configuration, beside what a run of it measures."""
import json
import re
import subprocess

import pytest
from test_cli import BINARY, CONFIG, ROOT, VIDEOS, isograd, refused
from test_docs import said


@pytest.fixture
def config(tmp_path):
    """Without its text: a text's model does not depend on it."""
    path = tmp_path / "run.toml"
    path.write_text(CONFIG.format(folder=tmp_path))
    return path


def layout(*arguments, **options):
    done = isograd("layout", *arguments, "--json", **options)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def owners_of(parameter):
    """How often each element is owned."""
    elements = 1
    for size in parameter["local_shape"]:
        elements *= size
    count = [0] * elements
    for owner in parameter["owners"]:
        for element in range(*owner["elements"]):
            count[element] += 1
    return count


@pytest.mark.parametrize("strategy, sets", [("bucketed", []), ("zero2", ["parallel.share_parameters=off", "train.dtype=bfloat16"]),
                                            ("zero3", ["parallel.share_parameters=off"])])
def test_the_bytes_are_those_that_a_run_measures(config, strategy, sets):
    (config.parent / "text").mkdir()
    for i in range(20):
        (config.parent / f"text/{i:02}.txt").write_text(f"document {i}: " + "abc " * (3 + 7 * i % 23))
    sets = [f"--set={one}" for one in [f"parallel.strategy={strategy}", *sets]]
    run = isograd("train", config, "--ranks", 2, "--memory", "--set=verify.at_end=false", "--set=train.steps=1", *sets)
    assert run.returncode == 0, run.stderr
    printed = run.stdout + run.stderr
    columns = ["parameters", "gradients", "masters", "state", "total"]

    def megabytes(head):
        return re.search(rf"^\W*{head} +(.*)$", printed, re.M)[1].split()[:5]
    for rank in (0, 1):
        totals = layout(config, "--ranks", 2, "--rank", rank, *sets)["totals"]
        for head, found in [(f"rank {rank}", totals["bytes"]), ("formula", totals["formula"])]:
            assert [f"{found[column] / 1e6:.2f}" for column in columns] == megabytes(head), printed


def test_json_has_every_element_and_text_what_it_says(config):
    sets = ["--set=parallel.strategy=zero3", "--set=parallel.share_parameters=off", "--set=parallel.replicas=2"]
    seen = [layout(config, "--ranks", 4, "--rank", rank, *sets) for rank in range(4)]
    first = seen[0]
    assert first["mesh"]["counted_along"] == ["dp_replicate", "dp_shard"] and first["strategy"] == "zero3"
    assert [axis["ranks"] for axis in seen[3]["mesh"]["axes"]] == [[1, 3], [2, 3], [3], [3]]
    for parameter in first["parameters"]:
        assert set(owners_of(parameter)) == {1}, parameter["name"]
        assert parameter["sharded_along"] == ["dp_shard"] and not parameter["cuts"]
    for one in seen:
        assert [p["owners"] for p in one["parameters"]] == [p["owners"] for p in first["parameters"]]
        for column in ("parameters", "gradients", "state", "total"):
            parts = sum(p["bytes"][column] for p in one["parameters"])
            assert parts + one["totals"]["padding"][column] == one["totals"]["bytes"][column]
    # Replicas hold the same, and one of them owns it.
    assert [p["held"] for p in seen[1]["parameters"]] == [p["held"] for p in seen[3]["parameters"]]
    assert all(owner["rank"] in (0, 1) for p in first["parameters"] for owner in p["owners"])
    text = isograd("layout", config, "--ranks", 4, *sets)
    assert text.returncode == 0 and max(map(len, text.stdout.splitlines())) <= 100
    assert "Targets are counted along dp_replicate, dp_shard: 4 ranks." in text.stdout
    for parameter in first["parameters"]:
        shape = " x ".join(map(str, parameter["whole_shape"]))
        row = rf"^{re.escape(parameter['name'])} +{shape} +whole .* {parameter['bytes']['total']}$"
        assert re.search(row, text.stdout, re.M), text.stdout


def test_the_output_that_is_documented():
    shown = re.search(r"<!-- output: (.*?) -->\n```\n(.*?)```", (ROOT / "docs/layout.md").read_text(), re.S)
    printed = [said(line) for line in isograd(*shown[1].split(), cwd=ROOT).stdout.splitlines()]
    for line in shown[2].splitlines():
        assert line == "..." or said(line) in printed, f"not printed: {line}"


def test_videos_and_tables(tmp_path):
    (tmp_path / "videos").mkdir()
    frame = b"FRAME\n" + bytes(3 * 8 * 12)
    (tmp_path / "videos/0.y4m").write_bytes(b"YUV4MPEG2 W12 H8 F8:1 Ip A1:1 C444\n" + 4 * frame)
    (tmp_path / "videos.toml").write_text(VIDEOS.format(folder=tmp_path))
    (tmp_path / "table.csv").write_text("a,b,y\n" + "".join(f"{i},{i * i % 7},{int(i % 5 == 0)}\n" for i in range(40)))
    (tmp_path / "table.toml").write_text(f'[data]\ntable = "{tmp_path}/table.csv"\n[batch]\nrows_per_step = 8\n'
                                         '[model]\nkind = "scorer"\nscorer_units = 5\n')
    for strategy in ("naive", "zero1", "zero3"):
        videos = layout(tmp_path / "videos.toml", "--ranks", 2, f"--set=parallel.strategy={strategy}")
        scorer = layout(tmp_path / "table.toml", "--ranks", 2, f"--set=parallel.strategy={strategy}")
        assert {tuple(p["whole_shape"]) for p in scorer["parameters"]} >= {(5, 2), (5,), (1, 5)}
        for one in (videos, scorer):
            assert len(one["parameters"]) > 2 and all(set(owners_of(p)) == {1} for p in one["parameters"])
    assert "other patches of the same" in isograd("layout", tmp_path / "videos.toml", "--ranks", 2, "--set",
                                                  "parallel.cp_ring=2").stdout


def test_a_loaded_model_is_described_without_its_weights(config, tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384,
        "num_hidden_layers": 2, "num_attention_heads": 128, "num_key_value_heads": 8, "intermediate_size": 53248,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}))
    text = re.sub(r"\[model\].*?\[train\]", f'[model]\nload = "{folder}"\n[train]', config.read_text(), flags=re.S)
    config.write_text(text)
    limit = f"ulimit -v 4000000; {BINARY} layout {config} --ranks 8 --set batch.packs_per_step=8 --json"  # kB
    done = subprocess.run(["bash", "-c", limit], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["totals"]["elements"] > 10**10


def test_gpus_need_not_be_here(config):
    sets = ["--set=parallel.device=cuda", "--set=parallel.strategy=zero1"]
    assert layout(config, "--ranks", 4, *sets)["buckets"][0]["owners"][3]["rank"] == 3


def test_bad_input(config):
    assert "--rank 4" in refused("layout", config, "--ranks", 4, "--rank", 4)
    said_of = refused("layout", config, "--ranks", 3, "--set", "parallel.replicas=2", "--set", "parallel.strategy=zero1")
    assert "dp_replicate 2" in said_of and "Change parallel.replicas" in said_of
    assert "parallel.cp_ring" in refused("layout", config, "--set", "parallel.cp_rink=2")
    assert "dp_shrad" in refused("layout", config, "--set", "loss.normalise_over=dp_shrad")
    assert "none.toml" in refused("layout", config.parent / "none.toml")
    assert "batch.packs_per_step" in refused("layout", config, "--ranks", 5)
    assert "--ranks" in refused("layout", config, "--ranks", 0)
