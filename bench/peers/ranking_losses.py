"""The peer of `isograd bench ranking`: SmoothAPLoss of the package imbalanced-losses, forward and backward (turns.py).

case.json has rows and temperature; scores.f32 are fp32, labels.u8 one byte a row. parts: the bytes that the run needed at
its peak on top of those that were there.
"""
import sys

import torch

import turns

try:
    from imbalanced_losses import SmoothAPLoss
except ModuleNotFoundError:
    sys.exit(f"this Python has no imbalanced-losses: run {sys.executable} -m pip install imbalanced-losses==0.6.0, or "
             "./dev bench ranking, which does so")


def run(rank):
    case = rank.case()
    rows = case["rows"]
    scores = torch.from_file(str(rank.exchange / "scores.f32"), size=rows, dtype=torch.float32).clone()
    targets = torch.from_file(str(rank.exchange / "labels.u8"), size=rows, dtype=torch.uint8).to(torch.int64)
    loss = SmoothAPLoss(num_classes=1, queue_size=0, temperature=case["temperature"], gather_distributed=False)
    scores = scores.unsqueeze(1).requires_grad_(True)
    small = scores.detach()[:1000].clone().requires_grad_(True)  # code and scratch memory of the libraries
    loss(small, torch.arange(1000) % 2).backward()

    def differentiate():
        value = loss(scores, targets)
        value.backward()
        return value

    for _ in rank.turns():
        scores.grad = None
        peak, (seconds, value) = turns.peak_growth(lambda: turns.timed(differentiate))
        rank.answer(seconds=[seconds], parts=[peak], losses=[value.item()], norms=[scores.grad.norm().item()])


if __name__ == "__main__":
    turns.main(run)
