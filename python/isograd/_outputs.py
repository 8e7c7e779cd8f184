"""The place of a mistake that has no other name, by the outputs of the model: the rows (last dimension) of its outermost forwards and the
gradient that arrives at each, those of the run and those of the declared loss on one process. Rows of one value are one row, in whatever
batch they are, so that padding, packing and sharding do not matter. src/verify/README.md says what is concluded from them."""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
from torch import nn

from . import _random
from ._hypotheses import dot, EXACT, FACTOR, Trials
from ._ranks import plain, plain_name
from ._recording import Finding, replace
from ._reference import _CutAtFeatures, _losses, Features, Gradients, norm_of, Term
from ._torch_names import in_backward, RUNS_BACKWARD, writes_to

LARGEST = 1 << 28  # bytes of a rank's outputs and their gradients; of more nothing is kept
MOST_ROWS = 8192  # of run and reference together
DIRECTIONS = 48  # on which longer rows are projected, to find equal ones
NOTHING, CLEAR = 1e-6, 1e-4  # of the largest gradient of a row: below one there is none, and above the other there is one
CLEARLY = 0.02  # by which a temperature or a smoothing is another one
COARSEST = 1e-7  # round-off of a run whose rows can be told apart by their values
FEATURES = "features="  # in place of a module's name
Sent = Sequence[tuple[str, str, torch.Tensor, torch.Tensor]]  # module, where in what it gives, values, gradients


@dataclasses.dataclass(frozen=True)
class Allowed:
    """Bounds of rounding, relative to a row's norm. same: of a row. alike: of its gradient, and a hundredth of it relative to the largest
    gradient. far: a row that is off by more is another one (TF32 rounds to 5e-4)."""

    same: float
    alike: float
    far: float


def _allowed(unit: float) -> Allowed:
    return Allowed(1e-9, 1e-7, 1e-6) if unit < 1e-12 else Allowed(2e-5, 1e-3, 5e-3)


@dataclasses.dataclass
class Output:
    """A tensor that a forward gave, or features=. call: the number of the forward. place: that of the sample whose loss it is for. live: with
    its graph. inner: another forward for the sample was given it, or what is made of it. checksum: of the value when it was given. unclear:
    the gradient is not that of one backward into `.grad`."""

    module: str
    path: str
    call: int
    place: int
    value: torch.Tensor
    version: int
    checksum: torch.Tensor
    live: torch.Tensor | None
    term: int = 0
    inner: bool = False
    gradient: torch.Tensor | None = None
    unclear: bool = False
    hook: Any = None

    @property
    def key(self) -> tuple[str, str]:
        return self.module, self.path


def _tensors(value: Any, path: str = "") -> Iterator[tuple[str, torch.Tensor]]:
    """Yields the tensors in lists, tuples, dictionaries and dataclasses with their paths. Caches and other objects are not searched."""
    if isinstance(value, torch.Tensor):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)):
        for key, one in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _tensors(one, f"{path}[{key!r}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for field in dataclasses.fields(value):
            yield from _tensors(getattr(value, field.name), f"{path}[{field.name!r}]")


def _checksum(value: torch.Tensor) -> torch.Tensor:
    """[] int64, of the bits; on the device of the value, so that nothing waits for it. A kernel, and what goes through `.data`, may write
    to a tensor without a trace."""
    return value.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[value.itemsize]).sum()


