"""python changed.py FOLDER: right steps on two ranks, and mistakes in them. Each is put right by the code that its verdict says to use,
in the line of the right step that has it, until the step passes. As JSON: by mistake, what was said each time. The page and the dumps
of one go to FOLDER."""
import contextlib  # noqa: F401  for the steps
import json
import re
import sys

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn.functional as F
from ranks import on_ranks
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from whole_batch import averaged

import isograd

RIGHT = """
model = DistributedDataParallel(make_model())
isograd.sum_gradients(model)
optimizer = torch.optim.AdamW(model.parameters())
before_the_step(model)
with isograd.watch(model, optimizer, micro_batches=micro_batches, loss=losses, max_norm=max_norm, **kept) as step:
    optimizer.zero_grad()
    BRANCH["of"] = torch.tanh
    counted = isograd.TokenMean().count(targets)
    for j, documents in enumerate(micro_batches):
        last = j + 1 == len(micro_batches)
        with contextlib.nullcontext() if last else model.no_sync():
            loss_sum = torch.cat([F.cross_entropy(model(tokens[:-1]), tokens[1:], reduction="none") for tokens in documents]).sum()
            own = len(targets[j])
            counted.scale(loss_sum).backward()
    norm = isograd.clip_grad_norm_(model, max_norm)
    optimizer.step()
    step.log(loss=counted.loss())
    step.log(norm=norm)
    BRANCH.clear()
"""
COUNT = "counted = isograd.TokenMean().count(targets)"
SUM = "isograd.sum_gradients(model)"
SCALE = "counted.scale(loss_sum).backward()"
CLIP = "norm = isograd.clip_grad_norm_(model, max_norm)"
UPDATE = "optimizer.step()"
# By finding, what stands in place of lines of RIGHT.
MISTAKES = {
    "averaged_over_axis": {SUM: "pass"},
    "mean_of_rank_means": {SUM: "pass", SCALE: "(loss_sum / sum(map(len, targets))).backward()"},
    "count_not_reduced": {SCALE: "(loss_sum / sum(map(len, targets))).backward()"},
    "mean_of_micro_batch_means": {SUM: "pass", SCALE: "(loss_sum / own / len(micro_batches)).backward()"},
    "summed_over_micro_batches": {SUM: "pass", SCALE: "(loss_sum / own).backward()"},
    "averaged_over_micro_batches": {SCALE: "(counted.scale(loss_sum) / len(micro_batches)).backward()"},
    "multiplied_by_axis": {SCALE: "(counted.scale(loss_sum) * dist.get_world_size()).backward()"},
    "unscaled_sum": {SCALE: "counted.scale(loss_sum); loss_sum.backward()",
                     "step.log(loss=counted.loss())": "step.log(loss=98 * counted.loss())"},
    "gradient_scaled_by_count": {SCALE: "counted.scale(loss_sum); loss_sum.backward()"},
    "scaled_by_factor": {SCALE: "(loss_sum / 50).backward()", "step.log(loss=counted.loss())": "pass"},
    "loss_scaled": {"step.log(loss=counted.loss())": "step.log(loss=2 * counted.loss())"},
    "loss_differs": {"step.log(loss=counted.loss())": "step.log(loss=float(loss_sum) / own)"},
    "summed_over_micro_batches and ranks": {SCALE: f"({SCALE[:-11]} * len(micro_batches) * dist.get_world_size()).backward()"},
    "other_denominator": {SCALE: "(loss_sum / padded).backward()"},
    "other_denominator of each rank": {SUM: "pass", SCALE: "(loss_sum / own_padded).backward()"},
    "other_mean": {SCALE: "(sum(losses(model, tokens).mean() for tokens in documents) / 9).backward()"},
    "other_targets shifted twice": {"model(tokens[:-1]), tokens[1:]": "model(tokens[:-2]), tokens[2:]"},
    "other_targets not shifted": {"model(tokens[:-1]), tokens[1:]": "model(tokens[:-1]), tokens[:-1]"},
    "other_targets not shifted at all": {"model(tokens[:-1]), tokens[1:]": "model(tokens), tokens"},
    "other_targets without the first": {'reduction="none")': 'reduction="none")[1:]'},
    "other_targets without the last": {'reduction="none")': 'reduction="none")[:-1]'},
    "other_targets smoothed": {'reduction="none")': 'reduction="none", label_smoothing=0.1)'},
    "gradient_of_earlier_step": {"optimizer.zero_grad()": "pass", "before_the_step(model)": "losses(model.module, torch.arange(9)).sum().backward()"},
    "micro_batches_lost": {"loss_sum = torch": "optimizer.zero_grad(); loss_sum = torch"},
    "micro_batches_not_reduced": {"with contextlib.nullcontext() if last else model.no_sync():":
                                  "with model.no_sync() if j else contextlib.nullcontext():"},
    "not_summed_over_axis": {"with contextlib.nullcontext() if last else model.no_sync():": "with model.no_sync():"},
    "clipped_before_reduction": {SCALE: f"{SCALE}; {CLIP}"},
    "norm_before_reduction": {"with contextlib.nullcontext() if last else model.no_sync():": "with model.no_sync():",
                              CLIP: "norm = None; clip_the_sum_by_the_norm_of_the_part(model, max_norm)"},
    "values_clipped": {CLIP: "norm = None; torch.nn.utils.clip_grad_value_(model.parameters(), 0.003)"},
    "groups_clipped_apart": {CLIP: "norm = None; [torch.nn.utils.clip_grad_norm_([p], max_norm) for p in model.parameters()]"},
    "clip_not_applied": {CLIP: "norm = isograd.clip_grad_norm_(model, float('inf'))"},
    "norm_differs": {CLIP: "isograd.clip_grad_norm_(model, max_norm); norm = 0.7 * max_norm"},
    "weight_decay_in_gradient": {SCALE: f"({SCALE[:-11]} + last * sum(p.square().sum() for p in model.parameters()) * 1e-3).backward()"},
    "cut_in_forward": {'BRANCH["of"] = torch.tanh': 'BRANCH["of"] = lambda hidden: torch.tanh(hidden).detach()'},
    "not_in_optimizer": {"AdamW(model.parameters())": "AdamW(make_model().parameters())"},
    "updates_differ": {UPDATE: "dist.get_rank() or optimizer.step()"}}

