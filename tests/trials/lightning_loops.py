"""Lightning's Trainer with one step checked."""
import lightning.pytorch
import torch
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from model_and_data import collator, documents, make_model, MAX_NORM
from torch.distributed.fsdp import fully_shard
from transformers_loops import told

import isograd.trainers.lightning
from isograd.trainers.transformers import causal_lm_loss


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
    loader = torch.utils.data.DataLoader(documents(cell), cell.micro_batch, shuffle=True, collate_fn=collator(cell.data))
    trainer.fit(Module(cell.wrap == "FSDP2"), loader)
    return check.verdict
