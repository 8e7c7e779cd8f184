"""train.clip_groups, optimizer.groups, train.part_norms: runs on ranks compared with one process, what is logged, resumed, verified and
refused."""
import json

import pytest
from conftest import isograd, rows_of
from test_hosts import written

LIMITED = ['train.clip_groups=["*.mlp.*: 0.02", "*norm.weight: 0.002"]', "train.max_norm=0.05"]


@pytest.fixture
def config(tmp_path):
    return written(tmp_path)


def train(config, directory, *arguments):
    isograd("train", config, f"run.directory={directory}", *arguments, status=0)
    return rows_of(directory)


def test_ranks_clip_as_one_process_does_and_a_resume_goes_on(config, tmp_path):
    alone = train(config, tmp_path / "one", *LIMITED)
    for row in alone:
        assert row["clip_coefficient"] == 1 and set(row["clip_groups"]) == {"*.mlp.*", "*norm.weight", "others"}
        assert sum(one["norm"] ** 2 for one in row["clip_groups"].values()) == pytest.approx(row["norm"] ** 2, rel=1e-10)
        for name, limit in (("*.mlp.*", 0.02), ("*norm.weight", 0.002), ("others", 0.05)):
            own = row["clip_groups"][name]
            assert own["clip_coefficient"] == pytest.approx(min(1, limit / (own["norm"] + 1e-6)), rel=1e-12)
            assert own["clip_coefficient"] < 0.9  # each clips, and by a number of its own
    whole = [row["loss"] for row in alone]
    assert train(config, tmp_path / "not", "train.max_norm=0")[-1]["loss"] != pytest.approx(whole[-1], rel=1e-6)
    several = train(config, tmp_path / "four", *LIMITED, "--ranks", 4, "parallel.tp=2", "parallel.strategy=zero1")
    assert [row["loss"] for row in several] == pytest.approx(whole, rel=1e-10)
    for one, other in zip(several, alone):
        for name, own in one["clip_groups"].items():
            assert own["norm"] == pytest.approx(other["clip_groups"][name]["norm"], rel=1e-10)
    train(config, tmp_path / "again", *LIMITED, "train.steps=2")
    resumed = train(config, tmp_path / "again", *LIMITED, "checkpoint.resume=latest", "--ranks", 2)
    assert [row["loss"] for row in resumed] == pytest.approx(whole, rel=1e-10)
    assert "clipped separately" in (tmp_path / "four/report.html").read_text()


def test_verify_clips_each_group_by_its_own_norm(config, tmp_path):
    isograd("verify", config, "--ranks", 2, *LIMITED, "train.dtype=float32", "--json", tmp_path / "v.json", status=0)
    grades = json.loads((tmp_path / "v.json").read_text())["grades"]
    assert grades["E1"]["state"] == grades["E2"]["state"] == "pass"


def test_ranks_update_groups_and_smooth_labels_as_one_process_does(config, tmp_path):
    told = ['optimizer.groups=["*.mlp.*: rate=3", "*norm.weight: rate=0.5 weight_decay=0.4"]', "loss.label_smoothing=0.1", "loss.z_loss=0.01",
            "schedule.kind=wsd", "schedule.decay=2", "schedule.warmup=0", "schedule.peak=0.01", "train.steps=4"]
    alone = train(config, tmp_path / "one", *told)
    peak, floor = 0.01, 0.001
    assert [row["learning_rate"] for row in alone] == pytest.approx([peak, peak, peak, (peak + floor) / 2], rel=1e-12)
    several = train(config, tmp_path / "four", *told, "--ranks", 4, "parallel.tp=2", "parallel.strategy=zero1")
    assert [row["loss"] for row in several] == pytest.approx([row["loss"] for row in alone], rel=1e-10)
    for left_out in range(3):  # each changes the run
        other = train(config, tmp_path / str(left_out), *told[:left_out], *told[left_out + 1:])
        assert other[-1]["loss"] != pytest.approx(alone[-1]["loss"], rel=1e-6)
    assert "*.mlp.*: rate=3" in (tmp_path / "four/report.html").read_text()


def test_norms_of_layers_are_those_of_one_process(config, tmp_path):
    """On a mesh of three axes, where a layer's elements lie in one stage, on two tp ranks, in two shards."""
    layers = "train.part_norms=layers"
    rows = {name: train(config, tmp_path / name, layers, *mesh) for name, mesh in (
        ("one", []), ("mesh", ["--ranks", 8, "parallel.pp=2", "parallel.tp=2", "parallel.strategy=zero1"]))}
    for one, mesh in zip(rows["one"], rows["mesh"], strict=True):
        assert {"model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"} <= set(one["norms"])
        assert one["norms"] == pytest.approx(mesh["norms"], rel=1e-10)
        assert sum(norm ** 2 for norm in mesh["norms"].values()) == pytest.approx(mesh["norm"] ** 2, rel=1e-12)
    longer = train(config, tmp_path / "one", layers, "train.steps=4", "checkpoint.resume=latest")
    assert [row["norms"] for row in longer[:3]] == [row["norms"] for row in rows["one"]]


@pytest.mark.parametrize("key, groups, said", [
    ("train.clip_groups", '["*.nothing.*: 1"]', "fits no trained parameter"),
    ("train.clip_groups", '["*.mlp.*: 1", "*.weight: 1"]', "in two groups"), ("train.clip_groups", '["*.mlp.*: 0"]', "no number above 0"),
    ("train.clip_groups", '["*.mlp.*"]', "has no colon"), ("train.clip_groups", '["a: 1", "a: 2"]', "there already"),
    ("optimizer.groups", '["*.nothing.*: rate=1"]', "fits no trained parameter"),
    ("optimizer.groups", '["*.mlp.*: rate=1", "*up_proj*: rate=1"]', "in two groups"),
    ("optimizer.groups", '["*.mlp.*: weight_decay=-1"]', "no number of 0 or more")])
def test_bad_groups_are_refused(config, key, groups, said):
    for verb, more in (("train", ["--ranks", 2]), ("verify", ["--ranks", 2]), ("layout", [])):
        message = isograd(verb, config, *more, f"{key}={groups}", status=2).stderr
        assert said in message and key in message
