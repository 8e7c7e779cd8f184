"""isograd.prove: a step that can be repeated, so that what its verdict leaves open is tried."""
from __future__ import annotations

import copy
import pickle
from typing import Any, Callable, Sequence, Union

import torch
from torch import nn

from . import _random
from ._groups import gather_bytes, gather_objects, refuse
from ._tensors import held, like, on_cpu, whole
from .watching import Verdict, place_along, watch

MicroBatches = Sequence[Sequence[Any]]
Step = Callable[[nn.Module, torch.optim.Optimizer, MicroBatches], Union[float, torch.Tensor, None]]


def prove(step: Step, model: nn.Module, optimizer: torch.optim.Optimizer, *, micro_batches: MicroBatches,
          experiments: bool = True, empty: Any = None, **options: Any) -> Verdict:
    """Makes the step and compares it with one device; after a failure makes it again to find out more. Collective.

    step:          step(model, optimizer, micro_batches): yours, with zero_grad, forward, backward, clip, update. What it
                   returns is the loss as logged, or None.
    micro_batches: of this rank, [micro-batch][sample].
    experiments:   after a failure make it with other batches too: without accumulation, and with the same on every
                   rank. What they show is in the verdict's notes.
    empty:         a sample without targets: then also with that alone on the last rank.
    options:       those of `watch`, `loss` above all.

    Parameters, buffers, the optimizer's state and the states of all generators of random numbers are afterwards what they
    were before, gradients are None. Errors are those of `watch`; and ConfigError: the step fails and gives another gradient
    when it is made again.
    """
    values = [(tensor, held(tensor)) for tensor in [*model.parameters(), *model.buffers()]]
    state = copy.deepcopy(optimizer.state_dict())

    def restore() -> None:
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        optimizer.load_state_dict(copy.deepcopy(state))

    def made(batch: MicroBatches, compares: bool = True, **more: Any) -> watch:
        try:
            opened = watch(model, optimizer, micro_batches=batch, **{**options, **more})
            opened.compares = compares
            with opened as taken:
                loss = step(model, optimizer, batch)
                if loss is not None:
                    taken.log(loss=float(loss))
        finally:
            restore()
        return taken

    with _random.kept():
        try:
            first = made(micro_batches)
            verdict = first.verdict
            assert verdict is not None
            if not _right(verdict):
                _check_repeatable(first, made(micro_batches, compares=False))
            for title, batch, more in _others(micro_batches, first, empty) if experiments and not _right(verdict) else ():
                try:
                    other = made(batch, report=None, folder=None, **more).verdict
                except Exception as error:  # on some ranks PeerError: they leave it together
                    verdict.notes.append(f"{title}: not to be made: {type(error).__name__}: {error}")
                    break
                assert other is not None
                verdict.notes.append(f"{title}: {'PASS' if _right(other) else 'FAIL ' + ', '.join(other.findings)}")
        finally:
            optimizer.zero_grad(set_to_none=True)
    return verdict


def _right(verdict: Verdict) -> bool:
    """Nothing is known to be wrong, though something may not be proven: ranks have the same samples, by choice here, or
    rounding hides too much."""
    return verdict.passed or verdict.findings in (["reduction_not_proven"], ["unresolved"])


def _check_repeatable(first: watch, second: watch) -> None:
    """Refuses a step whose gradient is another one the second time, by more than sums in another order make it."""
    worst, where = 0.0, ""
    ones, others = ({name: whole(g) for name, g in (one.recording.gradients or {}).items()} for one in (first, second))
    for name, share in _random.apart(ones, others).items():
        if not share <= max(worst, min(0.1, 1e3 * torch.finfo(ones[name].dtype).eps)):
            worst, where = share, name
    found = gather_objects((worst, where))
    worst, where = max(found)
    if worst > 0.0:
        refuse("isograd.prove", f"a step that gives another gradient when it is made again: {where} is off by {worst:.1e}",
               "the same step twice", "Start it with zero_grad(), and draw no random numbers in it, or seed them at its "
               "beginning (torch.manual_seed(step))")


def _others(micro_batches: MicroBatches, first: watch, empty: Any) -> list[tuple[str, MicroBatches, dict[str, Any]]]:
    """Batches that distinguish causes, each with options of `watch`; as many of them on every rank."""
    found: list[tuple[str, MicroBatches, dict[str, Any]]] = []
    everything = [sample for micro in micro_batches for sample in micro]
    if max(gather_objects(len(micro_batches))) > 1:
        found.append(("with one micro-batch a rank", [everything], {}))
    if first.size == 1:
        return found
    own = bytearray(pickle.dumps([on_cpu(sample) for sample in everything[:1]]))  # as samples travel in `watch`
    same: list[Any] = next((some for some in map(pickle.loads, gather_bytes(own)) if some), [])
    if same:  # here each copy counts, whatever its id
        found.append(("with the same sample on every rank", [[like(same[0], everything)]], {"ids": None}))
    if empty is not None:
        places = gather_objects(place_along(first.data, first.rank))
        emptied = places[first.rank] == max(places)
        found.append(("with the last rank emptied", [[empty]] if emptied else [everything], {}))
    return found
