"""`isograd verify` beyond the configured layout: all of them, dumps, the smallest failure; and `train --verify-every`."""
import json
import os
import pathlib
import subprocess

from test_verify import config  # noqa: F401  (a fixture)

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release"))


def isograd(*arguments, status=0):
    done = subprocess.run([BUILD / "bin/isograd", *map(str, arguments)], cwd=ROOT, text=True, capture_output=True,
                          timeout=300, env=dict(os.environ, OMP_NUM_THREADS="1"))
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_every_layout_that_four_ranks_allow(config, tmp_path):  # noqa: F811
    text = isograd("verify", config, "--ranks", 4, "--layout", "all", "--json", tmp_path / "v.json", "--report",
                   tmp_path / "v.html")
    assert "parity PASS: 4 ranks = 1 device" in text
    grades = json.loads((tmp_path / "v.json").read_text())["grades"]
    strategies = {name.split(":")[0].split(" ")[0] for name in grades}
    assert strategies == {"naive", "overlapped", "bucketed", "zero1", "zero2", "zero3"}
    assert len(grades) == 38  # 19 layouts, each with and without accumulation
    for named in ["zero3:replicas=2:share=on", "zero2:replicas=4:share=off 1 to a micro-batch", "bucketed:share=on"]:
        assert grades[named]["E1"]["state"] == grades[named]["E2"]["state"] == grades[named]["E3"]["state"] == "pass"
    page = (tmp_path / "v.html").read_text()
    assert page.count("<title>") == 1 + 2 * 38 * 21  # a cell for each parameter, layout and precision


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
        text = isograd("train", config, "--ranks", 2, "--verify-every", 2, "--set", "train.steps=5", "--set",
                       f"parallel.strategy={strategy}", "--set", "sample.tokens=0", "--set", "parallel.share_parameters=off")
        assert "all 5 steps made" in text and "parity PASS" in text
    written = (tmp_path / "run/config.toml").read_text()
    assert "every = 2\nchecksums_every = 2" in written
    assert "verify.every" in isograd("train", config, "--verify-every", "-1", status=2)
