"""`isograd compare` on PyTorch trainers, mistaken and right: some of those of compare_trials, run by one driver.

ISOGRAD_FULL_TESTS=1 (or `./dev trials`): all 70, and the driver's own bounds on how many are named.
"""
import json
import os
import subprocess
import sys

import pytest
from conftest import BINARY, ROOT

SOME = ["DdpUneven", "DdpEmptyRank", "DdpPrefixedNames", "FsdpTied", "FlatAllReduce",
        "AssignedOtherwise", "SamplesCut", "SplitOtherwise", "GradientOfZero",
        "RankMeans", "RankMeansOfNearlyEqualRanks", "WorldSizeForgotten", "CountOfOwnRank", "RankLeftOut",
        "SamplerPads", "BucketOfOneRankLost", "SignFlipped", "NormOfOwnShard", "LogSummedOverRanks"]


# Mistakes that are made once more with the change that their verdict says.
CHANGED = ["RankMeans", "WorldSizeTooMuch", "CountOfOwnRank", "RankLeftOut", "SamplerPads", "SignFlipped", "NormOfOwnShard", "LogSummedOverRanks"]


def run(folder, *names, python=sys.executable):
    command = [str(python), str(ROOT / "tests/compare_trials/run.py"), *names, "--binary", str(BINARY)]
    done = subprocess.run([*command, "--json", str(folder / "trials.json")], capture_output=True, text=True,
                          timeout=600, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert (folder / "trials.json").exists(), done.stdout + done.stderr
    return done, json.loads((folder / "trials.json").read_text())


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    done, report = run(tmp_path_factory.mktemp("trials"), *SOME)
    return {trial["name"]: (trial, done.stdout) for trial in report["trials"]}


@pytest.mark.parametrize("name", SOME)
def test_a_trainer_is_judged_rightly(some, name):
    trial, printed = some[name]
    assert trial["outcome"] == "right", printed


def test_a_mistake_passes_once_its_verdict_is_followed(installed, tmp_path):
    """The code between backticks stands in what is written in place of the mistake, or is left out there."""
    full = os.environ.get("ISOGRAD_FULL_TESTS") == "1"
    done, report = run(tmp_path, "--changed", *([] if full else CHANGED), python=installed)
    assert (report["changed"], report["changed_wrong"]) == (35 if full else len(CHANGED), []), done.stdout


if os.environ.get("ISOGRAD_FULL_TESTS") == "1":

    @pytest.mark.parametrize("seed", ["0", "1", "2"])
    def test_all_trainers(tmp_path, seed):
        done, report = run(tmp_path, "--seed", seed)
        assert (report["figures"]["mistakes"], report["figures"]["right"]) == (40, 30)
        assert done.returncode == 0, done.stdout
