"""python engine_libraries.py RANKS [CASE ...]: steps of DeepSpeed's engine, and with 8-bit optimizers of bitsandbytes and torchao, under
isograd.watch, as engines.py has them."""
import contextlib
import os
import pathlib
import sys
import tempfile
from unittest import mock

import deepspeed
import torch
import torch.distributed as dist
from cases import batch_loss, make_model, Mlp, sample_loss
from engines import batches, case, CASES, main, make_tied, result, total_of, train
from torch.nn.parallel import DistributedDataParallel

import isograd

CASES.clear()
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # which a compiler would have to make first; Gloo instead


def make_engine(stage, make=make_model, optimizer=torch.optim.SGD, accumulation=3, clip=0.0, precision="fp32", scale=None,
                offload=False, sums=None, **more):
    os.environ["LOCAL_RANK"] = str(dist.get_rank())
    model = make()
    zero = {"stage": stage, **more}
    if offload:
        zero["offload_optimizer"] = {"device": "cpu"}
    config = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": accumulation, "gradient_clipping": clip,
              "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9,
              "zero_optimization": zero}
    if precision != "fp32":
        config[precision] = {"enabled": True, **({} if scale is None else {"initial_scale_power": scale})}
    if sums:
        config["data_types"] = {"grad_accum_dtype": sums}
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer(model.parameters(), lr=0.1), config=config)
    return engine


def step_of(engine, batch, how=None, before=None):
    """DeepSpeed divides by the accumulation and by the ranks."""
    total, logged = total_of(batch), 0.0
    factor = 1 if how == "divided twice" else dist.get_world_size() * engine.gradient_accumulation_steps()
    dtype = next(engine.parameters()).dtype
    for micro in batch:
        micro = [(x.to(dtype), y) for x, y in micro]
        loss = batch_loss(engine, micro, "mean") if how == "means" else batch_loss(engine, micro, "sum").float() * factor / total
        if before:
            before(engine)
        engine.backward(loss)
        logged += float(loss.detach())
        engine.step()
    logged = torch.tensor(logged / engine.gradient_accumulation_steps() / dist.get_world_size())
    dist.all_reduce(logged)
    return logged


def forgets(engine):
    """What micro-batches have added up is dropped at each new one."""
    for sums in (engine.optimizer.all_grad_tensors, engine.optimizer.averaged_gradients):
        sums.clear()


def clips_twice(engine):
    """The coefficient is applied a second time."""
    if "unscale_and_clip_grads" not in vars(engine.optimizer):
        once = engine.optimizer.unscale_and_clip_grads
        engine.optimizer.unscale_and_clip_grads = lambda *given: (once(*given), once(*given))


class Unused(Mlp):
    def __init__(self):
        super().__init__()
        self.unused = torch.nn.Linear(5, 3)


def make_unused():
    torch.manual_seed(2)
    return Unused()


class Wide(Mlp):
    """With weights of 4096 elements: torchao leaves smaller ones in fp32."""

    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 512), torch.nn.Linear(512, 8)


def make_wide():
    torch.manual_seed(2)
    return Wide()


def zero(rank, how=None, before=None, make=make_model, micros=3, accumulation=None, watched=lambda engine: engine, version=None,
         **options):
    engine = make_engine(make=make, accumulation=accumulation or micros, **options)
    batch = batches(rank, micros)
    with mock.patch.object(deepspeed, "__version__", version or deepspeed.__version__), isograd.watch(
            watched(engine), engine.optimizer, micro_batches=batch, loss=sample_loss, make_model=make) as step:
        step.log(loss=step_of(engine, batch, how, before), norm=engine.get_global_grad_norm() if options.get("clip") else None)
    return result(step)


SETTINGS = {
    "": {}, "_clipped": {"clip": 0.1, "optimizer": torch.optim.AdamW}, "_bf16": {"precision": "bf16", "clip": 0.1},
    "_fp16": {"precision": "fp16", "clip": 0.1}, "_tied_and_frozen": {"make": make_tied}, "_unused": {"make": make_unused},
    "_micro_batch_means": {"how": "means"}, "_divided_twice": {"how": "divided twice"}, "_without_an_update": {"accumulation": 4},
    "_updates_each_micro_batch": {"accumulation": 1}, "_offload": {"offload": True}, "_clipped_twice": {"clip": 0.1, "before": clips_twice}}
for stage in (0, 1, 2, 3):
    for name, options in SETTINGS.items():
        if stage > 0 or name not in ("_offload", "_clipped_twice"):
            case(f"zero{stage}{name}", stage=stage, **options)(zero)
