"""TensorBoard reads what a run wrote: every value, and after a resume no step of a future that was not taken."""
import json

import pytest
from conftest import ran
from run_files import text_tables, write_documents, write_run
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

TAGS = {"train/loss": "loss", "train/norm": "norm", "train/clip_coefficient": "clip_coefficient",
        "train/learning_rate": "learning_rate", "speed/tokens_per_second": "tokens_per_second",
        "train/perplexity": "perplexity", "validation/perplexity": "validation_perplexity", "speed/mfu": "mfu",
        "speed/seconds": "seconds", "speed/exposed_seconds": "exposed_seconds", "validation/loss": "validation_loss"}


def check_against_log(run):
    """Every scalar of the event files is the log's, step by step. Returns the steps of the loss."""
    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert set(events.Tags()["scalars"]) == set(TAGS)
    for tag, name in TAGS.items():
        logged = {row["step"]: row[name] for row in rows if name in row}
        read = {event.step: event.value for event in events.Scalars(tag)}
        assert read.keys() == logged.keys(), tag
        for step, value in logged.items():
            assert read[step] == pytest.approx(value, rel=2 ** -23), (tag, step)  # stored as 32-bit numbers
    return [event.step for event in events.Scalars("train/loss")]


def test_tensorboard_reads_a_run_and_its_continuation(tmp_path):
    write_documents(tmp_path, 12, lambda i: "some words " * (3 + i))
    config = write_run(tmp_path / "run.toml", text_tables(
        2, 2, 32, (16, 1, 2, 1, 8, 24), data={"validation_fraction": 0.2}, model={"max_positions": 64},
        train={"steps": 6, "evaluate_every": 3, "evaluate_packs": 2}, checkpoint={"every": 3, "keep": 10},
        verify={"at_end": False}, sample={"tokens": 0}))
    ran("train", config)
    assert check_against_log(tmp_path / "run") == [1, 2, 3, 4, 5, 6]

    # Back to step 3: steps 4 to 6 of the first run must be gone, in the log and in TensorBoard.
    checkpoint = tmp_path / "run/checkpoints/step-00000003"
    ran("train", config, f"checkpoint.resume={checkpoint}", "train.steps=5")
    assert check_against_log(tmp_path / "run") == [1, 2, 3, 4, 5]

    # A fresh run in the same folder: nothing of the earlier ones.
    ran("train", config, "--overwrite", "train.steps=2", "train.evaluate_every=1")
    assert check_against_log(tmp_path / "run") == [1, 2]
