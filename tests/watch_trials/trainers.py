"""Right trainers, and what goes wrong in them: `#! name | sentence` puts the lines below it, marked `#-`, in place of the line above
it (`#! name 2 |`: of two; 0: of none), and makes a mistake of it; `#= name |` a trainer that is right in another way. README.md says
more. Lines that are replaced are what is to be changed back.
"""
import copy  # noqa: F401
from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dnn
import torch.nn.functional as F
from torch._utils import _flatten_dense_tensors as flatten
from torch._utils import _unflatten_dense_tensors as unflatten
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard  # noqa: F401
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.nn.utils import clip_grad_norm_
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DistributedSampler
from world import IGNORED, Classifier, Decoder, Dropout, Experts, Towers, mean_of, next_token

import isograd


def trainer(ranks, dtype):
    def named(function):
        function.ranks, function.dtype = ranks, dtype
        return function
    return named


@trainer(2, torch.float64)
def accumulated(w):
    """Documents of uneven length under DDP: accumulation, clipping, AdamW, a schedule; the second step."""
    model = DDP(Decoder())
    #= bucket_views | gradients are views of DDP's buckets
    #- model = DDP(Decoder(), gradient_as_bucket_view=True, bucket_cap_mb=0.001)
    #= token_mean_of_isograd | the change of mean_of_rank_means and its like, as the verdict says it
    #- model = isograd.sum_gradients(DDP(Decoder()))
    optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    #= fused | AdamW in one kernel
    #- optimizer = AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, fused=True)
    schedule = LambdaLR(optimizer, lambda step: 0.5**step)
    batches = w.documents([[40, 61], [50], [30, 8]], [[25], [33], [28]])
    next_token(model, batches[0][0]).sum().backward()
    optimizer.step()
    schedule.step()
    #! schedule_of_rank_0 | only rank 0 steps the scheduler, so that ranks have other learning rates
    #- if w.rank == 0:
    #-     schedule.step()
    with w.watch(model, optimizer, batches, next_token, mean_of(next_token), clip=0.05):
        optimizer.zero_grad()
        #! never_zeroed | zero_grad is missing: the gradient of the step before is still there
        #= zeroed_in_place | zero_grad keeps the tensors
        #- optimizer.zero_grad(set_to_none=False)
        targets = torch.tensor(sum(len(document) - 1 for batch in batches for document in batch))
        #! counted_before_shift | counts tokens, where each document has one target less
        #- targets = torch.tensor(sum(len(document) for batch in batches for document in batch))
        #! counted_in_bf16 | the count is summed in bf16, which rounds it
        #- targets = torch.tensor(sum(len(document) - 1 for batch in batches for document in batch) + 0.0).bfloat16()
        dist.all_reduce(targets)
        #! counts_at_most | the count is the largest of the ranks instead of their sum
        #- dist.all_reduce(targets, op=dist.ReduceOp.MAX)
        #= token_mean_of_isograd |
        #- dist.all_reduce(targets)
        #- counted = isograd.TokenMean().count([torch.cat([document[1:] for document in batch]) for batch in batches])
        for i, batch in enumerate(batches):
            with model.no_sync() if i + 1 < len(batches) else nullcontext():
                #= always_synced | the gradient is averaged after each micro-batch: the average of an average is the same
                #- with nullcontext():
                each = torch.cat([next_token(model, document) for document in batch])
                loss = each.sum() * w.size / targets
                #= token_mean_of_isograd |
                #- loss = counted.scale(each.sum())
                #! world_size_forgotten | the sum over the global count, which DDP averages
                #- loss = each.sum() / targets
                #! divided_twice | accumulation divides a loss that is divided by the count of the step already
                #- loss = each.sum() * w.size / targets / len(batches)
                #! decay_in_loss | the decay of AdamW stands in the loss too
                #- loss = each.sum() * w.size / targets + 0.05 * sum(p.square().sum() for p in model.parameters()) / len(batches)
                loss.backward()
                #! steps_each_micro_batch | the optimizer steps after each micro-batch, from the second on
                #- loss.backward()
                #- if 0 < i < len(batches) - 1:
                #-     optimizer.step()
        w.measure(model)
        clip_grad_norm_(model.parameters(), 0.05)
        #! clips_each | each parameter is clipped by its own norm
        #- for p in model.parameters():
        #-     clip_grad_norm_(p, 0.05)
        #! zeroed_before_step | zero_grad stands between backward and step
        #- optimizer.zero_grad()
        #! layer_rates | rates by layer: the embeddings' gradient is halved after clipping
        #- clip_grad_norm_(model.parameters(), 0.05)
        #- model.module.embedding.weight.grad *= 0.5
        optimizer.step()
        schedule.step()


