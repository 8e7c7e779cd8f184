"""The wheel in a new environment: what it brings, what it refuses, and that its types are those it says."""
import ast
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tarfile
import zipfile

import pytest
from conftest import BINARY, BUILD, ROOT, full, two_ranks


def run(python, *arguments, status=0, **environment):
    variables = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "LD_LIBRARY_PATH")}
    done = subprocess.run([str(python), *map(str, arguments)], env={**variables, "OMP_NUM_THREADS": "1", **environment},
                          capture_output=True, text=True, timeout=120, cwd="/")
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_the_wheel_holds_the_package_and_no_path_of_this_machine(wheel):
    with zipfile.ZipFile(wheel) as packed:
        names = {name for name in packed.namelist() if ".dist-info/" not in name}
        assert {"_isograd_command.py", "isograd/__init__.py", "isograd/py.typed", "isograd/_native/bin/isograd",
                "isograd/_native/libexec/isograd", "isograd/_native/libexec/isograd.texts",
                "isograd/_native/isograd_comm.so", "isograd/_native/isograd_comm.pyi"} <= names
        data = {name.partition(".data/data/")[2] for name in names if ".data/" in name}
        assert data == {"share/man/man1/isograd.1", "share/bash-completion/completions/isograd", "share/zsh/site-functions/_isograd",
                        "share/fish/vendor_completions.d/isograd.fish"}
        assert all(name.startswith(("isograd/", "_isograd_command.py")) for name in names if ".data/" not in name), names
        torch = (BUILD / "CMakeCache.txt").read_text().split("ISOGRAD_TORCH:PATH=")[1].split("\n")[0]
        for name in names:
            assert f"{torch}/lib".encode() not in packed.read(name), f"{name} looks for libraries in {torch}"


