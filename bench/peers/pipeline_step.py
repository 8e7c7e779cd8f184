"""The training step of `isograd bench pipeline` in PyTorch: llama_step.py's model in stages under
torch.distributed.pipelining over Gloo (mode 1f1b or gpipe), or whole in one process (eager).

    python pipeline_step.py EXCHANGE RANKS SIDE eager|1f1b|gpipe   as turns.py tells; the exchange is llama_step.py's

The schedule divides by the number of micro-batches, whose token counts are equal. The norm of the whole gradient is
taken over the stages, as torch.distributed.pipelining leaves to its users.
"""
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

import llama_step


class Stage(nn.Module):
    def __init__(self, whole, rank, ranks):
        super().__init__()
        layers = whole.model["layers"]
        begin, end = rank * len(layers) // ranks, (rank + 1) * len(layers) // ranks
        self.embed = whole.model["embed_tokens"] if rank == 0 else None
        self.layers = nn.ModuleList(layers[begin:end])
        self.norm, self.output = (whole.model["norm"], whole.lm_head) if rank == ranks - 1 else (None, None)
        self.register_buffer("cos", whole.cos, persistent=False)
        self.register_buffer("sin", whole.sin, persistent=False)

    def forward(self, x):
        if self.embed is not None:
            x = self.embed(x)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return x if self.output is None else self.output(self.norm(x))


def make_model(exchange, c, mode, rank, ranks):
    whole = llama_step.make_model(exchange, c, mode, rank, ranks)
    return whole if mode == "eager" else Stage(whole, rank, ranks)


class Scheduled:
    def __init__(self, model, mode, micro_batches):
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        stage = PipelineStage(model, self.rank, self.ranks, torch.device("cpu"))
        loss_of = lambda logits, targets: F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        self.schedule = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[mode](stage, micro_batches, loss_fn=loss_of)

    def step(self, batch):
        """This rank's part of the mean over ranks that llama_step.py reports."""
        if self.rank == 0:
            self.schedule.step(batch[:, :-1])
        elif self.rank < self.ranks - 1:
            self.schedule.step()
        else:
            losses = []
            self.schedule.step(target=batch[:, 1:], losses=losses)
            return torch.stack(losses).mean().detach() * self.ranks
        return torch.zeros(())


def wrap(model, mode, ranks, c):
    return model if mode == "eager" else Scheduled(model, mode, c["micro_batches"])


def backward(trained, batch, c):
    return trained.step(batch) if isinstance(trained, Scheduled) else llama_step.backward(trained, batch, c)


def clip(model, max_norm):
    if isinstance(model, llama_step.Llama):
        return llama_step.clip(model, max_norm)
    gradients = [p.grad for p in model.parameters()]
    square = nn.utils.get_total_norm(gradients).square()
    dist.all_reduce(square)
    norm = square.sqrt()
    nn.utils.clip_grads_with_norm_(model.parameters(), max_norm, norm)
    return norm.item


if __name__ == "__main__":
    llama_step.main(make_model, wrap, clip, llama_step.optimizer_for, backward)