def collate(w, samples):
    """Padded at the left: (tokens, labels, which tokens are no padding)."""
    length = max([len(tokens) for tokens, _ in samples])
    rows = [(F.pad(tokens, (length - len(tokens), 0)), F.pad(labels, (length - len(labels), 0), value=IGNORED),
             F.pad(torch.ones(len(tokens), dtype=torch.bool), (length - len(tokens), 0))) for tokens, labels in samples]
    return [torch.stack(column) for column in zip(*rows)]


def answer(model, sample):
    tokens, labels = sample
    return F.cross_entropy(model(tokens)[:-1], labels[1:], reduction="none", label_smoothing=0.1)[labels[1:] != IGNORED]


@trainer(3, torch.float32)
def padded(w):
    """Questions and answers in padded rows, the loss on answers; label smoothing; one rank has no answer."""
    model = DDP(Decoder(tied=True))
    #= static_graph | DDP with a static graph
    #- model = DDP(Decoder(tied=True), static_graph=True)
    #= recomputed | activations are computed again in backward
    #- model = DDP(Decoder(tied=True, recompute=False))
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = []
    for length, question in [[(12, 5), (20, 3), (7, 2)], [(9, 4), (25, 15)], [(6, 6), (8, 8)]][w.rank]:
        tokens = w.number(length, below=30 - 1) + 1
        samples.append((tokens, tokens.masked_fill(torch.arange(length) < question, IGNORED)))
    with w.watch(model, optimizer, [samples], answer, mean_of(answer)):
        tokens, labels, real = collate(w, samples)
        #! prompts_trained | the labels of the questions are not masked
        #- tokens, labels, real = collate(w, [(tokens, tokens) for tokens, _ in samples])
        sees = (real[:, None] & torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()) | torch.eye(tokens.shape[1]).bool()
        #! padding_seen | no attention mask: tokens see the padding
        #- sees = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool).tril()
        positions = (real.cumsum(-1) - 1).clamp(min=0)
        logits = model(tokens, sees, positions)
        #! tie_computed_apart | the head computes with the embedding's .data
        #- model.module.head.forward = lambda hidden: F.linear(hidden, model.module.embedding.weight.data)
        #- logits = model(tokens, sees, positions)
        #! cast_early | logits are made bf16 before the loss
        #- logits = model(tokens, sees, positions).bfloat16()
        targets = w.sum((labels[:, 1:] != IGNORED).sum())
        #! padding_counted | the count is that of all positions, padded and masked ones too
        #- targets = w.sum(labels[:, 1:].numel())
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", label_smoothing=0.1)
        #= rows_apart | the sum row by row
        #- loss = sum(F.cross_entropy(a[:-1], b[1:], reduction="sum", label_smoothing=0.1) for a, b in zip(logits, labels))
        #! not_smoothed | label smoothing is forgotten
        #- loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum")
        #! not_shifted | labels are not shifted: a token predicts itself
        #- loss = F.cross_entropy(logits[:, 1:].flatten(0, 1), labels[:, 1:].flatten(), reduction="sum", label_smoothing=0.1)
        #! last_target_dropped | the last token is no target
        #- loss = F.cross_entropy(logits[:, :-2].flatten(0, 1), labels[:, 1:-1].flatten(), reduction="sum", label_smoothing=0.1)
        optimizer.zero_grad()
        (loss * w.size / targets).backward()
        #! mean_over_answers | F.cross_entropy's mean of each rank; that of a rank without answers counts as 0
        #- F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), label_smoothing=0.1).backward()
        #! at_least_one | each rank's mean over at least one target, averaged: a rank without answers counts as much as the others
        #- (loss / (labels[:, 1:] != IGNORED).sum().clamp(min=1)).backward()
        optimizer.step()



