"""The cells of the report card as data: trainer, ranks, accumulation, documents and wrap. No library is loaded here."""
import dataclasses
import importlib
import importlib.util

MICRO_BATCH = 2  # documents; one where `data` is "uneven"
DATA = ("even", "padded", "packed", "uneven", "remainder")  # what a micro-batch is made of: docs/trials.md
ZERO = ("ZeRO-1", "ZeRO-2", "ZeRO-3")


@dataclasses.dataclass(frozen=True)
class Trainer:
    """A library's loop with one model, task and options; its cells are all of ranks, accumulations, data and wraps."""

    loop: str  # "module:function"; function(cell, folder, **options) -> the verdict
    says: str
    task: str = "llama"  # of model_and_data.TASKS
    options: dict = dataclasses.field(default_factory=dict)
    ranks: tuple = (1, 2)
    data: tuple = DATA
    wraps: tuple = ("DDP",)  # on two ranks
    needs: tuple = ()  # modules beyond those that the loop's own loads

    @property
    def missing(self):
        """The name of a module that is not installed; None: all are."""
        for name in self.needs:
            if importlib.util.find_spec(name) is None:
                return name
        try:
            importlib.import_module(self.loop.partition(":")[0])
        except ModuleNotFoundError as error:
            return error.name
        return None

    def make(self, cell, folder):
        module, _, name = self.loop.partition(":")
        return getattr(importlib.import_module(module), name)(cell, folder, **self.options)


@dataclasses.dataclass(frozen=True)
class Program:
    """Cells that a program of tests/python_package makes, all in one call: it prints {setting: verdict}, or that by rank."""

    file: str
    says: str
    needs: tuple
    arguments: tuple = ()
    every: tuple = ()  # its settings, where not the program itself has them

    @property
    def missing(self):
        return next((name for name in self.needs if importlib.util.find_spec(name) is None), None)


