"""python jumps.py: isograd.prove on two ranks of a ReLU model some of whose units lie at zero, so that rounding turns them on
and off; right and with planted mistakes. As JSON, by case, of rank 0."""
import json
import pathlib
import sys
import tempfile

import torch
import torch.nn as nn
import torch.nn.functional as F
from ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel

import isograd

UNITS, AT_ZERO = 256, 3  # so that one turned on is some 2 % of a gradient


def samples(rank):
    generator = torch.Generator().manual_seed(rank)
    return [(torch.randn(n, 8, generator=generator), torch.randint(6, (n,), generator=generator)) for n in ((3, 155), (9, 161))[rank]]


def make_model(activation=nn.ReLU, dtype=torch.float32, units=UNITS, at_zero=AT_ZERO):
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(8, units), activation(), nn.Linear(units, units), activation(), nn.Linear(units, 6))
    row = samples(0)[0][0][0]
    with torch.no_grad():  # the first row's product, but for the rounding of fp32
        model[0].bias[:at_zero] = -(model[0].weight[:at_zero].double() @ row.double()).float()
    return model.to(dtype)


def sample_loss(model, sample):
    return F.cross_entropy(model(sample[0].to(next(model.parameters()).dtype)), sample[1], reduction="none")


def proved(rank, mean=False, spoil=None, activation=nn.ReLU, dtype=torch.float32, units=UNITS, at_zero=AT_ZERO, **options):
    model = DistributedDataParallel(make_model(activation, dtype, units, at_zero))
    if not mean:
        isograd.sum_gradients(model)

    def step(model, optimizer, micro_batches):
        optimizer.zero_grad()
        batch = [sample for micro in micro_batches for sample in micro]
        x, y = (torch.cat(column) for column in zip(*batch))
        losses = F.cross_entropy(model(x.to(dtype)), y, reduction="mean" if mean else "sum")
        (losses if mean else isograd.TokenMean().count([y]).scale(losses)).backward()
        if spoil is not None:
            spoil(dict(model.module.named_parameters()))
        optimizer.step()

    with tempfile.TemporaryDirectory() as folder:
        verdict = isograd.prove(step, model, torch.optim.SGD(model.parameters(), lr=0.1), micro_batches=[samples(rank)],
                                loss=sample_loss, folder=folder, experiments=False, **options)
        steps = {side.name: list(json.loads((side / "step.json").read_text())) for side in pathlib.Path(folder).iterdir()
                 if side.is_dir()} if rank == 0 else {}
    return {"passed": verdict.passed, "said": verdict.findings, "text": str(verdict),
            "moves": "moves" in steps.get("one_process", []), "rounding": "rounding" in steps.get("alone", [])}


def scaled(parameters):
    parameters["2.weight"].grad.mul_(2)


def lost(parameters):
    parameters["0.bias"].grad.zero_()


def noisy(parameters):
    grad = parameters["2.weight"].grad
    grad += 1e-3 * grad.norm() / grad.numel()**0.5 * torch.randn(grad.shape, generator=torch.Generator().manual_seed(4))


CASES = {
    "right": {}, "many_at_zero": {"units": 64, "at_zero": 12}, "in_fp64": {"dtype": torch.float64}, "not_measured": {"alone": False}, "rank_means": {"mean": True},
    "scaled": {"spoil": scaled}, "lost": {"spoil": lost},
    "smooth": {"activation": nn.GELU}, "smooth_and_noisy": {"activation": nn.GELU, "spoil": noisy}}


if __name__ == "__main__":
    found = on_ranks(2, lambda rank: {name: proved(rank, **options) for name, options in CASES.items()})
    json.dump(found[0], sys.stdout)
