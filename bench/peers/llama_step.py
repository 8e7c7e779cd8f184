"""The training step of `isograd bench step`, `tensor` and `wrapped` in PyTorch: eager on one rank, DDP, FSDP2 or tensor
parallelism (with its sequence parallelism) over Gloo, or another backend, on several.

Written as a careful PyTorch user would: F.scaled_dot_product_attention, F.cross_entropy, fused AdamW with weight
decay on matrices only, gradients as bucket views, set_to_none. It starts from the same weights (a Hugging Face
directory) and sees the same tokens as isograd, so its losses and gradient norms must agree; the caller checks that.

    python llama_step.py EXCHANGE RANKS SIDE MODE [BACKEND [MODULE]]   as turns.py tells

MODE: eager, compiled, autocast, autocast-compiled, ddp, ddp-compiled, fsdp2 or tp. BACKEND: gloo; isograd, with the folder
of isograd_comm; or fake, PyTorch's backend that does nothing, whose step is what the wrapper takes with collectives that
take no time. Its numbers mean nothing, so it gives none.

EXCHANGE holds
    case.json     shapes, learning rate, steps per turn
    model/        config.json, model.safetensors
    tokens.bin    int64 [steps, ranks of case.json, micro-batches x sequences, length + 1]

Ranks of "tp" shard one model and see one batch: their case has one rank's tokens. An eager side of a case with several
ranks computes what rank 0 sees: one process with the tokens of one rank.
"""
import functools
import itertools
import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import turns


def rotate_half(x):
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


class Block(nn.Module):
    attend = staticmethod(F.scaled_dot_product_attention)

    def __init__(self, c):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = c["heads"], c["key_value_heads"], c["head_dim"]
        d, f, q, kv = c["hidden"], c["feed_forward"], self.heads * self.head_dim, self.kv_heads * self.head_dim
        self.input_layernorm = nn.RMSNorm(d, eps=c["norm_epsilon"])
        self.post_attention_layernorm = nn.RMSNorm(d, eps=c["norm_epsilon"])
        linear = functools.partial(nn.Linear, bias=False)
        self.self_attn = nn.ModuleDict({
            "q_proj": linear(d, q), "k_proj": linear(d, kv), "v_proj": linear(d, kv), "o_proj": linear(q, d)})
        self.mlp = nn.ModuleDict({"gate_proj": linear(d, f), "up_proj": linear(d, f), "down_proj": linear(f, d)})

    def forward(self, x, cos, sin):
        y, attn = self.input_layernorm(x), self.self_attn
        q, k, v = (attn[f"{name}_proj"](y) for name in "qkv")
        b, t, _ = q.shape  # all tokens, also where x has this rank's
        q, k, v = (z.view(b, t, -1, self.head_dim).transpose(1, 2) for z in (q, k, v))
        cos, sin = cos.to(q.dtype), sin.to(q.dtype)
        q, k = q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin
        y = self.attend(q, k, v, is_causal=True, enable_gqa=self.kv_heads != self.heads)
        x = x + attn["o_proj"](y.transpose(1, 2).reshape(b, t, -1))
        return x + self.feed_forward(self.post_attention_layernorm(x))

    def feed_forward(self, y):
        return self.mlp["down_proj"](F.silu(self.mlp["gate_proj"](y)) * self.mlp["up_proj"](y))


class Llama(nn.Module):
    def __init__(self, c, length, block=Block):
        super().__init__()
        self.model = nn.ModuleDict({
            "embed_tokens": nn.Embedding(c["vocabulary"], c["hidden"]),
            "layers": nn.ModuleList(block(c) for _ in range(c["layers"])),
            "norm": nn.RMSNorm(c["hidden"], eps=c["norm_epsilon"]),
        })
        self.lm_head = nn.Linear(c["hidden"], c["vocabulary"], bias=False)
        if c["tied_output"]:
            self.lm_head.weight = self.model["embed_tokens"].weight
        frequency = c["rope_theta"] ** (-torch.arange(0, c["head_dim"], 2, dtype=torch.float64) / c["head_dim"])
        angle = torch.outer(torch.arange(length, dtype=torch.float64), frequency)
        angle = torch.cat((angle, angle), dim=-1)
        self.register_buffer("cos", angle.cos().float(), persistent=False)
        self.register_buffer("sin", angle.sin().float(), persistent=False)

    def forward(self, tokens):
        x = self.model["embed_tokens"](tokens)
        for block in self.model["layers"]:
            x = block(x, self.cos, self.sin)
        return self.lm_head(self.model["norm"](x))


