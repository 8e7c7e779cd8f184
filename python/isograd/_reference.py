"""The whole step on one process, sample after sample, that a run is compared with. Shares no code with the means.

A loss over the whole batch takes the features of all samples, cut off from the model: its gradient by them is then what each
sample's forward, made once more, is differentiated with. One sample's activations are held at a time, as with any other loss.
"""
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
from ._native.isograd_comm import ConfigError
from ._ranks import copied, dequantised, gradient_of, in_precision, mapped, plain_name, refuse, tensors_in
from ._torch_names import BatchNormOfOneProcess, gives_new_tensors, TorchDispatchMode

# The model and a sample, of the user's own classes.
Loss = Callable[[Any, Any], Union[torch.Tensor, tuple[torch.Tensor, Union[float, torch.Tensor]]]]
Features = Callable[[Any, Any], Any]
Mean = Union[str, float]
Batch = Sequence[Sequence[Sequence[Any]]]  # [place along data][micro-batch] -> samples
Gradients = Mapping[str, torch.Tensor]
LARGEST_SHARES = 1 << 30  # bytes of all micro-batches' gradients; above it only their sum is kept
MOST_DRAWS = 16  # as `isograd verify` makes
FEWEST_DRAWS = 4  # after which a gradient that has moved by no more than smooth ones is a smooth one
SMOOTH = 256.0  # units that a parameter's gradient may be off by where nothing jumps (docs/bounds.md)
SMOOTH_WHOLE = 32.0  # the same of the whole gradient
FLOOR = 32.0  # of a parameter with less gradient than a part of the root mean square of all: of that part
MEANS = ("token", "sample", "weighted", "batch")


@dataclasses.dataclass(frozen=True)
class Term:
    """A further term of the loss, for `terms` of `isograd.watch`: it is added weight times.

    loss, features, mean: as `watch` has them, of this term.
    """

    loss: Loss
    weight: float = 1.0
    features: Features | None = None
    mean: Mean = "token"

    @property
    def whole(self) -> bool:
        """Its loss takes the whole batch at once."""
        return self.features is not None or self.mean == "batch"


@dataclasses.dataclass
class Reference:
    """The step of one process. shares: {(rank, micro-batch): its part of the gradient}, empty where they are too large or
    where the loss takes all samples at once. counts: of the first term's targets, weights or samples."""

    loss: float
    gradients: dict[str, torch.Tensor]
    shares: dict[tuple[int, int], dict[str, torch.Tensor]]
    counts: list[list[float]]
    draws: bool = False  # random numbers in the model's forward, seeded or not
    unseeded: list[str] = dataclasses.field(default_factory=list)  # generators that it draws from with no effect seen

    @property
    def targets(self) -> int | None:
        """How many; None where weights are no whole numbers."""
        whole = sum(sum(counts) for counts in self.counts)
        return int(whole) if all(count == int(count) for counts in self.counts for count in counts) else None

    @property
    def parts(self) -> list[list[int]]:
        """The counts as whole numbers, in their proportions."""
        least = min((count for counts in self.counts for count in counts if count > 0), default=1.0)
        unit = 1.0 if self.targets is not None else 1e6 / least
        return [[round(unit * count) for count in counts] for counts in self.counts]

    @property
    def norm(self) -> float:
        return norm_of(self.gradients)

    def add(self, other: Reference) -> None:
        """A further term's step."""
        self.loss += other.loss
        for name, grad in other.gradients.items():
            self.gradients[name] += grad
        self.shares = {cell: {name: grad + other.shares[cell][name] for name, grad in part.items()}
                       for cell, part in self.shares.items() if cell in other.shares}
        self.draws, self.unseeded = self.draws or other.draws, self.unseeded + other.unseeded


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


