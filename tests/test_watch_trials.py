"""`isograd.watch` on ordinary trainers, right and with one mistake each (tests/watch_trials): some, in full runs all."""
import json
import re
import sys

import pytest
from conftest import FULL, ROOT, full, run_python

FOLDER = ROOT / "tests/watch_trials"
sys.path.append(str(FOLDER))
from changes import CHANGES  # noqa: E402
from names import NOT_NAMED, SECOND, THIRD, TRUE, UNDECIDED  # noqa: E402


def trials_of(file):
    """The names of its mistakes, and of what is right."""
    text = (FOLDER / file).read_text()
    return [list(dict.fromkeys(re.findall(pattern, text))) for pattern in (r"(?m)^ +#! (\w+)", r"(?m)^(?: +#= |def )(\w+)(?:\(w\):| \|| \d)")]


MISTAKES, RIGHT = trials_of("trainers.py")
MISTAKES_2, RIGHT_2 = trials_of("second.py")
MISTAKES_3, RIGHT_3 = trials_of("third.py")
SOME = {*MISTAKES[::6], *RIGHT[::8]}
SOME_2 = {*MISTAKES_2[::15], *RIGHT_2[::12]}
SOME_3 = {*MISTAKES_3[::25], *RIGHT_3[::15]}


def by_default(names):
    return [name if name in SOME | SOME_2 | SOME_3 else full(name) for name in names]


def made(warm, folder, some, *options):
    run_python(warm, "run.py", *([] if FULL else sorted(some)), *options, "--json", folder / "found.json", cwd=FOLDER, timeout=900)
    return json.loads((folder / "found.json").read_text())


@pytest.fixture(scope="module")
def found(warm, tmp_path_factory):
    return made(warm, tmp_path_factory.mktemp("trials"), SOME, "--changed")


@pytest.fixture(scope="module")
def found_2(warm, tmp_path_factory):
    return made(warm, tmp_path_factory.mktemp("trials"), SOME_2, "--file", "second.py")


@pytest.fixture(scope="module")
def found_3(warm, tmp_path_factory):
    return made(warm, tmp_path_factory.mktemp("trials"), SOME_3, "--file", "third.py")


@pytest.mark.parametrize("name", by_default(MISTAKES))
def test_a_mistake_is_named(found, name):
    assert found[name]["outcome"] in ("named", *NOT_NAMED.get(name, "").split()), found[name]


@pytest.mark.parametrize("name", by_default(MISTAKES))
def test_a_mistake_is_one(found, name):
    """Farther from one process in fp64 than rounding is: the gradient, or else the update."""
    assert max(found[name]["gradient"], found[name]["update"]) > 3e-3, found[name]


# Of a trainer in a lower precision: how far rounding moves the gradient and the update of AdamW.
LOW = {"low": (1e-2, 0.3), "mixed": (1e-2, 0.3)}


@pytest.mark.parametrize("name", by_default([name for name in MISTAKES if name in CHANGES]))
def test_a_mistake_passes_once_its_verdict_is_followed(found, name):
    """The code between backticks, with the user's names, is in the lines that are changed; the step then passes, and is that of one
    process by other code too."""
    again = found[name]["changed"]
    print(found[name]["changes"], again)
    assert again["not printed"] == again["not written"] == []
    gradient, update = LOW.get(again["trainer"], (1e-5, 3e-3))
    assert again["passed"] and again["gradient"] < gradient and again["update"] < update


@pytest.mark.parametrize("name", by_default(RIGHT))
def test_a_right_trainer_passes(found, name):
    """The trainer that each mistake was put into is one."""
    assert found[name]["outcome"] in ("right", *NOT_NAMED.get(name, "").split()), found[name]


@pytest.mark.full
def test_each_mistake_has_an_entry(found):
    assert len(MISTAKES) >= 60 and len(RIGHT) >= 30
    assert set(MISTAKES) - set(NOT_NAMED) <= set(CHANGES) <= set(MISTAKES)
    assert set(TRUE) == set(MISTAKES) and set(found) == {*MISTAKES, *RIGHT} and set(NOT_NAMED) <= set(found)


@pytest.mark.parametrize("name", by_default(MISTAKES_2))
def test_a_mistake_of_the_second_set_is_named(found_2, name):
    """It is one, too, as measured by other code."""
    assert found_2[name]["outcome"] == "named", found_2[name]
    assert max(found_2[name]["gradient"], found_2[name]["update"]) > 3e-3


@pytest.mark.parametrize("name", by_default(RIGHT_2))
def test_a_right_trainer_of_the_second_set_passes(found_2, name):
    assert found_2[name]["outcome"] == "right", found_2[name]
    assert found_2[name]["gradient"] < 1e-5 and found_2[name]["update"] < 3e-3


@pytest.mark.full
def test_each_trial_of_the_second_set_was_made(found_2):
    assert len(MISTAKES_2) >= 45 and len(RIGHT_2) >= 25
    assert set(SECOND) == set(MISTAKES_2) and set(found_2) == {*MISTAKES_2, *RIGHT_2}


@pytest.mark.parametrize("name", by_default(MISTAKES_3))
def test_a_mistake_of_the_third_set_is_named(found_3, name):
    assert found_3[name]["outcome"] == ("undecided" if name in UNDECIDED else "named"), found_3[name]
    assert max(found_3[name]["gradient"], found_3[name]["update"]) > 3e-3


@pytest.mark.parametrize("name", by_default(RIGHT_3))
def test_a_right_trainer_of_the_third_set_passes(found_3, name):
    assert found_3[name]["outcome"] == "right", found_3[name]
    assert found_3[name]["gradient"] < 1e-5


@pytest.mark.full
def test_each_trial_of_the_third_set_was_made(found_3):
    assert len(MISTAKES_3) >= 60 and len(RIGHT_3) >= 30 and {*THIRD, *UNDECIDED} == {*MISTAKES_3}
    assert set(found_3) == {*MISTAKES_3, *RIGHT_3}
