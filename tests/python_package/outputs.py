"""python outputs.py: steps on two, three and four ranks with a mistake each that has no name of its own, and the same without it; one rank of
four has no sample. As JSON: by case, whether the right step and the mistaken one passed, with findings and sentences, or the error."""
import contextlib
import json
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import isograd

WIDTH, CLASSES = 24, 7


class Net(nn.Module):
    """Tokens [..., T] -> logits [..., T, CLASSES], of each token and those before it."""

    def __init__(self, recompute=False):
        super().__init__()
        self.embedding, self.middle = nn.Embedding(30, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, CLASSES)
        self.recompute = recompute

    def features(self, tokens, shift=0):
        hidden = self.embedding(tokens)
        before = hidden.cumsum(-2) / (1 + shift + torch.arange(tokens.shape[-1], dtype=hidden.dtype))[:, None]
        return hidden + torch.tanh(checkpoint(self.middle, before, use_reentrant=False) if self.recompute else self.middle(before))

    def forward(self, tokens, shift=0):
        return {"logits": self.head(torch.tanh(self.features(tokens, shift))), "penalty": self.middle.weight.square().sum()}


def samples(rank, size):
    """(tokens, labels) of micro-batches; all begin with one token, so that their first rows are equal."""
    random = torch.Generator().manual_seed(3 + rank)
    lengths = {0: [[9, 4], [6]], 1: [[5], [12, 3]], 2: [[8]], 3: [[]]}[rank] if size < 5 else []
    return [[(torch.cat([torch.tensor([1]), torch.randint(2, 30, (n - 1,), generator=random)]), torch.randint(CLASSES, (n,), generator=random))
             for n in micro] for micro in lengths]


def losses(model, sample):
    return F.cross_entropy(model(sample[0])["logits"], sample[1], reduction="none")


def in_rows(model, micro, **more):
    """Logits and labels of padded rows, -1 where there is no token."""
    tokens, labels = (nn.utils.rnn.pad_sequence([sample[i] for sample in micro], batch_first=True, padding_value=value) for i, value in ((0, 0), (1, -1)))
    return model(tokens, **more)["logits"].flatten(0, 1), labels.flatten()


def watched(rank, size, of_rows, loss=losses, model=Net, before=lambda model: None, after=lambda model: None, dtype=torch.float64, mean="token",
            count_of=lambda sample: len(sample[0]), spoil=lambda step: None, **more):
    """The step of the mean over all targets, in padded rows: of_rows(logits, labels, real rows) -> the sum of losses. spoil(step): what a rank
    does to the recording."""
    torch.manual_seed(0)
    model = DistributedDataParallel(model().to(dtype))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = samples(rank, size)
    with isograd.watch(model, optimizer, micro_batches=batches, loss=loss, mean=mean) as step:
        before(model.module)
        count = torch.tensor(sum(count_of(sample) for micro in batches for sample in micro))
        dist.all_reduce(count)
        made = [micro for micro in batches if micro] or [[(torch.tensor([1]), torch.tensor([-1]))]]
        for i, micro in enumerate(made):
            with contextlib.nullcontext() if i + 1 == len(made) else model.no_sync():
                logits, labels = in_rows(model, micro, **more)
                total = of_rows(logits, labels, labels >= 0)
                (total * size / count).backward()
        after(model.module)
        optimizer.step()
        spoil(step)
    assert not logits._backward_hooks and not step._outputs.kept, "outputs are held after the step"
    return step.verdict


def sums(change):
    """change(logits, labels) -> both as the mistaken step has them."""
    def case(rank, size, wrong):
        def of_rows(logits, labels, real):
            logits, labels = logits[real], labels[real]
            return F.cross_entropy(*(change(logits, labels) if wrong else (logits, labels)), reduction="sum")

        return watched(rank, size, of_rows)

    return case


def neighbours(rank, size, wrong):
    """Samples have each other's labels."""
    def of_rows(logits, labels, real):
        labels = labels[real]
        return F.cross_entropy(logits[real], labels.roll(1) if wrong else labels, reduction="sum")

    return watched(rank, size, of_rows)


def padding(rank, size, wrong):
    """Rows of padding are trained toward class 0."""
    def of_rows(logits, labels, real):
        return F.cross_entropy(logits, labels.clamp(min=0), reduction="sum") if wrong else F.cross_entropy(logits[real], labels[real], reduction="sum")

    return watched(rank, size, of_rows)


def right(logits, labels, real):
    return F.cross_entropy(logits[real], labels[real], reduction="sum")


def other_forward(rank, size, wrong):
    return watched(rank, size, right, shift=0.01 * wrong)


def rounds(wrong, then=lambda model: None):
    """A hook of one parameter rounds its gradient."""
    def before(model):
        if wrong:
            model.middle.weight.register_hook(lambda gradient: (gradient * 1e4).round() / 1e4)
        then(model)

    return before


