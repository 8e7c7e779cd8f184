"""python causes.py: steps on two ranks with a mistake each, and the same without it. As JSON: by mistake, whether the right step and the
mistaken one passed, with findings and sentences, or the error."""
import functools
import json
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from ranks import on_ranks
from torch import nn

import isograd

IGNORED = -100
SUM = dist.ReduceOp.SUM


class Net(nn.Module):
    """Tokens [T] -> logits [T, 20]: each token takes the mean of those that it sees. The head is the embedding, if it is tied."""

    def __init__(self, middle=None):
        super().__init__()
        self.embedding, self.place, self.middle = nn.Embedding(20, 8), nn.Embedding(40, 8), middle or nn.Linear(8, 8)
        self.head = nn.Linear(8, 20, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens, sees=None, positions=None):
        size = tokens.shape[-1]
        sees = torch.ones(size, size).tril() if sees is None else sees
        positions = torch.arange(size) if positions is None else positions
        hidden = self.embedding(tokens) + self.place(positions)
        hidden = hidden + sees.to(hidden) @ torch.tanh(self.middle(hidden)) / sees.sum(-1, keepdim=True)
        return self.head(torch.tanh(hidden))


def losses(model, tokens):
    return F.cross_entropy(model(tokens[:-1]), tokens[1:], reduction="none")


def answers(model, sample):
    """Those of the answer, selected when they are there."""
    tokens, labels = sample
    return F.cross_entropy(model(tokens)[:-1], labels[1:], reduction="none")[labels[1:] != IGNORED]


def reduced(parameters, operation=SUM):
    for p in parameters:
        p.grad = torch.zeros_like(p) if p.grad is None else p.grad
        dist.all_reduce(p.grad, op=operation)


def watched(samples, loss, of_step, model=Net, before=lambda model: None, operation=SUM):
    """The step of the mean over all targets: of_step(model, samples) -> the losses of this rank's."""
    torch.manual_seed(0)
    model = model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with isograd.watch(model, optimizer, micro_batches=[samples], loss=loss) as step:
        before(model)
        each = of_step(model, samples)
        count = torch.tensor(each.numel())
        dist.all_reduce(count)
        (each.sum() / count).backward()
        reduced(model.parameters(), operation)
        optimizer.step()
    return step.verdict


def each_apart(loss):
    return lambda model, samples: torch.cat([loss(model, sample).flatten() for sample in samples])


def documents(rank, *lengths):
    torch.manual_seed(7 + rank)
    return [torch.randint(1, 20, (length,)) for length in lengths[rank]]


def questions(rank):
    return [(tokens, tokens.masked_fill(torch.arange(len(tokens)) < asked, IGNORED))
            for tokens, asked in zip(documents(rank, (9, 5), (7,)), ((3, 5), (2,))[rank])]


def a_row(rank, wrong):
    def clear(model):
        if wrong:
            model.middle.weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([2, 5]), 0.0))

    return watched(documents(rank, (9, 5), (12,)), losses, each_apart(losses), before=clear)


def an_operation(operation):
    return lambda rank, wrong: watched(documents(rank, (9, 5), (12,)), losses, each_apart(losses), operation=operation if wrong else SUM)


def a_tie(rank, wrong):
    def cut(model):
        if wrong:
            model.head.forward = lambda hidden: F.linear(hidden, model.embedding.weight.data)

    return watched(documents(rank, (9, 5), (12,)), losses, each_apart(losses), before=cut)


def prompts(rank, wrong):
    def of_all(model, samples):
        return torch.cat([F.cross_entropy(model(tokens)[:-1], tokens[1:], reduction="none") for tokens, _ in samples])

    return watched(questions(rank), answers, of_all if wrong else each_apart(answers))


def prompts_in_rows(rank, wrong):
    """In rows that are filled up before them, so that padding predicts the first token of a prompt."""
    def rows(model, samples):
        longest, found = max(len(tokens) for tokens, _ in samples), []
        for tokens, labels in samples:
            more = longest - len(tokens)
            real = torch.arange(longest) >= more
            sees = torch.maximum(torch.ones(longest, longest).tril() * real, torch.eye(longest))
            logits = model(F.pad(tokens, (more, 0)), sees, (torch.arange(longest) - more).clamp(min=0))
            wanted = F.pad(tokens if wrong else labels, (more, 0), value=IGNORED)[1:]
            found.append(F.cross_entropy(logits[:-1], wanted, reduction="none")[wanted != IGNORED])
        return torch.cat(found)

    return watched(questions(rank), answers, rows)


def not_shifted(rank, wrong):
    def own(model, samples):
        return torch.cat([F.cross_entropy(model(tokens)[1:], labels[1:], reduction="none")[labels[1:] != IGNORED]
                          for tokens, labels in samples])

    return watched(questions(rank), answers, own if wrong else each_apart(answers))


