"""Causes that `isograd.watch` tries on the reference, and what it sees of a step besides its gradient: each names the mistake, and
lets the step without it pass (tests/python_package/causes.py)."""
import json
import re

import pytest
from conftest import ROOT, run_python

CASES = re.findall(r'(?m)^    "([^"]+)": ', (ROOT / "tests/python_package/causes.py").read_text().partition("\nCASES = {")[2])


@pytest.fixture(scope="module")
def causes(warm):
    first, second = json.loads(run_python(warm, "causes.py"))
    assert first == second
    return first


@pytest.mark.parametrize("name", CASES)
def test_the_mistake_is_named_and_the_step_without_it_passes(causes, name):
    (right, none, said), (wrong, findings, text) = causes[name]
    assert (right, none) == (True, []), said
    assert (wrong, findings) == (False, [name.split(" ")[0]]), text


@pytest.mark.parametrize("name, parts", {
    "gradient_lost in rows": ["rows 2, 5 of middle.weight: no gradient there", "`register_hook`"],
    "gradient_lost in one use": ["of 2 uses of embedding.weight in the forward one passes no gradient on: number 2, by linear"],
    "other_reduction largest": ["the largest of the ranks' ones", "`dist.all_reduce(gradient, op=dist.ReduceOp.SUM)`"],
    "other_targets of prompts in rows": ["and the first token of rows that are filled up before it, which padding has to predict",
                                         "`labels.masked_fill(ignored, -100)`"],
    "other_targets not shifted": ["labels are not shifted", "`logits[:, :-1]` with `labels[:, 1:]`"],
    "documents_leak seen": ["documents of a micro-batch see those before them", "let each document see itself alone: `sees = (document"],
    "documents_leak positions": ["positions that run on", "change (documents_leak): let positions begin at 0"],
    "documents_leak both": ["`sees = (document", "`positions = torch.cat("],
    "padding_seen before": ["the padding, 0, that stands before them", "`sees = sees & real[:, None]"],
    "padding_seen with positions": ["that stands before them", "`positions = (real.cumsum(-1) - 1).clamp(min=0)`"],
    "padding_seen after": ["that stands after them"],
    "other_targets of one direction": ["targets 6 to 11 of the batch; the others count 2 times", "`(F.cross_entropy(logits, wanted) + F.cross"],
    "other_targets in the middle": ["left out: target 3 of sample 0 of micro-batch 0 on rank 0; target 7 of", "`labels = document[1:]`"],
    "samples_weighted_differently a sample twice": ["sample 1 of micro-batch 0 on rank 0 counts 2 times as often as most", "`rank=dist.get_rank()`"],
    "samples_weighted_differently one rank alone": ["those of rank 0 count 2 times; those of rank 1 count 0 times", "`rank=dist.get_rank()`"],
    "samples_weighted_differently each target": ["target 0 of sample 0 of micro-batch 0 on rank 0 0.5 times", "`(losses * factor).sum()`"],
    "not_summed_over_axis of what is compared": ["and none as one that others are compared with", "isograd.all_gather_rows(features)`"],
    "loss_over_own_samples means averaged": ["the average of the ranks' means, however many rows", "all_reduce(x.sum(0)) / count`"],
    "loss_over_own_samples variances within": ["that of each rank about its own mean", "all_reduce(x.sum(0)) / count`"],
    "loss_over_own_samples unbiased": ["divided by one row less", "`x.var(0, correction=0)`"],
    "mean_of_rank_means of one term": ["terms[0] alone: the mean over each rank's samples", "`term_sum * dist.get_world_size() / count`"],
    "clip_differs divided late": ["23 times what it should be when it is clipped", "`p.grad /= denominator`"],
    "not_updated": ["that of 2.weight, 2.bias did not", "`later=[optimizer]`"],
    "evaluation_mode": ["the loss is ", "`model.train()` before the step"], "evaluation_mode of PyTorch's": ["middle.1 (Dropout)"],
    "buffers_differ": ["the step switched 1 (BatchNorm1d) to training mode", "`norm.eval().train = lambda mode=True: norm`"],
    "other_loss of one that takes nothing else": ["logits are divided by 0.8333 times what `loss` divides them by"],
    "refused": ["a loss that is random", "first in middle.1 (Dropout)"]}.items())
def test_it_is_said_where_it_is_and_what_to_change(causes, name, parts):
    text = causes[name][1][2]
    assert all(part in text for part in parts), text


def test_what_one_is_told_to_step_later_is_said(causes):
    assert "nothing is proven of 2.weight, 2.bias: its optimizer steps later, as was said" in causes["not_updated unless told"][0][2]


def test_each_case_was_made(causes):
    assert sorted(CASES) == sorted(causes) and len(CASES) >= 23
