"""What one step of a trainer did, taken as it goes by: no communication, so that the step stays what it is."""
from __future__ import annotations

import contextlib
import math
import sys
from typing import Any, Callable, Collection, Iterator, Mapping

import torch
import torch.nn.utils.clip_grad as torch_clip
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import clip as own_clip
from ._assemble import gradient_of, held, plain, trained
from ._random import Draws, moved, states
from ._updates import Updates, held_by, sums_of


class Recording:
    """Gradients before clipping, what optimizers took, norm and limit, and which parameters they updated."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.gradients: dict[str, torch.Tensor] | None = None
        self.applied: dict[str, torch.Tensor] = {}
        self.norm: torch.Tensor | None = None
        self.max_norm: float | None = None
        self.clips = 0
        self.autocast: torch.dtype | None = None
        self.draws = Draws()  # in the model's forward
        self.drew: list[str] = []  # generators that the whole step drew from
        self.updates = Updates(model, optimizer)
        self._inside: Any = None  # the optimizer whose step is being made: those that it calls are parts of it
        self.skipped = 0.0  # GradScaler's scale, at which the gradient is not finite, so that it left out the update
        self.midway = False  # clipped more than once, with forwards in between, and no update
        self._forwards = self._clipped_at = 0
        self._apart = False  # groups of parameters are clipped one after the other

    def take(self, scale: float = 1.0, names: Collection[str] | None = None) -> None:
        """The gradients as they are now, unless they are taken already; names: of these parameters alone."""
        before = self.gradients or {}
        now = {name: before[name] if name in before else held(g).mul_(scale) if scale != 1.0 else held(g)
               for name, g in self._now() if name in before or names is None or name in names}
        self.gradients = now

    def end(self) -> None:
        """After the step."""
        self.take()
        self.applied = {name: self.applied[name] if name in self.applied else held(g) for name, g in self._now()}

    def _now(self) -> list[tuple[str, torch.Tensor]]:
        return [(name, gradient_of(p)) for name, p in trained(self.model).items()]

    def clipping(self, parameters: list[torch.Tensor], max_norm: float, norm: torch.Tensor | None, scale: float = 1.0) -> None:
        """Before gradients are multiplied; norm: of them, as the trainer has it."""
        self.take(scale)
        everything = {id(p) for p in trained(self.model).values() if p.grad is not None}
        if not math.isfinite(max_norm):
            return
        self.midway = self.midway or (self.clips > 0 and self._forwards > self._clipped_at and not self.updates.any)
        self._clipped_at = self._forwards
        if self.clips > 0 or not everything <= {id(p) for p in parameters}:
            self._apart = True  # no norm of these is the gradient's
            self.norm = None
        if not self._apart and norm is not None:
            self.norm = norm.detach().clone()
        self.clips += 1
        self.max_norm = float(max_norm)

    def stepping(self, optimizer: Any, given: tuple[Any, ...],
                 named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before any optimizer updates; where it is given a closure, which makes the gradient, after that."""
        groups = held_by(optimizer, trained(self.model))
        if self._inside not in (None, optimizer) or not (groups or optimizer is self.optimizer):
            return None
        self._inside = optimizer
        closure = named.get("closure", given[1] if len(given) > 1 else None)
        if not callable(closure):
            self.updating(optimizer, groups)
            return None

        def made() -> Any:
            loss = closure()
            self.updating(optimizer, groups)
            return loss

        return given[:1], {**named, "closure": made}

    def stepped(self, optimizer: Any, *_: Any) -> None:
        """After it."""
        if optimizer is self._inside:
            self._inside = None

    def updating(self, optimizer: Any, groups: Mapping[str, dict[str, Any]]) -> None:
        """What plain SGD with learning rate 1 would take away now."""
        scaled = getattr(optimizer, "grad_scale", None)  # GradScaler leaves it to a fused optimizer to divide by it
        scale = 1.0 if scaled is None else 1.0 / float(scaled)
        in_backward = torch._C._current_graph_task_id() != -1  # other parameters' gradients come after it
        self.take(scale, groups if in_backward else None)
        if float(getattr(optimizer, "found_inf", None) or 0) > 0:
            return  # and to skip the update
        for name, g in self._now():
            if name in groups and name in self.updates.by:
                self.applied[name] += g * scale
            elif name in groups or not (in_backward or name in self.applied):
                self.applied[name] = held(g).mul_(scale) if scale != 1.0 else held(g)
        self.updates.stepped(optimizer, groups)

    def forward(self, *_: Any) -> None:
        self._forwards += torch.is_grad_enabled()
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        if torch.is_autocast_enabled(device):
            self.autocast = torch.get_autocast_dtype(device)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """While this lasts PyTorch's and isograd's clipping, the optimizer and the model's forward tell of themselves."""
        with contextlib.ExitStack() as undo:
            _replace(undo, torch_clip, "_clip_grads_with_norm_", self._told_by_torch)
            _replace(undo, torch.nn.utils, "clip_grads_with_norm_", self._told_by_torch)
            _replace(undo, torch_clip, "_group_tensors_by_device_and_dtype", self._told_of_values)
            _replace(undo, torch.amp.GradScaler, "step", self._told_by_scaler)
            own_clip.observers.append(self.clipping)
            undo.callback(own_clip.observers.remove, self.clipping)
            for module in plain(self.model).modules():  # of all: a trainer may turn autocast on inside the model's forward
                undo.callback(module.register_forward_pre_hook(self.forward).remove)
            undo.enter_context(self.draws.of({"": self.model}))
            before = states()
            undo.callback(lambda: self.drew.extend(moved(before, states())))
            # All optimizers tell: the one that was given may be a wrapper, or not the one that steps.
            undo.callback(register_optimizer_step_pre_hook(self.stepping).remove)
            undo.callback(register_optimizer_step_post_hook(self.stepped).remove)
            self.updates.before = sums_of(self.model)
            yield

    def _told_by_torch(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, *arguments: Any, **more: Any) -> Any:
            some = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
            self.clipping(some, float(max_norm), total_norm)
            return original(some, max_norm, total_norm, *arguments, **more)

        return clip

    def _told_by_scaler(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def step(scaler: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
            before = scaler.get_scale()
            result = original(scaler, optimizer, *arguments, **named)
            found = scaler._found_inf_per_device(optimizer) if scaler.is_enabled() else {}
            if any(float(each) > 0 for each in found.values()):
                self.skipped = float(before)
            return result

        return step

    def _told_of_values(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """clip_grad_value_ calls this first, under whatever name a trainer has imported it."""
        def grouped(*arguments: Any, **named: Any) -> Any:
            if sys._getframe(1).f_code.co_name == "clip_grad_value_":
                self.take()
            return original(*arguments, **named)

        return grouped


def _replace(undo: contextlib.ExitStack, module: Any, name: str, by: Callable[[Any], Any]) -> None:
    original = getattr(module, name)
    setattr(module, name, by(original))
    undo.callback(setattr, module, name, original)
