"""How a peer that used Gloo ends."""
import os
import sys

import torch.distributed as dist


def leave():
    """Ends this process at once, with success. Call it where all that was measured has been written.

    A thread of Gloo that lets go of a tensor while the interpreter is being taken down aborts the process
    (std::terminate), and with it a benchmark that went well: so the interpreter is not taken down.
    """
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