def plain_layers(model: nn.Module, values: dict[str, torch.Tensor]) -> nn.Module:
    """`model` with layers that one process can make in fp64: a frozen quantised weight becomes the numbers that it stands for, and
    SyncBatchNorm takes the statistics of what it is given. Adapters on such weights stay as they are.

    values: the run's; of a weight that was sharded its bytes, in place of which the numbers come.
    """
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.SyncBatchNorm):
            module.__class__ = BatchNormOfOneProcess
        for own, weight in list(module.named_parameters(recurse=False)):
            if (numbers := dequantised(weight)) is weight:
                continue
            key = plain_name(f"{name}.{own}")
            if key in values and values[key].shape != numbers.shape:
                if not torch.equal(values[key], weight.detach().as_subclass(torch.Tensor)):
                    refuse("make_model", f"a quantised {key} with other bytes than that of the model that is trained", "the same base",
                           "Load it in make_model as the run does, from the same weights")
                values[key] = numbers
            setattr(module, own, nn.Parameter(numbers.detach(), requires_grad=False))
            if isinstance(module, nn.Linear):
                module.__class__ = nn.Linear  # whose forward takes numbers
    return model


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


def one_process(model: nn.Module, terms: Sequence[Term], batch: Batch, dtype: torch.dtype, autocast: torch.dtype | None = None,
                shares: bool = True, after_each: Callable[[], None] = lambda: None, own: torch.dtype | None = None) -> Reference:
    """The sum of the terms. after_each: called after each sample. The model's gradients are left empty.

    Each sample begins with the same states of all generators, which the caller keeps. own: the precision of the run that the
    step is the reference of: a random loss is refused, for which the first sample is made twice, and the first that draws three times.
    """
    first, *others = terms
    found = _of_term(model.to(dtype), first, batch, dtype, autocast, shares, after_each, own)
    for term in others:
        found.add(_of_term(model, term, batch, dtype, autocast, shares, after_each, own))
    return found


def _of_term(model: nn.Module, term: Term, batch: Batch, dtype: torch.dtype, autocast: torch.dtype | None, shares: bool,
             after_each: Callable[[], None], own: torch.dtype | None) -> Reference:
    named = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    sizes: list[list[float]] = [[len(micro) for micro in micros] for micros in batch]
    draws = _random.Draws()
    unseeded: list[str] = []
    cut = None
    if term.features is not None:
        cut = _CutAtFeatures(model, term.features, Term(term.loss, mean="batch"), batch, dtype, autocast, own, after_each)
        batch, term, unseeded = cut.batch, Term(cut.part, term.weight, mean=1.0), cut.unseeded
    elif term.whole:  # one sample that is all of them
        batch, shares = [[[[sample for micros in batch for micro in micros for sample in micro]]]], False
    cells = [(rank, j) for rank, micros in enumerate(batch) for j in range(len(micros))]
    shares = shares and len(cells) * sum(p.nbytes for p in named.values()) <= LARGEST_SHARES
    parts: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    total: dict[str, torch.Tensor] = {}
    counts: list[list[float]] = [[0] * len(micros) for micros in batch]
    value, with_loss = 0.0, 0

    def made(sample: Any) -> tuple[torch.Tensor, float]:
        losses, count = _losses(model, term, sample, dtype, autocast, own)
        return losses / count if term.mean == "sample" and count else losses, count

    def check(sample: Any, first: _random.Made | None = None, values: list[torch.Tensor] | None = None) -> None:
        if cut is not None:
            cut.checks = False  # it is made from other states
        unseeded.extend(_random.check_repeats(model, lambda: made(sample)[0], dtype, first, values))
        if cut is not None:
            cut.checks = own is not None

    pinned: _random.States = {}
    tried: set[str] = set() if own is not None else {"first", "drawing"}
    for rank, j in cells:
        model.zero_grad(set_to_none=True)
        doubtful: list[Any] = []
        for sample in batch[rank][j]:
            values = None if "first" in tried else [buffer.clone() for buffer in model.buffers()]
            _random.seed(0)
            pinned = pinned or _random.states()
            with draws.of({"": model}):
                part, count = made(sample)
            counts[rank][j] += count
            # A sum may have a gradient where its weight is 0, as anchors of an image without a positive one.
            if count == 0 and not (term.mean == "weighted" and part.requires_grad):
                continue
            with_loss += 1
            try:
                part.backward()
            except Exception as error:
                _failed(error, model, term, sample, dtype, own)
            value += float(part.detach())
            after_each()
            if values is not None:
                tried.add("first")
                after = _random.states()
                drew = _random.moved(pinned, after)
                if drew:
                    tried.add("drawing")
                gradients = {name: p.grad for name, p in named.items() if p.grad is not None}  # of this sample alone
                whole = cut is not None or term.whole  # whose backward is not worth a second one where nothing draws
                known = None if whole and not drew else {name: gradient_of(named[name]).detach() for name in gradients}
                check(sample, _random.Made(part.detach(), known, drew, after), values)
                for name, gradient in gradients.items():
                    named[name].grad = gradient
            elif "drawing" not in tried and _random.moved(pinned, _random.states()):
                tried.add("drawing")
                doubtful.append(sample)
        # Taken, not copied: the next micro-batch's are new ones.
        part_of = {name: gradient_of(p).detach() for name, p in named.items()}
        if cut is not None:
            for name, grad in cut.direct.items():  # to each micro-batch by its samples
                part_of[name] = part_of[name] + grad * (sizes[rank][j] / cut.samples)
        for sample in doubtful:
            check(sample)
        if shares:
            parts[rank, j] = part_of
        if not total:
            total = {name: grad.clone() for name, grad in part_of.items()} if shares else part_of
            continue
        for name, grad in part_of.items():
            total[name] += grad
    total = total or {name: torch.zeros_like(p) for name, p in named.items()}
    by_count = {"token": sum(map(sum, counts)), "weighted": sum(map(sum, counts)), "sample": with_loss, "batch": 1}
    divisor = by_count[term.mean] if isinstance(term.mean, str) else term.mean
    scale = term.weight / divisor if divisor else 0.0
    for some in (total, *parts.values()):
        for grad in some.values():
            grad.mul_(scale)
    model.zero_grad(set_to_none=True)
    return Reference((value if cut is None else cut.value) * scale, total, parts, sizes if cut or term.whole else counts,
                     bool(draws.names), unseeded)


