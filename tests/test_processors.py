"""`isograd` as on lesser processors: a proof and a run in bf16 and fp32 at each level of instruction sets."""
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys

import pytest

import processors
from conftest import BINARY, FULL, by_turns, isograd, ran
from test_verify import config  # noqa: F401  (a fixture)

SETTINGS = ["train.evaluate_every=0", "verify.at_end=false", "sample.tokens=0", "--ranks", 2]


def proved(config, folder, *arguments, **variables):  # noqa: F811
    ran("verify", config, "--ranks", 2, *arguments, "--json", folder / "verdict.json", **variables)
    return json.loads((folder / "verdict.json").read_text())["verdict"] == "pass"


@pytest.mark.parametrize("level_name, dtype", by_turns(list(processors.LEVELS), ["bfloat16", "float32"]))
def test_a_run_is_proved_and_repeats_its_bits(config, level_name, dtype, tmp_path):  # noqa: F811
    if processors.missing(level_name):
        pytest.skip(f"needs a processor with {', '.join(processors.missing(level_name))}")
    level = processors.LEVELS[level_name]
    weights = []
    for name, fused in (("first", "on"), ("second", "on"), *([("unfused", "off")] if FULL else [])):
        ran("train", config, *SETTINGS, f"train.dtype={dtype}", "train.steps=3", f"loss.fused={fused}",
            f"run.directory={tmp_path / name}", **level)
        saved, = (tmp_path / name / "checkpoints").glob("step-*/model.safetensors")
        weights.append(saved.read_bytes())
    assert weights[0] == weights[1]
    assert proved(config, tmp_path, f"train.dtype={dtype}", "loss.fused=on", **level)


@pytest.mark.parametrize("level_name", ["avx1024", "AVX2"])
def test_a_level_that_does_not_exist_is_named(config, level_name):  # noqa: F811
    said = isograd("verify", config, "--ranks", 2, status=2, ISOGRAD_PROCESSOR=level_name).stderr
    assert level_name in said and "scalar, avx2 or avx512" in said


@pytest.mark.parametrize("products", ["rule", "blas", "onednn", "brgemm"])
def test_every_choice_of_products_is_proved_and_resumed_to_the_same_bits(config, products, tmp_path):  # noqa: F811
    """ISOGRAD_PRODUCTS: whoever multiplies in fp32, a run that goes on after its second step ends as the whole one."""
    chosen = {"ISOGRAD_PRODUCTS": products}
    run = tmp_path / "run"
    settings = [*SETTINGS, "train.dtype=float32", "train.steps=4", "checkpoint.every=2", f"run.directory={run}"]
    done = ran("train", config, *settings, ONEDNN_VERBOSE="1", **chosen)
    # Who multiplied, in oneDNN's own words; bits would not show it, as libraries may round alike.
    has_brgemm = not processors.missing("avx2") and os.environ.get("ISOGRAD_PROCESSOR") != "scalar"
    made = set(re.findall("^onednn_verbose,v1,(primitive|ukernel),exec,", done.stdout, re.MULTILINE))
    assert made == {"rule": {"ukernel" if has_brgemm else "primitive"}, "blas": set(), "onednn": {"primitive"},
                    "brgemm": {"ukernel"} if has_brgemm else set()}[products]
    middle, end = sorted((run / "checkpoints").glob("step-*"))
    whole = (end / "model.safetensors").read_bytes()
    shutil.rmtree(end)
    ran("train", config, *settings, f"checkpoint.resume={middle}", **chosen)
    assert (end / "model.safetensors").read_bytes() == whole
    assert proved(config, tmp_path, "train.dtype=float32", **chosen)


def test_a_choice_of_products_that_does_not_exist_is_named(config):  # noqa: F811
    said = isograd("verify", config, "--ranks", 2, status=2, ISOGRAD_PRODUCTS="mkl").stderr
    assert "mkl" in said and "rule, blas, onednn or brgemm" in said


def test_ranks_that_multiply_otherwise_are_refused(config):  # noqa: F811
    """Copies of one parameter would be apart after an update."""
    otherwise = f"export ISOGRAD_PRODUCTS=$([ $RANK = 0 ] && echo blas || echo onednn); exec '{BINARY}' verify '{config}'"
    said = isograd("launch", "-n", 2, "--", "bash", "-c", otherwise, status=2).stderr
    assert "ISOGRAD_PRODUCTS" in said and "onednn on rank 1, blas on rank 0" in said


def test_the_stand_in_sends_mkl_the_way_for_intel():
    """MKL's own number of the branch that it takes by itself: 2 and 3 are those that it has for every maker."""
    if processors.missing("intel"):
        pytest.skip(f"needs {', '.join(processors.missing('intel'))}")
    library = pathlib.Path(importlib.util.find_spec("torch").submodule_search_locations[0]) / "lib/libtorch_cpu.so"
    done = subprocess.run([sys.executable, "-c", "import ctypes, sys\n"
                           "print(ctypes.CDLL(sys.argv[1]).mkl_serv_cbwr_get_auto_branch())", library], text=True,
                          capture_output=True, timeout=120, env=processors.environment("intel"))
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 3
