"""Causes that are tried on the reference, where a verdict has no name: each says what gradient the step would then have, and is
named where that is the gradient found."""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import math
from typing import Any, Callable, Iterator, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from ._native.isograd_comm import ConfigError
from ._ranks import in_precision, mapped, plain_name, tensors_in
from ._recording import Finding
from ._reference import Batch, Features, Gradients, LARGEST_SHARES, Loss, norm_of, Reference, SMOOTH_WHOLE, Term

GATHER = "gather the features of all ranks with their gradient: `isograd.all_gather_rows(features)`"
ONCE = ("compute and differentiate the loss once, over the features of all micro-batches: `torch.cat(features_of_micro_batches)`, or by "
        "GradCache where they do not fit")
EXACT = 1e-10  # what sums in fp64 may differ by, as E1 of the verdict
TIMES_NEARER = 4.0  # than any other cause, where rounding lets several fit
ALONG = 0.7  # cosine of two differences, which is next to 0 where they have nothing to do with each other and have many elements
FEWEST_ELEMENTS = 100  # of a gradient for that: with 100 a cosine of 0.7 is seven times what chance makes
MOST_UNITS = 8.0  # of a coarser type that a gradient may be off by, for its logits to have been in it
MOST_TARGETS = 256  # of a batch, whose gradients are made one by one
MOST_USES = 8  # of one parameter in a sample's forward: one of them is tried after the other
Said = Callable[[float], "Finding | None"]  # by the multiple that was fitted
Cause = Callable[["Trials"], None]  # adds to `fitting` what gives the gradient found


def dot(one: Gradients, other: Gradients) -> float:
    return sum(float((g.double() * other[name]).sum()) for name, g in one.items())


def _sum(parts: Sequence[tuple[float, Gradients]]) -> dict[str, torch.Tensor]:
    (first, whole), *others = parts
    total = {name: first * g.double() for name, g in whole.items()}
    for times, part in others:
        for name, g in part.items():
            total[name].add_(g, alpha=times)
    return total


def _weights_of(parts: Sequence[Gradients], base: Gradients | None, found: Gradients) -> list[float]:
    """The weights with which the sum of the parts comes nearest to found - base."""
    off = found if base is None else _sum([(1.0, found), (-1.0, base)])
    products = torch.tensor([[dot(one, other) for other in (*parts, off)] for one in parts], dtype=torch.float64)
    weights: list[float] = (torch.linalg.pinv(products[:, :-1], hermitian=True) @ products[:, -1]).tolist()
    return weights


