"""One step of a trainer under watch and prove, as a user writes it with types."""
from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn
from typing_extensions import assert_type

import isograd


@dataclasses.dataclass
class Document:
    number: int
    tokens: torch.Tensor


class Predictor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.head = nn.Linear(8, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.embedding(tokens))
        return logits


def losses(model: Predictor, document: Document) -> torch.Tensor:
    return F.cross_entropy(model(document.tokens[:-1]), document.tokens[1:], reduction="none")


def loss_and_count(model: Predictor, document: Document) -> tuple[torch.Tensor, int]:
    each = losses(model, document)
    return each.sum(), each.numel()


def train_step(model: Predictor, optimizer: torch.optim.AdamW, micro_batches: list[list[Document]]) -> float:
    optimizer.zero_grad()
    targets = sum(len(document.tokens) - 1 for documents in micro_batches for document in documents)
    total = torch.zeros(())
    for documents in micro_batches:
        loss = torch.cat([losses(model, document) for document in documents]).sum() / targets
        torch.autograd.backward(loss)
        total += loss.detach()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return total.item()


def report(verdict: isograd.Verdict) -> str:
    if not verdict:
        return f"{', '.join(verdict.findings)} {verdict.json['findings'][0]['sentence']}"
    return "; ".join([str(verdict).splitlines()[0], verdict.update, *verdict.notes, verdict.folder or "no dumps"])


def main() -> None:
    torch.manual_seed(0)
    model = Predictor()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    documents = [Document(length, torch.randint(20, (length,))) for length in (4, 7, 9)]
    micro_batches = [documents[:2], documents[2:]]

    with isograd.watch(model, optimizer, micro_batches=micro_batches, loss=losses, ids=lambda sample: sample.number) as step:
        loss = train_step(model, optimizer, micro_batches)
        step.log(loss=loss, targets=17)
    assert_type(step.verdict, isograd.Verdict)
    print(step.verdict.passed, report(step.verdict))

    with isograd.watch(model, loss=loss_and_count, mean="token", make_model=Predictor, timeout=60) as step:
        optimizer.zero_grad()
        for some in micro_batches:
            step.add(some)
            torch.autograd.backward(torch.cat([losses(model, document) for document in some]).sum() / 17)
        step.before_clipping()
        step.log(norm=nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]), tokens=20)
        optimizer.step()
    print(bool(step.verdict), step.verdict.findings)

    verdict = isograd.prove(train_step, model, optimizer, micro_batches=micro_batches, loss=losses, mean="token", precision="fp32",
                            reference=torch.float64, alone=False, experiments=False)
    assert_type(verdict, isograd.Verdict)
    print(report(verdict))
    try:
        isograd.prove(train_step, model, optimizer, micro_batches=micro_batches, loss=losses, mean=-1.0)
    except isograd.ConfigError as error:
        print(error)


if __name__ == "__main__":
    main()
