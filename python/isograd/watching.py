"""isograd.watch: one step of a trainer, beside the same step on one device."""
from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import json
import math
import pathlib
import pickle
import tempfile
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from . import _checks, _random, _updates
from ._assemble import assembled, copied, held, owned_norm, plain, plain_name, ranks, spread, summed, trained, whole
from ._dumps import add_to_step, write_dump
from ._errors import ConfigError, PeerError, refuse
from ._groups import Buffer, Group, gather_bytes, gather_objects
from ._jumps import measure
from ._recording import Recording
from ._reference import LARGEST_SHARES, Loss, Mean, Reference, fill, one_process, set_modes
from ._samples import digest, on_cpu
from ._verdict import Verdict, compare

PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
LAST_READ = 60.0  # seconds that rank 0 waits at most until the others have its verdict
_turns = 0  # of all watches of this process; the same on every rank, for watching is collective


class watch:
    """Records the step made inside it and compares it with the same step on one device. Collective.

        with isograd.watch(model, optimizer, micro_batches=mine, loss=sample_loss) as step:
            train_step(model, optimizer, mine)   # yours: forward, backward, clip, update
            step.log(loss=loss.item())           # if you want the log compared
        print(step.verdict)

    model:         as you train it: plain, DDP, FSDP2 (fully_shard), DTensors, torch.compile; or a pipeline's stage.
    optimizer:     whose groups hold the parameters and whose step() the gradient goes to; others that step inside the block
                   are seen too. None: the gradient is taken at the step of whichever steps, else at the end of the block.
    micro_batches: what this rank takes, [micro-batch][sample]; a sample is anything that pickles. None: `add` tells it.
    loss:          loss(model, sample) -> the losses of its targets, one for each, or (their sum, how many). Called on
                   rank 0 alone, with a plain model in fp64 and a sample in fp64, on the CPU.
    make_model:    () -> the model before it was wrapped; needed where it is sharded, else a copy is made.
    mean:          "token": the losses' sum over the targets of the whole step; "sample": each sample's own mean, then
                   their mean; a number: the sum over that.
    ids:           sample -> an integer; samples of one id are one sample, which counts once.
    data:          group or mesh of the ranks that see different samples; None: all do.
    stages:        every rank has other parameters, under the names of the whole model.
    max_norm:      what the step clips to, where it clips with code of its own: PyTorch's and isograd's is seen.
    precision:     "fp32", "bf16", ...; None: that of the parameters, of autocast or of FSDP2's policy.
    reference:     the type of the reference; torch.float64 finds most.
    alone:         also make the step on one process in the run's precision: a sharper bound.
    report:        a page goes to this file, by rank 0. folder: the dumps stay there.
    timeout:       seconds to wait for the other ranks' end of the step, and for rank 0's comparison.

    ConfigError, on every rank: models or sample lists do not fit together, the loss is random (dropout, noise: rank 0
    makes a sample twice, from other states of all generators) or takes statistics over the batch, it raises an exception,
    the model does not run in fp64. The generators go on from where the step left them. PeerError: another rank failed in the step. An exception in the block is passed on, and
    no rank waits for the one that failed.
    """

    compares = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *,
                 micro_batches: Sequence[Sequence[Any]] | None = None, loss: Loss, make_model: Callable[[], nn.Module] | None = None,
                 mean: Mean = "token", ids: Callable[[Any], int] | None = None, data: Group = None, stages: bool = False,
                 max_norm: float | None = None, precision: str | None = None,
                 reference: torch.dtype = torch.float64, alone: bool = True, report: str | None = None,
                 folder: str | None = None, timeout: float = 600.0) -> None:
        self.model, self.optimizer, self.loss = model, optimizer, loss
        self.micro_batches: Sequence[Sequence[Any]] = [] if micro_batches is None else micro_batches
        self._come: list[list[Any]] | None = [] if micro_batches is None else None
        self.make_model, self.mean, self.ids, self.data, self.stages = make_model, mean, ids, data, stages
        self.precision, self.reference, self.alone = precision, reference, alone
        self.report, self.folder, self.timeout = report, folder, timeout
        self.verdict: Verdict | None = None
        self.recording = Recording(model, optimizer)
        self.recording.max_norm = max_norm
        self._logged: dict[str, Any] = {}
        self._notes: list[str] = []
        self._unproven: list[dict[str, str]] = []
        self._copy: nn.Module | None = None  # of rank 0, as it is before the step
        self._hooks = contextlib.ExitStack()

    def log(self, *, loss: float | None = None, norm: float | None = None, targets: int | None = None,
            tokens: int | None = None) -> None:
        """Figures of the whole step as the trainer logs them. Rank 0's are compared, the norm of each rank too."""
        for name, value in {"loss": loss, "norm": norm, "targets": targets, "tokens": tokens}.items():
            if value is not None:
                self._logged[name] = value.item() if isinstance(value, torch.Tensor) else value

    def add(self, micro_batch: Sequence[Any]) -> None:
        """The samples of a micro-batch as it comes, before its backward, where micro_batches were not given."""
        if self._come is None:
            refuse("isograd.watch", "micro_batches and then another by `add`", "one of both", "Leave out micro_batches=")
        self._come.append([on_cpu(sample) for sample in micro_batch])

    def before_clipping(self) -> None:
        """Call it where you clip with code of your own; PyTorch's and isograd's clipping is seen without it."""
        self.recording.take()

    # The beginning: everything that could not be compared is refused before the step.
    def __enter__(self) -> watch:
        self.rank, self.size = ranks()
        everyone = self._agreed(self._prepared)
        _checks.same_models([told for told, *_ in everyone], self.stages)
        global _turns
        _turns = max(turn for _, turn, *_ in everyone)  # a rank may have watched something alone
        self._threads = _checks.idle_threads([place for _, _, place, _ in everyone])
        self._modes = {name: mode for *_, modes in reversed(everyone) for name, mode in modes.items()}
        self._turn = f"isograd/watch/{_turns}"
        parameters = {name: held(p) for name, p in trained(self.model).items()}
        rest = {plain_name(name): value for name, value in
                [*plain(self.model).named_parameters(), *plain(self.model).named_buffers(remove_duplicate=False)]
                if plain_name(name) not in parameters}
        self._initial, sums = assembled({**parameters, **rest}, self.stages)
        self._sums = sums[:len(parameters)]
        if self._come is None:
            self._samples = self._gathered_samples()
        self._hooks.enter_context(self.recording.attached())
        return self

    def _prepared(self) -> tuple[_checks.Told, int, _checks.Place, dict[str, bool]]:
        told = _checks.of_rank(self)
        if self.rank == 0 and self.make_model is None:
            self._copy = copy.deepcopy(plain(self.model))
        return told, _turns + 1, _checks.place(), _checks.other_modes(self.model)

    def _agreed(self, make: Callable[[], Any]) -> list[Any]:
        """What `make` gives on each rank; what one rank cannot do ends it on all. Collective."""
        problem, made = None, None
        try:
            made = make()
        except Exception as error:
            problem = error
        everyone = self._exchange((None if problem is None else f"{type(problem).__name__}: {problem}", made))
        if problem is not None:
            raise problem
        _checks.refused_by_none([said for said, _ in everyone])
        return [told for _, told in everyone]

    def _exchange(self, value: Any) -> list[Any]:
        return gather_objects(value)

    def _gathered_samples(self) -> list[Buffer]:
        """By rank along data: [micro-batch] -> samples, pickled, on rank 0. They are objects of the user's own classes, and
        come through the process group of the run that they train: what it is trusted with already."""
        own: list[bytearray] = []

        def told() -> tuple[int, list[list[str]], int, int | None]:
            mine = [[on_cpu(sample) for sample in micro] for micro in self.micro_batches]
            own.append(bytearray(pickle.dumps(mine)))
            digests = [[digest(sample) for sample in micro] for micro in mine]
            return _checks.place_along(self.data, self.rank), digests, len(own[0]), _checks.available()

        everyone = self._agreed(told)
        self._places = [where for where, *_ in everyone]
        dealt = {where: said for where, said, *_ in everyone}
        _checks.batch_fits_in_memory(sum(len(micro) for said in dealt.values() for micro in said),
                                     max(size for *_, size, _ in everyone), self.size, everyone[0][-1])
        place, first = self._places[self.rank], dict[int, int]()
        for rank, (where, said, *_) in enumerate(everyone):
            if said != everyone[first.setdefault(where, rank)][1]:
                refuse("isograd.watch", f"other samples on rank {rank} than on rank {first[where]}, which is at the same "
                       "place along the data axes", "the same samples where a model is cut", "Give `data` the axes along "
                       "which samples differ, or change the sampler")
        self._unproven = _checks.same_samples([dealt[where] for where in sorted(dealt)], self.data)
        gathered = gather_bytes(own[0] if first[place] == self.rank else bytearray(1), to=0)
        return [gathered[first[where]] for where in sorted(first)] if self.rank == 0 else []

    # The end.
    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        self._hooks.close()
        if error is not None:
            self._tell(f"failed: {type(error).__name__}: {error}")
            return
        self._tell("done")
        self._wait_for_all()
        taken = self.recording
        taken.end()
        if not self.compares:
            return
        if self._come is not None:
            self.micro_batches = self._come
            self._samples = self._gathered_samples()
        gradients, sums = assembled(taken.gradients or {}, self.stages)
        steps = max(taken.updates.steps.values(), default=1)
        did = self._exchange((taken.updates.any, taken.max_norm is not None or steps > 1, taken.norm is not None, taken.skipped))
        if all(skipped > 0 for *_, skipped in did):
            refuse("isograd.watch", f"a step that GradScaler left out, for the gradient is not finite at its scale of {taken.skipped:g}",
                   "a step with a gradient", "Watch a later one: the scale is halved each time. Where it goes on the gradient itself "
                   "is not finite: watch a step without GradScaler")
        # Collective for DTensors: on all ranks or on none.
        applied, later = (assembled(taken.applied, self.stages) if all(stepped for stepped, *_ in did) and
                          any(limited for _, limited, *_ in did) else (None, sums))
        norm = float(whole(taken.norm)) if taken.norm is not None and all(known for _, _, known, _ in did) else None
        own = {"norm": norm, "logged_norm": self._logged.get("norm"), "owned_norm": owned_norm(taken.gradients or {})}
        said = self._exchange({"initial": self._sums, "gradients": sums,
                               **{name: value for name, value in own.items() if value is not None}})
        ends = self._exchange(later)
        self._drew = self._exchange((sorted(taken.draws.names), taken.drew))  # from which generators, by rank
        names = list(taken.gradients or {})
        updated = self._exchange({"stepped": taken.updates.any, "midway": taken.midway, "states": taken.updates.states(taken.applied),
                                  "initial": dict(zip(names, self._sums)), "gradients": dict(zip(names, sums)),
                                  "taken": dict(zip(names, later)), "after": _updates.after(self.model)})
        if _differ([one["gradients"] for one in said]) and not _differ(ends) and not self.stages and steps == 1:
            # Ranks held parts when they clipped, and the same sum when they updated.
            self._notes.append("ranks clipped before gradients were summed: those of the update are compared")
            gradients, applied, taken.max_norm = applied or {}, None, None
            said = [{**one, "gradients": end} for one, end in zip(said, ends)]
            for one in said:
                one.pop("norm", None)
                one.pop("owned_norm", None)
        parts = self._parts(taken.gradients or {}, [one["gradients"] for one in said])
        self.verdict = self._from_rank_0(lambda: self._compared(gradients, applied, said, parts, updated))

    def _parts(self, own: dict[str, torch.Tensor], sums: list[list[str]]) -> list[dict[str, torch.Tensor]]:
        """By rank, on rank 0: gradients of which ranks hold other ones. Collective."""
        differing = [] if self.stages else [name for name, *found in zip(own, *sums) if len(set(found)) > 1]
        if self.size == 1 or sum(own[name].numel() * 8 for name in differing) * self.size > LARGEST_SHARES:
            return []
        mine = {name: whole(own[name]) for name in differing}
        return gather_objects(mine, to=0)

    def _store(self) -> Any:
        return dist.distributed_c10d._get_default_store() if self.size > 1 else None

    def _tell(self, what: str) -> None:
        if store := self._store():
            with contextlib.suppress(Exception):  # the store may have gone with the rank that held it
                store.set(f"{self._turn}/{self.rank}", what)

    def _wait_for_all(self) -> None:
        store = self._store()
        for other in range(self.size if store else 0):
            try:
                said = _get(store, f"{self._turn}/{other}", self.timeout).decode()
            except Exception as error:
                raise PeerError(f"isograd.watch: found rank {other} not at the end of its step after "
                                f"{self.timeout:g} s; expected every rank there. Look at what it does ({error}).") from None
            if said != "done":
                raise PeerError(f"isograd.watch: found that rank {other} {said}; expected a step that ends on "
                                "every rank. Look at that rank's own message.")

    def _from_rank_0(self, make: Callable[[], Verdict]) -> Verdict:
        """Rank 0's verdict, or its error, on every rank: the others wait without a collective, which could run out."""
        store, key = self._store(), f"{self._turn}/verdict"
        if self.rank == 0:
            try:
                with _random.kept():  # of the user, whose run goes on as if nobody had watched it
                    made: Any = make()
            except Exception as error:
                made = error
            if store:
                store.set(key, json.dumps({"error": str(made), "refused": isinstance(made, ConfigError)}
                                          if isinstance(made, Exception) else dataclasses.asdict(made)))
                with contextlib.suppress(Exception):  # the store may go with this process: not before they have read it
                    store.wait([f"{key}/{other}" for other in range(1, self.size)],
                               datetime.timedelta(seconds=min(self.timeout, LAST_READ)))
            if isinstance(made, Exception):
                raise made
            return made
        try:
            told = json.loads(_get(store, key, self.timeout))  # no pickle: others on the host may write into the store
            made = None if "error" in told else Verdict(**told)
            store.set(f"{key}/{self.rank}", b"read")
        except Exception as error:
            raise PeerError(f"isograd.watch: found no verdict of rank 0 after {self.timeout:g} s; expected it to "
                            f"make the step on one process and to compare. Look at rank 0, or give timeout= ({error}).") \
                from None
        if made is None:
            said = str(told["error"])
            raise ConfigError(said if told.get("refused") else f"isograd.watch: found that rank 0 could not "
                              f"compare: {said}; expected two dumps. See rank 0")
        return made

    # Rank 0 alone.
    def _compared(self, gradients: dict[str, torch.Tensor], applied: dict[str, torch.Tensor] | None, said: list[dict[str, Any]],
                  parts: list[dict[str, torch.Tensor]], updated: list[dict[str, Any]]) -> Verdict:
        names = list(gradients)
        precision = self.precision or self._precision()
        own = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
        batch = [pickle.loads(some) for some in self._samples]
        numbers = [self.ids(s) if self.ids else i for i, s in enumerate(s for micros in batch for m in micros for s in m)]
        once = _once(batch, numbers) if self.ids else batch
        notes = self._notes + (_checks.notes(batch) if self.ids is None else [])
        model = self.make_model() if self.make_model else self._copy
        assert model is not None
        findings, update = _updates.judge(updated)
        findings += _checks.frozen_otherwise(model, names) + self._unproven
        model = set_modes(fill(model.cpu(), self._initial, names), self.model.training, self._modes)
        _checks.fits_in_memory(model, self.reference)
        with _checks.threads(self._threads) as look:  # in fp64 their number makes no difference that is looked at
            right = one_process(copied(model), self.loss, once, self.mean, self.reference, after_each=look, own=own)
        counts = right.counts if once is batch else _counts(batch, once, numbers, right.counts)
        limit = self.recording.max_norm
        axes = self._axes(len(batch))
        clipped_by = said[0].get("norm", said[0].get("logged_norm"))
        for one in said:
            _keep_the_wrong_norm(one, right.norm)
        norm = said[0].get("norm")
        for one, part in zip(said, parts):
            one["spread"] = spread(part, parts[0])
        alike = [part for part, place in zip(parts, self._places) if place == self._places[0]]
        peers = summed(alike) if len(alike) > 1 else {}
        step = {"samples": numbers or None, "counts": counts, "parameters": names, "precision": precision,
                "loss": self._logged.get("loss"), "targets": self._logged.get("targets"),
                "tokens": self._logged.get("tokens"), "axes": axes, "norm": norm,
                "peers": dict.fromkeys(peers, list(axes)[-1]) or None,
                "clip_coefficient": _coefficient(limit, clipped_by), "ranks": None if self.stages else said,
                "findings": findings or None}
        alone = self.alone and own != self.reference

        def rounded(of: nn.Module) -> Reference:
            autocast = own if self.recording.autocast else None
            return one_process(of, self.loss, once, self.mean, torch.float32 if autocast else own, autocast, shares=False)

        with tempfile.TemporaryDirectory(prefix="isograd-") as scratch, ThreadPoolExecutor(1) as writer:
            folder = pathlib.Path(scratch) / "step"
            written = [writer.submit(write_dump, folder / "run", gradients, step, applied, peers=peers), writer.submit(
                self._write, folder / "one_process", right, once, numbers, limit, applied is not None, self.reference)]
            if alone:
                self._write(folder / "alone", rounded(model), once, numbers, limit, applied is not None, own)
            for each in written:
                each.result()
            right.shares.clear()
            verdict = compare(folder, alone, self.report, self._threads)
            if alone and self.reference == torch.float64 and ("unknown" in verdict.findings or not verdict.bounded):
                fresh = fill(model.double(), self._initial, names)
                measured = measure(fresh, lambda of, dtype: (
                    rounded(of) if dtype != torch.float64 else
                    one_process(of, self.loss, once, self.mean, dtype, shares=False)).gradients, own, gradients, right.gradients)
                if measured is not None:
                    add_to_step(folder / "one_process", moves=measured[0])
                    add_to_step(folder / "alone", rounding=measured[1])
                    verdict = compare(folder, alone, self.report, self._threads)
            if self.folder:
                kept = pathlib.Path(self.folder)
                kept.mkdir(parents=True, exist_ok=True)
                for file in folder.iterdir():
                    _checks.replace(file, kept / file.name)
                verdict.folder = str(kept)
        in_forward, in_step = ([(rank, of) for rank, of in enumerate(every) if of] for every in zip(*self._drew))
        if not verdict.passed and in_forward and not right.draws:
            rank, drew = in_forward[0]
            refuse(_random.WHERE, f"a model whose forward draws random numbers on rank {rank} (from a generator of "
                   f"{', '.join(drew)}), where that of the reference draws none", "a model that draws in neither",
                   f"{_random.CURE}; take off a hook that draws and that make_model leaves out")
        if "unknown" in verdict.findings and in_step and not right.draws:
            rank, drew = in_step[0]
            notes.append(f"the step draws random numbers on rank {rank} (from a generator of {', '.join(drew)}), and the loss of "
                         "the reference draws none: where they go into the gradient, no other process makes the same one")
        verdict.update = update
        verdict.notes += notes
        if right.unseeded:
            verdict.notes.append(f"the loss draws from a generator of {', '.join(right.unseeded)}: of {_random.TRIES} times that a "
                                 "sample was made, from other states, it was the same each time")
        return verdict

    def _write(self, folder: pathlib.Path, step: Reference, dealt: list[list[list[Any]]], numbers: list[int],
               limit: float | None, applied: bool, dtype: torch.dtype) -> None:
        coefficient = _coefficient(limit, step.norm)
        factor = 1.0 if coefficient is None else coefficient
        seen = list(dict.fromkeys(numbers)) if self.ids else numbers
        write_dump(folder, step.gradients, {
            "samples": seen or None, "counts": step.counts, "parameters": list(step.gradients), "loss": step.loss,
            "precision": PRECISIONS[dtype], "targets": step.targets, "norm": step.norm, "clip_coefficient": coefficient},
            {name: factor * g for name, g in step.gradients.items()} if applied else None, step.shares)

    def _precision(self) -> str:
        policies = {getattr(getattr(m, "_get_fsdp_state", lambda: None)(), "_mp_policy", None) for m in self.model.modules()}
        lowest = {p.dtype for p in trained(self.model).values()} | {getattr(policy, "param_dtype", None) for policy in policies}
        lowest.add(self.recording.autocast)
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            if dtype in lowest:
                return PRECISIONS[dtype]
        return "fp64"

    def _axes(self, dealt: int) -> dict[str, int]:
        if isinstance(self.data, DeviceMesh) and self.data.mesh_dim_names:
            axes = dict(zip(self.data.mesh_dim_names, self.data.shape))
        else:
            sharded = any(hasattr(m, "set_gradient_divide_factor") for m in self.model.modules())
            axes = {"dp_shard" if sharded else "dp_replicate": dealt}
        if self.size > dealt:
            axes["pp" if self.stages else "tp"] = self.size // dealt
        return axes


