"""The generators that a step may draw from, and whether one process's loss depends on them.

A reference that draws (dropout in whatever form, noise, layers that are left out) differs each time. Its noise would look
like rounding, and mistakes that hide in it would pass.
"""
from __future__ import annotations

import contextlib
import dataclasses
import math
import pickle
import random
import sys
from typing import Any, Callable, Iterator, Mapping, NoReturn

import torch
from torch import nn

from ._ranks import gradient_of, plain_name, refuse

CURE = "Switch off for this step what draws (p = 0, or eval() on that module), or seed it with the sample, in `loss` and in the step"
States = dict[str, Any]
TRIES = 64  # of a loss that draws without showing it: what is drawn may seldom have an effect (a layer left out in 1 of 20)


def _numpy() -> Any:
    return sys.modules.get("numpy.random")  # where nothing imported it, nothing draws from it


def _devices() -> Any:
    """PyTorch's module of the accelerator, where it is in use."""
    if not torch.accelerator.is_available():
        return None
    module = torch.get_device_module(torch.accelerator.current_accelerator())
    return module if getattr(module, "is_initialized", lambda: True)() else None


def states() -> States:
    """States of the generators that everything draws from unless it has its own, by name."""
    found: States = {"torch": torch.get_rng_state(), "Python's random": random.getstate()}
    if numpy := _numpy():
        found["numpy.random"] = numpy.get_state()
    if devices := _devices():
        every = hasattr(devices, "get_rng_state_all")
        found[devices.__name__] = devices.get_rng_state_all() if every else devices.get_rng_state()
    return found


def restore(to: States) -> None:
    """Generators that came into use since `to` was taken keep their state."""
    torch.set_rng_state(to["torch"])
    random.setstate(to["Python's random"])
    if "numpy.random" in to:
        _numpy().set_state(to["numpy.random"])
    if (devices := _devices()) and devices.__name__ in to:
        every = hasattr(devices, "set_rng_state_all")
        (devices.set_rng_state_all if every else devices.set_rng_state)(to[devices.__name__])


def seed(number: int) -> None:
    """Seeds all of them; not by torch.manual_seed, which would also seed a device that comes into use later."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    if numpy := _numpy():
        with contextlib.suppress(TypeError):  # a bit generator of the user's own, which cannot be seeded again
            numpy.seed(number)
    if devices := _devices():
        getattr(devices, "manual_seed_all", devices.manual_seed)(number)


def moved(before: States, after: States) -> list[str]:
    """Names of the generators whose state is another one."""
    return [name for name, state in before.items() if not _same(state, after[name])]


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, list):
        return all(map(_same, one, other))
    return one == other if isinstance(one, tuple) and one and isinstance(one[0], int) else pickle.dumps(one) == pickle.dumps(other)


@contextlib.contextmanager
def kept() -> Iterator[None]:
    """All states are afterwards what they were before."""
    before = states()
    try:
        yield
    finally:
        restore(before)


class Draws:
    """Which generators move while a model's forward runs. first: the innermost module that drew first. began: the states of torch's
    own, on the CPU, with which forwards that drew began; of the first `keeps`."""

    def __init__(self, keeps: int = 0) -> None:
        self.names: set[str] = set()
        self.first = ""
        self.began: list[torch.Tensor] = []
        self._keeps = keeps
        self._before: list[States] = []

    @contextlib.contextmanager
    def of(self, modules: dict[str, nn.Module]) -> Iterator[Draws]:
        with contextlib.ExitStack() as undo:
            for name, module in modules.items():
                undo.callback(module.register_forward_pre_hook(self._begins, prepend=True).remove)
                undo.callback(module.register_forward_hook(self._ended(name)).remove)
            yield self

    def _begins(self, *_: Any) -> None:
        if not torch.compiler.is_compiling():
            self._before.append(states())

    def _ended(self, name: str) -> Callable[..., None]:
        def ended(module: nn.Module, *_: Any) -> None:
            if torch.compiler.is_compiling() or not self._before:
                return
            before = self._before.pop()
            drew = moved(before, states())
            self.names.update(drew)
            if drew and len(self.began) < self._keeps:
                self.began.append(before["torch"])
            if drew and not self.first:
                self.first = f"{plain_name(name) or 'the model'} ({type(module).__name__})"

        return ended


def apart(ones: Mapping[str, torch.Tensor], others: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """By name how far two tensors are apart, of the first one's norm: infinity where one is not finite and the other is not
    the same there. A tensor that is next to nothing, so that its rounding may be another one, is held to a thousandth of the
    typical element of all."""
    found = {}
    for name, one in ones.items():
        one, other = one.detach().double(), others[name].detach().double()
        off, size = float((one - other).norm()), float(one.norm())
        if not math.isfinite(off + size):
            finite = one.isfinite() & other.isfinite()
            alike = torch.equal(*(part[~finite].nan_to_num(1.0, 2.0, -2.0) for part in (one, other)))
            off, size = float((one[finite] - other[finite]).norm()) if alike else math.inf, float(one[finite].norm())
        found[name] = off, size, one.numel()
    typical = math.sqrt(sum(size * size for _, size, _ in found.values()) / max(sum(count for *_, count in found.values()), 1))
    return {name: off / max(size, 1e-3 * typical * math.sqrt(count), 1e-300) for name, (off, size, count) in found.items()}


@dataclasses.dataclass
class Made:
    """A sample's loss, made from these states of all generators. gradients: by name; None: only the loss is compared."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor] | None
    drew: list[str]  # generators
    after: States