class _CutAtFeatures:
    """A loss over the features of all samples, cut into parts of samples.

    value:  the loss. direct: its gradient by parameters that it takes from the model itself, by name.
    batch:  as it was given, each sample with its features and what the loss changes by them.
    part(): of such a sample what has the same gradient as the loss has through its features.
    """

    def __init__(self, model: nn.Module, features_of: Features, whole: Term, batch: Batch, dtype: torch.dtype,
                 autocast: torch.dtype | None, own: torch.dtype | None, after_each: Callable[[], None]) -> None:
        self._features, self._dtype, self.checks = features_of, dtype, own is not None
        samples = [sample for micros in batch for micro in micros for sample in micro]
        self.samples, self.unseeded = len(samples), list[str]()
        features = []
        for sample in reversed(samples):  # and later the other way round: those that depend on the order are others then
            _random.seed(0)
            features.append(mapped(_called(model, Term(features_of, mean="features"), sample, dtype, autocast, own), _leaf))
            after_each()
        features.reverse()
        model.zero_grad(set_to_none=True)
        _random.seed(0)
        loss, _ = _losses(model, whole, features, dtype, autocast, own)
        try:
            loss.backward()
        except Exception as error:
            _failed(error, model, whole, features, dtype, own)
        self.value = float(loss.detach())
        self.direct = {plain_name(name): p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
        if own is not None:
            self.unseeded = _random.check_repeats(
                model, lambda: _losses(model, whole, mapped(features, _leaf), dtype, autocast, own)[0], dtype)
        left = iter([(sample, [(leaf.detach(), leaf.grad) for leaf in tensors_in(some) if leaf.requires_grad])
                     for sample, some in zip(samples, features)])
        self.batch = [[[next(left) for _ in micro] for micro in micros] for micros in batch]

    def part(self, model: nn.Module, entry: Any) -> tuple[torch.Tensor, int]:
        sample, cut = entry
        found = [tensor for tensor in tensors_in(self._features(model, sample)) if tensor.requires_grad]
        if self.checks and next(model.parameters()).dtype == self._dtype:
            allowed = 1e-10 if self._dtype == torch.float64 else 256 * torch.finfo(self._dtype).eps
            pairs = {str(i): (one, other) for i, (one, (other, _)) in enumerate(zip(found, cut)) if one.shape == other.shape}
            off = _random.apart(*({name: pair[side] for name, pair in pairs.items()} for side in (1, 0)))
            if len(found) != len(cut) or len(pairs) != len(cut) or not all(share <= allowed for share in off.values()):
                refuse("isograd.watch", "features of a sample that are others when samples come in another order, or when they are made "
                       f"again{f' (off by {max(off.values()):.1e} of their norm)' if off else ''}",
                       "features(model, sample) that depend on the sample and the parameters alone",
                       "Take out what is kept from one call to the next (a queue, an average, a counter, an iterator) or put it "
                       "into the sample; draw no random numbers, or seed them with the sample")
        parts = [(tensor * slope).sum() for tensor, (_, slope) in zip(found, cut) if slope is not None]
        return (torch.stack(parts).sum(), 1) if parts else (torch.zeros(()), 0)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _called(model: nn.Module, term: Term, sample: Any, dtype: torch.dtype, autocast: torch.dtype | None, own: torch.dtype | None) -> Any:
    """What the term's function gives of a sample, or of the whole batch."""
    try:
        with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
            return term.loss(model, in_precision(sample, dtype))
    except Exception as error:
        _failed(error, model, term, sample, dtype, own)


def _losses(model: nn.Module, term: Term, sample: Any, dtype: torch.dtype, autocast: torch.dtype | None,
            own: torch.dtype | None) -> tuple[torch.Tensor, float]:
    """The sum of a sample's losses, and over how many targets, or of what weight; of the whole batch its loss and 1."""
    found = _called(model, term, sample, dtype, autocast, own)
    weighted, whole = term.mean == "weighted", term.mean == "batch"
    value, count = found if isinstance(found, tuple) and not whole else (found, 1) if whole or weighted else (
        found, found.numel() if isinstance(found, torch.Tensor) else None)
    if isinstance(count, torch.Tensor) and weighted and count.numel() == 1:
        if count.requires_grad:
            refuse("isograd.watch", "a weight that parameters have a part in", "one that is not differentiated",
                   'detach() it, or give the loss of the whole batch: features= or mean="batch"')
        count = float(count)
    if isinstance(value, torch.Tensor) and dtype == torch.float64 and value.dtype != torch.float64:
        if value.requires_grad:
            value.sum().backward()  # that of the trained model's parameters is refused there
        refuse("isograd.watch", f"a loss in {value.dtype} of a model in fp64", "the whole step in fp64, for the reference",
               "Take out the conversion (.float(), torch.float32) on the way, or give reference=torch.float32")
    if whole and not (isinstance(value, torch.Tensor) and value.numel() == 1):
        refuse("isograd.watch", f"the loss of the whole batch as {_described(value)}", "a single number, divided as the step divides it",
               "Return the mean or the sum that the step differentiates")
    if weighted and not isinstance(found, tuple):
        refuse("isograd.watch", f"the loss of a sample as {_described(found)}, without a weight", "the sum of its weighted losses, and "
               "the sum of its weights", "Return ((weights * losses).sum(), weights.sum())")
    if not isinstance(value, torch.Tensor) or not (isinstance(count, (int, float) if weighted else int) and 0 <= count < math.inf):
        refuse("isograd.watch", f"the loss of a sample as {type(value).__name__} and a count {count!r}",
               "its losses, one for each target; or their sum and how many there are",
               'Take reduction="none" at the valid targets; mean="weighted" where the count is a sum of weights')
    if not isinstance(found, tuple) and value.dim() == 0 and not whole:
        refuse("isograd.watch", "the loss of a sample as one number, which may be a mean: divided already",
               "its losses, one for each target; or their sum and how many there are",
               'Take reduction="none" at the valid targets, or return (losses.sum(), n); mean="batch" where `loss` takes all samples')
    if isinstance(found, tuple) and value.numel() != 1:
        refuse("isograd.watch", f"a sum of losses of shape {tuple(value.shape)}", "a single number", "Return (losses.sum(), n)")
    if count and not value.requires_grad:
        refuse("isograd.watch", "a loss that no parameter has a part in", "one to differentiate",
               "Compute it from the model that `loss` is given, without no_grad")
    return value.sum(), count


def _described(value: Any) -> str:
    return f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def _failed(error: Exception, model: nn.Module, term: Term, sample: Any, dtype: torch.dtype, own: torch.dtype | None) -> NoReturn:
    """Says what `loss` or its derivative raised; that fp64 is the cause where the sample can be made in the run's precision."""
    if isinstance(error, ConfigError):
        raise error
    whole = term.mean == "batch"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        refuse("isograd.watch", f"a {'loss of the whole batch that' if whole else 'sample whose forward'} does not fit in one process with "
               f"the model: {error}", f"memory for {'all samples at once' if whole else 'one sample at a time'}",
               "Give features=, so that the model sees one sample at a time; if it is given compute the loss in blocks "
               "(torch.utils.checkpoint); or watch a step of fewer samples" if whole else
               "Watch shorter samples, or checkpoint activations in the model", error)
    said = f"{type(error).__name__}: {error}"
    if dtype == torch.float64 and own not in (None, dtype):
        runs = False
        try:
            found = term.loss(model.to(own), in_precision(sample, own))
            sum(one.sum() for one in tensors_in(found) if one.requires_grad).backward()
            runs = True
        except ConfigError:
            raise
        except Exception:
            pass
        if runs:
            refuse("isograd.watch", f"a model or loss that does not run in fp64: {said}", "the whole step in fp64, for the reference",
                   'Give a make_model that makes experts one by one (of transformers: experts_implementation="eager"); the run keeps its '
                   "grouped products" if "grouped" in said or "mat_a" in said else "Convert to the dtype of the parameters where it converts to fp32, or "
                   "give reference=torch.float32", error)
    expected = {"batch": "a single number", "features": "what the loss takes of it"}.get(str(term.mean), "its losses, one for each target")
    refuse("isograd.watch", f"an exception in the {'features' if term.mean == 'features' else 'loss'} of "
           f"{'the whole batch' if whole else 'a sample'}: {said}", expected,
           "Look at its traceback (above, on rank 0): `loss` is called there alone, with a plain copy of the model and each "
           "sample, on the CPU", error)


# A loss whose derivative jumps (ReLU, max, abs) turns units on and off by rounding, each by a whole step; and a badly conditioned
# number (a sigmoid of a difference of large sums) may multiply all of a gradient. One process in the run's precision is then one
# draw of many, and further from fp64 than any sum rounds. Two things are measured, on one process, from parameters that are moved
# by what rounding is worth:
#   moves:    how far the gradient in fp64 goes there; where nothing jumps, with each operation's result rounded at random to the
#             run's precision. Rounding within a sum of n terms is that of its weights, each by about sqrt(n) u of itself (Higham and Mary, A new
#             approach to probabilistic rounding error analysis, 2019); sums are kept in fp32, and a weight is rounded once in the
#             run's precision. No run in that precision knows these numbers more exactly, so that none can be held to less; the run
#             is one more draw, of which four times the most is allowed, as of rounding.
#   rounding: how far one process in that precision is from fp64 there: the largest of several draws.
# Both for each parameter, as a norm, and for the scale of the whole.
def distances(one: Gradients, other: Gradients) -> dict[str, float]:
    """The norm of each parameter's difference, in fp64."""
    return {name: float((g.double() - other[name].double()).norm()) for name, g in one.items()}


def norm_of(gradients: Gradients) -> float:
    return math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))


