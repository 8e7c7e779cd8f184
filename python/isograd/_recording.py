"""Records what one step of a trainer does, without communication, so that the step stays what it is.

Gradients before clipping, what optimizers took, norm and limit; and of each parameter whether an optimizer holds it, whether
it moved, and alike on every rank. An optimizer's arithmetic is not repeated: a parameter that moved was updated by something;
where one did not move and there is no reason for it, that is a finding.
"""
from __future__ import annotations

import contextlib
import gc
import math
import sys
from typing import Any, Callable, Collection, Iterable, Iterator, Mapping, Sequence

import torch
import torch.nn.utils.clip_grad as clips
import torch.utils.checkpoint
from torch import nn
from torch.optim import Adam, AdamW, Optimizer, SGD
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from . import gradients as own_clip
from ._engines import Engine
from ._native.isograd_comm import checksum
from ._random import Draws, moved, states
from ._ranks import held, local, plain, plain_name
from ._torch_names import CLIPS_BY_NORM, GROUPS_OF_VALUE_CLIP, in_backward, infinities, writes_to

Finding = dict[str, str]  # id, sentence; change, where the one for its id does not fit
MOST_NAMES = 6
MOST_FORWARDS = 1000  # whose random numbers can be drawn again: 5 KB each
# Why a parameter may stay where it is in a right step. Nothing is proven of its update then.
EXCUSES = {"rate": "a learning rate of 0", "zero": "a gradient of 0", "rounding": "an update that rounding may hide",
           "waits": "the optimizer did not step", "elsewhere": "another optimizer holds it, which did not step",
           "later": "its optimizer steps later, as was said",
           "masters": "its optimizer holds other tensors, perhaps copies in fp32", "unknown": "no optimizer was seen to step"}


def sums_of(engine: Engine) -> dict[str, str]:
    """Checksums of what this rank holds of the trained parameters. No communication."""
    return {name: checksum(local(p.detach()).cpu()) for name, p in engine.trained().items()}


