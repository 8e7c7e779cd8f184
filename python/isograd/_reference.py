"""The whole step on one process, sample after sample: what a run is compared with. Shares no code with the means."""
from __future__ import annotations

import contextlib
import dataclasses
from typing import Any, Callable, Mapping, NoReturn, Sequence, Union

import torch
from torch import nn

from . import _random
from ._assemble import gradient_of, plain_name
from ._checks import too_large
from ._errors import refuse
from ._samples import in_precision

Loss = Callable[[nn.Module, Any], Union[torch.Tensor, tuple[torch.Tensor, int]]]
Mean = Union[str, float]
LARGEST_SHARES = 1 << 30  # bytes of all micro-batches' gradients; above it only their sum is kept


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


def set_modes(model: nn.Module, training: bool, others: Mapping[str, bool]) -> nn.Module:
    """`model` in the modes of the one that is trained: in one of them but for `others`, by name."""
    model.train(training)
    for name, module in model.named_modules():
        module.training = others.get(plain_name(name), training)
    return model


def one_process(model: nn.Module, loss: Loss, dealt: Sequence[Sequence[Sequence[Any]]], mean: Mean,
                dtype: torch.dtype, autocast: torch.dtype | None = None, shares: bool = True,
                after_each: Callable[[], None] = lambda: None, own: torch.dtype | None = None) -> Reference:
    """`dealt`: [rank][micro-batch] -> samples; after_each: called after each. The model's gradients are left empty.

    Each sample begins with the same states of all generators, which the caller keeps. own: the precision of the run that the
    step is the reference of: a random loss is refused, for which the first sample is made twice, and the first that draws.
    """
    model = model.to(dtype)
    named = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    cells = [(rank, j) for rank, micros in enumerate(dealt) for j in range(len(micros))]
    shares = shares and len(cells) * sum(p.nbytes for p in named.values()) <= LARGEST_SHARES
    parts: dict[tuple[int, int], dict[str, torch.Tensor]] = {}
    total: dict[str, torch.Tensor] = {}
    counts = [[0] * len(micros) for micros in dealt]
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
        for sample in dealt[rank][j]:
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
    """Of one sample: the sum of its losses, and over how many targets."""
    try:
        with torch.autocast("cpu", autocast) if autocast else contextlib.nullcontext():
            found = loss(model, in_precision(sample, dtype))
    except Exception as error:
        _failed(error, model, loss, sample, dtype, own)
    value, count = found if isinstance(found, tuple) else (found, found.numel())
    if isinstance(value, torch.Tensor) and dtype == torch.float64 and value.dtype != torch.float64:
        refuse("isograd.prove", f"a loss in {value.dtype} of a model in fp64", "the whole step in fp64, for the reference",
               "Take out the conversion (.float(), torch.float32) on the way, or give reference=torch.float32")
    if not isinstance(value, torch.Tensor) or not isinstance(count, int) or count < 0:
        refuse("isograd.prove", f"the loss of a sample as {type(value).__name__} and a count {count!r}",
               "its losses, one for each target; or their sum and how many there are",
               'Take reduction="none" at the valid targets')
    if not isinstance(found, tuple) and value.dim() == 0:
        refuse("isograd.prove", "the loss of a sample as one number, which may be a mean: divided already",
               "its losses, one for each target; or their sum and how many there are",
               'Take reduction="none" at the valid targets, or return (losses.sum(), n)')
    if isinstance(found, tuple) and value.numel() != 1:
        refuse("isograd.prove", f"a sum of losses of shape {tuple(value.shape)}", "a single number", "Return (losses.sum(), n)")
    if count and not value.requires_grad:
        refuse("isograd.prove", "a loss that no parameter has a part in", "one to differentiate",
               "Compute it from the model that `loss` is given, without no_grad")
    return value.sum(), count


def _failed(error: Exception, model: nn.Module, loss: Loss, sample: Any, dtype: torch.dtype, own: torch.dtype | None) -> NoReturn:
    """Says what `loss` or its derivative raised; that fp64 is the cause where the sample can be made in the run's precision."""
    if too_large(error):
        refuse("isograd.prove", f"a sample whose forward does not fit in one process beside the model: {error}",
               "memory for one sample at a time", "Watch shorter samples, or checkpoint activations in the model")
    said = f"{type(error).__name__}: {error}"
    if dtype == torch.float64 and own not in (None, dtype):
        runs = False
        with contextlib.suppress(Exception):
            found = loss(model.to(own), in_precision(sample, own))
            (found[0] if isinstance(found, tuple) else found.sum()).backward()
            runs = True
        if runs:
            refuse("isograd.prove", f"a model or loss that does not run in fp64: {said}",
                   "the whole step in fp64, for the reference", "Convert "
                   "to the dtype of the parameters where it converts to fp32, or give reference=torch.float32")
    refuse("isograd.prove", f"an exception in the loss of a sample: {said}", "its losses, one for each target",
           "Look at its traceback (above, on rank 0): `loss` is called there alone, with a plain copy of the model and each "
           "sample, on the CPU")
