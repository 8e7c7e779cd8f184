"""What has to hold before a step can be compared, said on every rank."""
from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import socket
import time
from typing import TYPE_CHECKING, Any, Callable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ._assemble import plain, plain_name, trained
from ._errors import ConfigError, refuse
from ._groups import Group
from ._samples import digest

if TYPE_CHECKING:
    from .watching import watch

_WHERE = "isograd.watch"
Told = dict[str, tuple[int, ...]]


Place = tuple[str, int]


def place() -> Place:
    """The host that this rank runs on, and with how many threads."""
    return socket.gethostname(), torch.get_num_threads()


def idle_threads(places: Sequence[Place]) -> int:
    """Of this rank and of the ranks beside it on its host while they wait for it, at most as many as it has processors."""
    host = socket.gethostname()
    return max(torch.get_num_threads(), min(sum(threads for where, threads in places if where == host),
                                            len(os.sched_getaffinity(0))))


@contextlib.contextmanager
def threads(number: int) -> Iterator[Callable[[], None]]:
    """PyTorch works on so many threads, then on as many as before: at once if the function that is given, called now and
    then, finds that they get less than three quarters of the processors that they would. Beside a process that computes,
    threads that meet at each product are several times slower than one."""
    before = torch.get_num_threads()
    since: list[tuple[float, float]] = []  # the first call: what came before it (a model is copied) is one thread's work

    def look() -> None:
        now, used = time.perf_counter(), time.process_time()
        if not since:
            since.append((now, used))
        wall = now - since[0][0]
        if number > before and wall > 0.2 and used - since[0][1] < 0.75 * number * wall:
            torch.set_num_threads(before)

    torch.set_num_threads(number)
    try:
        yield look
    finally:
        torch.set_num_threads(before)


def of_rank(step: watch) -> Told:
    """Refuses what this rank can see by itself; tells names and shapes of its parameters."""
    if not isinstance(step.micro_batches, (list, tuple)) or not all(isinstance(m, list) for m in step.micro_batches):
        refuse(_WHERE, "micro_batches that are no lists of samples", "[micro-batch][sample], each micro-batch a list",
               "Write [[sample, ...]] for a step of one micro-batch, [list(zip(x, y))] for tensors of a batch")
    if not (step.mean in ("token", "sample") if isinstance(step.mean, str) else step.mean > 0):
        refuse(_WHERE, f"mean={step.mean!r}", '"token", "sample" or a number above zero', "Say what the loss is divided by")
    parameters = trained(step.model)
    if not parameters:
        refuse(_WHERE, "a model without a parameter that is trained", "one to differentiate", "Give it the trained model")
    sharded = [name for name, p in parameters.items() if isinstance(p, DTensor)]
    if step.make_model is None and (sharded or step.stages):
        refuse(_WHERE, f"a model that is cut over ranks ({sharded[0] if sharded else 'stages'}) and no make_model",
               "a way to make the whole model on one process", "Give make_model=lambda: Model(...), before it is wrapped")
    for name, module in step.model.named_modules():
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            refuse(_WHERE, f"dropout of {module.p} in {name or 'the model'}", "a step that gives the same when it is made again",
                   "Set p = 0 or call eval() on it for this step: no other process draws the same numbers")
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            refuse(_WHERE, f"statistics over the batch in {name or 'the model'} ({type(module).__name__})",
                   "a loss that is a sum over samples", "Call eval() on it for this step: its loss depends on how the batch "
                   "is cut, and no cut is one device's")
    return {name: tuple(p.shape) for name, p in parameters.items()}


def other_modes(model: nn.Module) -> dict[str, bool]:
    """Of the modules that are not in the model's mode, training or not, by the plain model's names."""
    return {plain_name(name): module.training for name, module in plain(model).named_modules()
            if module.training != model.training}


def refused_by_none(problems: Sequence[str | None]) -> None:
    """Refuses on every rank what one cannot do."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            raise ConfigError(f"{_WHERE}: found that rank {rank} refuses its part: {problem}; expected a step "
                              "that every rank can make. Look at that rank's own message.")


def same_models(everyone: Sequence[Told], stages: bool) -> None:
    """Refuses models that are not the same on every rank."""
    for rank, told in enumerate(everyone):
        first = everyone[0]
        if not stages and told != first:
            differ = [name for name in {**first, **told} if told.get(name) != first.get(name)]
            refuse(_WHERE, f"another model on rank {rank} than on rank 0: {differ[0]} is {told.get(differ[0], 'not there')} "
                   f"and {first.get(differ[0], 'not there')}", "the same model on every rank",
                   "Build it from the same configuration; stages=True where ranks hold stages of a pipeline")


def place_along(data: Group, rank: int) -> int:
    """This rank's number among those that see different samples."""
    if data is None:
        return rank
    if isinstance(data, DeviceMesh):
        place = 0
        for axis, size in enumerate(data.shape):
            place = place * size + data.get_local_rank(axis)
        return place
    if (place := dist.get_rank(data)) < 0:
        refuse(_WHERE, f"`data` as a group without rank {rank}", "this rank's own group of those that see other samples",
               "Give each rank the group that it is in")
    return place


