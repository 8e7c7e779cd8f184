"""python losses.py CASES.json RANKS ...: losses of isograd.ranking and isograd.focal on so many ranks, whose rows are those of a case
laid one after the other; what each refuses. As JSON: by ranks, case, step and rank the loss and the gradient of scores."""
import copy
import json
import pathlib
import sys

import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh

import isograd
from isograd import focal, ranking

CUTS = {1: lambda n: [0, n], 2: lambda n: [0, n // 3, n], 3: lambda n: [0, n // 2, n // 2, n]}  # a rank without rows


def made(case, **more):
    options = {("interpolation" if key == "quantile_interpolation" else key): value for key, value in case["options"].items()}
    return getattr(focal if "Focal" in case["loss"] else ranking, case["loss"])(**options, **more)


def own_rows(case, step, rank, size):
    dtype = getattr(torch, case["dtype"])
    cut = CUTS[size](len(step["scores"]))
    rows = slice(cut[rank], cut[rank + 1])
    kind = dtype if case["loss"] == "SigmoidFocalLoss" else torch.int64
    scores = torch.tensor(step["scores"], dtype=dtype)[rows].requires_grad_()
    weight = torch.tensor(step["weight"], dtype=dtype)[rows] if "weight" in step else None
    iid = [torch.tensor(step["iid"]).bool()[rows]] if "iid" in step else []
    return scores, torch.tensor(step["targets"], dtype=kind)[rows], weight, *iid


def forward(loss, case, step, rank, size):
    scores, *given = own_rows(case, step, rank, size)
    value = loss(scores, *given)
    torch.nan_to_num(value).sum().backward()
    return {"loss": value.detach().double().flatten().tolist(), "gradient": scores.grad.double().flatten().tolist()}


def refused(rank):
    """The messages of two ranks where the input of rank 1 does not fit."""
    def said(loss, scores, targets, weight=None, *more):
        try:
            loss(scores, targets, weight, *more)
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
        "iid": said(smooth, x, y, None, torch.ones(4, dtype=torch.bool if rank == 0 else torch.int64)),
        "alpha": said(soft, torch.randn(4, 3 if rank else 2), y), "soft": said(focal.SigmoidFocalLoss(), x[:, 0], y.float() + rank),
        "none_valid": float(smooth(x, y * 0)), "no_rows": float(smooth(x[:0], y[:0])),
        "not_finite": float(smooth(torch.full((4, 1), float("inf")) if rank else x, y)),
        "elements_0": float(focal.SigmoidFocalLoss()(x[:0], x[:0]))}


def rows_of(rank, seed):
    generator = torch.Generator().manual_seed(2 * seed + rank)
    return (torch.randn(5 + 4 * rank, 1, dtype=torch.float64, generator=generator),
            torch.randint(2, (5 + 4 * rank,), generator=generator))


def over_a_mesh(rank):
    """Two steps with a queue, the second one's value and gradient: over the world, and over a mesh, which is no one group."""
    mesh, found = init_device_mesh("cpu", (2, 2)), []
    for group, mode in ((None, "sum"), (mesh, "sum"), (mesh, "mean")):
        loss = ranking.SmoothAPLoss(temperature=0.5, queue_size=8, group=group, grad_reduction=mode)
        for seed in range(2):
            scores, targets = rows_of(rank, seed)
            value = loss(scores.requires_grad_(), targets)
            value.backward()
        gradient = scores.grad / (4 if mode == "mean" else 1)
        found.append([value.item(), gradient.flatten().tolist(), loss.queue_rows])
    return found


def states(rank):
    """A queue that is saved, loaded and copied: the third step's value."""
    def after(loss):
        return loss(*rows_of(rank, 2)).item()

    loss = ranking.SmoothAPLoss(temperature=0.5, queue_size=8)
    for seed in range(2):
        loss(*rows_of(rank, seed))
    loss.temperature = 0.125
    other = ranking.SmoothAPLoss(temperature=0.5, queue_size=8)
    other.load_state_dict(loss.state_dict())
    copied = copy.deepcopy(loss)
    found = {"loaded": after(other), "copied": after(copied), "went_on": after(loss), "rows": [loss.queue_rows, other.queue_rows],
             "temperature": other.temperature, "fresh": after(ranking.SmoothAPLoss(temperature=0.125, queue_size=8))}
    return found


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
        return [[forward(loss, case, step, rank, size) for step in case["steps"]] for case in cases for loss in [made(case)]]

    found = {size: on_ranks(size, run) for size in map(int, sys.argv[2:])}
    json.dump({"ranks": found, "refused": on_ranks(2, refused), "model": on_ranks(2, whole_model),
               "mesh": on_ranks(4, over_a_mesh), "state": on_ranks(2, states)}, sys.stdout)


if __name__ == "__main__":
    main()
