"""The step on one device: each sample by itself, its loss written out. Only the model is the trainers'."""
import contextlib

import torch
from problem import IGNORED, dtype_of, keyed_noise


def nll_of(model, sample, problem, precision):
    """The negative log-likelihood of each valid target of a sample."""
    inputs = sample.inputs if sample.inputs.dtype == torch.int64 else sample.inputs.to(dtype_of(precision))
    noise = keyed_noise(sample, problem.dropout).to(dtype_of(precision)) if problem.dropout else None
    rows = inputs.unsqueeze(0) if inputs.dtype == torch.int64 else inputs
    documents = torch.zeros(1, len(inputs), dtype=torch.int64)
    autocast = torch.autocast("cpu", torch.bfloat16) if precision == "bf16" else contextlib.nullcontext()
    with autocast:
        logits = model(rows, documents, noise).flatten(0, -2)
    logits = logits if precision == "fp64" else logits.float()
    at = (sample.targets != IGNORED).nonzero().flatten()
    return torch.logsumexp(logits[at], -1) - logits[at, sample.targets[at]]


def one_device(problem, assignment=None, precision="fp64"):
    """The whole step, with a share for each micro-batch of `assignment` (problem.assigned() unless given)."""
    assignment = assignment or problem.assigned()
    model = problem.make_model(precision)
    everything = [sample for micros in assignment for micro in micros for sample in micro]
    valid = {sample.id: 0 for sample in everything}
    for sample in everything:
        valid[sample.id] += int((sample.targets != IGNORED).sum())
    total, with_loss = sum(valid.values()), sum(count > 0 for count in valid.values())

    shares, loss = {}, 0.0
    for rank, micros in enumerate(assignment):
        for j, micro in enumerate(micros):
            model.zero_grad()
            for sample in micro:
                weight = 1 / total if problem.mean == "token" else 1 / (max(valid[sample.id], 1) * with_loss)
                part = nll_of(model, sample, problem, precision).sum() * weight
                part.backward()
                loss += part.item()
            shares[rank, j] = {name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
                               for name, p in model.named_parameters() if p.requires_grad}
    gradients = {name: torch.stack([share[name] for share in shares.values()]).sum(0) for name in shares[0, 0]}
    norm = sum(float(g.double().square().sum()) for g in gradients.values()) ** 0.5
    step = dict(loss=loss, targets=total, tokens=sum(len(s.inputs) for s in everything), norm=norm,
                samples=[s.id for s in everything if s.first],
                counts=[[sum(int((s.targets != IGNORED).sum()) for s in micro) for micro in micros] for micros in assignment],
                precision=precision.split("_")[0], parameters=list(gradients))
    applied = None
    if problem.max_norm or problem.decay:
        clip = min(1.0, problem.max_norm / (norm + 1e-6)) if problem.max_norm else 1.0  # as PyTorch clips
        step["clip_coefficient"] = clip
        values = dict(model.named_parameters())
        applied = {name: clip * g + (problem.decay if g.dim() > 1 else 0.0) * values[name].detach()
                   for name, g in gradients.items()}
    return {"gradients": gradients, "shares": shares, "step": step, "applied": applied}
