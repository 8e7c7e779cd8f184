"""`isograd verify` from the command line, on process ranks: the configured run, all layouts, dumps, the smallest failure; and
`train --verify-every`."""
import contextlib
import json
import os
import re
import subprocess

import pytest
from conftest import BINARY, FULL, ROOT, by_turns, full, isograd, ran, rows_of
from run_files import counting, text_tables, write_documents, write_run, write_video


@pytest.fixture
def config(tmp_path):
    write_documents(tmp_path, 12, counting)
    return write_run(tmp_path / "small.toml", text_tables(7, 2, 48, (32, 2, 4, 2, 8, 48)))


def verdict_of(tmp_path, *arguments, **options):
    """The verdict as JSON, and what was printed."""
    done = ran("verify", *arguments, "--json", tmp_path / "v.json", **options)
    return json.loads((tmp_path / "v.json").read_text()), done.stdout + done.stderr


@pytest.mark.parametrize("ranks", [1, 3])
def test_verify_proves_the_configured_run(config, tmp_path, ranks, backend):
    document, text = verdict_of(tmp_path, config, "--ranks", ranks, "--backend", backend, "--report", tmp_path / "v.html")
    assert f"parity PASS: {ranks} rank" in text
    assert (document["verdict"], document["diagnosis"], document["ranks"]) == ("pass", [], ranks)
    assert {document["grades"][grade]["state"] for grade in ("E1", "E2", "E3")} == {"pass"}
    for parameter in document["parameters"]:
        assert {"name", "ratio", "cosine", "error", "allowed"} <= set(parameter) and parameter["error"] <= 1e-10
    page = (tmp_path / "v.html").read_text()
    assert "<html" in page and "parity PASS" in page


def test_verify_tries_every_layout_asked_for(config, tmp_path, backend):
    document, _ = verdict_of(tmp_path, config, "--ranks", 2, "--backend", backend, "--layout", "bucketed", "--layout", "naive")
    assert set(document["grades"]) == {"bucketed", "naive"}


@pytest.mark.parametrize("ranks, train", by_turns([2, 3], [False, True]))
def test_the_sample_mean_of_documents_longer_than_the_pack(config, tmp_path, ranks, train):
    changes = ["--ranks", ranks, "loss.kind=sample_mean", "data.shuffle_packs=false", "data.pack_length=20"]
    if train:
        assert f"parity PASS: {ranks} ranks = 1 device" in ran("train", config, *changes, "train.steps=6", "sample.tokens=0").stdout
        return
    document, text = verdict_of(tmp_path, config, *changes)
    assert document["verdict"] == "pass" and document["loss"] == "sample mean" and "sample mean" in text


@pytest.mark.parametrize("kind", ["token_mean", "sample_mean"])
@pytest.mark.parametrize("ranks, tied", by_turns([1, 3], ["false", "true"]))
def test_the_fused_loss_has_the_gradient_of_its_logits(config, tmp_path, ranks, tied, kind):
    document, _ = verdict_of(tmp_path, config, "--ranks", ranks, "loss.fused=on", f"model.tied_output={tied}",
                             f"loss.kind={kind}", "data.shuffle_packs=false")
    assert document["verdict"] == "pass" and max(parameter["error"] for parameter in document["parameters"]) <= 1e-10


def test_a_run_with_the_fused_loss_is_the_run_without(config, tmp_path):
    losses = {}
    for fused in ["on", "off"]:
        ran("train", config, "--ranks", 2, f"loss.fused={fused}", "train.dtype=float64", "train.steps=5", "sample.tokens=0",
            "verify.at_end=false", f"run.directory={tmp_path}/{fused}")
        losses[fused] = [row["loss"] for row in rows_of(tmp_path / fused)]
    assert len(losses["on"]) == 5 and losses["on"] == pytest.approx(losses["off"], rel=1e-10)


LONG_PACKS = ["model.max_positions=16", "data.pack_length=64", "--ranks", 3]
CONTEXT = ["parallel.cp_ring=3", "data.pack_length=96"]
SCALED = ["model.rope_scaling.kind=dynamic", "model.rope_scaling.factor=2"]


@pytest.mark.parametrize("arguments, status, parts", [
    (["--ranks", 2, 'loss.normalise_over=["dp_shard", "cp_ring", "cp_ulysses"]'], 0,
     ["mean of per-replica token means, which depends on the layout"]),
    (["--ranks", 2, "loss.dp_replicate_reduction=mean"], 2, ["one of two readings"]),
    (["--ranks", 2, "--layout", "magic"], 2, ["magic", "bucketed"]),
    *[(["--ranks", 2, "--layout", wrong], 2, [wrong]) for wrong in ("naive:replicas=2", "zero9", "zero2:fast")],
    (["--ranks", 2, "--layout", "zero2:replicas=3"], 2, ["3"]),
    (["--ranks", 2, "--layout", "zero2:replicas=2:share=off"], 0, ["layout zero2:replicas=2:share=off, 2 ranks"]),
    (LONG_PACKS, 2, ["the model's positions"]), ([*LONG_PACKS, *SCALED], 0, []),
    ([*LONG_PACKS, *CONTEXT], 2, ["the model's positions"]), ([*LONG_PACKS, *CONTEXT, *SCALED], 0, []),
    (["--minimise", "smallest.toml", "--json", "v.json"], 2, ["--json"])], ids=str)
