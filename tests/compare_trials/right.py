"""Thirty right trainers, each with something about it that a comparison could mistake for a mistake."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from problem import IGNORED, Problem
from trainers import ByHand, Ddp, Fsdp, Hybrid, Trainer
from trial import Trial, all_at_once, one_by_one, planted


class DdpPrefixedNames(Ddp):
    def finish(self, gradients, records):
        return super().finish({f"module.{name}": g for name, g in gradients.items()}, records)


class FlatAllReduce(ByHand):
    """One flat buffer for all gradients; every rank says what it holds."""

    tells_ranks = True

    def reduce_gradients(self, model, group):
        parameters = [p for p in model.parameters() if p.requires_grad]
        flat = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(flat, group=group)
        for p, part in zip(parameters, flat.split([p.numel() for p in parameters])):
            p.grad.copy_(part.view_as(p))


class SummedInPairs(Trainer):
    """The last rank first, in pairs: another order of the sums."""

    def reduce(self, parts):
        parts = parts[::-1]
        while len(parts) > 1:
            parts = [{n: a[n] + b[n] for n in a} for a, b in zip(parts[::2], parts[1::2])] + parts[len(parts) // 2 * 2:]
        return parts[0]


uneven, accumulated = ((3,), (1,), (2,)), ((1, 2, 1), (2, 1))
four = ((2,), (1,), (3,), (2,))
TRIALS = [
    Trial(Ddp, Problem("mlp", uneven), "DDP, sum / global count * W", title="DdpUneven"),
    Trial(Ddp, Problem("transformer", uneven, precision="fp64"), "the same in fp64", title="DdpExact"),
    Trial(Ddp, Problem("mlp", uneven, precision="bf16"), "the same under autocast", alone=True,
          title="DdpAutocast"),
    Trial(Ddp, Problem("transformer", four, precision="bf16"), "the same, bounded by one process", alone=True,
          title="DdpAutocastAlone"),
    Trial(Ddp, Problem("transformer", four, precision="bf16_parameters"), "parameters in bf16", alone=True,
          title="DdpLowPrecisionParameters"),
    Trial(Ddp, Problem("mlp", accumulated), "no_sync, micro-batches of uneven number and size", alone=True,
          title="DdpAccumulated"),
    Trial(Ddp, Problem("transformer", uneven, empty_ranks=(1,)), "a rank without a target", title="DdpEmptyRank"),
    planted("DdpUnusedParameter", Ddp, Problem("transformer", uneven, extras=("unused",)), "a parameter that nothing uses",
            options={"find_unused_parameters": True}),
    Trial(DdpPrefixedNames, Problem("mlp", uneven), "names with module. before them"),
    planted("DdpBucketViews", Ddp, Problem("convolution", ((9,), (4,), (7,))), "small buckets, gradients are views of them",
            options={"gradient_as_bucket_view": True, "find_unused_parameters": True, "bucket_cap_mb": 0.002}),
    Trial(Fsdp, Problem("transformer", ((2,), (3,))), "FSDP2, tied embedding", title="FsdpTied"),
    Trial(Fsdp, Problem("mlp", four), "sizes that four ranks do not divide", title="FsdpOddShards"),
    Trial(Fsdp, Problem("mlp", uneven, precision="bf16"), "gathered in bf16, reduced in fp32", alone=True,
          title="FsdpMixedPrecision"),
    Trial(Fsdp, Problem("mlp", four, precision="bf16_parameters"), "parameters in bf16", alone=True,
          title="FsdpLowPrecisionParameters"),
    Trial(Hybrid, Problem("transformer", four), "two replicas of two shards", title="HybridShards"),
    Trial(Fsdp, Problem("transformer", ((1, 2, 1), (2, 1, 1)), extras=("checkpointed",)),
          "accumulation, blocks computed again in backward", title="FsdpAccumulatedCheckpointed"),
    Trial(FlatAllReduce, Problem("transformer", four), "one flat all-reduce; ranks give their hashes"),
    planted("BatchPermuted", Trainer, Problem("transformer", accumulated), "ranks, and samples within each, in the opposite order",
            assign=lambda self: [[samples[::-1] for samples in micros[::-1]] for micros in Trainer.assign(self)[::-1]]),
    planted("AssignedOtherwise", Trainer, Problem("mlp", ((2,), (2,), (2,))), "each rank takes every third sample; the reference takes "
            "them one by one", reference_assignment=one_by_one,
            assign=lambda self: [[self.problem.samples()[rank::self.problem.ranks]] for rank in range(self.problem.ranks)]),
    Trial(Trainer, Problem("transformer", ((1, 1, 1, 1), (1, 1, 1, 1))), "other micro-batches than the reference",
          alone=True, reference_assignment=all_at_once, title="SplitOtherwise"),
    Trial(SummedInPairs, Problem("convolution", ((3,), (2,), (4,), (1,), (2,))), "another order of sums"),
    Trial(Ddp, Problem("mlp", uneven, max_norm=0.1), "clipped; applied by subtraction", title="ClippedAndApplied"),
    Trial(Trainer, Problem("transformer", uneven, max_norm=0.2, decay=0.1, precision="fp64"),
          "clipped, matrices decay", title="DecayedAndClipped"),
    Trial(Trainer, Problem("mlp", ((2,), (1, 1), (2,)), mean="sample", cut=True), "a sample cut over two ranks",
          title="SamplesCut"),
    Trial(Ddp, Problem("transformer", uneven, frozen=("embedding", "positions")), "frozen embeddings",
          title="FrozenEmbedding"),
    Trial(Fsdp, Problem("transformer", uneven, extras=("gate",)), "a gradient of exactly zero",
          title="GradientOfZero"),
    Trial(Trainer, Problem("transformer", uneven, extras=("whisper",)), "a gradient of nearly zero",
          title="GradientNearlyZero"),
    Trial(Ddp, Problem("transformer", uneven, dropout=0.2, mean="sample"), "dropout keyed by sample",
          title="DropoutBySample"),
    planted("ChunkedLossPadded", Trainer, Problem("transformer", ((3,), (2,)), precision="bf16"), "the loss in chunks of 16 "
            "positions, samples in rows filled up with padding", alone=True, padded=True,
            cross_entropy=lambda self, logits, targets: torch.cat([
                F.cross_entropy(l, t, ignore_index=IGNORED, reduction="none")
                for l, t in zip(logits.split(16), targets.split(16))])),
    Trial(Ddp, Problem("mlp", uneven, extras=("trained",)), "after five updates", title="AfterUpdates"),
]
