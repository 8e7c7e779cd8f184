"""isograd.linear_cross_entropy compared with F.linear with F.cross_entropy, and with
torch.nn.functional.linear_cross_entropy where torch has it (also on its chunked path, by default options): forward and
backward of one head, each side in a process of its own.

    python bench/peers/linear_cross_entropy.py [--tokens 4096 --hidden 512 --vocabulary 32768 --dtype float32 --threads 1]

by a Python with the package in it (./dev wheel && pip install dist/isograd-*.whl). Prints a line of JSON for each side:
seconds, the least of all turns, which the sides take one after the other; MiB that a step needs at its peak beyond hidden,
weight and targets.
"""
import json
import subprocess
import sys

import torch
import torch.nn.functional as F

import turns


def plain(hidden, weight, targets):
    return F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")


def torchs(hidden, weight, targets):
    return F.linear_cross_entropy(hidden, weight, targets, reduction="sum")


def torchs_in_chunks(hidden, weight, targets):
    from torch.nn.modules.linear_cross_entropy_options import LinearCrossEntropyOptions
    return F.linear_cross_entropy(hidden, weight, targets, reduction="sum", options=LinearCrossEntropyOptions())


def ours(hidden, weight, targets):
    import isograd
    return isograd.linear_cross_entropy(hidden, weight, targets).sum


SIDES = {"plain": plain, "torch": torchs, "torch_chunked": torchs_in_chunks, "isograd": ours}


def serve(side, options):
    """One step for each line that comes; a line of JSON for each."""
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    dtype = getattr(torch, options.dtype)
    hidden = torch.randn(options.tokens, options.hidden, dtype=dtype, requires_grad=True)
    weight = (torch.randn(options.vocabulary, options.hidden) * options.hidden**-0.5).to(dtype).requires_grad_()
    targets = torch.randint(options.vocabulary, (options.tokens,))
    small = [t.detach()[:64].clone().requires_grad_(t.is_floating_point()) for t in (hidden, weight)]
    try:
        SIDES[side](*small, targets[:64] % 64).backward()  # code and scratch memory of the libraries
    except (AttributeError, ImportError, NotImplementedError) as error:
        print(json.dumps({"missing": f"{type(error).__name__}: {error}"}), flush=True)
        return
    print(json.dumps({}), flush=True)

    def differentiate():
        loss = SIDES[side](hidden, weight, targets)
        loss.backward()
        return loss.item()

    for _ in sys.stdin:
        hidden.grad = weight.grad = None
        peak, (seconds, loss) = turns.peak_growth(lambda: turns.timed(differentiate))
        print(json.dumps({"seconds": seconds, "bytes": peak, "loss": loss, "norm": weight.grad.double().norm().item()}),
              flush=True)


def main():
    parser = turns.arguments(__doc__, tokens=4096, hidden=512, vocabulary=32768, turns=3, threads=1)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--side", choices=SIDES)
    options = parser.parse_args()
    if options.side:
        return serve(options.side, options)
    given = [f"--{name}={value}" for name, value in vars(options).items() if name != "side"]
    running = {side: subprocess.Popen([sys.executable, "-W", "ignore", __file__, f"--side={side}", *given], text=True,
                                      stdin=subprocess.PIPE, stdout=subprocess.PIPE) for side in SIDES}
    taken = {side: [] for side in SIDES}
    for side, process in running.items():
        if missing := json.loads(process.stdout.readline() or '{"missing": "ended"}').get("missing"):
            print(json.dumps({"side": side, "missing": missing}), flush=True)
            del taken[side]
    for _ in range(options.turns + 1):
        for side in taken:
            running[side].stdin.write("go\n")
            running[side].stdin.flush()
            taken[side].append(json.loads(running[side].stdout.readline()))
    for side, process in running.items():
        process.stdin.close()
        process.wait(timeout=60)
    for side, steps in taken.items():
        print(json.dumps({"side": side, "seconds": round(min(s["seconds"] for s in steps[1:]), 3),
                          "MiB": round(steps[0]["bytes"] / 2**20, 1), "loss": steps[0]["loss"], "norm": steps[0]["norm"]}))
    return None


if __name__ == "__main__":
    main()