def rounded_weights(rank, size, wrong):
    return watched(rank, size, right, before=rounds(wrong))


def both(rank, size, wrong):
    """The loss and the backward are wrong: of the latter nothing is said."""
    return watched(rank, size, lambda logits, labels, real: right(logits * (2 if wrong else 1), labels, real), before=rounds(wrong))


def asked(rank, size, wrong):
    """A gradient is asked for of outputs that no sample has, and is no part of the step's."""
    def ask(model):
        torch.autograd.grad(model(torch.tensor([3, 2, 1]))["logits"].sum(), [model.head.weight])

    return watched(rank, size, right, before=rounds(wrong, ask))


def asked_and_differentiated(rank, size, wrong):
    """A gradient is asked for of the outputs that are differentiated after that."""
    held = []

    def of_rows(logits, labels, real):
        torch.autograd.grad(logits.square().sum(), [held[0].head.weight], retain_graph=True)
        return right(logits, labels, real)

    return watched(rank, size, of_rows, before=rounds(wrong, held.append))


def holding_themselves(rank, size, wrong):
    """Outputs in a container that is in itself: nothing is said of them, and the step is made."""
    class Cyclic(Net):
        def forward(self, tokens):
            found = super().forward(tokens)
            found["itself"] = found
            return found

    return watched(rank, size, right, model=Cyclic, before=rounds(wrong))


def not_sent(rank, size, wrong):
    """A rank fails when it is asked for its outputs: no rank waits for it."""
    def spoil(step):
        if rank == 1:
            step._outputs.kept[0].value = None

    return watched(rank, size, right, before=rounds(wrong), spoil=spoil)


def is_unused(sample):
    return len(sample[0]) == 6  # a micro-batch of rank 0


def without_targets(rank, size, wrong):
    """All targets of a sample are left out of the loss and of the count, and it is trained toward others."""
    def used(model, sample):
        return losses(model, sample)[:0 if is_unused(sample) else None]

    def of_rows(logits, labels, real):
        return right(logits, labels.roll(1), real) * wrong if len(labels) == 6 else right(logits, labels, real)

    return watched(rank, size, of_rows, loss=used, count_of=lambda sample: 0 if is_unused(sample) else len(sample[0]))


def of_weight_0(rank, size, wrong):
    """A sample has losses and no weight."""
    def weight(sample):
        return 0 if is_unused(sample) else len(sample[0])

    return watched(rank, size, right, loss=lambda model, sample: (losses(model, sample).sum(), weight(sample)), mean="weighted", count_of=weight,
                   before=rounds(wrong))


def of_peers(rank, size, wrong):
    """All ranks have the same samples, so that nothing is summed, and a GradScaler multiplies the loss."""
    torch.manual_seed(0)
    model = Net()
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    own, batches = [dist.new_group([other]) for other in range(size)][rank], samples(0, size)
    with isograd.watch(model, optimizer, micro_batches=batches, loss=losses, data=own) as step:
        rounds(wrong)(model)
        for micro in batches:
            logits, labels = in_rows(model, micro)
            scaler.scale(right(logits, labels, labels >= 0) * 23 / 19).backward()
        for p in model.parameters():
            p.grad /= 23
        scaler.step(optimizer)
    return step.verdict


def weights_undone(rank, size, wrong):
    """The losses of each rank are multiplied, and the gradients of its parameters divided, by its own number: of weights nothing is said."""
    def before(model):
        for name, p in model.named_parameters():
            digits = 1e4 if wrong and name == "middle.weight" else None
            p.register_hook(lambda gradient, digits=digits: ((gradient * digits).round() / digits if digits else gradient) / (rank + 1))

    return watched(rank, size, lambda *given: (rank + 1) * right(*given), before=before)


def between(rank, size, wrong):
    """Two modules that are called one after the other, and a hook on what goes from one to the other."""
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(6, WIDTH, bias=False), nn.Linear(WIDTH, CLASSES, bias=False)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random = torch.Generator().manual_seed(rank)
    micro = [torch.randn(6, generator=random) for _ in range(3 + rank)]

    def squares(model, x, hook=lambda gradient: gradient):
        hidden = model[0](x)
        hidden.register_hook(hook)
        return model[1](torch.tanh(hidden)).square().sum(-1)

    with isograd.watch(model, optimizer, micro_batches=[micro], loss=lambda model, x: squares(model, x[None])) as step:
        count = sum(3 + rank for rank in range(size))
        (squares(model, torch.stack(micro), torch.sign if wrong else lambda gradient: gradient).sum() / count).backward()
        for p in model.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()
    return step.verdict


def in_place(rank, size, wrong):
    """Logits are changed in place after the forward: nothing is said of them."""
    def of_rows(logits, labels, real):
        logits.mul_(2 if wrong else 1)
        return right(logits, labels, real)

    return watched(rank, size, of_rows)


