"""python trainer_cases.py [CELL ...]: isograd.trainers in loops of the real libraries, on two ranks: those cells of
tests/trials and the cases that it does not show. As JSON: the verdicts by cell; by case and rank."""
import json
import os
import pathlib
import sys
import tempfile
import types

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "trials"))
os.environ.update(ACCELERATE_USE_CPU="true", LOCAL_WORLD_SIZE="2", WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT="1")

import accelerate  # noqa: E402
import lightning.pytorch  # noqa: E402
import lightning_loops  # noqa: E402
import run as trials  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy  # noqa: E402
from model_and_data import documents, make_model, padded  # noqa: E402
from ranks import on_ranks  # noqa: E402
from table import Cell  # noqa: E402
from torch import nn  # noqa: E402
from torch.utils.data import DataLoader  # noqa: E402

import isograd.trainers.accelerate  # noqa: E402
import isograd.trainers.lightning  # noqa: E402
import isograd.trainers.transformers  # noqa: E402
from isograd.trainers import rows  # noqa: E402

CELL, BERT = Cell("transformers", 2, 2, "padded", "DDP"), Cell("transformers-bert", 2, 2, "even", "DDP")


def trainer_of(kind=transformers.Trainer, model=None, steps=2, cell=CELL, **more):
    options = dict(output_dir=tempfile.gettempdir(), per_device_train_batch_size=2, max_grad_norm=0.5, max_steps=steps,
                   gradient_accumulation_steps=2, use_cpu=True, save_strategy="no", report_to="none", disable_tqdm=True,
                   logging_steps=1, dataloader_pin_memory=False)
    return kind(model or make_model(), transformers.TrainingArguments(**{**options, **more}), train_dataset=documents(cell),
                data_collator=padded)


def of_trainer(trainer, **options):
    check = isograd.trainers.transformers.StepCheck(trainer, **options)
    trainer.train()
    return check.verdict


def the_second_step():
    return of_trainer(trainer_of(), step=2)


def no_log_of_one_step():
    return of_trainer(trainer_of(logging_steps=2), step=2)


def a_step_that_is_not_reached():
    return of_trainer(trainer_of(steps=1), step=2)


class LogsTwice(transformers.Trainer):
    """Its log says twice the loss."""

    def log(self, logs, *arguments, **more):
        super().log({**logs, "loss": 2 * logs["loss"]} if "loss" in logs else logs, *arguments, **more)


def a_wrong_log():
    return of_trainer(trainer_of(LogsTwice))


class Fails(transformers.Trainer):
    """Rank 1 fails in its second micro-batch."""

    def compute_loss(self, *arguments, **more):
        self.calls = getattr(self, "calls", 0) + 1
        if self.calls == 2 and self.args.process_index == 1:
            raise ValueError("out of cheese")
        return super().compute_loss(*arguments, **more)

    def training_step(self, *arguments, **more):  # the backward that waits for rank 1 is left out
        if self.args.process_index == 0 and getattr(self, "calls", 0) == 1:
            self.calls = 2
            return torch.tensor(0.0)
        return super().training_step(*arguments, **more)


def a_rank_fails():
    return of_trainer(trainer_of(Fails, max_grad_norm=0.0, logging_steps=9), timeout=30)


def bf16():
    return of_trainer(trainer_of(bf16=True))


def step_zero():
    return of_trainer(trainer_of(), step=0)


def no_loss():
    class Other(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = make_model()

        def forward(self, input_ids, attention_mask, labels):
            return self.inner(input_ids=input_ids, attention_mask=attention_mask, labels=labels)

    return of_trainer(trainer_of(model=Other()))


def no_tensors():
    return rows({"text": ["one", "two"]})


def an_object():
    """A graph: nothing says which of its tensors have a row for each sample."""
    return rows(types.SimpleNamespace(x=torch.zeros(5, 3), edges=torch.zeros(2, 7)))


def a_tuple_and_a_tensor():
    x, y = torch.arange(6.0).reshape(3, 2), torch.arange(3)
    return [list(map(repr, rows((x, y)))), [tuple(part.shape) for part in rows(x)]]


def micro_batches_twice():
    with isograd.watch(nn.Linear(2, 1), None, micro_batches=[[torch.ones(2)]], loss=lambda model, sample: model(sample)) as step:
        step.add([torch.ones(2)])


def accelerated_by_counts():
    """The loop with sums over the targets of the whole step: right with lengths of any kind, in bf16."""
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(documents(CELL), 2, collate_fn=padded))
    isograd.sum_gradients(model)
    check = isograd.trainers.accelerate.StepCheck(
        accelerator, model, optimizer, loss=isograd.trainers.transformers.causal_lm_loss, step=2)
    for batch in check.over(loader):
        step = isograd.TokenMean().count([batch["labels"][:, 1:]])
        logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), reduction="sum")
        accelerator.backward(step.scale(loss))
        isograd.clip_grad_norm_(model, 0.1)
        optimizer.step()
        optimizer.zero_grad()
    return check.verdict


