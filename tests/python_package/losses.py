"""python losses.py CASES.json RANKS ...: losses of isograd.ranking and isograd.focal on so many ranks, whose rows are those of a case
laid one after the other; what each refuses. As JSON: by ranks, case, step and rank the loss and the gradient of scores."""
import json
import pathlib
import sys

import torch
import torch.distributed as dist
from ranks import on_ranks

import isograd
from isograd import focal, ranking

CUTS = {1: lambda n: [0, n], 2: lambda n: [0, n // 3, n], 3: lambda n: [0, n // 2, n // 2, n]}  # a rank without rows


def made(case, **more):
    options = {("interpolation" if key == "quantile_interpolation" else key): value
               for key, value in case["options"].items() if key != "queue_size"}
    return getattr(focal if "Focal" in case["loss"] else ranking, case["loss"])(**options, **more)


def own_rows(case, step, rank, size):
    dtype = getattr(torch, case["dtype"])
    cut = CUTS[size](len(step["scores"]))
    rows = slice(cut[rank], cut[rank + 1])
    kind = dtype if case["loss"] == "SigmoidFocalLoss" else torch.int64
    scores = torch.tensor(step["scores"], dtype=dtype)[rows].requires_grad_()
    weight = torch.tensor(step["weight"], dtype=dtype)[rows] if "weight" in step else None
    return scores, torch.tensor(step["targets"], dtype=kind)[rows], weight


def forward(loss, case, step, rank, size):
    scores, targets, weight = own_rows(case, step, rank, size)
    value = loss(scores, targets, weight)
    torch.nan_to_num(value).sum().backward()
    return {"loss": value.detach().double().flatten().tolist(), "gradient": scores.grad.double().flatten().tolist()}


def refused(rank):
    """What two ranks say where rank 1 gives what does not fit."""
    def said(loss, scores, targets, weight=None):
        try:
            loss(scores, targets, weight)
        except isograd.ConfigError as error:
            return str(error)
        return None

    smooth, x, y = ranking.SmoothAPLoss(), torch.randn(4, 1), torch.tensor([0, 1, 0, 1])
    soft = focal.SoftmaxFocalLoss(alpha=[1.0, 2.0])
    return {
        "target": said(smooth, x, y + 2 * rank), "shape": said(smooth, x[:, 0] if rank else x, y),
        "type": said(smooth, x.double() if rank else x, y),
        "weights": said(smooth, x, y, torch.ones(4) if rank else None),
        "weight": said(smooth, x, y, torch.full((4,), -1.0 * rank)),
        "alpha": said(soft, torch.randn(4, 3 if rank else 2), y), "soft": said(focal.SigmoidFocalLoss(), x[:, 0], y.float() + rank),
        "none_valid": float(smooth(x, y * 0)), "no_rows": float(smooth(x[:0], y[:0])),
        "not_finite": float(smooth(torch.full((4, 1), float("inf")) if rank else x, y)),
        "elements_0": float(focal.SigmoidFocalLoss()(x[:0], x[:0]))}


def whole_model(rank):
    """A scorer under DDP whose gradients are summed, or averaged and told so: gradients of its weight; and of ranks apart."""
    found = {}
    for mode in ("sum", "mean", "apart"):
        torch.manual_seed(0)
        rows, targets = torch.randn(24, 5, dtype=torch.float64), torch.randint(2, (24,))
        model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(5, 1, dtype=torch.float64))
        group = [dist.new_group([r]) for r in range(2)][rank] if mode == "apart" else None
        if mode != "mean":
            isograd.sum_gradients(model)
        mine = slice(0, 7) if rank == 0 else slice(7, 24)
        loss = ranking.SmoothAPLoss(temperature=0.3, group=group, grad_reduction="mean" if mode == "mean" else "sum")
        (loss(model(rows[mine]), targets[mine]) / (2 if mode == "apart" else 1)).backward()
        found[mode] = model.module.weight.grad.flatten().tolist()
    return {"rows": rows.tolist(), "targets": targets.tolist(), "weight": model.module.weight.flatten().tolist(),
            "bias": model.module.bias.item(), **found}


def main():
    cases = json.loads(pathlib.Path(sys.argv[1]).read_text())

    def run(rank):
        size = dist.get_world_size()
        return [[forward(made(case), case, step, rank, size) for step in case["steps"]] for case in cases]

    found = {size: on_ranks(size, run) for size in map(int, sys.argv[2:])}
    json.dump({"ranks": found, "refused": on_ranks(2, refused), "model": on_ranks(2, whole_model)}, sys.stdout)


if __name__ == "__main__":
    main()
