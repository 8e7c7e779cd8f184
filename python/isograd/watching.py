"""isograd.watch: one step of a trainer, compared with the same step on one device. isograd.prove: a step that can be repeated,
so that causes which its verdict leaves open are tried."""
from __future__ import annotations

import contextlib
import copy
import dataclasses
import datetime
import functools
import itertools
import json
import math
import pathlib
import pickle
import time
from typing import Any, Callable, Iterator, Mapping, NoReturn, Sequence, TypedDict, TypeVar, Union

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import Unpack

from . import _random, _reference
from ._changes import known_changes
from ._engines import can_repeat, engine_of, GradientOf
from ._hypotheses import GATHER, dot, Trials
from ._native.isograd_comm import ConfigError, PeerError, compare as _compare
from ._outputs import locate, MOST_ROWS, Outputs, Sent, size_of_sent
from ._ranks import (all_sum, assembled, Buffer, copied, digest, gather_bytes, gather_objects, Group, held, like, on_cpu,
                     plain, plain_name, ranks, refuse, spread, summed, trained, whole)
from ._recording import Finding, Recording, checksums_after, frozen_otherwise, judge
from ._reference import MEANS, Batch, Features, Gradients, Loss, Mean, norm_of, Reference, Term, one_process
from ._torch_names import default_store, has_comm_hook, is_batch_norm, is_dropout, mixed_dtypes

