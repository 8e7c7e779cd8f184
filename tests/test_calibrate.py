"""isograd calibrate: what it refuses, and (in the full suite) the file that it leaves within a minute, and a trial of what is planned by it."""
import json
import time
import tomllib

import pytest
from conftest import ran, refused
from run_files import text_tables, write_documents, write_run


@pytest.mark.parametrize("ranks", [0, -1, 5000, "two"])
def test_a_number_of_ranks_that_cannot_be(tmp_path, ranks):
    assert "--ranks" in refused("calibrate", "--ranks", ranks, "-o", tmp_path / "here.toml")


def test_a_file_that_cannot_be_written(tmp_path):
    (tmp_path / "folder").mkdir()
    assert "folder" in refused("calibrate", "--ranks", 2, "-o", tmp_path / "folder")
    (tmp_path / "file").write_text("")
    assert "file" in refused("calibrate", "--ranks", 2, "-o", tmp_path / "file/here.toml")


@pytest.mark.full
def test_two_ranks_are_measured_within_a_minute(tmp_path):
    file = tmp_path / "new/here.toml"
    start = time.monotonic()
    said = ran("calibrate", "--ranks", 2, "-o", file).stdout
    assert time.monotonic() - start < 60
    assert str(file) in said
    found = tomllib.loads(file.read_text())
    assert found["cluster"]["devices"] == 2
    calibration = found["calibration"]
    for sentence in calibration["not_measured"]:
        assert sentence in said
    unsteady = " ".join(calibration["not_measured"])
    for precision in ("float32", "bfloat16"):
        assert any(one["precision"] == precision for one in found["product"]) or precision in unsteady
    for operation in ("all_reduce", "reduce_scatter", "all_gather", "all_to_all", "send"):
        assert any(one["operation"] == operation for one in found["collective"]) or operation in unsteady

    write_documents(tmp_path, 20, lambda i: "abc " * 800)
    config = write_run(tmp_path / "run.toml", text_tables(8, 2, 32, (16, 2, 2, 2, 8, 24)))
    planned = json.loads(ran("plan", config, "--cluster", file, "--try", 1, "--json").stdout)
    assert {part["number"]["origin"] for part in planned["top"][0]["step_parts"]} == {"calibrated"}
    (tried,) = planned["tried"]
    assert tried["measured_seconds"] > 0 and tried["measured_bytes"] > 0 and tried["why_not"] == "", tried
    assert planned["largest_micro_batch"]["measured"] > 0
