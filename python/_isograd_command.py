"""The command `isograd` of the wheel: the program in C++, started with the LibTorch of the installed torch.

A module of its own, for `import isograd` brings torch, which the command does not need.
"""
from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import pathlib
import runpy
import sys


def folder_of(package: str) -> pathlib.Path | None:
    """Where a package is installed, without importing it."""
    spec = importlib.util.find_spec(package)
    return pathlib.Path(spec.submodule_search_locations[0]) if spec and spec.submodule_search_locations else None


def several() -> str:
    """Names the places where isograd is installed, if there are several: the first one is taken."""
    places = list(dict.fromkeys(str(one.locate_file("isograd")) for one in importlib.metadata.distributions(name="isograd")))
    return f". isograd is installed in {' and in '.join(places)}: keep the one for this torch" if len(places) > 1 else ""


def torch_problem(torch: pathlib.Path | None, built_with: str) -> str | None:
    """Says in three parts what is wrong with the torch in that folder; None where it fits."""
    expected = f"torch {'.'.join(built_with.split('.')[:2])}, for isograd was built with {built_with}"
    if torch is None or not (torch / "version.py").exists():
        return f"found no torch; expected {expected}. Run `pip install torch=={built_with.split('+')[0]}`{several()}"
    version = str(runpy.run_path(str(torch / "version.py"))["__version__"])
    if version.split(".")[:2] == built_with.split(".")[:2]:
        return None
    return (f"found torch {version} in {torch}; expected {expected}. Run `pip install torch=={built_with.split('+')[0]}`, "
            f"or build isograd with torch {version}: `pip install .` in its repository, "
            f"which refuses versions that it was not tested with{several()}")


def command() -> tuple[list[str], dict[str, str]]:
    """The program's path, to start commands with, and the environment that it needs. ImportError: torch does not fit."""
    own = folder_of("isograd")
    if own is None or not (own / "_native/bin/isograd").exists():
        raise ImportError(f"isograd: found no program in {own}; expected an installed wheel: run `pip install .`")
    built_with = str(runpy.run_path(str(own / "_native/built.py"))["TORCH"])
    torch = folder_of("torch")
    if problem := torch_problem(torch, built_with):
        raise ImportError(f"isograd: {problem}.")
    libraries = [str(torch) + "/lib", *filter(None, [os.environ.get("LD_LIBRARY_PATH")])]
    environment = {**os.environ, "LD_LIBRARY_PATH": os.pathsep.join(libraries)}
    environment.setdefault("PYTHON", sys.executable)  # whose packages tokenizers and benchmarks ask for
    return [str(own / "_native/bin/isograd")], environment


def main() -> None:
    """Becomes the program; status 2 where torch does not fit, as for any bad input (docs/errors.md)."""
    try:
        program, environment = command()
    except ImportError as error:
        print(error, file=sys.stderr)
        sys.exit(2)
    os.execve(program[0], [*program, *sys.argv[1:]], environment)