case("zero2_last_micro_batch_alone", stage=2, before=forgets)(zero)
case("zero2_overlapped", stage=2, overlap_comm=True, contiguous_gradients=True, reduce_bucket_size=50)(zero)
case("zero2_not_contiguous", stage=2, contiguous_gradients=False, reduce_scatter=False)(zero)
case("zero3_small_parameters_cut", stage=3, stage3_param_persistence_threshold=0, sub_group_size=60)(zero)
case("zero2_fp16_overflows", stage=2, precision="fp16", scale=40)(zero)
case("zero2_round_robin", stage=2, round_robin_gradients=True)(zero)
case("zero1_bf16_sums_in_fp32", stage=1, precision="bf16", sums="fp32")(zero)
case("another_version", stage=2, version="0.17.6")(zero)
case("no_version", stage=2, version="unknown")(zero)
case("without_the_engine", stage=2, watched=lambda engine: engine.module)(zero)
case("without_the_engine_of_zero3", stage=3, watched=lambda engine: engine.module)(zero)


@case("megatron")
@case("megatron_last_micro_batch_alone", zeroes_each=True)
@case("megatron_of_the_step_before", stale=True)
@case("megatron_not_summed", sums=False)
@case("megatron_distributed_optimizer", use_distributed_optimizer=True)
def megatron(rank, zeroes_each=False, stale=False, sums=True, **more):
    """Its buffers are made on the device that torch.cuda.current_device() names: here on the CPU. It is not of any other use."""
    from megatron.core import distributed, parallel_state
    from megatron.core.transformer import TransformerConfig
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()
    with mock.patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")):
        model = distributed.DistributedDataParallel(
            TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1),
            distributed.DistributedDataParallelConfig(grad_reduce_in_fp32=True, **more), make_model())
    optimizer, batch = torch.optim.SGD(model.parameters(), lr=0.1), batches(rank)
    if stale:
        step_of_megatron(model, optimizer, batch[:1])
    with isograd.watch(model, optimizer, micro_batches=batch, loss=sample_loss, make_model=make_model) as step:
        step_of_megatron(model, optimizer, batch, not stale, zeroes_each, sums)
    return result(step)


def step_of_megatron(model, optimizer, batch, zeroes=True, zeroes_each=False, sums=True):
    total = total_of(batch)
    for j, micro in enumerate(batch):
        if zeroes and j == 0 or zeroes_each:
            model.zero_grad_buffer()
        with model.no_sync() if j + 1 < len(batch) else contextlib.nullcontext():
            (batch_loss(model, micro, "sum") / total * dist.get_world_size()).backward()
    if sums:
        model.finish_grad_sync()
    for p in model.parameters():
        p.grad = p.main_grad.clone()
    optimizer.step()


@case("trainer_zero2")
@case("trainer_zero3", stage=3)
@case("trainer_zero2_own_counts", data="padded")
@case("trainer_without_make_model", told=False)
def trainer(rank, stage=2, data="even", told=True):
    """transformers.Trainer with DeepSpeed. On a CPU Accelerate takes each rank for the only one: it gives each the whole data set, and
    counts the targets of one rank."""
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1] / "trials"))
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(dist.get_world_size()), MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    import transformers
    from model_and_data import documents, make_model, padded
    from table import Cell

    from isograd.trainers.transformers import StepCheck
    auto = {name: "auto" for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")}
    with tempfile.TemporaryDirectory() as folder:
        loop = transformers.Trainer(make_model(), transformers.TrainingArguments(
            output_dir=folder, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=1, max_grad_norm=0.1, logging_steps=1,
            save_strategy="no", report_to="none", disable_tqdm=True, dataloader_pin_memory=False, ddp_backend="gloo", deepspeed={
                **auto, "zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "steps_per_print": 10**9,
                "zero_optimization": {"stage": stage}}),
            train_dataset=documents(Cell("transformers", 2, 2, data, "DDP"))[rank::dist.get_world_size()], data_collator=padded)
        check = StepCheck(loop, **({"make_model": make_model} if told else {}))
        loop.train()
    return result(check)


@case("proved")
def proved(rank):
    engine = make_engine(2)
    isograd.prove(lambda *_: None, engine, engine.optimizer, micro_batches=batches(rank), loss=sample_loss, make_model=make_model)


@case("bitsandbytes", how=None)
@case("bitsandbytes_micro_batch_means", how="means")
@case("torchao", library="torchao", how=None)
@case("torchao_micro_batch_means", library="torchao", how="means")
def eight_bit(rank, how, library="bitsandbytes"):
    model = DistributedDataParallel(make_wide())
    if library == "torchao":
        from torchao.optim import AdamW8bit
        optimizer = AdamW8bit(model.parameters(), lr=0.01, block_size=16)
    else:
        from bitsandbytes.optim import AdamW8bit
        optimizer = AdamW8bit(model.parameters(), lr=0.01, min_8bit_size=16)
    batch = batches(rank)
    with isograd.watch(model, optimizer, micro_batches=batch, loss=sample_loss) as step:
        loss, _ = train(model, optimizer, batch, how=how)
        step.log(loss=loss)
    tensors = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, torch.Tensor)]
    return {**result(step), "states": sorted({f"{type(value).__name__} {value.dtype}" for value in tensors})}


if __name__ == "__main__":
    main()
