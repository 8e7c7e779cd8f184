"""Writes the tables of docs/planning_reference.md: those that the planner makes, and that of the fit of its constants.

Run in the project's root after a build of the tests: python3 tools/planning_tables.py [--fit]. Without --fit the last table stays:
it needs numpy, scipy and pandas. The planner's own tables are made by src/plan/planning_tables_test.cpp, which also holds them.
"""
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release"))


def main():
    program, = BUILD.glob("**/test_plan")
    subprocess.run([program, "--gtest_brief=1", "--gtest_filter=*Tables.*"], check=True, env={**os.environ, "ISOGRAD_WRITE_TABLES": "1"})
    if "--fit" in sys.argv[1:]:
        subprocess.run([sys.executable, ROOT / "tools/fit_published_runs.py", "--write"], check=True, cwd=ROOT)


if __name__ == "__main__":
    main()