def _get(store: Any, key: str, seconds: float) -> bytes:
    store.wait([key], datetime.timedelta(seconds=seconds))
    return bytes(store.get(key))


def _keep_the_wrong_norm(one: dict[str, Any], right: float) -> None:
    """Keeps as "norm" the one that is further from the right one: the norm that a rank clipped by or the one that it logs."""
    some = [one.pop(key) for key in ("norm", "logged_norm") if key in one]
    if some:
        one["norm"] = max(some, key=lambda norm: abs(norm - right) if math.isfinite(norm) else math.inf)


def _differ(sums: list[list[str]]) -> bool:
    return any(one != sums[0] for one in sums)


def _coefficient(limit: float | None, norm: float | None) -> float | None:
    if limit is None or norm is None:
        return None
    coefficient = limit / (norm + 1e-6)  # as PyTorch clips
    return 1.0 if coefficient >= 1.0 else coefficient  # NaN where the norm is


def _once(batch: list[list[list[Any]]], numbers: list[int]) -> list[list[list[Any]]]:
    """The batch with each sample where it comes first."""
    seen: set[int] = set()
    left = iter(numbers)

    def new(number: int) -> bool:
        known = number in seen
        seen.add(number)
        return not known

    return [[[sample for sample in micro if new(next(left))] for micro in micros] for micros in batch]


def _counts(batch: list[list[list[Any]]], once: list[list[list[Any]]], numbers: list[int],
            counts: list[list[int]]) -> list[list[int]] | None:
    """What the ranks counted is known where nothing was taken twice."""
    return counts if len(set(numbers)) == len(numbers) else None
