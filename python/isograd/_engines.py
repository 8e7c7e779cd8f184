"""Where engines keep parameters and their gradients: one adapter for each, and refusals of those that have none.

PyTorch has a parameter's gradient in `.grad`, whole or as a DTensor. Elsewhere a rank holds some elements of a parameter laid
flat, the optimizer updates other tensors than the model's, or the gradient is in a buffer of the engine. An adapter says where
that is, without communication, for it is asked in the middle of a step; `whole` puts parts together when the step has ended.
"""
from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from typing import Any, Callable, cast, Collection, Iterator, Mapping, TYPE_CHECKING

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

    title = "PyTorch"
    sharded = False  # a rank's parts are no DTensors, so that make_model is needed
    repeats = True  # a step can be made again from the parameters and optimizer.state_dict()
    scaler = "GradScaler"  # leaves out updates

    def __init__(self, model: nn.Module, optimizer: Any, gradient: GradientOf | None = None) -> None:
        self.model, self.optimizer, self._gradient = model, optimizer, gradient
        self._copies = _copies(self.trained(), optimizer)

    @property
    def apart(self) -> bool:
        """The optimizer may be given other tensors than the gradients are in: both are compared."""
        return self._gradient is not None or any(copy.grad is not None for copy in self._copies.values())

    # The parameters, by the names that they have in the model before it was wrapped.
    def everything(self) -> dict[str, torch.Tensor]:
        """This rank's part of each parameter and buffer."""
        model = plain(self.model)
        return {plain_name(name): value for name, value in [*model.named_parameters(), *model.named_buffers(remove_duplicate=False)]}

    def trained(self) -> dict[str, torch.Tensor]:
        """This rank's part of each parameter that gets a gradient; a tied one stands once."""
        return {plain_name(name): p for name, p in plain(self.model).named_parameters() if p.requires_grad}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(p.shape) for name, p in self.trained().items()}

    def owners(self) -> dict[str, torch.Tensor]:
        """By trained parameter: the tensor that an optimizer's group has for it."""
        return {name: self._copy(name, p) for name, p in self.trained().items()}

    def elements(self, name: str, of_owner: torch.Tensor) -> torch.Tensor | None:
        """This rank's elements of a parameter in a tensor of its owner's shape, such as a state; None: not known where."""
        return of_owner if of_owner.shape == self.trained()[name].shape else None

    def _copy(self, name: str, p: torch.Tensor) -> torch.Tensor:
        copy = self._copies.get(name)
        return p if copy is None or copy.grad is None else copy

    # Their gradients.
    def gradients(self, given: Collection[int] = ()) -> dict[str, torch.Tensor]:
        """This rank's part of each gradient, zeros where there is none. given: ids of the tensors that are clipped or updated now."""
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
        """The gradients that an optimizer takes if it steps now."""
        owners, gradients = self.owners(), self.gradients()
        return {name: gradient if owners[name].grad is None else gradient_of(owners[name]) for name, gradient in gradients.items()}

    def nothing(self) -> bool:
        """Whether no parameter has a gradient."""
        return not self.apart and all(p.grad is None for p in self.trained().values())

    def covers(self, given: Collection[int]) -> bool:
        """Whether the tensors with these ids have the gradients of all parameters."""
        return all((p.grad is None and not self.apart) or id(p) in given or id(self._copies.get(name)) in given
                   for name, p in self.trained().items())

    def unfinished(self) -> str | None:
        """The reason why the step has no gradient yet at its end; None: it has one."""
        return None

    # Parts and wholes.
    def whole_value(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """A parameter, on the CPU. Collective."""
        return self.whole(name, value)

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """A gradient, on the CPU. Collective."""
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
        """By parameter that is cut: the place of this rank's elements."""
        raise NotImplementedError

    @functools.cached_property
    def _placed(self) -> dict[str, Place]:
        return self.places()  # once: what a rank has stays the same

    def whole(self, name: str, part: torch.Tensor) -> torch.Tensor:
        place = self._placed.get(name)
        if place is None:
            return whole(part)
        full = part.detach().new_zeros(math.prod(place.shape))
        full[place.begin:place.begin + part.numel()] = part.detach().flatten()
        return all_sum(full, place.group).view(place.shape).cpu()  # of elements that no other rank has: exact

    def owned_norm(self, parts: Mapping[str, torch.Tensor]) -> float | None:
        rank, places, squares = ranks()[0], self._placed, 0.0
        for name, part in parts.items():
            place = places.get(name)
            first = rank == 0 if place is None else not isinstance(place.group, dist.ProcessGroup) or (
                0 in dist.get_process_group_ranks(place.group))
            squares += float(part.double().square().sum()) if first else 0.0
        return math.sqrt(squares)


class Fsdp1(Cut):
    """FullyShardedDataParallel: the parameters of a module in one flat tensor, of which each rank has a slice."""

    title = "FullyShardedDataParallel"

    def __init__(self, model: nn.Module, optimizer: Any, gradient: GradientOf | None = None) -> None:
        super().__init__(model, None, gradient)
        self.optimizer = optimizer

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

    def elements(self, name: str, of_owner: torch.Tensor) -> torch.Tensor | None:
        part = self._flat().get(name)
        if part is None or of_owner.shape != part.owner.shape:
            return super().elements(name, of_owner)
        return of_owner.flatten()[part.flat].view(part.value.shape)

    def gradients(self, given: Collection[int] = ()) -> dict[str, torch.Tensor]:
        flat = self._flat()
        return {name: flat[name].gradient() if name in flat else gradient_of(p) for name, p in self.trained().items()}

    def taken(self) -> dict[str, torch.Tensor]:
        return self.gradients()

    def nothing(self) -> bool:
        return all(owner.grad is None for owner in self.owners().values())

    def covers(self, given: Collection[int]) -> bool:
        return all(owner.grad is None or id(owner) in given for owner in self.owners().values())

    @contextlib.contextmanager
    def attached(self, recording: Recording) -> Iterator[None]:
        original = FullyShardedDataParallel.clip_grad_norm_

        def clip(model: FullyShardedDataParallel, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
            mine = bool(self._placed) and model in list(plain(self.model).modules())  # one that is not cut calls PyTorch's
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


class Megatron(MainGrad):
    """Megatron-Core's DistributedDataParallel, around modules that are not Megatron's: its finish_grad_sync sums `main_grad`."""

    title = "Megatron-Core"

    def __init__(self, model: nn.Module, optimizer: Any, gradient: GradientOf | None = None) -> None:
        super().__init__(model, optimizer, gradient)
        if cast(Any, model).ddp_config.use_distributed_optimizer:
            refuse(_WHERE, "Megatron-Core with its distributed optimizer, for which a rank has the sum of some elements of main_grad alone",
                   "a sum that each rank has whole", f"Set use_distributed_optimizer=False for this step, or {_BY_DUMPS}")


class DeepSpeed(Cut):
    """DeepSpeed's engine: a rank has a slice of each ZeRO group's flat gradient, whose optimizer updates a flat copy in fp32."""

    title, apart, repeats, scaler = "DeepSpeed", True, False, "DeepSpeed's loss scale"

    def __init__(self, model: nn.Module, optimizer: Any, gradient: GradientOf | None = None) -> None:
        self.engine = cast(Any, model)
        self.zero = self.engine.optimizer
        self.kind = type(self.zero).__name__
        self._updates = 0
        super().__init__(model, None, gradient)
        self.optimizer = getattr(self.zero, "optimizer", self.zero)
        problem = next((name for name, found in (
            ("offload", bool(getattr(self.zero, "cpu_offload", False) or getattr(self.zero, "offload_optimizer", False))),
            ("experts", bool(self.engine.has_moe_layers)), ("quantised gradients", bool(self.engine.zero_quantized_gradients())),
            ("torch_autocast", bool(self.engine.torch_autocast_enabled())),
            ("round_robin_gradients, whose map of parameters (_hp_mapping) does not fit the flat buffer",
             bool(getattr(self.zero, "round_robin_gradients", False))),
            (f"{self.kind} (16 bits without ZeRO, or bf16 with sums in fp32 of ZeRO-1)",
             self.kind not in _ZERO and not isinstance(self.zero, torch.optim.Optimizer)),
            (type(model).__name__, type(model).__name__ != "DeepSpeedEngine")) if found), None)
        if problem is not None:
            refuse(_WHERE, f"DeepSpeed with {problem}", "ZeRO-1 to 3, or fp32 without ZeRO, of DeepSpeedEngine without offload, experts, "
                   "quantised gradients, autocast and round_robin_gradients",
                   f"Watch a step without it, such as one of ZeRO-2, or {_BY_DUMPS}")

    def _named(self) -> dict[str, Any]:
        return {plain_name(name): p for name, p in plain(self.model).named_parameters()}

    def places(self) -> dict[str, Place]:
        return {name: Place(self._begin(p), torch.Size(getattr(p, "ds_shape", p.shape)), self._group(p))
                for name, p in self._named().items() if hasattr(p, "ds_id") or hasattr(p, "_hp_mapping")}

    def _group(self, p: Any) -> Group:
        group: Group = p.ds_process_group if hasattr(p, "ds_id") else p._dp_group
        return group

    def _begin(self, p: Any) -> int:
        if hasattr(p, "ds_id"):
            return min(dist.get_rank(p.ds_process_group) * int(p.ds_tensor.ds_numel), int(p.ds_numel))
        return int(p._hp_mapping.lp_fragment_address.start) if p._hp_mapping is not None else 0

    def _value(self, p: Any) -> torch.Tensor:
        value: torch.Tensor = p.ds_tensor.detach()[:self._size(p)] if hasattr(p, "ds_id") else p
        return value

    def _size(self, p: Any) -> int:
        """How many elements of its gradient this rank has."""
        if hasattr(p, "ds_id"):
            return min(int(p.ds_tensor.ds_numel), int(p.ds_numel) - self._begin(p))
        return int(p._hp_mapping.lp_fragment_address.numel) if p._hp_mapping is not None else 0

    def everything(self) -> dict[str, torch.Tensor]:
        return {**super().everything(), **{name: self._value(p) for name, p in self._named().items()}}

    def trained(self) -> dict[str, torch.Tensor]:
        return {name: self._value(p) for name, p in self._named().items() if p.requires_grad}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(getattr(p, "ds_shape", p.shape)) for name, p in self._named().items() if p.requires_grad}

    def whole_value(self, name: str, value: torch.Tensor) -> torch.Tensor:
        return self.whole(name, value) if self.kind == _ZERO_3 else whole(value)  # the others have every parameter whole

    def _flat(self) -> dict[str, tuple[Any, torch.Tensor, int]]:
        """By trained parameter: itself, the flat copy that the optimizer holds, and where its elements are in that."""
        named = {id(p): (name, p) for name, p in self._named().items() if p.requires_grad}
        found = {}
        if self.kind == _ZERO_3:
            for name, p in named.values():
                group, at, _ = self.zero.grad_position[self.zero.get_param_id(p)]
                found[name] = p, self.zero.fp32_partitioned_groups_flat[group], int(at)
        elif self.kind in _ZERO:
            for params, flat in zip(self.zero.bit16_groups, self.zero.single_partition_of_fp32_groups):
                for name, p in (named[id(p)] for p in params if id(p) in named):
                    found[name] = p, flat, 0 if p._hp_mapping is None else int(p._hp_mapping.hp_fragment_address.start)
        return found

    def owners(self) -> dict[str, torch.Tensor]:
        flat = self._flat()
        return {name: flat[name][1] if name in flat else p for name, p in self.trained().items()}

    def gradients(self, given: Collection[int] = ()) -> dict[str, torch.Tensor]:
        flat = self._flat()
        return {name: self._share(flat[name][0], self._accumulated(flat[name][0])) if name in flat else gradient_of(p)
                for name, p in self.trained().items()}

    def _share(self, p: Any, found: torch.Tensor | None) -> torch.Tensor:
        if found is None:
            return torch.zeros(self._size(p), dtype=torch.float32, device=p.device)
        return found.detach().flatten()[:self._size(p)].float() / float(getattr(self.zero, "loss_scale", 1.0))

    def _accumulated(self, p: Any) -> torch.Tensor | None:
        """Its part of the gradient before clipping, times the loss scale; None: there is none."""
        if self.kind == _ZERO_3:
            group = self.zero.grad_position[self.zero.get_param_id(p)][0]
            there = self.zero.averaged_gradients.get(group) is not None
            found: torch.Tensor | None = self.zero.get_local_fp32_grad_for_param(p) if there else None
            return found
        mapping = p._hp_mapping
        if mapping is None or mapping.gradient_dict.get(mapping.param_group_index) is None:
            return None
        found = mapping.get_lp_grad_fragment(p._index_in_param_group)
        return found

    def taken(self) -> dict[str, torch.Tensor]:
        found = self.gradients()
        for name, (p, flat, at) in self._flat().items():
            if flat.grad is not None:
                found[name] = flat.grad.detach()[at:at + self._size(p)]
        return found

    def covers(self, given: Collection[int]) -> bool:
        return True

    def unfinished(self) -> str | None:
        return None if self._updates else (f"no update of DeepSpeed's engine in the block, which makes one every "
                                           f"{self.engine.gradient_accumulation_steps()} micro-batches")

    @contextlib.contextmanager
    def attached(self, recording: Recording) -> Iterator[None]:
        limit = float(self.engine.gradient_clipping())
        owner, name = (self.zero, "step") if self._flat() else (self.engine, "_take_model_step")
        original = getattr(owner, name)

        def clips(*arguments: Any, **named: Any) -> Any:
            self._updates += 1
            if limit > 0:
                recording.clipping([], limit, None)
            else:
                recording.take()
            before = float(getattr(self.zero, "loss_scale", 1.0))
            result = original(*arguments, **named)
            if getattr(self.zero, "overflow", False):
                recording.skipped = before
            elif limit > 0 and (norm := getattr(self.zero, "_global_grad_norm", None)) is not None:
                recording.clipped_at(torch.as_tensor(norm))
            return result

        setattr(owner, name, clips)
        try:
            yield
        finally:
            delattr(owner, name)


_ZERO_3 = "DeepSpeedZeroOptimizer_Stage3"
_ZERO = ("DeepSpeedZeroOptimizer", _ZERO_3)


def _of(package: str, thing: Any) -> bool:
    """Whether its class, or one that it is made of, is from that package."""
    return any(each.__module__.partition(".")[0] == package for each in type(thing).__mro__)


def _has_deepspeed(model: nn.Module) -> bool:
    return any(hasattr(p, "ds_id") or hasattr(p, "_hp_mapping") for p in model.parameters())


# Engines that are compared: how a model shows that it is one's, and its adapter.
_KNOWN: tuple[tuple[Callable[[nn.Module], bool], type[Engine]], ...] = (
    (lambda model: _of("deepspeed", model), DeepSpeed),
    (lambda model: any(isinstance(module, FullyShardedDataParallel) for module in model.modules()), Fsdp1),
    (lambda model: type(model).__module__.startswith("megatron.core.distributed."), Megatron),
    (lambda model: any(getattr(p, "main_grad", None) is not None for p in model.parameters()), MainGrad))
# Packages whose private names an adapter reads, with the versions that it was tried on: from, and below which.
_VERSIONS = {"deepspeed": ((0, 19), (0, 20))}
# Packages whose engines have no adapter.
_REFUSED = {"megatron": "Megatron-Core", "megatron_fsdp": "Megatron-FSDP", "horovod": "Horovod", "colossalai": "Colossal-AI",
            "fairscale": "FairScale"}


def _kind(model: nn.Module) -> type[Engine]:
    return next((adapter for found, adapter in _KNOWN if found(model)), Engine)


def engine_of(model: nn.Module, optimizer: Any, gradient: GradientOf | None, stages: bool) -> Engine:
    """The adapter of the engine that trains the model. ConfigError: it has none, or none for this version."""
    adapter = _kind(model)
    things = [*model.modules(), optimizer]
    for package, title in _REFUSED.items():
        if gradient is None and any(_of(package, thing) for thing in things if adapter is not Megatron or thing is not model):
            refuse(_WHERE, f"{title}, which has no adapter that says where its gradients are", "DDP and FSDP of PyTorch, ZeRO of "
                   "DeepSpeed, main_grad, or gradient=", "Give it the model that was wrapped and gradient=lambda name, parameter: "
                   f"(its gradient, reduced), or {_BY_DUMPS}")
    for package, (least, below) in _VERSIONS.items():
        if package in sys.modules and any(_of(package, thing) for thing in things):
            version = str(getattr(sys.modules[package], "__version__", "of no version"))
            numbers = tuple(int(part) if part.isdecimal() else -1 for part in version.split(".")[:2])
            if not least <= numbers < below:
                known = ".".join(map(str, least))
                refuse(_WHERE, f"{package} {version}", f"{package} {known}, whose buffers it knows",
                       f"Run `pip install '{package}=={known}.*'`, or {_BY_DUMPS}")
    if adapter is not DeepSpeed and _has_deepspeed(model):
        refuse(_WHERE, "a model that DeepSpeed trains, without its engine", "the engine",
               "Give watch what deepspeed.initialize returned first")
    if adapter.sharded and (stages or gradient is not None):
        refuse(_WHERE, f"{'stages=True' if stages else 'gradient='} and {adapter.title}", "one of both",
               f"Watch a step without stages, or {_BY_DUMPS}" if stages else "Leave it out: where that has its gradients is known")
    return adapter(model, optimizer, gradient)


def can_repeat(model: nn.Module) -> bool:
    """Whether a step can be made again from the parameters and optimizer.state_dict()."""
    return _kind(model).repeats


def is_sharded(model: nn.Module) -> bool:
    """Whether a rank holds parts of the parameters."""
    return _kind(model).sharded or any(isinstance(p, DTensor) for p in plain(model).parameters())