def check_repeats(model: nn.Module, make: Callable[[], torch.Tensor], dtype: torch.dtype, first: Made | None = None,
                  values: list[torch.Tensor] | None = None) -> list[str]:
    """Refuses a loss of one sample that is not the same when it is made again. The generators that it draws from.

    make: the sample's loss, of `model`, not yet differentiated. Each time it begins with the same buffers (values, if they are
    given) and with other states of all generators. The model's gradients are left empty, its buffers as they are. first: as it was
    made from `values` and seed 0, so that it is made once more only.
    """
    left = [buffer.clone() for buffer in model.buffers()]
    named = {plain_name(name): p for name, p in model.named_parameters() if p.requires_grad}
    allowed = 1e-10 if dtype == torch.float64 else 256 * torch.finfo(dtype).eps

    def begin(number: int, buffers: list[torch.Tensor] | None = None) -> States:
        with torch.no_grad():
            for buffer, value in zip(model.buffers(), buffers or values or left):
                buffer.copy_(value)
        seed(number)
        return states()

    def made(number: int, differentiated: bool = True) -> Made:
        before = begin(number)
        model.zero_grad(set_to_none=True)
        loss = make()
        if differentiated:
            loss.backward()
        after = states()
        found = {name: gradient_of(p).detach() for name, p in named.items() if p.grad is not None} if differentiated else None
        return Made(loss.detach(), found, moved(before, after), after)

    def refuse_random(found: str) -> NoReturn:
        """Says where it draws, which takes the sample's forward once more."""
        begin(1)
        with Draws().of(dict(model.named_modules())) as draws:
            make()
        where = f"of {', '.join(one.drew)}, first in {draws.first or 'the loss or backward'}" if one.drew else \
            "that is none of torch's, Python's or numpy's own, or it depends on what an earlier call left"
        refuse("isograd.watch", f"a loss that is random: of one sample made twice, from the same weights and buffers, its loss is "
               f"{float(one.loss):.9g} and {found}; it draws from a generator {where}",
               "the same loss and gradient each time, since no other process draws the same numbers", CURE)

    def compare(other: Made) -> None:
        if not apart({"": one.loss}, {"": other.loss})[""] <= allowed:
            refuse_random(f"{float(other.loss):.9g}")
        if one.gradients is None or other.gradients is None:
            return
        for some, more in ((one.gradients, other.gradients), (other.gradients, one.gradients)):
            some.update((name, torch.zeros_like(grad)) for name, grad in more.items() if name not in some)
        for name, share in apart(one.gradients, other.gradients).items():
            if not share <= allowed:
                refuse_random(f"the gradient of {name} is off by {share:.1e} of its norm")

    one = first or made(1)
    again = made(2, one.gradients is not None)
    compare(again)
    model.zero_grad(set_to_none=True)
    unseeded = [name for name in one.drew if not _same(one.after[name], again.after[name])]  # else it sets the state by itself
    for number in range(3, TRIES + 1 if unseeded else 3):
        compare(made(number, differentiated=False))
    begin(1, left)
    return unseeded
