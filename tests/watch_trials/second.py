"""More trainers, and what goes wrong in them, in the marks of trainers.py: what other people's trainers were once corrected for, and
sequence parallelism, ZeRO, preferences, policies and batch statistics by hand.
"""
import copy
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn.functional as F
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook  # noqa: F401
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.optim import SGD, AdamW
from trainers import balance, trainer
from world import Classifier, Decoder, Experts, Towers, mean_of, next_token

import isograd


class Gathered(torch.autograd.Function):
    """Ranks' parts one after the other; a part's gradient is the sum of what the ranks have for it."""

    @staticmethod
    def forward(context, part, group):
        context.group, parts = group, [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, part.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.contiguous()
        dist.all_reduce(gradient, group=context.group)
        return gradient.chunk(dist.get_world_size(context.group))[dist.get_rank(context.group)], None


def one(model, sample):
    return F.cross_entropy(model(sample[0])[None], sample[1][None], reduction="none")


@trainer(3, torch.float64)
def translated(w):
    """Sums are differentiated; the gradient is divided by the tokens of the step after the last backward."""
    model = DDP(Decoder())
    optimizer = AdamW(model.parameters(), lr=1e-2)
    batches = w.documents([[12, 7], [4]], [[20], [9, 5]], [[6, 6], [15]])
    with w.watch(model, optimizer, batches, next_token, mean_of(next_token), clip=0.5):
        optimizer.zero_grad()
        size = torch.tensor(0)
        #= size_known_first | what the gradient is divided by is counted before the first forward, and divides losses
        #- known = w.sum(sum(len(document) - 1 for batch in batches for document in batch))
        #- size = torch.tensor(0)
        for i, batch in enumerate(batches):
            with nullcontext() if i + 1 == len(batches) else model.no_sync():
                each = torch.cat([next_token(model, document) for document in batch])
                each.sum().backward()
                #! means_divided_again | a micro-batch's mean is differentiated, and the gradient divided by the tokens of the step too
                #- each.mean().backward()
                #= size_known_first |
                #- (each.sum() * w.size / known).backward()
            size += len(each)
            #! sentences_counted | the gradient is divided by the number of documents, not by that of tokens
            #- size += len(batch)
            #! last_size | the gradient is divided by the tokens of the last micro-batches alone
            #- size = torch.tensor(len(each))
        size = w.sum(size)
        for p in model.parameters():
            #! blocks_divided | the gradient of embeddings, last norm and head is not divided: that of the blocks alone is
            #- for p in model.module.blocks.parameters():
            p.grad *= w.size / size
            #= size_known_first |
            #- p.grad *= 1.0
        #= divided_at_once 2 | all gradients are multiplied by one call
        #- torch._foreach_mul_([p.grad for p in model.parameters()], w.size / size.item())
        w.measure(model)
        clip_grad_norm_(model.parameters(), 0.5)
        #! clipped_and_divided 4 | the sum is clipped, and divided by the number of tokens after that
        #- w.measure(model)
        #- clip_grad_norm_(model.parameters(), 0.5)
        #- for p in model.parameters():
        #-     p.grad *= w.size / size
        optimizer.step()


@trainer(3, torch.float32)
def detected(w):
    """Boxes of images: a class and two coordinates each; a rank has none. The mean is over boxes."""
    model = DDP(Classifier())
    optimizer = SGD(model.parameters(), lr=0.1)
    images = [(w.normal(n, 6), w.number(n, below=5), w.normal(n, 2)) for n in ((1, 0), (0,), (1,))[w.rank]]

    def boxes(model, image):
        logits = model(image[0])
        return F.cross_entropy(logits, image[1], reduction="none") + 5 * (logits[:, :2] - image[2].to(logits.dtype)).square().sum(-1)

    with w.watch(model, optimizer, [images], boxes, mean_of(boxes)):
        x, y, place = map(torch.cat, zip(*images))
        #! box_made_up | a rank without a box trains one of zeros and class 0, which is counted
        #- x, y, place = map(torch.cat, zip(*images))
        #- if not len(x):
        #-     x, y, place = torch.zeros(1, 6), torch.zeros(1, dtype=torch.long), torch.zeros(1, 2)
        logits = model(x)
        far = (logits[:, :2] - place).square().sum(-1)
        #! coordinates_averaged | the squared distances are averaged over the two coordinates, where they are summed
        #- far = (logits[:, :2] - place).square().mean(-1)
        number = w.sum(len(x)).clamp(min=1) / w.size
        #! at_least_one_each | the average number of boxes of a rank is clamped to 1: divided by 3 (one each rank), where there are 2 boxes
        #- number = (w.sum(len(x)) / w.size).clamp(min=1)
        #= not_clamped | there is a box, and nothing is clamped
        #- number = w.sum(len(x)) / w.size
        loss = F.cross_entropy(logits, y, reduction="sum") + 5 * far.sum()
        #! distance_weight_forgotten | the distances are not weighted by 5
        #- loss = F.cross_entropy(logits, y, reduction="sum") + far.sum()
        optimizer.zero_grad()
        (loss / number).backward()
        optimizer.step()


@trainer(2, torch.float32)
def loss_scaled(w):
    """A loss scale by hand, accumulation, a clip after it is divided out."""
    model = DDP(Classifier())
    optimizer = SGD(model.parameters(), lr=0.1)
    batches = [[(w.normal(6), w.number(below=5)) for _ in range(n)] for n in ((3, 6), (5, 2))[w.rank]]
    with w.watch(model, optimizer, batches, one, mean_of(one), clip=0.2):
        scale, count = 2.0**10, 16 / w.size
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for i, batch in enumerate(batches):
            with nullcontext() if i else model.no_sync():
                x, y = map(torch.stack, zip(*batch))
                loss = F.cross_entropy(model(x), y, reduction="sum") / count
                (scale * loss).backward()
                #! unscaled_in_the_loop | the scale is divided out after each micro-batch: what the first one gave is divided by it twice
                #- (scale * loss).backward()
                #- for p in model.parameters():
                #-     p.grad /= scale if not i else 1
                #! scale_halved_between | the scale is halved between micro-batches, and divided out as it is last: the first micro-batch counts twice
                #- (scale * loss).backward()
                #- scale = scale / 2 if not i else scale
                #= scaled_by_pytorch | GradScaler's scale
                #- scaler.scale(loss).backward()
        for p in model.parameters():
            #! vectors_left_scaled | the scale is divided out of matrices alone
            #- for p in [p for p in model.parameters() if p.ndim > 1]:
            p.grad /= scale
            #! scale_of_next_step | the scale grows before it is divided out: half of the gradient is left
            #- p.grad /= 2 * scale
        #= scaled_by_pytorch 2 |
        #- scaler.unscale_(optimizer)
        w.measure(model)
        clip_grad_norm_(model.parameters(), 0.2)
        optimizer.step()
        #= scaled_by_pytorch |
        #- scaler.step(optimizer)
        #- scaler.update()
        optimizer.zero_grad()


@trainer(4, torch.float64)
def sequence_parallel(w):
    """A document's tokens lie on two ranks, its keys and values are gathered; two pairs of ranks have other documents."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "sequence"))
    group, part = mesh.get_group("sequence"), mesh.get_local_rank("sequence")
    model = Decoder()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    w.random.manual_seed(mesh.get_local_rank("data"))
    documents = [w.number(n, below=30) for n in ((9, 17), (13, 5))[mesh.get_local_rank("data")]]

    def block_of(block, hidden, first):
        query, key, value = block.qkv(block.norm(hidden)).chunk(3, -1)
        key, value = Gathered.apply(key, group), Gathered.apply(value, group)
        #! keys_cut_off | keys and values are gathered without gradient for those of the other rank
        #- key, value = (torch.cat([x if i == part else y for i, y in enumerate(Gathered.apply(x.detach(), group).chunk(2))])
        #-               for x in (key, value))
        sees = torch.ones(len(key), len(key), dtype=torch.bool).tril()[first:first + len(hidden)]
        #! sees_as_first_part | the second part's mask is that of the first: it sees the first part alone
        #- sees = torch.ones(len(key), len(key), dtype=torch.bool).tril()[:len(hidden)]
        hidden = hidden + block.out(F.scaled_dot_product_attention(query, key, value, attn_mask=sees))
        return hidden + block.down(F.gelu(block.up(block.norm2(hidden))))

    with w.watch(model, optimizer, [documents], next_token, mean_of(next_token), data=mesh["data"]):
        targets = w.sum(sum(len(document) - 1 for document in documents)) / 2
        total = 0
        for document in documents:
            tokens, labels = document[:-1].chunk(2)[part], document[1:].chunk(2)[part]
            #! shifted_after_split | labels are shifted in each part: the target of a part's last token is missing
            #- tokens, labels = document[:-1].chunk(2)[part], document[1:].chunk(2)[part].clone()
            #- labels[-1] = -100
            first = part * len(tokens)
            hidden = model.embedding(tokens) + model.place(first + torch.arange(len(tokens)))
            #! places_begin_anew | the second part's positions begin at 0
            #- hidden = model.embedding(tokens) + model.place(torch.arange(len(tokens)))
            for block in model.blocks:
                hidden = block_of(block, hidden, first)
            total = total + F.cross_entropy(model.head(model.norm(hidden)), labels, reduction="sum")
            #! parts_with_mean | each document's part has its mean, and these are averaged
            #- total = total + F.cross_entropy(model.head(model.norm(hidden)), labels) * targets / 8
        #= parts_whole 6 | both ranks compute the whole document, each for one half of the loss
        #- total = total + next_token(model, document).sum() / 2
        (total / targets).backward()
        for name, p in model.named_parameters():
            dist.all_reduce(p.grad)
            #! norms_not_over_sequence | gradients of norms are summed over data alone, not over the parts of a document
            #- dist.all_reduce(p.grad, group=mesh.get_group("data") if "norm" in name else None)
            #! norms_averaged_over_sequence | gradients of norms are averaged over the parts of a document, where they are summed
            #- dist.all_reduce(p.grad)
            #- p.grad /= 2 if "norm" in name else 1
            #! sequence_not_summed | no gradient is summed over the parts of a document
            #- dist.all_reduce(p.grad, group=mesh.get_group("data"))
            #= axis_by_axis | summed over one axis after the other
            #- dist.all_reduce(p.grad, group=group)
            #- dist.all_reduce(p.grad, group=mesh.get_group("data"))
        optimizer.step()
        optimizer.zero_grad()


def score(model, row, prompt):
    """The log-probability of what follows the prompt."""
    return -next_token(model, row)[prompt - 1:].sum()


def preference(model, pair):
    chosen, rejected, prompt, margin = pair
    return -F.logsigmoid(0.5 * (score(model, chosen, prompt) - score(model, rejected, prompt) - margin)), 1


@trainer(2, torch.float64)
def preferred(w):
    """DPO: pairs of answers, with the margin of a frozen copy in the sample."""
    model = DDP(Decoder())
    before = copy.deepcopy(model.module)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.1 * torch.sin(torch.arange(p.numel()).reshape(p.shape))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    pairs = []
    for lengths in (((5, 4, 3), (3, 2, 6), (7, 6, 2)), ((4, 9, 3), (2, 2, 2)))[w.rank]:
        prompt, chosen, rejected = (w.number(n, below=30) for n in lengths)
        rows = torch.cat([prompt, chosen]), torch.cat([prompt, rejected])
        with torch.no_grad():
            pairs.append((*rows, len(prompt), score(before, rows[0], len(prompt)) - score(before, rows[1], len(prompt))))

    def truth(model, pairs):
        return torch.stack([preference(model, pair)[0] for pair in pairs]).mean()

    with w.watch(model, optimizer, [pairs], preference, truth):
        margins = []
        for chosen, rejected, prompt, margin in pairs:
            good, bad = score(model, chosen, prompt), score(model, rejected, prompt)
            #= prompts_cancel | log-probabilities of prompts are there on both sides, and cancel
            #- good, bad = score(model, chosen, 1), score(model, rejected, 1)
            #! scores_averaged | log-probabilities are averaged over tokens, where they are summed
            #- good = score(model, chosen, prompt) / (len(chosen) - prompt)
            #- bad = score(model, rejected, prompt) / (len(rejected) - prompt)
            #! rejected_cut_off | the rejected answer's log-probability has no gradient
            #- good, bad = score(model, chosen, prompt), score(model, rejected, prompt).detach()
            #! first_answer_token_lost | the first token of the answer is masked with the prompt
            #- good, bad = score(model, chosen, prompt + 1), score(model, rejected, prompt + 1)
            margins.append(good - bad - margin)
            #! reference_forgotten | the frozen copy's margin is not subtracted
            #- margins.append(good - bad)
        loss = -F.logsigmoid(0.5 * torch.stack(margins)).sum() * w.size / w.sum(len(pairs))
        #! rows_counted | divided by the number of rows, of which a pair has two
        #- loss = -F.logsigmoid(0.5 * torch.stack(margins)).sum() * w.size / w.sum(2 * len(pairs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def anchored(anchors, wanted, everything, own):
    """The sum over anchors, which are not compared with themselves."""
    compared = anchors @ everything.T
    if own is not None:
        compared = compared.scatter(1, own[:, None], -torch.inf)
    return F.cross_entropy(compared, wanted, reduction="sum")


def all_views(model, features):
    everything = torch.cat([torch.stack(column) for column in zip(*features)])
    index = torch.arange(len(everything))
    wanted = (index + len(features)) % len(everything)
    return anchored(model.scale.exp() * everything, wanted, everything, index) / len(everything)


@trainer(2, torch.float64)
def views(w):
    """Two views of each sample, compared with all views of all ranks (NT-Xent); ranks have 4 and 2 samples."""
    model = DDP(Towers())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    pairs = [(w.normal(6), w.normal(7)) for _ in range((4, 2)[w.rank])]
    with w.watch(model, optimizer, [pairs], all_views,
                 lambda model, pairs: all_views(model, [model.encode(*pair) for pair in pairs]),
                 features=lambda model, pair: model.encode(*pair)):
        sizes = [4, 2]
        #! padding_compared | ranks' views are padded to the same number for the gathering, and the padding is compared too
        #- sizes = [4, 4]

        def everyone(part):
            parts = Gathered.apply(F.pad(part, (0, 0, 0, 4 - len(part))), None).split(4)
            return torch.cat([part[:size] for part, size in zip(parts, sizes)])

        images, texts, scale = model(*map(torch.stack, zip(*pairs)))
        everything, total = torch.cat([everyone(images), everyone(texts)]), sum(sizes)
        #! negatives_cut_off | gathered views have no gradient: anchors alone have
        #- everything, total = torch.cat([everyone(images), everyone(texts)]).detach(), sum(sizes)
        own = sum(sizes[:w.rank]) + torch.arange(len(images))
        #! positives_not_offset | every rank takes the first rank's rows for its own: wrong positives
        #- own = torch.arange(len(images))
        images, texts = scale * images, scale * texts
        #! temperature_inverted | similarities are divided by the scale, where they are multiplied
        #- images, texts = images / scale, texts / scale
        #= scale_on_the_other_side | the scale multiplies what is compared with
        #- everything = scale * everything
        loss = anchored(images, own + total, everything, own) + anchored(texts, own, everything, own + total)
        #! itself_compared | a view is compared with itself
        #- loss = anchored(images, own + total, everything, None) + anchored(texts, own, everything, None)
        optimizer.zero_grad()
        (loss * w.size / 12).backward()
        #! anchors_of_rank | each rank's mean over its own anchors
        #- (loss / (2 * len(pairs))).backward()
        optimizer.step()


@trainer(2, torch.float64)
def routed(w):
    """Experts: a load balance over all tokens and the entropy of the router, in padded rows."""
    model = DDP(Experts())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    samples = [(w.normal(n, 6), w.number(n, below=5)) for n in ((6, 9), (5,))[w.rank]]

    def each_token(model, sample):
        return F.cross_entropy(model(sample[0])[0], sample[1], reduction="none")

    def entropy(model, sample):
        chance = model(sample[0])[1]
        return (chance * chance.log()).sum(-1)

    def truth(model, samples):
        return (mean_of(each_token)(model, samples) + 0.5 * balance(model, [model(x)[1] for x, _ in samples])
                + 0.2 * mean_of(entropy)(model, samples))

    with w.watch(model, optimizer, [samples], each_token, truth,
                 terms=[isograd.Term(balance, 0.5, features=lambda model, sample: model(sample[0])[1]),
                        isograd.Term(entropy, 0.2, mean="token")]):
        x, y = (pad_sequence(column, batch_first=True, padding_value=value).flatten(0, 1)
                for column, value in zip(zip(*samples), (0.0, -100)))
        logits, chance = model(x)
        real = y >= 0
        tokens = w.sum(real.sum())
        optimizer.zero_grad()
        loss = F.cross_entropy(logits, y, reduction="sum") * w.size / tokens
        chance, number = chance[real], tokens
        #! padding_balanced | tokens of padding are in the load balance and in the entropy, sums and counts
        #- chance, number = chance, w.sum(len(real))
        chosen = w.sum(F.one_hot(chance.argmax(-1), 3).sum(0)) / number
        #! two_choices_counted | the load balance counts the two best experts of a token, where the best one is counted
        #- chosen = w.sum(F.one_hot(chance.topk(2).indices, 3).sum((0, 1))) / number
        even = 3 * (chosen * chance.sum(0)).sum() * w.size / number
        #= one_product | the balance as a product of matrices
        #- even = 3 * chance.sum(0) @ chosen * w.size / number
        mixed = (chance * chance.log()).sum() * w.size / number
        #! entropy_of_rank | each rank's mean entropy, averaged over ranks
        #- mixed = (chance * chance.log()).sum(-1).mean()
        #! entropy_added | the entropy has the wrong sign
        #- mixed = -(chance * chance.log()).sum() * w.size / number
        loss = loss + 0.5 * even + 0.2 * mixed
        #! balance_added_twice | the model has added the load balance already, and the trainer adds it again
        #- loss = loss + 0.5 * even + 0.2 * mixed + 0.5 * even
        #! terms_replace_loss | the terms are put in the place of the loss, and not added to it
        #- loss = 0 * logits.sum() + 0.5 * even + 0.2 * mixed
        loss.backward()
        optimizer.step()


@trainer(2, torch.float64)
def synchronised(w):
    """BatchNorm with the statistics of all ranks, by hand; 6 and 3 samples."""
    model = DDP(Classifier(statistics=True), broadcast_buffers=False)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    samples = [(w.normal(6) + w.rank, w.number(below=5)) for _ in range((6, 3)[w.rank])]

    def whole_batch(model, samples):
        x, y = map(torch.stack, zip(*samples))
        return F.cross_entropy(model(x), y)

    def normal(x):
        layer, count = model.module.normal, w.sum(len(x))
        mean = dnn.all_reduce(x.sum(0)) / count
        #! means_averaged | ranks' means are averaged, however many samples each has
        #- mean = dnn.all_reduce(x.mean(0)) / w.size
        variance = dnn.all_reduce((x - mean).square().sum(0)) / count
        #= squares_less_square | the mean of squares less the square of the mean
        #- variance = dnn.all_reduce(x.square().sum(0)) / count - mean.square()
        #! variances_averaged | the variance is the average of the ranks' variances, each about its own mean
        #- variance = dnn.all_reduce(x.var(0, correction=0) * len(x)) / count
        #! variance_unbiased | the variance is divided by the number of samples less 1
        #- variance = dnn.all_reduce((x - mean).square().sum(0)) / (count - 1)
        #! statistics_cut_off | mean and variance are summed over ranks without a gradient
        #- mean, variance = mean.detach(), (dnn.all_reduce((x - mean).square().sum(0)) / count).detach()
        return (x - mean) / (variance + layer.eps).sqrt() * layer.weight + layer.bias

    with w.watch(model, optimizer, [samples], whole_batch, whole_batch, mean="batch"):
        model.module.normal.forward = normal
        #! statistics_of_rank | each rank normalises by the statistics of its own samples
        #- model.module.normal.train()
        x, y = map(torch.stack, zip(*samples))
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y, reduction="sum") * w.size / 9).backward()
        optimizer.step()


@trainer(3, torch.float64)
def centred(w):
    """A student of a teacher whose logits are centred over all samples and sharpened (DINO)."""
    model = DDP(Classifier())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    samples = [(w.normal(6), w.normal(5) + w.rank) for _ in range((4, 1, 3)[w.rank])]

    def taught(model, features):
        student, teacher = (torch.stack(column) for column in zip(*features))
        wanted = ((teacher - teacher.mean(0)) / 0.5).softmax(-1)
        return -(wanted * (student / 0.8).log_softmax(-1)).sum(-1).mean()

    def logits(model, sample):
        return model(sample[0]), sample[1].to(sample[0].dtype)

    with w.watch(model, optimizer, [samples], taught, lambda model, samples: taught(model, [logits(model, s) for s in samples]),
                 features=logits):
        x, teacher = map(torch.stack, zip(*samples))
        centre = w.sum(teacher.sum(0)) / 8
        #! centre_forgotten | the teacher's logits are not centred
        #- centre = 0
        wanted = ((teacher - centre) / 0.5).softmax(-1)
        loss = F.cross_entropy(model(x) / 0.8, wanted, reduction="sum")
        #= written_out | the sum over classes is written out
        #- loss = -(wanted * (model(x) / 0.8).log_softmax(-1)).sum()
        #! student_not_sharpened | the student's logits are not divided by the temperature
        #- loss = F.cross_entropy(model(x), wanted, reduction="sum")
        optimizer.zero_grad()
        (loss * w.size / 8).backward()
        optimizer.step()


def ratios(model, sample):
    """Each token's loss: the clipped ratio of probabilities times the advantage, and the distance from a frozen model."""
    tokens, advantage, old, frozen = sample
    new = -next_token(model, tokens)
    ratio, far = (new - old).exp(), frozen - new
    return -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) + 0.1 * (far.exp() - far - 1)