PRECISIONS = {torch.float64: "fp64", torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
OUTPUTS = "outputs"  # in place of a verdict: rank 0 asks for them
LAST_READ = 60.0  # seconds that rank 0 waits at most until the others have its verdict
_WHERE = "isograd.watch"
_GATHERED = ("averaged_over_axis", "scaled_by_factor", "some_parameters_scaled")  # as a gather without a gradient may look
_turns = 0  # of all watches of this process; the same on every rank, for watching is collective
MicroBatches = Sequence[list[Any]]  # [micro-batch][sample]
Model = TypeVar("Model", bound=nn.Module)
Optimizer = TypeVar("Optimizer", bound=torch.optim.Optimizer)
Figure = Union[float, torch.Tensor, None]


@dataclasses.dataclass
class Verdict:
    """passed: the gradient is that of one device, and nothing that was recorded with it is wrong.

    text:     what the command `isograd compare` prints.
    json:     the same for programs (docs/verify.md); "change" of a finding is the line that says what to change.
    findings: names of the diagnoses, as docs/museum.md has them: "mean_of_rank_means".
    notes:    what was not compared, or was noticed in addition.
    folder:   the dumps, where they were to be kept.
    update:   what is proven of the optimizer's update, in a sentence.
    bounded:  the step of one process in the run's precision was a bound, or was not asked to be one.
    """

    passed: bool
    text: str
    json: dict[str, Any]
    notes: list[str] = dataclasses.field(default_factory=list)
    folder: str | None = None
    bounded: bool = True
    update: str = "not looked at"

    @property
    def findings(self) -> list[str]:
        return list(dict.fromkeys(finding["id"] for finding in self.json.get("findings", [])))

    @property
    def changes(self) -> dict[str, str]:
        """By finding what to change: one line, with the code to use between backticks."""
        return {finding["id"]: finding["change"] for finding in self.json.get("findings", []) if "change" in finding}

    def __bool__(self) -> bool:
        return self.passed

    def __str__(self) -> str:
        return self.text.rstrip("\n") + f"\nupdate: {self.update}" + "".join(f"\nnote: {note}" for note in self.notes)


def compare(run: dict[str, Any], reference: dict[str, Any], alone: dict[str, Any] | None, report: str | None,
            folder: str | None) -> Verdict:
    """The verdict of `isograd compare`. Keys are those of step.json (docs/dump.md), and tensors by name."""
    try:
        passed, text, said = _compare(run, reference, alone, report, folder)
        return Verdict(passed, text, json.loads(said))
    except ConfigError as error:
        if alone is None:
            raise
        problem = error
    verdict = compare(run, reference, None, report, folder)  # rounding of one process that is no bound: the wider one holds
    verdict.bounded = False
    verdict.notes.append(f"the step of one process in the run's precision is no bound: {problem}")
    return verdict


class WatchOptions(TypedDict, total=False):
    """The options of `watch` besides micro_batches and loss, for what passes them on."""

    features: Features | None
    make_model: Callable[[], nn.Module] | None
    mean: Mean
    terms: Sequence[Term]
    ids: Callable[[Any], int] | None
    data: Group
    stages: bool
    later: Sequence[torch.optim.Optimizer]
    max_norm: float | None
    gradient: GradientOf | None
    precision: str | None
    reference: torch.dtype
    alone: bool
    report: str | None
    folder: str | None
    timeout: float


class watch:
    """Records the step made inside it and compares it with the same step on one device. Collective.

        with isograd.watch(model, optimizer, micro_batches=mine, loss=sample_loss) as step:
            train_step(model, optimizer, mine)   # yours: forward, backward, clip, update
            step.log(loss=loss.item())           # if you want the log compared
        print(step.verdict)

    model:         as you train it: plain, DDP, FSDP2 (fully_shard), DTensors, torch.compile; or a pipeline's stage.
    optimizer:     whose groups hold the parameters and whose step() the gradient goes to; others that step inside the block
                   are seen too. None: the gradient is taken at the step of whichever steps, else at the end of the block.
    micro_batches: what this rank takes, [micro-batch][sample]; a sample is anything that pickles. None: each comes by `add`.
    loss:          loss(model, sample) -> the losses of its targets, one for each, or (their sum, how many). Called on
                   rank 0 alone, with a plain model in fp64 and a sample in fp64, on the CPU.
    features:      features(model, sample) -> what a loss over the whole batch takes of a sample, tensors in tuples, dicts
                   and the like; then `loss` is loss(model, [of each sample]) -> a single number. Samples come rank after rank.
    make_model:    () -> the model before it was wrapped; needed where it is sharded, else a copy is made.
    mean:          "token": the losses' sum over the targets of the whole step; "sample": each sample's own mean, then
                   their mean; a number: the sum over that; "weighted": loss gives (sum of weighted losses, sum of weights),
                   and theirs is the denominator; "batch": loss(model, samples) -> a single number, of all samples at once.
    terms:         further terms that are added to that loss, each with a loss, features and mean of its own: `Term`.
    ids:           sample -> an integer; samples of one id are one sample, which counts once.
    data:          group or mesh of the ranks that see different samples; None: all do.
    stages:        each rank has its own parameters, under the names of the whole model.
    later:         optimizers that hold parameters of the model and step outside the block: nothing is proven of these.
    max_norm:      what the step clips to, where it clips with its own code: PyTorch's and isograd's clipping is seen.
    gradient:      gradient(name, parameter) -> its gradient, where that is in buffers of your own; None: in `.grad`, or where
                   an engine that is known has it (docs/watch.md).
    precision:     "fp32", "bf16", ...; None: that of the parameters, of autocast or of FSDP's policy.
    reference:     the type of the reference; torch.float64 finds most.
    alone:         also make the step on one process in the run's precision: a sharper bound.
    report:        a page goes to this file, by rank 0. folder: the dumps stay there.
    timeout:       seconds to wait for the other ranks' end of the step, and for rank 0's comparison.

    ConfigError, on every rank: models or sample lists do not fit together, the loss is random (dropout, noise: rank 0
    makes a sample twice, from other states of all generators) or takes statistics over the batch, it raises an exception,
    the model does not run in fp64. The generators go on from where the step left them. PeerError: another rank failed in
    the step. An exception in the block is passed on, and no rank waits for the one that failed.
    """

    compares = True

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None, *,
                 micro_batches: MicroBatches | None = None, loss: Loss, features: Features | None = None,
                 make_model: Callable[[], nn.Module] | None = None, mean: Mean = "token", terms: Sequence[Term] = (),
                 ids: Callable[[Any], int] | None = None, data: Group = None, stages: bool = False,
                 later: Sequence[torch.optim.Optimizer] = (), max_norm: float | None = None,
                 gradient: GradientOf | None = None, precision: str | None = None, reference: torch.dtype = torch.float64,
                 alone: bool = True, report: str | None = None, folder: str | None = None, timeout: float = 600.0) -> None:
        if not isinstance(model, nn.Module):
            refuse(_WHERE, f"{_kind(model)} as the model", "a torch.nn.Module", "Give the model that the step trains")
        self.model, self.optimizer, self.terms = model, optimizer, [Term(loss, features=features, mean=mean), *terms]
        self.micro_batches: MicroBatches = [] if micro_batches is None else micro_batches
        self._added: list[list[Any]] | None = [] if micro_batches is None else None
        self.make_model, self.ids, self.data, self.stages = make_model, ids, data, stages
        self.gradient, self.precision, self.reference, self.alone = gradient, precision, reference, alone
        self.report, self.folder, self.timeout = report, folder, timeout
        self._verdict: Verdict | None = None
        self.recording = Recording(model, optimizer, later)
        self.recording.max_norm = max_norm
        self._logged: dict[str, Any] = {}
        self._notes: list[str] = []
        self._unproven: list[Finding] = []
        self._clipped = ""  # how, where ranks held parts of the gradient
        self._copy: nn.Module | None = None  # of rank 0, as it is before the step
        self._outputs = Outputs()
        self._hooks = contextlib.ExitStack()

    @property
    def verdict(self) -> Verdict:
        """ConfigError: the block has not ended, or ended with an exception."""
        if self._verdict is None:
            refuse(_WHERE, "no verdict: the block has not ended, or ended with an exception", "a step that was made",
                   "Read it after the block")
        return self._verdict

    def log(self, *, loss: Figure = None, norm: Figure = None, targets: Figure = None, tokens: Figure = None) -> None:
        """Figures of the whole step as the trainer logs them. Rank 0's are compared, the norm of each rank too."""
        for name, value in {"loss": loss, "norm": norm, "targets": targets, "tokens": tokens}.items():
            if value is None:
                continue
            self._logged[name] = value = value.item() if isinstance(value, torch.Tensor) else value
            if name in ("targets", "tokens"):
                if not (math.isfinite(value) and value >= 0 and value == int(value)):
                    refuse(_WHERE, f"{name}={value!r}", "a whole number, 0 or more", "Log the count of the whole step, or leave it out")
                self._logged[name] = int(value)

    def add(self, micro_batch: Sequence[Any]) -> None:
        """The samples of a micro-batch as it comes, before its backward, where micro_batches were not given."""
        if self._added is None:
            refuse(_WHERE, "micro_batches and then another by `add`", "one of both", "Leave out micro_batches=")
        self._added.append([on_cpu(sample) for sample in micro_batch])

    def before_clipping(self) -> None:
        """Call it where you clip with your own code; PyTorch's and isograd's clipping is seen without it."""
        self.recording.take()

    # The beginning: everything that could not be compared is refused before the step.
    def __enter__(self) -> watch:
        global _turns
        self.rank, self.size = ranks()
        torches, shapes, turns, places, modes = zip(*self._agreed(self._prepared))
        _same_torch(torches)
        _same_models(shapes, self.stages)
        _turns = max(turns)  # a rank may have watched something alone
        self._turn = f"isograd/watch/{_turns}"
        self._threads = _reference.idle_threads(places)
        self._modes = {name: mode for own in reversed(modes) for name, mode in own.items()}
        engine = self.recording.engine
        parameters = {name: held(p) for name, p in engine.trained().items()}
        rest = {name: value for name, value in engine.everything().items() if name not in parameters}
        self._initial, sums = assembled({**parameters, **rest}, self.stages, engine.whole_value)
        self._sums = sums[:len(parameters)]
        if self._added is None:
            self._samples = self._gathered_samples()
        self._hooks.enter_context(self.recording.attached())
        if self.compares:
            self._hooks.enter_context(self._outputs.of(self.model))
        return self

    def _prepared(self) -> tuple[str, dict[str, tuple[int, ...]], int, tuple[str, int], dict[str, bool]]:
        """Its torch, shapes of this rank's parameters, its turn, host and threads, and which modules are in training mode."""
        shapes = self._checked()
        if self.rank == 0 and self.make_model is None:
            self._copy = copy.deepcopy(plain(self.model))
        return str(torch.__version__), shapes, _turns + 1, _reference.place(), {
            plain_name(name): module.training for name, module in plain(self.model).named_modules()}

    def _checked(self) -> dict[str, tuple[int, ...]]:
        """Refuses what this rank can see by itself."""
        if isinstance(self.optimizer, type):
            refuse(_WHERE, f"{_kind(self.optimizer)} as the optimizer", "an optimizer", "Give the one that the step calls, or None")
        for term in self.terms:
            if not isinstance(term, Term) or not callable(term.loss):
                refuse(_WHERE, f"{_kind(getattr(term, 'loss', term))} where a loss is given", "a function loss(model, sample), and "
                       "isograd.Term(loss, weight) in terms=", "Give the function itself, not what it returns")
        if not isinstance(self.micro_batches, (list, tuple)) or not all(isinstance(m, list) for m in self.micro_batches):
            refuse(_WHERE, "micro_batches that are no lists of samples", "[micro-batch][sample], each micro-batch a list",
                   "Write [[sample, ...]] for a step of one micro-batch, [list(zip(x, y))] for tensors of a batch")
        for term in self.terms:
            if not (term.mean in MEANS if isinstance(term.mean, str) else term.mean > 0):
                refuse(_WHERE, f"mean={term.mean!r}", f'{", ".join(map(repr, MEANS))} or a number above zero',
                       "Say what the loss is divided by")
            if term.features is not None and term.mean not in ("token", "batch"):
                refuse(_WHERE, f"features= and mean={term.mean!r}", "a loss over the features of all samples, which divides by itself",
                       "Leave out mean=")
        if self.precision not in (None, *PRECISIONS.values()):
            refuse(_WHERE, f"precision={self.precision!r}", ", ".join(PRECISIONS.values()), "Leave it out, or give one of these")
        engine = self.recording.engine = engine_of(self.model, self.optimizer, self.gradient, self.stages)
        parameters = engine.trained()
        if not parameters:
            refuse(_WHERE, "a model without a parameter that is trained", "one to differentiate", "Give it the trained model")
        if unreal := [name for name, p in parameters.items() if not p.is_floating_point()]:
            refuse(_WHERE, f"parameters that are not real, such as {unreal[0]}", "floating point", "Compare a model of real parameters")
        sharded = [name for name, p in parameters.items() if isinstance(p, DTensor) or engine.sharded]
        if self.make_model is None and (sharded or self.stages):
            refuse(_WHERE, f"a model that is sharded over ranks ({sharded[0] if sharded else 'stages'}) and no make_model",
                   "a way to make the whole model on one process", "Give make_model=lambda: Model(...), before it is wrapped")
        for name, module in self.model.named_modules():
            if is_batch_norm(module) and module.training and any(term.mean != "batch" for term in self.terms):
                refuse(_WHERE, f"statistics over the batch in {name or 'the model'} ({type(module).__name__})",
                       'a loss that is a sum over samples, or with mean="batch" one of all samples', "Freeze the statistics, also for a "
                       "trainer that calls model.train(): `norm.eval().train = lambda mode=True: norm`; or compare with those of the "
                       'whole batch: mean="batch", which SyncBatchNorm equals with one micro-batch')
        return engine.shapes()

    def _agreed(self, make: Callable[[], Any]) -> list[Any]:
        """The result of `make` on each rank; what one rank cannot do ends it on all. Collective."""
        problem, made = None, None
        try:
            made = make()
        except Exception as error:
            problem = error
        everyone = gather_objects((None if problem is None else _for_others(self.rank, problem), made))
        if problem is not None:
            raise problem
        for text, _ in everyone:
            if text is not None:
                raise ConfigError(text)
        return [result for _, result in everyone]

    def _gathered_samples(self) -> list[Buffer]:
        """By place along data: [micro-batch] -> samples, pickled, on rank 0. They are objects of the user's own classes, and
        come through the process group of the run that they train, which is trusted already."""
        own: list[bytearray] = []

        def described() -> tuple[int, list[list[str]], int, int | None]:
            mine = [[on_cpu(sample) for sample in micro] for micro in self.micro_batches]
            try:
                own.append(bytearray(pickle.dumps(mine)))
            except Exception as error:
                refuse(_WHERE, f"a sample that does not pickle: {type(error).__name__}: {error}", "samples that can be sent to rank 0",
                       "Let a sample hold tensors, numbers, texts and objects of classes that a module has at its top; let `loss` "
                       "open what cannot be sent (a file, a generator, a function)")
            digests = [[digest(sample) for sample in micro] for micro in mine]
            return place_along(self.data, self.rank), digests, len(own[0]), _reference.available()

        everyone = self._agreed(described)
        self._places = [where for where, *_ in everyone]
        by_place = {where: digests for where, digests, *_ in everyone}
        count = sum(len(micro) for digests in by_place.values() for micro in digests)
        _reference.fits_in_memory(  # as they arrive, and as objects
            everyone[0][-1], 2 * self.size * max(size for *_, size, _ in everyone),
            f"a batch of {count:,} samples, whose gathering on one process", "Watch a step of fewer samples, or let a sample be "
            "what its data are read by (a path, an index) and `loss` read it")
        first = dict[int, int]()
        for rank, (where, digests, *_) in enumerate(everyone):
            if digests != everyone[first.setdefault(where, rank)][1]:
                refuse(_WHERE, f"other samples on rank {rank} than on rank {first[where]}, which is at the same place along the "
                       "data axes", "the same samples where a model is sharded", "Give `data` the axes along which samples "
                       "differ, or change the sampler")
        self._unproven = _same_samples([by_place[where] for where in sorted(by_place)], self.data)
        gathered = gather_bytes(own[0] if first[self._places[self.rank]] == self.rank else bytearray(1), to=0)
        return [gathered[first[where]] for where in sorted(first)] if self.rank == 0 else []

    # The end.
    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            self._ended(error)
        finally:
            self._outputs.drop()

    def _ended(self, error: BaseException | None) -> None:
        self._hooks.close()
        if error is not None:
            self._tell(_for_others(self.rank, error))
            return
        self._tell("done")
        self._wait_for_all()
        taken = self.recording
        taken.end()
        if not self.compares:
            return
        if self._added is not None:
            self.micro_batches = self._added
            self._samples = self._gathered_samples()
        own = taken.gradients or {}
        gradients, sums = assembled(own, self.stages, taken.engine.whole)
        several = max(taken.steps.values(), default=1) > 1
        stepped, limited, known, skipped, left, values = zip(*gather_objects(
            (taken.stepped, taken.max_norm is not None or several or taken.engine.apart, taken.norm is not None, taken.skipped,
             bool(taken.earlier), taken.max_value)))
        if all(scale > 0 for scale in skipped):
            scaler = taken.engine.scaler
            refuse(_WHERE, f"a step that {scaler} left out, for the gradient is not finite at its scale of {taken.skipped:g}",
                   "a step with a gradient", "Watch a later one: the scale is lowered after such steps. Where it goes on the gradient "
                   f"itself is not finite: watch a step without {scaler}")
        # Collective for DTensors: on all ranks or on none.
        clipped = any(limited) or any(values)
        applied, later = assembled(taken.applied, self.stages, taken.engine.whole) if all(stepped) and clipped else (None, sums)
        norm = float(whole(taken.norm)) if taken.norm is not None and all(known) else None
        everyone = gather_objects({
            "initial": dict(zip(own, self._sums)), "gradients": dict(zip(own, sums)), "taken": dict(zip(own, later)),
            "after": checksums_after(taken.engine), "states": taken.states(), "stepped": taken.stepped, "midway": taken.midway,
            "nothing": taken.nothing, "unfinished": taken.engine.unfinished(),
            "norm": norm, "logged_norm": self._logged.get("norm"), "owned_norm": taken.engine.owned_norm(own),
            "drew": (sorted(taken.draws.names), taken.drew),  # from which generators: the forward, the step
            "gathers": taken.gathers, "changed": taken.changed, "order": list(taken.order), "modes": taken.modes, **taken.facts()})
        if missing := next((one["unfinished"] for one in everyone if one["unfinished"]), None):
            refuse(_WHERE, missing, "a block that ends with the update", "Put all micro-batches of one update into the block")
        if all(one["nothing"] for one in everyone) and "moved" in (state for one in everyone for state in one["states"].values()):
            refuse(_WHERE, "no gradient in `.grad` of any parameter, and parameters that were updated all the same", "gradients where it "
                   "looks (docs/watch.md#engines)", "Give gradient=lambda name, parameter: (its gradient, reduced)")
        views = [{"initial": list(one["initial"].values()), "gradients": list(one["gradients"].values()),
                  **{key: one[key] for key in ("norm", "logged_norm", "owned_norm")}} for one in everyone]
        ends = [list(one["taken"].values()) for one in everyone]
        if _differ([view["gradients"] for view in views]) and not _differ(ends) and not self.stages and not several:
            # Ranks held parts when they clipped, and the same sum when they updated.
            self._notes.append("ranks clipped before gradients were summed: those of the update are compared")
            self._clipped = "by their norm" if any(limited) else f"to {values[0]:g} each"
            gradients, applied, taken.max_norm = applied or {}, None, None
            for view, end in zip(views, ends):
                view.update(gradients=end, norm=None, owned_norm=None)
        if not any(limited):
            applied = None  # elements are clipped, as nothing says that they were not to be
        parts = self._parts(own, [view["gradients"] for view in views])
        earlier = self._earlier(own) if any(left) else {}
        drawn = gather_objects(taken.draws.began, to=0) if any(one["drew"][0] for one in everyone) else []
        with self._hooks:
            self._verdict = self._from_rank_0(lambda: self._compared(gradients, applied, everyone, views, parts, earlier, drawn))

    def _earlier(self, own: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The gradient as it was before the step, on rank 0: of copies their mean. Collective."""
        found = {name: self.recording.earlier.get(name, torch.zeros_like(g)) for name, g in own.items()}
        if not self.stages and not self.recording.engine.sharded:
            found = {name: part if isinstance(part, DTensor) else
                     all_sum(part.to(torch.promote_types(part.dtype, torch.float32)), None) / self.size for name, part in found.items()}
        return assembled(found, self.stages, self.recording.engine.whole)[0]

    def _parts(self, own: dict[str, torch.Tensor], sums: list[list[str]]) -> list[dict[str, torch.Tensor]]:
        """By rank, on rank 0: those gradients that differ between ranks. Collective."""
        differing = [] if self.stages else [name for name, *found in zip(own, *sums) if len(set(found)) > 1]
        if self.size == 1 or sum(own[name].numel() * 8 for name in differing) * self.size > _reference.LARGEST_SHARES:
            return []
        return gather_objects({name: self.recording.engine.whole(name, own[name]) for name in differing}, to=0)

    def _store(self) -> Any:
        return default_store() if self.size > 1 else None

    def _tell(self, what: str) -> None:
        if store := self._store():
            with contextlib.suppress(Exception):  # the store may have gone with the rank that held it
                store.set(f"{self._turn}/{self.rank}", what)

    def _wait_for_all(self) -> None:
        store = self._store()
        for other in range(self.size if store else 0):
            began = time.monotonic()
            try:
                said = _get(store, f"{self._turn}/{other}", self.timeout).decode()
            except Exception as error:
                given_up = (f"{_WHERE}: found rank {other} not at the end of its step after {time.monotonic() - began:.3g} s; "
                            "expected every rank there. Look at what it does, or give timeout= more.")
                self._tell(f"rank {self.rank}: {given_up}")
                raise PeerError(given_up) from error
            if said != "done":
                raise PeerError(said)

    def _from_rank_0(self, make: Callable[[], Verdict]) -> Verdict:
        """Rank 0's verdict, or its error, on every rank: the others wait without a collective, which could run out."""
        store = self._store()
        self._key = f"{self._turn}/verdict"
        if self.rank == 0:
            try:
                with _random.kept():  # the user's generators, whose run goes on as if nobody had watched it
                    made: Any = make()
            except Exception as error:
                made = error
            if store:
                store.set(self._key, json.dumps({"error": str(made) if isinstance(made, ConfigError) else _for_others(0, made)}
                                          if isinstance(made, Exception) else dataclasses.asdict(made)))
                with contextlib.suppress(Exception):  # the store may go with this process: not before they have read it
                    store.wait([f"{self._key}/{other}" for other in range(1, self.size)],
                               datetime.timedelta(seconds=min(self.timeout, LAST_READ)))
            if isinstance(made, Exception):
                raise made
            return made
        began = time.monotonic()
        try:
            while (answer := json.loads(_get(store, self._key, self.timeout))) == OUTPUTS:  # no pickle: others on the host may write into the store
                self._everyones_outputs()
        except Exception as error:
            raise PeerError(f"{_WHERE}: found no verdict of rank 0 after {time.monotonic() - began:.3g} s; expected it to make the "
                            "step on one process and to compare. Look at rank 0, or give timeout= more.") from error
        with contextlib.suppress(Exception):  # rank 0, which waits for this, may be gone
            store.set(f"{self._key}/{self.rank}", b"read")
        if "error" in answer:
            raise ConfigError(answer["error"])
        return Verdict(**answer)

    def _everyones_outputs(self) -> list[Sent | None]:
        """By rank, on rank 0, which asks the others for them: they wait for its verdict. None where a rank has none or they are too many.
        Collective."""
        own = self._outputs.sent()
        if self.rank == 0 and (store := self._store()):
            store.set(self._key, json.dumps(OUTPUTS))
        self._key += "/after"
        # All ranks have these numbers, and decide alike.
        sizes = gather_objects((_reference.available(), None if own is None else size_of_sent(own)))
        known = [size for _, size in sizes if size is not None]
        needed = 2 * self.size * max((held for _, held in known), default=0)  # as they arrive, and as tensors
        free = sizes[0][0]
        if len(known) < self.size or sum(rows for rows, _ in known) > MOST_ROWS or free is not None and needed > free:
            return [None] * self.size
        return gather_objects(own, to=0)

    # Rank 0 alone.
    def _compared(self, gradients: dict[str, torch.Tensor], applied: dict[str, torch.Tensor] | None, everyone: list[Any],
                  views: list[dict[str, Any]], parts: list[dict[str, torch.Tensor]], earlier: dict[str, torch.Tensor],
                  drawn: list[list[torch.Tensor]]) -> Verdict:
        names = list(gradients)
        precision = self.precision or self._precision()
        if precision == "fp64" and any(g.dtype != torch.float64 for g in gradients.values()):
            refuse(_WHERE, "a gradient in another type than fp64", "fp64, as precision= says: what was rounded proves nothing there",
                   "Leave out precision=")
        own = {"fp64": torch.float64, "bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
        batch = [pickle.loads(some) for some in self._samples]
        numbers = [self.ids(s) if self.ids else i for i, s in enumerate(s for micros in batch for m in micros for s in m)]
        once = _once(batch, numbers) if self.ids else batch
        model = self.make_model() if self.make_model else self._copy
        assert model is not None
        findings, update = judge(everyone)
        findings += frozen_otherwise(model, names) + self._unproven
        if {id(p) for p in model.parameters()} & {id(p) for p in self.model.parameters()}:
            refuse(_WHERE, "a make_model that gives parameters of the model that is trained", "a model of its own",
                   "Make a new one in it, or copy.deepcopy what it shares")
        self._hooks.enter_context(_left_alone(self.model))
        model = _reference.fill(_reference.plain_layers(model.cpu(), self._initial), self._initial, names)
        findings += self._set_modes(model, {name: mode for one in reversed(everyone) for name, mode in one["modes"].items()})
        count = sum(p.numel() for p in model.parameters())  # two copies, the gradient and a share of it
        _reference.fits_in_memory(_reference.available(), 5 * count * self.reference.itemsize,
                                  f"a model of {count:,} parameters, whose step on one process, without activations,",
                                  "Watch a smaller model of the same code, or give reference=torch.float32")
        with _reference.threads(self._threads) as look:  # in fp64 their number makes no difference that is compared
            right = one_process(copied(model), self.terms, once, self.reference, after_each=look, own=own)
            self._threads = torch.get_num_threads()
        findings += self._of_modes(model, once, right, everyone)
        limit, axes = self.recording.max_norm, self._axes(len(batch))
        clipped_by = views[0]["logged_norm"] if views[0]["norm"] is None else views[0]["norm"]
        for view in views:
            view["norm"] = _wrong_norm([view["norm"], view.pop("logged_norm")], right.norm)
        for view, part in zip(views, parts):
            view["spread"] = spread(part, parts[0])
        alike = [part for part, place in zip(parts, self._places) if place == self._places[0]]
        changes = known_changes(everyone, self.model, len(batch), findings)
        run = {"gradients": gradients, "applied": applied, "peers": summed(alike) if len(alike) > 1 else None,
               "peer_axes": list(axes)[-1], "samples": numbers, "precision": precision, "axes": axes, "norm": views[0]["norm"],
               # The ranks' counts are known where nothing was taken twice.
               "counts": right.parts if once is batch or len(set(numbers)) == len(numbers) else None,
               "mean": str(self.terms[0].mean), "changes": changes, "clip_coefficient": _coefficient(limit, clipped_by),
               "ranks": None if self.stages else views, "findings": findings,
               **{key: self._logged.get(key) for key in ("loss", "targets", "tokens")}}

        def dump(step: Reference, dtype: torch.dtype) -> dict[str, Any]:
            coefficient = _coefficient(limit, step.norm)
            factor = 1.0 if coefficient is None else coefficient
            return {"gradients": step.gradients, "shares": step.shares, "samples": list(dict.fromkeys(numbers)),
                    "applied": None if applied is None else {name: factor * g for name, g in step.gradients.items()},
                    "counts": step.parts, "loss": step.loss, "targets": step.targets, "norm": step.norm,
                    "precision": PRECISIONS[dtype], "clip_coefficient": coefficient}

        def rounded(of: nn.Module) -> Reference:
            autocast = own if self.recording.autocast else None
            return one_process(of, self.terms, once, torch.float32 if autocast else own, autocast, shares=False)

        def again(of: nn.Module, dtype: torch.dtype) -> Mapping[str, torch.Tensor]:
            return (rounded(of) if dtype != torch.float64 else
                    one_process(of, self.terms, once, dtype, shares=False)).gradients

        report, folder = (str(pathlib.Path(path).resolve()) if path else None for path in (self.report, self.folder))
        reference = dump(right, self.reference)
        alone = None
        if self.alone and own != self.reference:
            one = rounded(model)
            if all(math.isclose(*pair, rel_tol=16 * torch.finfo(own).eps)
                   for pair in zip(itertools.chain(*one.counts), itertools.chain(*right.counts))):
                one.counts = right.counts  # weights round too, and are the same weights
            alone = dump(one, own)
        with _reference.threads(self._threads):
            verdict = compare(run, reference, alone, report, folder)

        def fresh() -> nn.Module:
            return _reference.fill(model.to(self.reference), self._initial, names)

        def step_of(terms: Sequence[Term], some: Batch) -> Reference:
            return one_process(fresh(), terms, some, self.reference, shares=False)

        # Where jumps of derivatives are not measured they may look like a place where the gradient is lost.
        measurable = self.reference == torch.float64 and (alone is not None or own == torch.float64)
        modules = list(dict.fromkeys(name for one in everyone for name in one["order"])) if measurable else []
        lines = [line for one in everyone for line in one["gathers"]]
        averages, meshes = _wrapped(self.model)
        unit = torch.finfo(own).eps / 2
        trials = Trials(step_of, fresh, self.terms, once, gradients, right, unit, peers=self.size // len(batch))
        measure = functools.cache(lambda: _reference.measure_rounding(fresh(), again, own, gradients, right.gradients))

        def with_rounding(verdict: Verdict) -> Verdict:
            """The verdict with what rounding does to one process, where that is more than to any."""
            if not alone or self.reference != torch.float64 or "moves" in reference or (measured := measure()) is None:
                return verdict
            reference.update(measured[0])
            alone.update(measured[1])
            trials.moved = math.hypot(*measured[0]["moves"])
            with _reference.threads(self._threads):
                return compare(run, reference, alone, report, folder)

        if _within_each(verdict):
            verdict = with_rounding(verdict)
        if _vague(verdict):
            trials.terms_and_parts(bool(lines))
        cause = trials.nearest()
        if cause is None and ("unknown" in verdict.findings or not verdict.bounded):
            verdict = with_rounding(verdict)
        if cause is None and not (cause := self._of_gathers(verdict, lines)) and (_vague(verdict) or "scaled_by_factor" in verdict.findings):
            by_place = [drawn[self._places.index(place)] for place in sorted({*self._places})] if drawn else []
            trials.rest({name: self._initial[name].detach().double().cpu() for name in gradients}, earlier, by_place, verdict.findings)
            cause = trials.nearest()
        cause = cause or trials.instead(verdict.findings, averages, meshes) or _of_late_division(
            verdict, gradients, applied, right, limit)
        cause = cause or self._of_changes(verdict, everyone) or self._of_places(verdict, list(gradients), modules) or self._of_clips(verdict)
        if (cause is None and _vague(verdict)) or (cause or {}).get("id") == "undecided":
            with _reference.threads(self._threads):
                cause = locate(trials, self._everyones_outputs(), averages, self.recording.loss_scale) or cause
        if cause:
            findings.append(cause)
            if "change" in cause:
                named = [cause["id"], *(_GATHERED if cause["id"] == "not_summed_over_axis" else ())]
                changes.update(dict.fromkeys(named, cause["change"]))
            with _reference.threads(self._threads):
                verdict = compare(run, reference, alone, report, folder)
        verdict.folder, verdict.update = str(self.folder) if self.folder else None, update
        verdict.notes += self._notes + (_duplicates(batch) if self.ids is None else [])
        self._judge_randomness(verdict, right, [one["drew"] for one in everyone])
        return verdict

    def _set_modes(self, model: nn.Module, ran: Mapping[str, bool]) -> list[Finding]:
        """Sets the modes in which modules ran; of others those of before. A finding where the step switched BatchNorm to training.

        ran: by module whether it was in training mode in the step.
        """
        before, whole = self._modes, ran.get("", self.model.training)
        switched = []
        for name, module in model.named_modules():
            own = plain_name(name)
            other = own in before and before[own] != before.get("", whole)
            module.training = ran.get(own, before[own] if other else whole)
            if is_batch_norm(module) and module.training and not before.get(own, True) and any(term.mean != "batch" for term in self.terms):
                module.training = False
                switched.append(f"{own} ({type(module).__name__})")
        return [{"id": "buffers_differ", "sentence": f"the step switched {', '.join(switched[:5])} to training mode, in which it takes the "
                 "statistics of each micro-batch's own rows, and changes its buffers by them", "change": "freeze the statistics, also for "
                 "what calls model.train(): `norm.eval().train = lambda mode=True: norm`"}] if switched else []

    def _of_modes(self, model: nn.Module, batch: Batch, right: Reference, everyone: Sequence[Mapping[str, Any]]) -> list[Finding]:
        """A finding where the step ran in evaluation mode, in which the model computes otherwise than in training mode."""
        evaluating = [rank for rank, one in enumerate(everyone) if one["modes"] and not one["modes"].get("", any(one["modes"].values()))]
        if not evaluating:
            return []
        where = [f"{name or 'the model'} ({type(module).__name__})" for name, module in model.named_modules()
                 if is_batch_norm(module) or is_dropout(module) and module.p > 0]
        if not where:  # layers of one's own
            with contextlib.suppress(Exception):
                trained = one_process(copied(model).train(), self.terms, batch, self.reference, shares=False)
                if not math.isclose(trained.loss, right.loss, rel_tol=1e-12):
                    where = [f"the loss is {trained.loss:.9g} in training mode, and {right.loss:.9g} so"]
        return [{"id": "evaluation_mode", "sentence": f"rank {evaluating[0]} made the step in evaluation mode, in which the model computes "
                 f"otherwise than in training: {', '.join(where[:5])}{' and more' if len(where) > 5 else ''}"}] if where else []

    def _of_places(self, verdict: Verdict, names: Sequence[str], modules: Sequence[str]) -> Finding | None:
        """The name of a difference that ends at a module. modules: as they ran first."""
        if not _vague(verdict) or len(self.terms) > 1:  # another term may reach as far
            return None
        wrong = {parameter["name"] for parameter in verdict.json["parameters"] if not parameter["passed"]}
        owner = {name: name.rpartition(".")[0] for name in names}
        order = [name for name in modules if name in owner.values()]
        if wrong and all(name in order for name in owner.values()):
            last = max(order.index(owner[name]) for name in wrong)
            after = [name for name in names if order.index(owner[name]) > last]
            before = [name for name in names if order.index(owner[name]) <= last]
            if after and len(before) > 1 and {*before} == wrong:
                return {"id": "cut_in_forward", "sentence": f"the gradients of {order[0]} to {order[last]} are wrong, all from "
                        f"{order[last + 1]} on are right: between {order[last]} and {order[last + 1]} the gradient is lost in part"}
        return None

    def _of_gathers(self, verdict: Verdict, lines: Sequence[str]) -> Finding | None:
        """The name of a difference where features are gathered in these lines, which pass no gradient on."""
        vague = _vague(verdict) or {*_GATHERED} & {*verdict.findings}
        return {"id": "not_summed_over_axis", "sentence": "features are gathered without their gradient, so that each rank has the part of "
                f"its own rows alone: {', '.join(dict.fromkeys(lines))}", "change": f"{GATHER} in place of that; of a library "
                "`gather_with_grad=True`"} if lines and vague and any(term.whole for term in self.terms) else None

    def _of_changes(self, verdict: Verdict, everyone: Sequence[Mapping[str, Any]]) -> Finding | None:
        """Parameters that were changed in the block before an optimizer stepped, where nothing else explains a difference."""
        names = list(dict.fromkeys(name for one in everyone for name in one["changed"]))
        return {"id": "initial_parameters_differ", "sentence": "parameters were changed after the step began and before any optimizer "
                f"stepped: {', '.join(names[:5])}{' and more' if len(names) > 5 else ''}", "change": "leave parameters to "
                "`optimizer.step()` inside the block: take out what writes to them before it, such as `model.load_state_dict(averaged)` or "
                "a decay by `p.data.mul_(factor)`"} if names and _vague(verdict) else None

    def _of_clips(self, verdict: Verdict) -> Finding | None:
        """A clip on ranks that held parts of the gradient, where nothing else explains it."""
        return {"id": "clipped_before_reduction", "sentence": f"gradients were clipped {self._clipped}, while ranks held other ones: "
                "each its own part, before the sum"} if self._clipped and _vague(verdict) else None

    def _judge_randomness(self, verdict: Verdict, right: Reference, drew: list[tuple[list[str], list[str]]]) -> None:
        """Refuses, or notes, a step that draws random numbers where the reference draws none; drew: by rank in forward and step."""
        in_forward, in_step = ([(rank, ", ".join(names)) for rank, names in enumerate(every) if names] for every in zip(*drew))
        if not verdict.passed and in_forward and not right.draws:
            rank, generators = in_forward[0]
            refuse(_WHERE, f"a model whose forward draws random numbers on rank {rank} (from a generator of {generators}), where "
                   "that of the reference draws none", "a model that draws in neither",
                   f"{_random.CURE}; take off a hook that draws and that make_model leaves out")
        if "unknown" in verdict.findings and in_step and not right.draws:
            rank, generators = in_step[0]
            verdict.notes.append(f"the step draws random numbers on rank {rank} (from a generator of {generators}), and the loss of "
                                 "the reference draws none: where they go into the gradient, no other process makes the same one")
        if right.unseeded:
            verdict.notes.append(f"the loss draws from a generator of {', '.join(right.unseeded)}: of {_random.TRIES} times that a "
                                 "sample was made, from other states, it was the same each time")

    def _precision(self) -> str:
        # Frozen parameters round too: an adapter in fp32 on a base that computes in bf16 is a step in bf16.
        modules = list(self.model.modules())
        lowest = {p.dtype for p in plain(self.model).parameters()}.union(*map(mixed_dtypes, modules))
        lowest |= {self.recording.autocast, *(getattr(module, "compute_dtype", None) for module in modules)}
        return next((PRECISIONS[dtype] for dtype in (torch.float16, torch.bfloat16, torch.float32) if dtype in lowest), "fp64")

    def _axes(self, places: int) -> dict[str, int]:
        if isinstance(self.data, DeviceMesh) and self.data.mesh_dim_names:
            axes = dict(zip(self.data.mesh_dim_names, self.data.shape))
        else:
            sharded = self.recording.engine.sharded or any(hasattr(m, "set_gradient_divide_factor") for m in self.model.modules())
            axes = {"dp_shard" if sharded else "dp_replicate": places}
        if self.size > places:
            axes["pp" if self.stages else "tp"] = self.size // places
        return axes


def _kind(value: Any) -> str:
    return f"the class {value.__name__}" if isinstance(value, type) else f"a {type(value).__name__}"


def _for_others(rank: int, error: BaseException) -> str:
    """An error of this rank as the others say it: a refusal in its own words, anything else with its type."""
    if isinstance(error, ConfigError):
        return f"rank {rank}: {error}"
    return (f"{_WHERE}: found that rank {rank} failed: {type(error).__name__}: {error}; expected a step that every rank can make. "
            "Look at that rank's own message.")


@contextlib.contextmanager
def _left_alone(model: nn.Module) -> Iterator[None]:
    """Refuses a loss that computes with the model that is trained."""
    def used(*_: Any) -> NoReturn:
        refuse(_WHERE, "a loss that computes with the model that is trained", "one that computes with the model that it is given: a copy, "
               "in fp64", "Take the model from the arguments, not from what surrounds the function: loss=lambda model, sample: ...")

    with contextlib.ExitStack() as undo:
        for module in model.modules():
            if any(p.requires_grad for p in module.parameters()):
                undo.callback(module.register_forward_pre_hook(used, prepend=True).remove)
        for parameter in trained(model).values():
            undo.callback(parameter.register_hook(used).remove)
        yield


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


def _same_torch(everyone: Sequence[str]) -> None:
    """Refuses other versions of torch by rank: two may round otherwise, so that no rank is wrong and the gradients differ."""
    for rank, version in enumerate(everyone):
        if version.split(".")[:2] != everyone[0].split(".")[:2]:
            refuse(_WHERE, f"torch {version} on rank {rank} and {everyone[0]} on rank 0", "one version of torch on all ranks",
                   "Install the same on every host, with the isograd that was built with it")


def _same_models(everyone: Sequence[dict[str, tuple[int, ...]]], stages: bool) -> None:
    """Refuses models that are not the same on every rank. everyone: by rank, shapes by name."""
    for rank, shapes in enumerate(everyone):
        first = everyone[0]
        if not stages and shapes != first:
            name = next(name for name in {**first, **shapes} if shapes.get(name) != first.get(name))
            refuse(_WHERE, f"another model on rank {rank} than on rank 0: {name} is {shapes.get(name, 'not there')} "
                   f"and {first.get(name, 'not there')}", "the same model on every rank",
                   "Build it from the same configuration; stages=True where ranks hold stages of a pipeline")


def _duplicates(batch: Batch) -> list[str]:
    """A note on samples that are there more than once: nothing says that this is a mistake."""
    seen: dict[str, int] = {}
    for rank, micros in enumerate(batch):
        for sample in (sample for micro in micros for sample in micro):
            if (other := seen.setdefault(digest(sample), rank)) != rank:
                return [f"ranks {other} and {rank} hold a sample of the same content; it counts twice, also on one device. "
                        "Where that is a sampler's padding give ids=: a sample then counts once there"]
    return []


def _same_samples(batch: Batch, data: Group) -> list[Finding]:
    """A finding where all ranks along an axis of `data` have the same samples: a step that leaves out the reduction over them
    has the same gradient. batch: by place along data, the digests of the samples of each micro-batch."""
    have = [sorted(sample for micro in micros for sample in micro) for micros in batch]
    axes: list[tuple[str, int]] = [("", len(have))]
    if isinstance(data, DeviceMesh) and data.ndim > 1:
        axes = list(zip(data.mesh_dim_names or [f"axis {i}" for i in range(data.ndim)], data.shape))
    findings = []
    stride = len(have)
    for name, size in axes:
        outer, stride = stride, stride // size
        if size > 1 and any(have) and all(some == have[at // outer * outer + at % stride] for at, some in enumerate(have)):
            where = f"all {size} ranks along {name}" if name else f"all {size} ranks"
            findings.append({"id": "reduction_not_proven", "sentence": f"{where} have the same samples: a step that does not "
                             "reduce its gradient over them has the same one, so that nothing is proven of the reduction"})
    return findings


def _get(store: Any, key: str, seconds: float) -> bytes:
    store.wait([key], datetime.timedelta(seconds=seconds))
    return bytes(store.get(key))


def _wrong_norm(norms: Sequence[float | None], right: float) -> float | None:
    """The norm that is further from the right one: that which a rank clipped by or that which it logs."""
    return max((norm for norm in norms if norm is not None), default=None,
               key=lambda norm: abs(norm - right) if math.isfinite(norm) else math.inf)


def _vague(verdict: Verdict) -> bool:
    """It fails without a name for the cause."""
    return not {"unknown", "undecided"}.isdisjoint(verdict.findings)


def _wrapped(model: nn.Module) -> tuple[bool, list[tuple[int, ...]]]:
    """Whether DDP or FSDP2 averages gradients, and the sizes of the meshes on which parameters lie."""
    wrappers = [module for module in model.modules() if isinstance(module, (DistributedDataParallel, FSDPModule))]
    averages = bool(wrappers) and not any(has_comm_hook(module) for module in wrappers if isinstance(module, DistributedDataParallel))
    return averages, [p.device_mesh.shape for p in model.parameters() if isinstance(p, DTensor)]


def _of_late_division(verdict: Verdict, found: Gradients, applied: Gradients | None, right: Reference, limit: float | None) -> Finding | None:
    """A gradient that is clipped first, and divided by what it is too large by after that."""
    if applied is None or not (_vague(verdict) or "unscaled_sum" in verdict.findings):
        return None
    times = dot(found, right.gradients) / max(right.norm**2, 1e-300)
    taken = dot(applied, found) / max(norm_of(found)**2, 1e-300) / (_coefficient(limit, norm_of(found)) or 1.0)
    if math.isclose(taken * times, 1.0, rel_tol=1e-3) and not math.isclose(times, 1.0, rel_tol=1e-3):
        return {"id": "clip_differs", "sentence": f"the gradient is {times:.6g} times what it should be when it is clipped, and divided by that "
                "after the clip", "change": "divide before the clip: `p.grad /= denominator` of all parameters, or the loss, and then "
                "`clip_grad_norm_(parameters, max_norm)`"}
    return None


def _within_each(verdict: Verdict) -> bool:
    """It fails within rounding of each parameter: the scale or the norm of the whole is off."""
    return bool(verdict.json["grades"]["E2"]["state"] == "fail" and all(one["passed"] for one in verdict.json["parameters"]))


def _differ(sums: list[list[str]]) -> bool:
    return any(one != sums[0] for one in sums)


def _coefficient(limit: float | None, norm: float | None) -> float | None:
    if limit is None or norm is None:
        return None
    coefficient = limit / (norm + 1e-6)  # as PyTorch clips
    return 1.0 if coefficient >= 1.0 else coefficient  # NaN where the norm is


def _once(batch: Batch, numbers: list[int]) -> list[list[list[Any]]]:
    """The batch with each sample where it comes first."""
    left, seen = iter(numbers), set[int]()

    def new(number: int) -> bool:
        known = number in seen
        seen.add(number)
        return not known

    return [[[sample for sample in micro if new(next(left))] for micro in micros] for micros in batch]


def prove(step: Callable[[Model, Optimizer, Any], Figure], model: Model, optimizer: Optimizer, *, micro_batches: MicroBatches,
          loss: Loss, experiments: bool = True, empty: Any = None, **options: Unpack[WatchOptions]) -> Verdict:
    """Makes the step and compares it with one device; after a failure makes it again to find out more. Collective.

    step:          step(model, optimizer, micro_batches): yours, with zero_grad, forward, backward, clip, update. What it
                   returns is the loss as logged, or None.
    micro_batches: this rank's, [micro-batch][sample].
    experiments:   after a failure make it with other batches too: without accumulation, and with the same on every
                   rank. What they show is in the verdict's notes.
    empty:         a sample without targets: then also with that alone on the last rank.
    loss, options: those of `watch`.

    Parameters, buffers, the optimizer's state and the states of all generators of random numbers are afterwards what they
    were before, gradients are None. Errors are those of `watch`; and ConfigError: the step fails and gives another gradient
    when it is made again.
    """
    if not can_repeat(model):
        refuse("isograd.prove", "a step of DeepSpeed, whose optimizer has copies of the parameters", "a step that can be made again",
               "Put isograd.watch around one step")
    values = [(tensor, held(tensor)) for tensor in [*model.parameters(), *model.buffers()]]
    state = copy.deepcopy(optimizer.state_dict())

    def restore() -> None:
        with torch.no_grad():
            for tensor, value in values:
                tensor.copy_(value)
        optimizer.load_state_dict(copy.deepcopy(state))

    def made(batch: MicroBatches, more: WatchOptions, compares: bool = True) -> watch:
        changed: WatchOptions = {**options, **more}
        try:
            opened = watch(model, optimizer, micro_batches=batch, loss=loss, **changed)
            opened.compares = compares
            with opened as taken:
                logged = step(model, optimizer, batch)
                if logged is not None:
                    taken.log(loss=float(logged))
        finally:
            restore()
        return taken

    with _random.kept():
        try:
            first = made(micro_batches, {})
            verdict = first.verdict
            if not _right(verdict):
                _check_repeatable(first, made(micro_batches, {}, compares=False))
            for title, batch, more in _others(micro_batches, first, empty) if experiments and not _right(verdict) else ():
                try:
                    other = made(batch, {**more, "report": None, "folder": None}).verdict
                except Exception as error:  # on some ranks PeerError: they leave it together
                    verdict.notes.append(f"{title}: not to be made: {type(error).__name__}: {error}")
                    break
                verdict.notes.append(f"{title}: {'PASS' if _right(other) else 'FAIL ' + ', '.join(other.findings)}")
        finally:
            optimizer.zero_grad(set_to_none=True)
    return verdict


def _right(verdict: Verdict) -> bool:
    """Nothing is known to be wrong, though something may not be proven: ranks have the same samples, by choice here, or
    rounding hides too much."""
    return verdict.passed or verdict.findings in (["reduction_not_proven"], ["unresolved"])


def _check_repeatable(first: watch, second: watch) -> None:
    """Refuses a step whose gradient is another one the second time, by more than sums in another order make it."""
    worst, where = 0.0, ""
    ones, others = ({name: one.recording.engine.whole(name, g) for name, g in (one.recording.gradients or {}).items()}
                    for one in (first, second))
    for name, share in _random.apart(ones, others).items():
        if not share <= max(worst, min(0.1, 1e3 * torch.finfo(ones[name].dtype).eps)):
            worst, where = share, name
    found = gather_objects((worst, where))
    worst, where = max(found)
    if worst > 0.0:
        refuse("isograd.prove", f"a step that gives another gradient when it is made again: {where} is off by {worst:.1e}",
               "the same step twice", "Start it with zero_grad(), and draw no random numbers in it, or seed them at its "
               "beginning (torch.manual_seed(step))")


def _others(micro_batches: MicroBatches, first: watch, empty: Any) -> list[tuple[str, MicroBatches, WatchOptions]]:
    """Batches that distinguish causes, each with options of `watch`; as many of them on every rank."""
    found: list[tuple[str, MicroBatches, WatchOptions]] = []
    everything = [sample for micro in micro_batches for sample in micro]
    if max(gather_objects(len(micro_batches))) > 1:
        found.append(("with one micro-batch a rank", [everything], {}))
    if first.size == 1:
        return found
    own = bytearray(pickle.dumps([on_cpu(sample) for sample in everything[:1]]))  # as samples travel in `watch`
    same: list[Any] = next((some for some in map(pickle.loads, gather_bytes(own)) if some), [])
    if same:  # here each copy counts, whatever its id
        found.append(("with the same sample on every rank", [[like(same[0], everything)]], {"ids": None}))
    if empty is not None:
        places = gather_objects(place_along(first.data, first.rank))
        emptied = places[first.rank] == max(places)
        found.append(("with the last rank emptied", [[empty]] if emptied else [everything], {}))
    return found