def read_safetensors(path):
    """The tensors of a file, by name."""
    data = path.read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8:8 + size])
    header.pop("__metadata__", None)
    state = {}
    for name, entry in header.items():
        assert entry["dtype"] == "F32", (name, entry["dtype"])
        begin, end = entry["data_offsets"]
        raw = bytearray(data[8 + size + begin:8 + size + end])
        state[name] = torch.frombuffer(raw, dtype=torch.float32).reshape(entry["shape"])
    return state


def loaded(model, exchange, c):
    """The model with the exchange's weights; every tensor must be used, every parameter filled."""
    state = read_safetensors(exchange / "model/model.safetensors")
    if c["tied_output"]:
        state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
    model.load_state_dict(state, strict=True)
    return model


def make_model(exchange, c, mode, rank, ranks):
    return loaded(Llama(c, c["length"]), exchange, c)


def optimizer_for(model, c, mode, apart=()):
    """Weight decay on matrices only. `apart`: matrices in a group of their own."""
    ids = set(map(id, apart))
    rest = [p for p in model.parameters() if id(p) not in ids]
    groups = [{"params": [p for p in rest if p.dim() >= 2], "weight_decay": c["weight_decay"]},
              {"params": [p for p in rest if p.dim() < 2], "weight_decay": 0.0}]
    if apart:
        groups.append({"params": apart, "weight_decay": c["weight_decay"]})
    return torch.optim.AdamW(groups, lr=c["learning_rate"], betas=(c["beta1"], c["beta2"]), eps=c["epsilon"],
                             fused=mode != "tp", foreach=mode == "tp")  # fused takes no DTensor on the CPU


def shard(model, **options):
    """FSDP2 by block."""
    from torch.distributed.fsdp import fully_shard
    modules = (*model.model["layers"], model)
    for module in modules:
        fully_shard(module, **options)
    for module in modules:
        module.set_force_sum_reduction_for_comms(True)  # Gloo has no mean; FSDP2 then divides by itself
    return model


def cut(model, ranks):
    """PyTorch's tensor parallelism as its tutorial writes it: sequence parallelism between the products."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel, SequenceParallel,
                                                   parallelize_module)
    mesh = init_device_mesh("cpu", (ranks,))
    column = lambda: ColwiseParallel(input_layouts=Shard(1))
    row = lambda: RowwiseParallel(output_layouts=Shard(1))
    parallelize_module(model, mesh, {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "model.norm": SequenceParallel(),
        "lm_head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})
    for block in model.model["layers"]:
        parallelize_module(block, mesh, {
            "input_layernorm": SequenceParallel(), "post_attention_layernorm": SequenceParallel(),
            **{f"self_attn.{name}_proj": column() for name in "qkv"}, "self_attn.o_proj": row(),
            "mlp.gate_proj": column(), "mlp.up_proj": column(), "mlp.down_proj": row()})
    return model


def wrap(model, mode, ranks, c):
    """The model as its wrapper trains it. DDP and FSDP2 then hold the mean over ranks of the ranks' gradients."""
    if mode == "tp":
        return cut(model, ranks)
    if mode in ("compiled", "autocast-compiled"):
        model.compile()
    if mode == "ddp-compiled":  # by block: DDP's hooks then overlap as they do without
        for block in model.model["layers"]:
            block.compile()
    if mode in ("ddp", "ddp-compiled"):
        return nn.parallel.DistributedDataParallel(model, gradient_as_bucket_view=True)
    return shard(model) if mode == "fsdp2" else model


