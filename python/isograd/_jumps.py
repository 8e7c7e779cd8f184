"""What a loss whose derivative jumps (ReLU, max, abs) makes of rounding: it turns units on and off, each by a whole step.

One process in the run's precision is then one draw of many, and further from fp64 than any sum rounds. Two things are
measured, on one process, from parameters that are moved by what rounding is worth:

moves:    how far the gradient in fp64 goes. Rounding of a sum of n terms is that of its weights, each by about sqrt(n) u
          of itself (Higham and Mary, A new approach to probabilistic rounding error analysis, 2019); sums are kept in
          fp32, and a weight is rounded once in the run's precision. No run in that precision knows the parameters more
          exactly, so that none can be held to less; the run is one more draw, of which four times the most is allowed, as of
          rounding. It takes no arithmetic of the run's precision, and is nothing but
          rounding where the derivative does not jump.
rounding: how far one process in that precision is from fp64 there: the largest of several draws.
"""
from __future__ import annotations

import math
from typing import Callable, Mapping

import torch
from torch import nn

from ._assemble import copied, plain_name

MOST_DRAWS = 16  # as `isograd verify` makes
FEWEST_DRAWS = 4  # after which a gradient that has moved by no more than smooth ones is a smooth one
SMOOTH = 256.0  # units that a parameter's gradient may be off by where nothing jumps (docs/verify.md)

Gradients = Mapping[str, torch.Tensor]
Step = Callable[[nn.Module, torch.dtype], Gradients]  # of one process, in that precision


def apart(one: Gradients, other: Gradients) -> dict[str, float]:
    """Of each parameter the norm of the difference, in fp64."""
    return {name: float((g.double() - other[name].double()).norm()) for name, g in one.items()}


def nudged(model: nn.Module, draw: int, unit: float) -> nn.Module:
    """A copy in fp64 whose trained parameters are each moved by what rounding in a type of unit round-off `unit` is worth."""
    other = copied(model).double()
    random = torch.Generator().manual_seed(draw)
    with torch.no_grad():
        for parameter in other.parameters():
            terms = parameter.numel() // max(1, parameter.shape[0]) if parameter.dim() > 1 else 1
            worth = unit + 2.0**-24 * terms**0.5
            parameter.mul_(1 + worth * torch.randn(parameter.shape, generator=random, dtype=torch.float64))
    return other


def measure(model: nn.Module, step: Step, precision: torch.dtype, found: Gradients,
            right: Gradients) -> tuple[list[float], list[float]] | None:
    """(moves, rounding) by parameter, from as many draws as it takes to cover `found`, at most MOST_DRAWS; None: no jump.

    found, right: the run's gradient and that of one process in fp64.
    """
    unit = torch.finfo(precision).eps / 2
    off = apart(found, right)
    if not all(map(math.isfinite, off.values())):
        return None  # no jump of a derivative does that
    smooth = {name: SMOOTH * unit * float(g.double().norm()) for name, g in right.items()}
    moves, rounding = dict.fromkeys(off, 0.0), dict.fromkeys(off, 0.0)
    for draw in range(MOST_DRAWS):
        there = nudged(model, draw, unit)
        exact = {name: g.clone() for name, g in step(there, torch.float64).items()}
        moved, rounded = apart(exact, right), apart(step(there, precision), exact)
        if not all(map(math.isfinite, [*moved.values(), *rounded.values()])):
            return None  # and this bounds nothing
        for name in off:
            moves[name], rounding[name] = max(moves[name], moved[name]), max(rounding[name], rounded[name])
        if all(off[name] <= max(smooth[name], 4 * min(moves[name], rounding[name])) for name in off):
            break
        if draw + 1 >= FEWEST_DRAWS and all(moves[name] <= smooth[name] for name in off):
            break
    if all(moves[name] <= smooth[name] for name in off):
        return None
    return list(moves.values()), list(rounding.values())