def a_pack(sees_all, runs_on):
    """Documents one after the other, in a mask of blocks and at positions of their own, or not."""
    def step(rank, wrong):
        def pack(model, samples):
            number = torch.cat([torch.full((len(tokens),), i) for i, tokens in enumerate(samples)])
            sees = torch.ones(len(number), len(number)).tril()
            if not (wrong and sees_all):
                sees = sees * (number[:, None] == number)
            positions = torch.arange(len(number)) if wrong and runs_on else torch.cat([torch.arange(len(tokens)) for tokens in samples])
            labels = torch.cat([F.pad(tokens[1:], (0, 1), value=IGNORED) for tokens in samples])
            return F.cross_entropy(model(torch.cat(samples), sees, positions), labels, reduction="none")[labels != IGNORED]

        return watched(documents(rank, (9, 5, 3), (12, 6)), losses, pack)

    return step


def padding(left, runs_on=False):
    """Rows of one length, filled up with 0, in which a mask covers what is filled up, or does not. runs_on: positions count it then too."""
    def step(rank, wrong):
        def rows(model, samples):
            longest, found = max(map(len, samples)), []
            for tokens in samples:
                more = longest - len(tokens)
                row = F.pad(tokens, (more, 0) if left else (0, more))
                sees = torch.ones(longest, longest).tril() if left else torch.ones(longest, longest)
                first = more if left else 0
                real = (torch.arange(longest) >= first) & (torch.arange(longest) < first + len(tokens))
                if not wrong:
                    sees = torch.maximum(sees * real, torch.eye(longest))
                places = torch.arange(longest) - (0 if wrong and runs_on else first)
                logits = model(row, sees, places.clamp(min=0))[real]
                found.append(F.cross_entropy(logits[:-1], tokens[1:], reduction="none"))
            return torch.cat(found)

        return watched(documents(rank, (9, 5, 3), (12, 6)), all_in, rows, model=Net if left else Encoder)

    return step


class Encoder(Net):
    """Tokens see what comes after them too."""

    def forward(self, tokens, sees=None, positions=None):
        return super().forward(tokens, torch.ones(tokens.shape[-1], tokens.shape[-1]) if sees is None else sees, positions)


def all_in(model, tokens):
    """The model is given the last token too."""
    return F.cross_entropy(model(tokens)[:-1], tokens[1:], reduction="none")


def an_optimizer_that_waits(rank, wrong, later=False):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    first, second = (torch.optim.AdamW(model[i].parameters()) for i in (0, 2))
    samples = [torch.randn(3) for _ in range(3 - rank)]
    with isograd.watch(model, first, micro_batches=[samples], loss=lambda model, x: model(x).square(),
                       later=[second] if later else []) as step:
        (model(torch.stack(samples)).square().sum() / 10).backward()
        reduced(model.parameters())
        first.step()
        if not wrong:
            second.step()
    return step.verdict


def one_that_waits_and_is_told(rank, wrong):
    return an_optimizer_that_waits(rank, True, later=not wrong)


class Drops(nn.Module):
    """Dropout of one's own."""

    def forward(self, hidden):
        return F.dropout(hidden, 0.3, self.training)


def evaluation(middle):
    """The model is left in evaluation mode."""
    def step(rank, wrong):
        def seeded(model, tokens):
            torch.manual_seed(int(tokens.sum()))
            return losses(model, tokens)

        def modes(model):
            model.train(not wrong)

        return watched(documents(rank, (9, 5), (12,)), seeded, each_apart(seeded), before=modes,
                       model=lambda: Net(nn.Sequential(nn.Linear(8, 8), middle())))

    return step


def dropout_without_a_seed(rank, wrong):
    """Seeded with the sample it passes."""
    def seeded(model, tokens):
        if not wrong:
            torch.manual_seed(int(tokens.sum()))
        return losses(model, tokens)

    return watched(documents(rank, (9, 5), (12,)), seeded, each_apart(seeded), model=lambda: Net(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))))


def cast(rank, wrong):
    def in_16_bits(model, samples):
        return torch.cat([F.cross_entropy(model(tokens[:-1]).bfloat16(), tokens[1:], reduction="none") for tokens in samples])

    return watched(documents(rank, (9, 5), (12,)), losses, in_16_bits if wrong else each_apart(losses))


