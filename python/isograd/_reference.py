"""The whole step on one process, sample after sample, that a run is compared with. Shares no code with the means."""
from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import pathlib
import socket
import time
from typing import Any, Callable, Iterator, Mapping, NoReturn, Sequence, Union

import torch
from torch import nn

from . import _random
from ._ranks import copied, gradient_of, in_precision, plain_name, refuse

Loss = Callable[[Any, Any], Union[torch.Tensor, tuple[torch.Tensor, int]]]  # the model and a sample, of the user's own classes
Mean = Union[str, float]
Gradients = Mapping[str, torch.Tensor]
LARGEST_SHARES = 1 << 30  # bytes of all micro-batches' gradients; above it only their sum is kept
MOST_DRAWS = 16  # as `isograd verify` makes
FEWEST_DRAWS = 4  # after which a gradient that has moved by no more than smooth ones is a smooth one
SMOOTH = 256.0  # units that a parameter's gradient may be off by where nothing jumps (docs/verify.md)


@dataclasses.dataclass
class Reference:
    """The step of one process. shares: {(rank, micro-batch): its part of the gradient}, empty where they are too large."""

    loss: float
    gradients: dict[str, torch.Tensor]
    shares: dict[tuple[int, int], dict[str, torch.Tensor]]
    counts: list[list[int]]
    draws: bool = False  # random numbers in the model's forward, seeded or not
    unseeded: list[str] = dataclasses.field(default_factory=list)  # generators that it draws from with no effect seen

    @property
    def targets(self) -> int:
        return sum(sum(counts) for counts in self.counts)

    @property
    def norm(self) -> float:
        return sum(float(g.double().square().sum()) for g in self.gradients.values()) ** 0.5


# Memory and processors.
def available() -> int | None:
    """Free bytes of memory; None where the system does not say."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def fits_in_memory(free: int | None, needed: int, what: str, action: str) -> None:
    """Refuses what rank 0 cannot hold."""
    if free is not None and needed > free:
        refuse("isograd.watch", f"{what} needs {needed / 2**30:.3g} GiB", f"no more than the {free / 2**30:.3g} GiB that are free", action)


def place() -> tuple[str, int]:
    """This rank's host, and its threads."""
    return socket.gethostname(), torch.get_num_threads()


def idle_threads(places: Sequence[tuple[str, int]]) -> int:
    """The threads of all ranks of this host, which wait for this one; at most as many as it has processors."""
    here, own = place()
    return max(own, min(sum(count for host, count in places if host == here), len(os.sched_getaffinity(0))))


@contextlib.contextmanager
def threads(number: int) -> Iterator[Callable[[], None]]:
    """PyTorch works with `number` threads, then with as many as before: at once if the function that is yielded, called now
    and then, finds that they get less than three quarters of their processors. Where other processes compute, threads that
    meet at each product are several times slower than one."""
    before = torch.get_num_threads()
    since: list[tuple[float, float]] = []  # the first call: before it one thread works (a model is copied)

    def look() -> None:
        now, used = time.perf_counter(), time.process_time()
        if not since:
            since.append((now, used))
        wall = now - since[0][0]
        if number > before and wall > 0.2 and used - since[0][1] < 0.75 * number * wall:
            torch.set_num_threads(before)

    torch.set_num_threads(number)
    try:
        yield look
    finally:
        torch.set_num_threads(before)


def fill(model: nn.Module, values: Mapping[str, torch.Tensor], trained: Sequence[str]) -> nn.Module:
    """`model` with the run's parameters and buffers. ConfigError: it has others."""
    own = {plain_name(name): p for name, p in model.named_parameters()}
    known = dict(own)
    known.update((plain_name(name), buffer) for name, buffer in model.named_buffers())
    if missing := sorted(set(own) ^ {name for name in values if name in own or name not in known}):
        refuse("make_model", f"a model that does not share {', '.join(missing[:5])} with the one that is trained",
               "the same names", "Return the model as it is before it is wrapped, cut or compiled")
    with torch.no_grad():
        for name, value in values.items():
            if known[name].shape != value.shape:
                refuse("make_model", f"{name} of shape {tuple(known[name].shape)}", f"{tuple(value.shape)}, as it is trained",
                       "Return the model as it is before it is wrapped or cut")
            known[name].copy_(value)
    for name, parameter in own.items():
        parameter.requires_grad_(name in set(trained))
    return model


