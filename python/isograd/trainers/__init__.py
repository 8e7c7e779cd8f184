"""isograd.watch inside the loops of public trainers; each module imports its own library and nothing else.

    isograd.trainers.transformers   transformers.Trainer, TRL's SFTTrainer
    isograd.trainers.lightning      lightning.pytorch.Trainer
    isograd.trainers.accelerate     a loop of one's own over accelerate.Accelerator

In the loop of another library, `isograd.watch` without micro_batches and `step.add(rows(batch))` before each backward.
"""
from ._one_step import rows

__all__ = ["rows"]