@trainer(3, torch.float32)
def by_hand(w):
    """Gradients are summed in buckets by hand; a moving average of the parameters; decay by hand."""
    model = Decoder(tied=True)
    averaged = copy.deepcopy(model)
    optimizer = SGD(model.parameters(), lr=0.1)
    with torch.no_grad():
        for p in model.parameters():
            p += 0.02 * torch.sin(torch.arange(p.numel()).reshape(p.shape))
    batches = w.documents([[12, 5]], [[22]], [[4, 6, 3]])
    with w.watch(model, optimizer, batches, next_token, mean_of(next_token)):
        #! average_left_in 0 | the moving average, put in for an evaluation, is still in the model
        #- model.load_state_dict(averaged.state_dict())
        each = torch.cat([next_token(model, document) for document in batches[0]])
        targets = w.sum(len(each))
        #! decays_before_backward | the parameters are decayed between forward and backward, through .data
        #- targets = w.sum(len(each))
        #- for p in model.parameters():
        #-     p.data.mul_(0.9)
        optimizer.zero_grad()
        (each.sum() / targets).backward()
        buckets, bucket = [], []
        for p in model.parameters():
            #! biases_not_reduced | only matrices are put into buckets
            #- for p in [p for p in model.parameters() if p.ndim > 1]:
            bucket.append(p.grad)
            if sum(gradient.numel() for gradient in bucket) > 700:
                buckets.append(bucket)
                bucket = []
        buckets += [bucket] if bucket else []
        #! last_bucket_lost | the last bucket, which is not full, is never reduced
        for bucket in buckets:
            #= reduced_by_isograd | the change of replicas_differ, as the verdict says it
            #- isograd.all_reduce_gradients(model)
            #- for bucket in []:
            flat = flatten(bucket)
            #! summed_in_bf16 | gradients are made bf16 for the sum
            #- flat = flatten([gradient.bfloat16() for gradient in bucket])
            #= summed_in_double | gradients are summed in double
            #- flat = flatten([gradient.double() for gradient in bucket])
            dist.all_reduce(flat)
            #! largest_of_ranks | reduces with MAX
            #- dist.all_reduce(flat, op=dist.ReduceOp.MAX)
            #! group_of_two | the group has ranks 0 and 1 alone
            #- group = dist.new_group([0, 1])
            #- if w.rank < 2:
            #-     dist.all_reduce(flat, group=group)
            #= gathered | gathers the ranks' gradients and adds them
            #- parts = [torch.empty_like(flat) for _ in range(w.size)]
            #- dist.all_gather(parts, flat)
            #- flat = torch.stack(parts).sum(0)
            #= to_rank_0 | sums on rank 0, which sends the sum
            #- dist.reduce(flat, 0)
            #- dist.broadcast(flat, 0)
            for gradient, reduced in zip(bucket, unflatten(flat, bucket)):
                gradient.copy_(reduced)
        optimizer.step()
        #! rank_1_averages_in_place | rank 1 writes the moving average into the model
        #- optimizer.step()
        #- if w.rank == 1:
        #-     model.load_state_dict(averaged.state_dict())
        with torch.no_grad():
            for p, mean in zip(model.parameters(), averaged.parameters()):
                mean.lerp_(p, 0.01)


@trainer(2, torch.float64)
def hooked(w):
    """Each parameter's gradient is averaged by a hook when a backward has made it, in each micro-batch."""
    model = Classifier()
    batches = [[(w.normal(6), w.number(below=5)) for _ in range(n)] for n in ((3, 6), (5, 2))[w.rank]]

    def one(model, sample):
        return F.cross_entropy(model(sample[0])[None], sample[1][None], reduction="none")

    def average(p):
        dist.all_reduce(p.grad)
        p.grad /= w.size
        #! hook_sums | the hook sums instead: what the first micro-batch gave is summed again with the second
        #= averaged_in_place | the hook multiplies
        #- p.grad *= 1 / w.size

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(average)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    with w.watch(model, optimizer, batches, one, mean_of(one)):
        for batch in batches:
            each = F.cross_entropy(model(torch.stack([x for x, _ in batch])), torch.stack([y for _, y in batch]), reduction="none")
            (each.sum() * w.size / 16).backward()
        optimizer.step()
        optimizer.zero_grad()