def scale_apart(one: Gradients, other: Gradients) -> float:
    """How far one is from `other` along it: |<one, other> / <other, other> - 1|."""
    along = sum(float(((one[name].double() - g.double()) * g.double()).sum()) for name, g in other.items())
    return abs(along) / max(norm_of(other)**2, 1e-300)


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


class _RoundedAtRandom(TorchDispatchMode):
    """Each operation's result in fp64 becomes one of the two numbers of `precision` next to it, the nearer one more often, so that
    its mean is right (Parker, Monte Carlo Arithmetic, UCLA CSD-970002, 1997). Numbers of that type, as small whole ones, stay."""

    def __init__(self, precision: torch.dtype, draw: int) -> None:
        super().__init__()
        self._random = torch.Generator().manual_seed(draw)
        self._dropped = 52 + round(math.log2(torch.finfo(precision).eps))  # of the bits of fp64

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        found = function(*arguments, **(named or {}))
        return mapped(found, self._rounded) if gives_new_tensors(function) else found

    def _rounded(self, value: torch.Tensor) -> torch.Tensor:
        if value.dtype != torch.float64 or value.device.type != "cpu" or value.layout != torch.strided:
            return value
        more = torch.empty(value.shape, dtype=torch.int32).random_(generator=self._random).long()  # 31 bits
        more <<= max(0, self._dropped - 31)
        more >>= max(0, 31 - self._dropped)
        more += value.view(torch.int64)
        more &= -(1 << self._dropped)
        return more.view(torch.float64)