def test_what_it_says_of_a_configuration(config, arguments, status, parts):
    done = isograd("verify", config, *arguments, status=status)
    assert all(part in done.stdout + done.stderr for part in parts), done


def test_verify_says_how_far_it_is(config):
    """A line at once in a pipe; on a terminal one that renews itself and counts the layouts of all proofs, once each."""
    command = [BINARY, "verify", config, "--ranks", "2", "--layout", "all", "--set", "batch.packs_per_step=2", "--set",
               "data.pack_length=16", "--set", "model.layers=1"]
    done = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0 and len(done.stderr.splitlines()) < 5, done.stderr  # one each half minute
    total = int(re.match(r"(\d+) layouts: a plain step in fp64 on one process comes first, ", done.stderr).group(1))
    assert total > 5

    master, slave = os.openpty()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=slave)
    os.close(slave)
    shown = b""
    with contextlib.suppress(OSError):  # the other end has closed
        while part := os.read(master, 65536):
            shown += part
    out = process.communicate(timeout=300)[0]
    os.close(master)
    assert process.returncode == 0, out
    seen = re.findall(r"layout (\d+) of (\d+): ", shown.decode())
    assert {int(of) for _, of in seen} == {total}
    numbers = [int(number) for number, _ in seen]
    assert numbers == sorted(numbers) and set(numbers) == set(range(1, total + 1)), numbers
    assert b" left" in shown and shown.endswith(b"\r\x1b[K")


def strategies_and_meshes(verdict):
    """The layouts of the configured mesh, and the configured strategy on each of those proposed; all are proved."""
    tried = verdict["meshes"]["tried"]
    meshes = {name: grade for name, grade in verdict["grades"].items() if " on " in name}
    assert len(meshes) == len(tried) >= 2 and verdict["meshes"]["guilty"] == []
    assert all(mesh["proved"] for mesh in tried) and all(grade["passed"] for grade in meshes.values())
    assert verdict["meshes"]["admissible"] == len(tried) + len(verdict["meshes"]["not_run"])
    return {name: grade for name, grade in verdict["grades"].items() if name not in meshes}, meshes


@pytest.mark.parametrize("ranks", [1, full(2)])
def test_ranks_of_several_threads(config, ranks):
    """Large enough that products, attention, norms and the update are shared among them."""
    text = ran("verify", config, "--ranks", ranks, "data.pack_length=300", "model.layers=1", "model.hidden=192", "model.head_dim=48",
               "batch.packs_per_step=2", "batch.packs_per_micro_batch=1", OMP_NUM_THREADS="3").stdout
    assert f"parity PASS: {ranks} rank" in text and "same bits twice" in text, text


def test_every_layout_that_four_ranks_allow(config, tmp_path):
    small = ["model.layers=1", "batch.packs_per_step=5", "data.pack_length=24"]  # enough for every layout
    verdict, text = verdict_of(tmp_path, config, "--ranks", 4, "--layout", "all", *small, "--report", tmp_path / "v.html")
    assert "parity PASS: 4 ranks = 1 device" in text
    grades, meshes = strategies_and_meshes(verdict)
    strategies = {name.split(":")[0].split(" ")[0] for name in grades}
    assert strategies == {"naive", "overlapped", "bucketed", "zero1", "zero2", "zero3"}
    assert len(grades) == 38  # 19 layouts, each with and without accumulation
    for named in ["zero3:replicas=2:share=on", "zero2:replicas=4:share=off 1 to a micro-batch", "bucketed:share=on"]:
        assert grades[named]["E1"]["state"] == grades[named]["E2"]["state"] == grades[named]["E3"]["state"] == "pass"
    for name, layout in grades.items():
        after = [(path["optimizer"], path["updates"], path["passed"]) for path in layout["trajectories"]]
        assert after == [("SGD", 1, True), ("AdamW", 2, True)], name
        assert layout["bytes_moved"] == layout["bytes_needed"] > 0, name
    assert "after 1 update of SGD" in text and "after 2 updates of AdamW" in text
    page = (tmp_path / "v.html").read_text()
    assert page.count("<title>") == 1 + 3 * (38 + len(meshes)) * 12  # a dot for each parameter, layout and precision, and its ratio
    names = {mesh["mesh"] for mesh in verdict["meshes"]["tried"]}
    assert {"dp_replicate 4", "cp_ring 4", "dp_replicate 2 x tp 2", "cp_ring 2 x tp 2"} <= names, names
    for shown in [text, page]:
        assert "Meshes of 4 ranks, for this model and batch" in shown and "cp_ring 2 x tp 2" in shown
    assert f"{len(names)} of these are proved" in text


