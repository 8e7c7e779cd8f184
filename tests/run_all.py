"""Runs every test and closes with one count.

CTest runs the GoogleTest executables (one a room) and the script checks; pytest runs tests/test_*.py against
the built command line. The counts come from the runners' own JUnit files, so a test that did not run is not
counted as passed. `N passed, N failed, N skipped` is the last line; a skip must name the missing capability.
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

import processors

ROOT = pathlib.Path(__file__).resolve().parent.parent


def read_junit(path):
    """[(suite, name, seconds, problem or None, skip reason or None)] of one JUnit file."""
    rows = []
    for case in ET.parse(path).getroot().iter("testcase"):
        failure = case.find("failure") if case.find("failure") is not None else case.find("error")
        skipped = case.find("skipped")
        problem = None if failure is None else (failure.get("message") or failure.text or "failed")
        if case.get("status") == "fail" and problem is None:
            problem = "failed"
        reason = None if skipped is None else (skipped.get("message") or "no reason given")
        rows.append((case.get("classname") or path.stem, case.get("name"), float(case.get("time") or 0), problem, reason))
    return rows


def tests_named(build, match):
    """What to run for a name in any case: tests of CTest, and cases of the GoogleTest executables among them."""
    listed = subprocess.run(["ctest", "--test-dir", str(build), "--show-only=json-v1"], check=True, capture_output=True)
    tests, cases = [], []
    for test in json.loads(listed.stdout)["tests"]:
        command = test.get("command", [""])  # without one where it is not built: ctest says so
        if pathlib.Path(command[0]).name.startswith("test_"):
            found = [case for case in cases_of(command[0]) if match in case.lower()]
            cases += found
            if found:
                tests.append(test["name"])
        elif match in test["name"].lower():
            tests.append(test["name"])
    return tests, cases


def cases_of(executable):
    """"Suite.Case" of everything in a GoogleTest executable."""
    listed = subprocess.run([executable, "--gtest_list_tests"], check=True, capture_output=True, text=True)
    cases, suite = [], ""
    for line in listed.stdout.splitlines():
        name = line.split("#")[0].strip()
        if line.startswith(" "):
            cases.append(suite + name)
        elif name.endswith("."):
            suite = name
    return cases


def start_pytest(results, match):
    """The Python tests beside CTest's: each side waits for much of its time. What they print is shown after CTest's."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "--junitxml", str(results / "pytest.xml"), "tests"]
    if match:
        command += ["-k", match]
    with (results / "pytest.log").open("w") as log:
        return subprocess.Popen(command, cwd=ROOT, env=dict(os.environ, OMP_NUM_THREADS="1"), stdout=log,
                                stderr=subprocess.STDOUT)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--match", default="")
    parser.add_argument("--verbose", action="store_true", help="show what passing tests of CTest print")
    parser.add_argument("--rooms-only", action="store_true", help="only the GoogleTest executables (sanitizers)")
    parser.add_argument("--as", dest="level", choices=processors.LEVELS,
                        help="as on a processor with these instruction sets and no newer ones (tests/processors.py)")
    options = parser.parse_args()
    if options.level:
        if processors.missing(options.level):
            parser.error(f"--as {options.level}: this processor has no {', '.join(processors.missing(options.level))}")
        os.environ.update(processors.LEVELS[options.level])
        print("as", options.level, *(f"{name}={value}" for name, value in processors.LEVELS[options.level].items()))
    build = (ROOT / options.build).resolve()
    results = build / "-".join(["test-results", *filter(None, [options.level])])  # levels may run at the same time
    results.mkdir(exist_ok=True)
    for old in results.glob("*.xml"):
        old.unlink()
    started = time.time()

    # A folder as output: each executable names its own file in it.
    environment = dict(os.environ, GTEST_OUTPUT=f"xml:{results}/", OMP_NUM_THREADS="1")
    environment.setdefault("PYTHON", sys.executable)  # has what the tests' requirements name
    command = ["ctest", "--test-dir", str(build), "--output-on-failure",
               "--output-junit", str(results / "ctest.xml")]
    if options.verbose:
        environment["GTEST_BRIEF"] = "1"  # what the tests print, without a line a test
        command += ["--verbose"]
    if options.match:
        tests, cases = tests_named(build, options.match.lower())
        environment["GTEST_FILTER"] = ":".join(cases) or "none"
        command += ["-R", f"^({'|'.join(map(re.escape, tests)) or 'none'})$"]
    else:
        command += ["--no-tests=error"]
    if options.level:  # everything runs at this level: the tests of single rooms at each level say nothing more
        command += ["-E", "_as_(" + "|".join(processors.LEVELS) + ")$"]
    pytest = None if options.rooms_only else start_pytest(results, options.match)
    ctest = subprocess.run(command, env=environment)
    rows, broken = [], []
    for path in sorted(results.glob("test_*.xml")):
        rows += read_junit(path)
    gtest_names = {path.stem for path in results.glob("test_*.xml")}
    for suite, name, seconds, problem, reason in read_junit(results / "ctest.xml"):
        if f"test_{name}" in gtest_names:
            continue  # counted case by case above
        rows.append(("ctest", name, seconds, problem, reason))
    if ctest.returncode != 0:
        broken.append("ctest")  # a crash leaves no JUnit rows behind, but never a zero status

    if pytest:
        print("waiting for the Python tests", flush=True)
        pytest.wait()
        print((results / "pytest.log").read_text(errors="replace"), end="", flush=True)
        if (results / "pytest.xml").exists():
            rows += read_junit(results / "pytest.xml")
        if pytest.returncode not in (0, 5 if options.match else 0):
            broken.append("pytest")

    failed = [row for row in rows if row[3] is not None]
    skipped = [row for row in rows if row[3] is None and row[4] is not None]
    if options.match and not rows:
        print(f"FAILED: no test's name contains {options.match!r}")
    print(f"\nslowest: " + ", ".join(f"{row[1]} {row[2]:.1f} s" for row in sorted(rows, key=lambda r: -r[2])[:5]))
    for suite, name, _, problem, _ in failed:
        print(f"FAILED {suite}.{name}: {problem.strip().splitlines()[0][:200]}")
    for suite, name, _, _, reason in skipped:
        print(f"SKIPPED {suite}.{name}: {reason}")
    if broken and not failed:
        print(f"FAILED: {' and '.join(broken)} ended with an error that no test reported")
    print(f"all tests took {time.time() - started:.0f} s")
    failures = max(len(failed), len(broken))
    print(f"{len(rows) - len(failed) - len(skipped)} passed, {failures} failed, {len(skipped)} skipped")
    return 1 if failures or not rows else 0


if __name__ == "__main__":
    sys.exit(main())
