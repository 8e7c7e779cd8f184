"""Where engines keep parameters and their gradients: one adapter for each, and refusals of those that have none.

PyTorch has a parameter's gradient in `.grad`, whole or as a DTensor. Elsewhere a rank holds some elements of a parameter laid
flat, the optimizer updates other tensors than the model's, or the gradient is in a buffer of the engine. An adapter says where
that is, without communication, for it is asked in the middle of a step; `whole` puts parts together when the step has ended.
"""
from __future__ import annotations

import contextlib
import dataclasses
import math
import sys
from typing import Any, Callable, Collection, Iterator, Mapping, Sequence, TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor

from ._ranks import all_sum, gradient_of, Group, owned_norm, plain, plain_name, ranks, refuse, whole
from ._torch_names import FLAT_PARAMETER, flat_parts, FlatPart

if TYPE_CHECKING:
    from ._recording import Recording

GradientOf = Callable[[str, torch.Tensor], torch.Tensor]  # a parameter's name and itself -> its gradient
_WHERE = "isograd.watch"
_BY_DUMPS = "write the gradient of this step and that of one process as dumps (docs/verify.md), and run `isograd compare` on them"


@dataclasses.dataclass
class Place:
    """This rank's elements of a tensor of that shape are those from `begin` on, of the tensor laid flat; the ranks of `group`
    have all of them."""

    begin: int
    shape: torch.Size
    group: Group


