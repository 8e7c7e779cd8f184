"""train.clip_groups, train.part_norms: runs on ranks beside one process, what is logged, resumed, verified and refused."""
import json

import pytest
from test_cli import isograd
from test_hosts import steps, written

GROUPS = 'train.clip_groups=["*.mlp.*: 0.02", "*norm.weight: 0.002"]'


@pytest.fixture
def config(tmp_path):
    return written(tmp_path)


def train(config, directory, *arguments):
    done = isograd("train", config, f"--set={GROUPS}", "--set=train.max_norm=0.05", f"--set=run.directory={directory}", *arguments)
    assert done.returncode == 0, done.stderr
    return steps(directory)


def test_ranks_clip_as_one_process_does_and_a_resume_goes_on(config, tmp_path):
    alone = train(config, tmp_path / "one")
    for row in alone:
        assert row["clip_coefficient"] == 1 and set(row["clip_groups"]) == {"*.mlp.*", "*norm.weight", "others"}
        assert sum(one["norm"] ** 2 for one in row["clip_groups"].values()) == pytest.approx(row["norm"] ** 2, rel=1e-10)
        for name, limit in (("*.mlp.*", 0.02), ("*norm.weight", 0.002), ("others", 0.05)):
            own = row["clip_groups"][name]
            assert own["clip_coefficient"] == pytest.approx(min(1, limit / (own["norm"] + 1e-6)), rel=1e-12)
            assert own["clip_coefficient"] < 0.9  # each clips, and by a number of its own
    whole = [row["loss"] for row in alone]
    unclipped = isograd("train", config, "--set=train.max_norm=0", f"--set=run.directory={tmp_path}/not")
    assert unclipped.returncode == 0 and steps(tmp_path / "not")[-1]["loss"] != pytest.approx(whole[-1], rel=1e-6)
    several = train(config, tmp_path / "four", "--ranks", 4, "--set=parallel.tp=2", "--set=parallel.strategy=zero1")
    assert [row["loss"] for row in several] == pytest.approx(whole, rel=1e-10)
    for one, other in zip(several, alone):
        for name, own in one["clip_groups"].items():
            assert own["norm"] == pytest.approx(other["clip_groups"][name]["norm"], rel=1e-10)
    train(config, tmp_path / "again", "--set=train.steps=2")
    resumed = train(config, tmp_path / "again", "--set=checkpoint.resume=latest", "--ranks", 2)
    assert [row["loss"] for row in resumed] == pytest.approx(whole, rel=1e-10)
    assert "clipped separately" in (tmp_path / "four/report.html").read_text()


def test_verify_clips_each_group_by_its_own_norm(config, tmp_path):
    done = isograd("verify", config, "--ranks", 2, f"--set={GROUPS}", "--set=train.max_norm=0.05",
                   "--set=train.dtype=float32", "--json", tmp_path / "v.json")
    assert done.returncode == 0, done.stdout + done.stderr
    grades = json.loads((tmp_path / "v.json").read_text())["grades"]
    assert grades["E1"]["state"] == grades["E2"]["state"] == "pass"


def test_norms_of_layers_are_those_of_one_process(config, tmp_path):
    """On a mesh of three axes, where a layer's elements lie in one stage, on two tp ranks, in two shards."""
    rows = {}
    for name, mesh in (("one", []), ("mesh", ["--ranks", 8, "--set=parallel.pp=2", "--set=parallel.tp=2", "--set=parallel.strategy=zero1"])):
        done = isograd("train", config, "--set=train.part_norms=layers", f"--set=run.directory={tmp_path}/{name}", *mesh)
        assert done.returncode == 0, done.stderr
        rows[name] = steps(tmp_path / name)
    for one, mesh in zip(rows["one"], rows["mesh"], strict=True):
        assert {"model.embed_tokens", "model.layers.0", "model.layers.1", "model.norm"} <= set(one["norms"])
        assert one["norms"] == pytest.approx(mesh["norms"], rel=1e-10)
        assert sum(norm ** 2 for norm in mesh["norms"].values()) == pytest.approx(mesh["norm"] ** 2, rel=1e-12)
    done = isograd("train", config, "--set=train.part_norms=layers", "--set=train.steps=4",
                   "--set=checkpoint.resume=latest", f"--set=run.directory={tmp_path}/one")
    assert done.returncode == 0, done.stderr
    assert [row["norms"] for row in steps(tmp_path / "one")[:3]] == [row["norms"] for row in rows["one"]]


@pytest.mark.parametrize("groups, said", [
    ('["*.nothing.*: 1"]', "fits no trained parameter"), ('["*.mlp.*: 1", "*.weight: 1"]', "in two groups"),
    ('["*.mlp.*: 0"]', "no number above 0"), ('["*.mlp.*"]', "names no limit"), ('["a: 1", "a: 2"]', "there already")])
def test_bad_groups_are_refused(config, groups, said):
    for verb, more in (("train", ["--ranks", 2]), ("layout", [])):
        done = isograd(verb, config, *more, f"--set=train.clip_groups={groups}")
        assert done.returncode == 2 and said in done.stderr, done.stderr