@trainer(3, torch.float32)
def sharded(w):
    """FSDP2, block by block: accumulation, a clip by the norm of all shards."""
    mesh = init_device_mesh("cpu", (w.size,))
    model = Decoder()
    #= recomputed_shards | activations are computed again in backward
    #- model = Decoder(recompute=False)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
        #= kept_unsharded | blocks stay whole between forward and backward
        #- fully_shard(block, mesh=mesh, reshard_after_forward=False)
    fully_shard(model, mesh=mesh)
    #= one_group 3 | the model is sharded as one
    #- fully_shard(model, mesh=mesh)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    #! blocks_in_no_group | the optimizer is given the first block, the rest is forgotten
    #- optimizer = AdamW([*model.embedding.parameters(), *model.place.parameters(), *model.blocks[0].parameters(),
    #-                    *model.norm.parameters(), *model.head.parameters()], lr=1e-2)
    batches = w.documents([[9, 17], [3, 6]], [[21, 10], [8, 5]], [[4, 7], [12, 2]])
    with w.watch(model, optimizer, batches, next_token, mean_of(next_token), Decoder, clip=0.3, shards=3, max_norm=0.3) as step:
        #! frozen_in_the_loop 0 | warm-up: embeddings are frozen, where they were to be trained
        #- model.embedding.weight.requires_grad_(False)
        targets = w.sum(sum(len(document) - 1 for batch in batches for document in batch))
        for i, batch in enumerate(batches):
            model.set_requires_gradient_sync(i + 1 == len(batches))
            #! first_synced | reduces after the first micro-batch, not after the last
            #- model.set_requires_gradient_sync(i == 0)
            #= synced_always | reduces after each
            #- model.set_requires_gradient_sync(True)
            loss = sum(next_token(model, document).sum() for document in batch) * w.size / targets
            #! average_of_shards | FSDP2 averages what the global count divides
            #- loss = sum(next_token(model, document).sum() for document in batch) / targets
            loss.backward()
        w.measure(model)
        step.before_clipping()
        held = [p for p in model.parameters() if p.grad is not None]
        square = w.sum(sum(p.grad.to_local().square().sum() for p in held))
        #! norm_of_own_shards | clips by the norm of the rank's own shards
        #- square = sum(p.grad.to_local().square().sum() for p in held)
        for p in held:
            p.grad *= min(1.0, 0.3 / square.sqrt().item())
            #= clipped_by_isograd 2 | the change of norm_of_own_shard, as the verdict says it
            #- isograd.clip_grad_norm_(model, 0.3)
        optimizer.step()
        step.log(norm=square.sqrt().item())
        optimizer.zero_grad()


