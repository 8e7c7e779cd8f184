"""Trainers that are right, on four ways to be several ranks; a mistake replaces one method of one of them.

`Trainer` takes its ranks one after the other in one process; `ByHand` (all-reduce of each gradient), `Ddp` and `Fsdp`
are PyTorch's, over Gloo. `run.py` calls `step` on every rank.
"""
import contextlib
import datetime

import torch
import torch.distributed as dist
import torch.nn.functional as F
import xxhash
from problem import IGNORED, dtype_of, keyed_noise, num_targets, pack
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

TIMEOUT = datetime.timedelta(seconds=60)


class Groups:
    """The groups of four processes, made once: they are numbered by how many each process has made before."""

    def __init__(self):
        self.first = {size: dist.new_group(list(range(size)), timeout=TIMEOUT) for size in (2, 3, 4)}
        self.hybrid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))


class Trainer:
    averages = False  # whether the reducer divides by the number of ranks, so that a loss is multiplied by it
    padded = False  # a row for each sample instead of one pack
    processes = False
    axis = "dp_replicate"
    tells_ranks = False  # writes what each rank says for itself

    def __init__(self, problem, precision=None):
        self.problem, self.precision = problem, precision or problem.precision
        self.assigned = self.assign()
        self.ranks = problem.ranks
        self.factor = self.ranks if self.averages else 1
        # Counted over all ranks and micro-batches before any backward.
        self.total = sum(num_targets(s.targets) for micros in self.assigned for micro in micros for s in micro)
        self.with_loss = sum(s.first and s.whole > 0 for micros in self.assigned for micro in micros for s in micro)

    # Batch and loss.
    def assign(self):
        return self.problem.assigned()

    def micros(self, rank):
        return [pack(samples, self.padded) for samples in self.assigned[rank]]

    def targets(self, micro):
        return micro.targets

    def loss(self, nll, micro, rank, j):
        """The tensor that backward starts from. `nll`: one for each position, 0 where nothing is to be predicted."""
        if self.problem.mean == "sample":
            return (nll * micro.shares).sum() / self.with_loss * self.factor
        return nll.sum() / self.total * self.factor

    def noise(self, micro, rank):
        if not self.problem.dropout:
            return None
        noise = torch.cat([keyed_noise(sample, self.problem.dropout) for sample in micro.samples])
        return noise.to(dtype_of(self.precision)).unsqueeze(0)

    def nll(self, model, micro, rank):
        inputs = micro.inputs if micro.inputs.dtype == torch.int64 else micro.inputs.to(dtype_of(self.precision))
        by_autocast = self.precision == "bf16" and not isinstance(self, Fsdp)
        with torch.autocast("cpu", torch.bfloat16) if by_autocast else contextlib.nullcontext():
            logits = model(inputs, micro.documents, self.noise(micro, rank))
        logits = logits.flatten(0, -2)
        return self.cross_entropy(logits if self.precision == "fp64" else logits.float(), self.targets(micro))

    def cross_entropy(self, logits, targets):
        return F.cross_entropy(logits, targets, ignore_index=IGNORED, reduction="none")

    # One rank's part of the step.
    def make_model(self, rank):
        return self.problem.make_model(self.precision)

    def forward_of(self, model, last):
        return contextlib.nullcontext()

    def before_rank(self, model, rank):
        """Whatever a step before this one left."""

    def after_backward(self, model, rank, j):
        """Between two micro-batches, and after the last."""

    def after_rank(self, model, rank):
        """After the rank's last backward."""

    def work(self, model, rank):
        self.before_rank(model, rank)
        micros, losses = self.micros(rank), []
        for j, micro in enumerate(micros):
            with self.forward_of(model, j + 1 == len(micros)):
                loss = self.loss(self.nll(model, micro, rank), micro, rank, j)
                loss.backward()
            self.after_backward(model, rank, j)
            losses.append(loss.item())
        self.after_rank(model, rank)
        return dict(losses=losses, counts=[num_targets(self.targets(micro)) for micro in micros],
                    samples=[s.id for micro in micros for s in micro.samples if s.first],
                    tokens=sum(len(s.inputs) for micro in micros for s in micro.samples))

    # Reduction, and what comes after it.
    def reduce(self, parts):
        return {name: sum_in_order([part[name] for part in parts]) for name in parts[0]}

    def reduced(self, gradients):
        return gradients

    def step(self, groups=None):
        parts, records = [], []
        for rank in range(self.ranks):
            model = self.make_model(rank)
            records.append(self.work(model, rank))
            parts.append(gradients_of(model))
        return self.finish(self.reduced(self.reduce(parts)), records)

    def logged(self, records):
        losses = [loss for record in records for loss in record["losses"]]
        return sum(losses) / self.factor

    def norm(self, gradients, records):
        return sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5

    def norm_on(self, rank, gradients, records):
        """As that rank has it."""
        return self.norm(gradients, records)

    def targets_logged(self, records):
        return sum(sum(record["counts"]) for record in records)

    def samples_logged(self, records):
        return [sample for record in records for sample in record["samples"]]

    def clip(self, model, norm):
        """Clips the gradients of `model`; the coefficient that is logged."""
        torch.nn.utils.clip_grad_norm_(model.parameters(), self.problem.max_norm)
        return coefficient(self.problem.max_norm, norm)

    def parameter_groups(self, model):
        """The optimizer's: matrices decay, norms and biases do not."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        return [{"params": [p for p in parameters if (p.dim() > 1) == decays],
                 "weight_decay": self.problem.decay if decays else 0.0} for decays in (True, False)]

    def update(self, model):
        torch.optim.SGD(self.parameter_groups(model), lr=1.0).step()

    def finish(self, gradients, records):
        """The dump's gradients, step and applied."""
        norm = self.norm(gradients, records)
        step = dict(loss=self.logged(records), targets=self.targets_logged(records),
                    tokens=sum(record["tokens"] for record in records), norm=norm,
                    samples=self.samples_logged(records), counts=[record["counts"] for record in records],
                    axes=self.axes(), precision=self.precision.split("_")[0], parameters=list(gradients))
        if self.tells_ranks:
            step["ranks"] = [{**record["says"], "norm": self.norm_on(rank, gradients, records)}
                             for rank, record in enumerate(records)]
        applied = None
        if self.problem.max_norm or self.problem.decay:
            model = self.problem.make_model(self.precision)
            before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
            for name, p in model.named_parameters():
                if p.requires_grad:
                    p.grad = gradients[name].clone()
            step["clip_coefficient"] = self.clip(model, norm) if self.problem.max_norm else 1.0
            self.update(model)
            applied = {name: before[name] - p.detach() for name, p in model.named_parameters() if name in before}
        return {"gradients": gradients, "step": step, "applied": applied}

    def axes(self):
        return {self.axis: self.ranks}


