"""PyTorch's private names: no other file of the package has one, and importing this asserts each, so that a version which renames
one is refused with that name, and no comparison goes wrong in silence."""
from __future__ import annotations

import dataclasses
import inspect
import pathlib
import types
from typing import Any, Iterator, Mapping

import torch
import torch.distributed as dist
import torch.nn.utils.clip_grad as clips
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper
from torch.distributed.fsdp import _flat_param, _init_utils, FSDPModule, FullyShardedDataParallel
from torch.distributed.fsdp._common_utils import FSDP_WRAPPED_MODULE
from torch.distributed.fsdp.fully_sharded_data_parallel import FLAT_PARAM
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

# torch.nn.utils.clip_grad calls these two functions; a recording replaces them, to see each clip.
CLIPS_BY_NORM, GROUPS_OF_VALUE_CLIP = "_clip_grads_with_norm_", "_group_tensors_by_device_and_dtype"
RUNS_BACKWARD = "_engine_run_backward"  # by which torch.autograd makes every backward
COMPILED = "_orig_mod"  # of torch.compile's wrapper: the module
CHECKPOINTED = "_checkpoint_wrapped_module"  # of checkpoint_wrapper's
FSDP1 = "_fsdp_wrapped_module"  # of FullyShardedDataParallel's
FLAT_PARAMETER = "_flat_param"  # the name of its parameter, in place of those of the module


def in_backward() -> bool:
    """Whether autograd runs a backward in this thread now."""
    return bool(torch._C._current_graph_task_id() != -1)


def gives_new_tensors(operator: Any) -> bool:
    """Whether an operator as TorchDispatchMode sees it gives tensors that are no views of its arguments, nor these changed."""
    return all(result.alias_info is None for result in operator._schema.returns)


def device_types(group: ProcessGroup) -> set[str]:
    """The kinds of devices that the group has a backend for."""
    return {device.type for device in group._device_types}


def cpu_backend(group: ProcessGroup) -> Any:
    """The backend that reduces the group's tensors on the CPU."""
    return group._get_backend(torch.device("cpu"))


def default_store() -> Any:
    """The store by which the process group was made."""
    return dist.distributed_c10d._get_default_store()


def has_comm_hook(ddp: DistributedDataParallel) -> bool:
    """Whether someone has registered a communication hook."""
    return bool(ddp._comm_hooks)


def hooks_of(p: torch.Tensor) -> list[Any]:
    """The hooks on the gradient of a tensor."""
    return list((p._backward_hooks or {}).values())


def writes_to(tensor: torch.Tensor) -> int:
    """How often it was written to in place, without what went through `.data`."""
    return int(tensor._version)


def infinities(scaler: torch.amp.GradScaler, optimizer: Any) -> Mapping[str, torch.Tensor]:
    """By device: 1 where the scaler has found an infinity or NaN in the optimizer's gradients."""
    found: Mapping[str, torch.Tensor] = scaler._found_inf_per_device(optimizer)
    return found


def mixed_dtypes(module: nn.Module) -> set[torch.dtype | None]:
    """The precisions in which FSDP, the first or the second, computes the module and sums its gradients; None: it says none."""
    state = getattr(module, "_get_fsdp_state", None)
    policy = module.mixed_precision if isinstance(module, FullyShardedDataParallel) else None if state is None else state()._mp_policy
    return set() if policy is None else {policy.param_dtype, policy.reduce_dtype}


@dataclasses.dataclass
class FlatPart:
    """This rank's elements of a parameter that FullyShardedDataParallel has made flat: those from `begin` on."""

    name: str
    shape: torch.Size
    sharded: bool
    begin: int
    value: torch.Tensor
    owner: torch.Tensor  # what an optimizer holds: the flat parameter, or with use_orig_params the part
    group: ProcessGroup  # whose ranks have all elements
    flat: slice  # where they are in the owner's elements
    unsharded: slice  # and in a gradient that was not reduced (no_sync)

    def gradient(self) -> torch.Tensor:
        """Zeros where there is none."""
        found = self.owner.grad
        if found is None:
            return torch.zeros_like(self.value)
        kept = found.flatten()[self.flat if found.shape == self.owner.shape else self.unsharded]
        return kept if self.sharded else kept.view(self.shape)


def flat_parts(model: nn.Module) -> Iterator[FlatPart]:
    """Of all parameters in the flat ones of FullyShardedDataParallel, outside of forward and backward."""
    names = {id(module): name for name, module in model.named_modules()}
    for wrapper in FullyShardedDataParallel.fsdp_modules(model):
        handle = wrapper._handle
        if handle is None:
            continue
        flat, sharded = handle.flat_param, handle.uses_sharded_strategy
        values = getattr(flat, "_local_shard", flat).detach()
        for i, (of, shape, info) in enumerate(zip(flat._param_infos, flat._shapes, flat._shard_param_infos)):
            at, size, begin = (info.offset_in_shard, info.numel_in_shard, info.intra_param_start_idx) if info.in_shard else (0, 0, 0)
            value = values[at:at + size]
            own = flat._params[i] if handle._use_orig_params else None
            whole_at = handle.rank * flat._sharded_size.numel() + at
            name = names[id(of.module)]  # as the module is called now: an adapter may have been put around it since
            yield FlatPart(f"{name}.{of.param_name}" if name else of.param_name, shape, sharded, begin, value if sharded else value.view(shape),
                           flat if own is None else own, handle.process_group, slice(at, at + size) if own is None else slice(0, size),
                           slice(whole_at, whole_at + size) if own is None else slice(begin, begin + size))


