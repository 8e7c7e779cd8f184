"""An installed isograd is usable from another project: find_package(isograd), build, run, outside the tree."""
import os
import pathlib
import re
import shutil
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(os.environ.get("ISOGRAD_BUILD_DIR", ROOT / "build/release"))


def run(*command, cwd=None):
    done = subprocess.run(list(map(str, command)), cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


def test_find_package_builds_and_trains_outside_the_tree(tmp_path):
    run("cmake", "--install", BUILD, "--prefix", tmp_path / "prefix")
    project = tmp_path / "own_module"
    shutil.copytree(ROOT / "examples/own_module", project)
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    run("cmake", "-G", "Ninja", "-B", "build", f"-DCMAKE_PREFIX_PATH={tmp_path / 'prefix'}", *launcher, cwd=project)
    run("cmake", "--build", "build", cwd=project)
    run(project / "build/sharded_module")
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", run(project / "build/own_module"))]
    assert len(losses) == 6, losses
    assert losses[-1] < 0.25 * losses[0], losses