def own_rows(rank, wrong):
    """A contrastive loss of this rank's rows among all, which are gathered with their gradient or without it."""
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = [torch.randn(2, 4, generator=torch.Generator().manual_seed(rank + 2 * i)) for i in range(3)]

    def contrast(model, features):
        rows = torch.stack(list(features))
        return F.cross_entropy(rows[:, 0] @ rows[:, 1].T, torch.arange(len(rows)))

    with isograd.watch(model, optimizer, micro_batches=[samples], features=lambda model, pair: model(pair), loss=contrast) as step:
        own = model(torch.stack(samples))
        if wrong:
            every = [torch.empty_like(own) for _ in range(2)]
            dist.all_gather(every, own.detach())
            every[rank] = own
        else:
            every = dist.nn.functional.all_gather(own)
        F.cross_entropy(own[:, 0] @ torch.cat(list(every))[:, 1].T, 3 * rank + torch.arange(3)).backward()
        reduced(model.parameters())
        for p in model.parameters():
            p.grad /= 2
        optimizer.step()
    return step.verdict


def weighted(of, lengths=((9, 5, 8), (12, 6))):
    """Each sample's losses times of(rank, its number, its losses)."""
    def case(rank, wrong):
        def each(model, samples):
            some = [losses(model, tokens) for tokens in samples]
            return torch.cat([one * of(rank, i, one) if wrong else one for i, one in enumerate(some)])

        return watched(documents(rank, *lengths), losses, each)

    return case


def compared(rank, wrong, change):
    """Rows that are compared with all rows, in both directions: with those `cut` off from their gradient, or in `one` direction."""
    torch.manual_seed(0)
    model = nn.Linear(4, 16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = [torch.randn(2, 4, generator=torch.Generator().manual_seed(rank + 2 * i)) for i in range(3)]

    def contrast(model, features):
        one, other = torch.stack(list(features)).unbind(1)
        wanted = torch.arange(len(one))
        return (F.cross_entropy(one @ other.T, wanted) + F.cross_entropy(other @ one.T, wanted)) / 2

    with isograd.watch(model, optimizer, micro_batches=[samples], features=lambda model, pair: model(pair), loss=contrast) as step:
        own = model(torch.stack(samples))
        every = torch.cat(list(dist.nn.functional.all_gather(own)))
        wanted = 3 * rank + torch.arange(3)
        directions = []
        for a, b in ((own[:, 0], every[:, 1]), (own[:, 1], every[:, 0])):
            directions.append(F.cross_entropy(a @ (b.detach() if wrong and change == "cut" else b).T, wanted))
        (directions[0] if wrong and change != "cut" else sum(directions) / 2).backward()
        reduced(model.parameters())
        for p in model.parameters():
            p.grad /= 2
        optimizer.step()
    return step.verdict


def moments(change):
    """A loss of features less their mean over all rows, over their standard deviation; ranks have 4 and 2 rows."""
    def case(rank, wrong):
        torch.manual_seed(0)
        model = nn.Linear(4, 8)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        samples = [torch.randn(4, generator=torch.Generator().manual_seed(rank + 2 * i)) + rank for i in range((4, 2)[rank])]

        def of(rows, mean, variance):
            return ((rows - mean) / variance.sqrt()).tanh().square().sum()

        def whole(model, features):
            rows = torch.stack(list(features))
            return of(rows, rows.mean(0), rows.var(0, correction=0)) / len(rows)

        with isograd.watch(model, optimizer, micro_batches=[samples], features=lambda model, x: model(x), loss=whole) as step:
            rows = model(torch.stack(samples))
            total, wrongly = torch.distributed.nn.functional.all_reduce, change if wrong else ""
            mean = total(rows.mean(0)) / 2 if wrongly == "means" else total(rows.sum(0)) / 6
            about = rows.mean(0) if wrongly == "within" else mean
            variance = total((rows - about).square().sum(0)) / (5 if wrongly == "unbiased" else 6)
            (of(rows, mean, variance) / 6).backward()
            reduced(model.parameters())
            optimizer.step()
        return step.verdict

    return case


def late_division(rank, wrong):
    """The gradient is divided by the number of targets before it is clipped, or after it."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = documents(rank, (9, 5), (12,))
    with isograd.watch(model, optimizer, micro_batches=[samples], loss=losses) as step:
        each_apart(losses)(model, samples).sum().backward()
        reduced(model.parameters())
        for late in (False, True):
            for p in model.parameters():
                p.grad /= 23 if late == wrong else 1
            if not late:
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return step.verdict


def one_term(rank, wrong):
    """The second term is each rank's mean, or that of all targets."""
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = documents(rank, (9, 5), (12,))

    def sizes(model, tokens):
        return model(tokens[:-1]).square().mean(-1)

    with isograd.watch(model, optimizer, micro_batches=[samples], loss=losses, terms=[isograd.Term(sizes, 0.5)]) as step:
        second = each_apart(sizes)(model, samples)
        (each_apart(losses)(model, samples).sum() / 23 + 0.5 * (second.mean() / 2 if wrong else second.sum() / 23)).backward()
        reduced(model.parameters())
        optimizer.step()
    return step.verdict


def seeded_by_rank(rank, wrong):
    """With the sample it passes."""
    def seeded(model, tokens):
        torch.manual_seed(int(tokens.sum()))
        return losses(model, tokens)

    def of_rank(model, samples):
        torch.manual_seed(rank)
        return torch.cat([losses(model, tokens) for tokens in samples])

    return watched(documents(rank, (9, 5), (12,)), seeded, of_rank if wrong else each_apart(seeded),
                   model=lambda: Net(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3))))


