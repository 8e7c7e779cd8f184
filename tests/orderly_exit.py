"""On import: this process ends only after gloo's threads have come to rest.

A thread of gloo that drops its last work takes Python's lock, for a work keeps Python objects. Where Python is ending by then, the thread
cannot get it, and C++ aborts the process, though the program has done all that it should (pytorch#179291, #190489). This happens to
processes that do call destroy_process_group, about once in 10^5 on a busy machine."""
import atexit
import os
import time


def threads_rest(name="pt_gloo_runloop"):
    """Whether every thread of that name waits for something."""
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/stat") as file:
                before, after = file.read().rsplit(")", 1)
        except OSError:  # it has ended
            continue
        if before.endswith(f"({name}") and after.split()[0] != "S":
            return False
    return True


@atexit.register
def wait(seconds=5.0):
    """Two looks 1 ms apart: a thread that waits for Python's lock gets it between them."""
    end, rests = time.monotonic() + seconds, 0
    while rests < 2 and time.monotonic() < end:
        time.sleep(0.001)
        rests = rests + 1 if threads_rest() else 0