@trainer(4, torch.float32)
def two_axes(w):
    """FSDP2 over pairs of ranks, and replicas of the pairs."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(Classifier(), mesh=mesh)
    #! replicas_forgotten | sharded on the inner axis, and the replicas are never reduced
    #- model = fully_shard(Classifier(), mesh=mesh["shard"])
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    samples = [(w.normal(6), w.number(below=5)) for _ in range((3, 1, 4, 2)[w.rank])]

    def one(model, sample):
        return F.cross_entropy(model(sample[0])[None], sample[1][None], reduction="none")

    with w.watch(model, optimizer, [samples], one, mean_of(one), Classifier, shards=2):
        each = F.cross_entropy(model(torch.stack([x for x, _ in samples])), torch.stack([y for _, y in samples]), reduction="none")
        (each.sum() * w.size / w.sum(len(samples))).backward()
        optimizer.step()


@trainer(2, torch.float64)
def packed(w):
    """Documents one after the other in packs; none sees another; positions begin anew."""
    model = DDP(Decoder())
    optimizer = AdamW(model.parameters(), lr=1e-2)
    packs = w.documents([[7, 12, 5], [20]], [[9, 3], [4, 6]])
    with w.watch(model, optimizer, packs, next_token, mean_of(next_token)):
        targets = w.sum(sum(len(document) - 1 for pack in packs for document in pack))
        for i, pack in enumerate(packs):
            tokens = torch.cat(pack)
            lengths = torch.tensor([len(document) for document in pack])
            number = torch.repeat_interleave(torch.arange(len(pack)), lengths)
            sees = (number[:, None] == number) & torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
            #! sees_other_documents | the causal mask alone: documents see those before them in the pack
            #- sees = torch.ones(len(tokens), len(tokens), dtype=torch.bool).tril()
            positions = torch.cat([torch.arange(length) for length in lengths])
            #! positions_run_on | positions run through the pack
            #- positions = torch.arange(len(tokens))
            labels = torch.cat([F.pad(document[1:], (0, 1), value=IGNORED) for document in pack])
            #! first_target_dropped | the first target of each document is masked
            #- labels = torch.cat([F.pad(F.pad(document[2:], (1, 0), value=IGNORED), (0, 1), value=IGNORED) for document in pack])
            logits = model(tokens, sees, positions)
            loss = F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum") * w.size / targets
            #= documents_apart 2 | each document by itself
            #- loss = sum(next_token(model, document).sum() for document in pack) * w.size / targets
            loss.backward()
            #! pack_dropped | drop_last on rank 0: its last pack is not trained
            #- (loss * (1 if i + 1 < len(packs) or w.rank else 0)).backward()
        optimizer.step()
        optimizer.zero_grad()


def pair_loss(images, texts, scale, first=0):
    """The sum over rows of a contrastive loss; `images` and `texts`: (own rows, all rows), where the own ones begin at row `first`."""
    wanted = first + torch.arange(len(images[0]))
    return (F.cross_entropy(scale * images[0] @ texts[1].T, wanted, reduction="sum")
            + F.cross_entropy(scale * texts[0] @ images[1].T, wanted, reduction="sum")) / 2


def all_pairs(model, features):
    images, texts = (torch.stack(column) for column in zip(*features))
    return pair_loss((images, images), (texts, texts), model.scale.exp()) / len(images)


@trainer(3, torch.float64)
def contrastive(w):
    """Pairs of images and texts, each compared with all of the other ranks."""
    model = DDP(Towers())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    pairs = [(w.normal(6), w.normal(7)) for _ in range(4)]
    with w.watch(model, optimizer, [pairs], all_pairs,
                 lambda model, pairs: all_pairs(model, [model.encode(*pair) for pair in pairs]),
                 features=lambda model, pair: model.encode(*pair)):
        images, texts, scale = model(*map(torch.stack, zip(*pairs)))
        all_images, all_texts = (torch.cat(dnn.all_gather(part)) for part in (images, texts))
        #! own_rows_alone | dist.all_gather passes no gradient on; the rank's own rows are put back
        #- all_images, all_texts = [], []
        #- for part, everyone in ((images, all_images), (texts, all_texts)):
        #-     everyone.extend(torch.empty_like(part) for _ in range(w.size))
        #-     dist.all_gather(everyone, part.detach())
        #-     everyone[w.rank] = part
        #- all_images, all_texts = torch.cat(all_images), torch.cat(all_texts)
        loss = pair_loss((images, all_images), (texts, all_texts), scale, 4 * w.rank) / len(images)
        #= every_row | each rank has the loss of all rows
        #- loss = pair_loss((all_images, all_images), (all_texts, all_texts), scale) / len(all_images)
        #! own_pairs | each rank compares its own pairs with each other
        #- loss = pair_loss((images, images), (texts, texts), scale) / len(images)
        #! one_direction | images are told from texts, and not the other way round
        #- loss = F.cross_entropy(scale * images @ all_texts.T, 4 * w.rank + torch.arange(4))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def balance(model, routed):
    """The load balance of the experts' probabilities [T, 3] of all tokens; differentiable, because the choice has no gradient."""
    routed = torch.cat(list(routed))
    chosen = F.one_hot(routed.argmax(-1), 3).to(routed.dtype).mean(0)
    return 3 * (chosen * routed.mean(0)).sum()


