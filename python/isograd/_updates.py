"""Parameters in a step: whether an optimizer holds them, whether they moved, and alike on every rank.

An optimizer's arithmetic is not made again. A parameter that moved was updated by something; of one that did not, the
reason is looked for, and where there is none it is a finding.
"""
from __future__ import annotations

import contextlib
import gc
from typing import Any, Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer, SGD

from ._assemble import trained, whole
from ._groups import local
from ._native.isograd_comm import checksum

Finding = dict[str, str]  # id, sentence
MOST_NAMES = 6
# Why a parameter may stay where it is in a right step. Nothing is proven of its update then.
EXCUSES = {"rate": "a learning rate of 0", "zero": "a gradient of 0", "rounding": "an update that rounding may hide",
           "waits": "the optimizer did not step", "elsewhere": "another optimizer holds it, which did not step",
           "masters": "its optimizer holds other tensors, perhaps copies in fp32", "unknown": "no optimizer was seen to step"}


def sums_of(model: nn.Module) -> dict[str, str]:
    """Checksums of what this rank holds of the trained parameters. No communication."""
    return {name: checksum(local(p.detach()).cpu()) for name, p in trained(model).items()}


def held_by(optimizer: Any, parameters: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """The trained parameters in its groups, each with its group."""
    names = {id(p): name for name, p in parameters.items()}
    found: dict[str, dict[str, Any]] = {}
    with contextlib.suppress(Exception):  # a wrapper that has no groups holds nothing that is known
        for group in optimizer.param_groups:
            found.update((names[id(p)], group) for p in group["params"] if id(p) in names)
    return found


def live() -> list[Any]:
    """Every optimizer of this process that something still refers to."""
    return [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]


class Updates:
    """On this rank, the optimizers that took each trained parameter. Hooks call `stepped` as they step."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.model, self.optimizer = model, optimizer
        self.before: dict[str, str] = {}
        self.by: dict[str, tuple[Any, dict[str, Any], float]] = {}  # the last that stepped, its group, the rate then
        self.steps: dict[str, int] = {}
        self.others = False  # the optimizer that was given stepped and holds none of the parameters

    def stepped(self, optimizer: Any, held: Mapping[str, dict[str, Any]]) -> None:
        """Before it updates."""
        for name, group in held.items():
            self.by[name] = optimizer, group, float(group.get("lr", float("nan")))
            self.steps[name] = self.steps.get(name, 0) + 1
        self.others = self.others or not held

    @property
    def any(self) -> bool:
        return bool(self.by) or self.others

    def states(self, applied: Mapping[str, torch.Tensor]) -> dict[str, str]:
        """By parameter: "moved", "still", "unheld", or a key of EXCUSES. applied: the gradients that optimizers took."""
        after, parameters = sums_of(self.model), trained(self.model)
        given = held_by(self.optimizer, parameters)
        others: set[str] | None = None
        found = {}
        for name, p in parameters.items():
            if after[name] != self.before.get(name):
                found[name] = "moved"
            elif name in self.by:
                found[name] = self._excuse(name, p, applied[name])
            elif name in given:
                found[name] = "waits"
            else:
                if others is None:
                    others = {held for each in live() for held in held_by(each, parameters)}
                found[name] = "elsewhere" if name in others and not self.others else self._unheld(bool(given), applied[name])
        return found

    def _excuse(self, name: str, p: torch.Tensor, taken: torch.Tensor) -> str:
        """The state of a parameter that an optimizer took and that has not moved."""
        optimizer, group, rate = self.by[name]
        value, gradient = local(p.detach()), local(taken)
        if rate == 0:
            return "rate"
        if not bool(gradient.any()):
            return "zero"
        state = optimizer.state.get(p, {})
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
        lower = all(p.dtype in (torch.bfloat16, torch.float16) for p in trained(self.model).values())
        masters = lower and all(p.dtype == torch.float32 for group in groups for p in group["params"])
        return "masters" if masters else "unheld"


def names_of(names: Iterable[str]) -> str:
    """The first of them, and how many more."""
    all_names = list(names)
    more = len(all_names) - MOST_NAMES
    return ", ".join(all_names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def ranks_of(ranks: Sequence[int]) -> str:
    return ("rank " if len(ranks) == 1 else "ranks ") + ", ".join(map(str, ranks))


def judge(everyone: Sequence[Mapping[str, Any]]) -> tuple[list[Finding], str]:
    """Findings, and in a sentence what is proven of the update.

    everyone: of each rank "stepped", "midway", "states" by parameter, and its checksums "initial", "gradients", "taken" (of the
    gradients that the optimizer took) and "after", by parameter.
    """
    findings: list[Finding] = []
    stepped = [rank for rank, one in enumerate(everyone) if one["stepped"]]
    idle = [rank for rank in range(len(everyone)) if stepped and rank not in stepped]
    if idle:
        findings.append({"id": "updates_differ", "sentence": f"{ranks_of(idle)} did not update, {ranks_of(stepped)} did: call "
                         "optimizer.step() on every rank or on none"})
    if any(one["midway"] for one in everyone):
        findings.append({"id": "clipped_before_reduction", "sentence": "gradients were clipped more than once, while those of "
                         "micro-batches were still added up: clip once, after the last backward"})
    states: dict[str, list[str]] = {}
    for one in everyone:
        for name, state in one["states"].items():
            states.setdefault(name, []).append(state)
    unheld = [name for name, some in states.items() if "unheld" in some and "moved" not in some]
    if unheld:
        findings.append({"id": "not_in_optimizer", "sentence": f"no group of the optimizer holds {names_of(unheld)} "
                         f"({len(unheld)} of {len(states)} trained parameters), which did not move: make it of the parameters "
                         "of this very model, after fully_shard and every other thing that replaces them; freeze with "
                         "requires_grad_(False) what is to stay"})
    still = [name for name, some in states.items() if "still" in some]
    if still:
        findings.append({"id": "not_updated", "sentence": f"the optimizer stepped with a gradient for {names_of(still)} and "
                         "no bit of it changed, where rounding could not hide it: look for what writes parameters after the "
                         "update, or for tensors that the model no longer computes with"})
    apart = _apart(everyone) if not idle else {}
    if apart:
        first, others = next(iter(apart.values()))
        findings.append({"id": "updates_differ", "sentence": "ranks took the same gradient and hold other parameters after the "
                         f"update: {names_of(apart)}, on {ranks_of(others)} other ones than on rank {first}; give every rank the "
                         "same groups, learning rate, weight decay and optimizer state"})
    return findings, _proven(states, stepped, len(everyone) > 1 and not idle and _same(everyone))


def _same(everyone: Sequence[Mapping[str, Any]]) -> bool:
    """Every rank that holds a parameter has the same bits of it afterwards."""
    after: dict[str, str] = {}
    return all(after.setdefault(name, bits) == bits for one in everyone for name, bits in one["after"].items())


def _apart(everyone: Sequence[Mapping[str, Any]]) -> dict[str, tuple[int, list[int]]]:
    """Parameters that differ after the update and did not before it, nor in what was taken: a rank, and those unlike it."""
    found: dict[str, tuple[int, list[int]]] = {}
    names = list(dict.fromkeys(name for one in everyone for name in one["states"]))
    for name in names:
        here = [(rank, one) for rank, one in enumerate(everyone) if name in one["after"]]
        if any(one[key][name] != here[0][1][key][name] for _, one in here for key in ("initial", "gradients", "taken")):
            continue
        others = [rank for rank, one in here if one["after"][name] != here[0][1]["after"][name]]
        if others:
            found[name] = here[0][0], others
    return found


def _proven(states: Mapping[str, Sequence[str]], stepped: Sequence[int], alike: bool) -> str:
    moved = [name for name, some in states.items() if "moved" in some]
    others: dict[str, list[str]] = {}
    for name, some in states.items():
        if name not in moved and some[0] in EXCUSES:
            others.setdefault(some[0], []).append(name)
    if not moved and not stepped:
        return f"not looked at: {EXCUSES['waits' if 'waits' in others else 'unknown']} inside the block"
    said = f"{len(moved)} of {len(states)} trained parameters moved{', alike on every rank' if alike and moved else ''}"
    return said + "".join(f"; nothing is proven of {names_of(names)}: {EXCUSES[why]}" for why, names in others.items())


def after(model: nn.Module) -> dict[str, str]:
    """Checksums of the whole parameters. Collective over the mesh of a DTensor."""
    return {name: checksum(whole(p)) for name, p in trained(model).items()}
