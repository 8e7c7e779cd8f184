"""For pyproject.toml: a wheel depends on the torch that it is built with, an sdist on any of the range."""
from __future__ import annotations

import os
import pathlib
import runpy
import subprocess
import sys
from typing import Any, Mapping

RANGE = "torch>=2.10,<2.16"
# pip hides the installed packages from a build by PYTHONPATH, which -I passes by.
FIND = "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"


def dynamic_metadata(field: str, settings: Mapping[str, Any]) -> list[str]:
    """The dependencies, as scikit-build-core asks for them."""
    found = os.environ.get("ISOGRAD_TORCH") or subprocess.run(
        [sys.executable, "-I", "-c", FIND], capture_output=True, text=True, timeout=120).stdout.strip()
    version = pathlib.Path(found or "nowhere") / "version.py"
    if not version.exists():
        return [RANGE]
    return [f"torch=={'.'.join(str(runpy.run_path(str(version))['__version__']).split('.')[:2])}.*"]
