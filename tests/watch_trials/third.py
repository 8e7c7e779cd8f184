"""A third set of trainers, and what goes wrong in them, in the marks of trainers.py. The mistakes are of the kinds that trackers of public
trainers report; in brackets is a report of the mistake, or of one like it.
"""
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn.functional as F
from second import Gathered
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from torch.optim import SGD, AdamW
from trainers import trainer
from world import IGNORED, VOCABULARY, WIDTH, Block, Classifier, Decoder, Towers, mean_of, next_token

import isograd


def filled(rows, value=0):
    return pad_sequence(list(rows), batch_first=True, padding_value=value)


class Copied(torch.autograd.Function):
    """What a group's ranks compute the same of; its gradient is the sum of theirs."""

    @staticmethod
    def forward(context, x, group):
        context.group = group
        return x.clone()

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient, group=context.group)
        return gradient, None


class Reduced(torch.autograd.Function):
    """The sum of a group's parts, which each of its ranks goes on with; a part's gradient is that of the sum."""

    @staticmethod
    def forward(context, part, group):
        total = part.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(context, gradient):
        return gradient, None


def prompted(w, length, prompt):
    tokens = w.number(length, below=VOCABULARY)
    return tokens, tokens.masked_fill(torch.arange(length) < prompt, IGNORED)


def labelled(model, sample):
    tokens, labels = sample
    return F.cross_entropy(model(tokens)[:-1], labels[1:], reduction="none")[labels[1:] != IGNORED]


@trainer(2, torch.float64)
def items(w):
    """Three micro-batches; a sum over labels, divided by `num_items_in_batch` of all ranks, as transformers' Trainer does."""
    model = DDP(Decoder())
    optimizer = AdamW(model.parameters(), lr=1e-2)
    lengths = ([(12, 3), (9, 6)], [(20, 11)], [(7, 1)]), ([(15, 9)], [(6, 2), (18, 4)], [(11, 5)])
    batches = [[prompted(w, *row) for row in batch] for batch in lengths[w.rank]]
    with w.watch(model, optimizer, batches, labelled, mean_of(labelled)):
        optimizer.zero_grad()
        number = w.sum(sum((labels[1:] != IGNORED).sum() for batch in batches for _, labels in batch))
        #! items_of_rank | num_items_in_batch is not summed over ranks: each divides by its own, and DDP averages (transformers#34373)
        #- number = sum((labels[1:] != IGNORED).sum() for batch in batches for _, labels in batch) * w.size
        #! items_of_other_window | the number is that of the first two of three micro-batches (trl#6024)
        #- number = w.sum(sum((labels[1:] != IGNORED).sum() for batch in batches[:2] for _, labels in batch))
        for i, batch in enumerate(batches):
            with nullcontext() if i + 1 == len(batches) else model.no_sync():
                tokens, labels = (filled(column, value) for column, value in zip(zip(*batch), (0, IGNORED)))
                logits, labels = model(tokens)[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
                loss = F.cross_entropy(logits, labels, reduction="sum") * w.size / number
                #! mean_of_micro_batches | each micro-batch's own mean, divided by three (transformers#34191, prime-rl#583)
                #- loss = F.cross_entropy(logits, labels) / len(batches)
                #! micro_batches_added | each micro-batch's own mean, and nobody divides by three (nanoGPT#168, guided-diffusion#111)
                #- loss = F.cross_entropy(logits, labels)
                #! ranks_for_local_mean | a local mean is multiplied by the ranks, as if it were divided by a global count (Automodel#3846)
                #- loss = F.cross_entropy(logits, labels) * w.size / len(batches)
                #= mean_times_labels | the mean, times the labels that it is one of
                #- loss = F.cross_entropy(logits, labels) * (labels != IGNORED).sum() * w.size / number
                loss.backward()
        optimizer.step()


class Captioner(torch.nn.Module):
    """Images [..., 2, 6] and tokens [..., T] -> logits [..., 2 + T, VOCABULARY]."""

    def __init__(self):
        super().__init__()
        self.eye, self.decoder = torch.nn.Linear(6, WIDTH), Decoder()

    def forward(self, images, tokens):
        decoder = self.decoder
        hidden = torch.cat([torch.tanh(self.eye(images)), decoder.embedding(tokens)], -2)
        length = hidden.shape[-2]
        hidden = hidden + decoder.place(torch.arange(length))
        for block in decoder.blocks:
            hidden = block(hidden, torch.ones(length, length, dtype=torch.bool).tril())
        return decoder.head(decoder.norm(hidden))


def caption(model, sample):
    return F.cross_entropy(model(*sample)[1:-1], sample[1], reduction="none")


@trainer(3, torch.float64)
def captioned(w):
    """Two image tokens before a caption; the last one of them predicts the caption's first token."""
    model = DDP(Captioner(), find_unused_parameters=True)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    samples = [(w.normal(2, 6), w.number(length, below=VOCABULARY)) for length in ((9, 4), (12,), (5, 7, 3))[w.rank]]
    with w.watch(model, optimizer, [samples], caption, mean_of(caption)):
        optimizer.zero_grad()
        #! images_without_gradient 0 | the projection of images stands under no_grad, as the frozen part before it does
        #- model.module.eye.forward = torch.no_grad()(model.module.eye.forward)
        images, tokens = torch.stack([image for image, _ in samples]), filled([tokens for _, tokens in samples])
        labels = filled([tokens for _, tokens in samples], IGNORED)
        logits = model(images, tokens)[:, 1:-1]
        targets = w.sum((labels != IGNORED).sum())
        #! image_tokens_counted | divided by the image tokens too, which have no label
        #- targets = w.sum((labels != IGNORED).sum() + 2 * len(samples))
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") * w.size / targets
        #! shifted_twice | shifted logits are shifted once more in the loss: a token predicts the one after the next (transformers#47394)
        #- loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum") * w.size / targets
        #! shifted_over_rows | rows are made one, then shifted: a row's last token predicts the next row's first one (transformers#47394)
        #- flat = model(images, tokens)[:, 2:].flatten(0, 1)
        #- loss = F.cross_entropy(flat[:-1], labels.flatten()[1:], reduction="sum") * w.size / targets
        #= captions_apart | caption by caption
        #- loss = sum(caption(model.module, sample).sum() for sample in samples) * w.size / targets + 0 * logits.sum()
        loss.backward()
        optimizer.step()


class Listener(torch.nn.Module):
    """Frames [..., S, 6], which of them are no padding, tokens [..., T] -> logits [..., T, VOCABULARY]."""

    def __init__(self):
        super().__init__()
        self.ear, self.inner, self.decoder = torch.nn.Linear(6, WIDTH), Block(), Decoder()
        self.query, self.key_value = torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, frames, heard, tokens):
        sees = heard[..., None, :]
        key, value = self.key_value(self.inner(self.ear(frames), sees)).chunk(2, -1)
        hidden = self.decoder.features(tokens)
        hidden = hidden + F.scaled_dot_product_attention(self.query(hidden), key, value, attn_mask=sees)
        return self.decoder.head(hidden)


def smoothed(logits, labels):
    """fairseq's: 0.9 of a label's loss, and 0.1 of the mean over the vocabulary."""
    logs = logits.log_softmax(-1)
    return -0.9 * logs.gather(-1, labels[..., None])[..., 0] - 0.1 * logs.mean(-1)


def transcript(model, sample):
    frames, tokens = sample
    return smoothed(model(frames, torch.ones(len(frames), dtype=torch.bool), F.pad(tokens[:-1], (1, 0))), tokens)


