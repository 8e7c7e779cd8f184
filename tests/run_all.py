"""Runs every test and closes with one count.

Three at a time: two of pytest, for tests/test_*.py against the built command line, and one of CTest, for the GoogleTest
executables (one a room) and the script checks; those of pytest go on with the others when they are done. The counts come
from the runners' own JUnit files, so a test that did not run is not counted as passed. `N passed, N failed, N skipped` is
the last line; a skip must name the missing capability.
"""
import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET

import processors

ROOT = pathlib.Path(__file__).resolve().parent.parent
# These begin first, longest first, so that none of them runs on when all others are done.
LONG = ["verify", "hybrid", "axis_run", "museum", "strategies", "comm", "plan", "train", "axes", "means", "parity",
        "parts", "device_check_standin_3", "loss_ranking", "device_check_standin_1", "loss_as_scalar",
        "faults", "kernels_matmul_as_scalar", "model_attention_as_scalar", "experts_load"]


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
    """{test of CTest: its filter of GoogleTest cases}, of those that have a name in any case in theirs; "": all."""
    listed = subprocess.run(["ctest", "--test-dir", str(build), "--show-only=json-v1"], check=True, capture_output=True)
    tests = {}
    for test in json.loads(listed.stdout)["tests"]:
        command = test.get("command", [""])  # without one where it is not built: ctest says so
        if match and pathlib.Path(command[0]).name.startswith("test_"):
            if found := [case for case in cases_of(command[0]) if match in case.lower()]:
                tests[test["name"]] = ":".join(found)
        elif match in test["name"].lower():
            tests[test["name"]] = ""
    return tests


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


def python_files():
    """The files of each of the two: those that share a wheel and a warm Python (tests/warm_python.py), and the others."""
    parts = [], []
    for path in sorted((ROOT / "tests").glob("test_*.py")):
        parts[not re.search(r"\b(warm|warm_python|installed|wheel)\b", path.read_text())].append(str(path))
    return parts


def run_pytest(results, name, files, match):
    """The exit status. The output is shown after CTest's."""
    command = [sys.executable, "-m", "pytest", "-q", "-rs", "--junitxml", str(results / f"{name}.xml"), *files]
    if match:
        command += ["-k", match]
    with (results / f"{name}.log").open("w") as log:
        return subprocess.run(command, cwd=ROOT, env=dict(os.environ, OMP_NUM_THREADS="1"), stdout=log,
                              stderr=subprocess.STDOUT).returncode


class Tests:
    """Those of CTest, one by one, by whoever is free. Each leaves test_NAME.xml (of GoogleTest) and ctest-NAME.xml."""
    def __init__(self, build, results, tests, verbose):
        self.build, self.results, self.filters, self.verbose = build, results, tests, verbose
        self.left = sorted(tests, key=lambda name: LONG.index(name) if name in LONG else len(LONG))
        self.lock, self.done, self.failed = threading.Lock(), 0, []

    def run(self):
        while True:
            with self.lock:
                if not self.left:
                    return
                name = self.left.pop(0)
            started = time.time()
            try:
                status, text = self.run_one(name)
            except OSError as error:  # else a test that never ran would be missing among the failed
                status, text = 1, f"{name} could not be started: {error}"
            with self.lock:
                self.done += 1
                if status:
                    self.failed.append(name)
                if status or self.verbose:
                    print(text)
                print(f"{self.done}/{len(self.filters)} {name}: {'FAILED' if status else 'ended'} after "
                      f"{time.time() - started:.1f} s", flush=True)

    def run_one(self, name):
        environment = dict(os.environ, GTEST_OUTPUT=f"xml:{self.results}/test_{name}.xml", OMP_NUM_THREADS="1")
        environment.setdefault("PYTHON", sys.executable)  # has what the tests' requirements name
        if self.filters[name]:  # thousands of names: more than a variable or an argument can hold
            flags = self.results / f"test_{name}.flags"
            flags.write_text(f"--gtest_filter={self.filters[name]}\n")
            environment["ISOGRAD_TEST_FLAGS"] = str(flags)
        command = ["ctest", "--test-dir", str(self.build), "-R", f"^{re.escape(name)}$", "--no-tests=error",
                   "--output-on-failure", "--output-junit", str(self.results / f"ctest-{name}.xml")]
        if self.verbose:
            environment["GTEST_BRIEF"] = "1"  # what the tests print, without a line a test
            command += ["--verbose"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                              errors="replace")
        return done.returncode, done.stdout


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--match", default="")
    parser.add_argument("--verbose", action="store_true", help="show what passing tests of CTest print")
    parser.add_argument("--rooms-only", action="store_true", help="only the GoogleTest executables (sanitizers)")
    parser.add_argument("--as", dest="level", choices=[*processors.LEVELS, *processors.INTEL],
                        help="as on a processor with these instruction sets and no newer ones, or of Intel's (tests/processors.py)")
    options = parser.parse_args()
    if options.level:
        if processors.missing(options.level):
            parser.error(f"--as {options.level}: this processor has no {', '.join(processors.missing(options.level))}")
        variables = processors.environment(options.level, {})
        os.environ.update(variables)
        print("as", options.level, *(f"{name}={value}" for name, value in variables.items()))
    build = (ROOT / options.build).resolve()
    results = build / "-".join(["test-results", *filter(None, [options.level])])  # levels may run at the same time
    results.mkdir(exist_ok=True)
    for old in results.glob("*.xml"):
        old.unlink()
    started = time.time()

    match = options.match.lower()
    tests = tests_named(build, match)
    if options.level:  # everything runs at this level: the tests of single rooms at each level say nothing more
        again = tuple(f"_as_{level}" for level in (*processors.LEVELS, *processors.INTEL))
        tests = {name: cases for name, cases in tests.items() if not name.endswith(again)}
    queue = Tests(build, results, tests, options.verbose)
    python = {}

    def python_first(name, files):
        python[name] = run_pytest(results, name, files, options.match)
        queue.run()
    # Three at a time on two processors: each waits for some of its time, for ranks that start and for timeouts.
    if options.rooms_only:
        workers = [threading.Thread(target=queue.run) for _ in range(2)]
    else:
        workers = [threading.Thread(target=python_first, args=(f"pytest-{number}", files))
                   for number, files in enumerate(python_files())] + [threading.Thread(target=queue.run)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()

    rows, broken = [], []
    for name in tests:
        cases, whole = results / f"test_{name}.xml", results / f"ctest-{name}.xml"
        if cases.exists():
            rows += read_junit(cases)
        elif whole.exists():
            rows += [("ctest", *row[1:]) for row in read_junit(whole)]
    if queue.failed or not (tests or match):
        broken.append("ctest")  # a crash leaves no JUnit rows behind, but never a zero status
    for name, status in sorted(python.items()):
        print((results / f"{name}.log").read_text(errors="replace"), end="", flush=True)
        if (results / f"{name}.xml").exists():
            rows += read_junit(results / f"{name}.xml")
        if status not in (0, 5 if match else 0):
            broken.append(name)

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