def test_dumps_of_verify_compare(config, tmp_path):
    dumps = tmp_path / "dumps"
    ran("verify", config, "--ranks", 2, "--layout", "zero2", "--layout", "naive", "--dump", dumps)
    assert {path.name for path in dumps.iterdir()} == {"oracle", "alone", "zero2", "naive", "zero2, fp32", "naive, fp32"}
    for layout in ["zero2", "naive"]:
        for grade, *words in (("E1", dumps / layout, dumps / "oracle"),
                              ("E2", dumps / f"{layout}, fp32", dumps / "oracle", "--alone", dumps / "alone")):
            ran("compare", *words, "--json", tmp_path / "v.json")
            assert json.loads((tmp_path / "v.json").read_text())["grades"][grade]["state"] == "pass"
    # Another batch: another step.
    ran("verify", config, "--ranks", 2, "run.seed=9", "--dump", tmp_path / "other")
    isograd("compare", tmp_path / "other/bucketed", dumps / "oracle", status=1)


def test_minimise_says_when_there_is_nothing_to_shrink(config, tmp_path):
    file = tmp_path / "smallest.toml"
    assert "nothing to minimise" in ran("verify", config, "--ranks", 2, "--minimise", file).stdout and not file.exists()


def test_a_run_is_checked_while_it_trains(config, tmp_path):
    for strategy in ["bucketed", "zero3"] if FULL else ["zero3"]:
        done = ran("train", config, "--overwrite", "--ranks", 2, "--verify-every", 2, "train.steps=5",
                   f"parallel.strategy={strategy}", "sample.tokens=0", "parallel.share_parameters=off")
        assert "all 5 steps made" in done.stdout + done.stderr and "parity PASS" in done.stdout
    assert "every = 2\nchecksums_every = 2" in (tmp_path / "run/config.toml").read_text()
    assert "verify.every" in isograd("train", config, "--verify-every", "-1", status=2).stderr


def test_videos_on_every_layout_and_their_dumps(tmp_path):
    (tmp_path / "clips").mkdir()
    for seed, (frames, rows, columns) in enumerate([(2, 8, 8), (4, 16, 16), (6, 16, 8), (8, 8, 16), (4, 8, 24), (2, 16, 24)]):
        write_video(tmp_path / f"clips/{seed}.y4m", frames, rows, columns, seed)
    path = write_run(tmp_path / "videos.toml", {
        "run": {"directory": "{folder}/run", "peak_tflops": 1}, "data": {"validation_fraction": 0.2},
        "batch": {"videos_per_step": 4, "tokens_per_micro_batch": 20},
        "model": {"kind": "video", "hidden": 16, "layers": 2, "heads": 2, "head_dim": 8, "feed_forward": 24},
        "video": {"files": ["{folder}/clips"], "height": 16, "frames_per_second": 0, "gate_init": 0.5, "timestep_features": 8}})
    dumps = tmp_path / "dumps"
    verdict, text = verdict_of(tmp_path, path, "--ranks", 2, "--layout", "all", "--report", tmp_path / "v.html", "--dump", dumps)
    assert "parity PASS: 2 ranks = 1 device" in text and "parity PASS" in (tmp_path / "v.html").read_text()
    grades, _ = strategies_and_meshes(verdict)
    assert len(grades) == 26 and all(layout["passed"] for layout in grades.values())
    # The dumps of one process and of each layout can be compared again.
    names = {folder.name for folder in dumps.iterdir()}
    assert {"oracle", "alone", "zero3:replicas=1:share=off", "zero3:replicas=1:share=off, fp32"} <= names
    for name in names & {"zero3:replicas=1:share=off", "bucketed:share=on a video to a micro-batch"}:
        ran("compare", dumps / name, dumps / "oracle")
    # Ranks that share each video have the same gradient as well.
    ran("verify", path, "--ranks", 2, "parallel.cp_ring=2", "--dump", tmp_path / "cut")
    ran("compare", tmp_path / "cut/bucketed", dumps / "oracle")
    if FULL:
        assert "parity PASS" in ran("verify", path, "--ranks", 4, "parallel.cp_ring=2", "--layout", "all").stdout
        assert "nothing to minimise" in ran("verify", path, "--ranks", 2, "--minimise", tmp_path / "smallest.toml").stdout
    # Where gates begin at zero most of the model has no gradient yet, and that is said.
    assert "little is proven" in ran("verify", path, "video.gate_init=0").stdout