class Engine:
    """PyTorch's own. gradient: where the user says that a parameter's gradient is; else in `.grad`.

    An optimizer may update copies of the parameters, which have the gradient then. A copy is known by its value: the parameter
    is its rounding. It counts once it has a gradient, for an optimizer of another model has such tensors too.
    """

    sharded = False  # a rank's parts are no DTensors, so that make_model is needed
    repeats = True  # a step can be made again from the parameters and optimizer.state_dict()

    def __init__(self, model: nn.Module, optimizer: Any, gradient: GradientOf | None = None) -> None:
        self.model, self.optimizer, self._gradient = model, optimizer, gradient
        self._copies = _copies(self.trained(), optimizer)

    @property
    def apart(self) -> bool:
        """The optimizer may be given other tensors than the gradients are in: both are compared."""
        return self._gradient is not None or any(copy.grad is not None for copy in self._copies.values())

    # The parameters, by the names that they have in the model before it was wrapped.
    def everything(self) -> dict[str, torch.Tensor]:
        """What this rank has of all parameters and buffers."""
        model = plain(self.model)
        return {plain_name(name): value for name, value in [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]}

    def trained(self) -> dict[str, torch.Tensor]:
        """What this rank has of the parameters that get a gradient, a tied one once."""
        return {plain_name(name): p for name, p in plain(self.model).named_parameters() if p.requires_grad}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in self.trained().items()}

    def owners(self) -> dict[str, torch.Tensor]:
        """By trained parameter: the tensor that an optimizer's group has for it."""
        return {name: self._copy(name, p) for name, p in self.trained().items()}

    def _copy(self, name: str, p: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get(name)
        return p if copy is None or copy.grad is None else copy

    # Their gradients.
    def gradients(self, given: Collection[int] = ()) -> dict[str, torch.Tensor]:
        """What this rank has of them, zeros where there is none. given: ids of the tensors that are clipped or updated now."""
        return {name: self._gradient_of(name, p, given) for name, p in self.trained().items()}

    def _gradient_of(self, name: str, p: torch.Tensor, given: Collection[int]) -> torch.Tensor:
        if self._gradient is not None:
            return self._checked(name, p, self._gradient(name, p))
        copy = self._copy(name, p)
        return gradient_of(copy if copy is not p and (p.grad is None or id(copy) in given) else p)

    def _checked(self, name: str, p: torch.Tensor, found: Any) -> torch.Tensor:
        if not isinstance(found, torch.Tensor) or found.shape != p.shape:
            refuse(_WHERE, f"a gradient of {name} that is {tuple(found.shape) if isinstance(found, torch.Tensor) else found!r}",
                   f"a tensor of the parameter's shape, {tuple(p.shape)}", "Let gradient= return where it is, of each parameter")
        return found

    def taken(self) -> dict[str, torch.Tensor]:
        """What an optimizer that steps now is given."""
        owners = self.owners()
        return {name: gradient_of(owners[name]) if owners[name] is not p or self._gradient is None else
                self._gradient_of(name, p, ()) for name, p in self.trained().items()}

    def covers(self, given: Collection[int]) -> bool:
        """Whether the tensors with these ids have the gradients of all parameters."""
        return all((p.grad is None and not self.apart) or id(p) in given or id(self._copies.get(name)) in given
                   for name, p in self.trained().items())

    # Parts and wholes.
    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """On the CPU. Collective."""
        return whole(part)

    def owned_norm(self, parts: Mapping[str, torch.Tensor]) -> float | None:
        """The norm of the elements that this rank counts, where some are sharded. No communication."""
        return owned_norm(parts)

    @contextlib.contextmanager
    def attached(self, recording: Recording) -> Iterator[None]:
        """Tells `recording` meanwhile what the engine clips and updates with code of its own."""
        yield


def _copies(parameters: Mapping[str, torch.Tensor], optimizer: Any) -> dict[str, torch.Tensor]:
    """The tensors of the optimizer that are none of these parameters, and have their values."""
    pool = []
    with contextlib.suppress(Exception):  # a wrapper without groups
        pool = [p for group in optimizer.param_groups for p in group["params"]]
    if any(isinstance(p, DTensor) for p in parameters.values()) or {id(p) for p in pool} & {id(p) for p in parameters.values()}:
        return {}
    found = {}
    for name, p in parameters.items():
        for at, copy in enumerate(pool):
            if copy.shape == p.shape and torch.equal(copy.detach().to(p), p.detach()):
                found[name] = pool.pop(at)
                break
    return found


class Cut(Engine):
    """Each rank has some elements of a parameter laid flat."""

    sharded = True

    def places(self) -> dict[str, Place]:
        """Of parameters that are cut."""
        raise NotImplementedError

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        place = self.places().get(name)
        if place is None:
            return whole(part)
        full = part.detach().new_zeros(math.prod(place.shape))
        full[place.begin:place.begin + part.numel()] = part.detach().flatten()
        return all_sum(full, place.group).view(place.shape).cpu()  # of elements that no other rank has: exact

    def owned_norm(self, parts: Mapping[str, torch.Tensor]) -> float | None:
        rank, places, squares = ranks()[0], self.places(), 0.0
        for name, part in parts.items():
            place = places.get(name)
            first = rank == 0 if place is None else not isinstance(place.group, dist.ProcessGroup) or (
                0 in dist.get_process_group_ranks(place.group))
            squares += float(part.double().square().sum()) if first else 0.0
        return squares**0.5


class Fsdp1(Cut):
    """FullyShardedDataParallel: the parameters of a module in one flat tensor, of which each rank has a slice."""

    def __init__(self, model: nn.Module, optimizer: Any, gradient: GradientOf | None = None) -> None:
        super().__init__(model, optimizer, gradient)
        self._copies = {}

    def _flat(self) -> dict[str, FlatPart]:
        return {plain_name(part.name): part for part in flat_parts(plain(self.model))}

    def places(self) -> dict[str, Place]:
        return {name: Place(part.begin, part.shape, part.group) for name, part in self._flat().items() if part.sharded}

    def everything(self) -> dict[str, torch.Tensor]:
        flat = self._flat()
        others = {name: value for name, value in super().everything().items()
                  if name not in flat and name.rpartition(".")[2] != FLAT_PARAMETER}
        return {**{name: part.value for name, part in flat.items()}, **others}

    def trained(self) -> dict[str, torch.Tensor]:
        flat = self._flat()
        others = {name: p for name, p in super().trained().items() if name not in flat and name.rpartition(".")[2] != FLAT_PARAMETER}
        return {**{name: part.value for name, part in flat.items() if part.owner.requires_grad}, **others}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        flat = self._flat()
        return {name: tuple(flat[name].shape if name in flat else p.shape) for name, p in self.trained().items()}

    def owners(self) -> dict[str, torch.Tensor]:
        flat = self._flat()
        return {name: flat[name].owner if name in flat else p for name, p in self.trained().items()}

    def gradients(self, given: Collection[int] = ()) -> dict[str, torch.Tensor]:
        flat = self._flat()
        return {name: flat[name].gradient() if name in flat else gradient_of(p) for name, p in self.trained().items()}

    def taken(self) -> dict[str, torch.Tensor]:
        return self.gradients()

    def covers(self, given: Collection[int]) -> bool:
        return all(owner.grad is None or id(owner) in given for owner in self.owners().values())

    @contextlib.contextmanager
    def attached(self, recording: Recording) -> Iterator[None]:
        original = FullyShardedDataParallel.clip_grad_norm_

        def clip(model: FullyShardedDataParallel, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
            mine = bool(self.places()) and model in list(plain(self.model).modules())  # one that is not cut calls PyTorch's
            if mine:
                recording.clipping(list(self.owners().values()), float(max_norm), None)
            norm = original(model, max_norm, norm_type)
            if mine and norm_type == 2:
                recording.clipped_at(norm)
            return norm

        setattr(FullyShardedDataParallel, "clip_grad_norm_", clip)
        try:
            yield
        finally:
            setattr(FullyShardedDataParallel, "clip_grad_norm_", original)


class MainGrad(Engine):
    """Megatron's way: micro-batches add up in a buffer in fp32, of which each parameter has a view in `main_grad`."""

    apart = True

    def _gradient_of(self, name: str, p: torch.Tensor, given: Collection[int]) -> torch.Tensor:
        if self._gradient is not None:
            return super()._gradient_of(name, p, given)
        return self._checked(name, p, getattr(p, "main_grad", None))

    def taken(self) -> dict[str, torch.Tensor]:
        owners, gradients = self.owners(), self.gradients()
        return {name: gradients[name] if owners[name].grad is None else gradient_of(owners[name]) for name in gradients}


# By what a model or an optimizer is known: its adapter, the package whose version counts, and those that were tried.
_KNOWN: tuple[tuple[Callable[[nn.Module], bool], type[Engine]], ...] = (
    (lambda model: any(isinstance(module, FullyShardedDataParallel) for module in model.modules()), Fsdp1),
    (lambda model: any(getattr(p, "main_grad", None) is not None for p in model.parameters()), MainGrad))


def _kind(model: nn.Module) -> type[Engine]:
    return next((adapter for found, adapter in _KNOWN if found(model)), Engine)


def engine_of(model: nn.Module, optimizer: Any, gradient: GradientOf | None, stages: bool) -> Engine:
    """The adapter of the engine that trains the model. ConfigError: it is not known, or not in this version."""
    return _kind(model)(model, optimizer, gradient)


def is_sharded(model: nn.Module) -> bool:
    """Whether a rank holds parts of the parameters."""
    return _kind(model).sharded or any(isinstance(p, DTensor) for p in plain(model).parameters())
