"""train.clip_groups, train.part_norms: runs on ranks compared with one process, what is logged, resumed, verified and refused."""
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


@pytest.mark.parametrize("groups, said", [
    ('["*.nothing.*: 1"]', "fits no trained parameter"), ('["*.mlp.*: 1", "*.weight: 1"]', "in two groups"),
    ('["*.mlp.*: 0"]', "no number above 0"), ('["*.mlp.*"]', "names no limit"), ('["a: 1", "a: 2"]', "there already")])
def test_bad_groups_are_refused(config, groups, said):
    for verb, more in (("train", ["--ranks", 2]), ("layout", [])):
        assert said in isograd(verb, config, *more, f"train.clip_groups={groups}", status=2).stderr