def backward(trained, batch, c):
    """Gradients of the mean over the micro-batches, which have as many tokens; returns it."""
    parts, total = batch.chunk(c["micro_batches"]), 0
    for part in parts:
        with torch.autocast(part.device.type, torch.bfloat16, enabled=c.get("autocast", False)):
            logits = trained(part[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())
        if len(parts) > 1:
            loss = loss / len(parts)
        loss.backward()
        total = total + loss.detach()
    return total


def clip(model, max_norm):
    norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    return lambda: (norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item()


class Masters:
    """fp32 copies of the parameters of a bf16 model, which are clipped and updated in their place."""

    def __init__(self, model):
        self.held = list(model.parameters())
        self.masters = [p.detach().float().requires_grad_() for p in self.held]
        for master in self.masters:
            master.grad = torch.empty_like(master)

    def parameters(self):
        return self.masters

    def take_gradients(self):
        torch._foreach_copy_([m.grad for m in self.masters], [p.grad for p in self.held])
        for p in self.held:
            p.grad = None

    @torch.no_grad()
    def give_parameters(self):
        torch._foreach_copy_(self.held, self.masters)


def profile_steps(device, steps, step):
    """Records as profile_steps() of src/bench/cases/step_side.cpp does."""
    if device.type != "cuda":
        return {}
    from torch.profiler import ProfilerActivity, profile
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            step()
        issued = time.time_ns()
        time.sleep(0.002)  # apart in time from the wait with which the profiler ends
    events = [[event.device_type() == torch.autograd.DeviceType.CPU, event.name()[:120], event.start_ns(), event.end_ns()]
              for event in profiler.profiler.kineto_results.events()]
    return {"steps": steps, "issued": issued, "events": events, "peak_bytes": torch.cuda.max_memory_allocated()}


def meet(rank, backend, module):
    how = {}
    if backend == "isograd":
        sys.path.insert(0, module)
        import isograd_comm  # noqa: F401  (registers the backend)
    elif backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore
        how = {"store": FakeStore()}
        torch.set_flush_denormal(True)  # what nobody gathered may be any bits
    rank.meet(backend, **how)


def leave_as_it_is(_, bucket):
    future = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def run_rank(rank, mode, backend, module, make_model, wrap, clip, optimizer_for, backward):
    """`clip` returns how to read the norm, outside of what is timed."""
    exchange, ranks, c = rank.exchange, rank.ranks, rank.case()
    torch.set_num_threads(c["threads"])
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(exchange / f"compiled.{rank.rank}"))
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
    # ISOGRAD_PEER_DEVICE=cpu: where our side's GPU is the tests' stand-in, which Python's torch does not see.
    on_gpu = os.environ.get("ISOGRAD_PEER_DEVICE", c["device"]) == "cuda"
    device = torch.device("cuda", rank.rank) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    if ranks > 1:
        meet(rank, "nccl" if on_gpu else backend, module)
    model = make_model(exchange, c, mode, rank.rank, ranks).to(device)
    c["autocast"] = mode.startswith("autocast")
    in_bf16 = c["dtype"] == "bfloat16" and not c["autocast"]
    if in_bf16:
        model.bfloat16()
    trained = wrap(model, mode, ranks, c)
    if backend == "fake" and mode == "ddp":  # its own way asks for a result, which this backend has not
        trained.register_comm_hook(None, leave_as_it_is)
    updated = Masters(model) if in_bf16 else model
    optimizer = optimizer_for(updated, c, mode)
    tokens = torch.frombuffer(bytearray((exchange / "tokens.bin").read_bytes()), dtype=torch.int64)
    sequences = c["micro_batches"] * c["sequences"]
    tokens = tokens.reshape(-1, c["ranks"], sequences, c["length"] + 1)[:, rank.rank % c["ranks"]]
    batches = itertools.cycle(tokens)

    def train():
        """One step's loss, and how to read its norm. All of it is done when it returns."""
        batch = next(batches).to(device, non_blocking=True)
        loss = backward(trained, batch, c)
        if in_bf16:
            updated.take_gradients()
        norm = clip(updated, c["max_norm"])
        optimizer.step()
        if in_bf16:
            updated.give_parameters()
        else:
            optimizer.zero_grad(set_to_none=True)
        return loss.item(), norm

    for turn in rank.turns():
        if ranks > 1:
            dist.barrier()
        if turn == b"p":
            rank.answer(seconds=[], losses=[], profile=profile_steps(device, 3, train))
            continue
        steps = [turns.timed(train) for _ in range(c["steps_per_turn"])]
        if backend == "fake":
            rank.answer(seconds=[seconds for seconds, _ in steps], losses=[])
            continue
        total = torch.tensor([loss for _, (loss, _) in steps], dtype=torch.float64, device=device)
        if ranks > 1:  # equal token counts on all ranks: the mean of the ranks' means is the global mean
            dist.all_reduce(total)
        norms = [norm() for _, (_, norm) in steps]
        rank.answer(seconds=[seconds for seconds, _ in steps], losses=(total / ranks).tolist(), norms=norms)


def main(make_model=make_model, wrap=wrap, clip=clip, optimizer_for=optimizer_for, backward=backward):
    turns.main(lambda rank, mode, backend="gloo", module="":
               run_rank(rank, mode, backend, module, make_model, wrap, clip, optimizer_for, backward))


if __name__ == "__main__":
    main()