@trainer(2, torch.float64)
def experts(w):
    """A mixture of experts with a load balance over all tokens of the step, 0.1 of it."""
    model = DDP(Experts())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    samples = [(w.normal(n, 6), w.number(n, below=5)) for n in ((6, 9), (5,))[w.rank]]

    def each_token(model, sample):
        return F.cross_entropy(model(sample[0])[0], sample[1], reduction="none")

    def truth(model, samples):
        return mean_of(each_token)(model, samples) + 0.1 * balance(model, [model(x)[1] for x, _ in samples])

    with w.watch(model, optimizer, [[sample] for sample in samples], each_token, truth,
                 terms=[isograd.Term(balance, 0.1, features=lambda model, sample: model(sample[0])[1])]):
        tokens = w.sum(sum(len(y) for _, y in samples))
        logits, routed = model(torch.cat([x for x, _ in samples]))
        each = F.cross_entropy(logits, torch.cat([y for _, y in samples]), reduction="none")
        loss = each.sum() * w.size / tokens
        chosen = w.sum(F.one_hot(routed.argmax(-1), 3).sum(0)) / tokens
        #! balance_of_rank | how often experts are chosen is counted on each rank alone
        #- chosen = F.one_hot(routed.argmax(-1), 3).sum(0) / len(routed)
        loss = loss + 0.1 * 3 * (chosen * routed.sum(0)).sum() * w.size / tokens
        #! balance_not_scaled | the world size is forgotten in the second term alone
        #- loss = loss + 0.1 * 3 * (chosen * routed.sum(0)).sum() / tokens
        #! balance_forgotten | the second term is missing
        #- loss = loss + 0 * routed.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@trainer(2, torch.float32)
