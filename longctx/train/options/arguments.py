"""Every option of ours, documented: what is trained, on which data, and how.

`longctx train` also takes those of `transformers.TrainingArguments` (config.py), which this module
does not import: what a run's folder says is read without torch.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from longctx.errors import UserError
from longctx.ranges import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, Range
from longctx.settings import (
    PARTS,
    Backend,
    ClassType,
    Keeping,
    Offload,
    PatchOptions,
    check_names,
    chosen_parts,
)
from longctx.system import CACHE
from longctx.train.options.about import APPLIED, CHECKPOINTS, NUMBERS, ROWS, About, Need, having
from longctx.train.options.limits import check_values
from longctx.train.options.source import PRESETS, ModelSource
from longctx.train.options.task import TaskOptions
from longctx.train.options.theirs import OF_TRANSFORMERS, about
from longctx.train.options.written import LENGTH, pixels_of

_CUSTOM = Need("--class_type custom without --parts", lambda m, d, t: m.schedules)
_HOST = Need(
    "--place auto or host, or --class_type custom or any with --offload_activations auto or all",
    lambda m, d, t: t.place != "gpu" or (m.keeps_inputs and m.offload_activations != "none"),
)
_GPU = Need("a GPU", lambda m, d, t: t.device.type == "cuda")
_DATASET = Need("--dataset_name", lambda m, d, t: d.dataset_name)
_EVALUATED = Need("--eval_file or --eval_share", lambda m, d, t: d.eval_file or d.eval_share)
_LOGS = Need("--logging_strategy steps", lambda m, d, t: t.logging_strategy == "steps")

# Each makes options of one group of the help. The rare ones are in --help_all alone.
_model, _rare_model = having("model"), having("model", rare=True)
_data, _rare_data = having("data"), having("data", rare=True)
_memory, _custom = having("memory"), having("memory", _CUSTOM)
_rare_memory = having("memory", rare=True)
_adapters, _rare_adapters = having("adapters", NUMBERS), having("adapters", NUMBERS, rare=True)
_training, _rare_training = having("training"), having("training", rare=True)
_output, _rare_output = having("output"), having("output", rare=True)


@dataclass(frozen=True, kw_only=True)
class ModelArguments:
    """Options of the model: what is trained and which code runs it."""

    model_name_or_path: str | None = _model(
        None, "Pretrained model: a local folder, a .gguf file or a hub id. Give this or --preset."
    )
    preset: str | None = _model(
        None,
        "Architecture with random weights, for tests. Nothing is downloaded.",
        choices=tuple(PRESETS),
    )
    class_type: ClassType = _model(
        "custom",
        "custom (longctx), any, liger (Liger-Kernel) or vanilla. vanilla is the model as it is; "
        "any is that with longctx's checkpoints, attention and loss, whatever the model.",
        APPLIED,
    )
    parts: list[str] | None = _rare_model(
        None,
        "Single parts in Hugging Face's layers: rope, rms_norm, layer_norm, swiglu, geglu, "
        "cross_entropy or fused_linear_cross_entropy. custom: ours of these names (default: "
        "schedule, which is more than all of them); liger: the switches that Liger-Kernel has for "
        "the model (default: its own).",
        APPLIED,
    )
    seq_len: int = _model(
        4096, f"Tokens in one packed row, {LENGTH}. K is 1024 and M 1024 K.", ROWS
    )
    extend_context: bool = _model(
        False, "Allow a --seq_len beyond the model's positions. The run says what RoPE does there."
    )
    rope_scaling: Literal["none", "yarn", "linear"] = _model(
        "none",
        "Scale RoPE to --seq_len: none, yarn or linear. For the run and in what it saves, from the "
        "model's max_position_embeddings; yarn is best after a short fine-tune. Implies "
        "--extend_context.",
        NUMBERS,
    )
    attn_backend: Backend = _model(
        "auto",
        "Attention's kernel; auto takes the fastest there is. custom: fa4 (flash-attn-4), cudnn, "
        "flash or math; any: these, or sdpa or eager, which are the model's own (auto: ours if the "
        "model takes it); vanilla and liger: sdpa (auto), fa4, fa2 or eager.",
        APPLIED,
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _model(
        "auto", "Dtype of the weights; auto: bfloat16 on a GPU, else float32.", NUMBERS
    )
    dropout: float | None = _rare_model(
        None,
        "0 sets the model's dropouts to 0, for the run and in what it saves. With dropout in its "
        "config.json Hugging Face's layers run, also under custom. Default: as config.json says.",
        Range(0, 0),  # the schedule has no dropout
    )
    keep: Keeping = _custom(
        "auto",
        "custom: activations kept per layer, x, o, h, qkv or all. The layer's input x, attention's "
        "output o, the residual stream h, q k v, or all, gate and up too; each has what stands "
        "before it, and the rest is computed again in backward. auto: as much as is fastest in the "
        "memory there is.",
    )
    offload_activations: Offload = _memory(
        "auto",
        "Kept activations on the GPU (none) or host (all). auto of custom and any fills the GPU "
        "first; in vanilla and liger it is none, and all is transformers' offloaded checkpointing.",
    )
    head_groups: int | None = _rare_memory(
        None,
        "custom: parts in which attention runs; more need less memory. Default: by what is free.",
        _CUSTOM,
    )
    tile_tokens: int | None = _rare_memory(
        None,
        "custom: tokens the token-wise work takes at a time. Default: by what is free.",
        _CUSTOM,
    )
    share_prefixes: bool = _rare_memory(
        False,
        "custom: compute a prompt with which several documents of a batch begin once.",
        _CUSTOM,
    )
    cuda_graphs: Literal["auto", "off"] = _rare_memory(
        "auto",
        "custom: run the layers of short batches that are alike as CUDA graphs. auto or off.",
        _CUSTOM,
    )
    host_memory_gib: float | None = _memory(
        None, "Host memory that the run may use, in GiB. Default: what is available.", _HOST
    )
    lora_r: int | None = _adapters(
        None, "Train LoRA adapters of this rank. The model is frozen; PEFT makes them.", COUNT
    )
    lora_alpha: int | None = _adapters(
        None, "Adapters count alpha / r times. Default: twice --lora_r.", COUNT
    )
    lora_dropout: float = _adapters(
        0.0, "Share of an adapter's input that is dropped in training.", SHARE
    )
    lora_targets: list[str] | None = _adapters(
        None,
        "Linear layers that get an adapter, as q_proj v_proj. Default: all-linear, those of all "
        "decoder layers.",
    )
    lora_modules_to_save: list[str] | None = _rare_adapters(
        None, "Trained as a whole beside adapters and saved with them: embed_tokens, lm_head."
    )
    use_dora: bool = _rare_adapters(
        False, "DoRA: adapters that also train the length of each row of what they adapt."
    )
    quantize: Literal["none", "nf4"] = _adapters(
        "none", "nf4: the frozen weights in 4 bits (QLoRA). By bitsandbytes; needs --lora_r."
    )
    tokenizer_name: str | None = _rare_model(
        None, "Tokenizer folder or hub id, when it is not the model's own."
    )
    trust_remote_code: bool = _model(
        False, "Run Python code that a model repository ships. Only for repositories you trust."
    )
    train_vision: bool = _model(
        False, "Train the vision tower, too; without it, that is frozen.", NUMBERS
    )

    def __post_init__(self) -> None:
        if self.model_name_or_path and self.preset:
            raise UserError(
                "give --model_name_or_path or --preset, not both "
                f"(got {self.model_name_or_path!r} and {self.preset!r})"
            )
        check_values(self)
        check_values(self.patch_options)
        if self.patch_options.parts is not None:
            self._check_parts(self.patch_options.parts)

    def _check_parts(self, parts: tuple[str, ...]) -> None:
        """Raises UserError where no layers could have these parts; Liger-Kernel knows its own."""
        if self.class_type in ("vanilla", "any"):
            raise UserError(
                f"--parts is for --class_type custom and liger: the layers of {self.class_type} "
                "are Hugging Face's as they are"
            )
        if self.class_type == "custom":
            check_names("--parts", parts, PARTS)

    @property
    def patch_options(self) -> PatchOptions:
        """The options of `longctx.patch`."""
        given = {f.name: getattr(self, f.name) for f in fields(PatchOptions)}
        return PatchOptions(**{**given, "parts": chosen_parts("--parts", self.parts)})

    @property
    def schedules(self) -> bool:
        """Whether our schedule is to run the layers."""
        return self.patch_options.schedules

    @property
    def keeps_inputs(self) -> bool:
        """Whether our store is to hold what layers keep for backward."""
        return self.schedules or self.class_type == "any"

    @property
    def source(self) -> ModelSource:
        """The place of a pretrained model."""
        return ModelSource(
            name=self.model_name_or_path,
            preset=None if self.model_name_or_path else self.preset,
            trust_remote_code=self.trust_remote_code,
            frozen=self.lora_r is not None,
            in_nf4=self.quantize == "nf4",
            keeps_packed=self.lora_r is not None and self.schedules,
        )

    def of_another(self, name: str | None, **changes: Any) -> ModelArguments:
        """Returns the options of a whole model that runs next to this one, as it does: without
        adapters."""
        none = dict.fromkeys(("preset", "lora_r", "lora_targets", "lora_modules_to_save"))
        return replace(self, model_name_or_path=name, use_dora=False, **{**none, **changes})


@dataclass(frozen=True, kw_only=True)
class DataArguments:
    """Options of data: which text becomes tokens, and how documents are packed into rows."""

    train_file: list[str] | None = _data(
        None,
        "Files, folders, globs: text, code or records (`longctx help data`). Records are JSON, "
        "JSONL, CSV, TSV, Parquet or Arrow with `text`, `messages`, `conversations`, "
        "`prompt`/`completion` or `instruction`/`output`; for other tasks "
        "`prompt`/`chosen`/`rejected` or `prompt`/`completion`/`label`. Default: "
        "Python's own standard library.",
    )
    eval_file: list[str] | None = _data(None, "Evaluation data, in the same forms.")
    eval_share: float | None = _data(
        None,
        "Hold out this share of the documents for evaluation. Instead of --eval_file; which ones "
        "depends on --seed alone.",
        Range(0, 1, open_low=True, open_high=True),
        ROWS,
    )
    max_samples: int | None = _rare_data(
        None,
        "Read so many records of each file, for trial runs. The first ones of each file of records "
        "and of a dataset; of files of text, which are a document each, so many in all.",
        COUNT,
        ROWS,
    )
    dataset_name: str | None = _data(
        None, "Hub id or local path of a dataset, instead of --train_file."
    )
    dataset_config: str | None = _rare_data(None, "Configuration of --dataset_name.", _DATASET)
    dataset_split: str = _data("train", "Split of --dataset_name to train on.", _DATASET)
    streaming: bool = _data(
        False, "Read --dataset_name while training. No local copy is made; needs --max_steps."
    )
    long_documents: Literal["split", "truncate", "truncate_start"] = _data(
        "split",
        "Beyond --seq_len: split, truncate or truncate_start. A longer document is split into "
        "several rows, or cut at its end or its start. A prompt with its answers is refused, or "
        "loses the answers' ends or the prompt's start.",
        ROWS,
    )
    allow_undecodable: bool = _rare_data(
        False, "Train on files of which more than one byte in fifty is not text, and is replaced."
    )
    image_pixels: str | None = _data(
        None,
        "Most pixels of an image, as 448x448; a larger one is made smaller. Default: as the "
        "model's processor has it.",
        ROWS,
    )
    show_example: bool = _data(
        False, "Print one packed row, its trained tokens in colour, and end."
    )
    cache_dir: str = _rare_data(CACHE, "Where tokenised data and the default tokenizer are kept.")

    def __post_init__(self) -> None:
        check_values(self)
        if self.image_pixels is not None:
            pixels_of(self.image_pixels)
        if self.train_file and self.dataset_name:
            raise UserError("give --train_file or --dataset_name, not both")
        if self.streaming and not self.dataset_name:
            raise UserError("--streaming reads a --dataset_name; local files need no streaming")
        if self.eval_share and self.eval_file:
            raise UserError(
                "--eval_share holds out documents of the training data, --eval_file names others: "
                "give one of the two"
            )
        if self.eval_share and self.streaming:
            raise UserError(
                "--eval_share is a share of documents that are known, which a stream's are not: "
                "leave out --streaming, or give --eval_file"
            )


@dataclass(kw_only=True)
class TrainOptions(TaskOptions):
    """Options of training: those of longctx, and those of transformers with another default, which
    suits long rows on one GPU."""

    output_dir: str | None = _output("runs/longctx", "Checkpoints, metrics.jsonl and final model.")
    overwrite_output_dir: bool = _output(
        False, "Delete an earlier run in --output_dir, instead of refusing."
    )
    per_device_train_batch_size: int = _training(
        1, "Packed rows a device takes at a time.", COUNT, ROWS
    )
    per_device_eval_batch_size: int = _rare_training(
        1, "Packed rows a device evaluates at a time.", COUNT, _EVALUATED
    )
    num_train_epochs: float = _training(
        1.0, "Passes over the data, unless --max_steps is given.", POSITIVE, APPLIED
    )
    sequence_parallel_size: int = _memory(
        1,
        "Processes that share each row, with FSDP or DeepSpeed. Each has consecutive tokens.",
        COUNT,
    )
    gradient_checkpointing: bool | None = _rare_memory(
        True, "Recompute a layer's activations in backward instead of keeping them.", CHECKPOINTS
    )
    bf16: bool | None = _rare_training(
        None,
        "Mixed precision: bf16 compute over fp32 weights. Default: on with DeepSpeed or FSDP on "
        "GPUs, which keep the fp32 weights; else off, and --dtype says what is trained.",
        NUMBERS,
    )
    resume_from_checkpoint: str | None = _output(
        None,
        "Continue from a checkpoint-N folder, or from last or auto. `last`: the newest whole one "
        "in --output_dir; `auto`: that, or a new run where there is none yet, for jobs that are "
        "requeued.",
    )
    allow_changed: list[str] | None = _output(
        None, "Resume though these differ: seq_len, seed, data or others. The refusal names them."
    )
    logging_steps: float = _output(1, "Steps between two logged lines.", POSITIVE, APPLIED, _LOGS)
    report_to: list[str] = _output([], "tensorboard, wandb, ...; none by default.")
    prediction_loss_only: bool = _output(
        True, "Evaluation returns the loss only: logits of a long row do not fit in memory."
    )
    save_total_limit: int | None = _output(
        2, "Checkpoints kept; the oldest is deleted. 0 keeps all.", NOT_NEGATIVE
    )
    memory_snapshot_on_oom: bool = _rare_memory(
        False,
        "Record allocations and, when the GPU's memory runs out, write them to --output_dir for "
        "PyTorch's memory viewer.",
    )
    remove_unused_columns: bool = _rare_data(
        False,
        "Drop columns the model does not take. Rows carry their documents' numbers for errors.",
    )
    on_save_error: Literal["stop", "continue"] = _rare_output(
        "stop", "A checkpoint that cannot be written (full disk): end the run, or train on."
    )
    loraplus_lr_ratio: float | None = _rare_adapters(
        None, "LoRA+: each adapter's B has so many times the learning rate of its A.", POSITIVE
    )
    on_nonfinite: Literal["stop", "skip"] = _training(
        "stop", "Loss or gradient not finite: stop the run or skip the step."
    )
    optimizer_states: Literal["fp32", "as_weights"] | None = _memory(
        None,
        "AdamW's states: fp32 (exact, the default in bf16) or as_weights. Without an engine. fp32: "
        "fp32 master weights and moments, also of bfloat16 weights; as_weights: moments in the "
        "dtype of the weights and no master, which in bfloat16 loses most of the updates.",
        APPLIED,
    )
    place: Literal["auto", "gpu", "host"] = _memory(
        "auto",
        "Where weights, gradients and states live: auto, gpu or host. auto fills the GPU first, "
        "block by block; weights leave it with --class_type custom only.",
    )
    gpu_memory_gib: float | None = _memory(
        None, "GPU memory that the run may use, in GiB. Default: what is free.", POSITIVE, _GPU
    )
    plan: str | None = _memory(
        None, "Run the plan in this file, of `longctx plan --json`. One of another run is refused."
    )
    save_fp32: bool = _rare_output(
        False, "final/ holds the fp32 master weights, of twice the size."
    )
    peak_tflops: float | None = _rare_output(
        None, "The device's dense peak in TFLOP/s, for MFU. Known for common GPUs.", POSITIVE
    )


OPTIONS: dict[str, About] = {
    option.name: about(option)
    for kind in (ModelArguments, DataArguments, TrainOptions)
    for option in fields(kind)
}
OPTIONS |= {name: known for name, known in OF_TRANSFORMERS.items() if name not in OPTIONS}
"""Facts about each option, by its name."""
