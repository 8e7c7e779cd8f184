"""One document over several ranks in PyTorch, the peer of `isograd bench context --peer`.

torch.distributed.tensor.experimental.context_parallel does not run on the CPU (it ends in an
error): it has ring attention for three CUDA kernels alone. Its ring itself, the loops that pass keys and values on and
merge parts by log-sum-exp, takes any kernel; here it is given the CPU's flash attention, over Gloo, with its own
balanced placement (each rank has the r-th and the r-th last of 2R chunks).

Started as turns.py tells. case.json has the shapes, tokens, and attention: true for one layer's attention alone; else
model/ has config.json and model.safetensors.
"""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

import llama_step
import turns

FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


class RingAttention(torch.autograd.Function):
    """Causal, [1, heads, own tokens, head_dim]."""

    @staticmethod
    def forward(context, q, k, v):
        out, lse = ring._templated_ring_attention(dist.group.WORLD, 2, FORWARD, q, k, v, is_causal=True, dropout_p=0.0)
        context.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    def backward(context, grad):
        return ring._templated_ring_attention_backward(dist.group.WORLD, 2, BACKWARD, grad.contiguous(), "grad_out",
                                                       *context.saved_tensors, True, dropout_p=0.0)[:3]


def attend(q, k, v, is_causal, enable_gqa):
    assert is_causal
    if enable_gqa:
        k, v = (x.repeat_interleave(q.size(1) // x.size(1), dim=1) for x in (k, v))
    return RingAttention.apply(q, k, v)


def chunks_of(tokens, rank, ranks):
    chunks = torch.arange(tokens).chunk(2 * ranks)
    return torch.cat((chunks[rank], chunks[2 * ranks - 1 - rank]))


def attention_alone(c, own):
    """Query, key and value by document position, as isograd's side has them; the sum of squares of the output."""
    def draw(heads, phase):
        place = (own.float() + phase).view(-1, 1, 1)
        channel = torch.arange(heads * c["head_dim"], dtype=torch.float32).view(1, heads, -1)
        return torch.sin(place * 0.37 + channel * 1.7).requires_grad_()

    leaves = [draw(c["heads"], 0), draw(c["key_value_heads"], 1), draw(c["key_value_heads"], 2)]

    def step():
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in leaves)
        loss = attend(q, k, v, True, c["key_value_heads"] != c["heads"]).square().sum()
        loss.backward()
        sums = torch.stack([loss.detach().double(), sum(x.grad.square().sum() for x in leaves).double()])
        dist.all_reduce(sums)
        for x in leaves:
            x.grad = None
        return sums[0].item(), sums[1].item() ** 0.5

    return step


def model_step(exchange, c, own):
    llama_step.Block.attend = staticmethod(attend)
    model = llama_step.loaded(llama_step.Llama(c, c["tokens"]), exchange, c)
    model.cos, model.sin = model.cos[own], model.sin[own]
    tokens = (torch.arange(c["tokens"]) * 7919 + 13) % c["vocabulary"]
    targets = (tokens * 31 + 1) % c["vocabulary"]
    targets[-1] = -100
    tokens, targets = tokens[own].unsqueeze(0), targets[own]
    parameters = list(model.parameters())

    def step():
        loss = F.cross_entropy(model(tokens).flatten(0, 1), targets, reduction="sum") / (c["tokens"] - 1)
        loss.backward()
        flat = torch.cat([p.grad.flatten() for p in parameters])
        dist.all_reduce(flat)
        total = loss.detach().double()
        dist.all_reduce(total)
        for p in parameters:
            p.grad = None
        # In fp64: a norm taken in fp32 over one long buffer is off by 2e-4 here, its gradients by 4e-7.
        return total.item(), torch.linalg.vector_norm(flat, dtype=torch.float64).item()

    return step


def run(rank):
    c = rank.case()
    rank.meet()
    own = chunks_of(c["tokens"], rank.rank, rank.ranks)
    step = attention_alone(c, own) if c["attention"] else model_step(rank.exchange, c, own)
    for _ in rank.turns():
        dist.barrier()
        seconds, (loss, norm) = turns.timed(step)
        rank.answer(seconds=[seconds], losses=[loss], norms=[norm])


if __name__ == "__main__":
    turns.main(run)