class Processes(Trainer):
    """Ranks are processes of a Gloo group."""

    processes = True

    def wrap(self, model, group):
        return model

    def reduce_gradients(self, model, group):
        """For trainers whose backward does not reduce by itself."""

    def after_reduction(self, model, rank):
        """A change that a rank makes to the reduced gradients by itself."""

    def step(self, groups=None):
        self.groups, group = groups, groups.first[self.ranks]
        rank = dist.get_rank(group)
        plain = self.make_model(rank)
        says = {"initial": hashes(p for p in plain.parameters() if p.requires_grad)}
        model = self.wrap(plain, group)
        record = self.work(model, rank)
        self.reduce_gradients(model, group)
        self.after_reduction(model, rank)
        record["held_norm"] = held_norm(model)
        gradients = gradients_of(model)
        says["gradients"] = hashes(gradients.values())
        records = gathered({**record, "says": says}, group)
        return self.finish(self.reduced(gradients), records)


class ByHand(Processes):
    """An all-reduce of each gradient, written by hand."""

    def reduce_gradients(self, model, group):
        for p in model.parameters():
            if p.grad is not None:
                dist.all_reduce(p.grad, group=group)

    def norm_on(self, rank, gradients, records):
        return records[rank]["held_norm"]


class Ddp(Processes):
    averages = True
    options = {}

    def wrap(self, model, group):
        return DistributedDataParallel(model, process_group=group, **self.options)

    def forward_of(self, model, last):
        return contextlib.nullcontext() if last else model.no_sync()


class Fsdp(Processes):
    averages = True
    axis = "dp_shard"

    def finish(self, gradients, records):
        for record in records:
            record["says"]["owned_norm"] = record["held_norm"]
        return super().finish(gradients, records)

    def mesh(self, group):
        return DeviceMesh.from_group(group, "cpu")

    def wrap(self, model, group):
        options = {"mesh": self.mesh(group)}
        if self.precision == "bf16":
            options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for block in getattr(model, "blocks", []):
            fully_shard(block, **options)
        return fully_shard(model, **options)

    def forward_of(self, model, last):
        model.set_requires_gradient_sync(last)
        return contextlib.nullcontext()


class Hybrid(Fsdp):
    """Two replicas of two shards."""

    def mesh(self, group):
        return self.groups.hybrid

    def axes(self):
        return {"dp_replicate": 2, "dp_shard": 2}


def coefficient(max_norm, norm):
    """PyTorch's: clip_grad_norm_ adds 1e-6 to the norm."""
    return min(1.0, max_norm / (norm + 1e-6))


def sum_in_order(parts):
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


def plain_name(name):
    return name.removeprefix("module.")


def gradients_of(model):
    """Whole gradients of each trained parameter; zeros where no gradient came. Collective under FSDP2."""
    gradients = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            grad = torch.zeros_like(p) if p.grad is None else p.grad
            whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
            gradients[plain_name(name)] = whole.detach().clone()
    return gradients


def held_norm(model):
    """The norm of the gradients, or parts of them, that this rank holds."""
    squares = 0.0
    for p in model.parameters():
        if p.grad is not None:
            local = p.grad.to_local() if hasattr(p.grad, "to_local") else p.grad
            squares += float(local.double().square().sum())
    return squares ** 0.5


def hashes(tensors):
    return [xxhash.xxh3_64_hexdigest(value.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())
            for value in tensors]


def gathered(value, group):
    values = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