HUGGINGFACE, SFT, ENCODER = "transformers_loops:trained", "transformers_loops:sft", ("even", "padded", "remainder")
PAIRS = ("even", "uneven", "remainder")
BY_RANK, SHIFTS = {"average_tokens_across_devices": False}, {"shifts": True}
MEANS, COUNTS = {"accepts_loss_kwargs": False}, {"by_counts": True}
TRAINERS = {
    "transformers": Trainer(HUGGINGFACE, "transformers.Trainer as it comes"),
    "transformers-gpt2": Trainer(HUGGINGFACE, "the same with a GPT2LMHeadModel", "gpt2"),
    "transformers-gpt2-shifts": Trainer(HUGGINGFACE, "the same, `_loss_shifts_labels` of the trainer set to True", "gpt2", SHIFTS, (2,)),
    "transformers-by-rank": Trainer(HUGGINGFACE, "with `average_tokens_across_devices=False`", options=BY_RANK, ranks=(2,)),
    "transformers-vit": Trainer(HUGGINGFACE, "ViTForImageClassification", "vit", data=("even", "remainder")),
    "transformers-bert": Trainer(HUGGINGFACE, "BertForTokenClassification", "bert-tokens", data=ENCODER),
    "transformers-bert-masked": Trainer(HUGGINGFACE, "BertForMaskedLM", "bert-masked", data=("padded",)),
    "transformers-t5": Trainer(HUGGINGFACE, "T5ForConditionalGeneration", "t5", data=ENCODER),
    "transformers-segformer": Trainer(HUGGINGFACE, "SegformerForSemanticSegmentation, its BatchNorm frozen", "segformer", data=ENCODER),
    "transformers-wav2vec2": Trainer(HUGGINGFACE, "Wav2Vec2ForSequenceClassification", "wav2vec2", data=("even", "remainder")),
    "transformers-wav2vec2-ctc": Trainer(HUGGINGFACE, "Wav2Vec2ForCTC, `ctc_loss_reduction=\"mean\"`", "wav2vec2-ctc",
                                         data=("even", "remainder")),
    "transformers-bert-means": Trainer(HUGGINGFACE, "BertForTokenClassification with `model.accepts_loss_kwargs = False`",
                                       "bert-tokens", MEANS, data=ENCODER),
    "transformers-wav2vec2-means": Trainer(HUGGINGFACE, "Wav2Vec2ForSequenceClassification with the same", "wav2vec2", MEANS,
                                           data=("even", "remainder")),
    **{f"transformers-{task}-counts": Trainer(HUGGINGFACE, f"{model} with `compute_loss_func=`", of, COUNTS, data=("padded",))
       for task, model, of in (("bert", "BertForTokenClassification", "bert-tokens"), ("bert-masked", "BertForMaskedLM", "bert-masked"),
                               ("t5", "T5ForConditionalGeneration", "t5"), ("segformer", "SegformerForSemanticSegmentation", "segformer"))},
    "transformers-deepspeed": Trainer(HUGGINGFACE, "transformers.Trainer under DeepSpeed", ranks=(2,), data=("even", "padded"), wraps=ZERO,
                                      needs=("deepspeed",)),
    "trl": Trainer(SFT, "TRL's SFTTrainer; packed: `packing=True`", needs=("trl",)),
    "trl-gpt2": Trainer(SFT, "the same with a GPT2LMHeadModel", "gpt2", needs=("trl",)),
    "trl-by-rank": Trainer(SFT, "the same with `average_tokens_across_devices=False`", options=BY_RANK, ranks=(2,), needs=("trl",)),
    "trl-dpo": Trainer("transformers_loops:with_trl", "TRL's DPOTrainer, `beta=0.1`", "dpo", {"kind": "DPO", "beta": 0.1}, data=PAIRS, needs=("trl",)),
    "trl-reward": Trainer("transformers_loops:with_trl", "TRL's RewardTrainer", "reward", {"kind": "Reward"}, data=PAIRS, needs=("trl",)),
    "accelerate": Trainer("accelerate_loops:means", "Accelerate's loop as its quick tour has it: the model's mean loss, accumulate, "
                          "backward, clip"),
    "accelerate-by-counts": Trainer("accelerate_loops:counts", "Accelerate's loop as its guide to accumulation has it for samples of other "
                                    "sizes: targets are counted first"),
    "accelerate-deepspeed": Trainer("accelerate_loops:deepspeed", "Accelerate's loop under DeepSpeed, the model's mean loss", ranks=(2,),
                                    data=("even", "padded"), wraps=ZERO, needs=("deepspeed",)),
    "lightning": Trainer("lightning_loops:lit", "Lightning's Trainer with a module that returns the model's mean loss",
                         wraps=("DDP", "FSDP2")),
    # Without a remainder: an update of Ignite takes its micro-batches from two epochs.
    "ignite": Trainer("accelerate_loops:ignited", "Ignite's create_supervised_trainer with the model's mean loss, under DDP by its "
                      "auto_model; it has no place to clip", data=DATA[:-1], needs=("ignite",))}
_STAGES = ("", "_clipped", "_micro_batch_means", "_divided_twice", "_updates_each_micro_batch")
PROGRAMS = {
    "losses": Program("contrastive.py", "losses of open_clip, lightly, pytorch-metric-learning and sentence-transformers on two and three "
                      "ranks", ("open_clip", "lightly", "pytorch_metric_learning", "sentence_transformers")),
    "deepspeed": Program("engine_libraries.py", "DeepSpeed's engine in a loop of its own, right and with mistakes", ("deepspeed",),
                         ("2",), tuple(f"zero{stage}{name}" for stage in (1, 2, 3) for name in _STAGES))}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One step of one trainer. wrap: "none", "DDP", "FSDP2", or a stage of DeepSpeed."""

    trainer: str
    ranks: int
    accumulation: int
    data: str
    wrap: str

    @property
    def name(self):
        return f"{self.trainer}-{self.ranks}-{self.accumulation}-{self.data}-{self.wrap}"

    @property
    def row(self):
        return TRAINERS[self.trainer]

    @property
    def micro_batch(self):
        return 1 if self.data == "uneven" else MICRO_BATCH

    @property
    def step(self):
        """Which update is compared: the one that the remainder of the documents is left for, else the first."""
        return 2 if self.data == "remainder" else 1


def cells():
    """All of them, in the page's order."""
    for name, trainer in TRAINERS.items():
        for ranks in trainer.ranks:
            for accumulation in (1, 4):
                for data in trainer.data:
                    for wrap in trainer.wraps if ranks > 1 else ("none",):
                        if data != "remainder" or accumulation > 1:
                            yield Cell(name, ranks, accumulation, data, wrap)
