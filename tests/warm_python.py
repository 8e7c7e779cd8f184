"""Python programs in processes of their own that need not load PyTorch first: copies of a process that has it.

To load torch with what DDP, FSDP2 and optimizers bring takes 2.3 s of a processor, and one test starts up to eight such
processes. `python()` is a file that stands for this interpreter (its SCRIPT, -c TEXT or -m MODULE): it asks a server,
which has torch, to fork and to run that with the asker's arguments, environment, folder and streams. The asker passes
signals on, ends as the copy ended, and the copy does not outlive it: who starts it sees a process like others. The
copy's own sys.executable is that file again.

An ordinary Python runs instead where a variable that libraries read while they load is not as in the server, or where
Python has other options than -W and -u. Tests of an installed package, or of how a process starts, use that one anyway.
"""
import atexit
import contextlib
import functools
import importlib
import json
import os
import pathlib
import select
import selectors
import shutil
import signal
import socket
import sys

READ_AT_LOAD = ("ATEN_", "DNNL_", "GOMP_", "KMP_", "LD_", "MKL_", "OMP_", "ONEDNN_", "OPENBLAS_", "PYTHONHASHSEED",
                "TORCHDYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", "TORCH_CPP_", "TORCH_LOGS", "TORCH_SHOW_")
# None of them starts a thread, which a fork would lose.
LOADED = ("torch", "torch._dynamo", "torch.distributed.checkpoint.state_dict", "torch.distributed.fsdp",
          "torch.distributed.optim", "torch.distributed.pipelining", "torch.distributed.run",
          "torch.distributed.tensor.parallel", "safetensors.torch")
# What peers of `isograd bench` load in addition, where they are installed: 7 s more.
PEERS = ("peft", "tinker", "transformers.models.mixtral.modeling_mixtral", "transformers.models.qwen3.modeling_qwen3")


def read_at_load(environment):
    values = {name: value for name, value in environment.items() if name.startswith(READ_AT_LOAD)}
    return {"MKL_NUM_THREADS": values.get("OMP_NUM_THREADS"), **values}  # as MKL does it


@functools.cache
def python(interpreter=sys.executable, *more):
    """The file that stands for that Python, with these modules in addition. Its server starts with the first call and ends with
    this process."""
    import subprocess
    import tempfile
    folder = pathlib.Path(tempfile.mkdtemp(prefix="isograd-warm-"))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    (folder / "python").write_text(
        f"#!{interpreter} -IS\nimport sys\nsys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})\nimport warm_python\n"
        f"warm_python.ask({str(folder)!r}, {interpreter!r}, {read_at_load(environment)!r})\n")
    (folder / "python").chmod(0o755)
    server = subprocess.Popen([interpreter, "-W", "ignore", __file__, folder / "socket", *more], stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, env=environment, cwd="/")

    def end():
        server.stdin.close()
        try:
            server.wait(timeout=20)
        except subprocess.TimeoutExpired:
            server.kill()
        shutil.rmtree(folder, ignore_errors=True)
    atexit.register(end)
    if not select.select([server.stdout], [], [], 120)[0] or server.stdout.readline() != b"ready\n":
        server.kill()
        raise RuntimeError("the server of warm Pythons has not started within 120 s; what it said is above")
    return str(folder / "python")


def for_peers():
    """The environment in which `isograd bench` takes it for its peers."""
    return dict(os.environ, PYTHON=python(sys.executable, *PEERS))


def ask(folder, cold, loaded_with):
    """In the file that stands for Python: runs what its arguments say and ends this process as that ended."""
    arguments, options = sys.argv[1:], []
    while arguments and (arguments[0] == "-u" or arguments[0].startswith("-W")):
        options.append(arguments.pop(0))
        if options[-1] == "-W":
            options[-1] += arguments.pop(0)
    what = arguments[0] if arguments else "-"
    if (what.startswith("-") and what not in ("-c", "-m")) or read_at_load(os.environ) != loaded_with:
        os.execv(cold, [cold, *sys.argv[1:]])
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.connect(f"{folder}/socket")
        request = json.dumps({"options": options, "arguments": arguments, "environment": dict(os.environ),
                              "folder": os.getcwd(), "executable": f"{folder}/python"}).encode()
        socket.send_fds(server, [len(request).to_bytes(4, "big")], [0, 1, 2])
        server.sendall(request)
        for stream in (0, 1):  # their other ends may wait for the copy to close them
            os.close(stream)
        server.setblocking(False)
        signal.set_wakeup_fd(server.fileno())  # a handler in Python would run only after a call that waits
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
            signal.signal(number, lambda *_: None)
        reply, part = b"", None
        while part != b"" and not reply.endswith(b"\n"):
            select.select([server], [], [])
            reply += (part := server.recv(64))
        status = int(reply or -signal.SIGKILL)
    if status < 0:
        with contextlib.suppress(OSError):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    os._exit(status)


