"""An installed isograd is usable from another project: find_package(isograd), build, run, outside the tree."""
import os
import re
import shutil
import subprocess
import zipfile

import pytest
from conftest import BUILD, FULL, ROOT, built_backends


def run(*command, cwd=None, env=None, input=None):
    done = subprocess.run(list(map(str, command)), cwd=cwd, env=env, input=input, capture_output=True, text=True,
                          timeout=600)
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("installed") / "prefix"
    run("cmake", "--install", BUILD, "--prefix", folder)
    return folder


@pytest.fixture(scope="module")
def project(prefix, tmp_path_factory):
    """examples/own_module, configured outside the tree, and a program that holds its own file to C++17."""
    project = tmp_path_factory.mktemp("project") / "own_module"
    shutil.copytree(ROOT / "examples/own_module", project)
    (project / "older.cpp").write_text("#include <isograd/isograd.hpp>\nint main() { isograd::World world; }\n")
    with (project / "CMakeLists.txt").open("a") as lists:
        lists.write("""add_executable(older EXCLUDE_FROM_ALL older.cpp)
target_link_libraries(older PRIVATE isograd::isograd)
target_compile_options(older PRIVATE -std=c++17)
""")
    launcher = ["-DCMAKE_CXX_COMPILER_LAUNCHER=ccache"] if shutil.which("ccache") else []
    environment = {name: value for name, value in os.environ.items() if name != "ISOGRAD_TORCH"}  # which would be taken before the prefix's
    run("cmake", "-G", "Ninja", "-B", "build", f"-DCMAKE_PREFIX_PATH={prefix}", *launcher, cwd=project, env=environment)
    return project


def test_find_package_builds_and_trains_outside_the_tree(project):
    # The one that the tree itself does not build and run, or all. The next run's folder is another, and ccache is told
    # which part of the paths that is.
    run("cmake", "--build", "build", "--target", "all" if FULL else "own_module", cwd=project,
        env=dict(os.environ, CCACHE_BASEDIR=str(project.parent), CCACHE_NOHASHDIR="1"))
    if FULL:
        run(project / "build/sharded_module")
        run(project / "build/resume_module", cwd=project)
        run(project / "build/processes", 3)
        run(project / "build/classifier", *ROOT.glob("src/*/*.cpp"), *ROOT.glob("tests/*.py"), *ROOT.glob("docs/*.md"), cwd=project)
        assert "parity PASS: 6 ranks = 1 device" in run(project / "build/pipeline_module")
    losses = [float(x) for x in re.findall(r"loss ([0-9.]+)", run(project / "build/own_module"))]
    assert len(losses) == 6, losses
    assert losses[-1] < 0.25 * losses[0], losses


def test_nothing_that_is_installed_needs_the_clone(prefix, project):
    """The program loads no library from it, a user's build names no file of it, and the documents and examples are there."""
    loaded = run("ldd", prefix / "libexec/isograd")
    assert "libtorch_cpu.so" in loaded and "not found" not in loaded
    for text in [loaded, (project / "build/build.ninja").read_text(), *(path.read_text() for path in prefix.rglob("*.cmake")),
                 (prefix / "lib/pkgconfig/isograd.pc").read_text()]:
        places = [line for line in text.splitlines() if f"{ROOT}/" in line and 'foreach(_torch' not in line]  # a place of last resort
        assert not places, places[:3]
    share = prefix / "share/doc/isograd"
    assert (share / "LICENSE").exists() and (share / "docs/README.md").exists() and (share / "examples/first_light.toml").exists()


def test_the_links_of_installed_pages_lead_to_files(prefix):
    """Those of the guides and the reference, apart from the tests, tools and sources of the repository."""
    folder = prefix / "share/doc/isograd"
    dead = [f"{page.relative_to(folder)}: {link}" for page in sorted(folder.glob("docs/*.md"))
            for link in re.findall(r"\]\(([^)#\s]+)", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.M | re.S))
            if "://" not in link and not link.startswith("mailto:") and not (page.parent / link).exists()]
    assert [line for line in dead if not re.search(r"\.\./(tests|tools|bench)/|\.\./(src|python)/.*\.([ch]pp|py)$", line)] == []