@trainer(2, torch.float64)
def recognised(w):
    """Speech to text with an encoder and a decoder; padded frames and tokens, label smoothing, two micro-batches, a clip."""
    model = DDP(Listener())
    optimizer = AdamW(model.parameters(), lr=1e-2)
    lengths = ([(7, 5), (4, 9)], [(3, 2)]), ([(9, 6)], [(5, 3), (8, 12)])
    batches = [[(w.normal(frames, 6), w.number(tokens, below=VOCABULARY)) for frames, tokens in batch] for batch in lengths[w.rank]]
    with w.watch(model, optimizer, batches, transcript, mean_of(transcript), clip=0.4):
        optimizer.zero_grad()
        number = w.sum(sum(len(tokens) for batch in batches for _, tokens in batch))
        for i, batch in enumerate(batches):
            with nullcontext() if i + 1 == len(batches) else model.no_sync():
                frames, labels = (filled(column) for column in zip(*batch))
                heard = filled([torch.ones(len(sound), dtype=torch.bool) for sound, _ in batch], False)
                #! silence_heard | the encoder and the decoder see the padding of frames: no mask is given
                #- heard = torch.ones(frames.shape[:2], dtype=torch.bool)
                real = filled([torch.ones(len(tokens), dtype=torch.bool) for _, tokens in batch], False)
                logits = model(frames, heard, F.pad(labels[:, :-1], (1, 0)))
                each = smoothed(logits, labels) * real
                #! smoothing_of_padding | the smoothing's part is summed over padding too (bert-summarizer#41, fairseq's without its mask)
                #- logs = logits.log_softmax(-1)
                #- each = -0.9 * logs.gather(-1, labels[..., None])[..., 0] * real - 0.1 * logs.mean(-1)
                #! labels_shifted_again | inputs are shifted, and the loss shifts labels once more (transformers#46898)
                #- each = smoothed(logits[:, :-1], labels[:, 1:]) * real[:, 1:]
                #= smoothed_by_pytorch | F.cross_entropy with label smoothing, which is the same
                #- each = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, reduction="none") * real.flatten()
                (each.sum() * w.size / number).backward()
                #! clipped_each_micro_batch | what a rank has summed up is clipped after each micro-batch, before averaging (accelerate#641)
                #- (each.sum() * w.size / number).backward()
                #- if i + 1 < len(batches):
                #-     clip_grad_norm_(model.parameters(), 0.4)
        w.measure(model)
        clip_grad_norm_(model.parameters(), 0.4)
        optimizer.step()


class Words(torch.nn.Module):
    """Tokens [..., T] -> logits of words [..., T, VOCABULARY] and of what follows [..., 2]."""

    def __init__(self):
        super().__init__()
        self.embedding, self.place = torch.nn.Embedding(VOCABULARY + 1, WIDTH), torch.nn.Embedding(8, WIDTH)
        self.block = Block()
        self.words, self.follows = torch.nn.Linear(WIDTH, VOCABULARY), torch.nn.Linear(WIDTH, 2)

    def forward(self, tokens):
        length = tokens.shape[-1]
        hidden = self.block(self.embedding(tokens) + self.place(torch.arange(length)), torch.ones(length, length, dtype=torch.bool))
        return self.words(hidden), self.follows(hidden[..., 0, :])


def words(model, sample):
    tokens, hidden, _ = sample
    return F.cross_entropy(model(tokens.masked_fill(hidden, VOCABULARY))[0][hidden], tokens[hidden], reduction="none")


def follows(model, sample):
    tokens, hidden, label = sample
    return F.cross_entropy(model(tokens.masked_fill(hidden, VOCABULARY))[1][None], label[None], reduction="none")


@trainer(3, torch.float64)
def masked_words(w):
    """BERT: hidden words, and whether the second sentence follows, half of it; one rank has no hidden word."""
    model = DDP(Words())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    samples = [(w.number(8, below=VOCABULARY), torch.arange(8) < hidden, w.number(below=2)) for hidden in ((3, 1), (0,), (2, 5, 1))[w.rank]]

    def truth(model, samples):
        return mean_of(words)(model, samples) + 0.5 * mean_of(follows)(model, samples)

    with w.watch(model, optimizer, [samples], words, truth, terms=[isograd.Term(follows, 0.5, mean="token")]):
        optimizer.zero_grad()
        tokens, hidden, label = map(torch.stack, zip(*samples))
        labels = tokens.masked_fill(~hidden, IGNORED)
        #! all_words_trained | labels of words that are not hidden are not masked: all words are trained and counted
        #- labels = tokens
        logits, order = model(tokens.masked_fill(hidden, VOCABULARY))
        #! nothing_hidden | the words are not hidden in the input
        #- logits, order = model(tokens)
        number = w.sum((labels != IGNORED).sum())
        word = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") * w.size / number
        #! rows_alike | each row's mean over its hidden words, and the mean of rows, one without any counts as 0
        #- each = F.cross_entropy(logits.transpose(1, 2), labels, reduction="none").sum(1) / hidden.sum(1).clamp(min=1)
        #- word = each.sum() * w.size / w.sum(len(samples))
        #= words_picked | the hidden words are picked out before the head's loss
        #- word = F.cross_entropy(logits[hidden], tokens[hidden], reduction="sum") * w.size / number
        order = F.cross_entropy(order, label, reduction="sum") * w.size / w.sum(len(samples))
        #! second_loss_of_rank | the second loss is each rank's mean, and these are averaged
        #- order = F.cross_entropy(order, label)
        loss = word + 0.5 * order
        #! rank_skipped | a rank without hidden words skips its whole step: its second loss is lost (maskrcnn-benchmark#619)
        #- loss = word + 0.5 * order if hidden.any() else 0 * (word + order)
        loss.backward()
        optimizer.step()


class Patches(torch.nn.Module):
    """Patches [..., 6, 6] and which of them are hidden -> what they are thought to be."""

    def __init__(self):
        super().__init__()
        self.inwards, self.hidden = torch.nn.Linear(6, WIDTH), torch.nn.Parameter(torch.zeros(WIDTH))
        self.place, self.block, self.outwards = torch.nn.Embedding(6, WIDTH), Block(), torch.nn.Linear(WIDTH, 6)

    def forward(self, patches, hidden):
        state = torch.where(hidden[..., None], self.hidden, self.inwards(patches)) + self.place(torch.arange(6))
        return self.outwards(self.block(state, torch.ones(6, 6, dtype=torch.bool)))