class Outputs:
    """Keeps references to what outermost forwards give, and to the gradients that arrive there. No copies, no communication."""

    def __init__(self, most: int = LARGEST, live: bool = False) -> None:
        self.kept: list[Output] = []
        self.place, self._calls = -1, 0
        self.whole = True  # nothing is missing
        self._left, self._live, self._asked, self._inside = most, live, False, list[nn.Module]()

    @contextlib.contextmanager
    def of(self, model: nn.Module) -> Iterator[None]:
        names = dict.fromkeys(model.modules(), "") | {module: plain_name(name) for name, module in plain(model).named_modules()}
        with contextlib.ExitStack() as undo:
            replace(undo, torch.autograd, RUNS_BACKWARD, self._backward)
            for module, name in names.items():
                undo.callback(module.register_forward_pre_hook(self._begins, prepend=True).remove)
                undo.callback(module.register_forward_hook(functools.partial(self._ended, name), always_call=True).remove)
            yield
        self._inside.clear()

    def _begins(self, module: nn.Module, *_: Any) -> None:
        if not torch.compiler.is_compiling() and not self._inside and torch.is_grad_enabled() and not in_backward():
            self._inside.append(module)  # checkpoints make forwards again in the backward

    def _ended(self, name: str, module: nn.Module, _: Any, found: Any) -> None:
        if not torch.compiler.is_compiling() and self._inside and self._inside[0] is module:
            self._inside.clear()
            self.keep(name, found)

    def _backward(self, original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """One that does not add to `.grad` (torch.autograd.grad, for a penalty or an adversary) is no part of the gradient, or a part of it
        that is not known here."""
        before, self._asked = self._asked, self._asked or not named.get("accumulate_grad", True)
        try:
            return original(*arguments, **named)
        finally:
            self._asked = before

    def keep(self, name: str, found: Any) -> None:
        """Never raises: it runs in the step of the user, whose forward may give anything."""
        try:
            self._keep(name, found)
        except Exception:
            self.whole = False
        if not self.whole:
            self.drop()

    def _keep(self, name: str, found: Any) -> None:
        some = [(path, one) for path, one in _tensors(found) if one.requires_grad and one.numel()]
        if any(one.dim() for _, one in some):  # a number next to other outputs is a loss or a scale
            some = [(path, one) for path, one in some if one.dim()]
        self._calls += 1
        for path, one in some:
            self._left -= 2 * one.nbytes
            self.whole = self.whole and self._left >= 0 and type(one) is torch.Tensor and one.dtype in (torch.float32, torch.float64)
            if not self.whole:
                return
            value = one.detach()
            output = Output(name, path, self._calls, self.place, value, writes_to(one), _checksum(value), one if self._live else None)
            output.hook = one.register_hook(functools.partial(self._arrives, output))
            self.kept.append(output)

    def _arrives(self, output: Output, gradient: torch.Tensor | None) -> None:
        if gradient is None:  # what makes a gradient of zeros, as a conversion of types, may pass on none
            return
        output.unclear = output.unclear or self._asked or output.gradient is not None  # it is called once in a backward
        output.gradient = gradient.detach()

    def drop(self) -> None:
        """Lets go of tensors, and takes the hooks off them."""
        for one in self.kept:
            one.hook.remove()
        self.kept.clear()

    def sent(self) -> Sent | None:
        """On the CPU; None where something is missing, was changed in place, or has a gradient that is not clear. Never raises."""
        with contextlib.suppress(Exception):  # such as no memory
            if self.whole and not any(one.unclear or writes_to(one.value) != one.version or bool(_checksum(one.value) != one.checksum)
                                      for one in self.kept):
                return [(one.module, one.path, one.value.cpu(), torch.zeros_like(one.value, device="cpu") if one.gradient is None else
                         one.gradient.cpu()) for one in self.kept]
        return None


def size_of_sent(sent: Sent) -> tuple[int, int]:
    """Rows (of a vector one) and bytes."""
    return (sum(value.numel() // (value.shape[-1] if value.dim() else 1) for *_, value, _ in sent),
            sum(value.nbytes + gradient.nbytes for *_, value, gradient in sent))


def _instead(gradient: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    return gradient


# The outputs for the declared loss, and what the model makes of a gradient that arrives at them.
def _forwards(trials: Trials, model: nn.Module) -> Iterator[tuple[int, float, list[Output], torch.Tensor | None]]:
    """Yields for each term and sample: the term's number, the count, the outputs with their graph, and the loss to differentiate, None where
    one_process differentiates none."""
    dtype = next(model.parameters()).dtype
    for number, term in enumerate(trials.terms):
        outputs = Outputs(1 << 30, live=True)
        entries: list[Any] = [sample for _, sample in trials.placed()]
        if term.features is not None:
            def features(model: nn.Module, sample: Any, declared: Features = term.features) -> Any:
                found = declared(model, sample)
                outputs.keep(FEATURES, found)  # noqa: B023
                return found

            cut = _CutAtFeatures(model, features, Term(term.loss, mean="batch"), trials.batch, dtype, None, None, lambda: None)
            entries, term = [one for micros in cut.batch for micro in micros for one in micro], Term(cut.part, mean=1.0)
        elif term.whole:
            entries = [entries]
        for place, entry in enumerate(entries):
            outputs.kept, outputs.place = [], -1 if term.mean == "batch" else place
            _random.seed(0)
            with outputs.of(model):
                loss, count = _losses(model, term, entry, dtype, None, None)
            if not outputs.whole:
                raise MemoryError("outputs of the declared loss that are not kept")
            counts = count or term.mean == "weighted" and loss.requires_grad
            yield number, count, outputs.kept, (loss / count if term.mean == "sample" else loss) if counts else None


def _reaches(outputs: Sequence[Output], one: Output) -> bool:
    """Whether what a later forward for the same sample gave is made of it."""
    later = [other.live.sum() for other in outputs if other.call > one.call and other.module != FEATURES and other.live is not None]
    return one.module != FEATURES and bool(later) and torch.autograd.grad(later, [one.live], retain_graph=True, allow_unused=True)[0] is not None


def _declared(trials: Trials) -> list[Output]:
    """The outputs of all samples with the gradient of the whole declared loss at them."""
    model = trials.fresh()
    by_term: dict[int, list[Output]] = {}
    counts: dict[int, list[float]] = {}
    for number, count, outputs, loss in _forwards(trials, model):
        for one in outputs:
            one.inner = _reaches(outputs, one)
        for one in outputs:
            one.gradient = None  # of what was asked just now
        if loss is not None:
            loss.backward()
        for one in outputs:
            one.live = None
        by_term.setdefault(number, []).extend(outputs)
        counts.setdefault(number, []).append(count)
    model.zero_grad(set_to_none=True)
    found = []
    for number, outputs in by_term.items():
        term, own = trials.terms[number], counts[number]
        by_count = {"token": sum(own), "weighted": sum(own), "sample": sum(count > 0 for count in own)}
        divisor = 1.0 if term.whole else by_count.get(str(term.mean)) or float(term.mean)
        for one in outputs:
            one.term = number
            one.gradient = torch.zeros_like(one.value) if one.gradient is None else one.gradient * (term.weight / divisor)
            found.append(one)
    return found


def _pulled_back(trials: Trials, arriving: Sequence[Mapping[int, torch.Tensor]]) -> list[Gradients]:
    """Returns the parameters' gradients for each of `arriving`: gradients at the outputs of _declared, by number, which replace those that the
    loss would send there."""
    model = trials.fresh()
    named = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    totals = [{name: torch.zeros_like(p) for name, p in named.items()} for _ in arriving]
    number = 0
    for _, _, outputs, _ in _forwards(trials, model):
        for total, gradients in zip(totals, arriving):
            some = [(one.live, gradients[number + i]) for i, one in enumerate(outputs) if number + i in gradients and one.live is not None]
            hooks = [live.register_hook(functools.partial(_instead, gradient)) for live, gradient in some]
            parts = torch.autograd.grad([live for live, _ in some], list(named.values()), [g for _, g in some], retain_graph=True,
                                        allow_unused=True) if some else ()
            for name, part in zip(named, parts):
                if part is not None:
                    total[name] += part
            for hook in hooks:
                hook.remove()
        number += len(outputs)
    return list(totals)


# Equal rows.
def _labels(rows: torch.Tensor, tolerance: torch.Tensor) -> torch.Tensor:
    """The same number for rows that are equal, or linked by rows that are. rows [N, D], tolerance [N]."""
    if rows.shape[1] > DIRECTIONS:
        random = torch.Generator().manual_seed(0)
        rows = rows @ torch.randn(rows.shape[1], DIRECTIONS, generator=random, dtype=rows.dtype) / math.sqrt(DIRECTIONS)
    pairs = []
    for first in range(0, len(rows), 512):
        far = torch.cdist(rows[first:first + 512], rows, compute_mode="donot_use_mm_for_euclid_dist")
        pairs.append((far <= 2 * torch.maximum(tolerance[first:first + 512, None], tolerance)).nonzero() + torch.tensor([first, 0]))
    one, other = torch.cat(pairs).unbind(1)
    labels = torch.arange(len(rows))
    while True:
        lower = labels.scatter_reduce(0, one, labels[other], "amin")
        if torch.equal(lower, labels):
            return torch.unique(labels, return_inverse=True)[1]
        labels = lower


def _as_rows(value: torch.Tensor, widths: set[int]) -> torch.Tensor:
    """[N, D]; a vector is one row where the other side has such rows, else rows of one number."""
    if value.dim() < 2:
        return value.reshape(1, -1) if value.dim() and len(value) in widths else value.reshape(-1, 1)
    return value.reshape(-1, value.shape[-1])


def _widths(values: Sequence[torch.Tensor]) -> set[int]:
    return {value.shape[-1] for value in values if value.dim()}


@dataclasses.dataclass
class Rows:
    """Rows of one width, of the declared loss and of the run. A group is of equal rows.

    right, found [G, D]: the gradient in all at a group's rows. value [G, D]. owners: (number of the output, row in it) of each declared
    row, and its group. of_run: (rank, key of the output), and its group.
    """

    value: torch.Tensor
    right: torch.Tensor
    found: torch.Tensor
    owners: list[tuple[int, int]]
    group: torch.Tensor
    of_run: list[tuple[int, tuple[str, str]]]
    group_of_run: torch.Tensor

    @functools.cached_property
    def owners_of(self) -> dict[int, list[tuple[int, int]]]:
        found: dict[int, list[tuple[int, int]]] = {}
        for owner, group in zip(self.owners, self.group.tolist()):
            found.setdefault(group, []).append(owner)
        return found

    @functools.cached_property
    def run_of(self) -> dict[int, list[tuple[int, tuple[str, str]]]]:
        found: dict[int, list[tuple[int, tuple[str, str]]]] = {}
        for place, group in zip(self.of_run, self.group_of_run.tolist()):
            found.setdefault(group, []).append(place)
        return found

    @functools.cached_property
    def declared(self) -> torch.Tensor:
        """How many declared rows each group has."""
        return torch.bincount(self.group, minlength=len(self.value))

    @functools.cached_property
    def made(self) -> torch.Tensor:
        return torch.bincount(self.group_of_run, minlength=len(self.value))


def _matched(declared: Sequence[tuple[int, Output]], sent: Sequence[Sent], same: float) -> list[Rows]:
    """By width. declared: numbered outputs of one layer."""
    own, theirs = _widths([one.value for _, one in declared]), _widths([value for some in sent for _, _, value, _ in some])
    mine = [((number, i), value, gradient) for number, one in declared if one.gradient is not None
            for i, (value, gradient) in enumerate(zip(_as_rows(one.value, theirs), _as_rows(one.gradient, theirs)))]
    made = [((rank, (module, path)), row, gradient) for rank, some in enumerate(sent) for module, path, value, grad in some
            for row, gradient in zip(_as_rows(value, own), _as_rows(grad, own))]
    if len(mine) + len(made) > MOST_ROWS:
        return []
    found = []
    for width in sorted({len(row) for _, row, _ in mine} & {len(row) for _, row, _ in made}):
        some, others = [one for one in mine if len(one[1]) == width], [one for one in made if len(one[1]) == width]
        values = torch.stack([*(row.double() for _, row, _ in some), *(row.double() for _, row, _ in others)])
        labels = _labels(values, same * values.norm(dim=1))
        one, other = labels[:len(some)], labels[len(some):]
        empty = torch.zeros(int(labels.max()) + 1, width, dtype=torch.float64)
        found.append(Rows(empty.index_copy(0, labels, values), empty.index_add(0, one, torch.stack([g.double() for _, _, g in some])),
                          empty.index_add(0, other, torch.stack([g.double() for _, _, g in others])),
                          [owner for owner, _, _ in some], one, [owner for owner, _, _ in others], other))
    return found


# Conclusions.
@dataclasses.dataclass
class Row:
    """A group in words: where its first declared row is, of which sample (-1: the batch), the terms with a gradient there, and both
    gradients. slack: what the one found may be off by. declared, counted: there is a gradient, and one in the run.
    inner: what the loss is made of is made of it in turn. members: how many declared rows are equal there."""

    where: str
    place: int
    terms: set[int]
    value: torch.Tensor
    right: torch.Tensor
    found: torch.Tensor
    alike: float
    slack: float
    declared: bool
    counted: bool
    inner: bool
    members: int

    @functools.cached_property
    def times(self) -> float:
        """The multiple of the right gradient that is nearest to the one found."""
        return float(self.found @ self.right / self.right.square().sum()) if self.declared else math.inf

    def is_times(self, times: float) -> bool:
        """The one found is that multiple of the right one."""
        return float((self.found - times * self.right).norm()) <= self.alike * float(self.found.norm()) + self.slack

    @functools.cached_property
    def other(self) -> bool:
        """The one found is no multiple of the right one, though there are both."""
        return self.declared and self.counted and not (self.times > 0 and self.is_times(self.times))

    @property
    def cosine(self) -> float:
        return float(self.found @ self.right / (self.found.norm() * self.right.norm()).clamp(min=1e-300))


@dataclasses.dataclass
class Label:
    """The gradient of a cross entropy at a row. smooth: of the label's probability, spread over all. heat: what the row is divided by."""

    label: int
    smooth: float
    heat: float


def _label(value: torch.Tensor, gradient: torch.Tensor, alike: float) -> Label | None:
    """None: it is no multiple of softmax(row / heat) - label."""
    label = int(gradient.abs().argmax())
    others = torch.arange(len(value)) != label
    rest = gradient[others] * (-1 if gradient[label] > 0 else 1)
    if len(value) < 4 or abs(float(gradient.sum())) > alike * float(gradient.abs().sum()):
        return None

    def fit(column: torch.Tensor, wanted: torch.Tensor, weights: torch.Tensor) -> tuple[float, float, bool]:
        """Slope, constant, and whether they fit."""
        both = torch.stack([column, torch.ones_like(column)], 1)
        slope, constant = torch.linalg.lstsq(both * weights[:, None], (wanted * weights)[:, None]).solution.flatten().tolist()
        off = float(((slope * column + constant - wanted) * weights).norm())
        return slope, constant, off <= alike * float(weights.norm())

    # rest = size * (softmax - smooth / n), of row / 1; where nothing is smoothed, of row / heat.
    chances = value.softmax(0)[others]
    size, less, fits = fit(chances, rest / rest.norm(), torch.ones_like(rest))
    if fits and size > 0 and less <= alike:
        return Label(label, max(0.0, -less / size * len(value)), 1.0)
    if bool((rest > 0).all()):
        slope, _, fits = fit(value[others], rest.log(), rest / rest.norm())
        if fits and slope > 0:
            return Label(label, 0.0, 1 / slope)
    return None


class Located:
    """The step by its outputs. sent: by rank. averages: the engine divides the sum over ranks by their number. loss_scale: what losses were
    multiplied by, and gradients divided by, against underflow."""

    def __init__(self, trials: Trials, sent: Sequence[Sent], averages: bool, loss_scale: float) -> None:
        self.trials, self.averages, self.ranks = trials, averages, len(sent) // trials.peers
        self.repeated = trials.peers * loss_scale  # times that the gradient of a loss is in the sum over ranks
        self.allowed, self.places = _allowed(trials.unit), [place for place, _ in trials.placed()]
        everything = [*enumerate(_declared(trials))]
        of_run = {(module, path) for some in sent for module, path, _, _ in some}
        layers = []  # what modules give; features where the run has some of these, and nothing of the others
        for features in (False, True):
            outputs = {number: one for number, one in everything if (one.module == FEATURES) == features}
            rows = _matched([*outputs.items()], sent, self.allowed.same)
            layers.append((outputs, rows, [(one.declared > 0) & (one.made > 0) for one in rows]))
        self.outputs, self.rows, self.both = next((layer for layer in layers if any(bool(both.any()) for both in layer[2])), layers[0])
        # Outputs of which some row is there and here, or that have one name there and here: of others nothing is said.
        same = {one.key for one in self.outputs.values()} & of_run
        met = [(rows, set(both.nonzero().flatten().tolist())) for rows, both in zip(self.rows, self.both)]
        self.keys = same | {self.outputs[number].key for rows, groups in met for group in groups for number, _ in rows.owners_of[group]}
        self.keys_of_run = same | {key for rows, groups in met for group in groups for _, key in rows.run_of[group]}
        self.far = False  # the gradient found from what the model makes of those at the outputs
        self.silent = {(module, path) for some in sent for module, path, _, gradient in some if bool(gradient.any())} <= self.keys_of_run
        self.largest, self.largest_found = (max((float(part.norm(dim=1).max()) for part in parts), default=0.0) for parts in (
            [rows.right for rows in self.rows], [rows.found for rows in self.rows]))

    def finding(self) -> Finding | None:
        """None: nothing is proved."""
        if not self.largest or not self.largest_found:
            return None
        missing, extra = self._missing(), self._extra()
        if missing or extra:
            return self._of_missing(missing, extra) if missing else self._of_extra(extra)
        rows = [self._row(rows, group) for rows, both in zip(self.rows, self.both) for group in (both & (
            (rows.right.norm(dim=1) > CLEAR * self.largest) | (rows.found.norm(dim=1) > CLEAR * self.largest_found))).nonzero().flatten().tolist()]
        inner, rows = [row for row in rows if row.inner], [row for row in rows if not row.inner]
        # Rows that are equal, as first ones often are, have the gradients of all of them.
        uncounted = [row.where for row in rows if not row.declared]
        if uncounted and all(row.members > 1 for row in rows if row.other) and self.pulled[1] is not None:
            return {"id": "other_targets", "sentence": f"a gradient arrives at {len(uncounted)} rows of outputs at which the declared loss has none: {_few(uncounted)}"}
        if not rows or any(row.other for row in rows):
            return self._of_other(rows) if rows else None
        times = sum(float(row.found @ row.right) for row in rows) / max(sum(float(row.right.square().sum()) for row in rows), 1e-300)
        if not all(row.is_times(times) for row in rows):
            return self._of_multiples(rows)
        off = [row.where for row in inner if not row.is_times(times)]
        return {"id": "other_backward", "sentence": f"the gradient of the declared loss arrives at all {len(rows)} rows of what the last forwards give, and "
                f"from there another one at what forwards before them give: {_few(off)}"} if off else self._of_factor(len(rows), times)

    def _row(self, rows: Rows, group: int) -> Row:
        number, at = rows.owners_of[group][0]
        output = self.outputs[number]
        several = len({other.key for other in self.outputs.values()}) > 1
        what = f" of module {output.module}" if output.module and output.module != FEATURES else ""
        whole = "the batch" if output.place < 0 else self.places[output.place]
        right, found = rows.right[group], rows.found[group]
        terms = {one.term for number, at in rows.owners_of[group] for one in [self.outputs[number]] if one.gradient is not None and bool(
            _as_rows(one.gradient, {rows.value.shape[1]})[at].any())}
        return Row(f"row {at}{what}{f' of output {output.path}' if output.path and several else ''} of {whole}", output.place, terms, rows.value[group],
                   right, found, self.allowed.alike, self.allowed.alike / 100 * self.largest_found, float(right.norm()) > NOTHING * self.largest,
                   float(found.norm()) > NOTHING * self.largest_found, all(self.outputs[number].inner for number, _ in rows.owners_of[group]),
                   len(rows.owners_of[group]))

    def _missing(self) -> list[tuple[Row, float]]:
        """Rows with a gradient that the run has nowhere, with how far its nearest one is, of their norm."""
        found = []
        for rows in self.rows:
            there = rows.value[rows.made > 0]
            for group in ((rows.declared > 0) & (rows.made == 0) & (rows.right.norm(dim=1) > CLEAR * self.largest)).nonzero().flatten().tolist():
                if any(self.outputs[number].key in self.keys for number, _ in rows.owners_of[group]):
                    far = (there - rows.value[group]).norm(dim=1).min() / rows.value[group].norm().clamp(min=1e-300)
                    found.append((self._row(rows, group), float(far)))
        return found

    def _extra(self) -> list[int]:
        """The rank of each row of the run with a gradient that no sample has."""
        found = []
        for rows in self.rows:
            live = (rows.declared == 0) & (rows.found.norm(dim=1) > CLEAR * self.largest_found)
            for group in live.nonzero().flatten().tolist():
                found += [rank for rank, key in rows.run_of[group] if key in self.keys_of_run][:1]
        return found

    @functools.cached_property
    def pulled(self) -> tuple[list[str], float | None]:
        """Parameters whose declared gradient comes through the outputs alone; and the multiple of what the model makes of the gradients
        found at the outputs that their gradient found is, None where it is none."""
        right, found = ({number: torch.zeros_like(one.value) for number, one in self.outputs.items()} for _ in range(2))
        for rows in self.rows:
            for parts, of in ((right, rows.right), (found, rows.found)):
                for group, owners in rows.owners_of.items():
                    for number, at in owners:
                        _as_rows(parts[number], {rows.value.shape[1]})[at] = (of[group] / len(owners)).to(parts[number].dtype)
        of_right, of_found = _pulled_back(self.trials, [right, found])
        least = EXACT * self.trials.right.norm
        names = [name for name, g in self.trials.right.gradients.items() if self.trials.is_near({name: g}, {name: of_right[name]}) or float(
            (g.double() - of_right[name]).norm()) <= least]
        made, run = ({name: g[name].double() for name in names} for g in (of_found, self.trials.found))
        times = dot(run, made) / max(norm_of(made)**2, 1e-300)
        off = norm_of({name: run[name] - times * made[name] for name in names})
        self.far = off > (0.0 if self.trials.unit < EXACT else CLEARLY) * norm_of(run)
        return names, times if names and off <= 4 * self.trials.rounding(run) and times > 0 else None

    def _of_missing(self, missing: Sequence[tuple[Row, float]], extra: Sequence[int]) -> Finding | None:
        row, far = max(missing, key=lambda one: one[1])
        if far < self.allowed.far:
            return None  # rounding, perhaps
        total = sum(int((rows.right.norm(dim=1) > CLEAR * self.largest).sum()) for rows in self.rows)
        lost = f"{len(missing)} of the {total} rows of outputs that the declared loss is made of are nowhere in the step"
        where = f"such as {row.where} (the nearest one there is off by {100 * far:.3g} % of its norm)"
        if not extra:
            return {"id": "missing_data_part", "sentence": f"{lost}, {where}; all rows with a gradient there belong to samples"}
        return {"id": "other_outputs", "sentence": f"the model gives other outputs than for these samples: {lost}, {where}, and {len(extra)} others with a "
                f"gradient are there, on {_ranks(extra)}"}

    def _of_extra(self, extra: Sequence[int]) -> Finding:
        return {"id": "extra_rows_counted", "sentence": f"on {_ranks(extra)} a gradient arrives at {len(extra)} row{'s' * (len(extra) > 1)} of outputs that no sample "
                "has: padding, rows that were made up, or samples of another step; the rows of all samples are there too"}

    def _of_other(self, rows: Sequence[Row]) -> Finding | None:
        names, follows = self.pulled
        # A reduction may undo weights of ranks, which a sum over equal rows of several does not show.
        other = [row for row in rows if row.other and (follows or row.members == 1)]
        if not other:
            return None
        labels = self._cross_entropies(other)
        worst = min(other, key=lambda row: row.cosine)
        what = labels["sentence"] if labels else f"{_few([row.where for row in other])} (at {worst.where} the cosine of the two is {worst.cosine:.3g})"
        some = "" if len(names) == len(self.trials.found) else f" {len(names)} of {len(self.trials.found)}"
        rest = f"; the gradient of{some or ' all'} parameters is what the model makes of it: its forward and backward and the reduction are right there" \
            if follows else ""
        return {"id": labels["id"] if labels else "other_loss", "change": self._declared_loss(set().union(*(row.terms for row in other))), "sentence":
                f"all rows of outputs that the declared loss is made of are there, and another gradient than its own arrives at {len(other)} of {len(rows)}: "
                f"{what}{rest}"}

    def _cross_entropies(self, other: Sequence[Row]) -> Finding | None:
        """Tells how two cross entropies differ: in labels, temperature or smoothing."""
        pairs = [(row, _label(row.value, row.right, row.alike), _label(row.value, row.found, row.alike)) for row in other]
        told = [(row, right, found) for row, right, found in pairs if right and found]
        if not told or any(row.members == 1 and not (right and found) for row, right, found in pairs):
            return None  # rows that are equal may have several labels
        moved = [f"{row.where} is trained toward {found.label}, and by `loss` toward {right.label}" for row, right, found in told if right.label != found.label]
        if moved:
            return {"id": "other_targets", "sentence": _few(moved)}
        heat = self._one([found.heat / right.heat for _, right, found in told])
        smooth, of_right = self._one([found.smooth for _, _, found in told]), self._one([right.smooth for _, right, _ in told])
        if heat is not None and abs(heat - 1) > CLEARLY:
            return {"id": "other_loss", "sentence": f"logits are divided by {heat:.4g} times what `loss` divides them by"}
        if smooth is not None and of_right is not None and abs(smooth - of_right) > CLEARLY:
            return {"id": "other_targets", "sentence": f"labels are smoothed by {smooth:.3g}, and by `loss` by {round(of_right, 4):.3g}"}
        return None

    def _one(self, values: Sequence[float]) -> float | None:
        """Their mean, where they are one number."""
        mean = sum(values) / len(values)
        return mean if max(abs(value - mean) for value in values) <= 10 * self.allowed.alike * max(1.0, mean) else None

    def _of_factor(self, number: int, arriving: float) -> Finding | None:
        """All gradients at outputs are one multiple of the declared ones."""
        names, made = self.pulled
        arriving, made = arriving / self.repeated, None if made is None else made * self.repeated
        right = f"all {number} rows of outputs are those of the samples, and the gradient of the declared loss arrives at each, {arriving:.6g} times"
        if made is None:
            return {"id": "other_backward", "sentence": f"{right}; the parameters' gradient is not what the model makes of that"} \
                if names and self.silent and self.far else None  # else derivatives that jump, or noise
        whole = arriving * made
        if math.isclose(whole, 1.0, rel_tol=1e-4):
            others = [name for name in self.trials.right.gradients if name not in names]
            return {"id": "other_loss", "change": self._declared_loss({0}), "sentence": f"{right}, and the gradients that come through them are right; those "
                    f"of {_few(others)}, which the loss takes by itself, are not"} if others else None
        average = 1 / self.ranks if self.averages else 1.0
        loss, after = arriving * average, made / average
        said = (f"; averaged over {self.ranks} ranks" if self.averages else "; summed over ranks") + f" that is a loss of {loss:.6g} times the declared one"
        if not math.isclose(after, 1.0, rel_tol=1e-4):
            said += f", and what comes after multiplies the gradient by {after:.6g}"
        return {"id": "scaled_by_factor", "sentence": f"all gradients are {whole:.6g} times what they should be: {right}{said}", "change": self._factor(loss, after)}

    def _factor(self, loss: float, after: float) -> str:
        if math.isclose(after, 1.0, rel_tol=1e-4):
            return (f"differentiate `loss * {1 / loss:.6g}`: take out what makes it {loss:.6g} times as large, such as another count or a "
                    "`dist.get_world_size()` that is missing or too much")
        return (f"let what comes after the backward multiply the gradient by {1 / loss:.6g}, and not by {after:.6g}: the divisor of the reduction "
                "(`set_gradient_divide_factor`, a hook of DDP), or `p.grad *= factor`")

    def _of_multiples(self, rows: Sequence[Row]) -> Finding | None:
        """At each row a multiple of the declared gradient arrives."""
        _, made = self.pulled
        if made is None:
            return None
        if min(row.value.numel() for row in rows) == 1:
            return {"id": "other_loss", "change": self._declared_loss(set().union(*(row.terms for row in rows))), "sentence": "all rows of outputs that the declared loss is "
                    f"made of are there, and the gradient that arrives at them is another one: {_few([f'at {row.where} {row.times * made:.4g} times' for row in rows])}"}
        by_sample: dict[int, list[Row]] = {}
        for row in rows:
            by_sample.setdefault(row.place, []).append(row)
        if all(math.isclose(row.times, some[0].times, rel_tol=1e-3) for some in by_sample.values() for row in some):
            told = [f"{some[0].where.partition(' of ')[2]} counts {some[0].times * made:.4g} times" for some in by_sample.values()]
        else:
            told = [f"{row.where} counts {row.times * made:.4g} times" for row in rows if not math.isclose(row.times * made, 1.0, rel_tol=1e-3)]
        return {"id": "samples_weighted_differently", "change": FACTOR, "sentence": "the gradient is made of the same rows of outputs, which count more or less "
                f"often than in `loss`: {_few(told)}"}

    def _declared_loss(self, numbers: set[int]) -> str:
        """The line of code that computes the terms as they were declared."""
        said = []
        for number in sorted(numbers):
            term = self.trials.terms[number]
            code = getattr(term.loss, "__code__", None)
            name = getattr(term.loss, "__name__", "loss").replace("<lambda>", "loss")
            where = f" ({'/'.join(code.co_filename.split('/')[-2:])}, line {code.co_firstlineno})" if code else ""
            times = " * dist.get_world_size()" if self.averages and not term.whole else ""
            if term.features is not None:
                what = f"`{name}(model, features)` of the features of all ranks, gathered with their gradient"
            elif term.whole:
                what = f"`{name}(model, samples)` of all samples"
            else:
                what = f"`sum({name}(model, sample).sum() for sample in samples){times} / count`, with the count of the whole step"
            said.append(f"{what}{where}")
        return f"compute of the outputs what the declared loss computes: {'; '.join(said)}"


def _few(each: Sequence[str]) -> str:
    return f"{', '.join(each[:3])}{f' and {len(each) - 3} more' if len(each) > 3 else ''}"


def _ranks(ranks: Sequence[int]) -> str:
    numbers = sorted({*ranks})
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, numbers))}"


def locate(trials: Trials, everyone: Sequence[Sent | None], averages: bool, loss_scale: float) -> Finding | None:
    """The finding that the outputs prove, if any. everyone: by rank."""
    sent = [some for some in everyone if some is not None]
    if len(sent) < len(everyone) or trials.unit > COARSEST:
        return None
    with contextlib.suppress(Exception):  # the user's loss is called as it was not written for
        return Located(trials, sent, averages, loss_scale).finding()
    return None