def fits_in_memory(model: nn.Module, dtype: torch.dtype) -> None:
    """Refuses a reference that cannot be made here: two copies of the model, its gradient and a share of it."""
    count = sum(p.numel() for p in model.parameters())
    needed = 5 * count * dtype.itemsize
    free = available()
    if free is not None and needed > free:
        refuse(_WHERE, f"a model of {count:,} parameters, whose step on one process needs {needed / 2**30:.3g} GiB beside "
               "activations", f"no more than the {free / 2**30:.3g} GiB that are free",
               "Watch a smaller model of the same code, or give reference=torch.float32")


def batch_fits_in_memory(samples: int, largest: int, size: int, free: int | None) -> None:
    """Refuses samples that rank 0 cannot hold: as they arrive, `largest` bytes for each of `size` places, and as objects."""
    needed = 2 * size * largest
    if free is not None and needed > free:
        refuse(_WHERE, f"a batch of {samples:,} samples, whose gathering on one process needs {needed / 2**30:.3g} GiB",
               f"no more than the {free / 2**30:.3g} GiB that are free", "Watch a step of fewer samples, or let a sample be "
               "what its data are read by (a path, an index) and `loss` read it")


def too_large(error: Exception) -> bool:
    """Whether it says that memory is not to be had."""
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error)


def available() -> int | None:
    """Free bytes of memory; None where the system does not say."""
    try:
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None


def notes(batch: Sequence[Sequence[Sequence[Any]]]) -> list[str]:
    """Of samples that are there more than once, which nothing says is a mistake."""
    seen: dict[str, int] = {}
    for rank, micros in enumerate(batch):
        for micro in micros:
            for sample in micro:
                other = seen.setdefault(digest(sample), rank)
                if other != rank:
                    return [f"ranks {other} and {rank} hold a sample of the same content; it counts twice, also on one "
                            "device. Where that is a sampler's padding give ids=: a sample then counts once there"]
    return []


def frozen_otherwise(model: nn.Module, names: Sequence[str]) -> list[dict[str, str]]:
    """A finding where the model that `make_model` makes and the one of the run, which trains `names`, freeze other parameters."""
    made = {plain_name(name): p.requires_grad for name, p in model.named_parameters()}
    said = [f"{what} {', '.join(some[:5])}{' and more' if len(some) > 5 else ''}" for what, some in (
        ("does not train", [name for name, trains in made.items() if trains and name not in names]),
        ("trains", [name for name in names if not made.get(name, True)])) if some]
    return [{"id": "frozen_otherwise", "sentence": f"the run {' and '.join(said)}, and make_model says otherwise: correct "
             "requires_grad in the run, or set it in make_model too where that is meant"}] if said else []


def same_samples(batch: Sequence[Sequence[Sequence[str]]], data: Group) -> list[dict[str, str]]:
    """A finding where all ranks along an axis of `data` have the same samples: a step that leaves out the reduction over them
    has the same gradient. batch: by place along data, the digests of the samples of each micro-batch."""
    have = [sorted(sample for micro in micros for sample in micro) for micros in batch]
    mesh = isinstance(data, DeviceMesh) and data.ndim > 1
    sizes = list(data.shape) if isinstance(data, DeviceMesh) and mesh else [len(have)]
    names = (data.mesh_dim_names if isinstance(data, DeviceMesh) and mesh else None) or [f"axis {i}" for i in range(len(sizes))]
    findings = []
    stride = len(have)
    for name, size in zip(names, sizes):
        outer, stride = stride, stride // size
        if size > 1 and any(have) and all(some == have[at // outer * outer + at % stride] for at, some in enumerate(have)):
            where = f"all {size} ranks along {name}" if mesh else f"all {size} ranks"
            findings.append({"id": "reduction_not_proven", "sentence": f"{where} have the same samples: a step that does not "
                             "reduce its gradient over them has the same one, so that nothing is proven of the reduction; give "
                             "each rank samples of its own, and `data` the axes along which they differ"})
    return findings


def replace(path: pathlib.Path, to: pathlib.Path) -> None:
    """Moves a file or folder to where an older one may be."""
    if to.is_dir():
        shutil.rmtree(to)
    elif to.exists():
        os.unlink(to)
    shutil.move(str(path), str(to))
