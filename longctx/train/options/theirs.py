"""What longctx knows of transformers' options that it does not declare again (arguments.py)."""

from __future__ import annotations

from dataclasses import Field
from functools import partial
from typing import Any

from longctx.ranges import COUNT, NOT_NEGATIVE, POSITIVE, SHARE, Range
from longctx.train.options.about import APPLIED, CHECKPOINTS, NUMBERS, ROWS, About, Fact, Need

_SEED = Range(0, 2**32 - 1)  # NumPy's
_SAVES = Need("--save_strategy steps", lambda m, d, t: t.save_strategy == "steps")
_EVALUATES = Need("--eval_strategy steps", lambda m, d, t: t.eval_strategy == "steps")
_EVER_EVALUATES = Need("--eval_strategy steps or epoch", lambda m, d, t: t.eval_strategy != "no")
_BEST = Need(
    "--load_best_model_at_end, --save_strategy best or a schedule that follows the loss",
    lambda m, d, t: (
        t.load_best_model_at_end
        or t.save_strategy == "best"
        or t.lr_scheduler_type in ("reduce_lr_on_plateau", "greedy")
    ),
)
_REPORT = Need("--report_to", lambda m, d, t: t.report_to)
_TRACKIO = Need("--report_to trackio", lambda m, d, t: "trackio" in t.report_to)
_WARMUP = Need(
    "a --lr_scheduler_type with a warmup, as constant_with_warmup",
    lambda m, d, t: t.lr_scheduler_type not in ("constant", "reduce_lr_on_plateau", "greedy"),
)
_SCHEDULE = Need(
    "another --lr_scheduler_type than a constant one",
    lambda m, d, t: t.lr_scheduler_type not in ("constant", "constant_with_warmup"),
)
_ADAM = Need(
    "an Adam as --optim",
    lambda m, d, t: any(name in t.optim for name in ("adam", "ademamix", "lion", "lomo")),
)
_LOW_RANK = Need(
    "a GaLore or APOLLO as --optim", lambda m, d, t: t.optim.startswith(("galore", "apollo"))
)
_RANKS = Need("several processes: accelerate launch", lambda m, d, t: t.world_size > 1)
_FSDP = Need("--fsdp true", lambda m, d, t: t.fsdp)


def _of(group: str, names: str, *facts: Fact, says: str = "") -> dict[str, About]:
    """Returns the options of a group. Those that --help lists have a line of ours there."""
    return dict.fromkeys(names.split(), About.of(group, facts, rare=not says, says=says))


_data, _memory, _train, _save, _ranks = (
    partial(_of, group) for group in ("data", "memory", "training", "output", "several processes")
)
_RATE = Range(1e-12, 1e6)  # below, no weight of any dtype changes
OF_TRANSFORMERS: dict[str, About] = {
    **_of("model", "torch_compile torch_compile_backend torch_compile_mode tf32"),
    **_data("train_sampling_strategy dataloader_drop_last", ROWS),
    **_data("dataloader_num_workers", Range(0, 1024)),
    **_data("dataloader_prefetch_factor", COUNT),
    **_data("dataloader_persistent_workers dataloader_pin_memory dataloader_in_order"),
    **_data("dataloader_multiprocessing_context"),
    **_memory("deepspeed", says="Train with DeepSpeed, by the settings in this JSON file."),
    **_memory("fsdp", says="Shard weights, gradients and states over GPUs, by FSDP2."),
    **_memory("fsdp_config", _FSDP),
    **_memory("gradient_checkpointing_kwargs", CHECKPOINTS),
    **_memory("activation_checkpointing activation_checkpointing_kwargs skip_memory_metrics"),
    **_memory("torch_empty_cache_steps", COUNT),
    **_train("learning_rate", _RATE, APPLIED, says="Largest learning rate of the schedule."),
    **_train(
        "lr_scheduler_type",
        NUMBERS,
        says="Schedule of the learning rate: linear, cosine, constant.",
    ),
    **_train(
        "warmup_steps",
        NOT_NEGATIVE,
        NUMBERS,
        _WARMUP,
        says="Steps in which the rate rises; below 1 a share of all.",
    ),
    **_train("max_steps", APPLIED, says="Steps to train; -1 trains by --num_train_epochs."),
    **_train("gradient_accumulation_steps", COUNT, ROWS, says="Batches that add up in a step."),
    **_train(
        "max_grad_norm", NOT_NEGATIVE, NUMBERS, says="Clip gradients to this norm; 0 does not."
    ),
    **_train(
        "weight_decay", Range(0, 100), APPLIED, says="AdamW's weight decay, of matrices alone."
    ),
    **_train(
        "optim",
        NUMBERS,
        says="The default runs longctx's exact AdamW in bf16. So does adamw_torch; with an engine "
        "or --optimizer_states as_weights both are the engine's or torch's. Any other name, as sgd "
        "or lion_32bit, is transformers' optimizer.",
    ),
    **_train("eval_strategy", says="Evaluate during training: no, steps or epoch."),
    **_train(
        "eval_steps",
        POSITIVE,
        APPLIED,
        _EVALUATES,
        says="Steps between two evaluations. Default: --logging_steps.",
    ),
    **_train("seed", _SEED, ROWS, says="Seed of random weights, the order of rows and dropout."),
    **_train("use_cpu", says="Train on the CPU where there is a GPU, too."),
    **_train("data_seed", _SEED, ROWS),
    **_train("lr_scheduler_kwargs", NUMBERS, _SCHEDULE),
    **_train("optim_args fp16 average_tokens_across_devices", NUMBERS),
    **_train("optim_target_modules", NUMBERS, _LOW_RANK),
    **_train("adam_beta1 adam_beta2", SHARE, NUMBERS, _ADAM),
    **_train("adam_epsilon", Range(0, 1, open_low=True), NUMBERS, _ADAM),
    **_train("label_smoothing_factor", SHARE, NUMBERS),
    **_train("neftune_noise_alpha", Range(0, 1000), NUMBERS),
    **_train("eval_delay", NOT_NEGATIVE, _EVER_EVALUATES),
    **_train("eval_on_start full_determinism do_train do_eval debug"),
    **_save("save_steps", POSITIVE, APPLIED, _SAVES, says="Steps between two checkpoints."),
    **_save("save_strategy save_only_model save_on_each_node load_best_model_at_end"),
    **_save("metric_for_best_model greater_is_better", _BEST),
    **_save("ignore_data_skip logging_strategy logging_first_step logging_nan_inf_filter"),
    **_save("log_level log_level_replica log_on_each_node include_num_input_tokens_seen"),
    **_save("disable_tqdm"),
    **_save("run_name", _REPORT),
    **_save("project trackio_space_id trackio_bucket_id trackio_static_space_id", _TRACKIO),
    **_ranks("accelerator_config parallelism_config ddp_backend local_rank"),
    **_ranks("ddp_timeout", COUNT),
    **_ranks("ddp_bucket_cap_mb", COUNT, _RANKS),
    **_ranks("ddp_find_unused_parameters ddp_broadcast_buffers ddp_static_graph", _RANKS),
    **_of("", "split_batches dispatch_batches even_batches", ROWS),  # accelerator_config's
}
"""Facts about transformers' options, by name; some options are in some versions of transformers
only."""


def about(option: Field[Any]) -> About:
    """Returns the facts about the option behind a field, longctx's or transformers'."""
    known: About = option.metadata.get("about") or OF_TRANSFORMERS.get(option.name, About())
    return known
