"""A program of tests/warm_python.py is seen as a process of its own, which runs as under an ordinary Python."""
import os
import signal
import subprocess
import sys
import time

import pytest
import warm_python

SAYS = """
import os, sys
print(sys.argv, os.getcwd(), sys.path[0], os.environ.get("SAID"), __name__, "torch" in sys.modules, flush=True)
print(sys.stdin.read() if sys.argv[-1] == "reads" else "", file=sys.stderr)
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}  # where it differs from the server's, Python is the ordinary one


def start(*arguments, python=None, **options):
    options = {"env": ENVIRONMENT, "text": True, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE,
               **options}
    return subprocess.Popen([python or warm_python.python(), *map(str, arguments)], **options)


def run(*arguments, given="", **options):
    process = start(*arguments, **options)
    return *process.communicate(given, timeout=60), process.returncode


@pytest.mark.parametrize("how", ["script", "-c", "-m"])
def test_arguments_folder_environment_and_streams_are_the_askers(tmp_path, how):
    (tmp_path / "says.py").write_text(SAYS)
    what = {"script": [tmp_path / "says.py"], "-c": ["-c", SAYS], "-m": ["-m", "says"]}[how]
    options = {"given": "to be read", "cwd": tmp_path, "env": {**ENVIRONMENT, "SAID": "so"}}
    warm, cold = (run("-W", "ignore", *what, "one two", "reads", python=python, **options)
                  for python in (None, sys.executable))
    assert warm[0] == cold[0].replace("False", "True") and warm[1:] == cold[1:] == ("to be read\n", 0), (warm, cold)


@pytest.mark.parametrize("text, status", [
    ("pass", 0), ("raise SystemExit(7)", 7), ("1 / 0", 1), ("import os; os._exit(9)", 9), ("import sys; sys.exit('no')", 1),
    ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL), ("import os; os.abort()", -signal.SIGABRT)])
def test_it_ends_as_the_program_does(text, status):
    _, errors, ended = run("-c", text)
    assert ended == status and (text != "1 / 0" or "ZeroDivisionError" in errors)


def test_signals_arrive_and_no_program_outlives_who_asked():
    # Python may have noted a signal without acting on it just before pause(), which then waits for another one.
    waits = "import os, time; print(os.getpid(), flush=True)\nwhile True: time.sleep(0.05)"
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGKILL):
        process = start("-c", waits)
        program = int(process.stdout.readline())
        process.send_signal(number)
        process.communicate(timeout=20)
        assert process.returncode == -number
        until = time.monotonic() + 20
        while os.path.exists(f"/proc/{program}") and time.monotonic() < until:
            time.sleep(0.01)
        assert not os.path.exists(f"/proc/{program}")


def test_a_program_starts_others_like_itself_and_they_end_with_it():
    text = ("import os, subprocess, sys\n"
            "subprocess.run([sys.executable, '-c', 'import os, signal, sys; print(os.getpid(), \"torch\" in sys.modules, "
            "flush=True); signal.pause()'])")
    process = start("-c", text)
    inner, has_torch = process.stdout.readline().split()
    assert has_torch == "True"
    process.kill()
    process.communicate(timeout=20)
    until = time.monotonic() + 20
    while os.path.exists(f"/proc/{inner}") and time.monotonic() < until:
        time.sleep(0.01)
    assert not os.path.exists(f"/proc/{inner}")


@pytest.mark.parametrize("more", [{"variable": {"ATEN_CPU_CAPABILITY": "default"}}, {"option": ["-I"]}])
def test_what_is_read_at_the_start_needs_an_ordinary_python(more):
    said, _, status = run(*more.get("option", []), "-c", "import sys; print('torch' in sys.modules, 'warm' in sys.executable)",
                          env={**ENVIRONMENT, **more.get("variable", {})})
    assert (said, status) == ("False False\n", 0)


def test_two_programs_draw_other_numbers():
    text = "import random, numpy; print(random.random(), numpy.random.rand())"
    assert not set(run("-c", text)[0].split()) & set(run("-c", text)[0].split())


IS_BUSY = """
import os, sys, threading, time
sys.path.append(sys.argv[1])
import orderly_exit
began, named = time.monotonic(), threading.Event()

def loop(name):
    with open(f"/proc/self/task/{threading.get_native_id()}/comm", "w") as file:
        file.write(name)
    named.set()
    while time.monotonic() < began + 1:
        pass

threading.Thread(target=loop, args=(sys.argv[2],), daemon=True).start()
named.wait()
orderly_exit.wait()
print(time.monotonic() - began >= 1)
"""


@pytest.mark.parametrize("name, waited", [("pt_gloo_runloop", "True\n"), ("another", "False\n")])
def test_a_process_ends_after_the_threads_of_gloo_rest(name, waited):
    """By a thread that is busy for 1 s."""
    python = subprocess.run([sys.executable, "-c", IS_BUSY, os.path.dirname(__file__), name], capture_output=True, text=True, timeout=60)
    assert (python.stdout, python.returncode) == (waited, 0), python.stderr