def one_process(model: nn.Module, loss: Loss, batch: Sequence[Sequence[Sequence[Any]]], mean: Mean,
                dtype: torch.dtype, autocast: torch.dtype | None = None, shares: bool = True,
                after_each: Callable[[], None] = lambda: None, own: torch.dtype | None = None) -> Reference:
    """`batch`: [rank][micro-batch] -> samples; after_each: called after each. The model's gradients are left empty.

    Each sample begins with the same states of all generators, which the caller keeps. own: the precision of the run that the
    step is the reference of: a random loss is refused, for which the first sample is made twice, and the first that draws.
    """
    model = model.to(dtype)
    named = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    cells = [(rank, j) for rank, micros in enumerate(batch) for j in range(len(micros))]
    shares = shares and len(cells) * sum(p.nbytes for p in named.values()) <= LARGEST_SHARES
    parts: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    total: dict[str, torch.Tensor] = {}
    counts = [[0] * len(micros) for micros in batch]
    value, with_loss = 0.0, 0

    def made(sample: Any) -> tuple[torch.Tensor, int]:
        losses, count = _losses(model, loss, sample, dtype, autocast, own)
        return losses / count if mean == "sample" and count else losses, count

    unseeded: list[str] = []
    pinned: _random.States = {}
    tried: set[str] = set()  # "first", "drawing"
    draws = _random.Draws()
    for rank, j in cells:
        model.zero_grad(set_to_none=True)
        doubtful: list[Any] = []
        for sample in batch[rank][j]:
            _random.seed(0)
            pinned = pinned or _random.states()
            with draws.of({"": model}):
                part, count = made(sample)
            counts[rank][j] += count
            if count == 0:
                continue
            with_loss += 1
            try:
                part.backward()
            except Exception as error:
                _failed(error, model, loss, sample, dtype, own)
            value += float(part.detach())
            after_each()
            drawing = {"drawing"} if _random.moved(pinned, _random.states()) else set()
            if own is not None and not {"first"} | drawing <= tried:
                tried |= {"first"} | drawing
                doubtful.append(sample)
        # Taken, not copied: the next micro-batch's are new ones.
        part_of = {name: gradient_of(p).detach() for name, p in named.items()}
        for sample in doubtful:
            unseeded += _random.check_repeats(model, lambda: made(sample)[0], dtype)  # noqa: B023  called at once
        if shares:
            parts[rank, j] = part_of
        if not total:
            total = {name: grad.clone() for name, grad in part_of.items()} if shares else part_of
            continue
        for name, grad in part_of.items():
            total[name] += grad
    total = total or {name: torch.zeros_like(p) for name, p in named.items()}
    divisor = {"token": sum(map(sum, counts)), "sample": with_loss}.get(str(mean)) if isinstance(mean, str) else mean
    scale = 1.0 / divisor if divisor else 0.0
    for some in (total, *parts.values()):
        for grad in some.values():
            grad.mul_(scale)
    model.zero_grad(set_to_none=True)
    return Reference(value * scale, total, parts, counts, bool(draws.names), unseeded)


