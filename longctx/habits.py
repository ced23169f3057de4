"""Options of other trainers that are written out of habit, and what to write here instead.

TRL, PEFT, axolotl, Unsloth, LLaMA-Factory and torchtune have many names for what a run is; where
longctx has the same name, it means the same and is not in this table.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from longctx.limits import NOT_OURS

_MODEL = "write --model_name_or_path: a folder, a .gguf file or a hub id"
_LENGTH = "write --seq_len, the tokens in one packed row"
_PACKED = (
    "leave it out: documents are always packed into rows of --seq_len tokens, and never attend "
)
_PACKED += "to each other"
_BATCH = "write --per_device_train_batch_size, the packed rows a device takes at a time"
_DATA = "write --train_file for files and folders, or --dataset_name for a dataset of the hub"
_TEXT = "leave it out: records have `text`, `messages`, `prompt` and `completion`, ...; see "
_TEXT += "docs/data.md"
_LORA = "write --lora_r RANK, which trains LoRA adapters"
_TARGETS = "write --lora_targets, as `--lora_targets q_proj v_proj`; the default is all-linear"
_FOUR_BITS = "write --quantize nf4, with --lora_r"
_EIGHT_BITS = "8 bits are not read here: write --quantize nf4, with --lora_r"
_ATTENTION = "write --attn_backend; auto takes the fastest that this GPU has"
_RECOMPUTE = "--class_type custom chooses what to recompute by itself (--keep); with vanilla and "
_RECOMPUTE += "liger write --gradient_checkpointing true or false"
_RATE = "write --learning_rate"
_EPOCHS = "write --num_train_epochs"
_TASK = "write --task: sft, dpo, kto, orpo, cpo, simpo, reward or distill"
_TEMPLATE = "leave it out: the tokenizer's own chat template is used; see docs/data.md"
_EVAL = "write --eval_file: files of their own for evaluation"
_REFERENCE = "write --reference, a folder or hub id; the default is the model before the first step"
_ROPE = "write --rope_scaling yarn or linear; the factor follows from --seq_len"
_PROCESSES = "write --sequence_parallel_size, with --deepspeed or --fsdp"
_TRACKER = "write --report_to wandb, and --run_name for the run's name"
_ACCUMULATE = "write --gradient_accumulation_steps"
_LIGER = "write --class_type liger"
_ENTROPY = "leave it out: --class_type custom never holds the logits of a whole row"

HABITS: dict[str, str] = {
    **dict.fromkeys(("model", "model_name", "base_model", "model_id", "model_path"), _MODEL),
    **dict.fromkeys(
        (
            *("max_length", "max_seq_length", "max_seq_len", "model_max_length", "cutoff_len"),
            *("sequence_len", "sequence_length", "seq_length", "block_size", "context_length"),
        ),
        _LENGTH,
    ),
    **dict.fromkeys(
        ("packing", "sample_packing", "packed", "neat_packing", "packing_strategy"), _PACKED
    ),
    **dict.fromkeys(("padding_free", "pad_to_sequence_len", "eval_packing"), _PACKED),
    **dict.fromkeys(
        ("micro_batch_size", "batch_size", "train_batch_size", "per_gpu_train_batch_size"), _BATCH
    ),
    "eval_batch_size": "write --per_device_eval_batch_size",
    **dict.fromkeys(
        ("dataset", "datasets", "dataset_path", "dataset_dir", "train_data", "data_path"), _DATA
    ),
    **dict.fromkeys(
        ("dataset_text_field", "text_column", "field_messages", "dataset_kwargs"), _TEXT
    ),
    "dataset_train_split": "write --dataset_split",
    "dataset_test_split": _EVAL,
    **dict.fromkeys(("eval_dataset", "test_datasets", "val_set_size", "val_size"), _EVAL),
    "dataset_num_proc": "leave it out: tokens are made once and kept in --cache_dir",
    "preprocessing_num_workers": "leave it out: tokens are made once and kept in --cache_dir",
    "dataset_prepared_path": "write --cache_dir",
    **dict.fromkeys(("use_peft", "lora", "use_lora", "lora_rank", "peft_type"), _LORA),
    **dict.fromkeys(
        ("adapter", "finetuning_type"), f"{_LORA}; without it the whole model is trained"
    ),
    **dict.fromkeys(
        ("lora_target_modules", "target_modules", "lora_target", "lora_target_linear"), _TARGETS
    ),
    "lora_attn_modules": _TARGETS,
    "modules_to_save": "write --lora_modules_to_save",
    "additional_target": "write --lora_modules_to_save",
    **dict.fromkeys(("load_in_4bit", "quantization_bit", "use_bnb_nested_quant"), _FOUR_BITS),
    **dict.fromkeys(("bnb_4bit_quant_type", "quantization_method"), _FOUR_BITS),
    "load_in_8bit": _EIGHT_BITS,
    **dict.fromkeys(
        ("attn_implementation", "flash_attn", "flash_attention", "use_flash_attention_2"),
        _ATTENTION,
    ),
    **dict.fromkeys(("sdp_attention", "xformers_attention", "eager_attention"), _ATTENTION),
    **dict.fromkeys(
        (
            "use_gradient_checkpointing",
            "enable_activation_checkpointing",
            "disable_gradient_checkpointing",
        ),
        _RECOMPUTE,
    ),
    **dict.fromkeys(
        ("activation_offloading", "enable_activation_offloading"),
        "write --offload_activations auto, all or none; auto is the default",
    ),
    **dict.fromkeys(("lr", "max_lr"), _RATE),
    **dict.fromkeys(("epochs", "num_epochs", "n_epochs", "max_epochs"), _EPOCHS),
    **dict.fromkeys(("max_steps_per_epoch", "steps", "num_steps"), "write --max_steps"),
    **dict.fromkeys(("lr_scheduler", "scheduler"), "write --lr_scheduler_type"),
    "warmup_ratio": "write --warmup_steps with a number below 1, which is a share of all steps",
    "optimizer": "write --optim",
    "clip_grad_norm": "write --max_grad_norm",
    "gradient_clipping": "write --max_grad_norm",
    **dict.fromkeys(("accumulation_steps", "grad_accum"), _ACCUMULATE),
    "torch_dtype": "write --dtype",
    "precision": "write --dtype",
    **dict.fromkeys(("stage", "rl", "trainer_type"), _TASK),
    **dict.fromkeys(("pref_beta", "dpo_beta", "rl_beta", "orpo_alpha", "kto_beta"), "write --beta"),
    **dict.fromkeys(("pref_loss", "dpo_loss_type"), "write --loss_type"),
    **dict.fromkeys(("ref_model", "ref_model_name_or_path", "reference_model"), _REFERENCE),
    **dict.fromkeys(("teacher_model", "teacher_model_name_or_path"), "write --teacher"),
    **dict.fromkeys(("chat_template", "chat_template_path", "template"), _TEMPLATE),
    **dict.fromkeys(
        ("train_on_inputs", "train_on_input", "train_on_prompt", "mask_inputs"),
        "leave it out: the answers alone are trained, or the turns that records name; see "
        "docs/data.md",
    ),
    **dict.fromkeys(
        ("assistant_only_loss", "completion_only_loss"),
        "leave it out: the answers of conversations and completions alone are trained; see "
        "docs/data.md",
    ),
    "max_prompt_length": "leave it out: a prompt with its answers has at most --seq_len tokens, "
    "and --long_documents says what becomes of a longer one",
    "truncation_mode": "write --long_documents: split, truncate or truncate_start",
    **dict.fromkeys(("rope_factor", "rope_theta", "yarn_factor"), _ROPE),
    **dict.fromkeys(
        ("context_parallel_size", "sequence_parallel_degree", "sp_size", "cp_size"), _PROCESSES
    ),
    **dict.fromkeys(("wandb_project", "wandb_run_name", "use_wandb"), _TRACKER),
    **dict.fromkeys(("use_liger", "enable_liger_kernel", "liger_kernel"), _LIGER),
    **dict.fromkeys(("cut_cross_entropy", "chunked_ce", "num_output_chunks"), _ENTROPY),
    "use_unsloth": "leave it out: --class_type custom is the schedule of longctx",
    "cpu_offload": "write --place auto, which keeps on the host what the GPU has no room for",
    "fsdp_cpu_offload": "write --fsdp_config, in which the offload of FSDP stands",
    "resume": "write --resume_from_checkpoint auto",
    "auto_resume_from_checkpoints": "write --resume_from_checkpoint auto",
    "output": "write --output_dir",
    "overwrite_cache": "leave it out: changed data make a new cache by themselves",
    "save_safetensors": "leave it out: models are always saved as safetensors",
    "evaluation_strategy": "write --eval_strategy",
    "tokenizer": "write --tokenizer_name",
    "tokenizer_name_or_path": "write --tokenizer_name",
    "config_file": "write --config",
}
"""Option of another trainer -> what to write instead."""


def unknown(name: str, valid: Iterable[str], *, dashes: str = "") -> str:
    """How a line about an option that nobody knows goes on: a habit's answer, else the nearest
    option that a run takes, if one is near."""
    if name in HABITS:
        return f": {HABITS[name]}"
    near = difflib.get_close_matches(name, {*valid} - NOT_OURS.keys(), n=1)
    if near:
        return f"; did you mean {dashes}{near[0]}?"
    return "; --help_all lists all options"
