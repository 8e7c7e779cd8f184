"""python contrastive.py [SETTING ...]: losses of open_clip, lightly, pytorch-metric-learning and sentence-transformers under isograd.watch, on 2 and
3 ranks; as JSON, by setting. The truth is the formula of each loss, written here, on one process in fp64."""
import copy
import json
import pathlib
import sys
import tempfile
import types

import torch
import torch.distributed as dist
import torch.distributed.nn
import torch.nn as nn
import torch.nn.functional as F
from ranks import on_ranks
from torch.nn.parallel import DistributedDataParallel
from whole_batch import apart, averaged

import isograd


def part_of(name, empty=False):
    """A package without what its __init__ imports: torchvision, timm."""
    first, *rest = name.split(".")
    folder = next(path for path in (pathlib.Path(place, first, *rest) for place in sys.path) if path.exists() or empty)
    module = types.ModuleType(name)
    module.__path__ = [str(folder)]
    sys.modules[name] = module


for package in ("open_clip", "lightly", "lightly.loss", "lightly.utils", "lightly.models", "lightly.models.modules"):
    part_of(package)
sys.modules["lightly.models"].utils = types.ModuleType("lightly.models.utils")  # of memory banks, which are not in use here

from lightly.loss.barlow_twins_loss import BarlowTwinsLoss  # noqa: E402
from lightly.loss.dcl_loss import DCLLoss  # noqa: E402
from lightly.loss.ntx_ent_loss import NTXentLoss  # noqa: E402
from lightly.loss.vicreg_loss import VICRegLoss  # noqa: E402
from open_clip.loss import ClipLoss, SigLipLoss  # noqa: E402
from pytorch_metric_learning import losses as metric  # noqa: E402
from pytorch_metric_learning.utils.distributed import DistributedLossWrapper  # noqa: E402
from sentence_transformers.sentence_transformer import losses as sentences  # noqa: E402

ROWS = 6  # of each rank


class Towers(nn.Module):
    """With open_clip's scale, or open_clip's scale and bias; other losses have neither."""

    def __init__(self, scale, bias):
        super().__init__()
        self.image = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8))
        self.text = nn.Sequential(nn.Linear(5, 16), nn.GELU(), nn.Linear(16, 8))
        if scale:
            self.logit_scale = nn.Parameter(torch.tensor(1.5))
        if bias:
            self.logit_bias = nn.Parameter(torch.tensor(-2.0))

    def forward(self, images, texts):
        more = [getattr(self, name) for name in ("logit_scale", "logit_bias") if hasattr(self, name)]
        return F.normalize(self.image(images), dim=-1), F.normalize(self.text(texts), dim=-1), *more