BRANCH = {}  # in the run alone
# A contrastive loss over all ranks and micro-batches, and a term of its own.
RIGHT_WHOLE = """
model = make_model()
with isograd.watch(model, None, micro_batches=pairs, features=pair_features, loss=contrast,
                   terms=[isograd.Term(sizes, 0.05)]) as step:
    features_of_micro_batches = [model[1](torch.stack(rows)) for rows in pairs]
    term = torch.cat(features_of_micro_batches).square().mean()
    features_of_micro_batches = [isograd.all_gather_rows(features) for features in features_of_micro_batches]
    features = torch.cat(features_of_micro_batches)
    loss = mean_loss(features)
    (loss + 0.05 * term).backward()
    averaged(model)
"""
GATHER = "isograd.all_gather_rows(features)"
ONCE = "features = torch.cat(features_of_micro_batches)\n"
WHOLE_MISTAKES = {
    "mean_of_rank_means of a whole loss": {GATHER: "features"},
    "mean_of_micro_batch_means of a whole loss": {ONCE: "features = features_of_micro_batches\n"},
    "mean_of_micro_batch_means of a whole loss by rank": {GATHER: "features", ONCE: "features = features_of_micro_batches\n"},
    "not_summed_over_axis of features": {GATHER: "gathered_without_gradient(features)"},
    "term_scaled": {"0.05 * term)": "0.1 * term)"}}


class Net(nn.Sequential):
    def forward(self, tokens):
        hidden = self[1](self[0](tokens))
        return self[3](self[2](hidden + BRANCH.get("of", torch.tanh)(hidden)))


def make_model():
    torch.manual_seed(0)
    return Net(nn.Embedding(20, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 20))


def losses(model, tokens):
    return F.cross_entropy(model(tokens[:-1]), tokens[1:], reduction="none")


def before_the_step(model):
    """Nothing is left from there."""


def clip_the_sum_by_the_norm_of_the_part(model, max_norm):
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    for p in model.parameters():
        dist.all_reduce(p.grad)
    torch.nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)


def gathered_without_gradient(features):
    parts = [torch.zeros_like(features) for _ in range(2)]
    dist.all_gather(parts, features)
    parts[dist.get_rank()] = features
    return torch.cat(parts)


def mean_loss(features):
    """Of all rows at once; of a list the mean of each."""
    return sum(map(mean_loss, features)) / len(features) if isinstance(features, list) else contrast(None, features)


def contrast(model, features):
    rows = torch.stack(features) if isinstance(features, list) else features
    logits = rows[:, 0] @ rows[:, 1].T
    return F.cross_entropy(logits, torch.arange(len(rows)))


def pair_features(model, pair):
    return model[1](pair)


def sizes(model, sample):
    return model[1](sample).square().mean(-1)


def verdict_of(source, rank, folder):
    torch.manual_seed(1 + rank)
    all_lengths = [(5, 9), (14,), (6,)], [(30, 3), (11, 8), (21,)]
    micro_batches = [[torch.randint(20, (n,)) for n in lengths] for lengths in all_lengths[rank]]
    padded = [sum(len(lengths) * (max(lengths) - 1) for lengths in some) for some in all_lengths]  # targets
    targets = [torch.cat([tokens[1:] for tokens in documents]) for documents in micro_batches]
    pairs = [[torch.randn(2, 8) for _ in range(3)] for _ in range(2)]
    found = {**globals(), "micro_batches": micro_batches, "targets": targets, "max_norm": 0.05, "pairs": pairs,
             "padded": sum(padded), "own_padded": padded[rank],
             "kept": {"report": f"{folder}/page.html", "folder": f"{folder}/dumps"} if folder else {}}
    exec(source, found)
    return found["step"].verdict


def put_right(right, source, changes):
    """The source with those lines of the right one in which it, or the mistaken one, has a code of the changes."""
    codes = [code for change in changes.values() for code in re.findall("`([^`]+)`", change)]
    lines = zip(right.split("\n"), source.split("\n"), strict=True)
    return "\n".join(good if any(code in good or code in line for code in codes) else line for good, line in lines)


def run(rank):
    found = {}
    for right, mistakes in ((RIGHT, MISTAKES), (RIGHT_WHOLE, WHOLE_MISTAKES)):
        for name, lines in {"right": {}, **mistakes}.items():
            source = right
            for one, other in lines.items():
                assert source.count(one) == 1, one
                source = source.replace(one, other)
            said = found.setdefault(name if lines else f"{name} {len(found)}", [])
            for i in range(3):
                verdict = verdict_of(source, rank, sys.argv[1] if name == "mean_of_rank_means" and i == 0 else None)
                said.append([verdict.passed, verdict.findings, str(verdict), verdict.changes])
                if verdict.passed:
                    break
                source = put_right(right, source, verdict.changes)
    return found


if __name__ == "__main__":
    json.dump(on_ranks(2, run), sys.stdout)