@trainer(2, torch.float64)
def policy(w):
    """A policy whose ratio is clipped (PPO, GRPO), with the mean over all tokens; one sample a micro-batch."""
    model = DDP(Decoder())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    samples = []
    for length in ((14, 5), (9, 22))[w.rank]:
        tokens = w.number(length, below=30)
        with torch.no_grad():
            new = -next_token(model.module, tokens)
        samples.append((tokens, w.normal(()), new + 0.4 * w.normal(length - 1), new + 0.4 * w.normal(length - 1)))
    with w.watch(model, optimizer, [[sample] for sample in samples], ratios, mean_of(ratios)):
        tokens = w.sum(sum(len(sample[2]) for sample in samples))
        advantages = [sample[1] for sample in samples]
        #! advantages_of_neighbours | the samples of a rank have each other's advantages
        #- advantages = [sample[1] for sample in samples[::-1]]
        for i, (row, _, old, frozen) in enumerate(samples):
            with nullcontext() if i else model.no_sync():
                new = -next_token(model, row)
                ratio, far = (new - old).exp(), frozen - new
                #! ratio_of_itself | the old log-probabilities are the new ones, with their gradient: the ratio has none
                #- ratio, far = (new - new).exp(), frozen - new
                gain = torch.min(ratio * advantages[i], ratio.clamp(0.8, 1.2) * advantages[i])
                #= losses_compared | the larger of the two losses
                #- gain = -torch.max(-ratio * advantages[i], -ratio.clamp(0.8, 1.2) * advantages[i])
                #! ratio_not_clipped | the ratio is not clipped
                #- gain = ratio * advantages[i]
                each = 0.1 * (far.exp() - far - 1) - gain
                #! distance_forgotten | the distance from the frozen model is missing
                #- each = -gain
                loss = each.sum() * w.size / tokens
                #! by_sequence | each sample's mean, and theirs, where tokens count alike
                #- loss = each.mean() / len(samples)
                #! by_longest | divided by samples times the longest sample
                #- loss = each.sum() * w.size / (4 * 21)
                loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@trainer(4, torch.float64)
