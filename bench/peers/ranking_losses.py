"""What `isograd bench ranking` is compared with: SmoothAPLoss of the package imbalanced-losses, forward and backward.

    python ranking_losses.py EXCHANGE SIDE

EXCHANGE holds
    case.json       rows, temperature, runs per turn
    scores.f32      fp32, and labels.u8, one byte a row
    SIDE.go.0       one byte per turn; end of file: done
    SIDE.done       one JSON line per turn: seconds, loss and gradient norm of each run; parts: the peak memory that the
                    first run needed on top of what was there, in bytes
"""
import json
import pathlib
import sys
import time

import torch

try:
    from imbalanced_losses import SmoothAPLoss
except ModuleNotFoundError:
    sys.exit(f"this Python has no imbalanced-losses: run {sys.executable} -m pip install imbalanced-losses==0.6.0, or "
             "./dev bench ranking, which does so")


def status_bytes(name):
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return 1024 * int(line.split()[1])
    return 0


def main():
    exchange, side = pathlib.Path(sys.argv[1]), sys.argv[2]
    case = json.loads((exchange / "case.json").read_text())
    torch.set_num_threads(1)
    rows = case["rows"]
    scores = torch.from_file(str(exchange / "scores.f32"), size=rows, dtype=torch.float32).clone()
    targets = torch.from_file(str(exchange / "labels.u8"), size=rows, dtype=torch.uint8).to(torch.int64)
    loss = SmoothAPLoss(num_classes=1, queue_size=0, temperature=case["temperature"], gather_distributed=False)
    scores = scores.unsqueeze(1).requires_grad_(True)
    small = scores.detach()[:1000].clone().requires_grad_(True)  # code and scratch memory of the libraries
    loss(small, torch.arange(1000) % 2).backward()
    go = open(exchange / f"{side}.go.0", "rb", buffering=0)
    done = open(exchange / f"{side}.done", "w")
    while go.read(1):
        turn = {"seconds": [], "losses": [], "norms": [], "parts": []}
        for _ in range(case["runs"]):
            scores.grad = None
            pathlib.Path("/proc/self/clear_refs").write_text("5")
            before = status_bytes("VmRSS")
            start = time.perf_counter()
            value = loss(scores, targets)
            value.backward()
            turn["seconds"].append(time.perf_counter() - start)
            turn["parts"].append(status_bytes("VmHWM") - before)
            turn["losses"].append(value.item())
            turn["norms"].append(scores.grad.norm().item())
        done.write(json.dumps(turn) + "\n")
        done.flush()


if __name__ == "__main__":
    main()
