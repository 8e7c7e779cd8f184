"""The public trainers, each with one step checked: loop(cell, folder) -> what isograd says, on every rank."""
import contextlib

import accelerate
import lightning.pytorch
import tokenizers
import torch
import transformers
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from model_and_data import MAX_NORM, PAD, VOCABULARY, collator, id_of, make_model
from torch.distributed.fsdp import fully_shard

import isograd
import isograd.trainers.accelerate
import isograd.trainers.lightning
import isograd.trainers.transformers
from isograd.trainers.transformers import causal_lm_loss


def told(cell):
    return {"step": cell.step, "ids": id_of, **({"make_model": make_model} if cell.wrap == "FSDP2" else {})}


def arguments(cell, folder, kind, **more):
    return kind(output_dir=folder, per_device_train_batch_size=cell.micro_batch, max_grad_norm=MAX_NORM, max_steps=cell.step,
                gradient_accumulation_steps=cell.accumulation, use_cpu=True, logging_steps=1, save_strategy="no",
                report_to="none", disable_tqdm=True, learning_rate=1e-3, dataloader_pin_memory=False, **more)


def trained(trainer, cell):
    """The verdict on a step of a transformers.Trainer, or of a class derived from it."""
    check = isograd.trainers.transformers.StepCheck(trainer, **told(cell))
    trainer.train()
    return check.verdict


def huggingface(cell, folder, model="llama", shifts=False, **more):
    """transformers.Trainer as it comes."""
    trainer = transformers.Trainer(make_model(model), arguments(cell, folder, transformers.TrainingArguments, **more),
                                   train_dataset=cell.documents, data_collator=collator(cell.data))
    trainer._loss_shifts_labels |= shifts
    return trained(trainer, cell)


def huggingface_gpt2(cell, folder):
    """The same with a GPT2LMHeadModel."""
    return huggingface(cell, folder, "gpt2")


def huggingface_gpt2_shifts(cell, folder):
    """The same with a GPT2LMHeadModel and the trainer's _loss_shifts_labels set to True."""
    return huggingface(cell, folder, "gpt2", True)


def huggingface_by_rank(cell, folder):
    """The same with average_tokens_across_devices=False."""
    return huggingface(cell, folder, average_tokens_across_devices=False)


def sft(cell, folder, model="llama", **more):
    """TRL's SFTTrainer; packed: packing=True."""
    import datasets  # of TRL alone
    import trl

    words = {"[PAD]": PAD, **{str(i): i for i in range(1, VOCABULARY)}}
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[PAD]")), pad_token="[PAD]",
        eos_token="[PAD]")
    return trained(trl.SFTTrainer(
        make_model(model), arguments(cell, folder, trl.SFTConfig, packing=cell.data == "packed", max_length=64, bf16=False,
                                gradient_checkpointing=False, **more),
        train_dataset=datasets.Dataset.from_list(cell.documents), processing_class=tokenizer), cell)


def sft_gpt2(cell, folder):
    """The same with a GPT2LMHeadModel."""
    return sft(cell, folder, "gpt2")


def sft_by_rank(cell, folder):
    """The same with average_tokens_across_devices=False."""
    return sft(cell, folder, average_tokens_across_devices=False)


def _prepared(cell):
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=cell.accumulation)
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(cell.documents, cell.micro_batch, shuffle=True, collate_fn=collator(cell.data))
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    check = isograd.trainers.accelerate.StepCheck(accelerator, model, optimizer, loss=causal_lm_loss, **told(cell))
    return accelerator, model, optimizer, check, check.over(loader)


def accelerated(cell, folder):
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


def accelerated_by_counts(cell, folder):
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


class Module(lightning.pytorch.LightningModule):
    """A training_step that returns the model's mean loss."""

    def __init__(self, shard):
        super().__init__()
        self.model, self.shard = make_model(), shard

    def configure_model(self):
        if self.shard:
            for block in self.model.model.layers:
                fully_shard(block, mesh=self.device_mesh["data_parallel"])
            fully_shard(self.model, mesh=self.device_mesh["data_parallel"])
            self.shard = False

    def training_step(self, batch, index):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def lit(cell, folder):
    """Lightning's Trainer with such a module."""
    options = told(cell)
    if "make_model" in options:
        options["make_model"] = lambda: Module(False)
    check = isograd.trainers.lightning.StepCheck(loss=lambda module, sample: causal_lm_loss(module.model, sample), **options)
    strategy = {"none": "auto", "DDP": DDPStrategy(process_group_backend="gloo"),
                "FSDP2": ModelParallelStrategy(data_parallel_size=cell.ranks, tensor_parallel_size=1,
                                               process_group_backend="gloo")}[cell.wrap]
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu", devices=cell.ranks, strategy=strategy, max_steps=cell.step, max_epochs=1, logger=False,
        accumulate_grad_batches=cell.accumulation, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, callbacks=[check], num_sanity_val_steps=0,
        gradient_clip_val=MAX_NORM)
    loader = torch.utils.data.DataLoader(cell.documents, cell.micro_batch, shuffle=True, collate_fn=collator(cell.data))
    trainer.fit(Module(cell.wrap == "FSDP2"), loader)
    return check.verdict


def ignited(cell, folder):
    """Ignite's create_supervised_trainer with the model's mean loss, under DDP by its auto_model; it has no place to clip."""
    import ignite.distributed
    import ignite.engine
    if cell.ranks > 1:
        ignite.distributed.initialize("gloo")
    model = ignite.distributed.auto_model(make_model())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = ignite.distributed.auto_dataloader(cell.documents, batch_size=cell.micro_batch * cell.ranks, shuffle=True,
                                                collate_fn=collator(cell.data))
    trainer = ignite.engine.create_supervised_trainer(
        model, optimizer, lambda loss, _: loss, gradient_accumulation_steps=cell.accumulation,
        prepare_batch=lambda batch, **_: (batch, None), model_fn=lambda model, batch: model(**batch).loss)
    with isograd.watch(model, optimizer, loss=causal_lm_loss, ids=id_of) as step:
        trainer.add_event_handler(ignite.engine.Events.ITERATION_STARTED,
                                  lambda engine: step.add(isograd.trainers.rows(engine.state.batch)))
        trainer.run(loader, epoch_length=cell.accumulation)
    return step.verdict


LOOPS = {"transformers": huggingface, "transformers-gpt2": huggingface_gpt2,
         "transformers-gpt2-shifts": huggingface_gpt2_shifts, "transformers-by-rank": huggingface_by_rank,
         "trl": sft, "trl-gpt2": sft_gpt2, "trl-by-rank": sft_by_rank, "accelerate": accelerated,
         "accelerate-by-counts": accelerated_by_counts, "lightning": lit, "ignite": ignited}
ONLY_ON_2_RANKS = {"transformers-gpt2-shifts", "transformers-by-rank", "trl-by-rank"}
WITHOUT_REMAINDER = {"ignite"}  # an update takes its micro-batches from two epochs
