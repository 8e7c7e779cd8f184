"""isograd.prove: a step that can be made again, so that what its verdict leaves open is tried."""
from __future__ import annotations

import copy
from typing import Any, Callable, Sequence, Union

import torch
from torch import nn

from ._assemble import held, ranks, whole
from ._errors import refuse
from ._verdict import Verdict
from .watching import watch

MicroBatches = Sequence[Sequence[Any]]
Step = Callable[[nn.Module, torch.optim.Optimizer, MicroBatches], Union[float, torch.Tensor, None]]


class _Again(watch):
    """The step made once more, recorded and not compared."""

    compares = False


def prove(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer, *, micro_batches: MicroBatches,
          experiments: bool = True, **options: Any) -> Verdict:
    """Makes the step, compares it with one device, and makes it again to find out more. Collective.

    step:          step(model, optimizer, micro_batches): yours, with zero_grad, forward, backward, clip, update. What it
                   returns is the loss as logged, or None.
    micro_batches: of this rank, [micro-batch][sample].
    experiments:   after a failure make it with other batches: without accumulation, and with the same on every rank.
    options:       those of `watch`, `loss` above all.

    Parameters, buffers and the optimizer's state are afterwards what they were before, gradients are None. Errors are
    those of `watch`; and ConfigError: the step gives another gradient when it is made again.
    """
    values = [(tensor, held(tensor)) for tensor in [*model.parameters(), *model.buffers()]]
    state = copy.deepcopy(optimizer.state_dict())

    def restore() -> None:
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        optimizer.load_state_dict(copy.deepcopy(state))

    def made(kind: type[watch], batch: MicroBatches, **more: Any) -> watch:
        try:
            with kind(model, optimizer, micro_batches=batch, **{**options, **more}) as taken:
                loss = step(model, optimizer, batch)
                if loss is not None:
                    taken.log(loss=float(loss))
        finally:
            restore()
        return taken

    try:
        first = made(watch, micro_batches)
        _check_repeatable(first, made(_Again, micro_batches))
        verdict = first.verdict
        assert verdict is not None
        if experiments and not verdict.passed:
            for title, batch in _others(micro_batches, first):
                other = made(watch, batch, report=None, folder=None).verdict
                assert other is not None
                verdict.notes.append(f"{title}: {'PASS' if other.passed else 'FAIL ' + ', '.join(other.findings)}")
    finally:
        optimizer.zero_grad(set_to_none=True)
    return verdict


def _check_repeatable(first: watch, second: watch) -> None:
    """Refuses a step whose gradient is another one the second time, by more than sums in another order make it."""
    worst, where = 0.0, ""
    for name, gradient in (first.recording.gradients or {}).items():
        one, two = (whole(g).double() for g in (gradient, (second.recording.gradients or {})[name]))
        apart = float((one - two).norm() / one.norm().clamp(min=1e-300)) if bool(torch.isfinite(one).all()) else 0.0
        if apart > max(worst, 1e3 * torch.finfo(gradient.dtype).eps):
            worst, where = apart, name
    found = first._exchange((worst, where))
    worst, where = max(found)
    if worst > 0.0:
        refuse("isograd.prove", f"a step that gives another gradient when it is made again: {where} is off by {worst:.1e}",
               "the same step twice", "Start it with zero_grad(), and draw no random numbers in it, or seed them at its "
               "beginning (torch.manual_seed(step))")


def _others(micro_batches: MicroBatches, first: watch) -> list[tuple[str, MicroBatches]]:
    """Batches that tell causes apart; the same number of them on every rank."""
    found: list[tuple[str, MicroBatches]] = []
    if max(first._exchange(len(micro_batches))) > 1:
        found.append(("with one micro-batch a rank", [[sample for micro in micro_batches for sample in micro]]))
    _, size = ranks()
    mine = [sample for micro in micro_batches for sample in micro][:1]
    same = next((some for some in first._exchange(mine) if some), mine)
    if size > 1 and same:
        found.append(("with the same sample on every rank", [same]))
    return found