def test_the_command_is_the_program_of_the_build(installed):
    built = subprocess.run([str(BINARY), "--version"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert run(installed.parent / "isograd", "--version") == built
    bash = subprocess.run([str(BINARY), "completions", "bash"], capture_output=True, text=True, check=True, timeout=60).stdout
    assert (installed.parent.parent / "share/bash-completion/completions/isograd").read_text() == bash
    assert "ConfigError: nowhere" in run(installed.parent / "isograd", "compare", "nowhere", "nowhere", status=2)


RANK = """
import os, sys, torch, torch.distributed as dist, isograd
dist.init_process_group({backend!r}, init_method="file://{store}", rank=int(sys.argv[1]), world_size=2)
tensor = torch.full((3,), 1.0 + dist.get_rank())
dist.all_reduce(tensor)
shared = isograd.empty_shared(4, torch.float64)
shared += 1
dist.all_reduce(shared)
print(tensor.tolist(), shared.tolist(), "isograd_comm" in sys.modules)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
model(torch.ones(1, 2)).sum().backward()
dist.destroy_process_group()
sys.stdout.flush()
os._exit(0)  # DETAIL's Gloo threads may abort a process that is taken down in order
"""


@pytest.mark.parametrize("backend, debug", [full("isograd", "OFF"), ("cpu:isograd", "DETAIL")])
def test_the_backend_comes_with_the_import(installed, tmp_path, backend, debug):
    program = RANK.format(backend=backend, store=tmp_path / "store")
    for output, errors, status in two_ranks(installed, program, TORCH_DISTRIBUTED_DEBUG=debug):
        assert status == 0 and output == "[3.0, 3.0, 3.0] [2.0, 2.0, 2.0, 2.0] True\n", output + errors


@pytest.mark.parametrize("first, second", [("isograd", "isograd_comm"), full("isograd_comm", "isograd")])
def test_the_extension_of_a_build_folder_is_the_same_one(installed, first, second):
    """Registered twice it would end the process. The version is the program's, checksums those of a dump."""
    xxhash = pytest.importorskip("xxhash")
    import torch
    values = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)
    sums = [xxhash.xxh3_64_hexdigest(t.contiguous().view(torch.uint8).numpy().tobytes()) for t in (values, values.T)]
    version = run(installed.parent / "isograd", "--version").split()[1].rstrip(",")
    said = run(installed, "-c", f"import {first}, {second}, isograd, isograd_comm, torch\n"
               "v = torch.arange(12, dtype=torch.bfloat16).reshape(3, 4)\n"
               "print(isograd.__version__, isograd.ConfigError is isograd_comm.ConfigError, isograd.checksum(v), "
               "isograd.checksum(v.T))", PYTHONPATH=str(BUILD / "python"))
    assert said.split() == [version, "True", *sums] and sums[0] != sums[1]


ERRORS = """
import isograd, torch, traceback
torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
for call in (lambda: isograd.clip_grad_norm_([], -1.0), lambda: isograd.empty_shared(4, torch.float32)):
    try:
        call()
    except isograd.ConfigError as error:  # as Python writes the last line of a traceback
        print(traceback.format_exception_only(error)[-1].replace(chr(10), " "))
print(isograd.ConfigError.__doc__, isograd.PeerError.__doc__, sep=chr(10))
"""


def test_errors_say_their_family_once_and_what_they_are_for(installed):
    """Errors of Python and of the extension: once in the last line of a traceback, which Python writes in front."""
    of_python, of_the_extension, input_wrong, rank_lost = run(installed, "-c", ERRORS).splitlines()
    for last in (of_python, of_the_extension):
        assert last.count("ConfigError") == 1 and re.search("ConfigError: (?!ConfigError)", last), last
    assert "input" in input_wrong and "rank" in rank_lost and "Unspecified" not in input_wrong + rank_lost


@pytest.mark.parametrize("version", ["2.12.1+cpu", "3.13.0"])
def test_another_torch_is_refused_with_both_versions(installed, tmp_path, version):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch/__init__.py").write_text(f"__version__ = {version!r}\n")
    (tmp_path / "torch/version.py").write_text(f"__version__ = {version!r}\n")
    said = run(installed, "-c", "import isograd", status=1, PYTHONPATH=str(tmp_path))
    told = run(installed, installed.parent / "isograd", "--version", status=2, PYTHONPATH=str(tmp_path))
    import torch
    for text in (said, told):
        assert f"found torch {version} in {tmp_path}" in text, text
        assert f"built with {torch.__version__}. Run `pip install torch==2.13" in text, text
    assert said.strip().splitlines()[-1].startswith("ImportError: isograd: found torch")


def test_two_wheels_for_other_torches_are_named_by_their_places(wheel, installed, tmp_path):
    """The first on Python's path is taken: one that is forgotten in a folder hides the one that fits."""
    subprocess.run([sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--target", str(tmp_path), str(wheel)],
                   check=True, timeout=120)
    own = next(installed.parent.parent.glob("lib/python*/site-packages")) / "isograd"
    run(installed, "-c", "import isograd", PYTHONPATH=str(tmp_path))  # two that fit are no mistake
    built = tmp_path / "isograd/_native/built.py"
    built.write_text(re.sub('TORCH = ".*"', 'TORCH = "2.15.0+cu132"', built.read_text()))
    for said in (run(installed, "-c", "import isograd", status=1, PYTHONPATH=str(tmp_path)),
                 run(installed, installed.parent / "isograd", "--version", status=2, PYTHONPATH=str(tmp_path))):
        assert "expected torch 2.15, for isograd was built with 2.15.0+cu132" in said, said
        assert f"isograd is installed in {tmp_path}/isograd and in {own}: keep the one for this torch." in said, said


def test_an_sdist_has_all_that_a_wheel_is_built_from(tmp_path):
    """Configuring asks for every source. It finds the torch that is installed."""
    import torch
    done = subprocess.run([sys.executable, "-c", "from scikit_build_core.build import build_sdist; import sys; build_sdist(sys.argv[1])",
                           str(tmp_path)], cwd=ROOT, env={**os.environ, "ISOGRAD_TORCH": "/nowhere"}, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    with tarfile.open(tmp_path / "isograd-0.1.0.tar.gz") as packed:
        packed.extractall(tmp_path)
    sources = tmp_path / "isograd-0.1.0"
    assert "\nRequires-Dist: torch<2.16,>=2.10\n" in (sources / "PKG-INFO").read_text()
    done = subprocess.run(["cmake", "--preset", "release", "-B", str(tmp_path / "build"), "-DISOGRAD_TESTS=OFF",
                           f"-DISOGRAD_TORCH={pathlib.Path(torch.__file__).parent}"], cwd=sources, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    made = {str(path) for path in (tmp_path / "build").rglob("made/**/*.hpp")}
    for source in [*sources.rglob("*.cpp"), *sources.rglob("*.hpp")]:
        places = [source.parent, sources / "src", sources / "include", sources / "python"]
        for header in re.findall('^#include "(.*)"', source.read_text(), re.MULTILINE):
            found = any((place / header).exists() for place in places) or any(path.endswith("/" + header) for path in made)
            assert found or source.name.endswith("_test.cpp"), f"{source} includes {header}"


def test_a_later_build_of_the_same_torch_fits(installed):
    said = run(installed, "-c", "import _isograd_command as c, pathlib, sys\n"
               "print(c.torch_problem(c.folder_of('torch'), '2.13.7+cu130'), c.torch_problem(None, '2.13.0+cpu'))")
    assert said.startswith("None found no torch; expected torch 2.13") and "torch==2.13.0`" in said


@pytest.mark.parametrize("made", [full(False), True])
def test_a_folder_without_artefacts_is_refused(tmp_path, made):
    (tmp_path / "build").mkdir()
    expected = "isograd: found no torch in ''"
    if made:
        import torch
        (tmp_path / "build/CMakeCache.txt").write_text(f"ISOGRAD_TORCH:PATH={pathlib.Path(torch.__file__).parent}\n")
        expected = f"isograd: found no bin/isograd in {tmp_path}/build"
    command = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-index", "--no-build-isolation",
               "-C", f"cmake.define.ISOGRAD_BUILD={tmp_path / 'build'}", "-w", str(tmp_path), str(ROOT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0 and expected in " ".join((done.stdout + done.stderr).split())


DOCUMENTED = """
import isograd, isograd_comm, json
said = {}
for before, of in ("", isograd_comm), ("RankingLoss.", isograd_comm.RankingLoss):
    for name, value in vars(of).items():
        if name == "__init__" or not name.startswith("_"):
            said[before + name] = (value.__doc__ or "").split("\\n")[0]
print(json.dumps(said))
"""


def signature(function):
    """Names of the arguments, their defaults, what is returned. An argument without a name is arg0 to pybind11."""
    function = ast.parse(f"def {function}: ...").body[0] if isinstance(function, str) else function
    names = [one.arg for one in function.args.args]
    return names, [ast.unparse(one) for one in function.args.defaults], ast.unparse(function.returns)


def test_the_stub_says_what_the_extension_has(installed):
    """Every name, and of each function arguments, defaults and result, as pybind11 writes them."""
    stub = next(installed.parent.parent.glob("lib/python*/site-packages/isograd/_native/isograd_comm.pyi"))
    body = [node for node in ast.parse(stub.read_text()).body if not isinstance(node, (ast.Import, ast.ImportFrom))]
    written = {node.name: node for node in body}
    written |= {f"RankingLoss.{getattr(node, 'name', None) or node.target.id}": node for node in written["RankingLoss"].body}
    real = json.loads(run(installed, "-W", "ignore", "-c", DOCUMENTED))
    assert set(written) == set(real)
    functions = {name for name, node in written.items() if isinstance(node, ast.FunctionDef)}
    assert functions == {name for name, text in real.items() if "->" in text} and len(functions) == 11
    for name in functions:
        names, defaults, returned = signature(written[name])
        assert signature(real[name].replace("arg0", names[-1])) == (names, defaults, returned), name


def test_types_are_those_that_are_written(installed):
    if subprocess.run([str(installed), "-c", "import mypy"], capture_output=True).returncode:
        pytest.skip("needs mypy")
    folder = next(installed.parent.parent.glob("lib/python*/site-packages"))
    said = run(installed, "-m", "mypy", "--config-file", ROOT / "pyproject.toml", "--cache-dir",
               folder / ".mypy", folder / "isograd", folder / "_isograd_command.py")
    assert said.startswith("Success: no issues found"), said


def private_names(text):
    """The names with an underscore that a source defines, and those that it uses of others."""
    defined, used = set(), set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and getattr(node.value, "id", "") == "self":
            defined.add(node.attr)
        elif isinstance(node, ast.Attribute):
            used.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            (defined if node.level else used).update([*(node.module or "").split("."), *(each.name for each in node.names)])
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            used.add(node.value.removesuffix("."))
    return [{name for name in names if re.fullmatch(r"_[a-zA-Z]\w*", name)} for names in (defined, used)]


def test_private_names_of_torch_stand_in_one_file_which_asserts_them():
    """In another file nothing would notice a version that renames one."""
    elsewhere = {"_fields", "_getframe", "_original_forward", "_isograd_command"}  # Python's, Accelerate's and the command's
    elsewhere |= {"_dp_group", "_hp_mapping", "_index_in_param_group", "_global_grad_norm", "_take_model_step"}  # DeepSpeed's, of one version
    texts = {str(path.relative_to(ROOT / "python/isograd")): path.read_text() for path in (ROOT / "python/isograd").rglob("*.py")}
    of_torch = texts.pop("_torch_names.py")
    defined = set().union(*(private_names(text)[0] for text in texts.values()), elsewhere)
    assert {name: private_names(text)[1] - defined for name, text in texts.items() if private_names(text)[1] - defined} == {}
    planted = private_names("group._device_types\ngetattr(model, '_orig_mod')\nfrom torch._C import _x\n")[1] - defined
    assert planted == {"_device_types", "_orig_mod", "_C", "_x"}
    asserted = runpy.run_path(str(ROOT / "python/isograd/_torch_names.py"))["names"]()
    used = private_names(of_torch)[1] - private_names(of_torch)[0]
    imported = {"_C", "_checkpoint", "_fully_shard", "_fsdp_state", "_CHECKPOINT_WRAPPED_MODULE", "_common_utils",
                "_init_utils", "_python_dispatch", "_init_param_handle_from_params", "_ShardParamInfo"}  # Python asserts these, or what is asserted of them
    assert used - {name.rpartition(".")[2] for name in asserted} == imported and all(asserted.values())


@pytest.mark.parametrize("gone", ["torch.distributed.ProcessGroup._device_types", "torch.amp.GradScaler._found_inf_per_device"])
def test_a_torch_that_lacks_a_private_name_is_refused_with_it(installed, gone):
    owner, _, name = gone.rpartition(".")
    said = run(installed, "-c", f"import torch, torch.distributed\ndel {gone}\nimport isograd", status=1).strip().splitlines()[-1]
    assert re.fullmatch(rf"ImportError: isograd: found torch [\w.+]+ without {owner.rpartition('.')[2]}.{name}; expected torch "
                        r"2.10 to 2.15, .*", said), said


def test_a_wheel_depends_on_the_torch_that_it_was_built_with(wheel, tmp_path, monkeypatch):
    import torch
    with zipfile.ZipFile(wheel) as packed:
        metadata = packed.read(next(name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))).decode()
    assert re.findall("Requires-Dist: (.*)", metadata) == [f"torch=={'.'.join(torch.__version__.split('.')[:2])}.*"]
    provider = runpy.run_path(str(ROOT / "python/_torch_dependency.py"))
    monkeypatch.setenv("ISOGRAD_TORCH", str(tmp_path))
    assert provider["dynamic_metadata"]("dependencies", {}) == ["torch>=2.10,<2.16"]
    (tmp_path / "version.py").write_text("__version__ = '2.15.0+cu132'\n")
    assert provider["dynamic_metadata"]("dependencies", {}) == ["torch==2.15.*"]


def test_one_range_of_torch_is_stated():
    oldest, newest = re.search(r"set\(LibTorch_RANGE ([\d.]+) ([\d.]+)\)", (ROOT / "cmake/FindLibTorch.cmake").read_text()).groups()
    above = f"{newest.split('.')[0]}.{int(newest.split('.')[1]) + 1}"
    for file, words in [("python/_torch_dependency.py", f"torch>={oldest},<{above}"), ("python/isograd/_torch_names.py", f"{oldest} to {newest}"),
                        ("src/base/torch_versions.hpp", f"{oldest} to {newest}"), ("DESIGN.md", f"LibTorch {oldest} to {newest}"),
                        ("CONTRIBUTING.md", f"{oldest} to {newest}"), ("docs/gpu.md", f"from {oldest} to {newest}"),
                        ("docs/python.md", f"({oldest} to {newest},"), ("docs/install.md", f"{oldest} to {newest}"), ("python/CMakeLists.txt", f"torch {oldest} to {newest}")]:
        assert words in (ROOT / file).read_text(), (file, words)
