"""isograd.watch inside the loops of public trainers; each module imports its own library and nothing else.

    isograd.trainers.transformers   transformers.Trainer, TRL's SFTTrainer
    isograd.trainers.lightning      lightning.pytorch.Trainer
    isograd.trainers.accelerate     a loop of one's own over accelerate.Accelerator
"""
