"""The training step of `isograd bench expert` in PyTorch, of a mixture of experts in Mixtral's form.

`transformers`: one process with the library's own model as it comes, which multiplies all experts by one grouped
product (`experts_implementation` "grouped_mm") where PyTorch has it; `transformers-loop`: with its loop over experts
("eager"). `ep`: ranks with data of their own, each with its part of every
layer's experts; tokens travel by all-to-all with autograd over Gloo and FSDP2 shards the rest, as a careful PyTorch user
would write it. Files and arguments as in llama_step.py.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import llama_step


class Experts(nn.Module):
    """This rank's experts [E / ranks, ...] of a layer, and the way of tokens to them and back."""

    def __init__(self, c, ranks):
        super().__init__()
        self.ranks, self.per_rank, self.per_token = ranks, c["experts"] // ranks, c["experts_per_token"]
        d, f = c["hidden"], c["feed_forward"]
        self.gate = nn.Linear(d, c["experts"], bias=False)
        self.w1, self.w3 = (nn.Parameter(torch.empty(self.per_rank, f, d)) for _ in range(2))
        self.w2 = nn.Parameter(torch.empty(self.per_rank, d, f))

    def exchange(self, rows, received, sent):
        from torch.distributed._functional_collectives import all_to_all_single_autograd
        return all_to_all_single_autograd(rows, received, sent, dist.group.WORLD)

    def forward(self, x):
        shape, x = x.shape, x.flatten(0, -2)
        weights, chosen = self.gate(x).softmax(-1, dtype=torch.float32).topk(self.per_token, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        order = chosen.flatten().argsort(stable=True)
        token = order // self.per_token
        counts = chosen.flatten().bincount(minlength=self.per_rank * self.ranks)
        theirs = torch.empty_like(counts)  # [ranks, own experts]: what each rank sends here for each
        dist.all_to_all_single(theirs, counts)
        sent = counts.view(self.ranks, -1).sum(1).tolist()
        by_rank = theirs.view(self.ranks, -1)
        received = by_rank.sum(1).tolist()
        rows = self.exchange(x[token], received, sent)
        expert = torch.arange(self.per_rank).repeat(self.ranks).repeat_interleave(by_rank.flatten())
        by_expert = expert.argsort(stable=True)
        parts = rows[by_expert].split(by_rank.sum(0).tolist())
        made = torch.cat([F.linear(F.silu(F.linear(part, w1)) * F.linear(part, w3), w2)
                          for part, w1, w2, w3 in zip(parts, self.w1, self.w2, self.w3)])
        back = self.exchange(torch.empty_like(made).index_copy(0, by_expert, made), sent, received)
        scaled = back * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(x).index_add(0, token, scaled).view(shape)


class Block(llama_step.Block):
    def __init__(self, c):
        super().__init__(c)
        del self.mlp
        self.block_sparse_moe = Experts(c, int(os.environ["ISOGRAD_BENCH_RANKS"]))

    def feed_forward(self, y):
        return self.block_sparse_moe(y)


def own_experts(state, c, rank, ranks):
    """Mixtral's files name each expert's matrices; a rank stacks its own."""
    state, first, count = dict(state), rank * c["experts"] // ranks, c["experts"] // ranks
    for layer in range(c["layers"]):
        prefix = f"model.layers.{layer}.block_sparse_moe."
        for name in ("w1", "w2", "w3"):
            whole = [state.pop(f"{prefix}experts.{expert}.{name}.weight") for expert in range(c["experts"])]
            state[prefix + name] = torch.stack(whole[first:first + count])
    return state


def make_model(exchange, c, mode, rank, ranks):
    if mode.startswith("transformers"):
        from transformers import AutoModelForCausalLM
        chosen = {"experts_implementation": "eager"} if mode == "transformers-loop" else {}
        model = AutoModelForCausalLM.from_pretrained(exchange / "model", dtype=torch.float32,
                                                     attn_implementation="sdpa", **chosen)
        model.config.use_cache = False
        return model.train()
    os.environ["ISOGRAD_BENCH_RANKS"] = str(ranks)
    model = llama_step.Llama(c, c["length"], Block)
    state = llama_step.read_safetensors(exchange / "model/model.safetensors")
    model.load_state_dict(own_experts(state, c, rank, ranks), strict=True)
    return model


def experts_of(model):
    return [p for block in model.model["layers"] for p in
            (block.block_sparse_moe.w1, block.block_sparse_moe.w2, block.block_sparse_moe.w3)]


def wrap(model, mode, ranks, c):
    if mode.startswith("transformers"):
        return lambda tokens: model(input_ids=tokens).logits
    return llama_step.shard(model, ignored_params=set(experts_of(model)))


def clip(model, max_norm):
    if not dist.is_initialized():
        return llama_step.clip(model, max_norm)
    # Each rank's loss is the mean of its own tokens: FSDP2 has divided by the ranks, of the experts nobody has.
    own = [p.grad for p in experts_of(model)]
    torch._foreach_div_(own, dist.get_world_size())
    whole = set(map(id, own))
    rest = [p.grad.to_local() for p in model.parameters() if id(p.grad) not in whole]
    square = sum(part.square().sum() for part in torch._foreach_norm(own + rest))
    dist.all_reduce(square)
    norm = square.sqrt()
    torch._foreach_mul_(own + rest, (max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm.item


def optimizer_for(model, c, mode):
    return llama_step.optimizer_for(model, c, mode, () if mode.startswith("transformers") else experts_of(model))


if __name__ == "__main__":
    llama_step.main(make_model, wrap, clip, optimizer_for)