def read_request(asker):
    """The request and its three streams; None of one who has gone meanwhile."""
    asker.settimeout(20)
    with contextlib.suppress(OSError):
        size, streams, _, _ = socket.recv_fds(asker, 4, 3)
        request, size = b"", int.from_bytes(size, "big")
        while len(streams) == 3 and len(request) < size and (part := asker.recv(size - len(request))):
            request += part
        if len(streams) == 3 and len(request) == size > 0:
            return json.loads(request), streams
        for stream in streams:
            os.close(stream)
    return None


def serve(at):
    """Forks for each asker until its stdin ends. Returns in the copies alone: what to run, and the three streams."""
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listening.bind(at)
    listening.listen(64)
    ended, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    ready, askers = selectors.DefaultSelector(), {}
    for file in (0, listening, ended):
        ready.register(file, selectors.EVENT_READ)
    print("ready", flush=True)
    while True:
        for file in [key.fileobj for key, _ in ready.select()]:
            if file == 0:
                for copy in askers.values():
                    os.killpg(copy, signal.SIGKILL)
                os._exit(0)
            elif file is listening:
                asker = listening.accept()[0]
                request = read_request(asker)
                if request is None:
                    asker.close()
                    continue
                copy = os.fork()
                if copy == 0:
                    os.setpgid(0, 0)
                    signal.set_wakeup_fd(-1)
                    for other in (ready, listening, ended, wakes, asker, *askers):
                        other.close()
                    return request
                with contextlib.suppress(OSError):  # one of the two is first
                    os.setpgid(copy, copy)
                for stream in request[1]:
                    os.close(stream)
                askers[asker] = copy
                ready.register(asker, selectors.EVENT_READ)
            elif file is ended:
                ended.recv(4096)
                tell_who_ended(askers, ready)
            elif file in askers:
                try:
                    numbers = file.recv(64)
                except ConnectionError:
                    numbers = b""
                for number in numbers:
                    os.kill(askers[file], number)
                if not numbers:
                    os.killpg(askers[file], signal.SIGKILL)
                    ready.unregister(file)


def tell_who_ended(askers, ready):
    with contextlib.suppress(ChildProcessError):
        while True:
            copy, status = os.waitpid(-1, os.WNOHANG)
            if copy == 0:
                return
            asker = next(asker for asker, of in askers.items() if of == copy)
            del askers[asker]
            with contextlib.suppress(KeyError):  # it has gone before
                ready.unregister(asker)
            with contextlib.suppress(OSError):
                asker.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            asker.close()


def become(request, streams):
    """Sets up what Python sets up for a program, as far as it depends on the request; then runs it."""
    import multiprocessing
    import random
    import runpy
    import types
    import warnings

    import numpy
    import orderly_exit
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for stream, copied in enumerate(streams):
        os.dup2(copied, stream)
        os.close(copied)
    os.chdir(request["folder"])
    os.environ.clear()
    os.environ.update(request["environment"])
    random.seed()
    numpy.random.seed()
    multiprocessing.set_executable(sys.executable)  # it passes files on
    sys.executable = request["executable"]
    distributed = sys.modules["torch.distributed"]
    distributed.set_debug_level_from_env()
    destroy = distributed.destroy_process_group

    def destroy_at_rest(*given, **named):
        """A model that is freed later joins gloo's threads while it holds Python's lock."""
        orderly_exit.wait()
        destroy(*given, **named)
    distributed.destroy_process_group = destroy_at_rest
    for option in request["options"]:
        if option == "-u":
            sys.stdout.reconfigure(write_through=True)
        else:
            sys.warnoptions.append(option[2:])
            warnings.filterwarnings(option[2:])
    what, *arguments = request["arguments"]
    first = os.getcwd() if what == "-m" else "" if what == "-c" else str(pathlib.Path(what).resolve().parent)
    added = os.environ.get("PYTHONPATH", "")
    sys.path[:1] = [first, *(added.split(os.pathsep) if added else [])]
    if what == "-m":
        sys.argv = arguments
        return runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    if what == "-c":
        text, sys.argv = arguments[0], ["-c", *arguments[1:]]
    else:
        text, sys.argv, main.__file__ = pathlib.Path(what).read_text(), [what, *arguments], what
    exec(compile(text, main.__dict__.get("__file__", "<string>"), "exec"), main.__dict__)


if __name__ == "__main__":
    for module in LOADED:
        importlib.import_module(module)
    for module in sys.argv[2:]:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    assert len(os.listdir("/proc/self/task")) == 1, "a module of LOADED has started a thread"
    import gc
    gc.collect()
    gc.freeze()
    become(*serve(sys.argv[1]))
