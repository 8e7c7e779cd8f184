"""isograd layout: its output for every kind of configuration, compared with what a run of it measures."""
import json
import math
import re
import subprocess

import pytest
from conftest import BINARY, isograd, ran, refused
from run_files import write_documents, write_run, write_video
from test_cli import TABLES, VIDEOS, without_model


@pytest.fixture
def config(tmp_path):
    """Without its text: a text's model does not depend on it."""
    return write_run(tmp_path / "run.toml", TABLES)


def layout(*arguments):
    return json.loads(ran("layout", *arguments, "--json").stdout)


def owners_of(parameter):
    """How often each element is owned."""
    count = [0] * math.prod(parameter["local_shape"])
    for owner in parameter["owners"]:
        for element in range(*owner["elements"]):
            count[element] += 1
    return count


@pytest.mark.parametrize("strategy, sets", [("bucketed", []), ("zero2", ["parallel.share_parameters=off", "train.dtype=bfloat16"]),
                                            ("zero3", ["parallel.share_parameters=off"])])
def test_the_bytes_are_those_that_a_run_measures(config, strategy, sets):
    write_documents(config.parent, 20)
    sets = [f"parallel.strategy={strategy}", *sets]
    run = ran("train", config, "--ranks", 2, "--memory", "verify.at_end=false", "train.steps=1", *sets)
    printed = run.stdout + run.stderr
    columns = ["parameters", "gradients", "masters", "state", "total"]

    def megabytes(head):
        return re.search(rf"^\W*{head} +(.*)$", printed, re.M)[1].split()[:5]
    for rank in (0, 1):
        totals = layout(config, "--ranks", 2, "--rank", rank, *sets)["totals"]
        for head, found in [(f"rank {rank}", totals["bytes"]), ("formula", totals["formula"])]:
            assert [f"{found[column] / 1e6:.2f}" for column in columns] == megabytes(head), printed


def test_json_has_every_element_and_text_what_it_says(config):
    sets = ["parallel.strategy=zero3", "parallel.share_parameters=off", "parallel.replicas=2"]
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


def test_videos_and_tables(tmp_path):
    (tmp_path / "videos").mkdir()
    write_video(tmp_path / "videos/0.y4m", 4, 8, 12, 0)
    write_run(tmp_path / "videos.toml", VIDEOS)
    (tmp_path / "table.csv").write_text("a,b,y\n" + "".join(f"{i},{i * i % 7},{int(i % 5 == 0)}\n" for i in range(40)))
    (tmp_path / "table.toml").write_text(f'[data]\ntable = "{tmp_path}/table.csv"\n[batch]\nrows_per_step = 8\n'
                                         '[model]\nkind = "scorer"\nscorer_units = 5\n')
    for strategy in ("naive", "zero1", "zero3"):
        videos, scorer = (layout(tmp_path / f"{kind}.toml", "--ranks", 2, f"parallel.strategy={strategy}")
                          for kind in ("videos", "table"))
        assert {tuple(p["whole_shape"]) for p in scorer["parameters"]} >= {(5, 2), (5,), (1, 5)}
        for one in (videos, scorer):
            assert len(one["parameters"]) > 2 and all(set(owners_of(p)) == {1} for p in one["parameters"])
    assert "other patches of the same" in ran("layout", tmp_path / "videos.toml", "--ranks", 2, "parallel.cp_ring=2").stdout


def test_a_loaded_model_is_described_without_its_weights(config, tmp_path):
    folder = tmp_path / "hub"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128256, "hidden_size": 16384,
        "num_hidden_layers": 2, "num_attention_heads": 128, "num_key_value_heads": 8, "intermediate_size": 53248,
        "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False}))
    limit = (f"ulimit -v 4000000; {BINARY} layout {without_model(config)} --ranks 8 --set batch.packs_per_step=8 --json "  # kB
             f"--set model.load={folder}")
    done = subprocess.run(["bash", "-c", limit], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["totals"]["elements"] > 10**10


def test_gpus_need_not_be_here(config):
    sets = ["parallel.device=cuda", "parallel.strategy=zero1"]
    assert layout(config, "--ranks", 4, *sets)["buckets"][0]["owners"][3]["rank"] == 3


def test_bad_input(config):
    assert "--rank 4" in refused("layout", config, "--ranks", 4, "--rank", 4)
    said_of = refused("layout", config, "--ranks", 3, "parallel.replicas=2", "parallel.strategy=zero1")
    assert "dp_replicate 2" in said_of and "Change parallel.replicas" in said_of
    assert "parallel.cp_ring" in refused("layout", config, "parallel.cp_rink=2")
    assert "dp_shrad" in refused("layout", config, "loss.normalise_over=dp_shrad")
    assert "none.toml" in refused("layout", config.parent / "none.toml")
    assert "batch.packs_per_step" in refused("layout", config, "--ranks", 5)
    assert "--ranks" in refused("layout", config, "--ranks", 0)