def is_dropout(module: nn.Module) -> bool:
    """Dropout of any form."""
    return isinstance(module, nn.modules.dropout._DropoutNd)


def is_batch_norm(module: nn.Module) -> bool:
    """BatchNorm of any dimension, and SyncBatchNorm."""
    return isinstance(module, nn.modules.batchnorm._BatchNorm)


class BatchNormOfOneProcess(nn.modules.batchnorm._BatchNorm):
    """BatchNorm of any dimension, of one process in a group of several."""

    def _check_input_dim(self, input: torch.Tensor) -> None:
        pass


def _uses(function: types.FunctionType, name: str) -> bool:
    return name in function.__code__.co_names


def _flat_names() -> dict[str, bool]:
    """Those of flat parameters, which `flat_parts` takes."""
    handle, info = _flat_param.FlatParamHandle, getattr(_flat_param, "_ShardParamInfo", None)
    of_flat = ("_param_infos", "_shapes", "_shard_param_infos", "_sharded_size", "_local_shard", "_params")
    of_handle = ("_use_orig_params", "process_group", "rank")
    of_part = ("in_shard", "offset_in_shard", "numel_in_shard", "intra_param_start_idx")
    return {
        f"FullyShardedDataParallel.{FSDP1}": FSDP_WRAPPED_MODULE == FSDP1,
        f"FullyShardedDataParallel.{FLAT_PARAMETER}": FLAT_PARAM == FLAT_PARAMETER,
        **{f"FlatParameter.{name}": name in inspect.get_annotations(_flat_param.FlatParameter) for name in of_flat},
        **{f"FlatParamHandle.{name}": _uses(handle.__init__, name) for name in of_handle},
        "FlatParamHandle.uses_sharded_strategy": hasattr(handle, "uses_sharded_strategy"),
        "FullyShardedDataParallel._handle": _uses(_init_utils._init_param_handle_from_params, "_handle"),
        **{f"_ShardParamInfo.{name}": hasattr(info, name) for name in of_part},
        **{f"ParamInfo.{name}": hasattr(_flat_param.ParamInfo, name) for name in ("module", "param_name")},
    }


def names() -> dict[str, bool]:
    """The names, and whether this torch has them."""
    of_compile = pathlib.Path(torch.__file__).parent / "_dynamo/eval_frame.py"  # importing it takes two seconds
    return {
        "torch._C._current_graph_task_id": hasattr(torch._C, "_current_graph_task_id"),
        "ProcessGroup._device_types": hasattr(ProcessGroup, "_device_types"),
        "ProcessGroup._get_backend": hasattr(ProcessGroup, "_get_backend"),
        "distributed_c10d._get_default_store": hasattr(dist.distributed_c10d, "_get_default_store"),
        "DistributedDataParallel._comm_hooks": _uses(DistributedDataParallel.__init__, "_comm_hooks"),
        "Tensor._backward_hooks": hasattr(torch.Tensor, "_backward_hooks"),
        "OpOverload._schema": hasattr(torch.ops.aten.add.Tensor, "_schema"),
        "Tensor._version": hasattr(torch.Tensor, "_version"),
        "GradScaler._found_inf_per_device": hasattr(torch.amp.GradScaler, "_found_inf_per_device"),
        "FSDPModule._get_fsdp_state": hasattr(FSDPModule, "_get_fsdp_state"),
        "FSDPState._mp_policy": _uses(FSDPState.init, "_mp_policy"),
        **_flat_names(),
        "dropout._DropoutNd": hasattr(nn.modules.dropout, "_DropoutNd"),
        "batchnorm._BatchNorm": hasattr(nn.modules.batchnorm, "_BatchNorm"),
        f"clip_grad.{CLIPS_BY_NORM}": _uses(clips.clip_grad_norm_.__wrapped__, CLIPS_BY_NORM),
        f"clip_grad.{GROUPS_OF_VALUE_CLIP}": _uses(clips.clip_grad_value_.__wrapped__, GROUPS_OF_VALUE_CLIP),
        f"torch.autograd.{RUNS_BACKWARD}": _uses(torch.autograd.grad, RUNS_BACKWARD),
        f"OptimizedModule.{COMPILED}": of_compile.exists() and f'"{COMPILED}"' in of_compile.read_text(),
        f"CheckpointWrapper.{CHECKPOINTED}": checkpoint_wrapper._CHECKPOINT_WRAPPED_MODULE == CHECKPOINTED,
    }


if _missing := [name for name, there in names().items() if not there]:
    raise ImportError(f"isograd: found torch {torch.__version__} without {', '.join(_missing)}; expected torch 2.10 to 2.15, whose "
                      "private names isograd knows. Install one of these.")