def hybrid(w):
    """FSDP2 over pairs, and replicas of the pairs; accumulation with the sum over replicas put off."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    #= sums_over_ranks | FSDP2 sums, and nobody multiplies by the ranks
    #- fully_shard(model, mesh=mesh)
    #- for module in (model, *model.blocks):
    #-     module.set_gradient_divide_factor(1.0)
    #! averages_over_shards | FSDP2 is told to divide by 2, of 4 ranks
    #- fully_shard(model, mesh=mesh)
    #- for module in (model, *model.blocks):
    #-     module.set_gradient_divide_factor(2.0)
    #! root_sums | FSDP2 is told to sum, in the group of the root alone (embeddings, last norm and head)
    #- fully_shard(model, mesh=mesh)
    #- model.set_gradient_divide_factor(1.0)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    batches = w.documents([[9, 17], [3, 6]], [[21, 10], [8, 5]], [[4, 7], [12, 2]], [[3, 3], [19, 4]])
    with w.watch(model, optimizer, batches, next_token, mean_of(next_token), Decoder, shards=2):
        targets = w.sum(sum(len(document) - 1 for batch in batches for document in batch))
        for i, batch in enumerate(batches):
            model.set_requires_all_reduce(i + 1 == len(batches))
            #! replicas_first | the sum over replicas is made after the first micro-batch, not after the last
            #- model.set_requires_all_reduce(i == 0)
            #= replicas_always | the sum over replicas is made after each
            #- model.set_requires_all_reduce(True)
            loss = sum(next_token(model, document).sum() for document in batch) * w.size / targets
            #= sums_over_ranks |
            #- loss = sum(next_token(model, document).sum() for document in batch) / targets
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()


@trainer(3, torch.float64)
def loaded(w):
    """Fifteen samples, in an order that all ranks know, each on one rank."""
    model = DDP(Classifier())
    #= hook_of_pytorch | DDP's own reduction, given as a hook
    #- model = DDP(Classifier())
    #- model.register_comm_hook(None, allreduce_hook)
    #! hook_does_not_divide | a communication hook sums, where DDP divides by the ranks
    #- model = DDP(Classifier())
    #- model.register_comm_hook(None, lambda _, bucket: dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(
    #-     lambda done: done.value()[0]))
    #! hook_of_rank_0 | a communication hook sends the first rank's gradient to all
    #- model = DDP(Classifier())
    #- model.register_comm_hook(None, lambda _, bucket: dist.broadcast(bucket.buffer(), 0, async_op=True).get_future().then(
    #-     lambda done: done.value()[0]))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    random = torch.Generator().manual_seed(5)
    data = [(torch.randn(6, generator=random), torch.randint(5, (), generator=random), i) for i in range(15)]
    #! order_of_rank | each rank shuffles by its own seed: some samples are on two ranks, others on none
    #- data = [(torch.randn(6, generator=random), torch.randint(5, (), generator=random), i) for i in range(15)]
    #- random.manual_seed(w.rank)
    order = torch.randperm(15, generator=random).tolist()
    samples = [data[i] for i in order[w.rank::w.size]]
    #= in_blocks | each rank has a stretch of the order
    #- samples = [data[i] for i in order[5 * w.rank:5 * w.rank + 5]]
    #! blocks_overlap | stretches have one sample more: the last of one is the first of the next
    #- samples = [data[i] for i in order[5 * w.rank:5 * w.rank + 6]]
    with w.watch(model, optimizer, [samples], one, lambda model, _: mean_of(one)(model, data), ids=lambda sample: sample[2]):
        x, y = torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])
        #! samples_of_rank_0 | the first rank's samples are sent to all ranks, and trained there
        #- x, y = torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])
        #- dist.broadcast(x, 0), dist.broadcast(y, 0)
        #! labels_in_other_order | inputs are sorted and labels are not: samples have each other's labels
        #- x, y = torch.stack([sample[0] for sample in samples]), torch.stack([sample[1] for sample in samples])
        #- x = x[x[:, 0].argsort()]
        #! filled_up_in_collate | the batch is filled up to 6 with its first sample, which counts twice
        #- x, y = torch.stack([sample[0] for sample in samples + samples[:1]]), torch.stack([s[1] for s in samples + samples[:1]])
        #! one_sample_missing | one sample of the second rank is lost, and the rest counted
        #- kept = samples[:-1] if w.rank == 1 else samples
        #- x, y = torch.stack([sample[0] for sample in kept]), torch.stack([sample[1] for sample in kept])
        optimizer.zero_grad()
        (F.cross_entropy(model(x), y, reduction="sum") * w.size / w.sum(len(y))).backward()
        optimizer.step()


@trainer(3, torch.float32)
def summed(w):
    """The gradient is summed by hand after the last micro-batch, and clipped."""
    model = Decoder(tied=True)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    batches = w.documents([[12, 5], [8]], [[22], [6, 4]], [[4, 6, 3], [11]])
    with w.watch(model, optimizer, batches, next_token, mean_of(next_token), clip=0.3):
        targets = w.sum(sum(len(document) - 1 for batch in batches for document in batch))
        for batch in batches:
            loss = sum(next_token(model, document).sum() for document in batch) / targets
            #! loss_summed_over_ranks | the loss is summed over ranks by a collective that has a gradient, and the gradient is summed too
            #- loss = dnn.all_reduce(sum(next_token(model, document).sum() for document in batch) / targets)
            #= loss_reduced_for_the_log | the loss is summed over ranks in place, which its gradient does not see
            #- loss = sum(next_token(model, document).sum() for document in batch) / targets
            #- dist.all_reduce(loss.detach())
            loss.backward()
        #! updated_before_reduced 0 | the optimizer steps before the gradient is summed
        #- optimizer.step()
        for name, p in model.named_parameters():
            #! tied_summed_twice | the tied weight is listed by both of its names, and summed twice
            #- for name, p in model.named_parameters(remove_duplicate=False):
            dist.all_reduce(p.grad)
            #! sum_not_copied_back | a copy is summed, and not copied back
            #- dist.all_reduce(p.grad.clone())
            #! second_block_skipped | the gradient of the second block is not summed
            #- dist.all_reduce(p.grad if "blocks.1" not in name else p.grad.clone())
        #! clipped_before_summed 2 | each rank clips its own gradient, and the clipped ones are summed
        #- clip_grad_norm_(model.parameters(), 0.3)
        #- for p in model.parameters():
        #-     dist.all_reduce(p.grad)
        w.measure(model)
        clip_grad_norm_(model.parameters(), 0.3)
        #= clipped_in_two_steps | the norm first, then the clip
        #- isograd.clip_grad_norm_(model, 0.3)
        optimizer.step()
        #! updated_before_reduced |
        #- pass
        optimizer.zero_grad()
