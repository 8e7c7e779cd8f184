"""Training steps of PyTorch's DDP and FSDP2 over a backend given by name, for `isograd bench wrapped`.

    python wrapped_step.py EXCHANGE RANKS SIDE BACKEND ddp|fsdp2 SIZE MODULE

Started as turns.py tells. MODULE is the folder of isograd_comm. The sides differ in BACKEND alone. BACKEND "fake" is
PyTorch's backend that does nothing: its step is what the wrapper takes with collectives that take no time. Its numbers
mean nothing, so it gives no losses.
"""
import sys

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import turns

# vocabulary, hidden, heads, feed-forward, layers, tokens of a rank's step
SIZES = {"tiny": (64, 32, 2, 64, 2, 16), "communication": (256, 768, 12, 2048, 6, 64),
         "medium": (256, 512, 8, 1408, 6, 512), "compute": (256, 256, 4, 704, 4, 2048)}
STEPS_PER_TURN = 5


class Block(nn.Module):
    def __init__(self, hidden, heads, feed_forward):
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.RMSNorm(hidden), nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.output = nn.Linear(hidden, hidden, bias=False)
        self.gate = nn.Linear(hidden, feed_forward, bias=False)
        self.up = nn.Linear(hidden, feed_forward, bias=False)
        self.down = nn.Linear(feed_forward, hidden, bias=False)

    def forward(self, x):
        sequences, length, hidden = x.shape
        q, k, v = (part.view(sequences, length, self.heads, -1).transpose(1, 2)
                   for part in self.qkv(self.before_attention(x)).chunk(3, dim=-1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(sequences, length, hidden))
        y = self.before_mlp(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Decoder(nn.Module):
    def __init__(self, vocabulary, hidden, heads, feed_forward, layers):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads, feed_forward) for _ in range(layers))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, vocabulary, bias=False)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def wrap(model, wrapper):
    if wrapper == "ddp":
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    from torch.distributed.fsdp import fully_shard
    for block in model.blocks:
        fully_shard(block)
    return fully_shard(model)


def leave_as_it_is(_, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def run(rank, backend, wrapper, size, module):
    if backend == "isograd":
        sys.path.insert(0, module)
        import isograd_comm  # noqa: F401  (registers the backend)
    real = backend != "fake"
    if real:
        rank.meet(backend)
    else:
        from torch.testing._internal.distributed.fake_pg import FakeStore
        rank.meet(backend, store=FakeStore())
        torch.set_flush_denormal(True)  # what nobody gathered may be any bits
    *shape, tokens = SIZES[size]
    torch.manual_seed(0)
    model = wrap(Decoder(*shape), wrapper)
    if not real and wrapper == "ddp":  # its own way asks for a result, which this backend has not
        model.register_comm_hook(None, leave_as_it_is)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator().manual_seed(rank.rank)

    def step(batch):
        loss = F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss

    for _ in rank.turns():
        seconds, losses = [], []
        for _ in range(STEPS_PER_TURN):
            batch = torch.randint(0, shape[0], (1, tokens + 1), generator=generator)
            dist.barrier()
            spent, loss = turns.timed(lambda batch=batch: step(batch))
            seconds.append(spent)
            if real:
                losses.append(loss.item())
        rank.answer(seconds=seconds, losses=losses)


if __name__ == "__main__":
    turns.main(run)
