"""Advice that depends on what the recording saw of the step. It replaces the line of src/verify/changes.cpp, which knows the dumps alone."""
from __future__ import annotations

from typing import Any, Iterable, Mapping, Sequence

from torch import nn
from torch.distributed.tensor import DTensor

STEP_ONCE = "call `optimizer.step()` once, after the last backward of the step, and not in the loop over its micro-batches"
EMPTY_ONCE = "call `optimizer.zero_grad()` before the first backward of the step, and not between a backward and `optimizer.step()`"
NOT_REENTRANT = ("checkpoint with `use_reentrant=False`: a reentrant checkpoint of which no input has a gradient gives none to the parameters "
                 "inside it")
REDUCE_LAST = "let FSDP2 reduce what all micro-batches have given: `model.set_requires_gradient_sync(last)` before each forward"
WHOLE_MESH = ("shard on a mesh of all ranks that see different samples, of replicas and shards: `fully_shard(model, mesh=mesh)`, not on "
              'one axis of it (`mesh["shard"]`)')
NOT_IGNORED = "shard the parameters that are not: `fully_shard(model)` around all of them, and none in `ignored_params=`"


def known_changes(everyone: Sequence[Mapping[str, Any]], model: nn.Module, places: int, findings: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """{finding: its advice}, also of findings that are not made. everyone: by rank what was recorded. places: how many ranks see
    different samples. findings: of the recording itself."""
    def anywhere(fact: str) -> bool:
        return any(one[fact] for one in everyone)

    trained = [p for p in model.parameters() if p.requires_grad]
    meshes = [p.device_mesh for p in trained if isinstance(p, DTensor)]
    shards = any(hasattr(module, "set_requires_gradient_sync") for module in model.modules())
    known = {}
    if anywhere("emptied"):
        known.update(dict.fromkeys(("gradient_lost", "no_gradient", "micro_batches_lost"), EMPTY_ONCE))
    elif shards:
        known["micro_batches_lost"] = REDUCE_LAST
    if anywhere("cut_by_checkpoint") and not anywhere("emptied"):
        known["gradient_lost"] = NOT_REENTRANT
    of_parts = ("replicas_differ", "not_summed_over_axis")
    if shards and any(mesh.size() < places for mesh in meshes):
        known.update(dict.fromkeys(of_parts, WHOLE_MESH))
    elif shards and len(meshes) < len(trained):
        known.update(dict.fromkeys(of_parts, NOT_IGNORED))
    if anywhere("several"):
        known.update(dict.fromkeys(("replicas_differ", "micro_batches_lost", "micro_batches_not_reduced", "optimizer_differs"), STEP_ONCE))
    return known | {finding["id"]: finding["change"] for finding in findings if "change" in finding}
