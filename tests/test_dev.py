"""./dev's first command, with a stand-in for cmake: what it says before and while it builds, and that a build which
fails ends it. And what runs the tests: it takes any number of names, and a test that cannot be started has failed."""
import os
import shutil
import subprocess
import sys

import pytest
import run_all
from conftest import BUILD, ROOT


CMAKE = """#!/bin/bash
case "$1" in
  --version) echo "cmake version 3.30.0" ;;
  --preset) while [ $# -gt 0 ]; do case "$1" in -B) folder=$2 ;; -DISOGRAD_TORCH=*) torch=${1#*=} ;; esac; shift; done
    mkdir -p "$folder"; touch "$folder/build.ninja"; echo "ISOGRAD_TORCH:PATH=$torch" >"$folder/CMakeCache.txt" ;;
  --build)
    for i in 1 2 3; do echo "[$i/3] compiling part $i"; done
    if [ -e broken ]; then echo "part 3: error: expected ';'"; exit 1; fi
    mkdir -p "$2/bin"; printf '#!/bin/sh\\necho trained "$@"\\n' >"$2/bin/isograd"; chmod +x "$2/bin/isograd" ;;
  --install) mkdir -p "$4/bin"; cp "$2/bin/isograd" "$4/bin" ;;
esac
"""

DPKG_QUERY = """#!/bin/bash
echo dpkg-query >>calls
for package in "${@:4}"; do echo "$package install ok installed"; done
"""


def checkout(tmp_path):
    shutil.copy(ROOT / "dev", tmp_path / "dev")
    for name, text in {"tools/cmake": CMAKE, "tools/dpkg-query": DPKG_QUERY,
                       ".venv/bin/python": "#!/bin/sh\n"}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "torch/lib").mkdir(parents=True)
    return tmp_path


def dev(folder, *arguments):
    environment = dict(os.environ, PATH=f"{folder / 'tools'}:{os.environ['PATH']}", ISOGRAD_TORCH=str(folder / "torch"),
                       ISOGRAD_JOBS="2")
    environment.pop("ISOGRAD_BUILD", None)
    return subprocess.run([folder / "dev", *arguments], env=environment, capture_output=True, text=True, timeout=60)


def test_the_first_build_says_what_it_does_how_long_and_where_its_log_is(tmp_path):
    folder = checkout(tmp_path)
    done = dev(folder, "run")
    assert done.returncode == 0, done.stderr
    for part in ["LibTorch into .venv", "minutes with 2 jobs", "build/release.build.log", "[1/3] building"]:
        assert part in done.stderr, done.stderr
    assert "part 2" not in done.stderr and "part 2" in (folder / "build/release.build.log").read_text()
    assert "trained train examples/first_light.toml" in done.stdout
    assert "first build" not in dev(folder, "run").stderr  # only once


def test_run_replaces_only_what_it_has_left_itself(tmp_path):
    folder = checkout(tmp_path)
    first = "trained train examples/first_light.toml --ranks 2 "
    for arguments, taken in [([], "--overwrite"), (["--set", "train.steps=5"], "--overwrite --set train.steps=5"),
                             (["--set", "run.directory=runs/other"], "--set run.directory=runs/other"),
                             (["--set", "checkpoint.resume=latest"], "--set checkpoint.resume=latest"),
                             (["--overwrite", "--set", "run.directory=a"], "--overwrite --set run.directory=a")]:
        done = dev(folder, "run", *arguments)
        assert done.returncode == 0 and done.stdout == first + taken + "\n", (arguments, done.stdout, done.stderr)


def test_a_build_that_fails_ends_the_command_and_shows_why(tmp_path):
    folder = checkout(tmp_path)
    assert dev(folder, "run").returncode == 0
    (folder / "broken").touch()
    done = dev(folder, "run")  # an older program is there, and must not run
    assert done.returncode == 2 and "expected ';'" in done.stderr, done.stderr
    assert "release.build.log" in done.stderr and done.stdout == ""
    assert dev(folder, "build").returncode != 0