@dataclasses.dataclass
class Trials:
    """The causes to try, and the one whose gradient is nearest to the one found.

    step:    (terms, batch) -> the step of one process. batch: [place along data][micro-batch] -> samples.
    unit:    the round-off of the run's precision. moved: how far rounding moves the right gradient where derivatives jump.
    """

    step: Callable[[Sequence[Term], Batch], Reference]
    fresh: Callable[[], nn.Module]
    terms: Sequence[Term]
    batch: Batch
    found: Gradients
    right: Reference
    unit: float
    moved: float = 0.0
    peers: int = 1  # ranks that have the same samples
    fitting: list[tuple[float, Finding]] = dataclasses.field(default_factory=list)

    def trying(self, *causes: Cause, until_one_fits: bool = False) -> None:
        """An exception ends that cause alone: the user's loss is called as it was not written for."""
        for cause in causes:
            if not (until_one_fits and self.fitting):
                with contextlib.suppress(Exception):
                    cause(self)

    def terms_and_parts(self, gathers: bool) -> None:
        """gathers: features are gathered without their gradient, which scales what they reach."""
        self.trying(try_parts, try_own_rows, lambda trials: try_terms(trials, gathers))
        # These have numbers to fit, so that they come last.
        self.trying(try_shares, try_statistics, *([] if gathers else [try_detached_factor]), try_weights, try_terms_of_ranks, until_one_fits=True)

    def instead(self, said: Sequence[str], averages: bool, meshes: Sequence[Sequence[int]]) -> Finding | None:
        """The finding that replaces a name which fits the numbers by chance; None: none does. averages: DDP or FSDP2 averages
        gradients. meshes: the shapes of the meshes of parameters."""
        times = dot(self.found, self.right.gradients) / max(self.right.norm**2, 1e-300)

        def is_about(factor: float) -> bool:
            return math.isclose(times, factor, rel_tol=1e-3)

        if "reduced_while_accumulating" in said and averages:  # an average of averages is the same
            self.trying(lambda trials: try_samples(trials, False))
            return self.nearest()
        ranks = len(self.batch)
        if "averaged_over_axis" in said and ranks > 1 and is_about(1 / ranks) and not self.terms[0].whole and self.forwards == ranks:
            return {"id": "undecided", "sentence": f"all parameters scaled by 1/{ranks}: averaged over the ranks ({ranks}); or divided by the number of "
                    f"rows, of which a sample has {ranks}: `loss` calls the model as often for each"}
        if "summed_over_micro_batches" in said and any(len(mesh) > 1 and is_about(size) for mesh in meshes for size in mesh):
            return {"id": "undecided", "sentence": f"all parameters scaled by {times:.4g}: micro-batches are summed, not divided by their number; or "
                    f"one axis of the mesh, of {times:.4g} ranks, is summed over where it was to be averaged (`set_gradient_divide_factor`)"}
        return None

    def placed(self) -> list[tuple[str, Any]]:
        """(where it is, the sample) of the whole batch."""
        return [(f"sample {i} of micro-batch {j} on rank {rank}", sample) for rank, micros in enumerate(self.batch)
                for j, micro in enumerate(micros) for i, sample in enumerate(micro)]

    @functools.cached_property
    def forwards(self) -> int:
        """How often the first term's loss calls the model for each sample; 0 where samples differ in that."""
        model, calls, found = self.fresh(), list[None](), set[int]()
        hook = model.register_forward_pre_hook(lambda *_: calls.append(None))
        try:
            with torch.no_grad():
                for _, sample in self.placed():
                    calls.clear()
                    self.terms[0].loss(model, in_precision(sample, next(model.parameters()).dtype))
                    found.add(len(calls))
        finally:
            hook.remove()
        return found.pop() if len(found) == 1 else 0

    def rest(self, values: Mapping[str, torch.Tensor], earlier: Mapping[str, torch.Tensor], drawn: Sequence[Sequence[torch.Tensor]],
             said: Sequence[str]) -> None:
        """values: of the parameters. earlier: the gradient when the step's first forward began. drawn: by place along data, the states
        with which forwards that drew random numbers began. said: the findings so far; where several causes fit, a count is not tried as
        one more."""
        if "undecided" not in said:
            self.trying(try_denominators)
        if said != ["scaled_by_factor"]:
            self.trying(lambda trials: try_earlier(trials, earlier), lambda trials: try_decay(trials, values), try_means, try_rows,
                        try_reductions, try_targets)
            self.trying(lambda trials: try_noise(trials, drawn), try_uses, try_packs, try_positions_of_parts, try_padding, try_casts, until_one_fits=True)
            # These fit a number for each sample or target: whatever else may be, is tried before.
            self.trying(lambda trials: try_samples(trials, "undecided" in said), try_each_target, until_one_fits=True)

    @functools.cached_property
    def base(self) -> Gradients | None:
        """The gradient of the terms that are sums over samples, next to those of the whole batch."""
        others = [term for term in self.terms if not term.whole]
        return self.step(others, self.batch).gradients if others and len(others) < len(self.terms) else None

    @functools.cached_property
    def others(self) -> Gradients | None:
        """The gradient of all terms but the first."""
        return self.step(self.terms[1:], self.batch).gradients if self.terms[1:] else None

    @functools.cached_property
    def seen(self) -> list[list[list[_OtherTargets]]]:
        """The tokens that the first term's loss embeds and its targets, for each sample of the batch."""
        model = self.fresh()
        dtype = next(model.parameters()).dtype
        return [[[_seen(model, self.terms[0].loss, in_precision(sample, dtype)) for sample in micro] for micro in micros]
                for micros in self.batch]

    def made(self, terms: Sequence[Term], keys: Sequence[Any]) -> list[Gradients]:
        """The gradient of each part of the batch, or their sum where they are too large to be kept; none where there is one part, too
        many, or one that has no such loss. keys: the part of each sample."""
        parts = _parted(self.batch, keys).values()
        numbers = sum(g.numel() for g in self.found.values())
        keeps = len(parts) * numbers * 8 <= LARGEST_SHARES
        each: list[Gradients] = []
        try:  # of more parts any gradient is a sum by chance
            for part in parts if terms and 1 < len(parts) <= max(numbers // 4, 1) else ():
                one = self.step(terms, part).gradients
                each = [*each, one] if keeps or not each else [_sum([(1.0, each[0]), (1.0, one)])]
        except ConfigError:
            return []
        return each if all(math.isfinite(norm_of(one)) for one in each) else []

    def is_near(self, other: Gradients, this: Gradients) -> bool:
        """Whether they are the same within rounding."""
        off = norm_of(_sum([(1.0, other), (-1.0, this)]))
        return off <= self.rounding(other)

    def rounding(self, gradient: Gradients) -> float:
        """How far from it a run in its precision may be."""
        return max(SMOOTH_WHOLE * self.unit, EXACT) * norm_of(gradient) + 4 * self.moved

    def keys(self) -> list[tuple[int, int]]:
        """Rank and micro-batch of each sample."""
        return [(rank, j) for rank, micros in enumerate(self.batch) for j, micro in enumerate(micros) for _ in micro]

    def line(self, base: Gradients | None, way: Gradients, say: Said, times: float | None = None) -> None:
        """Tries base + times * way; without `times` with the one that comes nearest."""
        rest = self.found if base is None else _sum([(1.0, self.found), (-1.0, base)])
        free = times is None
        if times is None:
            times = dot(rest, way) / max(norm_of(way)**2, 1e-300)
        predicted = _sum([(times, way), *([(1.0, base)] if base is not None else [])])
        off = norm_of(_sum([(1.0, self.found), (-1.0, predicted)]))
        # A factor alone is no cause of another direction.
        multiple = dot(self.found, self.right.gradients) / max(self.right.norm**2, 1e-300) if free and base is None else 1.0
        apart = norm_of(_sum([(1.0, self.found), (-multiple, self.right.gradients)]))
        if free and base is None and apart <= self.rounding(self.found):
            return
        if off <= min(self.rounding(predicted), apart / 4) and (finding := say(times)):
            self.fitting.append((off, finding))

    def nearest(self) -> Finding | None:
        """None: nothing fits, or several do as well."""
        self.fitting.sort(key=lambda one: one[0])
        for off, finding in self.fitting[1:]:
            if finding["id"] != self.fitting[0][1]["id"] and off < TIMES_NEARER * self.fitting[0][0]:
                return None
        return self.fitting[0][1] if self.fitting else None


# A loss that compares samples, made of some of them alone.
def _parted(batch: Batch, keys: Sequence[Any]) -> dict[Any, Batch]:
    """By key, in their order, the batch's samples with it."""
    found: dict[Any, list[list[list[Any]]]] = {key: [[[] for _ in micros] for micros in batch] for key in dict.fromkeys(keys)}
    left = iter(keys)
    for rank, micros in enumerate(batch):
        for j, micro in enumerate(micros):
            for sample in micro:
                found[next(left)][rank][j].append(sample)
    return dict(found)


def _divisions(trials: Trials) -> Iterator[tuple[str, list[Any], str, str]]:
    """Finding, the part of each sample, what the parts are, what to change; each division of the samples once."""
    keys = trials.keys()
    seen: set[tuple[int, ...]] = set()
    for name, parts, each, change in (
            ("mean_of_rank_means", [rank for rank, _ in keys], "each rank's samples",
             f"{GATHER} before the loss; what needs no gradient (rewards, counts) by `dist.all_gather_object(everyone, values)`"),
            ("mean_of_micro_batch_means", [j for _, j in keys], "each micro-batch of all ranks", ONCE),
            ("mean_of_micro_batch_means", keys, "each micro-batch of a rank", f"{ONCE}; {GATHER} before it")):
        first = {part: i for i, part in reversed([*enumerate(parts)])}
        division = tuple(first[part] for part in parts)
        if division not in seen:
            seen.add(division)
            yield name, [*parts], each, change


def try_parts(trials: Trials) -> None:
    whole = [term for term in trials.terms if term.whole]
    for name, keys, each, change in _divisions(trials):
        if alone := trials.made(whole, keys):
            finding = {"id": name, "sentence": f"the gradient is that of the loss over {each} alone, averaged", "change": change}
            trials.line(trials.base, _sum([(1 / len({*keys}), part) for part in alone]), lambda _: finding, 1.0)  # noqa: B023


def try_shares(trials: Trials) -> None:
    """The same in any shares."""
    whole = [term for term in trials.terms if term.whole]
    for _, keys, each, change in _divisions(trials):
        if len(alone := trials.made(whole, keys)) < 2:
            continue
        base = trials.base
        shares, of_right = (_weights_of(alone, base, one) for one in (trials.found, trials.right.gradients))
        nearest = _sum([*zip(of_right, alone), *([(1.0, base)] if base is not None else [])])
        # A loss that is a sum over samples has the right gradient made of these as well: then they say nothing.
        if not trials.is_near(nearest, trials.right.gradients):
            finding = {"id": "loss_over_own_samples", "change": change,
                       "sentence": f"the gradient is that of the loss over {each} alone, {_shares(shares, keys)}"}
            trials.line(base, _sum(list(zip(shares, alone))), lambda _: finding, 1.0)  # noqa: B023


class _NotTried(Exception):
    """The loss is no cross entropy that can be changed so."""


class _CrossEntropies(TorchFunctionMode):
    """Replaces cross entropies by what `other` computes from their arguments, by name and with defaults."""

    def other(self, given: inspect.BoundArguments) -> torch.Tensor:
        raise NotImplementedError

    def __torch_function__(self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Any = None) -> Any:
        if function is not F.cross_entropy:
            return function(*arguments, **(named or {}))
        given = inspect.signature(F.cross_entropy).bind(*arguments, **(named or {}))
        given.apply_defaults()
        return self.other(given)


class _RowsAlone(_CrossEntropies):
    """A cross entropy over as many rows as there are samples keeps some of these rows, and its divisor."""

    def __init__(self, counts: torch.Tensor) -> None:
        super().__init__()
        self._counts, self.found = counts, False

    def other(self, given: inspect.BoundArguments) -> torch.Tensor:
        reduction, given.arguments["reduction"] = given.arguments["reduction"], "none"
        losses = F.cross_entropy(*given.args, **given.kwargs)
        if losses.shape != self._counts.shape:
            raise _NotTried
        self.found = True
        own = torch.where(self._counts, losses, torch.zeros_like(losses))
        return own if reduction == "none" else own.sum() if reduction == "sum" else own.mean()


def try_own_rows(trials: Trials) -> None:
    """Each rank has the losses of its own rows, among the features of all, and a gradient through its own features alone."""
    whole = [term for term in trials.terms if term.whole]
    ranks = torch.tensor([rank for rank, _ in trials.keys()])
    if len(whole) != 1 or not whole[0].features or len(trials.batch) < 2:
        return
    term, = whole

    def loss(model: nn.Module, features: Sequence[Any]) -> Any:
        parts = []
        for rank in range(len(trials.batch)):
            with _RowsAlone(ranks == rank) as rows:
                parts.append(term.loss(model, [own if of == rank else mapped(own, torch.Tensor.detach)
                                               for own, of in zip(features, ranks.tolist())]))
            if not rows.found:  # the sum of all ranks' is that of the loss as it is
                raise _NotTried
        return torch.stack(parts).sum()

    trials.line(trials.base, trials.step([dataclasses.replace(term, loss=loss)], trials.batch).gradients, lambda _: {
        "id": "not_summed_over_axis", "sentence": "features are gathered without their gradient: each rank has the losses of its own rows, "
        "and a gradient through its own features alone", "change": f"{GATHER} in place of that; of a library `gather_with_grad=True`"}, 1.0)


class _StatisticsByPart(TorchFunctionMode):
    """Means, variances and batch normalisations over the rows of tensors, which are the batch's samples in order, are made of those of each
    part's rows. sizes: how many rows each part has. how: by what name of STATISTICS."""

    _OVER_ROWS = {function: name for name in ("mean", "var", "std") for function in (getattr(torch, name), getattr(torch.Tensor, name))}

    def __init__(self, sizes: Sequence[int], how: str) -> None:
        super().__init__()
        self._sizes, self._how, self.used = [size for size in sizes if size], how, False

    def _moments(self, rows: torch.Tensor, correction: float) -> tuple[torch.Tensor, torch.Tensor]:
        """The mean and the variance that all rows are given."""
        parts, each = rows.split(self._sizes), "averaged" in self._how
        size = [len(rows) / len(parts) if each else len(part) for part in parts]
        mean = torch.stack([part.mean(0) * share for part, share in zip(parts, size)]).sum(0) / len(rows)
        if self._how == "means averaged" or self._how == "unbiased":
            correction = 1 - correction if self._how == "unbiased" else correction
            return mean, (rows - mean).square().sum(0) / (len(rows) - correction)
        within = [(part - part.mean(0)).square().sum(0) / max(len(part) - correction, 1) * share for part, share in zip(parts, size)]
        return mean, torch.stack(within).sum(0) / len(rows)

    def __torch_function__(self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Any = None) -> Any:
        named = named or {}
        rows = arguments[0] if arguments else None
        if not isinstance(rows, torch.Tensor) or rows.dim() < 1 or rows.shape[0] != sum(self._sizes):
            return function(*arguments, **named)
        dim = named.get("dim", arguments[1] if len(arguments) > 1 else None)
        if (name := self._OVER_ROWS.get(function)) and dim in (0, (0,), [0]):
            self.used = True
            if self._how == "own":
                each = [(part, function(part, *arguments[1:], **named)) for part in rows.split(self._sizes)]
                return torch.cat([found.reshape(1, *part.shape[1:]).expand_as(part) for part, found in each])
            mean, variance = self._moments(rows, float(named.get("correction", named.get("unbiased", 1))))
            found = mean if name == "mean" else variance if name == "var" else variance.sqrt()
            return found[None] if named.get("keepdim") else found
        if function is F.batch_norm and named.get("training", arguments[5] if len(arguments) > 5 else False):
            self.used = True
            if self._how == "own":
                return torch.cat([function(part, *arguments[1:], **named) for part in rows.split(self._sizes)])
            given = inspect.signature(F.batch_norm).bind(*arguments, **named)
            given.apply_defaults()
            mean, variance = self._moments(rows, 0)
            given.arguments |= {"running_mean": mean, "running_var": variance, "training": False}
            weight, bias = given.arguments["weight"], given.arguments["bias"]
            found = (rows - mean) / (variance + given.arguments["eps"]).sqrt()
            return (found if weight is None else found * weight) + (0 if bias is None else bias)
        return function(*arguments, **named)


SUMS = "sum over ranks, and divide by the number of all rows: `dist.nn.functional.all_reduce(x.sum(0)) / count`, with the squares' sum the same way"
STATISTICS = {
    "own": ("are over each rank's samples alone", f"{GATHER} before these"),
    "within": ("have for variance that of each rank about its own mean, averaged by their numbers of rows", SUMS),
    "means averaged": ("have for mean the average of the ranks' means, however many rows each has", SUMS),
    "both averaged": ("are the averages of the ranks' means and variances, however many rows each has", SUMS),
    "unbiased": ("have a variance that is divided by one row less, or more, than in `loss`", "divide the sum of squares by what `loss` divides by: "
                 "`x.var(0, correction=0)` as F.batch_norm, `correction=1` as torch.var")}


def _with_statistics_of(term: Term, sizes: Sequence[int], how: str = "own") -> Term:
    """The same loss of the whole batch, whose statistics are each part's."""
    def loss(model: nn.Module, samples: Sequence[Any]) -> Any:
        with _StatisticsByPart(sizes, how) as statistics:
            found = term.loss(model, samples)
        if not statistics.used:
            raise _NotTried
        return found

    return dataclasses.replace(term, loss=loss)


def try_statistics(trials: Trials) -> None:
    """Means and variances over each rank's rows, or made of these."""
    sizes = [size for micros in trials.batch if (size := sum(map(len, micros)))]
    whole = [term for term in trials.terms if term.whole]
    if whole and len(sizes) > 1:
        trials.trying(*(functools.partial(_try_statistics, whole=whole, sizes=sizes, how=how) for how in STATISTICS))


def _try_statistics(trials: Trials, whole: Sequence[Term], sizes: Sequence[int], how: str) -> None:
    by_rank = trials.step([_with_statistics_of(term, sizes, how) for term in whole], trials.batch).gradients
    base = trials.base
    same = _sum([(1.0, by_rank), *([(1.0, base)] if base is not None else [])])
    if math.isfinite(norm_of(by_rank)) and not trials.is_near(same, trials.right.gradients):
        what, change = STATISTICS[how]
        trials.line(base, by_rank, lambda times: {
            "id": "loss_over_own_samples", "change": change,
            "sentence": f"the gradient is {round(times, 4):g} times that of the loss whose means and variances {what}"})


class _ComparedWithDetached(TorchFunctionMode):
    """The second factor of each product of matrices passes no gradient on; or the first."""

    def __init__(self, which: int) -> None:
        super().__init__()
        self._which = which

    def __torch_function__(self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Any = None) -> Any:
        if function in (torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__) and len(arguments) == 2:
            arguments = tuple(factor.detach() if i == self._which else factor for i, factor in enumerate(arguments))
        return function(*arguments, **(named or {}))


def try_detached_factor(trials: Trials) -> None:
    """All that rows are compared with was gathered without gradient, their own features too."""
    whole = [term for term in trials.terms if term.whole]
    if len(whole) != 1 or not whole[0].features:
        return
    for which in (1, 0):
        def loss(model: nn.Module, features: Sequence[Any]) -> Any:
            with _ComparedWithDetached(which):  # noqa: B023
                return whole[0].loss(model, features)

        trials.line(trials.base, trials.step([dataclasses.replace(whole[0], loss=loss)], trials.batch).gradients, lambda _: {
            "id": "not_summed_over_axis", "sentence": "features are gathered without their gradient: each row has one as the row that is compared, "
            "and none as one that others are compared with", "change": f"{GATHER} in place of that"}, 1.0)


def _of_one_number(features: Features) -> Term:
    """The one number of a sample's features that depends on the parameters."""
    def number(_: nn.Module, some: Sequence[Any]) -> torch.Tensor:
        value, = (tensor for tensor in tensors_in(some) if tensor.requires_grad)
        return value.reshape(())

    return Term(number, features=features)


def try_weights(trials: Trials) -> None:
    """Samples in other shares, where the features of each have one number that is differentiated."""
    whole, keys = [term for term in trials.terms if term.whole], trials.keys()
    if len(whole) == 1 and (features := whole[0].features) and len(
            alone := trials.made([_of_one_number(features)], range(len(keys)))) > 1:
        shares, of_right = (_weights_of(alone, trials.base, one) for one in (trials.found, trials.right.gradients))
        finding = _weighted([rank for rank, _ in keys], shares, of_right)
        trials.line(trials.base, _sum(list(zip(shares, alone))), lambda _: finding, 1.0)


def _shares(weights: Sequence[float], keys: Sequence[Any]) -> str:
    """How parts are added up; keys: the part of each sample."""
    sizes = [list(keys).count(key) for key in dict.fromkeys(keys)]

    def fit(others: Sequence[float]) -> bool:
        return all(math.isclose(one, other, rel_tol=1e-3) for one, other in zip(weights, others))

    if fit([1.0] * len(sizes)):
        return "summed"
    if fit([size / len(keys) for size in sizes]):
        return "each weighted by its number of samples"
    return f"in the shares {', '.join(f'{weight:.4g}' for weight in weights)}"


def _weighted(ranks_of: Sequence[int], shares: Sequence[float], right: Sequence[float]) -> Finding:
    """The name of a step in which each sample has such a share in place of the right one."""
    ratios: dict[int, list[float]] = {}
    for rank, share, expected in zip(ranks_of, shares, right):
        ratios.setdefault(rank, []).append(share / expected if expected else math.inf)
    if all(math.isclose(ratio, some[0], rel_tol=1e-3) for some in ratios.values() for ratio in some) and math.isclose(
            sum(1 / some[0] for some in ratios.values() if some[0]), len(ratios), rel_tol=1e-3):  # each rank's own denominator
        return {"id": "mean_of_rank_means", "sentence": "the samples of each rank have shares as if divided by that rank's part of the "
                "denominator, and are averaged"}
    few = ", ".join(f"{share:.3g} in place of {expected:.3g}" for share, expected in zip(shares[:4], right))
    return {"id": "samples_weighted_differently", "sentence": f"the gradient is made of the same samples in other shares, such as {few}: "
            "means or deviations are taken over another group of samples"}


# The same samples or targets, each as often as fits best.
def _fitted(parts: torch.Tensor, trials: Trials) -> list[tuple[float, float]] | None:
    """For each part, a row of its gradient, the weight with which it is in the gradient found, and the one with which it is in the right
    one; none where these gradients are not made of the parts."""
    def flat(gradient: Gradients) -> torch.Tensor:
        others = trials.others
        return torch.cat([(g.double() - (others[name] if others else 0)).flatten() for name, g in gradient.items()])

    both = torch.stack([flat(trials.found), flat(trials.right.gradients)], 1)
    weights = torch.linalg.lstsq(parts.T, both, rcond=1e-12, driver="gelsd").solution
    far = (parts.T @ weights - both).norm(dim=0)
    return weights.tolist() if bool((far <= trials.rounding(trials.right.gradients)).all()) else None


def _times(weights: Sequence[tuple[float, float]]) -> list[float]:
    """How many times each part counts of what it should; NaN where it is in neither."""
    least = 1e-6 * max(abs(weight) for pair in weights for weight in pair)
    times = [found / right if abs(right) > least else math.nan if abs(found) <= least else math.inf for found, right in weights]
    return [0.0 if abs(one) < 1e-5 else one for one in times]


def _same(times: Sequence[float]) -> bool:
    return all(math.isclose(one, times[0], rel_tol=1e-3, abs_tol=1e-5) for one in times)


def _usual(times: Sequence[float]) -> float:
    """The one that most have."""
    return max(times, key=lambda one: sum(_same([one, other]) for other in times))


def _few(each: Sequence[str]) -> str:
    return f"{'; '.join(each[:4])}{f' and {len(each) - 4} more' if len(each) > 4 else ''}"


OWN_BATCH = ("let each rank train the samples that it was given, each once: a sampler with `rank=dist.get_rank()`, no collective that replaces its "
             "batch or its gradient by another rank's, and nothing that fills up or cuts its batch")
OWN_NUMBER = ("divide the losses of every rank by one number, that of the whole step: `counted = isograd.TokenMean().count(targets)` before the first "
              "backward, `counted.scale(loss_sum).backward()`")
ALIKE = ("differentiate the losses of all micro-batches with one factor, that of the whole step: `(loss_sum * scale / denominator).backward()`, and "
         "divide by `scale` once, after the last one")
FACTOR = ("multiply each loss by what `loss` multiplies it by (the weight, advantage, ratio or reference of the same sample or token): "
          "`(losses * factor).sum()`")


def try_samples(trials: Trials, several: bool) -> None:
    """Samples, micro-batches or ranks that count more or less often than others. several: whole micro-batches have been tried."""
    term, keys = trials.terms[0], trials.keys()
    fits = bool(trials.right.shares) and len(keys) <= LARGEST_SHARES // (32 * sum(g.numel() for g in trials.found.values()))
    parts = trials.made([term], range(len(keys))) if fits else []
    weights = _fitted(torch.stack([torch.cat([g.flatten() for g in part.values()]) for part in parts]), trials) if parts else None
    if not weights:
        return
    counted = [(t, key, place) for t, key, (place, _) in zip(_times(weights), keys, trials.placed()) if not math.isnan(t)]  # others have no gradient
    times, keys, places = [t for t, _, _ in counted], [key for _, key, _ in counted], [place for _, _, place in counted]
    if _same(times):
        return
    one_cell = all(_same([t for t, key in zip(times, keys) if key == cell]) for cell in {*keys})
    if several and one_cell:
        return
    usual = _usual(times)
    for of, change in (("those of rank {}", OWN_BATCH), ("those of micro-batch {1} of each rank", ALIKE), ("those of micro-batch {1} on rank {0}", ALIKE)):
        groups = [of.format(*key) for key in keys]
        by_group = {group: [t for t, own in zip(times, groups) if own == group] for group in groups}
        if len(by_group) > 1 and all(map(_same, by_group.values())):
            whole = all(math.isclose(t, round(t), abs_tol=1e-3) for t in times)  # else ranks divide by numbers of their own
            what = OWN_NUMBER if change is OWN_BATCH and not whole else change
            told = [f"{group} count {some[0]:.4g} times" for group, some in by_group.items()]
            break
    else:
        odd = [i for i, t in enumerate(times) if not _same([t, usual])]
        if 2 * len(odd) < len(times) and usual:
            what, told = OWN_BATCH, [f"{places[i]} counts {times[i] / usual:.4g} times as often as most" for i in odd]
        else:
            what, told = FACTOR, [f"{place} counts {t:.4g} times" for place, t in zip(places, times)]
    trials.fitting.append((0.0, {"id": "samples_weighted_differently", "change": what, "sentence": "the gradient is made of the same samples, which "
                                 f"count more or less often than in `loss`: {_few(told)}"}))


ALL_TARGETS = ("leave out no target that `loss` has: shift labels once, of the whole document, before it is cut (`labels = document[1:]`), and mask "
               "what `loss` masks")
ALL_TERMS = ("differentiate each cross entropy that `loss` has, with its factor, as of both directions: "
             "`(F.cross_entropy(logits, wanted) + F.cross_entropy(logits.T, wanted)) / 2`")


class _EachTarget(_CrossEntropies):
    """Keeps the losses of cross entropies, one for each target."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[torch.Tensor] = []

    def other(self, given: inspect.BoundArguments) -> torch.Tensor:
        found = F.cross_entropy(*given.args, **given.kwargs)
        target, ignored = given.arguments["target"], given.arguments["ignore_index"]
        given.arguments["reduction"] = "none"
        losses = F.cross_entropy(*given.args, **given.kwargs).flatten()
        self.losses.extend(losses if target.is_floating_point() else losses[target.flatten() != ignored])
        return found


def try_each_target(trials: Trials) -> None:
    """Targets of a cross entropy that are left out, or count more or less often than others."""
    term, numbers = trials.terms[0], sum(g.numel() for g in trials.found.values())
    most = min(numbers // 4, LARGEST_SHARES // (32 * numbers), MOST_TARGETS)
    if most < 2 or not (term.whole or trials.right.shares):
        return
    model = trials.fresh()
    named = {plain_name(name): p for name, p in model.named_parameters()}
    trained = [named[name] for name in trials.found]
    dtype = trained[0].dtype
    samples = [(place, in_precision(sample, dtype)) for place, sample in trials.placed()]
    rows: list[torch.Tensor] = []
    places: list[str] = []
    for place, some in [("the batch", [sample for _, sample in samples])] if term.whole else samples:
        with _EachTarget() as seen:
            term.loss(model, [term.features(model, sample) for sample in some] if term.features else some)
        if not seen.losses or len(rows) + len(seen.losses) > most:
            return
        for loss in seen.losses:
            each = torch.autograd.grad(loss, trained, retain_graph=True, allow_unused=True)
            rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in zip(each, trained)]))
            places.append(place)
    weights = _fitted(torch.stack(rows), trials) if rows else None
    every = _times(weights) if weights else []
    if _same(own := [t for t in every if not math.isnan(t)]):
        return
    lost, odd, told = list[str](), False, list[str]()
    for place in dict.fromkeys(places):
        times = [t for t, of in zip(every, places) if of == place]
        counted = [t for t in times if not math.isnan(t)]
        usual = _usual([t for t in counted if t] or [0.0])
        missing = _stretches([i for i, t in enumerate(times) if t == 0], place) if usual else []
        lost += missing
        odd |= not _same([t for t in counted if t] or [0.0])
        if counted and _same(counted):
            told += [f"those of {place} {usual:.4g} times"] * (not _same([usual, 1.0]))
        else:
            for other in dict.fromkeys(f"{t:.4g}" for t in times if not math.isnan(t) and not _same([t, 1.0])):
                how = "although `loss` does not count it" if other == "inf" else f"{other} times"
                told += [f"{of} {how}" for of in _stretches([i for i, t in enumerate(times) if f"{t:.4g}" == other], place)]
    if lost and not odd:
        others = [t for t in own if t]
        more = f"; the others count {others[0]:.4g} times" if _same(others) and not _same([others[0], 1.0]) else ""
        finding: Finding = {"id": "other_targets", "sentence": f"targets are left out: {_few(lost)}{more}", "change": ALL_TERMS if term.whole else
                            ALL_TARGETS}
    else:
        finding = {"id": "samples_weighted_differently", "change": FACTOR, "sentence": "the gradient is made of the same targets, which count more or "
                   f"less often than in `loss`: {_few(told)}"}
    trials.fitting.append((0.0, finding))


def _stretches(numbers: Sequence[int], place: str) -> list[str]:
    found: list[list[int]] = []
    for number in numbers:
        if found and found[-1][-1] == number - 1:
            found[-1].append(number)
        else:
            found.append([number])
    return [f"target{'s' if len(some) > 1 else ''} {some[0]}{f' to {some[-1]}' if len(some) > 1 else ''} of {place}" for some in found]


def try_earlier(trials: Trials, earlier: Mapping[str, torch.Tensor]) -> None:
    if earlier:
        trials.line(trials.right.gradients, earlier, lambda times: {
            "id": "gradient_of_earlier_step", "sentence": f"the gradient is off by {times:.3g} times what it was when the step's first "
            "forward began"})


def try_terms(trials: Trials, gathers: bool) -> None:
    """One of several terms multiplied. gathers: features are gathered without their gradient, which scales theirs."""
    for i, term in enumerate(trials.terms if len(trials.terms) > 1 else ()):
        if gathers and term.whole:
            continue
        what = f"terms[{i - 1}]" if i else "loss"
        trials.line(trials.right.gradients, trials.step([term], trials.batch).gradients, lambda times: {
            "id": "term_scaled", "sentence": f"the gradient of {what} is {round(1 + times, 4) + 0.0:g} times what it should "  # noqa: B023
            "be, all others are right", "change": _term_as_declared(trials, term, what, 1 + times)})  # noqa: B023


def try_terms_of_ranks(trials: Trials) -> None:
    """One of several terms that are sums over samples has each rank's or micro-batch's own mean."""
    for i, term in enumerate(trials.terms if len(trials.terms) > 1 else ()):
        for name, keys, each, _ in _divisions(trials) if not term.whole else ():
            if alone := trials.made([term], keys):
                others = trials.step([other for j, other in enumerate(trials.terms) if j != i], trials.batch).gradients
                what = f"terms[{i - 1}]" if i else "loss"
                trials.line(others, _sum([(1 / len({*keys}), part) for part in alone]), lambda _: {
                    "id": name, "sentence": f"{what} alone: the mean over {each}, averaged; all other terms are right",  # noqa: B023
                    "change": f"sum {what} over samples too, and divide it by the count of all ranks and micro-batches: "  # noqa: B023
                    "`term_sum * dist.get_world_size() / count`"}, 1.0)


def _term_as_declared(trials: Trials, term: Term, what: str, times: float) -> str:
    own = "term" if what != "loss" else "loss"
    name = getattr(term.loss, "__name__", "<lambda>").replace("<lambda>", f"{what}.loss" if what != "loss" else "loss")
    value = f"`{name}(model, features)` of all samples" if term.whole else f"the sum of `{name}(model, sample)` over samples"
    ranks, off = len(trials.batch), ""
    if ranks > 1 and math.isclose(times, 1 / ranks, rel_tol=1e-3):
        off = f"; one over the ranks is missing where they are averaged: `{own} * dist.get_world_size()`"
    return f"add `{term.weight:g} * {own}` for {what}, where `{own}` is {value}, with the factors that the other terms have{off}"


def try_decay(trials: Trials, values: Mapping[str, torch.Tensor]) -> None:
    for what, least in (("all parameters", 0), ("all matrices", 2)):
        some = {name: value if value.dim() >= least else torch.zeros_like(value) for name, value in values.items()}
        trials.line(trials.right.gradients, some, lambda times: {
            "id": "weight_decay_in_gradient", "sentence": f"the gradient is off by {times:.3g} times {what}: a decay"})  # noqa: B023


# Another operation than a sum.
def try_reductions(trials: Trials) -> None:
    shares, ranks = trials.right.shares, range(len(trials.batch))
    if len(ranks) < 2 or not shares:
        return
    nothing = {name: torch.zeros_like(g) for name, g in trials.right.gradients.items()}
    by_rank = [_sum([(1.0, nothing), *((1.0, share) for (rank, _), share in shares.items() if rank == own)]) for own in ranks]
    for what, operation in (("largest", torch.amax), ("smallest", torch.amin), ("product", torch.prod)):
        way = {name: operation(torch.stack([part[name] for part in by_rank]), 0) for name in nothing}
        trials.line(None, way, lambda times: {
            "id": "other_reduction", "sentence": f"each element of the gradient is the {what} of the ranks' ones"  # noqa: B023
            f"{'' if math.isclose(times, 1, rel_tol=1e-3) else f', times {times:.4g}'}, and not their sum"} if times > 0 else None)


# Gradients that are lost in part.
class _UseDetached(TorchFunctionMode):
    """One use of a parameter passes no gradient on. which: its number; -1 none. uses: the names of the functions, in their order."""

    def __init__(self, parameter: torch.Tensor, which: int) -> None:
        super().__init__()
        self._parameter, self._which, self.uses = parameter, which, list[str]()

    def __torch_function__(self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Any = None) -> Any:
        found = function(*arguments, **(named or {}))
        given = [*arguments, *(named or {}).values()]
        if not any(value is self._parameter for value in given) or not any(tensor.requires_grad for tensor in tensors_in(found)):
            return found  # among others of its shape or type
        self.uses.append(function.__name__)
        if len(self.uses) - 1 != self._which:
            return found
        cut = [value.detach() if value is self._parameter else value for value in given]
        return function(*cut[:len(arguments)], **dict(zip(named or {}, cut[len(arguments):])))


def try_uses(trials: Trials) -> None:
    """A parameter that is used more than once, as a tied weight is, and has the gradient of all uses but one."""
    term = trials.terms[0]
    wrong = [name for name, right in trials.right.gradients.items() if not trials.is_near({"": right}, {"": trials.found[name]})]
    first = next((sample for micros in trials.batch for micro in micros for sample in micro), None)
    if len(wrong) != 1 or term.whole or first is None:
        return
    name, = wrong

    def used(model: nn.Module, sample: Any, which: int) -> tuple[Any, list[str]]:
        with _UseDetached({plain_name(own): p for own, p in model.named_parameters()}[name], which) as mode:
            return term.loss(model, sample), mode.uses

    model = trials.fresh()
    _, uses = used(model, in_precision(first, next(model.parameters()).dtype), -1)
    for which, function in enumerate(uses if 1 < len(uses) <= MOST_USES else ()):
        cut = dataclasses.replace(term, loss=lambda model, sample: used(model, sample, which)[0])  # noqa: B023
        trials.line(None, trials.step([cut, *trials.terms[1:]], trials.batch).gradients, lambda _: {
            "id": "gradient_lost", "sentence": f"of {len(uses)} uses of {name} in the forward one passes no gradient on: number "
            f"{which + 1}, by {function}"}, 1.0)  # noqa: B023


def try_rows(trials: Trials) -> None:
    """Rows of parameters that have no gradient."""
    left, lost = dict(trials.right.gradients), []
    for name, right in trials.right.gradients.items():
        if right.dim() == 0 or not right.numel():
            continue
        some, wanted = ((g != 0).reshape(len(g), -1).any(1) for g in (trials.found[name], right))
        if rows := (wanted & ~some).nonzero().flatten().tolist():
            left[name] = right.index_fill(0, torch.tensor(rows), 0.0)
            lost.append(f"row{'s' if len(rows) > 1 else ''} {', '.join(map(str, rows[:5]))}{' and more' if len(rows) > 5 else ''} of {name}")
    if lost:
        trials.line(None, left, lambda _: {
            "id": "gradient_lost", "sentence": f"{'; '.join(lost[:3])}{' and more' if len(lost) > 3 else ''}: no gradient there, where "
            "there should be one, and all others are right", "change": "let all rows have their gradient: take out what clears some of "
            "them (`register_hook`, `padding_idx=`), or leave them out of the loss in `loss` too"}, 1.0)


# Another denominator, and another mean.
def try_denominators(trials: Trials) -> None:
    """Counts of padding, of all tokens or of samples, where a count of targets was to be."""
    term, shares = trials.terms[0], trials.right.shares
    if len(trials.terms) > 1 or term.whole or term.mean != "token" or not shares:
        return
    model = trials.fresh()
    sizes = {cell: [_sizes_of(model, term.loss, sample) for sample in trials.batch[cell[0]][cell[1]]] for cell in shares}
    most = [max((size[i] for some in sizes.values() for size in some), default=0) for i in range(3)]
    counts: dict[str, dict[tuple[int, int], float]] = {}
    for what, of in (("targets, padding included", lambda some: len(some) * max(size[1] for size in some)),
                     ("tokens, padding included", lambda some: len(some) * max(size[2] for size in some)),
                     ("targets, all padded to the longest of the step", lambda some: len(some) * most[1]),
                     ("tokens, all padded to the longest of the step", lambda some: len(some) * most[2]),
                     ("targets, those included that are ignored", lambda some: sum(size[1] for size in some)),
                     ("tokens, those included that are no target", lambda some: sum(size[2] for size in some)), ("samples", len)):
        count = {cell: float(of(some)) if some else 0.0 for cell, some in sizes.items()}
        if all(trials.right.counts[rank][j] == count[rank, j] for rank, j in count) or count in counts.values():
            continue
        counts[what] = count
    right = {cell: trials.right.counts[cell[0]][cell[1]] for cell in shares}
    targets, ranks = sum(right.values()), len(trials.batch)
    own = [sum(1 for cell in shares if cell[0] == rank) for rank in range(ranks)]
    for what, count in counts.items():
        by_rank = [sum(n for cell, n in count.items() if cell[0] == rank) for rank in range(ranks)]
        whole = sum(by_rank)
        for how, weights in (
                (f"divided by {whole:g}, the number of {what}", {cell: targets / whole for cell in shares}),
                (f"each rank's losses are divided by its own number of {what}, then averaged over ranks",
                 {cell: targets / max(by_rank[cell[0]], 1) / ranks for cell in shares}),
                (f"each rank's losses are divided by its own number of {what}", {cell: targets / max(by_rank[cell[0]], 1) for cell in shares}),
                (f"each micro-batch's losses are divided by its own number of {what}, then averaged",
                 {cell: targets / max(count[cell], 1) / own[cell[0]] / ranks for cell in shares})):
            trials.line(None, _sum([(weights[cell], share) for cell, share in shares.items()]), lambda _: {
                "id": "other_denominator", "sentence": f"{how}; there are {targets:g} targets"}, 1.0)  # noqa: B023


def try_means(trials: Trials) -> None:
    term = trials.terms[0]
    other = {"token": "sample", "sample": "token"}.get(str(term.mean))
    if other is None or term.whole:
        return
    said = "each sample's own mean counts the same" if other == "sample" else "each token counts the same"
    step = trials.step([dataclasses.replace(term, mean=other), *trials.terms[1:]], trials.batch)
    trials.line(None, step.gradients, lambda _: {
        "id": "other_mean", "sentence": f"{said}; the mean that was declared is that of each {term.mean}"}, 1.0)


# Other targets in a cross entropy.
class _OtherTargets(_CrossEntropies):
    """Changes the targets of cross entropies; `count`: by how many. tokens: of the sample, as they are embedded."""

    def __init__(self, which: str) -> None:
        super().__init__()
        self.which, self.count, self.tokens, self.targets = which, 0, torch.empty(0), torch.empty(0)
        self.sums: list[torch.Tensor] = []  # of each one's losses
        self.valid = 0  # targets of all

    def __torch_function__(self, function: Any, types: Any, arguments: Any = (), named: Any = None) -> Any:
        if function is F.embedding and not self.tokens.numel():
            self.tokens = arguments[0].detach()
        return super().__torch_function__(function, types, arguments, named)

    def other(self, given: inspect.BoundArguments) -> torch.Tensor:
        target, ignored = given.arguments["target"], given.arguments["ignore_index"]
        if target.is_floating_point() and self.which:
            raise _NotTried
        if target.is_floating_point():
            return F.cross_entropy(*given.args, **given.kwargs)
        self.targets = target
        if self.which == "smooth":
            given.arguments["label_smoothing"] = 1.0
        elif self.which:
            other = _changed(target, self.which, ignored, self.tokens)
            self.count += int((other != ignored).sum()) - int((target != ignored).sum())
            given.arguments["target"] = target = other
        self.valid += int((target != ignored).sum())
        losses = F.cross_entropy(*given.args, **given.kwargs)
        self.sums.append(losses.sum() if given.arguments["reduction"] != "mean" else losses * (target != ignored).sum())
        return losses


def _changed(target: torch.Tensor, which: str, ignored: int, tokens: torch.Tensor) -> torch.Tensor:
    valid = target != ignored
    if which == "next":
        return torch.cat([target[..., 1:], torch.full_like(target[..., :1], ignored)], -1)
    if which.endswith("own"):
        first = torch.full_like(target[..., :1], ignored)
        if which != "later own" and bool(valid.all()) and tokens.numel() >= target.numel():
            first = tokens.reshape(-1)[:1].expand_as(first)
        return torch.cat([first, target[..., :-1] if which == "own" else target], -1)
    if which == "after padding":
        other = torch.full_like(target, ignored).flatten()
        other[0] = tokens.flatten()[1]
        return other.reshape(target.shape)
    if which == "ignored":
        if bool(valid.all()):
            return target
        if tokens.numel() not in (target.numel(), target.numel() + 1):
            raise _NotTried
        following = torch.cat([tokens.flatten()[1:], target.flatten()[-1:]])[:target.numel()]
        return torch.where(valid, target, following.reshape(target.shape).to(target.dtype))
    places = valid.flatten().nonzero().flatten()
    if not len(places):
        return target
    other = target.flatten().clone()
    other[places[0] if which == "first" else places[-1]] = ignored
    return other.reshape(target.shape)


@contextlib.contextmanager
def _one_token_more(model: nn.Module, seen: _OtherTargets) -> Iterator[None]:
    """The model is given the sample's last token too, which it was not to predict anything from."""
    def longer(_: nn.Module, arguments: Any, named: Any) -> Any:
        tokens = [seen.tokens]

        def more(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.shape != seen.tokens.shape:
                return value
            last = (seen.targets if tokens and seen.targets.flatten()[-1:].ge(0).all() else value).flatten()[-1:]
            tokens.clear()
            return torch.cat([value, last.to(value.dtype).expand_as(value[..., :1])], -1)

        return tuple(map(more, arguments)), {name: more(value) for name, value in named.items()}

    hook = model.register_forward_pre_hook(longer, with_kwargs=True)
    try:
        yield
    finally:
        hook.remove()


def _retargeted(loss: Loss, which: str) -> Loss:
    def changed(model: nn.Module, sample: Any) -> tuple[torch.Tensor, int]:
        longer = which in ("all own", "later own")
        seen = _seen(model, loss, sample) if longer else _OtherTargets("")
        with contextlib.ExitStack() as undo:
            if longer:
                undo.enter_context(_one_token_more(model, seen))
            other = undo.enter_context(_OtherTargets(which))
            try:
                found = loss(model, sample)
            except Exception:  # as it may where it selects among the losses
                if not other.sums:
                    raise
                found = torch.full((), math.nan)
        value, count = found if isinstance(found, tuple) else (found, found.numel())
        if other.sums:
            total = torch.stack(other.sums).sum()
            same = math.isclose(float(value.sum()), float(total), rel_tol=EXACT)
            if same or which in ("ignored", "after padding") or _is_sum(model, loss, sample):
                return total, other.valid
        if not bool(value.isfinite().all()):
            raise _NotTried
        if not other.targets.numel():  # of losses of another kind the first or the last can be left out
            if which not in ("first", "last") or isinstance(found, tuple) or count < 1:
                raise _NotTried
            return (value.flatten()[1:] if which == "first" else value.flatten()[:-1]).sum(), count - 1
        if isinstance(found, tuple) or not longer:
            count += other.count
        elif which == "later own":  # the others are as many as there are
            count -= 1
        return value.sum(), count

    return changed


def _is_sum(model: nn.Module, loss: Loss, sample: Any) -> bool:
    """Whether the loss is the sum over all targets of its cross entropies, though it may select among them."""
    with torch.no_grad(), _OtherTargets("") as seen:
        found = loss(model, sample)
    value = found[0] if isinstance(found, tuple) else found
    return math.isclose(float(value.sum()), float(torch.stack(seen.sums).sum()), rel_tol=EXACT)


def _seen(model: nn.Module, loss: Loss, sample: Any) -> _OtherTargets:
    with torch.no_grad(), _OtherTargets("") as seen:
        loss(model, sample)
    return seen


def _sizes_of(model: nn.Module, loss: Loss, sample: Any) -> tuple[int, int, int]:
    """How many targets count, how many there are with those that are ignored, and how many tokens."""
    dtype = next(model.parameters()).dtype
    with torch.no_grad(), _OtherTargets("") as seen:
        found = loss(model, in_precision(sample, dtype))
    count = int(found[1]) if isinstance(found, tuple) else found.numel()
    positions = seen.targets.numel() or count
    return count, positions, max(seen.tokens.numel(), positions + 1) if seen.tokens.numel() else positions


TARGETS = {
    "next": "each token has to predict the one after the next: labels are shifted twice",
    "own": "each token has to predict itself: labels are not shifted",
    "all own": "each token has to predict itself, the last one too: labels are not shifted",
    "later own": "each token but the first has to predict itself: labels are not shifted",
    "ignored": "targets that `loss` ignores carry loss: prompts or padding",
    "first": "the first target of each sample is left out", "last": "the last target of each sample is left out",
    "first of all": "the first target of each micro-batch is left out", "last of all": "the last target of each micro-batch is left out"}
SHIFT = {"change": "let each token predict the one after it, and shift labels nowhere else: `F.cross_entropy(model(tokens[:-1]), tokens[1:], "
         "reduction=\"none\")` of each document, or of rows `logits[:, :-1]` with `labels[:, 1:]`; and count these targets alone"}
IGNORE = {"change": "leave out what `loss` leaves out, of prompts and padding: `labels.masked_fill(ignored, -100)`; and count the other targets "
          "alone"}
TO_CHANGE = {**dict.fromkeys(("next", "own", "all own", "later own"), SHIFT), "ignored": IGNORE}


def _with_targets(trials: Trials, which: str) -> Reference:
    """The step of the first term with such targets: of all samples, or of the one that each micro-batch begins or ends with."""
    term = trials.terms[0]
    which, _, of_one = which.partition(" of ")
    other, place = _retargeted(term.loss, which), -1 if which == "last" else 0
    changes = [[[not of_one or sample is micro[place] for sample in micro] for micro in micros] for micros in trials.batch]
    return _placed(trials, changes, lambda model, pair: (other if pair[1] else term.loss)(model, pair[0]))


def try_targets(trials: Trials) -> None:
    term = trials.terms[0]
    if term.whole or term.mean == "weighted":
        return
    trials.trying(*(functools.partial(_try_target, which=which) for which in TARGETS), _try_smoothing)


def _try_target(trials: Trials, which: str) -> None:
    step = _with_targets(trials, which)

    def say(times: float) -> Finding | None:
        if not times > 0:
            return None
        count = step.targets if trials.terms[0].mean == "token" else None
        other = count is not None and abs(1 - times) > 1e-3
        return {"id": "other_targets", "sentence": TARGETS[which] + (
            f"; their {count} losses are divided by {(count or 0) / times:.6g}" if other else ""), **TO_CHANGE.get(which, {})}

    trials.line(trials.others, step.gradients, say)


def _try_smoothing(trials: Trials) -> None:
    step = _with_targets(trials, "smooth")
    smooth = _sum([(1.0, step.gradients), *([(1.0, trials.others)] if trials.others is not None else []), (-1.0, trials.right.gradients)])
    trials.line(trials.right.gradients, smooth, lambda times: {
        "id": "other_targets", "sentence": f"labels are smoothed by {times:.4g} more than those of `loss`" if times > 0 else
        f"labels are not smoothed, and those of `loss` are, by {times / (times - 1):.4g}",
        "change": "leave `label_smoothing=` out of the step, or give it to `loss` as well" if times > 0 else "smooth labels in the step as in "
        f"`loss`: `F.cross_entropy(logits, labels, label_smoothing={times / (times - 1):.4g})`, or leave it out there"}
        if times < 1 else None)


# Samples that are computed next to others: in a pack, or next to padding.
class _Positions(TorchFunctionMode):
    """`torch.arange` over all positions gives these."""

    def __init__(self, positions: torch.Tensor) -> None:
        super().__init__()
        self._positions, self._plain = positions, torch.arange(len(positions))

    def __torch_function__(self, function: Any, types: Any, arguments: tuple[Any, ...] = (), named: Any = None) -> Any:
        found = function(*arguments, **(named or {}))
        return self._positions.to(found) if function is torch.arange and torch.equal(found, self._plain.to(found)) else found


@contextlib.contextmanager
def _next_to(model: nn.Module, tokens: torch.Tensor, before: torch.Tensor, after: torch.Tensor, of_before: bool = False) -> Iterator[None]:
    """The model is given other tokens before and after a sample's, and what it gives of these is left out. of_before: as much of its
    end is left out in place of what it gives of those before."""
    size = tokens.shape[-1]

    def longer(_: nn.Module, arguments: Any, named: Any) -> Any:
        left = [(before, after)]  # of the tokens; masks and the like go on as they begin

        def more(value: Any) -> Any:
            if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.shape != tokens.shape:
                return value
            around = left.pop() if left else [value[..., :1].expand(*value.shape[:-1], len(some)) for some in (before, after)]
            first, last = (some.to(value).expand(*value.shape[:-1], -1) for some in around)
            return torch.cat([first, value, last], -1)

        return tuple(map(more, arguments)), {name: more(value) for name, value in named.items()}

    def own(_: nn.Module, __: Any, found: Any) -> Any:
        whole = len(before) + size + len(after)
        first = 0 if of_before else len(before)
        return mapped(found, lambda tensor: tensor.narrow(-2, first, size) if tensor.dim() > 1 and tensor.shape[-2] == whole else tensor)

    hooks = [model.register_forward_pre_hook(longer, with_kwargs=True), model.register_forward_hook(own)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _try_places(trials: Trials, places: Sequence[Sequence[Sequence[Any]]], finding: Finding) -> None:
    """places: of each sample (its tokens, those before it, those after it, all positions or None)."""
    term = trials.terms[0]

    def loss(model: nn.Module, placed: Any) -> Any:
        sample, (tokens, before, after, positions) = placed
        with _next_to(model, tokens, before, after), contextlib.nullcontext() if positions is None else _Positions(positions):
            return term.loss(model, sample)

    trials.line(trials.others, _placed(trials, places, loss).gradients, lambda _: finding, 1.0)


def _placed(trials: Trials, places: Sequence[Sequence[Sequence[Any]]], loss: Loss) -> Reference:
    """The step of the first term with such a loss of (sample, its place)."""
    batch = [[[*zip(micro, some)] for micro, some in zip(micros, of)] for micros, of in zip(trials.batch, places)]
    return trials.step([dataclasses.replace(trials.terms[0], loss=loss)], batch)


NONE = torch.empty(0, dtype=torch.long)
ALONE = ("let each document see itself alone: "
         "`sees = (document[:, None] == document) & torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()`")
FROM_0 = "let positions begin at 0 in each document: `positions = torch.cat([torch.arange(len(document)) for document in pack])`"
REAL = ("give the model the mask of what is no padding: `model(tokens, attention_mask=real)`; where it is of pairs of "
        "tokens: `sees = sees & real[:, None] | torch.eye(length, dtype=torch.bool)`")
FROM_FIRST = "let positions begin at each row's first token: `positions = (real.cumsum(-1) - 1).clamp(min=0)`"


def try_packs(trials: Trials) -> None:
    """Each micro-batch is one pack of its samples, which see those before them, or stand at positions that run on."""
    if trials.terms[0].whole or not any(len(micro) > 1 for micros in trials.batch for micro in micros):
        return

    def documents(some: Sequence[_OtherTargets]) -> list[torch.Tensor]:
        """All tokens of each: the last one may be a target alone."""
        found = []
        for one in some:
            tokens, last = one.tokens.flatten(), one.targets.flatten()[-1:]
            found.append(torch.cat([tokens, last]) if one.targets.numel() == len(tokens) and bool(last.ge(0).all()) else tokens)
        return found

    def placed(sees: bool, runs_on: bool) -> list[list[list[Any]]]:
        found: list[list[list[Any]]] = [[[] for _ in micros] for micros in trials.seen]
        for micros, places in zip(trials.seen, found):
            for some, to in zip(micros, places):
                earlier: list[torch.Tensor] = []
                for one, document in zip(some, documents(some)):
                    size, before = one.tokens.shape[-1], torch.cat([NONE, *earlier])
                    positions = [*(torch.arange(len(other)) for other in earlier), torch.arange(size)]
                    to.append((one.tokens, before if sees else NONE, NONE, None if sees and runs_on else torch.cat(positions) if sees else
                               len(before) + torch.arange(size)))
                    earlier.append(document)
        return found

    for sees, runs_on, what in ((True, False, "see those before them in the pack"), (False, True, "have positions that run on through the pack"),
                                (True, True, "see those before them in the pack, and have positions that run on through it")):
        trials.trying(functools.partial(_try_places, places=placed(sees, runs_on), finding={
            "id": "documents_leak", "sentence": f"documents of a micro-batch {what}",
            "change": "; ".join([ALONE] * sees + [FROM_0] * runs_on)}))


def try_positions_of_parts(trials: Trials) -> None:
    """Each of the ranks that share a sample has a part of its tokens, and counts positions from its own first one."""
    if trials.terms[0].whole or trials.peers < 2:
        return
    places = [[[(one.tokens, NONE, NONE, torch.arange(one.tokens.shape[-1]) % -(-one.tokens.shape[-1] // trials.peers)) for one in some]
               for some in micros] for micros in trials.seen]
    _try_places(trials, places, {
        "id": "documents_leak", "sentence": f"positions begin at 0 in each of the {trials.peers} parts into which ranks cut a sample",
        "change": "let positions run on from one rank's part to the next one's: `first + torch.arange(len(part))`"})


def try_padding(trials: Trials) -> None:
    """The samples of a micro-batch stand in rows of one length, and see what fills these; or it predicts their first tokens."""
    if trials.terms[0].whole:
        return
    missing = [[[max(one.tokens.shape[-1] for one in some) - own.tokens.shape[-1] for own in some] for some in micros] for micros in trials.seen]
    if not any(number for micros in missing for some in micros for number in some):
        return
    model = trials.fresh()
    fillings = [0, getattr(getattr(model, "config", None), "pad_token_id", None), *(getattr(module, "padding_idx", None) for module in model.modules())]
    for filling in dict.fromkeys(number for number in fillings if isinstance(number, int)):
        each = [[[(one.tokens, torch.full((number,), filling)) for one, number in zip(*of)] for of in zip(*micros)]
                for micros in zip(trials.seen, missing)]
        for left, runs_on in ((True, False), (True, True), (False, True)):
            trials.trying(functools.partial(_try_places, finding={
                "id": "padding_seen", "sentence": f"tokens see the padding, {filling}, that stands {'before' if left else 'after'} them",
                "change": "; ".join([REAL, *[FROM_FIRST] * (left and runs_on)])},
                places=[[[(tokens, *((more, NONE) if left else (NONE, more)), None if runs_on else
                           torch.cat([0 * more, torch.arange(tokens.shape[-1])])) for tokens, more in some] for some in micros] for micros in each]))
        trials.trying(functools.partial(_try_first_tokens, places=each))


def _try_first_tokens(trials: Trials, places: Sequence[Sequence[Sequence[Any]]]) -> None:
    """Targets that `loss` ignores carry loss, also the first token of each row that is filled up before it. places: of each sample its
    tokens and what fills up its row."""
    term = trials.terms[0]
    all_targets, first = _retargeted(term.loss, "ignored"), _retargeted(term.loss, "after padding")

    def loss(model: nn.Module, placed: Any) -> Any:
        sample, (tokens, more) = placed
        value, count = all_targets(model, sample)
        if len(more):
            with _next_to(model, tokens, more[-1:], NONE, of_before=True):
                other, one = first(model, sample)
            value, count = value + other, count + one
        return value, count

    trials.line(trials.others, _placed(trials, places, loss).gradients, lambda times: {
        "id": "other_targets", "sentence": f"{TARGETS['ignored']}, and the first token of rows that are filled up before it, which "
        f"padding has to predict{'' if math.isclose(times, 1, rel_tol=1e-3) else f'; times {times:.4g}'}", **IGNORE} if times > 0 else None)


# Random numbers of the run.
def try_noise(trials: Trials, drawn: Sequence[Sequence[torch.Tensor]]) -> None:
    """Each sample with the random numbers that its forward in the run drew, where there was one for each."""
    term = trials.terms[0]
    samples = [[sample for micro in micros for sample in micro] for micros in trials.batch]
    if term.whole or not drawn or [*map(len, drawn)] != [*map(len, samples)]:
        return
    left = [iter(states) for states in drawn]

    def loss(model: nn.Module, placed: Any) -> Any:
        sample, state = placed
        hook = model.register_forward_pre_hook(lambda *_: torch.set_rng_state(state), prepend=True)
        try:
            return term.loss(model, sample)
        finally:
            hook.remove()

    places = [[[next(states) for _ in micro] for micro in micros] for states, micros in zip(left, trials.batch)]
    trials.line(trials.others, _placed(trials, places, loss).gradients, lambda _: {
        "id": "noise_depends_on_layout", "sentence": "with the random numbers that each forward of the run drew, in place of those of `loss`, "
        "all is right: they are not those of the sample", "change": "seed with the sample alone, in the step as in `loss`: "
        "`torch.manual_seed(sample.id)` before its forward; or switch off what draws: `dropout.eval()`"}, 1.0)


# Logits in a coarser type.
class _Cast(_CrossEntropies):
    """Cross entropies take their logits in another type, and are computed in it, or in the one that logits had."""

    def __init__(self, dtype: torch.dtype, back: bool) -> None:
        super().__init__()
        self._dtype, self._back = dtype, back

    def other(self, given: inspect.BoundArguments) -> torch.Tensor:
        logits = given.arguments["input"]
        other = logits.to(self._dtype)
        given.arguments["input"] = other.to(logits.dtype) if self._back else other
        losses: torch.Tensor = F.cross_entropy(*given.args, **given.kwargs)
        return losses.to(logits.dtype)


def try_casts(trials: Trials) -> None:
    """Logits are made coarser before the loss. What is rounded after it in the run is not known, so that the gradient itself is not
    to be made: the difference has to lie along the one that this makes, of which no other cause knows, and to be as large."""
    term, right = trials.terms[0], trials.right.gradients

    def split(gradient: Gradients) -> tuple[float, Gradients]:
        """The multiple of the right gradient in it, and the rest."""
        multiple = dot(gradient, right) / max(trials.right.norm**2, 1e-300)
        return multiple, _sum([(1.0, gradient), (-multiple, right)])

    if sum(g.numel() for g in right.values()) < FEWEST_ELEMENTS:
        return
    multiple, off = split(trials.found)
    for dtype, back in ((dtype, back) for dtype in (torch.bfloat16, torch.float16) for back in (True, False)):
        unit = torch.finfo(dtype).eps / 2
        if term.whole or unit <= 8 * trials.unit or abs(multiple - 1) > MOST_UNITS * unit or norm_of(off) > MOST_UNITS * unit * trials.right.norm:
            continue

        def loss(model: nn.Module, sample: Any) -> Any:
            with _Cast(dtype, back):  # noqa: B023
                return term.loss(model, sample)

        cast = trials.step([dataclasses.replace(term, loss=loss), *trials.terms[1:]], trials.batch).gradients
        _, other = split(cast)
        cosine = dot(off, other) / max(norm_of(off) * norm_of(other), 1e-300)
        if cosine >= ALONG and 0.5 <= norm_of(off) / norm_of(other) <= 2.0:
            name = str(dtype).removeprefix("torch.")
            trials.fitting.append((norm_of(_sum([(1.0, trials.found), (-1.0, cast)])), {
                "id": "rounding", "sentence": f"logits are made {name} before the loss: the gradient is off as that rounding makes it "
                f"(cosine {cosine:.3f} of the difference)", "change": "take the loss of logits in the type of the run: "
                "`F.cross_entropy(logits.float(), targets)`, with no `.bfloat16()` or `.half()` before it"}))
