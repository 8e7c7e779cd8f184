"""`isograd verify` beyond the configured layout: all of them, dumps, the smallest failure; and `train --verify-every`."""
import json
import os
import pathlib
import subprocess

from test_verify import config  # noqa: F401  (a fixture)

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release"))


def isograd(*arguments, status=0, threads=1):
    done = subprocess.run([BUILD / "bin/isograd", *map(str, arguments)], cwd=ROOT, text=True, capture_output=True,
                          timeout=300, env=dict(os.environ, OMP_NUM_THREADS=str(threads)))
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def strategies_and_meshes(verdict):
    """The layouts of the configured mesh, and the configured strategy on each of those proposed; all are proved."""
    tried = verdict["meshes"]["tried"]
    meshes = {name: grade for name, grade in verdict["grades"].items() if " on " in name}
    assert len(meshes) == len(tried) >= 2 and verdict["meshes"]["guilty"] == []
    assert all(mesh["proved"] for mesh in tried) and all(grade["passed"] for grade in meshes.values())
    assert verdict["meshes"]["admissible"] == len(tried) + len(verdict["meshes"]["not_run"])
    return {name: grade for name, grade in verdict["grades"].items() if name not in meshes}, meshes


def test_ranks_of_several_threads(config, tmp_path):  # noqa: F811
    """Large enough that products, attention, norms and the update are shared among them."""
    wide = ["--set", "data.pack_length=300", "--set", "model.hidden=192", "--set", "model.head_dim=48"]
    for ranks in (1, 2):
        text = isograd("verify", config, "--ranks", ranks, *wide, threads=3)
        assert f"parity PASS: {ranks} rank" in text and "same bits twice" in text, text


def test_every_layout_that_four_ranks_allow(config, tmp_path):  # noqa: F811
    text = isograd("verify", config, "--ranks", 4, "--layout", "all", "--json", tmp_path / "v.json", "--report",
                   tmp_path / "v.html")
    assert "parity PASS: 4 ranks = 1 device" in text
    verdict = json.loads((tmp_path / "v.json").read_text())
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
    assert page.count("<title>") == 1 + 2 * (38 + len(meshes)) * 21  # a cell for each parameter, layout and precision
    names = {mesh["mesh"] for mesh in verdict["meshes"]["tried"]}
    assert {"dp_replicate 4", "cp_ring 4", "dp_replicate 2 x tp 2", "cp_ring 2 x tp 2"} <= names, names
    for said in [text, page]:
        assert "Meshes of 4 ranks, for this model and batch" in said and "cp_ring 2 x tp 2" in said
    assert f"{len(names)} of these are proved" in text


def test_a_layout_by_name_and_one_that_cannot_be(config, tmp_path):  # noqa: F811
    text = isograd("verify", config, "--ranks", 2, "--layout", "zero2:replicas=2:share=off")
    assert "layout zero2:replicas=2:share=off, 2 ranks" in text
    for wrong in ["naive:replicas=2", "zero9", "zero2:fast"]:
        assert wrong in isograd("verify", config, "--ranks", 2, "--layout", wrong, status=2)
    assert "3" in isograd("verify", config, "--ranks", 2, "--layout", "zero2:replicas=3", status=2)


def test_dumps_of_verify_compare(config, tmp_path):  # noqa: F811
    dumps = tmp_path / "dumps"
    isograd("verify", config, "--ranks", 2, "--layout", "zero2", "--layout", "naive", "--dump", dumps)
    assert {path.name for path in dumps.iterdir()} == {"oracle", "alone", "zero2", "naive", "zero2, fp32", "naive, fp32"}

    def grades(*arguments):
        isograd("compare", *arguments, "--json", tmp_path / "v.json")
        return json.loads((tmp_path / "v.json").read_text())["grades"]
    for layout in ["zero2", "naive"]:
        assert grades(dumps / layout, dumps / "oracle")["E1"]["state"] == "pass"
        assert grades(dumps / f"{layout}, fp32", dumps / "oracle", "--alone", dumps / "alone")["E2"]["state"] == "pass"
    # Another batch: another step.
    isograd("verify", config, "--ranks", 2, "--set", "run.seed=9", "--dump", tmp_path / "other")
    isograd("compare", tmp_path / "other/bucketed", dumps / "oracle", status=1)