def _losses(model: nn.Module, loss: Loss, sample: Any, dtype: torch.dtype, autocast: torch.dtype | None,
            own: torch.dtype | None) -> tuple[torch.Tensor, int]:
    """The sum of a sample's losses, and over how many targets."""
    try:
        with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
            found = loss(model, in_precision(sample, dtype))
    except Exception as error:
        _failed(error, model, loss, sample, dtype, own)
    value, count = found if isinstance(found, tuple) else (found, found.numel())
    if isinstance(value, torch.Tensor) and dtype == torch.float64 and value.dtype != torch.float64:
        refuse("isograd.watch", f"a loss in {value.dtype} of a model in fp64", "the whole step in fp64, for the reference",
               "Take out the conversion (.float(), torch.float32) on the way, or give reference=torch.float32")
    if not isinstance(value, torch.Tensor) or not isinstance(count, int) or count < 0:
        refuse("isograd.watch", f"the loss of a sample as {type(value).__name__} and a count {count!r}",
               "its losses, one for each target; or their sum and how many there are",
               'Take reduction="none" at the valid targets')
    if not isinstance(found, tuple) and value.dim() == 0:
        refuse("isograd.watch", "the loss of a sample as one number, which may be a mean: divided already",
               "its losses, one for each target; or their sum and how many there are",
               'Take reduction="none" at the valid targets, or return (losses.sum(), n)')
    if isinstance(found, tuple) and value.numel() != 1:
        refuse("isograd.watch", f"a sum of losses of shape {tuple(value.shape)}", "a single number", "Return (losses.sum(), n)")
    if count and not value.requires_grad:
        refuse("isograd.watch", "a loss that no parameter has a part in", "one to differentiate",
               "Compute it from the model that `loss` is given, without no_grad")
    return value.sum(), count


def _failed(error: Exception, model: nn.Module, loss: Loss, sample: Any, dtype: torch.dtype, own: torch.dtype | None) -> NoReturn:
    """Says what `loss` or its derivative raised; that fp64 is the cause where the sample can be made in the run's precision."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        refuse("isograd.watch", f"a sample whose forward does not fit in one process with the model: {error}",
               "memory for one sample at a time", "Watch shorter samples, or checkpoint activations in the model", error)
    said = f"{type(error).__name__}: {error}"
    if dtype == torch.float64 and own not in (None, dtype):
        runs = False
        with contextlib.suppress(Exception):
            found = loss(model.to(own), in_precision(sample, own))
            (found[0] if isinstance(found, tuple) else found.sum()).backward()
            runs = True
        if runs:
            refuse("isograd.watch", f"a model or loss that does not run in fp64: {said}",
                   "the whole step in fp64, for the reference", "Convert "
                   "to the dtype of the parameters where it converts to fp32, or give reference=torch.float32", error)
    refuse("isograd.watch", f"an exception in the loss of a sample: {said}", "its losses, one for each target",
           "Look at its traceback (above, on rank 0): `loss` is called there alone, with a plain copy of the model and each "
           "sample, on the CPU", error)


# A loss whose derivative jumps (ReLU, max, abs) turns units on and off by rounding, each by a whole step. One process in the
# run's precision is then one draw of many, and further from fp64 than any sum rounds. Two things are measured, on one process,
# from parameters that are moved by what rounding is worth:
#   moves:    how far the gradient in fp64 goes. Rounding of a sum of n terms is that of its weights, each by about sqrt(n) u of
#             itself (Higham and Mary, A new approach to probabilistic rounding error analysis, 2019); sums are kept in fp32, and
#             a weight is rounded once in the run's precision. No run in that precision knows the parameters more exactly, so that
#             none can be held to less; the run is one more draw, of which four times the most is allowed, as of rounding.
#   rounding: how far one process in that precision is from fp64 there: the largest of several draws.
def distances(one: Gradients, other: Gradients) -> dict[str, float]:
    """The norm of each parameter's difference, in fp64."""
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


def measure_jumps(model: nn.Module, step: Callable[[nn.Module, torch.dtype], Gradients], precision: torch.dtype, found: Gradients,
            right: Gradients) -> tuple[list[float], list[float]] | None:
    """(moves, rounding) by parameter, from as many draws as it takes to cover `found`, at most MOST_DRAWS; None: no jump.

    found, right: the run's gradient and that of one process in fp64.
    """
    unit = torch.finfo(precision).eps / 2
    off = distances(right, found)  # in the reference's order, by which the comparison takes what is returned
    if not all(map(math.isfinite, off.values())):
        return None  # no jump of a derivative does that
    smooth = {name: SMOOTH * unit * float(g.double().norm()) for name, g in right.items()}
    moves, rounding = dict.fromkeys(off, 0.0), dict.fromkeys(off, 0.0)
    for draw in range(MOST_DRAWS):
        there = nudged(model, draw, unit)
        exact = {name: g.clone() for name, g in step(there, torch.float64).items()}
        moved, rounded = distances(exact, right), distances(step(there, precision), exact)
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
