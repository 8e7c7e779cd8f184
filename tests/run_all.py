"""Runs every test and closes with one count.

CTest runs the GoogleTest executables (one a room) and the script checks; pytest runs tests/test_*.py against
the built command line. The counts come from the runners' own JUnit files, so a test that did not run is not
counted as passed. `N passed, N failed, N skipped` is the last line; a skip must name the missing capability.
"""
import argparse
import os
import pathlib
import subprocess
import sys
import time
import xml.etree.ElementTree as ET

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


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--build", required=True)
    parser.add_argument("--match", default="")
    parser.add_argument("--rooms-only", action="store_true", help="only the GoogleTest executables (sanitizers)")
    options = parser.parse_args()
    build = (ROOT / options.build).resolve()
    results = build / "test-results"
    results.mkdir(exist_ok=True)
    for old in results.glob("*.xml"):
        old.unlink()
    started = time.time()

    # A folder as output: each executable names its own file in it.
    environment = dict(os.environ, GTEST_OUTPUT=f"xml:{results}/", OMP_NUM_THREADS="1")
    if options.match:
        environment["GTEST_FILTER"] = f"*{options.match}*"
    ctest = subprocess.run(["ctest", "--test-dir", str(build), "--output-on-failure", "--no-tests=error",
                            "--output-junit", str(results / "ctest.xml")], env=environment)
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

    if not options.rooms_only:
        command = [sys.executable, "-m", "pytest", "-q", "-rs", "--junitxml", str(results / "pytest.xml"), "tests"]
        if options.match:
            command += ["-k", options.match]
        pytest = subprocess.run(command, cwd=ROOT, env=dict(os.environ, OMP_NUM_THREADS="1"))
        if (results / "pytest.xml").exists():
            rows += read_junit(results / "pytest.xml")
        if pytest.returncode not in (0, 5 if options.match else 0):
            broken.append("pytest")

    failed = [row for row in rows if row[3] is not None]
    skipped = [row for row in rows if row[3] is None and row[4] is not None]
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
