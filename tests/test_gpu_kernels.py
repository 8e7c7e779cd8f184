"""src/kernels/gpu/kernels.cu compiled by NVRTC for the GPUs that people train on. No GPU is needed."""
import ctypes
import importlib.util
import pathlib

import pytest

SOURCE = pathlib.Path(__file__).resolve().parent.parent / "src/kernels/gpu"
NAMES = ("swiglu", "swiglu_backward", "rotary", "rms_norm", "rms_norm_backward", "adamw")
KERNELS = [f"isograd_{name}_{dtype}" for name in NAMES for dtype in ("float", "bfloat16")]


def nvrtc():
    """The library of the package nvidia-cuda-nvrtc (tests/requirements.txt)."""
    folders = [pathlib.Path(folder) for folder in importlib.util.find_spec("nvidia").submodule_search_locations]
    library = next(path for folder in folders for path in sorted(folder.glob("*/lib/libnvrtc.so.*")) if "alt" not in path.name)
    ctypes.CDLL(next(path for path in library.parent.glob("libnvrtc-builtins.so.*")))  # which it opens by name
    return ctypes.CDLL(library)


def compiled(library, source, architecture):
    """The log and the machine code, which is empty where it does not compile."""
    program = ctypes.c_void_p()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"isograd.cu", 0, None, None) == 0
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"--fmad=false", b"--ptxas-options=-v"]
    result = library.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))

    def text(size_of, read):
        size = ctypes.c_size_t()
        assert size_of(program, ctypes.byref(size)) == 0
        buffer = ctypes.create_string_buffer(size.value)
        assert read(program, buffer) == 0
        return buffer.raw

    log = text(library.nvrtcGetProgramLogSize, library.nvrtcGetProgramLog).decode()
    return log, text(library.nvrtcGetCUBINSize, library.nvrtcGetCUBIN) if result == 0 else b""


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90", "sm_100"])
def test_kernels_compile(architecture):
    library = nvrtc()
    source = (SOURCE / "arguments.hpp").read_text() + (SOURCE / "kernels.cu").read_text()
    log, code = compiled(library, source, architecture)
    assert code.startswith(b"\x7fELF"), log
    for kernel in KERNELS:
        assert kernel.encode() in code
    # Nothing is kept in memory that would be a register.
    assert log.count("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads") == len(KERNELS), log
    log, code = compiled(library, source.replace("logistic(x)", "logistics(x)"), architecture)  # planted
    assert not code and "logistics" in log