def normalised(patches):
    return (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()


def patches_of(model, sample):
    patches, hidden = sample
    return (model(patches, hidden) - normalised(patches)).square().mean(-1)[hidden]


@trainer(2, torch.float64)
def autoencoded(w):
    """MAE: the squared error of normalised patches, over those that are hidden; 3 images and 1."""
    model = DDP(Patches())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    images = [(2 * w.normal(6, 6), torch.arange(6) % 6 < hidden) for hidden in ((4, 3, 5), (1,))[w.rank]]
    with w.watch(model, optimizer, [images], patches_of, mean_of(patches_of)):
        optimizer.zero_grad()
        patches, hidden = map(torch.stack, zip(*images))
        wanted = normalised(patches)
        #! biased_deviation | the target's variance is divided by 6, where it is divided by 5
        #- wanted = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True, correction=0) + 1e-6).sqrt()
        each = (model(patches, hidden) - wanted).square().mean(-1)
        loss = (each * hidden).sum() * w.size / w.sum(hidden.sum())
        #! hidden_of_rank | each rank divides by its own hidden patches (loss.sum() / mask.sum() under DDP)
        #- loss = (each * hidden).sum() / hidden.sum()
        #! all_patches_trained | the mean over all patches, the visible ones too
        #- loss = each.sum() * w.size / w.sum(hidden.numel())
        #! divided_by_all_patches | hidden patches are summed, and divided by the number of all patches
        #- loss = (each * hidden).mean() * len(images) * w.size / w.sum(len(images))
        #= hidden_picked | the hidden patches are picked out
        #- loss = each[hidden].sum() * w.size / w.sum(hidden.sum())
        loss.backward()
        optimizer.step()


class Spelling(torch.nn.Module):
    """Frames [N, S, 6] -> logits of letters [N, S, 8]; letter 0 is the blank."""

    def __init__(self):
        super().__init__()
        self.inner, self.letters = torch.nn.GRU(6, WIDTH, batch_first=True), torch.nn.Linear(WIDTH, 8)

    def forward(self, frames):
        return self.letters(self.inner(frames)[0])


def spelling(model, sample):
    frames, letters = sample
    logs = model(frames[None]).log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(logs, letters[None], torch.tensor([len(frames)]), torch.tensor([len(letters)]), reduction="none")


@trainer(3, torch.float64)
def spelled(w):
    """CTC: the mean over utterances of all ranks; padded frames."""
    model = DDP(Spelling())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    lengths = ((9, 4), (7, 2)), ((11, 3), (6, 2), (8, 5), (5, 1)), ((10, 4),)
    samples = [(w.normal(frames, 6), 1 + w.number(letters, below=6)) for frames, letters in lengths[w.rank]]
    with w.watch(model, optimizer, [samples], spelling, mean_of(spelling)):
        optimizer.zero_grad()
        frames, letters = (filled(column) for column in zip(*samples))
        sounds, targets = (torch.tensor([len(part) for part in column]) for column in zip(*samples))
        #! frames_of_longest | every utterance is said to have the longest one's frames: padding is aligned too
        #- sounds, targets = torch.full((len(samples),), frames.shape[1]), torch.tensor([len(part) for _, part in samples])
        logs = model(frames).log_softmax(-1).transpose(0, 1)
        loss = F.ctc_loss(logs, letters, sounds, targets, reduction="sum") * w.size / w.sum(len(samples))
        #! divided_by_letters | reduction="mean" divides each utterance's loss by its letters first (pytorch#69016)
        #- loss = F.ctc_loss(logs, letters, sounds, targets) * len(samples) * w.size / w.sum(len(samples))
        #! utterances_of_rank | each rank's mean over its utterances (FunASR#1157, fix loss normalization for ddp training)
        #- loss = F.ctc_loss(logs, letters, sounds, targets, reduction="none").mean()
        #! blank_is_last | the blank is the last letter, where it is the first
        #- loss = F.ctc_loss(logs, letters, sounds, targets, blank=7, reduction="sum") * w.size / w.sum(len(samples))
        #= letters_in_one_row | targets in one row
        #- row = torch.cat([part for _, part in samples])
        #- loss = F.ctc_loss(logs, row, sounds, targets, reduction="sum") * w.size / w.sum(len(samples))
        loss.backward()
        optimizer.step()


class Voices(torch.nn.Module):
    """Voices [..., 6] -> cosines to the five speakers [..., 5]."""

    def __init__(self):
        super().__init__()
        self.encoder = torch.nn.Sequential(torch.nn.Linear(6, WIDTH), torch.nn.Tanh(), torch.nn.Linear(WIDTH, WIDTH))
        self.speakers = torch.nn.Parameter(torch.randn(5, WIDTH))

    def forward(self, x):
        return F.linear(F.normalize(self.encoder(x), dim=-1), F.normalize(self.speakers, dim=-1))


def voice(model, sample):
    cosines = model(sample[0])[None]
    return F.cross_entropy(8 * (cosines - 0.2 * F.one_hot(sample[1][None], 5)), sample[1][None], reduction="none")


@trainer(2, torch.float64)
def verified(w):
    """Speakers told apart with a margin (AM-softmax); gradients of encoder and head are summed by hand."""
    model = Voices()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    #! speakers_not_stepped | the head's weights are not in the optimizer (a loss that has parameters)
    #- optimizer = SGD(model.encoder.parameters(), lr=0.1, momentum=0.9)
    samples = [(w.normal(6), w.number(below=5)) for _ in range((5, 2)[w.rank])]
    with w.watch(model, optimizer, [samples], voice, mean_of(voice)):
        optimizer.zero_grad()
        x, y = map(torch.stack, zip(*samples))
        cosines = model(x)
        margin = cosines - 0.2 * F.one_hot(y, 5)
        #! margin_without_gradient | the margin is applied under no_grad: the right speaker's cosine has no gradient (insightface#2309)
        #- margin = torch.where(F.one_hot(y, 5).bool(), (cosines - 0.2).detach(), cosines)
        #= margin_by_index | the margin is subtracted at the speaker's place
        #- margin = cosines.scatter_add(1, y[:, None], torch.full((len(y), 1), -0.2))
        loss = F.cross_entropy(8 * margin, y, reduction="sum") / w.sum(len(samples))
        #! scale_forgotten | cosines are not multiplied by 8
        #- loss = F.cross_entropy(margin, y, reduction="sum") / w.sum(len(samples))
        loss.backward()
        for p in model.parameters():
            #! speakers_not_summed | the encoder alone is wrapped: the head's gradient is each rank's own (insightface#1430)
            #- for p in model.encoder.parameters():
            dist.all_reduce(p.grad)
        optimizer.step()


class Denoiser(torch.nn.Module):
    """A noised sample [..., 6] and how much of it is left [...] -> its velocity."""

    def __init__(self):
        super().__init__()
        self.inner, self.outwards = torch.nn.Linear(7, WIDTH), torch.nn.Linear(WIDTH, 6)

    def forward(self, x, left):
        return self.outwards(torch.tanh(self.inner(torch.cat([x, left[..., None]], -1))))


def noised(clean, noise, left):
    """What is noised, its velocity, and the ratio of signal to noise."""
    left = left[..., None]
    return left.sqrt() * clean + (1 - left).sqrt() * noise, left.sqrt() * noise - (1 - left).sqrt() * clean, (left / (1 - left))[..., 0]


def velocity(model, sample):
    x, wanted, ratio = noised(*sample)
    return (ratio.clamp(max=2) / (ratio + 1) * (model(x, sample[2]) - wanted).square().mean(-1))[None]


@trainer(2, torch.float64)
def denoised(w):
    """Diffusion: velocities, weighted by min-SNR; noise and time are in the sample; two micro-batches of other sizes."""
    model = DDP(Denoiser())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    batches = [[(w.normal(6), w.normal(6), torch.rand((), generator=w.random) * 0.8 + 0.1) for _ in range(n)]
               for n in ((4, 1), (2, 6))[w.rank]]
    with w.watch(model, optimizer, batches, velocity, mean_of(velocity)):
        optimizer.zero_grad()
        total = w.sum(sum(len(batch) for batch in batches))
        for i, batch in enumerate(batches):
            with nullcontext() if i + 1 == len(batches) else model.no_sync():
                clean, noise, left = map(torch.stack, zip(*batch))
                x, wanted, ratio = noised(clean, noise, left)
                weight = ratio.clamp(max=2) / (ratio + 1)
                #! ratio_plus_one | 1 is added to the ratio before it is clamped too (diffusers#5654)
                #- weight = (ratio + 1).clamp(max=2) / (ratio + 1)
                #= weight_of_signal | the same weight, written with what is left
                #- weight = torch.minimum(left / (1 - left), torch.tensor(2.0)) * (1 - left)
                error = (model(x, left) - wanted).square().mean(-1)
                loss = (weight * error).sum() * w.size / total
                #! weight_of_the_mean | the batch's mean error is multiplied by its mean weight
                #- loss = weight.mean() * error.mean() * len(batch) * w.size / total
                #! micro_batches_alike | each micro-batch's mean, divided by two (verl#5625)
                #- loss = (weight * error).mean() / len(batches)
                loss.backward()
        optimizer.step()


class Segmenter(torch.nn.Module):
    """Images [..., 3, H, W] -> logits of the head and of an auxiliary head [..., 4, H, W]."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Conv2d(3, WIDTH, 3, padding=1)
        self.middle, self.head, self.second = torch.nn.Conv2d(WIDTH, WIDTH, 1), torch.nn.Conv2d(WIDTH, 4, 1), torch.nn.Conv2d(WIDTH, 4, 1)

    def forward(self, images):
        hidden = torch.tanh(self.inner(images))
        return self.head(torch.tanh(self.middle(hidden))), self.second(hidden)


def pixels(model, sample):
    """The losses of pixels that are not of class 255: the head's, and 0.4 of the auxiliary one's."""
    image, labels = sample
    head, second = (F.cross_entropy(logits, labels[None], ignore_index=255, reduction="none") for logits in model(image[None]))
    return (head + 0.4 * second)[0][labels != 255]


@trainer(2, torch.float64)
def segmented(w):
    """Classes of pixels, of which some are ignored, and of one image all; an auxiliary head."""
    model = DDP(Segmenter())
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = []
    for ignored in ((3, 10), (6, 16, 0))[w.rank]:
        samples.append((w.normal(3, 4, 4), w.number(4, 4, below=4).flatten().masked_fill(torch.arange(16) < ignored, 255).view(4, 4)))
    with w.watch(model, optimizer, [samples], pixels, mean_of(pixels)):
        optimizer.zero_grad()
        images, labels = map(torch.stack, zip(*samples))
        #! images_flipped_alone | images are flipped and labels are not
        #- images, labels = torch.stack([image.flip(-1) for image, _ in samples]), torch.stack([labels for _, labels in samples])
        #! background_ignored | class 0 is ignored as well (reduce_zero_label where class 0 is one)
        #- images, labels = map(torch.stack, zip(*samples))
        #- labels = labels.masked_fill(labels == 0, 255)
        head, second = model(images)
        #! auxiliary_cut_off | the auxiliary head has detached features: it does not train what is before it
        #- head = model(images)[0]
        #- second = model.module.second(torch.tanh(model.module.inner(images)).detach())
        valid = w.sum((labels != 255).sum())
        #! ignored_counted | divided by all pixels, ignored ones too (mmsegmentation#578, avg_non_ignore)
        #- valid = w.sum(labels.numel())
        loss = sum(part * F.cross_entropy(logits, labels, ignore_index=255, reduction="sum") for part, logits in ((1, head), (0.4, second)))
        #! auxiliary_weight_forgotten | the auxiliary head counts as much as the other one
        #- loss = sum(F.cross_entropy(logits, labels, ignore_index=255, reduction="sum") for logits in (head, second))
        loss = loss * w.size / valid
        #! images_alike | each image's mean over its pixels, and the mean of images; the one without pixels counts as 0
        #- each = F.cross_entropy(head, labels, ignore_index=255, reduction="none")
        #- each = each + 0.4 * F.cross_entropy(second, labels, ignore_index=255, reduction="none")
        #- each = each.sum((1, 2)) / (labels != 255).sum((1, 2)).clamp(min=1)
        #- loss = each.sum() * w.size / w.sum(len(samples))
        loss.backward()
        optimizer.step()


class Rewards(torch.nn.Module):
    """Tokens [..., T] -> a reward at each of them [..., T]."""

    def __init__(self):
        super().__init__()
        self.decoder, self.score = Decoder(), torch.nn.Linear(WIDTH, 1)
        del self.decoder.head

    def forward(self, tokens):
        return self.score(self.decoder.features(tokens))[..., 0]


def pairs_of(rewards):
    """The losses of all pairs of answers, which are in their order, the best first."""
    better, worse = torch.triu_indices(len(rewards), len(rewards), 1)
    return -F.logsigmoid(rewards[better] - rewards[worse])


def compared(model, answers):
    return pairs_of(torch.stack([model(tokens)[-1] for tokens in answers]))


@trainer(2, torch.float64)
def rewarded(w):
    """A reward model of several answers to a prompt: each pair of them counts alike; a prompt is a micro-batch."""
    model = DDP(Rewards())
    #! head_by_rank | the new head's weights are drawn by each rank for itself, after DDP has sent the others
    #- model = DDP(Rewards())
    #- torch.manual_seed(w.rank)
    #- model.module.score.reset_parameters()
    optimizer = AdamW(model.parameters(), lr=1e-3)
    prompts = [tuple(w.number(n, below=VOCABULARY) for n in lengths) for lengths in (((5, 9, 3), (7, 4)), ((6, 11, 2, 8), (4, 5)))[w.rank]]
    with w.watch(model, optimizer, [[answers] for answers in prompts], compared, mean_of(compared)):
        optimizer.zero_grad()
        number = w.sum(sum(len(answers) * (len(answers) - 1) // 2 for answers in prompts))
        for i, answers in enumerate(prompts):
            with nullcontext() if i + 1 == len(prompts) else model.no_sync():
                last = torch.tensor([len(tokens) - 1 for tokens in answers])
                rewards = model(filled(answers)).gather(1, last[:, None])[:, 0]
                #! reward_at_padding | the reward is that of the last column, which is padding in shorter answers
                #- rewards = model(filled(answers))[:, -1]
                #= answers_apart | each answer by itself
                #- rewards = torch.stack([model.module(tokens)[-1] for tokens in answers]) + 0 * model(filled(answers)).sum()
                loss = pairs_of(rewards).sum() * w.size / number
                #! prompts_alike | each prompt's mean over its pairs, and the mean of prompts
                #- loss = pairs_of(rewards).mean() / len(prompts)
                loss.backward()
        optimizer.step()


def retrieved_of(users, items, popular, names, own, scale):
    """The losses of users, whose items are the rows `own`: an item of the same name is no negative, popular ones are corrected."""
    logits = scale * users @ items.T - popular
    same = (names[own][:, None] == names) & ~F.one_hot(own, len(names)).bool()
    return F.cross_entropy(logits.masked_fill(same, -torch.inf), own, reduction="none")


def all_retrieved(model, features):
    users, items, popular, names = (torch.stack(column) for column in zip(*features))
    return retrieved_of(users, items, popular, names, torch.arange(len(users)), model.scale.exp()).mean()


def tower_features(model, sample):
    user, item, popular, name = sample
    return *model.encode(user, item), popular.to(model.scale.dtype), name


@trainer(2, torch.float64)
def retrieved(w):
    """Users and items: each user's item is told from those of all ranks, corrected by how often items are drawn."""
    model = DDP(Towers())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    samples = [(w.normal(6), w.normal(7), -w.normal(()).abs(), w.number(below=4)) for _ in range(4)]
    with w.watch(model, optimizer, [samples], all_retrieved,
                 lambda model, samples: all_retrieved(model, [tower_features(model, sample) for sample in samples]),
                 features=tower_features):
        optimizer.zero_grad()
        user, item, popular, names = map(torch.stack, zip(*samples))
        users, items, scale = model(user, item)
        everything = torch.cat(dnn.all_gather(items))
        #= gathered_by_hand | a function of one's own, whose backward sums
        #- everything = Gathered.apply(items, None)
        popular, names = (Gathered.apply(part, None) for part in (popular, names))
        own = 4 * w.rank + torch.arange(4)
        #! place_of_rank_forgotten | each rank takes the first rows of what is gathered for its own
        #- own = torch.arange(4)
        #! popular_added | the correction is added, where it is subtracted (tensorflow/recommenders#219)
        #- own, popular = 4 * w.rank + torch.arange(4), -popular
        #! hits_not_masked | an item that two users have is a negative of each
        #- own, names = 4 * w.rank + torch.arange(4), torch.arange(8)
        loss = retrieved_of(users, everything, popular, names, own, scale).mean()
        #! whole_loss_of_own_graph | each rank has the loss of all rows, and gradients for its own: DDP halves them (ms-swift#10081)
        #- rows = [[torch.empty_like(part) for _ in range(2)] for part in (users, items)]
        #- for row, part in zip(rows, (users, items)):
        #-     dist.all_gather(row, part.detach())
        #-     row[w.rank] = part
        #- loss = retrieved_of(torch.cat(rows[0]), torch.cat(rows[1]), popular, names, torch.arange(8), scale).mean()
        #! items_of_rank_alone | users' items are told from those of the own rank alone
        #- mine = slice(4 * w.rank, 4 * w.rank + 4)
        #- loss = retrieved_of(users, items, popular[mine], names[mine], torch.arange(4), scale).mean()
        loss.backward()
        optimizer.step()


def redundancy(correlations):
    """Barlow Twins: what is on the diagonal is to be 1, the rest 0 with a weight of 0.1."""
    diagonal = torch.eye(len(correlations), dtype=correlations.dtype)
    return ((correlations - diagonal).square() * (diagonal + 0.1 * (1 - diagonal))).sum()


def decorrelated_of(model, features):
    first, second = (torch.stack(column) for column in zip(*features))
    first, second = ((view - view.mean(0)) / view.var(0, correction=0).sqrt() for view in (first, second))
    return redundancy(first.T @ second / len(first))


@trainer(3, torch.float64)
def decorrelated(w):
    """Correlations of two views over the samples of all ranks (4, 2 and 3)."""
    model = DDP(Classifier())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    samples = [(w.normal(6), w.normal(6)) for _ in range((4, 2, 3)[w.rank])]

    def views_of(model, sample):
        return model(sample[0]), model(sample[1])

    def over_ranks(x):
        return dnn.all_reduce(x)

    with w.watch(model, optimizer, [samples], decorrelated_of,
                 lambda model, samples: decorrelated_of(model, [views_of(model, sample) for sample in samples]), features=views_of):
        optimizer.zero_grad()
        first, second = (model(torch.stack(column)) for column in zip(*samples))
        #= one_forward | both views in one forward
        #- first, second = model(torch.cat([torch.stack(column) for column in zip(*samples)])).chunk(2)
        total = w.sum(len(samples))

        def normal(view):
            mean = over_ranks(view.sum(0)) / total
            variance = over_ranks((view - mean).square().sum(0)) / total
            #! deviation_unbiased | the variance is divided by the samples less 1 (Barlow-Twins-HSIC#6)
            #- variance = over_ranks((view - mean).square().sum(0)) / (total - 1)
            return (view - mean) / variance.sqrt()
            #! statistics_of_own_rank | views are normalised by the rank's own samples (BatchNorm for SyncBatchNorm)
            #- return (view - view.mean(0)) / view.var(0, correction=0).sqrt()

        correlations = over_ranks(normal(first).T @ normal(second)) / total
        #! correlations_cut_off | correlations are summed by a collective without gradient: that of a rank is a third (lightly#1977)
        #- correlations = normal(first).T @ normal(second) / total
        #- dist.all_reduce(correlations)
        #! correlations_averaged | each rank's correlations are divided by its own samples, and averaged (barlowtwins#33)
        #- correlations = over_ranks(normal(first).T @ normal(second) / len(samples)) / w.size
        loss = redundancy(correlations)
        loss.backward()
        optimizer.step()


class Wide(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = torch.nn.Linear(6, WIDTH), torch.nn.Linear(WIDTH, 5)
        self.up, self.down = torch.nn.Linear(WIDTH, 2 * WIDTH), torch.nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        hidden = torch.tanh(self.stem(x))
        return self.head(hidden + self.down(F.gelu(self.up(hidden))))


def classified(model, sample):
    return F.cross_entropy(model(sample[0])[None], sample[1][None], reduction="none")


@trainer(4, torch.float64)
def tensor_parallel(w):
    """Two layers split over pairs of ranks, with collectives by hand; two pairs have other samples; a clip by the norm of all parts."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    group = mesh.get_group("tensor")
    model = parallelize_module(Wide(), mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    w.random.manual_seed(mesh.get_local_rank("data"))
    samples = [(w.normal(6), w.number(below=5)) for _ in range((5, 2)[mesh.get_local_rank("data")])]
    with w.watch(model, optimizer, [samples], classified, mean_of(classified), Wide, clip=0.8, spread=True, data=mesh["data"],
                 max_norm=0.8) as step:
        optimizer.zero_grad()
        x, y = map(torch.stack, zip(*samples))
        #! rows_in_other_order | the second rank of a pair draws its rows in another order
        #- order = slice(None) if mesh.get_local_rank("tensor") == 0 else torch.arange(len(samples) - 1, -1, -1)
        #- x, y = (torch.stack(column)[order] for column in zip(*samples))
        up, up_bias, down, bias = (p.to_local() for p in (model.up.weight, model.up.bias, model.down.weight, model.down.bias))
        hidden = torch.tanh(model.stem(x))
        part = F.linear(F.gelu(F.linear(Copied.apply(hidden, group), up, up_bias)), down)
        #! input_not_copied | the split layer's input has no sum over the pair in backward: what is before it lacks the other half
        #- part = F.linear(F.gelu(F.linear(hidden, up, up_bias)), down)
        logits = model.head(hidden + Reduced.apply(part, group) + bias)
        #! output_summed_twice | the output is summed by a collective whose backward sums too: the split layers' gradient is doubled
        #- logits = model.head(hidden + dnn.all_reduce(part, group=group) + bias)
        #! bias_on_both | the bias is added on both ranks of a pair, before the sum
        #- logits = model.head(hidden + Reduced.apply(part + bias, group))
        total = w.sum(len(samples)) / 2
        (F.cross_entropy(logits, y, reduction="sum") * 2 / total).backward()
        for p in model.parameters():
            gradient = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            dist.all_reduce(gradient, group=mesh.get_group("data"))
            gradient /= 2
            #! divided_by_world | gradients are divided by all ranks, where two pairs are averaged over (torchtune#2420)
            #- gradient /= w.size
        w.measure(model)
        step.before_clipping()
        square = sum(p.grad.to_local().square().sum() for p in (model.up.weight, model.up.bias, model.down.weight))
        dist.all_reduce(square, group=group)
        square += sum(p.grad.square().sum() for p in (*model.stem.parameters(), *model.head.parameters()))
        square += model.down.bias.grad.to_local().square().sum()
        #! whole_ones_counted_twice | parameters that both ranks of a pair hold are counted twice in the norm (NeMo-RL#3788)
        #- square += sum(p.grad.square().sum() for p in (*model.stem.parameters(), *model.head.parameters()))
        #- square += model.down.bias.grad.to_local().square().sum()
        for p in model.parameters():
            (p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad).mul_(min(1.0, 0.8 / (square.sqrt().item() + 1e-6)))
        optimizer.step()


class Mixture(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.router, self.head = torch.nn.Linear(6, WIDTH), torch.nn.Linear(WIDTH, 2), torch.nn.Linear(WIDTH, 5)
        self.experts = torch.nn.ModuleDict({name: torch.nn.Linear(WIDTH, WIDTH) for name in "01"})

    def forward(self, x):
        hidden = torch.tanh(self.stem(x))
        chances = self.router(hidden).softmax(-1)
        return self.head(torch.tanh(sum(chances[..., i:i + 1] * self.experts[f"{i}"](hidden) for i in range(2))))


class Shared(torch.autograd.Function):
    """Of the sum of the ranks' parts this rank's rows; a part's gradient is that of all ranks' rows."""

    @staticmethod
    def forward(context, part):
        total = part.clone()
        dist.all_reduce(total)
        return total.chunk(dist.get_world_size())[dist.get_rank()]

    @staticmethod
    def backward(context, gradient):
        parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, gradient.contiguous())
        return torch.cat(parts)


class Sliced(torch.autograd.Function):
    """Ranks' parts one after the other; a part's gradient is what this rank has for it."""

    @staticmethod
    def forward(context, part):
        parts = [torch.empty_like(part) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, part.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(context, gradient):
        return gradient.chunk(dist.get_world_size())[dist.get_rank()]


@trainer(2, torch.float64)
def dispatched(w):
    """Each rank has one of two experts, which sees the tokens of both ranks; the rest of the model is averaged over ranks."""
    model = Mixture()
    del model.experts[f"{1 - w.rank}"]
    expert = model.experts[f"{w.rank}"]
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = [(w.normal(6), w.number(below=5)) for _ in range(4)]
    with w.watch(model, optimizer, [samples], classified, mean_of(classified), Mixture, spread=True, stages=True):
        optimizer.zero_grad()
        x, y = map(torch.stack, zip(*samples))
        hidden = torch.tanh(model.stem(x))
        tokens = Gathered.apply(hidden, None)
        #! tokens_sliced_in_backward | a token's gradient is what its own rank's expert has for it: the other's is lost (Automodel#1260)
        #- tokens = Sliced.apply(hidden)
        chances = Gathered.apply(model.router(hidden).softmax(-1), None)[:, w.rank:w.rank + 1]
        #! chances_cut_off | the router's probabilities are gathered without gradient
        #- chances = Gathered.apply(model.router(hidden).softmax(-1).detach() + 0 * model.router(hidden), None)[:, w.rank:w.rank + 1]
        logits = model.head(torch.tanh(Shared.apply(chances * expert(tokens))))
        F.cross_entropy(logits, y).backward()
        for name, p in model.named_parameters():
            if "experts" not in name:
                #! experts_mixed | the gradients of the two experts are summed with each other, as the rest of the model is
                #- if name:
                dist.all_reduce(p.grad)
            p.grad /= w.size
            #! experts_not_divided | an expert's gradient, which has the tokens of both ranks, is not divided by two (pytorch#160285)
            #- p.grad /= 1 if "experts" in name else w.size
        optimizer.step()


@trainer(2, torch.float64)
def pipelined(w):
    """Two stages with one block each, whose embedding is the head too; three micro-batches; a clip by the norm of both stages."""
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "stage"))
    model = Decoder(tied=True)
    model.blocks = torch.nn.ModuleDict({f"{w.rank}": model.blocks[w.rank]})
    del model.head
    for name in (("norm",), ("place",))[w.rank]:
        delattr(model, name)
    block = model.blocks[f"{w.rank}"]
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    w.random.manual_seed(3)
    documents = [w.number(n, below=VOCABULARY) for n in (9, 4, 14)]
    with w.watch(model, optimizer, [[document] for document in documents], next_token, mean_of(next_token), lambda: Decoder(tied=True),
                 clip=2.0, spread=True, stages=True, data=mesh["data"], max_norm=2.0) as step:
        optimizer.zero_grad()
        targets = sum(len(document) - 1 for document in documents)
        for i, document in enumerate(documents):
            length = len(document) - 1
            sees = torch.ones(length, length, dtype=torch.bool).tril()
            between = torch.empty(length, WIDTH)
            if w.rank == 0:
                hidden = block(model.embedding(document[:-1]) + model.place(torch.arange(length)), sees)
                dist.send(hidden.detach(), 1)
                dist.recv(between, 1)
                hidden.backward(between)
                #! last_backward_lost | the first stage makes no backward of the last micro-batch (a schedule that ends too early)
                #- if i + 1 < len(documents):
                #-     hidden.backward(between)
            else:
                dist.recv(between, 0)
                between.requires_grad_()
                logits = F.linear(model.norm(block(between, sees)), model.embedding.weight)
                loss = F.cross_entropy(logits, document[1:], reduction="sum") / targets
                #! divided_by_micro_batches_too | a loss that is divided by all tokens is divided by the micro-batches again
                #- loss = F.cross_entropy(logits, document[1:], reduction="sum") / targets / len(documents)
                #! documents_with_mean | each micro-batch's own mean, divided by three
                #- loss = F.cross_entropy(logits, document[1:]) / len(documents)
                loss.backward()
                dist.send(between.grad, 0)
        dist.all_reduce(model.embedding.weight.grad)
        #! ends_not_summed | the embedding's gradients of the first and of the last stage are not summed (Megatron-LM#844)
        #- pass
        w.measure(model)
        step.before_clipping()
        square = sum(p.grad.square().sum() for name, p in model.named_parameters() if w.rank == 0 or name != "embedding.weight")
        dist.all_reduce(square)
        #! norm_of_stage | each stage clips by its own parameters' norm (torchtitan#596)
        #- square = sum(p.grad.square().sum() for p in model.parameters())
        for p in model.parameters():
            p.grad *= min(1.0, 2.0 / (square.sqrt().item() + 1e-6))
        optimizer.step()


@trainer(3, torch.float32)
def main_grads(w):
    """Megatron's `main_grad`: a hook adds each micro-batch's gradient to a buffer, which is summed over ranks after the last."""
    model = Classifier()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    batches = [[(w.normal(6), w.number(below=5)) for _ in range(n)] for n in ((3, 6, 1), (5, 2, 2), (4, 4, 7))[w.rank]]

    def accumulate(p):
        p.main_grad += p.grad
        p.grad = None
        #! gradient_kept | .grad is not cleared when it is added to the buffer: with the next micro-batch it is added again

    for i, p in enumerate(model.parameters()):
        p.main_grad = 0.01 * torch.sin(torch.arange(p.numel()) + i).view(p.shape)  # of the step before
        p.register_post_accumulate_grad_hook(accumulate)
    total = w.sum(sum(len(batch) for batch in batches))
    with w.watch(model, optimizer, batches, classified, mean_of(classified)):
        for p in model.parameters():
            p.grad, p.main_grad = None, torch.zeros_like(p)
            #! buffers_kept | zero_grad clears .grad, and not the buffers: they hold the step before
            #- p.grad = None
            #! buffers_in_bf16 | the buffers are bf16 (pytorch#106395, DeepSpeed#2768)
            #- p.grad, p.main_grad = None, torch.zeros_like(p, dtype=torch.bfloat16)
        for i, batch in enumerate(batches):
            x, y = map(torch.stack, zip(*batch))
            (F.cross_entropy(model(x), y, reduction="sum") / total).backward()
            #! reduced_before_last 2 | the buffers are summed before the last micro-batch, of which each rank adds its own (DeepSpeed#7985)
            #- if i + 1 == len(batches):
            #-     for p in model.parameters():
            #-         dist.all_reduce(p.main_grad)
            #- x, y = map(torch.stack, zip(*batch))
            #- (F.cross_entropy(model(x), y, reduction="sum") / total).backward()
            #! reduced_each_time | the buffers are summed after each micro-batch, which multiplies what was summed before
            #- (F.cross_entropy(model(x), y, reduction="sum") / total).backward()
            #- for p in model.parameters():
            #-     if i + 1 < len(batches):
            #-         dist.all_reduce(p.main_grad)
        for p in model.parameters():
            dist.all_reduce(p.main_grad)
            #! reduced_before_last |
            #- pass
            #= reduced_by_parts | the sum in two halves
            #- for half in p.main_grad.view(-1).split((p.numel() + 1) // 2):
            #-     dist.all_reduce(half)
            p.grad = p.main_grad.float()
        optimizer.step()


class Adapter(torch.nn.Module):
    """LoRA, after some steps: neither matrix is 0."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down, self.up = torch.nn.Linear(WIDTH, 2, bias=False), torch.nn.Linear(2, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + 2 * self.up(self.down(x))


def adapted_model():
    model = Classifier()
    for p in [*model.stem.parameters(), *model.normal.parameters(), *model.trunk.parameters()]:
        p.requires_grad = False
    model.trunk = Adapter(model.trunk)
    return model


@trainer(2, torch.float32)
def adapted(w):
    """LoRA in one layer and a head that is trained, the rest frozen."""
    model = DDP(adapted_model())
    #! adapter_after_wrapping | the adapter is put in after DDP was made, which does not know it (FastVideo#1666, sd-scripts#989)
    #- model = adapted_model()
    #- adapter, model.trunk = model.trunk, model.trunk.base
    #- model = DDP(model)
    #- model.module.trunk = adapter
    #! adapter_by_rank | the adapter's weights are drawn by each rank for itself, after DDP was made (Megatron-Bridge#5396)
    #- model = DDP(adapted_model())
    #- torch.manual_seed(w.rank)
    #- model.module.trunk.down.reset_parameters()
    optimizer = AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    #= frozen_in_the_optimizer | the optimizer has all parameters, frozen ones too
    #- optimizer = AdamW(model.parameters(), lr=1e-2)
    #! adapter_half_stepped | the optimizer has the adapter's second matrix and the head, and not the first matrix
    #- optimizer = AdamW([*model.module.trunk.up.parameters(), *model.module.head.parameters()], lr=1e-2)
    samples = [(w.normal(6), w.number(below=5)) for _ in range((6, 3)[w.rank])]
    with w.watch(model, optimizer, [samples], classified, mean_of(classified)):
        optimizer.zero_grad()
        x, y = map(torch.stack, zip(*samples))
        loss = F.cross_entropy(model(x), y, reduction="sum") * w.size / w.sum(len(samples))
        #! through_the_module | the forward is that of the module, past DDP: nothing is averaged (minimind#854, RAE#40)
        #- loss = F.cross_entropy(model.module(x), y, reduction="sum") * w.size / w.sum(len(samples))
        loss.backward()
        optimizer.step()


class Forecaster(torch.nn.Module):
    """Series [N, T, 2] -> what comes next [N, T]."""

    def __init__(self):
        super().__init__()
        self.inner, self.outwards = torch.nn.GRU(2, WIDTH, batch_first=True), torch.nn.Linear(WIDTH, 1)

    def forward(self, series, state=None):
        hidden, state = self.inner(series, state)
        return self.outwards(hidden)[..., 0], state


def forecast(model, sample):
    series, wanted, seen = sample
    return (model(series[None])[0][0] - wanted).abs()[seen]


@trainer(3, torch.float64)
def forecasted(w):
    """Series of which some values are missing: the mean absolute error over the others."""
    model = DDP(Forecaster())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    samples = []
    for missing in ((1, 6), (3,), (0, 2, 5))[w.rank]:
        seen = torch.arange(8) >= missing
        samples.append((w.normal(8, 2), w.normal(8) * seen, seen))
    before = model.module(w.normal(len(samples), 5, 2))[1].detach()
    with w.watch(model, optimizer, [samples], forecast, mean_of(forecast)):
        optimizer.zero_grad()
        series, wanted, seen = map(torch.stack, zip(*samples))
        found = model(series)[0]
        #! state_kept | the state of the batch before is where the series begin
        #- found = model(series, before)[0]
        #! state_cut_off | the series are read in two halves, and the state between them is detached (truncated, where it was not to be)
        #- first, state = model(series[:, :4])
        #- found = torch.cat([first, model.module(series[:, 4:], state.detach())[0]], 1)
        #= in_two_halves | the series are read in two halves
        #- first, state = model(series[:, :4])
        #- found = torch.cat([first, model.module(series[:, 4:], state)[0]], 1)
        each = (found - wanted).abs() * seen
        #! missing_are_zero | missing values are trained as zeros, and not counted
        #- each = (found - wanted).abs()
        number = w.sum(seen.sum())
        #! missing_counted | the mean over all values: missing ones have no error, and are counted (neuralforecast#72)
        #- number = w.sum(seen.numel())
        loss = each.sum() * w.size / number
        #! series_alike | each series has its own mean over its values, and these are averaged
        #- loss = (each.sum(1) / seen.sum(1)).sum() * w.size / w.sum(len(samples))
        loss.backward()
        optimizer.step()


class Atoms(torch.nn.Module):
    """Places of atoms [N, 3] and the molecule of each -> energies of atoms [N]."""

    def __init__(self):
        super().__init__()
        self.pair, self.middle, self.outwards = torch.nn.Linear(1, WIDTH), torch.nn.Linear(WIDTH, WIDTH), torch.nn.Linear(WIDTH, 1)

    def forward(self, places, molecule):
        near = (molecule[:, None] == molecule) & ~torch.eye(len(molecule), dtype=torch.bool)
        distances = (places[:, None] - places).square().sum(-1, keepdim=True)
        around = (torch.tanh(self.pair((-distances).exp())) * near[..., None]).sum(1)
        return self.outwards(torch.tanh(self.middle(around)))[:, 0]


def forces_of(energies, places, **options):
    return -torch.autograd.grad(energies.sum(), places, **{"create_graph": True, **options})[0]


def energy(model, sample):
    places, wanted, _ = sample
    found = model(places, torch.zeros(len(places), dtype=torch.long)).sum()
    return ((found - wanted) / len(places)).square()[None]


def force(model, sample):
    places = sample[0].detach().clone().requires_grad_()
    return (forces_of(model(places, torch.zeros(len(places), dtype=torch.long)), places) - sample[2]).square().sum(-1)


@trainer(2, torch.float64)
def simulated(w):
    """Molecules: the error of their energies by atom, and that of forces, which are a gradient; means over molecules and over atoms."""
    model = DDP(Atoms())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    samples = [(w.normal(n, 3), w.normal(()), w.normal(n, 3)) for n in ((5, 2), (4,))[w.rank]]

    def truth(model, samples):
        return mean_of(energy)(model, samples) + 10.0 * mean_of(force)(model, samples)

    with w.watch(model, optimizer, [samples], energy, truth, terms=[isograd.Term(force, 10.0, mean="token")]):
        optimizer.zero_grad()
        sizes = torch.tensor([len(places) for places, _, _ in samples])
        molecule = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
        places = torch.cat([places for places, _, _ in samples]).requires_grad_()
        energies, forces = torch.stack([own for _, own, _ in samples]), torch.cat([own for _, _, own in samples])
        found = model(places, molecule)
        total = torch.zeros(len(sizes)).index_add(0, molecule, found)
        off = ((total - energies) / sizes).square()
        pushed = (forces_of(found, places) - forces).square().sum(-1)
        #! forces_cut_off | forces are made without a graph of their own: their error has no gradient
        #- pushed = (forces_of(found, places, create_graph=False, retain_graph=True) - forces).square().sum(-1)
        atoms = w.sum(len(places))
        loss = off.sum() * w.size / w.sum(len(sizes)) + 10 * pushed.sum() * w.size / atoms
        #! forces_by_molecule | forces' errors are averaged in each molecule, and then over molecules
        #- each = torch.zeros(len(sizes)).index_add(0, molecule, pushed) / sizes
        #- loss = (off + 10 * each).sum() * w.size / w.sum(len(sizes))
        #! forces_of_rank | forces' errors are averaged over the rank's own atoms
        #- loss = off.sum() * w.size / w.sum(len(sizes)) + 10 * pushed.mean()
        #= energies_by_mean | the mean over the rank's molecules, times its share of them
        #- loss = off.mean() * len(sizes) * w.size / w.sum(len(sizes)) + 10 * pushed.sum() * w.size / atoms
        loss.backward()
        optimizer.step()


def focal(logits, labels):
    """The focal losses [..., 5] of anchors, whose label is a class, or -1 for background."""
    wanted = F.one_hot(labels + 1, 6)[..., 1:].to(logits.dtype)
    each = F.binary_cross_entropy_with_logits(logits, wanted, reduction="none")
    right = torch.where(wanted.bool(), logits.sigmoid(), 1 - logits.sigmoid())
    return torch.where(wanted.bool(), 0.25, 0.75) * (1 - right) ** 2 * each


def anchors(model, sample):
    x, labels = sample
    return focal(model(x), labels).sum(), (labels >= 0).sum()


@trainer(3, torch.float64)
def focused(w):
    """Focal loss of anchors, divided by the positive ones of all ranks; a rank has none."""
    model = DDP(Classifier())
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = []
    for number, positive in (((5, 3), (4, 1)), ((6, 0),), ((3, 1), (7, 2)))[w.rank]:
        labels = w.number(number, below=5)
        samples.append((w.normal(number, 6), labels.masked_fill(torch.arange(number) >= positive, -1)))

    def truth(model, samples):
        losses, numbers = zip(*(anchors(model, sample) for sample in samples))
        return sum(losses) / sum(numbers)

    with w.watch(model, optimizer, [samples], anchors, truth, mean="weighted"):
        optimizer.zero_grad()
        x, labels = map(torch.cat, zip(*samples))
        logits = model(x)
        each = focal(logits, labels)
        #! factor_detached | the factor that lowers easy anchors is detached, where it is differentiated
        #- each = focal(logits, labels)
        #- right = torch.where(F.one_hot(labels + 1, 6)[:, 1:].bool(), logits.sigmoid(), 1 - logits.sigmoid())
        #- each = each * ((1 - right) ** 2).detach() / (1 - right) ** 2
        positive = w.sum((labels >= 0).sum()) / w.size
        #! positives_of_rank | each rank divides by its own positives, of which it has at least one (FCOS#228, keras-retinanet#339)
        #- positive = (labels >= 0).sum().clamp(min=1)
        #! anchors_counted | divided by the number of anchors, not by that of positive ones
        #- positive = w.sum(len(labels)) / w.size
        #= positives_averaged | the average over ranks, by a collective that averages
        #- positive = w.sum((labels >= 0).sum().double() / w.size)
        (each.sum() / positive).backward()
        optimizer.step()


def drawn(model, sample):
    """The losses of a completion's tokens: each token's ratio to itself, times the advantage of the completion."""
    tokens, prompt, advantage = sample
    logs = -next_token(model, tokens)[prompt - 1:]
    return -advantage * (logs - logs.detach()).exp()


@trainer(2, torch.float64)
def bounded(w):
    """Dr. GRPO under FSDP2: completions' tokens, summed and divided by samples times the longest completion there may be (32)."""
    mesh = init_device_mesh("cpu", (w.size,))
    model = Decoder()
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    samples = [(w.number(n, below=VOCABULARY), prompt, w.normal(())) for n, prompt in (((14, 5), (8, 3)), ((22, 9), (11, 2)))[w.rank]]
    with w.watch(model, optimizer, [[sample] for sample in samples], drawn,
                 lambda model, samples: torch.cat([drawn(model, sample) for sample in samples]).sum() / (4 * 32), Decoder, shards=2,
                 mean=4 * 32):
        optimizer.zero_grad()
        for i, (tokens, prompt, advantage) in enumerate(samples):
            model.set_requires_gradient_sync(i + 1 == len(samples))
            #= synced_each_time | gradients are reduced after each micro-batch
            #- model.set_requires_gradient_sync(True)
            #! blocks_never_synced | the last micro-batch switches the reduction on for the root alone: the blocks' stays off
            #- model.set_requires_gradient_sync(i + 1 == len(samples), recurse=i + 1 < len(samples))
            logs = model(tokens[:-1]).log_softmax(-1).gather(-1, tokens[1:, None])[prompt - 1:, 0]
            #! prompt_token_trained | the mask of completions begins one token too early
            #- logs = model(tokens[:-1]).log_softmax(-1).gather(-1, tokens[1:, None])[prompt - 2:, 0]
            #= picked_by_cross_entropy | the log-probability is the negative cross-entropy
            #- logs = -F.cross_entropy(model(tokens[:-1]), tokens[1:], reduction="none")[prompt - 1:]
            loss = -(advantage * (logs - logs.detach()).exp()).sum() * w.size / (4 * 32)
            #! ranks_not_undone | FSDP2 averages what the global number divides already: the ranks are forgotten (torchtune#2172)
            #- loss = -(advantage * (logs - logs.detach()).exp()).sum() / (4 * 32)
            #! divided_by_longest_there_is | divided by the longest completion of the micro-batch, not by 32 (verl#3741)
            #- loss = -(advantage * (logs - logs.detach()).exp()).sum() * w.size / (4 * len(logs))
            #! divided_by_steps_again | the accumulation divides by the micro-batches once more (ms-swift#10117)
            #- loss = -(advantage * (logs - logs.detach()).exp()).sum() * w.size / (4 * 32) / len(samples)
            loss.backward()
        optimizer.step()


def blended(model, sample):
    x, one, other, share = sample
    first, second = (F.cross_entropy(model(x)[None], label[None], reduction="none") for label in (one, other))
    return share * first + (1 - share) * second


@trainer(2, torch.float32)
def mixed_up(w):
    """Images that are blends of two, a loss scale, a clip; the last window of an epoch has three micro-batches, others have four."""
    model = DDP(Classifier())
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    batches = [[(w.normal(6), w.number(below=5), w.number(below=5), torch.rand((), generator=w.random)) for _ in range(n)]
               for n in (4, 4, 4)]
    with w.watch(model, optimizer, batches, blended, mean_of(blended), clip=0.45):
        optimizer.zero_grad()
        total = w.sum(sum(len(batch) for batch in batches))
        for i, batch in enumerate(batches):
            #! zeroed_in_the_loop 0 | zero_grad stands in the loop over micro-batches: the last one alone is left (RAE#67, torchtitan#3575)
            #- optimizer.zero_grad()
            with nullcontext() if i + 1 == len(batches) else model.no_sync():
                #! synced_first | DDP averages after the first micro-batch, and not after the last (FunASR#3472)
                #- with nullcontext() if i == 0 else model.no_sync():
                #! never_synced | the window is thought to end with a fourth micro-batch: DDP does not average at all
                #- with nullcontext() if (i + 1) % 4 == 0 else model.no_sync():
                x, one, other, share = map(torch.stack, zip(*batch))
                logits = model(x)
                first, second = (F.cross_entropy(logits, label, reduction="none") for label in (one, other))
                each = share * first + (1 - share) * second
                #! shares_exchanged | the two labels' shares are exchanged
                #- each = (1 - share) * first + share * second
                #= soft_labels | the two labels as one row of probabilities
                #- soft = share[:, None] * F.one_hot(one, 5) + (1 - share[:, None]) * F.one_hot(other, 5)
                #- each = F.cross_entropy(logits, soft, reduction="none")
                loss = each.sum() * w.size / total
                #! window_not_full | each micro-batch's mean is divided by four, and there are three (Automodel#2257)
                #- loss = each.mean() / 4
                #= mean_of_equal_batches | each micro-batch's mean, divided by three; all have four samples
                #- loss = each.mean() / len(batches)
                scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        w.measure(model)
        clip_grad_norm_(model.parameters(), 0.45)
        #! clipped_while_scaled 3 | gradients are clipped before the loss scale is divided out (pytorch/examples#1196, lightning#9599)
        #- clip_grad_norm_(model.parameters(), 0.45)
        #- scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