def test_shells_and_man_find_their_files(prefix):
    share = prefix / "share"
    for place, words in {"bash-completion/completions/isograd": ["completions", "bash"], "zsh/site-functions/_isograd": ["completions", "zsh"],
                         "fish/vendor_completions.d/isograd.fish": ["completions", "fish"], "man/man1/isograd.1": ["help", "--man"]}.items():
        assert (share / place).read_text() == run(prefix / "bin/isograd", *words) != "", place


# It says on which backends isograd was linked.
PROGRAM = """#include <ATen/ATen.h>
#include <isograd/world.hpp>
#include <iostream>
int main() {
  for (const std::string& name : isograd::backends()) std::cout << name << " ";
  isograd::run_ranks(2, [](isograd::World& world) {
    at::Tensor x = at::ones({3});
    world.group.all_reduce(x);
    if (x.sum().item<double>() != 6) throw std::runtime_error("not the sum of two ranks");
  });
}
"""


def run_and_look(program, mpi):
    """What was linked into a program, and what it says of it."""
    said = run(program, env={name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"})
    needed = run("readelf", "-d", program)
    assert ("mpi" in said.split(), "libmpi.so" in needed) == (mpi, mpi), said + needed
    assert "libtorch_cpu.so" in needed and "tomlplusplus" not in needed, needed


@pytest.mark.parametrize("package, mpi", [("isograd", "mpi" in built_backends()), ("isograd-core", False)])
def test_pkg_config_gives_what_a_program_needs(prefix, tmp_path, package, mpi):
    (tmp_path / "program.cpp").write_text(PROGRAM)
    environment = {**os.environ, "PKG_CONFIG_PATH": str(prefix / "lib/pkgconfig")}
    flags = run("pkg-config", "--cflags", "--libs", package, env=environment).split()
    compiler = shutil.which("clang++-19") or "c++"
    run(compiler, "-O0", "program.cpp", *flags, "-o", "program", cwd=tmp_path)
    run_and_look(tmp_path / "program", mpi)


def test_the_core_needs_no_mpi_no_toml_and_no_command_line(tmp_path):
    """They are hidden, and the core is installed by itself; a build with MPI asks for it where it is not left out."""
    prefix = tmp_path / "prefix"
    run("cmake", "--install", BUILD, "--prefix", prefix, "--component", "core")
    assert not (prefix / "bin").exists() and not (prefix / "libexec").exists() and not (prefix / "share/man").exists()
    hidden = [f"-DCMAKE_DISABLE_FIND_PACKAGE_{name}=ON" for name in ("MPI", "tomlplusplus", "CLI11")]

    def configured(components):
        (tmp_path / "program.cpp").write_text(PROGRAM)
        (tmp_path / "CMakeLists.txt").write_text(f"""cmake_minimum_required(VERSION 3.24)
project(program LANGUAGES CXX)
find_package(isograd REQUIRED {components})
add_executable(program program.cpp)
target_link_libraries(program PRIVATE isograd::isograd)
""")
        shutil.rmtree(tmp_path / "build", ignore_errors=True)
        done = subprocess.run(["cmake", "-G", "Ninja", "-B", "build", f"-DCMAKE_PREFIX_PATH={prefix}", *hidden], cwd=tmp_path,
                              capture_output=True, text=True, timeout=120)
        return done.returncode == 0, done.stdout + done.stderr
    if "mpi" in built_backends():
        for components in ("", "COMPONENTS mpi"):
            found, said = configured(components)
            assert not found and "MPI" in said, said
    found, said = configured("COMPONENTS command_line")
    assert not found and "components core and" in said, said
    found, said = configured("COMPONENTS core")
    assert found, said
    run("cmake", "--build", "build", cwd=tmp_path)
    run_and_look(tmp_path / "build/program", False)


def linked_files(folder):
    """Programs and shared libraries below a folder."""
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink() and (path.suffix == ".so" or os.access(path, os.X_OK)):
            with path.open("rb") as file:
                if file.read(4) == b"\x7fELF":
                    yield path


def searched_folders(path):
    """Where the loader looks for the libraries of a file: the elements of its RPATH or RUNPATH."""
    text = run("readelf", "-d", path)
    return [one for found in re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", text) for one in found.split(":")]


def test_nothing_loads_libraries_from_the_working_folder(prefix, tmp_path, request):
    """An empty or relative element of the path would: whoever can write there would run their code."""
    # The check sees one.
    planted = tmp_path / "planted"
    run("c++", "-x", "c++", "-", "-o", planted, "-Wl,-rpath,/usr/lib:", input="int main() {}")
    assert searched_folders(planted) == ["/usr/lib", ""]
    planted.unlink()
    if not (BUILD / "python/isograd_comm.missing").exists():
        with zipfile.ZipFile(request.getfixturevalue("wheel")) as packed:
            packed.extractall(tmp_path / "wheel")
        for name in ("bin/isograd", "libexec/isograd", "isograd_comm.so"):
            (tmp_path / "wheel/isograd/_native" / name).chmod(0o755)
    found = {}
    for folder in (BUILD, prefix, tmp_path / "wheel"):
        for path in linked_files(folder):
            found[path] = [one for one in searched_folders(path) if not one.startswith(("/", "$ORIGIN"))]
    assert {"isograd", "isograd_comm.so"} <= {path.name for path in found} or not (tmp_path / "wheel").exists()
    assert sum(path.match("libexec/isograd") for path in found) >= 2
    assert not {str(path): bad for path, bad in found.items() if bad}


def test_an_older_standard_is_one_message(project):
    """Each public header by itself, and a project that holds its own files to C++17. One that names no standard is
    above: examples/own_module."""
    compilers = [found for found in map(shutil.which, ("g++", "clang++-19", "clang++")) if found]
    headers = sorted((ROOT / "include/isograd").glob("*.hpp"))
    for number, header in enumerate(headers):
        for compiler in compilers if FULL else [compilers[number % len(compilers)]]:
            done = subprocess.run([compiler, "-std=c++17", "-fsyntax-only", "-I", ROOT / "include", "-x", "c++", header],
                                  capture_output=True, text=True, timeout=60)
            errors = [line for line in done.stderr.splitlines() if "error:" in line]
            assert done.returncode == 1 and "isograd needs C++20" in errors[0], (header.name, done.stderr)
            assert len(errors) == 2 and "C++20" in errors[1], (header.name, done.stderr)  # which ends the compilation
    done = subprocess.run(["cmake", "--build", "build", "--target", "older"], cwd=project, capture_output=True, text=True,
                          timeout=600)
    errors = [line for line in (done.stdout + done.stderr).splitlines() if "error:" in line]
    assert done.returncode != 0 and len(errors) == 2 and "isograd needs C++20" in errors[0], done.stdout


def test_the_installed_program_starts_and_trains(prefix, tmp_path):
    """Without the build folder's run path and without LD_LIBRARY_PATH; on two ranks, which it starts itself."""
    program = prefix / "bin/isograd"
    environment = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    assert "LibTorch 2.13" in run(program, "--version", env=environment)
    (tmp_path / "text.txt").write_text("to be counted before it is divided. " * 60)
    sets = ["data.text=text.txt", "data.pack_length=32", "data.validation_fraction=0", "batch.packs_per_step=3",
            "batch.packs_per_micro_batch=1", "model.hidden=16", "model.layers=1", "model.heads=2", "model.key_value_heads=2",
            "model.head_dim=8", "model.feed_forward=32", "train.steps=2", "sample.tokens=0"]
    (tmp_path / "run.toml").write_text("")
    said = run(program, "train", "run.toml", "--ranks", "2", *[word for one in sets for word in ("--set", one)],
               cwd=tmp_path, env=environment)
    assert "parity PASS" in said and (tmp_path / "runs/default/report.html").exists(), said
