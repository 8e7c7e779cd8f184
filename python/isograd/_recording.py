"""What one step of a trainer did, taken as it goes by: no communication, so that the step stays what it is."""
from __future__ import annotations

import contextlib
import math
from typing import Any, Callable, Iterator

import torch
import torch.nn.utils.clip_grad as torch_clip
from torch import nn

from . import clip as own_clip
from ._random import Draws, moved, states
from ._assemble import held, plain, trained


class Recording:
    """Gradients before clipping, what the optimizer took, norm and limit, how often it stepped."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.model, self.optimizer = model, optimizer
        self.gradients: dict[str, torch.Tensor] | None = None
        self.applied: dict[str, torch.Tensor] | None = None
        self.norm: torch.Tensor | None = None
        self.max_norm: float | None = None
        self.steps = self.clips = 0
        self.autocast: torch.dtype | None = None
        self.draws = Draws()  # in the model's forward
        self.drew: list[str] = []  # generators that the whole step drew from
        self._apart = False  # groups of parameters are clipped one after the other

    def take(self, scale: float = 1.0) -> None:
        """The gradients as they are now, unless they are taken already."""
        if self.gradients is None:
            self.gradients = {name: held(g).mul_(scale) if scale != 1.0 else held(g) for name, g in self._now()}

    def _now(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, torch.zeros_like(p) if p.grad is None else p.grad) for name, p in trained(self.model).items()]

    def clipping(self, parameters: list[torch.Tensor], max_norm: float, norm: torch.Tensor | None, scale: float = 1.0) -> None:
        """Before gradients are multiplied; norm: of them, as the trainer has it."""
        self.take(scale)
        everything = {id(p) for p in trained(self.model).values() if p.grad is not None}
        if not math.isfinite(max_norm):
            return
        if self.clips > 0 or not everything <= {id(p) for p in parameters}:
            self._apart = True  # no norm of these is the gradient's
            self.norm = None
        if not self._apart and norm is not None:
            self.norm = norm.detach().clone()
        self.clips += 1
        self.max_norm = float(max_norm)

    def stepping(self, _: Any, given: tuple[Any, ...], named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before the optimizer updates; where it is given a closure, which makes the gradient, after that."""
        closure = named.get("closure", given[1] if len(given) > 1 else None)
        if closure is None:
            self.updating()
            return None

        def made() -> Any:
            loss = closure()
            self.updating()
            return loss

        return given[:1], {**named, "closure": made}

    def updating(self) -> None:
        """What plain SGD with learning rate 1 would take away now."""
        self.take()
        self.steps += 1
        if self.applied is None:
            self.applied = {name: held(g) for name, g in self._now()}
        else:
            for name, g in self._now():
                self.applied[name] += g

    def forward(self, *_: Any) -> None:
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        if torch.is_autocast_enabled(device):
            self.autocast = torch.get_autocast_dtype(device)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """While this lasts PyTorch's and isograd's clipping, the optimizer and the model's forward tell of themselves."""
        with contextlib.ExitStack() as undo:
            _replace(undo, torch_clip, "_clip_grads_with_norm_", self._told_by_torch)
            _replace(undo, torch.nn.utils, "clip_grads_with_norm_", self._told_by_torch)
            own_clip.observers.append(self.clipping)
            undo.callback(own_clip.observers.remove, self.clipping)
            for module in plain(self.model).modules():  # of all: a trainer may turn autocast on inside the model's forward
                undo.callback(module.register_forward_pre_hook(self.forward).remove)
            undo.enter_context(self.draws.of({"": self.model}))
            before = states()
            undo.callback(lambda: self.drew.extend(moved(before, states())))
            if self.optimizer is not None:
                undo.callback(self.optimizer.register_step_pre_hook(self.stepping).remove)
            yield

    def _told_by_torch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, *arguments: Any, **more: Any) -> Any:
            some = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self.clipping(some, float(max_norm), total_norm)
            return original(some, max_norm, total_norm, *arguments, **more)

        return clip


def _replace(undo: contextlib.ExitStack, module: Any, name: str, by: Callable[[Any], Any]) -> None:
    original = getattr(module, name)
    setattr(module, name, by(original))
    undo.callback(setattr, module, name, original)