def held_by(optimizer: Any, owners: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """The trained parameters in its groups, each with its group."""
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(Exception):  # a wrapper that has no groups holds nothing that is known
        groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        found = {name: groups[id(owner)] for name, owner in owners.items() if id(owner) in groups}
    return found


def live() -> list[Any]:
    """Every optimizer of this process that something still refers to."""
    return [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]


class Recording:
    """Gradients before clipping, what optimizers took, norm and limit, and which parameters they updated."""

    def __init__(self, model: nn.Module, optimizer: Any, later: Sequence[Any] = ()) -> None:
        """later: optimizers that step outside the block."""
        self.model, self.optimizer, self.later = model, optimizer, later
        self.engine = Engine(model, None)
        self.gradients: dict[str, torch.Tensor] | None = None
        self.applied: dict[str, torch.Tensor] = {}
        self.norm: torch.Tensor | None = None
        self.max_norm: float | None = None
        self.max_value = 0.0  # of clip_grad_value_
        self.changed: list[str] = []  # parameters that were no more what they had been when the first optimizer stepped
        self.clips = 0
        self.autocast: torch.dtype | None = None
        self.draws = Draws(keeps=MOST_FORWARDS)  # in the model's forward
        self.drew: list[str] = []  # generators that the whole step drew from
        self.before: dict[str, str] = {}  # checksums of what this rank holds of the parameters
        self.by: dict[str, tuple[Any, dict[str, Any], float]] = {}  # the last optimizer that stepped, its group, the rate then
        self.steps: dict[str, int] = {}
        self._inside: Any = None  # the optimizer whose step is being made: those that it calls are parts of it
        self.gathers: list[str] = []  # where a tensor with a gradient is gathered by a collective that passes none on
        self.order: dict[str, None] = {}  # modules as they first ran
        self.modes: dict[str, bool] = {}  # of those that ran to be differentiated, whether they were in training mode
        self.earlier: dict[str, torch.Tensor] = {}  # the gradient when the first of them ran; empty: none, or zeros
        self.skipped = 0.0  # GradScaler's scale, at which the gradient is not finite, so that it left out the update
        self.loss_scale = 1.0  # GradScaler's, by which losses were multiplied
        self.nothing = False  # no parameter had a gradient where an engine that is known has one
        self.midway = False  # clipped more than once, with forwards in between, and no update
        self._forwards = self._clipped_at = 0
        self._apart = False  # groups of parameters are clipped one after the other
        self._others = False  # the optimizer that was given stepped and holds none of the parameters
        self._emptied = False  # what a backward of this step had given was set to zero before an optimizer stepped
        self._cut_by_checkpoint = False  # one was reentrant, of inputs that need no gradient
        self._writes: dict[str, int] = {}  # to each parameter, when the last optimizer had stepped

    def take(self, scale: float = 1.0, names: Collection[str] | None = None, given: Collection[int] = ()) -> None:
        """The gradients as they are now, unless they are taken already; names: those of these parameters alone; given: ids of
        the tensors that are clipped or updated now."""
        if self.gradients is None:
            self.nothing = self.engine.nothing()
        before = self.gradients or {}
        now = {name: before[name] if name in before else held(g).mul_(scale) if scale != 1.0 else held(g)
               for name, g in self.engine.gradients(given).items() if name in before or names is None or name in names}
        self.gradients = now

    def end(self) -> None:
        """After the step."""
        self.take()
        self.applied = {name: self.applied[name] if name in self.applied else held(g) for name, g in self.engine.taken().items()}

    @property
    def stepped(self) -> bool:
        """Whether an optimizer stepped."""
        return bool(self.by) or self._others

    def clipping(self, parameters: list[torch.Tensor], max_norm: float, norm: torch.Tensor | None, scale: float = 1.0) -> None:
        """Before gradients are multiplied; norm: of them, as the trainer has it."""
        given = {id(p) for p in parameters}
        self.take(scale, given=given)
        if not math.isfinite(max_norm):
            return
        self.midway = self.midway or (self.clips > 0 and self._forwards > self._clipped_at and not self.stepped)
        self._clipped_at = self._forwards
        if self.clips > 0 or not self.engine.covers(given):
            self._apart = True  # no norm of these is the gradient's
            self.norm = None
        if norm is not None:
            self.clipped_at(norm)
        self.clips += 1
        self.max_norm = float(max_norm)

    def clipped_at(self, norm: torch.Tensor) -> None:
        """The norm that the gradient had, as the trainer has it."""
        if not self._apart:
            self.norm = norm.detach().clone()

    def stepping(self, optimizer: Any, given: tuple[Any, ...],
                 named: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Before any optimizer updates; where it is given a closure, which makes the gradient, after that."""
        groups = held_by(optimizer, self.engine.owners())
        if self._inside is not None or not (groups or optimizer is self.optimizer):
            return None  # a step that another one calls, such as that of its class's parent
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

    def _after_step(self, optimizer: Any, *_: Any) -> None:
        if optimizer is self._inside:
            self._inside = None
            self._writes = {name: writes_to(p) for name, p in self.engine.trained().items()}

    def updating(self, optimizer: Any, groups: Mapping[str, dict[str, Any]]) -> None:
        """Adds to `applied` what plain SGD with learning rate 1 would take away now."""
        scaled = getattr(optimizer, "grad_scale", None)  # GradScaler leaves it to a fused optimizer to divide by it
        scale = 1.0 if scaled is None else 1.0 / float(scaled)
        inside = in_backward()  # other parameters' gradients come after it
        if not self.stepped:
            self.changed = [name for name, own in sums_of(self.engine).items() if own != self.before.get(name)]
        self.take(scale, groups if inside else None, {id(owner) for owner in self.engine.owners().values()})
        if float(getattr(optimizer, "found_inf", None) or 0) > 0:
            return  # and to skip the update
        for name, g in self.engine.taken().items():
            if name in groups and name in self.by:
                self.applied[name] += g * scale
            elif name in groups or not (inside or name in self.applied):
                self.applied[name] = held(g).mul_(scale) if scale != 1.0 else held(g)
        for name, group in groups.items():
            self.by[name] = optimizer, group, float(group.get("lr", float("nan")))
            self.steps[name] = self.steps.get(name, 0) + 1
        self._others = self._others or not groups

    def _zero_grad(self, original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if self.order and not self.stepped and not self._emptied and not self.engine.nothing():
            self._emptied = any(bool(local(g).any()) and not (name in self.earlier and torch.equal(local(g), local(self.earlier[name])))
                                for name, g in self.engine.gradients().items())
        return original(*arguments, **named)

    def _checkpoint(self, original: Callable[..., Any], inputs: Iterable[Any]) -> Any:
        inputs = list(inputs)
        self._cut_by_checkpoint |= not any(isinstance(one, torch.Tensor) and one.requires_grad for one in inputs)
        return original(inputs)

    def facts(self) -> dict[str, Any]:
        """This rank's observations that tell causes apart (known_changes, _why_apart)."""
        return {"several": max(self.steps.values(), default=1) > 1, "emptied": self._emptied, "cut_by_checkpoint": self._cut_by_checkpoint,
                "rates": {name: rate for name, (*_, rate) in self.by.items()},
                "written": any(writes_to(p) != self._writes.get(name, writes_to(p)) for name, p in self.engine.trained().items())}

    def forward_of(self, name: str) -> Callable[..., None]:
        def begins(module: nn.Module, *_: Any) -> None:
            if not torch.compiler.is_compiling():
                if torch.is_grad_enabled():
                    self.modes.setdefault(name, module.training)
                if not self.order and self.gradients is None and not self.engine.nothing():
                    before = self.engine.gradients()
                    self.earlier = {name: held(g) for name, g in before.items()} if any(local(g).any() for g in before.values()) else {}
                self.order[name] = None
            self.forward()

        return begins

    def forward(self) -> None:
        self._forwards += torch.is_grad_enabled()
        device = next((p.device.type for p in self.model.parameters()), "cpu")
        if torch.is_autocast_enabled(device):
            self.autocast = torch.get_autocast_dtype(device)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Records PyTorch's and isograd's clipping, the optimizers and the model's forward meanwhile."""
        with contextlib.ExitStack() as undo:
            replace(undo, clips, CLIPS_BY_NORM, self._norm_clip)
            replace(undo, torch.nn.utils, "clip_grads_with_norm_", self._norm_clip)
            replace(undo, clips, GROUPS_OF_VALUE_CLIP, self._value_clip)
            replace(undo, torch.amp.GradScaler, "step", self._scaler_step)
            for owner in (Optimizer, nn.Module):
                replace(undo, owner, "zero_grad", self._zero_grad)
            replace(undo, torch.utils.checkpoint, "check_backward_validity", self._checkpoint)
            for name in ("all_gather", "all_gather_into_tensor"):
                replace(undo, torch.distributed, name, self._gather)
            own_clip.observers.append(self.clipping)
            undo.callback(own_clip.observers.remove, self.clipping)
            for name, module in plain(self.model).named_modules():  # of all: a trainer may turn autocast on inside the model's forward
                undo.callback(module.register_forward_pre_hook(self.forward_of(plain_name(name)), prepend=True).remove)  # before FSDP2's
            undo.enter_context(self.draws.of({"": self.model}))
            before = states()
            undo.callback(lambda: self.drew.extend(moved(before, states())))
            # All optimizers are watched: the one that was given may be a wrapper, or not the one that steps.
            undo.callback(register_optimizer_step_pre_hook(self.stepping).remove)
            undo.callback(register_optimizer_step_post_hook(self._after_step).remove)
            undo.enter_context(self.engine.attached(self))
            self.before = sums_of(self.engine)
            yield

    def _norm_clip(self, original: Callable[..., Any], parameters: Any, max_norm: float, total_norm: torch.Tensor,
                   *arguments: Any, **more: Any) -> Any:
        some = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        self.clipping(some, float(max_norm), total_norm)
        return original(some, max_norm, total_norm, *arguments, **more)

    def _gather(self, original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        given = next((value for value in [*arguments[1:2], *named.values()] if isinstance(value, torch.Tensor)), None)
        if given is not None and given.requires_grad and given.numel() > 1 and torch.is_grad_enabled():  # no loss that is logged
            frame = sys._getframe(2)
            file = "/".join(frame.f_code.co_filename.split("/")[-2:])
            self.gathers.append(f"{original.__name__} in {file}, line {frame.f_lineno}")
        return original(*arguments, **named)

    def _scaler_step(self, original: Callable[..., Any], scaler: Any, optimizer: Any, *arguments: Any, **named: Any) -> Any:
        before = self.loss_scale = scaler.get_scale()
        result = original(scaler, optimizer, *arguments, **named)
        found = infinities(scaler, optimizer) if scaler.is_enabled() else {}
        if any(float(each) > 0 for each in found.values()):
            self.skipped = float(before)
        return result

    def _value_clip(self, original: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        """clip_grad_value_ calls this first, under whatever name a trainer has imported it."""
        frame = sys._getframe(2)  # frame 1 is that of replace
        if frame.f_code.co_name == "clip_grad_value_":
            self.take()
            self.max_value = float(frame.f_locals["clip_value"])
        return original(*arguments, **named)

    def states(self) -> dict[str, str]:
        """By parameter: "moved", "still", "unheld", "left" (others were updated), or a key of EXCUSES."""
        after, parameters, owners = sums_of(self.engine), self.engine.trained(), self.engine.owners()
        given = held_by(self.optimizer, owners)
        others = None
        later = {held for each in self.later for held in held_by(each, owners)}
        found = {}
        for name, p in parameters.items():
            if after[name] != self.before.get(name):
                found[name] = "moved"
            elif name in self.by:
                found[name] = self._excuse(name, p, owners[name])
            elif name in later:
                found[name] = "later"
            elif name in given:
                found[name] = self._waiting(name, "waits")
            else:
                if others is None:
                    others = {held for each in live() for held in held_by(each, owners)}
                found[name] = (self._waiting(name, "elsewhere") if name in others and not self._others else
                               self._unheld(bool(given), self.applied[name]))
        return found

    def _waiting(self, name: str, excuse: str) -> str:
        """The state of a parameter whose optimizer did not step: a mistake where another one did and it has a gradient."""
        gradient = (self.gradients or {}).get(name)
        return "left" if self.by and gradient is not None and bool(local(gradient).any()) else excuse

    def _excuse(self, name: str, p: torch.Tensor, owner: torch.Tensor) -> str:
        """The state of a parameter that an optimizer took and that has not moved. owner: what the optimizer holds for it."""
        optimizer, group, rate = self.by[name]
        value, gradient = local(p.detach()), local(self.applied[name])
        if rate == 0:
            return "rate"
        if not bool(gradient.any()):
            return "zero"
        if self.engine.elements(name, owner) is None:
            return "masters"
        state = {key: own for key, some in optimizer.state.get(owner, {}).items() if isinstance(some, torch.Tensor)
                 and some.shape == owner.shape and (own := self.engine.elements(name, some)) is not None}
        if type(optimizer) is SGD:
            way = state.get("momentum_buffer")
            way = gradient if way is None else local(way)
        elif type(optimizer) in (Adam, AdamW) and "exp_avg" in state:
            root = local(state.get("max_exp_avg_sq", state["exp_avg_sq"])).sqrt()
            way = local(state["exp_avg"]) / (root + float(group["eps"]))
        else:
            return "rounding"
        seen = abs(rate) * way.abs().double() > 8 * torch.finfo(p.dtype).eps * value.abs().double()
        return "still" if bool(seen.any()) else "rounding"

    def _unheld(self, holds_others: bool, gradient: torch.Tensor) -> str:
        """The state of a parameter that has not moved and that no optimizer holds."""
        if self.optimizer is None and not self.by:
            return "unknown"
        if not bool(local(gradient).any()):
            return "zero"  # a layer that nothing uses may be left out
        if holds_others or self.by:
            return "unheld"
        groups = getattr(self.optimizer, "param_groups", None)
        if not groups:
            return "unknown"
        lower = all(p.dtype in (torch.bfloat16, torch.float16) for p in self.engine.trained().values())
        masters = lower and all(p.dtype == torch.float32 for group in groups for p in group["params"])
        return "masters" if masters else "unheld"


def replace(undo: contextlib.ExitStack, module: Any, name: str, by: Callable[..., Any]) -> None:
    """Calls by(what was there, *arguments) in place of a function until `undo` ends."""
    original = getattr(module, name)
    setattr(module, name, lambda *arguments, **named: by(original, *arguments, **named))
    undo.callback(setattr, module, name, original)


def _names(names: Iterable[str]) -> str:
    """The first of them, and how many more."""
    all_names = list(names)
    more = len(all_names) - MOST_NAMES
    return ", ".join(all_names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _ranks(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def judge(everyone: Sequence[Mapping[str, Any]]) -> tuple[list[Finding], str]:
    """Findings, and in a sentence what is proven of the update.

    everyone: of each rank "stepped", "midway", "states" by parameter, its facts, and its checksums "initial", "gradients", "taken" (of
    the gradients that the optimizer took) and "after", by parameter.
    """
    findings: list[Finding] = []

    def find(where: bool, name: str, sentence: str, change: str = "") -> None:
        if where:
            findings.append({"id": name, "sentence": sentence, **({"change": change} if change else {})})

    stepped = [rank for rank, one in enumerate(everyone) if one["stepped"]]
    idle = [rank for rank in range(len(everyone)) if stepped and rank not in stepped]
    find(bool(idle), "updates_differ", f"{_ranks(idle)} did not update, {_ranks(stepped)} did",
         "call `optimizer.step()` on every rank or on none")
    find(any(one["midway"] for one in everyone), "clipped_before_reduction", "gradients were clipped more than once, while those "
         "of micro-batches were still added up")
    states: dict[str, list[str]] = {}
    for one in everyone:
        for name, state in one["states"].items():
            states.setdefault(name, []).append(state)
    unheld = [name for name, some in states.items() if "unheld" in some and "moved" not in some]
    find(bool(unheld), "not_in_optimizer", f"no group of the optimizer holds {_names(unheld)} ({len(unheld)} of {len(states)} "
         "trained parameters), which did not move")
    still = [name for name, some in states.items() if "still" in some]
    find(bool(still), "not_updated", f"the optimizer stepped with a gradient for {_names(still)} and no bit of it changed, where "
         "rounding could not hide it")
    left = [name for name, some in states.items() if "left" in some and "moved" not in some]
    find(bool(left), "not_updated", f"an optimizer stepped inside the block, and that of {_names(left)} did not, though there is a "
         "gradient: no bit of it changed")
    if left and not still:
        findings[-1]["change"] = ("call `optimizer.step()` of every optimizer inside the block; of one that steps elsewhere say so: "
                                  "`later=[optimizer]` of watch")
    apart = _apart(everyone) if not idle else {}
    for first, others in list(apart.values())[:1]:
        why, change = _why_apart(everyone, first, others)
        find(True, "updates_differ", f"ranks took the same gradient and hold other parameters after the update: {_names(apart)}, on "
             f"{_ranks(others)} other ones than on rank {first}{why}", change)
    after: dict[str, str] = {}
    alike = all(after.setdefault(name, bits) == bits for one in everyone for name, bits in one["after"].items())
    return findings, _proven(states, bool(stepped), len(everyone) > 1 and not idle and alike)


def _apart(everyone: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, list[int]]]:
    """Parameters that differ after the update and did not before it, nor in what was taken: a rank, and those unlike it."""
    found: dict[str, tuple[int, list[int]]] = {}
    for name in dict.fromkeys(name for one in everyone for name in one["states"]):
        here = [(rank, one) for rank, one in enumerate(everyone) if name in one["after"]]
        if any(one[key][name] != here[0][1][key][name] for _, one in here for key in ("initial", "gradients", "taken")):
            continue
        others = [rank for rank, one in here if one["after"][name] != here[0][1]["after"][name]]
        if others:
            found[name] = here[0][0], others
    return found


def _why_apart(everyone: Sequence[Mapping[str, Any]], first: int, others: Sequence[int]) -> tuple[str, str]:
    """(the end of the finding's sentence, its advice) if the recording shows why ranks with the same gradient hold other parameters than
    the first; empty texts if not."""
    rates, other_rates = everyone[first]["rates"], everyone[others[0]]["rates"]
    for name, rate in rates.items():
        if name in other_rates and not math.isclose(other_rates[name], rate) and not math.isnan(rate):
            return (f"; their learning rates are {other_rates[name]:g} there and {rate:g} here",
                    "give every rank the same learning rate, in the optimizer and by `scheduler.step()` on each after `optimizer.step()`")
    written = [rank for rank in (first, *others) if everyone[rank]["written"]]
    if written and len(written) < len(everyone):
        return (f"; {_ranks(written)} wrote to parameters after the optimizer had",
                "write to parameters after `optimizer.step()` on every rank alike or on none, such as by `model.load_state_dict(averaged)`")
    return "", ""


def _proven(states: Mapping[str, Sequence[str]], stepped: bool, alike: bool) -> str:
    moved = [name for name, some in states.items() if "moved" in some]
    others: dict[str, list[str]] = {}
    for name, some in states.items():
        if name not in moved and some[0] in EXCUSES:
            others.setdefault(some[0], []).append(name)
    if not moved and not stepped:
        return f"not looked at: {EXCUSES['waits' if 'waits' in others else 'unknown']} inside the block"
    said = f"{len(moved)} of {len(states)} trained parameters moved{', alike on every rank' if alike and moved else ''}"
    return said + "".join(f"; nothing is proven of {_names(names)}: {EXCUSES[why]}" for why, names in others.items())


def checksums_after(engine: Engine) -> dict[str, str]:
    """Checksums of the whole parameters. Collective where ranks hold parts."""
    return {name: checksum(engine.whole_value(name, p)) for name, p in engine.trained().items()}


def frozen_otherwise(model: nn.Module, names: Sequence[str]) -> list[Finding]:
    """A finding where the model that `make_model` makes and the one of the run, which trains `names`, freeze other parameters."""
    made = {plain_name(name): p.requires_grad for name, p in model.named_parameters()}
    frozen = [name for name, trains in made.items() if trains and name not in names]
    said = [f"{what} {', '.join(some[:5])}{' and more' if len(some) > 5 else ''}" for what, some in (
        ("does not train", frozen), ("trains", [name for name in names if not made.get(name, True)])) if some]
    change = ("take `requires_grad_(False)` of these out of the run, or put it into make_model too where that is meant" if frozen else
              "freeze these in the run with `requires_grad_(False)`, or leave that out of make_model where they are to be trained")
    return [{"id": "frozen_otherwise", "sentence": f"the run {' and '.join(said)}, and make_model says otherwise",
             "change": change}] if said else []
