"""Loops over Accelerate, and Ignite's, with one step checked."""
import contextlib
import itertools

import accelerate
import torch
from model_and_data import collator, documents, id_of, make_model, MAX_NORM
from transformers_loops import of_deepspeed, told

import isograd
import isograd.trainers.accelerate
from isograd.trainers.transformers import causal_lm_loss


def _prepared(cell):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=cell.accumulation)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(documents(cell), cell.micro_batch, shuffle=True, collate_fn=collator(cell.data))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    check = isograd.trainers.accelerate.StepCheck(accelerator, model, optimizer, loss=causal_lm_loss, **told(cell))
    return accelerator, model, optimizer, check, check.over(loader)


def means(cell, folder):
    """Accelerate's loop as its quick tour has it: the model's mean loss, accumulate, backward, clip."""
    accelerator, model, optimizer, check, batches = _prepared(cell)
    for batch in batches:
        with accelerator.accumulate(model):
            accelerator.backward(model(**batch).loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            optimizer.zero_grad()
    return check.verdict


def counts(cell, folder):
    """Accelerate's loop as its guide to accumulation has it for samples of other sizes: targets are counted first."""
    accelerator, model, optimizer, check, batches = _prepared(cell)
    while micro_batches := [batch for _, batch in zip(range(cell.accumulation), batches)]:
        count = accelerator.gather(sum((batch["labels"][:, 1:] != -100).sum() for batch in micro_batches)).sum()
        for j, batch in enumerate(micro_batches):
            last = j + 1 == len(micro_batches)
            with contextlib.nullcontext() if last else accelerator.no_sync(model):
                targets = batch.pop("labels")[:, 1:].flatten()
                logits = model(**batch).logits[:, :-1].flatten(0, 1)
                loss = torch.nn.functional.cross_entropy(logits, targets, reduction="sum")
                accelerator.backward(loss * cell.accumulation * accelerator.num_processes / count)
        accelerator.clip_grad_norm_(model.parameters(), MAX_NORM)
        optimizer.step()
        optimizer.zero_grad()
    return check.verdict


def deepspeed(cell, folder):
    """Accelerate's loop under DeepSpeed, whose engine steps in the backward of the last micro-batch."""
    plugin = accelerate.DeepSpeedPlugin(hf_ds_config=of_deepspeed(cell))
    accelerator = accelerate.Accelerator(deepspeed_plugin=plugin, gradient_accumulation_steps=cell.accumulation)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(documents(cell), cell.micro_batch, shuffle=True, collate_fn=collator(cell.data))
    engine, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    batches = list(itertools.islice(loader, cell.accumulation))
    with isograd.watch(engine, engine.optimizer, micro_batches=[isograd.trainers.rows(batch) for batch in batches], loss=causal_lm_loss,
                       ids=id_of, make_model=make_model) as step:
        for batch in batches:
            with accelerator.accumulate(engine):
                accelerator.backward(engine(**batch).loss)
                optimizer.step()
                optimizer.zero_grad()
    return step.verdict


def ignited(cell, folder):
    """Ignite's create_supervised_trainer with the model's mean loss, under DDP by its auto_model; it has no place to clip."""
    import ignite.distributed
    import ignite.engine
    if cell.ranks > 1:
        ignite.distributed.initialize("gloo")
    model = ignite.distributed.auto_model(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = ignite.distributed.auto_dataloader(documents(cell), batch_size=cell.micro_batch * cell.ranks, shuffle=True,
                                                collate_fn=collator(cell.data))
    trainer = ignite.engine.create_supervised_trainer(
        model, optimizer, lambda loss, _: loss, gradient_accumulation_steps=cell.accumulation,
        prepare_batch=lambda batch, **_: (batch, None), model_fn=lambda model, batch: model(**batch).loss)
    with isograd.watch(model, optimizer, loss=causal_lm_loss, ids=id_of) as step:
        trainer.add_event_handler(ignite.engine.Events.ITERATION_STARTED,
                                  lambda engine: step.add(isograd.trainers.rows(engine.state.batch)))
        trainer.run(loader, epoch_length=cell.accumulation)
    return step.verdict