def statistics(rank, wrong):
    """Batch norm whose statistics are frozen, and a step that calls model.train()."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
    model[1].eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    samples = [torch.randn(3) for _ in range(4 - rank)]
    with isograd.watch(model, optimizer, micro_batches=[samples], loss=lambda model, x: model(x[None]).square()) as step:
        if wrong:
            model.train()
        (model(torch.stack(samples)).square().sum() / 14).backward()
        reduced(model.parameters())
        optimizer.step()
    return step.verdict


def a_loss_that_takes_nothing_else(rank, wrong):
    """It raises what it likes where a cause that is tried calls it with other tokens, losses or parameters."""
    def strict(model, tokens):
        given = []
        hook = model.register_forward_pre_hook(lambda _, arguments: given.append(arguments[0].clone()))
        each = losses(model, tokens)
        hook.remove()
        known = F.nll_loss(F.log_softmax(model(tokens[:-1]), -1), tokens[1:], reduction="none")
        if len(given[0]) != len(tokens) - 1 or not torch.equal(each, known):
            raise KeyError("no such tokens")
        return each

    def of_step(model, samples):
        return torch.cat([F.cross_entropy(model(tokens[:-1]) * (1.2 if wrong else 1.0), tokens[1:], reduction="none") for tokens in samples])

    return watched(documents(rank, (9, 5), (12,)), strict, of_step)


CASES = {
    "gradient_lost in rows": a_row,
    "gradient_lost in one use": a_tie,
    "other_reduction largest": an_operation(dist.ReduceOp.MAX),
    "other_reduction smallest": an_operation(dist.ReduceOp.MIN),
    "other_reduction product": an_operation(dist.ReduceOp.PRODUCT),
    "other_targets of prompts": prompts,
    "other_targets of prompts in rows": prompts_in_rows,
    "other_targets not shifted": not_shifted,
    "documents_leak seen": a_pack(True, False),
    "documents_leak positions": a_pack(False, True),
    "documents_leak both": a_pack(True, True),
    "padding_seen before": padding(True),
    "padding_seen with positions": padding(True, runs_on=True),
    "padding_seen after": padding(False),
    "not_updated": an_optimizer_that_waits,
    "not_updated unless told": one_that_waits_and_is_told,
    "evaluation_mode": evaluation(Drops),
    "evaluation_mode of PyTorch's": evaluation(lambda: nn.Dropout(0.3)),
    "rounding of logits": cast,
    "not_summed_over_axis of features": own_rows,
    "not_summed_over_axis of what is compared": functools.partial(compared, change="cut"),
    "other_targets of one direction": functools.partial(compared, change="one"),
    "other_targets in the middle": weighted(lambda rank, i, each: torch.arange(len(each)) % 4 != 3),
    "samples_weighted_differently a sample twice": weighted(lambda rank, i, _: 2.0 if (rank, i) == (0, 1) else 1.0),
    "samples_weighted_differently one rank alone": weighted(lambda rank, i, _: 2.0 * (rank == 0)),
    "samples_weighted_differently each target": weighted(lambda rank, i, each: torch.linspace(0.5, 2, len(each))),
    "loss_over_own_samples means averaged": moments("means"),
    "loss_over_own_samples variances within": moments("within"),
    "loss_over_own_samples unbiased": moments("unbiased"),
    "mean_of_rank_means of one term": one_term,
    "clip_differs divided late": late_division,
    "noise_depends_on_layout": seeded_by_rank,
    "buffers_differ": statistics,
    "refused": dropout_without_a_seed,
    "other_loss of one that takes nothing else": a_loss_that_takes_nothing_else,
}


def run(rank):
    torch.set_default_dtype(torch.float64)
    found = {}
    for name, case in CASES.items():
        for wrong in (False, True):
            try:
                verdict = case(rank, wrong)
                said = [verdict.passed, verdict.findings, str(verdict)]
            except isograd.ConfigError as error:
                said = [False, ["refused"], str(error)]
            found.setdefault(name, []).append(said)
    return found


if __name__ == "__main__":
    json.dump(on_ranks(2, run), sys.stdout)