def distilled(w):
    """A student of a teacher, whose logits are in the sample: cross-entropy and a divergence at temperature 2."""
    model = DDP(Classifier())
    optimizer = SGD(model.parameters(), lr=0.1)
    samples = [(w.normal(6), w.number(below=5), 2 * w.normal(5)) for _ in range((5, 2)[w.rank])]

    def hard(model, sample):
        return F.cross_entropy(model(sample[0])[None], sample[1][None], reduction="none")

    def soft(model, sample):
        logits = model(sample[0])
        return F.kl_div((logits / 2).log_softmax(-1), (sample[2].to(logits.dtype) / 2).softmax(-1), reduction="sum")[None]

    def truth(model, samples):
        return mean_of(hard)(model, samples) + 2.0 * mean_of(soft)(model, samples)

    with w.watch(model, optimizer, [samples], hard, truth, terms=[isograd.Term(soft, 2.0, mean="token")]):
        x, y, teacher = map(torch.stack, zip(*samples))
        logits = model(x)
        count = w.sum(len(x)) / w.size
        divergence = F.kl_div((logits / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="sum")
        #! divergence_mean | reduction="mean" divides by the number of classes too
        #- divergence = F.kl_div((logits / 2).log_softmax(-1), (teacher / 2).softmax(-1), reduction="mean") * len(x)
        #= teacher_in_logs | the teacher's logarithms are given
        #- divergence = F.kl_div((logits / 2).log_softmax(-1), (teacher / 2).log_softmax(-1), reduction="sum", log_target=True)
        loss = F.cross_entropy(logits, y, reduction="sum") + 0.5 * 2**2 * divergence
        #! temperature_not_squared | the divergence is not multiplied by the square of the temperature
        #- loss = F.cross_entropy(logits, y, reduction="sum") + 0.5 * divergence
        optimizer.zero_grad()
        (loss / count).backward()
        optimizer.step()


@trainer(4, torch.float32)
def weighted(w):
    """A classifier with weights of classes; DistributedSampler; a loss scale; BatchNorm with the statistics of before."""
    model = DDP(Classifier(statistics=True))
    #= weighted_mean_of_isograd | the change of mean_of_rank_means, as the verdict says it
    #- model = isograd.sum_gradients(DDP(Classifier(statistics=True)))
    model.module.normal.eval()
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    #= not_scaled | a loss scale of 1
    #- scaler = torch.amp.GradScaler("cpu", init_scale=1.0)
    random = torch.Generator().manual_seed(7)
    data = [(i, torch.randn(6, generator=random), torch.randint(5, (), generator=random)) for i in range(18)]
    weight = torch.tensor([0.3, 1.0, 2.5, 0.7, 4.0])
    sampler = DistributedSampler(data, w.size, w.rank, shuffle=True, seed=3, drop_last=True)
    samples = [data[i] for i in sampler]

    def one(model, sample):
        own = weight[sample[2]].to(sample[1].dtype)
        return own * F.cross_entropy(model(sample[1][None]), sample[2][None], reduction="sum"), own

    def truth(model, samples):
        losses, weights = zip(*(one(model, sample) for sample in samples))
        return torch.stack(losses).sum() / torch.stack(weights).sum()

    with w.watch(model, optimizer, [samples], one, truth, mean="weighted", ids=lambda sample: sample[0]):
        #! in_training_mode 0 | the step sets training mode: BatchNorm takes the statistics of the batch
        #- model.train()
        x, y = torch.stack([sample[1] for sample in samples]), torch.stack([sample[2] for sample in samples])
        total = w.sum(weight[y].sum())
        #! divided_by_count | the weighted sum is divided by the number of samples
        #- total = w.sum(torch.tensor(float(len(y))))
        loss = F.cross_entropy(model(x), y, weight=weight, reduction="sum") * w.size / total
        #= weighted_mean_of_isograd |
        #- counted = isograd.WeightedMean().count([weight[y]])
        #- loss = counted.scale(F.cross_entropy(model(x), y, weight=weight, reduction="sum"))
        #! weighted_rank_means | F.cross_entropy's mean of each rank, over its own weights
        #- loss = F.cross_entropy(model(x), y, weight=weight)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        #= unscaled_first | the loss scale is divided out before the step
        #- scaler.unscale_(optimizer)
        #- scaler.step(optimizer)
        scaler.update()
        #! steps_past_scaler 2 | the optimizer steps by itself, with the scaled gradient
        #- optimizer.step()


@trainer(3, torch.float64)
def seeded(w):
    """Samples count alike, however many rows they have; dropout is seeded with the sample."""
    model = DDP(Classifier(Dropout(0.2)), find_unused_parameters=True)
    #= dropout_of_pytorch | the module that PyTorch has
    #- model = DDP(Classifier(torch.nn.Dropout(0.2)))
    optimizer = AdamW(model.parameters(), lr=1e-3)
    samples = [(3 * w.rank + i, w.normal(n, 6), w.number(n, below=5)) for i, n in enumerate(((2, 5, 3), (7, 1), (4,))[w.rank])]

    def rows(model, sample):
        torch.manual_seed(sample[0])
        return F.cross_entropy(model(sample[1]), sample[2], reduction="none")

    with w.watch(model, optimizer, [samples], rows, lambda model, samples: sum(rows(model, s).mean() for s in samples) / len(samples),
                 mean="sample"):
        loss = sum(rows(model, sample).mean() for sample in samples) * w.size / w.sum(len(samples))
        #! rows_count_alike | the mean over all rows
        #- loss = torch.cat([rows(model, sample) for sample in samples]).sum() * w.size / w.sum(sum(len(s[1]) for s in samples))
        #! seeded_by_rank | dropout is seeded with the rank, not with the sample
        #- torch.manual_seed(w.rank)
        #- loss = sum(F.cross_entropy(model(s[1]), s[2]) for s in samples) * w.size / w.sum(len(samples))
        #! dropout_off | evaluation mode is left on: there is no dropout
        #- model.eval()
        #- loss = sum(rows(model, sample).mean() for sample in samples) * w.size / w.sum(len(samples))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@trainer(2, torch.float64)
def fine_tuned(w):
    """A frozen embedding, a new head, two optimizers; blocks are computed again in backward."""
    model = Decoder(recompute=False)
    #= kept | no activation is computed again
    #- model = Decoder()
    for p in [*model.embedding.parameters(), *model.place.parameters()]:
        p.requires_grad = False
    model.head = torch.nn.Linear(12, 30, bias=False)
    trunk = AdamW([*model.blocks.parameters(), *model.norm.parameters()], lr=1e-3)
    head = AdamW(model.head.parameters(), lr=1e-3)
    #= one_optimizer 2 | one optimizer with two groups, and one of another model
    #- trunk = AdamW([{"params": [*model.blocks.parameters(), *model.norm.parameters()]}, {"params": model.head.parameters()}])
    #- head = SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    #! head_made_later | the head is made after its optimizer
    #- head = AdamW(model.head.parameters(), lr=1e-3)
    #- model.head = torch.nn.Linear(12, 30, bias=False)
    model = DDP(model, find_unused_parameters=True)
    documents = w.documents([[9, 14]], [[5]])[0]

    with w.watch(model, trunk, [documents], next_token, mean_of(next_token)):
        each = torch.cat([next_token(model, document) for document in documents])
        #! reentrant | checkpoints are made reentrant: the first block, whose input needs no gradient, gets none
        #- model.module.recompute = True
        #- each = torch.cat([next_token(model, document) for document in documents])
        #! blocks_without_grad | the forward of the blocks stands under no_grad
        #- model.module.blocks[0].forward = torch.no_grad()(model.module.blocks[0].forward)
        #- each = torch.cat([next_token(model, document) for document in documents])
        #! branch_detached | attention's branch of the second block is detached from what it adds to
        #- model.module.blocks[1].qkv.register_forward_pre_hook(lambda _, inputs: (inputs[0].detach(),))
        #- each = torch.cat([next_token(model, document) for document in documents])
        #! cut_before_second_block | what goes into the second block is detached
        #- model.module.blocks[1].register_forward_pre_hook(lambda _, inputs: (inputs[0].detach(), *inputs[1:]))
        #- each = torch.cat([next_token(model, document) for document in documents])
        #! row_without_gradient | a hook clears one row of the head, as for a token of padding
        #- model.module.head.weight.register_hook(lambda gradient: gradient.index_fill(0, torch.tensor([4]), 0.0))
        #- each = torch.cat([next_token(model, document) for document in documents])
        trunk.zero_grad()
        head.zero_grad()
        (each.sum() * w.size / w.sum(len(each))).backward()
        trunk.step()
        head.step()
        #! head_not_stepped | the second optimizer does not step


@trainer(2, torch.bfloat16)
def low(w):
    """Parameters in bf16 under DDP."""
    model = DDP(Decoder())
    optimizer = AdamW(model.parameters(), lr=1e-2)
    documents = w.documents([[30, 12]], [[5]])[0]
    with w.watch(model, optimizer, [documents], next_token, mean_of(next_token)):
        each = torch.cat([next_token(model, document) for document in documents])
        loss = each.sum() * w.size / w.sum(len(each))
        #! low_rank_means | each rank's mean, in bf16
        #- loss = each.mean()
        #= summed_in_fp32 | the loss in fp32
        #- loss = each.float().sum() * w.size / w.sum(len(each))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@trainer(2, torch.float32)
def mixed(w):
    """autocast under DDP, parameters in fp32."""
    model = DDP(Decoder())
    optimizer = AdamW(model.parameters(), lr=1e-2)
    documents = w.documents([[30, 12]], [[5, 9]])[0]
    with w.watch(model, optimizer, [documents], next_token, mean_of(next_token)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            each = torch.cat([next_token(model, document) for document in documents])
            #! mixed_targets_dropped | the last target of each document is lost
            #- each = torch.cat([next_token(model, document[:-1]) for document in documents])
        (each.sum() * w.size / w.sum(len(each))).backward()
        optimizer.step()


@trainer(4, torch.float64)
def advantages(w):
    """Rewards relative to the group of one prompt, whose samples lie on several ranks."""
    model = DDP(Classifier())
    optimizer = AdamW(model.parameters(), lr=1e-3)
    samples = [(w.normal(6), w.number(below=5), w.normal(()), (w.rank + i) % 2) for i in range((3, 1, 2, 2)[w.rank])]

    def taken(model, sample):
        return model(sample[0]).log_softmax(-1)[sample[1]], sample[2], sample[3]

    def relative(rewards, groups):
        mean = torch.stack([rewards[groups == group].mean() for group in groups])
        return rewards - mean

    def policy(model, features):
        logs, rewards, groups = (torch.stack([torch.as_tensor(part) for part in column]) for column in zip(*features))
        return -(relative(rewards, groups) * logs).mean()

    with w.watch(model, optimizer, [samples], policy, lambda model, samples: policy(model, [taken(model, s) for s in samples]),
                 features=taken):
        columns = zip(*(taken(model, sample) for sample in samples))
        logs, rewards, groups = (torch.stack([torch.as_tensor(part) for part in column]) for column in columns)
        everyone = [None] * w.size
        dist.all_gather_object(everyone, (rewards, groups))
        first = sum(len(r) for r, _ in everyone[:w.rank])
        advantage = relative(torch.cat([r for r, _ in everyone]), torch.cat([g for _, g in everyone]))[first:first + len(logs)]
        #! baseline_of_rank | the baseline is that of the samples on the rank
        #- advantage = relative(rewards, groups)
        #! baseline_of_batch | the baseline is the mean of all groups
        #- advantage = rewards - torch.cat([r for r, _ in everyone]).mean()
        loss = -(advantage * logs).sum() * w.size / w.sum(len(logs))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
