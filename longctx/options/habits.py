"""Options of other trainers that are written out of habit, and what to write here instead.

TRL, PEFT, axolotl, Unsloth, LLaMA-Factory and torchtune have many names for what a run is; where
longctx has the same name, it means the same and is not in this table.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from longctx.options.limits import NOT_OURS

_TABLE = """
write --model_name_or_path: a folder, a .gguf file or a hub id
    model model_name base_model model_id model_path
write --seq_len, the tokens in one packed row
    max_length max_seq_length max_seq_len model_max_length cutoff_len sequence_len sequence_length
    seq_length block_size context_length
leave it out: documents are always packed into rows of --seq_len tokens, and never attend to each
other
    packing sample_packing packed neat_packing packing_strategy padding_free pad_to_sequence_len
    eval_packing
write --per_device_train_batch_size, the packed rows a device takes at a time
    micro_batch_size batch_size train_batch_size per_gpu_train_batch_size
write --per_device_eval_batch_size
    eval_batch_size
write --train_file for files and folders, or --dataset_name for a dataset of the hub
    dataset datasets dataset_path dataset_dir train_data data_path
leave it out: records have `text`, `messages`, `prompt` and `completion`, ...; see docs/data.md
    dataset_text_field text_column field_messages dataset_kwargs
write --dataset_split
    dataset_train_split
write --eval_file: files of their own for evaluation
    dataset_test_split eval_dataset test_datasets val_set_size val_size
leave it out: tokens are made once and kept in --cache_dir
    dataset_num_proc preprocessing_num_workers
write --cache_dir
    dataset_prepared_path
write --lora_r RANK, which trains LoRA adapters
    use_peft lora use_lora lora_rank peft_type
write --lora_r RANK, which trains LoRA adapters; without it the whole model is trained
    adapter finetuning_type
write --lora_targets, as `--lora_targets q_proj v_proj`; the default is all-linear
    lora_target_modules target_modules lora_target lora_target_linear lora_attn_modules
write --lora_modules_to_save
    modules_to_save additional_target
write --quantize nf4, with --lora_r
    load_in_4bit quantization_bit use_bnb_nested_quant bnb_4bit_quant_type quantization_method
8 bits are not read here: write --quantize nf4, with --lora_r
    load_in_8bit
write --attn_backend; auto takes the fastest that this GPU has
    attn_implementation flash_attn flash_attention use_flash_attention_2 sdp_attention
    xformers_attention eager_attention
--class_type custom chooses what to recompute by itself (--keep); with vanilla and liger write
--gradient_checkpointing true or false
    use_gradient_checkpointing enable_activation_checkpointing disable_gradient_checkpointing
write --offload_activations auto, all or none; auto is the default
    activation_offloading enable_activation_offloading
write --learning_rate
    lr max_lr
write --num_train_epochs
    epochs num_epochs n_epochs max_epochs
write --max_steps
    max_steps_per_epoch steps num_steps
write --lr_scheduler_type
    lr_scheduler scheduler
write --warmup_steps with a number below 1, which is a share of all steps
    warmup_ratio
write --optim
    optimizer
write --max_grad_norm
    clip_grad_norm gradient_clipping
write --gradient_accumulation_steps
    accumulation_steps grad_accum
write --dtype
    torch_dtype precision
write --task: sft, dpo, kto, orpo, cpo, simpo, reward or distill
    stage rl trainer_type
write --beta
    pref_beta dpo_beta rl_beta orpo_alpha kto_beta
write --loss_type
    pref_loss dpo_loss_type
write --reference, a folder or hub id; the default is the model before the first step
    ref_model ref_model_name_or_path reference_model
write --teacher
    teacher_model teacher_model_name_or_path
leave it out: the tokenizer's own chat template is used; see docs/data.md
    chat_template chat_template_path template
leave it out: the answers alone are trained, or the turns that records name; see docs/data.md
    train_on_inputs train_on_input train_on_prompt mask_inputs
leave it out: the answers of conversations and completions alone are trained; see docs/data.md
    assistant_only_loss completion_only_loss
leave it out: a prompt with its answers has at most --seq_len tokens, and --long_documents says
what becomes of a longer one
    max_prompt_length
write --long_documents: split, truncate or truncate_start
    truncation_mode
write --rope_scaling yarn or linear; the factor follows from --seq_len
    rope_factor rope_theta yarn_factor
write --sequence_parallel_size, with --deepspeed or --fsdp
    context_parallel_size sequence_parallel_degree sp_size cp_size
write --report_to wandb, and --run_name for the run's name
    wandb_project wandb_run_name use_wandb
write --class_type liger
    use_liger enable_liger_kernel liger_kernel
leave it out: --class_type custom never holds the logits of a whole row
    cut_cross_entropy chunked_ce num_output_chunks
leave it out: --class_type custom is the schedule of longctx
    use_unsloth
write --place auto, which keeps on the host what the GPU has no room for
    cpu_offload
write --fsdp_config, in which the offload of FSDP stands
    fsdp_cpu_offload
write --resume_from_checkpoint auto
    resume auto_resume_from_checkpoints
write --output_dir
    output
leave it out: changed data make a new cache by themselves
    overwrite_cache
leave it out: models are always saved as safetensors
    save_safetensors
write --eval_strategy
    evaluation_strategy
write --tokenizer_name
    tokenizer tokenizer_name_or_path
write --config
    config_file
"""
"""What to write, and below it the options of other trainers for which it is the answer."""
HABITS = {
    name: " ".join(says.split())
    for says, names in re.findall(r"^((?:\S.*\n)+)((?: +.*\n)+)", _TABLE, flags=re.M)
    for name in names.split()
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