def measure_rounding(model: nn.Module, step: Callable[[nn.Module, torch.dtype], Gradients], precision: torch.dtype, found: Gradients,
                     right: Gradients) -> tuple[dict[str, Any], dict[str, Any]] | None:
    """Fields of dumps (docs/dump.md): (moves and scale_moves of the reference, rounding and scale_rounding of one process), from as
    many draws as it takes to cover `found`, at most MOST_DRAWS; None: these are as of any loss, and change no bound.

    found, right: the run's gradient and that of one process in fp64.
    """
    unit = torch.finfo(precision).eps / 2
    off, scale_off = distances(right, found), scale_apart(found, right)  # in the reference's order, as what is returned is taken
    if not all(map(math.isfinite, off.values())):
        return None  # no jump of a derivative does that
    floor = norm_of(right) / math.sqrt(max(1, sum(g.numel() for g in right.values()))) / FLOOR
    smooth = {name: SMOOTH * unit * max(float(g.double().norm()), floor * g.numel()**0.5) for name, g in right.items()}
    smooth_whole = SMOOTH_WHOLE * unit * norm_of(right)
    moves, rounding, scale_moves, scale_rounding = dict.fromkeys(off, 0.0), dict.fromkeys(off, 0.0), 0.0, 0.0
    jumps, ordinary = False, False
    for draw in range(MOST_DRAWS):
        there = nudged(model, draw, unit)
        exact = {name: g.clone() for name, g in step(there, torch.float64).items()}
        away, moved = exact, distances(exact, right)
        jumps = jumps or any(moved[name] > smooth[name] for name in off)
        if not jumps:  # else that is by far more
            with contextlib.suppress(ConfigError), _RoundedAtRandom(precision, draw):  # an operation may refuse to be looked into
                away = {name: g.clone() for name, g in step(there, torch.float64).items()}
            moved = distances(away, right)
        one = step(there, precision)
        rounded = distances(one, exact)
        if not all(map(math.isfinite, [*moved.values(), *rounded.values()])):
            return None  # and this bounds nothing
        for name in off:
            moves[name], rounding[name] = max(moves[name], moved[name]), max(rounding[name], rounded[name])
        scale_moves, scale_rounding = max(scale_moves, scale_apart(away, right)), max(scale_rounding, scale_apart(one, exact))
        whole, scale = min(math.hypot(*moves.values()), math.hypot(*rounding.values())), min(scale_moves, scale_rounding)
        jumps = any(moves[name] > smooth[name] for name in off)
        ordinary = not jumps and 4 * whole <= smooth_whole and scale <= unit
        if (all(off[name] <= max(smooth[name], 4 * min(moves[name], rounding[name])) for name in off)
                and math.hypot(*off.values()) <= max(smooth_whole, 4 * whole)
                and scale_off <= (4 if jumps else 2) * max(unit, scale)):  # of 4, for another fit measures what is allowed
            break
        # Without jumps a further draw is not several times larger.
        if draw + 1 >= FEWEST_DRAWS and (ordinary or not jumps and scale_off > 16 * max(unit, scale)):
            break
    if ordinary:
        return None
    return ({"moves": list(moves.values()), "scale_moves": scale_moves},
            {"rounding": list(rounding.values()), "scale_rounding": scale_rounding})
