"""transformers.Trainer and TRL's trainers, each with one step checked:
loop(cell, folder, **options) -> what isograd says, on every rank."""
import os

import accelerate
import tokenizers
import torch
import torch.nn.functional as F
import transformers
from model_and_data import collator, documents, id_of, make_model, MAX_NORM, PAD, TASKS, VOCABULARY
from table import ZERO

import isograd.trainers.transformers


def told(cell):
    make = {"make_model": lambda: make_model(cell.row.task)} if cell.wrap not in ("none", "DDP") else {}
    return {"step": cell.step, "ids": id_of, **make}


def arguments(cell, folder, kind, **more):
    return kind(output_dir=folder, per_device_train_batch_size=cell.micro_batch, max_grad_norm=MAX_NORM, max_steps=cell.step,
                gradient_accumulation_steps=cell.accumulation, use_cpu=cell.wrap not in ZERO, logging_steps=1, save_strategy="no",
                report_to="none", disable_tqdm=True, learning_rate=1e-3, dataloader_pin_memory=False, **more)


def verdict_of(trainer, cell, reference="float64"):
    """On a step of a transformers.Trainer, or of a class derived from it."""
    task = TASKS[cell.row.task]
    check = isograd.trainers.transformers.StepCheck(trainer, loss=task.loss, samples=task.cut, reference=getattr(torch, reference),
                                                    **told(cell))
    trainer.train()
    return check.verdict


def mean_by_counts(outputs, labels, num_items_in_batch=None):
    """For compute_loss_func: the sum of losses over the targets of the whole step."""
    logits = outputs.logits
    if logits.dim() == 4:  # of images
        logits = F.interpolate(logits, size=labels.shape[-2:], mode="bilinear", align_corners=False).movedim(1, -1)
    return F.cross_entropy(logits.flatten(0, -2), labels.flatten(), reduction="sum") / num_items_in_batch


def of_deepspeed(cell):
    """Its configuration; and a state of Accelerate that has it on CPUs, where it is not looked for."""
    import deepspeed
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which a compiler would have to make first; Gloo instead
    os.environ.update(ACCELERATE_USE_DEEPSPEED="true", ACCELERATE_USE_CPU="false")
    accelerate.PartialState(cpu=False, backend="gloo")
    return {"zero_optimization": {"stage": int(cell.wrap[-1])}, "gradient_clipping": MAX_NORM,
            "gradient_accumulation_steps": cell.accumulation, "train_micro_batch_size_per_gpu": cell.micro_batch,
            "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9}


def trained(cell, folder, shifts=False, accepts_loss_kwargs=None, by_counts=False, reference="float64", **more):
    """transformers.Trainer."""
    if cell.wrap in ZERO:
        more.update(deepspeed=of_deepspeed(cell), accelerator_config={"use_configured_state": True})
    model = make_model(cell.row.task)
    if accepts_loss_kwargs is not None:
        model.accepts_loss_kwargs = accepts_loss_kwargs
    trainer = transformers.Trainer(model, arguments(cell, folder, transformers.TrainingArguments, **more), train_dataset=documents(cell),
                                   data_collator=collator(cell.data), compute_loss_func=mean_by_counts if by_counts else None)
    trainer._loss_shifts_labels |= shifts
    return verdict_of(trainer, cell, reference)


def with_trl(cell, folder, kind, **more):
    """A trainer of TRL; more: its own arguments."""
    import datasets  # of TRL alone
    import trl

    words = {"[PAD]": PAD, **{str(i): i for i in range(1, VOCABULARY)}}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, "[PAD]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    others = {"ref_model": make_model(seed=2)} if kind == "DPO" else {}
    trainer = getattr(trl, f"{kind}Trainer")(
        make_model(cell.row.task), args=arguments(cell, folder, getattr(trl, f"{kind}Config"), max_length=64, bf16=False,
                                                  gradient_checkpointing=False, **more), **others,
        train_dataset=datasets.Dataset.from_list(documents(cell)), processing_class=transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[PAD]"))
    return verdict_of(trainer, cell)


def sft(cell, folder, **more):
    return with_trl(cell, folder, "SFT", packing=cell.data == "packed", **more)