def test_what_is_installed_is_asked_once_and_again_only_after_a_change(tmp_path):
    folder = checkout(tmp_path)
    (folder / "tools/python3").write_text(f"""#!/bin/bash
case "$*" in *find_spec*) echo torch >>calls; echo {folder}/site/torch ;; esac
""")
    (folder / "tools/python3").chmod(0o755)
    (folder / "site/torch/lib").mkdir(parents=True)

    def asked(**variables):
        (folder / "calls").write_text("")
        environment = dict(os.environ, PATH=f"{folder / 'tools'}:{os.environ['PATH']}", ISOGRAD_JOBS="2", **variables)
        for name in {"ISOGRAD_BUILD", "ISOGRAD_TORCH"} - set(variables):
            environment.pop(name, None)
        done = subprocess.run([folder / "dev", "isograd", "--version"], env=environment, capture_output=True, text=True,
                              timeout=60)
        assert done.returncode == 0 and done.stdout == "trained --version\n", done.stderr
        return (folder / "calls").read_text().split()

    assert sorted(asked()) == ["dpkg-query", "torch"]
    assert asked() == []
    assert asked(ISOGRAD_TORCH=str(folder / "torch")) == ["dpkg-query"]  # another answer, which is given
    assert sorted(asked()) == ["dpkg-query", "torch"]
    assert asked() == []
    (folder / "site/package").mkdir()  # installed next to torch, or another torch
    assert sorted(asked()) == ["dpkg-query", "torch"]
    (folder / "dev").touch()
    assert sorted(asked()) == ["dpkg-query", "torch"]


def test_install_says_where_everything_is(tmp_path):
    folder = checkout(tmp_path)
    done = dev(folder, "install", folder / "prefix")
    assert done.returncode == 0 and (folder / "prefix/bin/isograd").exists(), done.stderr
    assert f"{folder}/prefix/bin/isograd" in done.stderr and f"LibTorch in {folder}/torch" in done.stderr


def wheels_are_packed_in(folder):
    """A stand-in for pip and auditwheel: prints what it is called with."""
    (folder / "torch/version.py").write_text("__version__ = '2.15.1+cu132'\n")
    (folder / ".venv/bin/python").write_text("""#!/bin/bash
while [ $# -gt 0 ]; do
  case "$1" in wheel | repair | install) echo "$@"; [ "$1" = install ] || packs=yes ;; -w) into=$2 ;; esac
  shift
done
[ -z "${packs:-}" ] || { mkdir -p "$into"; touch "$into/isograd-0.1.0-py3.whl"; }
""")


def test_the_wheel_is_packed_from_the_build_folder(tmp_path):
    folder = checkout(tmp_path)
    wheels_are_packed_in(folder)
    done = dev(folder, "wheel")
    assert done.returncode == 0, done.stderr
    assert f"-C wheel.build-tag=1torch2.15 -C cmake.define.ISOGRAD_BUILD={folder}/build/release -w dist ." in done.stdout
    assert "packed dist/isograd-0.1.0-py3.whl" in done.stderr and "repair" not in done.stdout + done.stderr
    (folder / "build/release/python").mkdir()
    (folder / "build/release/python/isograd_comm.missing").write_text("Python's headers")
    done = dev(folder, "wheel")
    assert done.returncode == 2 and "lacks Python's headers" in done.stderr


