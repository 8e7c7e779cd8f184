"""isograd.linear_cross_entropy compared with PyTorch's linear and log_softmax in fp64; its refusals. As JSON."""
import json
import sys

import torch
import torch.nn.functional as F

import isograd

OPTIONS = {
    "plain": {}, "bias": {"bias": True}, "weights": {"weights": True}, "mask": {"weights": "mask"},
    "smoothed": {"label_smoothing": 0.1}, "z": {"z_loss": 1e-2}, "other_index": {"ignore_index": 3},
    "all": {"bias": True, "weights": True, "label_smoothing": 0.3, "z_loss": 0.5}, "none_valid": {"empty": True}}


def made(dtype, rows=(37,), vocabulary=29, width=11, bias=False, weights=False, ignore_index=-100, empty=False, **options):
    torch.manual_seed(1)
    hidden = torch.randn(*rows, width, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(vocabulary, width, dtype=torch.float64).to(dtype).requires_grad_()
    targets = torch.randint(vocabulary, rows)
    targets[torch.rand(rows) < 0.2] = ignore_index
    if empty:
        targets[:] = ignore_index
    given = {"bias": torch.randn(vocabulary, dtype=torch.float64).to(dtype).requires_grad_() if bias else None,
             "weights": torch.rand(rows) > 0.4 if weights == "mask" else torch.rand(rows, dtype=dtype) if weights else None}
    return hidden, weight, targets, {"ignore_index": ignore_index, **options, **given}


def expected(hidden, weight, targets, bias=None, weights=None, ignore_index=-100, label_smoothing=0.0, z_loss=0.0):
    """By the formula, in fp64, token after token."""
    leaves = [t.detach().double().requires_grad_() for t in (hidden, weight, *([bias] if bias is not None else []))]
    logits = F.linear(*leaves).flatten(0, -2)
    counted = torch.ones(targets.shape) if weights is None else weights
    parts = {"sum": 0.0, "cross_entropy": 0.0, "z_loss": 0.0}
    chosen = []
    for row, target, w in zip(logits, targets.flatten().tolist(), counted.double().flatten().tolist()):
        valid = target != ignore_index and w > 0
        chosen.append(float(row.log_softmax(0)[target]) if valid else 0.0)
        if not valid:
            continue
        logs = row.log_softmax(0)
        each = -(1 - label_smoothing) * logs[target] - label_smoothing * logs.mean()
        z = row.logsumexp(0) ** 2
        parts = {"sum": parts["sum"] + w * (each + z_loss * z), "cross_entropy": parts["cross_entropy"] + w * float(each.detach()),
                 "z_loss": parts["z_loss"] + w * float(z.detach())}
    gradients = torch.autograd.grad(0.7 * parts["sum"], leaves) if isinstance(parts["sum"], torch.Tensor) else \
        [torch.zeros_like(leaf) for leaf in leaves]
    return {name: float(value) for name, value in parts.items()}, chosen, gradients


def off(found, wanted):
    """The error relative to the largest element of the right value; to 1 where that is less."""
    found, wanted = (t.detach().double().flatten() if isinstance(t, torch.Tensor) else torch.tensor(t, dtype=torch.float64).flatten()
                     for t in (found, wanted))
    return float((found - wanted).abs().max() / max(1.0, float(wanted.abs().max())))


def apart_from_pytorch(dtype, rows=(37,), fault=False, **options):
    hidden, weight, targets, given = made(dtype, rows, **options)
    loss = isograd.linear_cross_entropy(hidden, weight, targets, **given)
    (0.7 * loss.sum).backward()
    if fault:
        given["label_smoothing"] = given.get("label_smoothing", 0.0) + 1e-3
    parts, chosen, gradients = expected(hidden, weight, targets, **given)
    leaves = [hidden, weight, *([given["bias"]] if given["bias"] is not None else [])]
    apart = {name: off(getattr(loss, name), value) for name, value in parts.items()}
    apart |= {f"gradient_{i}": off(leaf.grad, g) for i, (leaf, g) in enumerate(zip(leaves, gradients))}
    return {**apart, "log_probabilities": off(loss.log_probabilities, chosen),
            "shapes": list(loss.log_probabilities.shape) == list(targets.shape)}


def tied():
    """An embedding that is the head as well, in pieces of the vocabulary's own size: both parts of its gradient."""
    found = []
    for fused in (True, False):
        torch.manual_seed(2)
        weight = torch.randn(29, 11, dtype=torch.float64, requires_grad=True)
        tokens, targets = torch.randint(29, (2, 37))
        hidden = torch.tanh(F.embedding(tokens, weight))
        loss = isograd.linear_cross_entropy(hidden, weight, targets).sum if fused else \
            F.cross_entropy(F.linear(hidden, weight), targets, reduction="sum")
        loss.backward()
        found.append(weight.grad)
    return off(found[0], found[1])


def said(change):
    hidden, weight, targets, given = made(torch.float64)
    try:
        change(hidden, weight, targets, given)
    except RuntimeError as error:
        return f"{type(error).__name__} {error}"
    return None


def twice(hidden, weight, targets, given):
    loss = isograd.linear_cross_entropy(hidden, weight, targets, **given).sum
    torch.autograd.grad(loss, hidden, create_graph=True)


def calls(**changed):
    def call(hidden, weight, targets, given):
        arguments = {"hidden": hidden, "weight": weight, "targets": targets, **given}
        arguments |= {name: value(arguments[name]) if callable(value) else value for name, value in changed.items()}
        isograd.linear_cross_entropy(**arguments)
    return call


def main():
    found = {str(dtype).split(".")[1]: {name: apart_from_pytorch(dtype, **options) for name, options in OPTIONS.items()}
             for dtype in (torch.float64, torch.float32, torch.bfloat16)}
    found["leading"] = apart_from_pytorch(torch.float64, rows=(3, 5, 4), weights=True)
    found["fault"] = apart_from_pytorch(torch.float64, fault=True)
    found["tied"] = tied()
    hidden, weight, targets, _ = made(torch.float64)
    found["no_gradient"] = isograd.linear_cross_entropy(hidden.detach(), weight.detach(), targets).sum.requires_grad
    found["refused"] = {
        "target": said(calls(targets=lambda t: t + 1000)), "shape": said(calls(hidden=lambda h: h[:, :5])),
        "type": said(calls(weight=lambda w: w.float())), "negative": said(calls(weights=-torch.ones(37))),
        "smoothing": said(calls(label_smoothing=1.5)), "bias": said(calls(bias=torch.ones(3, dtype=torch.float64))),
        "length": said(calls(targets=lambda t: t[:5])), "twice": said(twice),
        "hidden_index": said(calls(ignore_index=3))}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
