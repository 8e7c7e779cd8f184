"""isograd.ranking's modules compared with those of the package imbalanced-losses: forward and backward on one process, by
turns.

    python bench/peers/python_ranking_losses.py [--rows 5000 20000 --turns 5 --threads 1]

by a Python with both packages in it: ./dev wheel && pip install dist/isograd-*.whl imbalanced-losses==0.6.0. Prints a line
of JSON for each loss and number of rows: seconds, the least of all turns; the largest difference of the two gradients, of the
largest element.
"""
import json
import sys

import torch

import turns
from isograd import ranking

try:
    import imbalanced_losses
except ModuleNotFoundError:
    sys.exit(f"this Python has no imbalanced-losses: run {sys.executable} -m pip install imbalanced-losses==0.6.0")

LOSSES = {"SmoothAPLoss": {"temperature": 0.05}, "RecallAtQuantileLoss": {"temperature": 0.05, "quantile": 0.02},
          "PAUCAtBudgetLoss": {"temperature": 0.1, "alpha": 0.0, "beta": 0.05, "surrogate": "pairwise"}}
PEER = {"num_classes": 1, "queue_size": 0, "gather_distributed": False}


def step(loss, scores, targets):
    scores.grad = None
    seconds, _ = turns.timed(lambda: loss(scores, targets).backward())
    return seconds, scores.grad


def main():
    parser = turns.arguments(__doc__, turns=5, threads=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[5000, 20000])
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for name, given in LOSSES.items():
        sides = {"isograd": getattr(ranking, name)(**given), "imbalanced_losses": getattr(imbalanced_losses, name)(**PEER, **given)}
        for rows in options.rows:
            torch.manual_seed(0)
            targets = (torch.rand(rows) < 0.1).long()
            scores = {side: (torch.randn(rows, 1, generator=torch.Generator().manual_seed(1)) + 0.5 * targets.unsqueeze(1))
                      .requires_grad_() for side in sides}
            taken, gradients = {side: [] for side in sides}, {}
            for _ in range(options.turns + 1):  # the first warms up
                for side, loss in sides.items():
                    seconds, gradients[side] = step(loss, scores[side], targets)
                    taken[side].append(seconds)
            best = {side: min(seconds[1:]) for side, seconds in taken.items()}
            apart = (gradients["isograd"] - gradients["imbalanced_losses"]).abs().max() / gradients["isograd"].abs().max()
            print(json.dumps({"loss": name, "rows": rows, **{side: round(value, 5) for side, value in best.items()},
                              "times_faster": round(best["imbalanced_losses"] / best["isograd"], 2),
                              "gradients_apart": float(apart)}), flush=True)


if __name__ == "__main__":
    main()