def test_a_portable_wheel_has_its_libraries_and_leaves_torchs_out(tmp_path):
    folder = checkout(tmp_path)
    wheels_are_packed_in(folder)
    with (folder / "tools/cmake").open("a") as cmake:
        cmake.write('[ "$1" = --build ] || echo "$arguments" >configured\n')
    (folder / "tools/cmake").write_text((folder / "tools/cmake").read_text().replace("case", 'arguments="$*"\ncase', 1))
    done = dev(folder, "wheel", "--portable", "out")
    assert done.returncode == 0, done.stderr
    assert f"cmake.define.ISOGRAD_BUILD={folder}/build/portable -w build/portable/packed ." in done.stdout
    assert "repair --exclude libtorch* --exclude libc10* -w out build/portable/packed/isograd-0.1.0-py3.whl" in done.stderr
    assert "packed out/isograd-0.1.0-py3.whl" in done.stderr
    for without in ["VIDEO", "SENTENCEPIECE", "MPI"]:
        assert f"-DISOGRAD_{without}=OFF" in (folder / "configured").read_text()


def runs_of_base(results, cases):
    tests = run_all.Tests(BUILD, results, {"base": ":".join(cases)}, verbose=False)
    tests.run()
    return tests


def test_more_names_of_tests_than_an_argument_can_hold_are_all_run(tmp_path):
    wanted = ["Error.MessageHasFoundExpectedAndAction", "Error.EachFamilyHasItsExitStatus"]
    tests = runs_of_base(tmp_path, [wanted[0], *(f"None.{i:06d}" for i in range(20000)), wanted[1]])
    assert not tests.failed
    rows = run_all.read_junit(tmp_path / "test_base.xml")
    assert sorted(f"{suite}.{case}" for suite, case, *_ in rows) == sorted(wanted)


def test_a_test_that_cannot_be_started_has_failed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))  # no ctest
    assert runs_of_base(tmp_path, ["Error.*"]).failed == ["base"]


@pytest.mark.parametrize("version, accepted", [("2.10.0", True), ("2.15.1", True), ("2.9.1", False), ("2.16.0", False),
                                               ("2.1.5", False), ("3.11.0", False)])
def test_a_libtorch_outside_the_range_is_refused_with_the_range(tmp_path, version, accepted):
    torch = tmp_path / "torch"
    for file in ["include/ATen/core/Tensor.h", "lib/libtorch_cpu.so", "lib/libc10.so"]:
        (torch / file).parent.mkdir(parents=True, exist_ok=True)
        (torch / file).touch()
    numbers = "".join(f"#define TORCH_VERSION_{name} {number}\n" for name, number in
                      zip(["MAJOR", "MINOR", "PATCH"], version.split(".")))
    (torch / "include/torch/headeronly").mkdir(parents=True)
    (torch / "include/torch/headeronly/version.h").write_text(numbers)
    script = tmp_path / "find.cmake"
    script.write_text(f'cmake_minimum_required(VERSION 3.24)\nset(CMAKE_MODULE_PATH "{ROOT}/cmake")\nset(CMAKE_FIND_LIBRARY_PREFIXES lib)\n'
                      f'set(CMAKE_FIND_LIBRARY_SUFFIXES .so)\nset(ISOGRAD_TORCH "{torch}")\n'
                      "macro(add_library)\n  message(\"accepted ${LibTorch_VERSION}\")\n  return()\nendmacro()\n"
                      "find_package(LibTorch REQUIRED)\n")
    done = subprocess.run(["cmake", "-P", str(script)], capture_output=True, text=True, timeout=60)
    said = " ".join((done.stdout + done.stderr).split())
    if accepted:
        assert f"accepted {version}" in said, said
    else:
        assert done.returncode and f"LibTorch {version} found in" in said and "expected 2.10 to 2.15" in said, said


@pytest.mark.parametrize("version", ["2.9", "2.16.0", "3.12", "newest", "2"])
def test_torch_range_refuses_other_versions_before_it_installs_one(version):
    done = subprocess.run([sys.executable, ROOT / "tools/torch_range.py", "2.13", version], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"torch-range: found '{version}'; expected 2.10 to 2.15, with or without a third number.\n"


def test_help_is_text_and_runs_nothing():
    """It is a here-document of the shell: a backtick in it would be a command."""
    done = subprocess.run([ROOT / "dev", "help"], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert '"all" has the tests as well' in done.stdout
