"""Options that cannot be together: each rule is tried once, alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from longctx.errors import UserError
from longctx.train.options.config import DataArguments, ModelArguments, TrainArguments
from longctx.train.options.conflicts import CONFLICTS, check_together, conflicts

CASES: tuple[tuple[dict[str, Any], str], ...] = (
    (dict(quantize="nf4"), "--quantize rounds weights"),
    (dict(lora_alpha=3, use_dora=True), "--lora_alpha, --use_dora: without --lora_r .* leave them"),
    (dict(lora_r=4, save_fp32=True), "--save_fp32 is of whole models"),
    (dict(lora_r=4, loraplus_lr_ratio=4.0, optim="apollo_adamw"), "--loraplus_lr_ratio gives"),
    (dict(max_steps=0), "--max_steps must be at least 1"),
    (dict(dataset_name="d", streaming=True), "--streaming has no known length"),
    (dict(eval_on_start=True), "give one of the two"),
    (dict(save_strategy="best"), "choose by evaluations: give --eval_strategy"),
    (dict(metric_for_best_model="accuracy"), "must be loss"),
    (dict(max_grad_norm=1e-9), "clips gradients to nothing"),
    (dict(dataloader_persistent_workers=True), "need workers"),
    (dict(train_sampling_strategy="group_by_length"), "--train_sampling_strategy orders rows"),
    (dict(optim="galore_adamw_layerwise"), "inside backward"),
    (
        dict(task="kto", dataset_name="d", streaming=True, max_steps=1),
        "--streaming reads text",
    ),
    (dict(task="dpo", label_smoothing_factor=0.1), "--label_smoothing_factor is of the loss"),
    (dict(task="dpo", loss_weights=[0.0, 0.0]), "--loss_weights of 0"),
    (dict(task="kto", desirable_weight=0.0, undesirable_weight=0.0), "--desirable_weight 0"),
    (
        dict(task="dpo", sequence_parallel_size=2, class_type="vanilla"),
        "with another --task than sft needs --class_type custom",
    ),
    (dict(task="distill", sequence_parallel_size=2), "a teacher shares no rows"),
    (dict(task="dpo", sequence_parallel_size=2, seq_len=63), "with another --task than sft"),
    (dict(debug=["tpu_metrics_debug"]), "needs a TPU"),
    (dict(gradient_checkpointing_kwargs={"bad": 1}), "takes debug, determinism_check"),
    (
        dict(class_type="liger", offload_activations="all", gradient_checkpointing=False),
        "--offload_activations all with liger is of checkpoints",
    ),
    (dict(class_type="any", sequence_parallel_size=2), "--class_type any has no"),
    (dict(class_type="liger", sequence_parallel_size=2, seq_len=63), "with vanilla and liger"),
    (dict(world_size=2, accelerator_config=dict(even_batches=False)), "without even_batches"),
    (
        dict(world_size=2, accelerator_config=dict(split_batches=True)),
        "that the processes divide",
    ),
    (dict(parts=["rope"], task="dpo"), "--task dpo needs the schedule .*: leave out --parts"),
    (dict(parts=["rope"], sequence_parallel_size=2), "--sequence_parallel_size needs the schedule"),
    (dict(parts=["rope"], label_smoothing_factor=0.1), "not among --parts: add fused_linear_"),
)


class Changed:
    """Options of a dataclass, some with other values, also of its properties."""

    def __init__(self, options: Any, changes: dict[str, Any]) -> None:
        self._options, self._changes = options, changes

    def __getattr__(self, name: str) -> Any:
        return self._changes[name] if name in self._changes else getattr(self._options, name)


@pytest.fixture(scope="module")
def train() -> TrainArguments:
    return TrainArguments(use_cpu=True)


def options_with(changes: dict[str, Any], train: TrainArguments) -> tuple[Any, Any, Any]:
    def of(kind: Any) -> Any:
        own = {name: x for name, x in changes.items() if name in kind.__dataclass_fields__}
        return kind(**own)

    rest = dict(changes)
    settings = dict(even_batches=True, split_batches=False) | rest.pop("accelerator_config", {})
    changed = Changed(train, {**rest, "accelerator_config": SimpleNamespace(**settings)})
    return of(ModelArguments), of(DataArguments), changed


@pytest.mark.parametrize("number", range(len(CASES)))
def test_each_rule_refuses_alone(number: int, train: TrainArguments) -> None:
    changes, message = CASES[number]
    found = options_with(changes, train)
    holding = [i for i, rule in enumerate(CONFLICTS) if rule.is_there(*found)]
    assert holding == [number]
    with pytest.raises(UserError, match=message):
        check_together(*found)


def test_all_rules_are_tried_and_the_defaults_break_none(train: TrainArguments) -> None:
    assert len(CASES) == len(CONFLICTS)
    assert not [*conflicts(*options_with({}, train))]