def accelerated(body, **options):
    """A loop of two micro-batches, of which `body` makes one; what it raises, on the rank that it raises on."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(documents(CELL), 2, collate_fn=padded))
    check = isograd.trainers.accelerate.StepCheck(
        accelerator, model, optimizer, loss=isograd.trainers.transformers.causal_lm_loss, timeout=30, **options)
    for batch in check.over(loader):
        if body(accelerator, model, batch):
            break
        optimizer.step()
        optimizer.zero_grad()
    return check.verdict


def only_on_rank_1(fails):
    """Rank 0 comes to the end of its step without the backward that would wait for rank 1."""
    def body(accelerator, model, batch):
        if accelerator.process_index == 1:
            return fails()
        accelerator.gradient_state._set_sync_gradients(True)
        return None
    return body


def an_accelerated_rank_fails():
    def fails():
        raise ValueError("out of cheese")
    return accelerated(only_on_rank_1(fails))


def an_accelerated_rank_leaves():
    return accelerated(only_on_rank_1(lambda: True))


def an_accelerated_rank_cannot_cut():
    def samples(batch):
        if torch.distributed.get_rank() == 1:
            raise KeyError("no rows")
        return rows(batch)
    return accelerated(only_on_rank_1(lambda: None), samples=samples)


class TwoOptimizers(lightning_loops.Module):
    def __init__(self):
        super().__init__(False)
        self.automatic_optimization = False

    def configure_optimizers(self):
        return [torch.optim.SGD(self.parameters(), lr=0.1) for _ in range(2)]


class Logs(lightning_loops.Module):
    """Logs the sum over ranks, which is not the loss."""

    def training_step(self, batch, index):
        loss = super().training_step(batch, index)
        self.log("train_loss", 2 * loss.detach(), sync_dist=True)
        return loss


def lit(module, **options):
    check = isograd.trainers.lightning.StepCheck(
        loss=lambda own, sample: isograd.trainers.transformers.causal_lm_loss(own.model, sample), **options)
    lightning.pytorch.Trainer(
        accelerator="cpu", devices=2, strategy=DDPStrategy(process_group_backend="gloo"), max_steps=1, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False, callbacks=[check]
    ).fit(module, DataLoader(documents(Cell("lightning", 2, 1, "even", "DDP")), 2, collate_fn=padded))
    return check.verdict


def two_optimizers():
    return lit(TwoOptimizers())


def lightning_logs():
    return lit(Logs(False), logged="train_loss")


def in_plain_torch(**attributes):
    """[ratio of the gradient of BERT's step to that of the mean over the whole batch, what else is in it]; without isograd."""
    taken, batches = {}, []

    class Takes(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, *_, model, **more):
            taken.update({name: p.grad.double() for name, p in model.named_parameters()})

    model, right = make_model("bert-tokens"), make_model("bert-tokens").double()
    for name, value in attributes.items():
        setattr(model, name, value)
    trainer = trainer_of(model=model, steps=1, cell=BERT, max_grad_norm=0.0)
    original = trainer.training_step
    trainer.training_step = lambda model, inputs, *rest: batches.append({**inputs}) or original(model, inputs, *rest)
    trainer.add_callback(Takes())
    trainer.train()
    everyone = [None] * 2
    torch.distributed.all_gather_object(everyone, batches)
    whole = {key: torch.cat([batch[key] for rank in everyone for batch in rank]) for key in batches[0]}
    logits = right(input_ids=whole["input_ids"], attention_mask=whole["attention_mask"]).logits
    nn.functional.cross_entropy(logits.flatten(0, 1), whole["labels"].flatten()).backward()
    taken, exact = (torch.cat([g.flatten() for g in some]) for some in (taken.values(), (p.grad for p in right.parameters())))
    ratio = taken @ exact / (exact @ exact)
    return [float(ratio), float((taken - ratio * exact).norm() / taken.norm())]


def bert_in_plain_torch():
    return in_plain_torch()


def bert_whose_loss_is_said_to_be_a_mean():
    return in_plain_torch(accepts_loss_kwargs=False)


def which_losses_take_the_count():
    """As docs/trainers.md says to look: the loss of a batch that is said to have one target, over that of two."""
    found = {}
    for name, cell in (("llama", CELL), ("bert-tokens", BERT)):
        model = make_model(name).eval()
        batch = next(iter(trainer_of(model=model, cell=cell).get_train_dataloader()))
        one, two = (model(**batch, num_items_in_batch=torch.tensor(n)).loss.item() for n in (1, 2))
        found[name] = one / two
    return found


CASES = [the_second_step, no_log_of_one_step, a_step_that_is_not_reached, a_wrong_log, bf16, step_zero, no_loss, no_tensors, an_object,
         a_tuple_and_a_tensor, micro_batches_twice, accelerated_by_counts, two_optimizers, lightning_logs, a_rank_fails,
         an_accelerated_rank_fails, an_accelerated_rank_leaves, an_accelerated_rank_cannot_cut, bert_in_plain_torch,
         bert_whose_loss_is_said_to_be_a_mean, which_losses_take_the_count]


def run(rank):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    found = {}
    for case in CASES:
        try:
            verdict = case()
        except Exception as error:
            found[case.__name__] = f"{type(error).__name__} {error}"
            continue
        found[case.__name__] = verdict if not isinstance(verdict, isograd.Verdict) else {
            "passed": verdict.passed, "said": verdict.findings, "text": str(verdict), "notes": verdict.notes}
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=False)
    return found


if __name__ == "__main__":
    output = os.dup(1)  # the libraries print
    os.dup2(2, 1)
    known = {cell.name: cell for cell in trials.cells()}
    found = {name: trials.made(known[name]) for name in sys.argv[1:]}, on_ranks(2, run)
    with os.fdopen(output, "w") as file:
        json.dump(found, file)
