"""What type checkers say of users' scripts that take the whole Python API: tests/python_package/typed."""
import importlib.util
import json
import pathlib
import re
import subprocess
import sys

import pytest
from conftest import BUILD, ROOT, full, run_python

SCRIPTS = ROOT / "tests/python_package/typed"
IMPORTED = ("accelerate", "lightning", "transformers")  # by scripts


def lines_of_mypy(python, folder):
    """In full runs: it reads torch and the trainers' libraries for a minute, after which its cache of them is kept."""
    command = ["--strict", "--python-executable", str(python), "--cache-dir", str(BUILD / "tests/mypy_cache")]
    said = checker("mypy", [*command, *map(str, sorted(SCRIPTS.glob("*.py")))], folder)
    return {(pathlib.Path(path).name, int(line)) for path, line in re.findall(r"^(.*?):(\d+): error: ", said, re.M)}, said


def lines_of_pyright(python, folder):
    """basedpyright, told to be pyright: its wheel brings all that it needs, where pyright's downloads it when it starts."""
    (folder / "pyrightconfig.json").write_text(json.dumps({"include": [str(SCRIPTS)], "typeCheckingMode": "standard"}))
    said = checker("basedpyright", ["--outputjson", "--project", str(folder), "--pythonpath", str(python)], folder)
    found = json.loads(said)
    assert found["summary"]["filesAnalyzed"] == len(list(SCRIPTS.glob("*.py"))), said
    return {(pathlib.Path(one["file"]).name, one["range"]["start"]["line"] + 1) for one in found["generalDiagnostics"]}, said


def checker(name, command, folder):
    done = subprocess.run([sys.executable, "-m", name, *command], capture_output=True, text=True, timeout=300, cwd=folder)
    assert done.returncode == 1, done.stdout + done.stderr  # mistakes were found
    return done.stdout


@pytest.mark.parametrize("name, lines", [full("mypy", lines_of_mypy), ("basedpyright", lines_of_pyright)])
def test_right_scripts_pass_and_each_planted_mistake_is_reported(installed, tmp_path, name, lines):
    for needed in (name, *IMPORTED):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"needs {needed}")
    planted = {(path.name, number) for path in SCRIPTS.glob("*.py")
               for number, line in enumerate(path.read_text().splitlines(), 1) if line.endswith("# wrong")}
    found, said = lines(installed, tmp_path)
    assert len(planted) == 41 and found == planted, said


@pytest.mark.parametrize("name, says", {"checked_step": "True parity PASS", "counted_means": "found a Linear without DDP",
                                        "own_losses": "torch.Size([2, 6])", "plans_and_demo": "nowhere"}.items())
def test_scripts_run(warm, name, says):
    assert says in run_python(warm, f"{name}.py", cwd=SCRIPTS)


OPTIONS = """
import inspect, json
from isograd import ranking, watching
print(json.dumps([[sorted(inspect.signature(function).parameters), sorted(options.__annotations__)] for function, options in (
    (watching.watch, watching.WatchOptions), (ranking.RankingLoss, ranking.RankingOptions))]))
"""


def test_options_that_are_passed_on_are_those_of_the_signature(warm):
    of_watch, of_losses = json.loads(run_python(warm, "-c", OPTIONS))
    assert set(of_watch[0]) - set(of_watch[1]) == {"model", "optimizer", "micro_batches", "loss"} and set(of_watch[1]) <= set(of_watch[0])
    assert set(of_losses[0]) - set(of_losses[1]) == {"temperature"} and set(of_losses[1]) <= set(of_losses[0])