class Sentences(nn.Module):
    """As a SentenceTransformer gives embeddings."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 8))

    def forward(self, features):
        return {"sentence_embedding": self.body(features["x"])}

    def __getitem__(self, i):
        return self.body[i]


def samples(rank, seed=0):
    """(image, text, label); images and texts of 6 and 5 numbers, of sentences both of 6. Labels come on several ranks."""
    generator = torch.Generator().manual_seed(40 * seed + rank)
    return [(torch.randn(6, generator=generator), torch.randn(5, generator=generator), torch.tensor((i + rank) % 4)) for i in range(ROWS)]


# ---- the formulas ----

def one_way(a, b):
    """Of rows of a, whose positive is the same row of b: -log softmax."""
    logits = a @ b.T
    return (logits.logsumexp(1) - logits.diagonal()).mean()


def clip(images, texts, scale):
    return (one_way(scale.exp() * images, texts) + one_way(scale.exp() * texts, images)) / 2


def siglip(images, texts, scale, bias):
    logits = scale.exp() * images @ texts.T + bias
    return (F.softplus(logits).sum() - logits.diagonal().sum()) / len(images)  # -log(1 - p) of all, -log(p) + log(1 - p) of pairs


def without_diagonal(matrix):
    return matrix[~torch.eye(len(matrix), dtype=torch.bool)].view(len(matrix), -1)


def nt_xent(a, b, t=0.5):
    """Each of 2 N rows against all others."""
    rows = torch.cat([a, b])
    logits = rows @ rows.T / t
    positive = torch.cat([(a * b).sum(1), (b * a).sum(1)]) / t
    return (without_diagonal(logits).logsumexp(1) - positive).mean()


def dcl(a, b, t=0.1):
    """Without the positive among the others."""
    def of(a, b):
        others = torch.cat([without_diagonal(a @ a.T), without_diagonal(a @ b.T)], 1) / t
        return (others.logsumexp(1) - (a * b).sum(1) / t).mean()
    return (of(a, b) + of(b, a)) / 2


def vicreg(a, b):
    def spread(z):
        return F.relu(1 - (z.var(0) + 1e-4).sqrt()).mean()

    def covariance(z):
        centred = z - z.mean(0)
        matrix = centred.T @ centred / (len(z) - 1)
        return (matrix.square().sum() - matrix.diagonal().square().sum()) / z.shape[1]
    return 25 * (a - b).square().mean() + 25 * (spread(a) + spread(b)) / 2 + covariance(a) + covariance(b)


def barlow(a, b):
    a, b = ((z - z.mean(0)) / (z.var(0, correction=0) + 1e-5).sqrt() for z in (a, b))
    matrix = a.T @ b / len(a)
    return (matrix.diagonal() - 1).square().sum() + 5e-3 * (matrix.square().sum() - matrix.diagonal().square().sum())


def labelled_nt_xent(rows, labels, t=0.07):
    """Of each pair of one label: against those of other labels."""
    logits = rows @ rows.T / t
    terms = [-(logits[i, j] - torch.cat([logits[i, j].view(1), logits[i][labels != labels[i]]]).logsumexp(0))
             for i in range(len(rows)) for j in range(len(rows)) if i != j and labels[i] == labels[j]]
    return torch.stack(terms).mean()


def triplets(rows, labels, margin=0.05):
    """The mean of those that violate the margin, whose number is known when all are computed."""
    far = torch.cdist(rows, rows)
    terms = torch.stack([F.relu(far[i, j] - far[i, k] + margin) for i in range(len(rows)) for j in range(len(rows)) for k in range(len(rows))
                         if i != j and labels[i] == labels[j] and labels[i] != labels[k]])
    return terms.sum() / (terms > 0).sum()


def ranking(queries, documents):
    return one_way(20 * F.normalize(queries, dim=1), F.normalize(documents, dim=1))


# ---- the settings: (formula, the loss of a rank, ranks, scale and bias) ----

def of_clip(**options):
    return clip, lambda rank, size: ClipLoss(rank=rank, world_size=size, **options), 2, (True, False)


def of_siglip(how, size=2):
    return siglip, lambda rank, _: SigLipLoss(rank=rank, world_size=size, dist_impl=how), size, (True, True)


def of_views(formula, loss):
    return formula, lambda *_: loss, 2, (False, False)


def of_labels(formula, loss, wrap=None, size=2):
    return formula, lambda *_: loss if wrap is None else DistributedLossWrapper(loss, **wrap), size, (False, False)


CLIP_ALONE = (clip, lambda *_: ClipLoss(), 2, (True, False))
SETTINGS = {
    "open_clip.ClipLoss()": of_clip(),
    "open_clip.ClipLoss(local_loss=True, gather_with_grad=True)": of_clip(local_loss=True, gather_with_grad=True),
    "open_clip.ClipLoss(gather_with_grad=True)": of_clip(gather_with_grad=True),
    "open_clip.ClipLoss(local_loss=True)": of_clip(local_loss=True),
    "open_clip.ClipLoss(world_size=1)": CLIP_ALONE,
    "open_clip.SigLipLoss(dist_impl='bidir')": of_siglip("bidir"),
    "open_clip.SigLipLoss(dist_impl='bidir'), 3 ranks": of_siglip("bidir", 3),
    "open_clip.SigLipLoss(dist_impl='shift'), 3 ranks": of_siglip("shift", 3),
    "open_clip.SigLipLoss(dist_impl='reduce')": of_siglip("reduce"),
    "open_clip.SigLipLoss(dist_impl='gather')": of_siglip("gather"),
    "open_clip.SigLipLoss(world_size=1)": (siglip, lambda *_: SigLipLoss(), 2, (True, True)),
    "lightly.NTXentLoss(gather_distributed=True)": of_views(nt_xent, NTXentLoss(gather_distributed=True)),
    "lightly.NTXentLoss()": of_views(nt_xent, NTXentLoss()),
    "lightly.DCLLoss(gather_distributed=True)": of_views(dcl, DCLLoss(gather_distributed=True)),
    "lightly.DCLLoss()": of_views(dcl, DCLLoss()),
    "lightly.VICRegLoss(gather_distributed=True)": of_views(vicreg, VICRegLoss(gather_distributed=True)),
    "lightly.VICRegLoss()": of_views(vicreg, VICRegLoss()),
    "lightly.BarlowTwinsLoss(gather_distributed=True)": of_views(barlow, BarlowTwinsLoss(gather_distributed=True)),
    "pytorch_metric_learning.NTXentLoss in DistributedLossWrapper": of_labels(labelled_nt_xent, metric.NTXentLoss(), {}),
    "pytorch_metric_learning.NTXentLoss in DistributedLossWrapper(efficient=True), 3 ranks": of_labels(
        labelled_nt_xent, metric.NTXentLoss(), {"efficient": True}, 3),
    "pytorch_metric_learning.NTXentLoss": of_labels(labelled_nt_xent, metric.NTXentLoss()),
    "pytorch_metric_learning.TripletMarginLoss in DistributedLossWrapper": of_labels(triplets, metric.TripletMarginLoss(), {}),
    "pytorch_metric_learning.TripletMarginLoss": of_labels(triplets, metric.TripletMarginLoss()),
}
SENTENCES = {
    "sentence_transformers.MultipleNegativesRankingLoss(gather_across_devices=True)": (
        sentences.MultipleNegativesRankingLoss, {"gather_across_devices": True}, 1),
    "sentence_transformers.MultipleNegativesRankingLoss()": (sentences.MultipleNegativesRankingLoss, {}, 1),
    "sentence_transformers.MultipleNegativesRankingLoss(gather_across_devices=True), accumulation 2": (
        sentences.MultipleNegativesRankingLoss, {"gather_across_devices": True}, 2),
    "sentence_transformers.CachedMultipleNegativesRankingLoss(gather_across_devices=True)": (
        sentences.CachedMultipleNegativesRankingLoss, {"gather_across_devices": True, "mini_batch_size": 2}, 1)}


WANTED = sys.argv[1:] or [*SETTINGS, *SENTENCES]


def stacked(batch):
    return [torch.stack(column) for column in zip(*batch)]


def features(model, sample):
    """Of one image and text; with a label where the loss has one."""
    return F.normalize(model.image(sample[0]), dim=-1), F.normalize(model.text(sample[1]), dim=-1)


def labelled(model, sample):
    return F.normalize(model.image(sample[0]), dim=-1), sample[2]


def of_sentences(model, sample):
    return tuple(model({"x": x})["sentence_embedding"] for x in sample)


def pair_of(sample):
    return sample[0], torch.cat([sample[1], sample[1][:1]])


def setting(rank, name):
    formula, loss_of, size, (scale, bias) = SETTINGS[name]
    loss, of_label = loss_of(rank, size), formula in (labelled_nt_xent, triplets)
    torch.manual_seed(1)
    model, mine = Towers(scale, bias), samples(rank)
    if of_label:
        del model.text

    def whole(model, of_samples):
        return formula(*stacked(of_samples), *(getattr(model, each) for each in ("logit_scale", "logit_bias") if hasattr(model, each)))

    def step(model):
        images, texts, labels = stacked(mine)
        if of_label:
            value = loss(F.normalize(model.image(images), dim=-1), labels)
        else:
            images, texts, *more = model(images, texts)
            value = loss(images, texts, *([more[0].exp(), *more[1:]] if more else []))
        value.backward()
        if not isinstance(model, DistributedDataParallel):
            for p in model.parameters():
                dist.all_reduce(p.grad)
                p.grad /= size
    if of_label:
        return judged(rank, model, [mine], step, [s for r in range(size) for s in samples(r)], labelled, whole)
    return judged(rank, DistributedDataParallel(model), [mine], step, [s for r in range(size) for s in samples(r)], features, whole)


def of_queries(rank, name):
    kind, options, accumulation = SENTENCES[name]
    torch.manual_seed(1)
    model = Sentences()
    loss = kind(model, **options)
    micros = [[pair_of(sample) for sample in samples(rank, seed)] for seed in range(accumulation)]
    everything = [pair_of(sample) for r in range(2) for seed in range(accumulation) for sample in samples(r, seed)]

    def step(model):
        for micro in micros:
            (loss([{"x": column} for column in stacked(micro)], None) / accumulation).backward()
        averaged(model)
    return judged(rank, model, micros, step, everything, of_sentences, lambda model, of_samples: ranking(*stacked(of_samples)))


def judged(rank, model, micro_batches, step, everything, features, loss):
    """As whole_batch.judged; truth: the formula over all samples, by a copy in fp64."""
    right = copy.deepcopy(getattr(model, "module", model)).double()
    loss(right, [features(right, tuple(x.double() if x.is_floating_point() else x for x in sample)) for sample in everything]).backward()
    truth = {name: p.grad for name, p in right.named_parameters()}
    with tempfile.TemporaryDirectory() as folder:
        with isograd.watch(model, None, micro_batches=micro_batches, folder=folder, features=features, loss=loss) as watched:
            step(model)
        from safetensors.torch import load_file
        reference = load_file(f"{folder}/one_process/gradients.safetensors") if rank == 0 else truth
    run = {name: p.grad for name, p in getattr(model, "module", model).named_parameters()}
    verdict = watched.verdict
    towers = [float((run[name].double() * g).sum() / g.square().sum()) for name, g in truth.items() if "logit" not in name]
    return {"passed": verdict.passed, "said": verdict.findings, "text": str(verdict), "run": apart(run, truth),
            "reference": apart(reference, truth), "json": [finding["id"] for finding in verdict.json["findings"]],
            "towers": [min(towers), max(towers)]}


def run(size):
    def of_rank(rank):
        found = {name: setting(rank, name) for name, (*_, ranks, _) in SETTINGS.items() if ranks == size and name in WANTED}
        return {**found, **({name: of_queries(rank, name) for name in SENTENCES if name in WANTED} if size == 2 else {})}
    return of_rank


if __name__ == "__main__":
    print(json.dumps({name: row for size in (2, 3) for name, row in on_ranks(size, run(size))[0].items()}))