def unseen(rank, size, wrong):
    """Logits are changed through `.data`, which leaves no trace."""
    def of_rows(logits, labels, real):
        logits.data.mul_(2 if wrong else 1)
        return right(logits, labels, real)

    return watched(rank, size, of_rows)


def factor(loss, after):
    """A loss that is loss times the right one, and a gradient that is multiplied after the backward."""
    def case(rank, size, wrong):
        def multiply(model):
            for p in model.parameters():
                p.grad *= after if wrong else 1 / loss

        return watched(rank, size, lambda *given: loss * right(*given), after=multiply)

    return case


def recomputed(rank, size, wrong):
    """Forwards that a checkpoint makes again in the backward are no outputs."""
    return watched(rank, size, lambda logits, labels, real: right(logits / (2 if wrong else 1), labels, real), model=lambda: Net(recompute=True))


def in_32_bits(rank, size, wrong):
    return watched(rank, size, lambda logits, labels, real: right(logits / (2 if wrong else 1), labels, real), dtype=torch.float32)


def features(of_right, of_wrong, keep=lambda rank, micro: micro):
    """A loss of the features of all samples, which are gathered with their gradient. keep: the samples that the mistaken step takes."""
    def case(rank, size, wrong):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        random = torch.Generator().manual_seed(rank)
        micro = [torch.randn(6, generator=random) for _ in range(4)]

        def whole(model, rows):
            return of_right(torch.stack(list(rows)))

        with isograd.watch(model, optimizer, micro_batches=[micro], features=lambda model, x: model(x), loss=whole) as step:
            own = model(torch.stack(keep(rank, micro) if wrong else micro))
            rows = torch.cat(list(torch.distributed.nn.functional.all_gather(own)))
            (of_wrong if wrong else of_right)(rows).backward()
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= size
            optimizer.step()
        return step.verdict

    return case


def far(rows):
    return (rows - rows.mean(0)).square().sum(1).sqrt().mean()


def weighted(rows):
    return rows.square().sum(1) @ torch.linspace(0.5, 2, len(rows)) / len(rows)


def frozen_scale(rank, size, wrong):
    """A parameter that the loss takes by itself has another gradient there."""
    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(CLASSES))

    def scaled(model, sample):
        return F.cross_entropy(model(sample[0])["logits"] * model.scale, sample[1], reduction="none")

    held = []

    def before(model):
        held.append(model.scale)

    def of_rows(logits, labels, real):
        scale = held[0]
        return right(logits * scale, labels, real) + (0.3 * scale[0] if wrong else 0)

    return watched(rank, size, of_rows, loss=scaled, model=Scaled, before=before)


CASES = {
    "other_loss of other logits": sums(lambda logits, labels: (logits * torch.linspace(1, 1.2, CLASSES), labels)),
    "other_loss divided": sums(lambda logits, labels: (logits / 2, labels)),
    "other_loss and another backward": both,
    "other_loss recomputed": recomputed,
    "other_loss in 32 bits": in_32_bits,
    "other_loss of a parameter in it": frozen_scale,
    "other_loss of features": features(far, lambda rows: (rows - rows.mean(0)).square().sum(1).mean()),
    "other_targets of neighbours": neighbours,
    "extra_rows_counted": padding,
    "other_outputs": other_forward,
    "missing_data_part": features(far, far, keep=lambda rank, micro: micro[1:]),
    "samples_weighted_differently": features(lambda rows: rows.square().sum(1).mean(), weighted),
    "other_backward": rounded_weights,
    "other_backward between forwards": between,
    "unknown where the reduction undoes weights": weights_undone,
    "scaled_by_factor in the loss": factor(23.0, 1.0),
    "scaled_by_factor after it": factor(1024.0, 1 / 1000.0),
    "other_backward of ranks with the same samples": of_peers,
    "undecided where outputs were changed in place": in_place,
    "undecided where outputs were changed unseen": unseen,
    "other_targets of a sample without them": without_targets,
    "other_backward of a sample of weight 0": of_weight_0,
    "unknown where a gradient is asked for": asked,
    "unknown where it is asked for first": asked_and_differentiated,
    "unknown where outputs hold themselves": holding_themselves,
    "unknown where a rank does not send": not_sent,
}


def run(rank):
    torch.set_default_dtype(torch.float64)
    found = {}
    size = dist.get_world_size()
    for name, case in CASES.items():
        for wrong in (False, True):
            try:
                verdict = case(rank, size, wrong)
                said = [verdict.passed, verdict.findings, str(verdict)]
            except isograd.ConfigError as error:
                said = [False, ["refused"], str(error)]
            found.setdefault(name, []).append(said)
    return found


if __name__ == "__main__":
    json.dump(on_ranks(int(sys.argv[1]), run)[0], sys.stdout)