def test_minimise_says_when_there_is_nothing_to_shrink(config, tmp_path):  # noqa: F811
    file = tmp_path / "smallest.toml"
    text = isograd("verify", config, "--ranks", 2, "--minimise", file)
    assert "nothing to minimise" in text and not file.exists()
    assert "--json" in isograd("verify", config, "--minimise", file, "--json", tmp_path / "v.json", status=2)


def test_a_run_is_checked_while_it_trains(config, tmp_path):  # noqa: F811
    for strategy in ["bucketed", "zero3"]:
        text = isograd("train", config, "--overwrite", "--ranks", 2, "--verify-every", 2, "--set", "train.steps=5", "--set",
                       f"parallel.strategy={strategy}", "--set", "sample.tokens=0", "--set", "parallel.share_parameters=off")
        assert "all 5 steps made" in text and "parity PASS" in text
    written = (tmp_path / "run/config.toml").read_text()
    assert "every = 2\nchecksums_every = 2" in written
    assert "verify.every" in isograd("train", config, "--verify-every", "-1", status=2)


def write_video(path, frames, rows, columns, seed):
    """An uncompressed video: a gradient that moves."""
    data = f"YUV4MPEG2 W{columns} H{rows} F8:1 Ip A1:1 C444\n".encode()
    for frame in range(frames):
        pixels = [(7 * x + 5 * y + 3 * frame + 11 * seed + 40 * plane) % 256
                  for plane in range(3) for y in range(rows) for x in range(columns)]
        data += b"FRAME\n" + bytes(pixels)
    path.write_bytes(data)


VIDEOS = """
[run]
directory = "{folder}/run"
[data]
validation_fraction = 0.2
[batch]
videos_per_step = 4
tokens_per_micro_batch = 20
[model]
kind = "video"
hidden = 16
layers = 2
heads = 2
head_dim = 8
feed_forward = 24
[video]
files = ["{folder}/clips"]
height = 16
frames_per_second = 0
gate_init = 0.5
timestep_features = 8
"""


def test_videos_on_every_layout_and_their_dumps(tmp_path):
    (tmp_path / "clips").mkdir()
    for seed, (frames, rows, columns) in enumerate([(2, 8, 8), (4, 16, 16), (6, 16, 8), (8, 8, 16), (4, 8, 24), (2, 16, 24)]):
        write_video(tmp_path / f"clips/{seed}.y4m", frames, rows, columns, seed)
    path = tmp_path / "videos.toml"
    path.write_text(VIDEOS.format(folder=tmp_path))
    dumps = tmp_path / "dumps"
    text = isograd("verify", path, "--ranks", 2, "--layout", "all", "--json", tmp_path / "v.json", "--report",
                   tmp_path / "v.html", "--dump", dumps)
    assert "parity PASS: 2 ranks = 1 device" in text
    grades, _ = strategies_and_meshes(json.loads((tmp_path / "v.json").read_text()))
    assert len(grades) == 26 and all(layout["passed"] for layout in grades.values())
    assert (tmp_path / "v.html").read_text().count("parity PASS") >= 1
    # What one process and each layout made can be compared again.
    names = {folder.name for folder in dumps.iterdir()}
    assert {"oracle", "alone", "zero3:replicas=1:share=off", "zero3:replicas=1:share=off, fp32"} <= names
    for name in ["zero3:replicas=1:share=off", "bucketed:share=on a video to a micro-batch"]:
        if name in names:
            isograd("compare", dumps / name, dumps / "oracle")
    # Ranks that share each video have the same gradient as well.
    cut = ["--set", "parallel.cp_ring=2"]
    isograd("verify", path, "--ranks", 2, *cut, "--dump", tmp_path / "cut")
    isograd("compare", tmp_path / "cut/bucketed", dumps / "oracle")
    assert "parity PASS" in isograd("verify", path, "--ranks", 4, *cut, "--layout", "all")
    # Where gates begin at zero most of the model has no gradient yet, and that is said.
    assert "little is proven" in isograd("verify", path, "--set", "video.gate_init=0")
    smallest = tmp_path / "smallest.toml"
    assert "nothing to minimise" in isograd("verify", path, "--ranks", 2, "--minimise", smallest)
