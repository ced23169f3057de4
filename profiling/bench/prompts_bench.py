"""Times answers to one prompt, which is computed once, beside TRL 1.16, which computes it for each.

    python profiling/bench/prompts_bench.py --output profiling/results/h200_prompts.json
    python profiling/bench/prompts_bench.py --case task=dpo,class_type=trl,checkpointing=selective
    python profiling/bench/prompts_bench.py --cases pair_128k \
        --output profiling/results/h200_dpo_pair.json

Tasks, all on `answers` answers of `answer` random tokens to a prompt of `prompt`:

    sft_loss  one row of as many tokens (prompt + answers), cross-entropy, for scale
    dpo_loss  a pair: DPO's sigmoid loss over linear_log_probs; the reference's are given
    dpo       steps of TRL's DPOTrainer: LoRA of rank `rank`, the reference is the model without it
    grpo      updates of TRL's GRPOTrainer, every weight trained: answers and advantages are given,
              nothing is generated

The two losses are a forward and a backward pass on a patched model, gradients left on the GPU.
class_type `custom` patches the model with share_prefixes; its GRPO has exact AdamW (fp32 states),
as one batch of all answers. `gpu_gib` is what exact AdamW plans with; what TRL's head takes for the
hidden states of all rows comes on top, so nothing enforces it here. `trl` is the trainer as it is,
on flash-attn-4: it has its fused lm_head, checkpointing `layers`, `selective` (TRL's own, for which
attention is an operator of torch), `offloaded` (layers, with what they keep in host memory: its
activation_offloading) or `selective_offloaded` (both: layers' inputs wait on the host, attention's
outputs on the GPU), AdamW in the adapters' dtype, and `rows` rows of a batch, which add up.
`adapters=bf16` casts what PEFT makes in fp32, which spares it two casts a map. With
`reference=given` a pair comes with its reference's log-probabilities, as after TRL's
precompute_ref_log_probs; otherwise each step of `dpo` computes them.

`step_s` is the mean of `--repeats` after one more, `peak_gib` and `reserved_gib` are their peaks,
`host_gib` is what the process then holds of the host's memory, and `loss` is the last one's.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid
from transformers import AutoModelForCausalLM, PreTrainedModel, TrainerCallback, set_seed

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import longctx
from longctx.constants import GIB, IGNORE_INDEX
from longctx.memory.machine import held_host_bytes
from profiling.bench import runner
from profiling.bench.everyday_peers import cast_trained
from profiling.bench.peers import attend_by_documents
from profiling.bench.runner import Case, Row, rounded, until_out_of_memory
from profiling.bench.trl_bench import tokenizer
from profiling.build import VOCABULARY

BETA = 0.1
"""Of DPO."""
DEFAULTS: Case = {
    "task": "dpo",
    "class_type": "custom",
    "preset": "llama-3.1-8b",
    "layers": None,
    "prompt": 31744,
    "answer": 1024,
    "answers": 2,
    "rank": 16,
    "rows": None,
    "checkpointing": None,
    "gpu_gib": None,
    "reference": "computed",
    "adapters": "fp32",
}
_PAIR_8K: Case = dict(task="dpo", prompt=7168)
_LONG: Case = dict(prompt=130048, rank=0)
_GROUP: Case = dict(
    task="grpo", preset="qwen3-8b", prompt=32768, answer=4096, answers=8, rank=0, gpu_gib=22
)
PUBLISHED: list[Case] = [
    dict(_LONG, task="sft_loss"),
    dict(_LONG, task="dpo_loss"),
    *(
        dict(case, class_type=class_type, checkpointing=checkpointing)
        for case in (_PAIR_8K, dict(task="dpo"))
        for class_type, checkpointing in (("custom", None), ("trl", "layers"), ("trl", "selective"))
    ),
    dict(_GROUP),
    dict(_GROUP, class_type="trl", checkpointing="layers", rows=1, gpu_gib=None),
    dict(_GROUP, class_type="trl", checkpointing="selective", rows=1, gpu_gib=None),
]
_PAIR_128K: Case = dict(task="dpo", prompt=130048, reference="given")
PAIR_128K: list[Case] = [
    dict(_PAIR_128K),
    *(
        dict(_PAIR_128K, class_type="trl", checkpointing=checkpointing, adapters="bf16")
        for checkpointing in ("offloaded", "selective_offloaded", "selective")
    ),
]


def complete(case: Case) -> Case:
    peer = case["class_type"] == "trl"
    checkpointing = case["checkpointing"] or ("selective" if peer else None)
    return {**case, "checkpointing": checkpointing, "rows": case["rows"] or case["answers"]}


def make_model(case: Case) -> PreTrainedModel:
    """With random weights in bf16, and as its trainer wants it."""
    from longctx.train.options.config import ModelArguments
    from longctx.train.start.loading import load_config

    tokens = case["prompt"] + case["answer"] * case["answers"]
    args = ModelArguments(preset=case["preset"], seq_len=tokens, extend_context=True)
    config = load_config(args, vocab_size=VOCABULARY)
    config.num_hidden_layers = case["layers"] or config.num_hidden_layers
    config._name_or_path = case["preset"]
    set_seed(0)
    with device():
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    if case["class_type"] == "custom":
        return longctx.patch(model.train(), strict=True, share_prefixes=True)
    if torch.cuda.is_available():
        attend_by_documents(model)
    model.base_model.register_forward_pre_hook(without_mask, with_kwargs=True, prepend=True)
    if case["checkpointing"].startswith("selective"):
        from trl.models import enable_selective_activation_checkpointing

        enable_selective_activation_checkpointing(model)
    return model.train()


def without_mask(module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """No row has padding: positions alone say where rows begin, and nobody reads a mask."""
    ids = kwargs["input_ids"]
    positions = torch.arange(ids.shape[1], device=ids.device).expand_as(ids)
    return args, {**kwargs, "attention_mask": None, "position_ids": positions}


def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def random_ids(model: PreTrainedModel, *shape: int) -> Tensor:
    return torch.randint(model.config.vocab_size, shape)


# --- losses ----------------------------------------------------------------------------------


def sft_loss(model: Any, case: Case) -> Callable[[], Tensor]:
    tokens = case["prompt"] + case["answer"] * case["answers"]
    ids = random_ids(model, 1, tokens).to(model.device)
    return lambda: model(input_ids=ids, labels=ids).loss


def dpo_loss(model: Any, case: Case) -> Callable[[], Tensor]:
    ids = torch.cat(
        [
            random_ids(model, 1, case["prompt"]).expand(2, -1),
            random_ids(model, 2, case["answer"]),
        ],
        dim=1,
    ).to(model.device)
    labels = torch.full_like(ids, IGNORE_INDEX)
    labels[:, case["prompt"] - 1 : -1] = ids[:, case["prompt"] :]
    reference = torch.zeros(2, device=model.device)

    def loss() -> Tensor:
        hidden = model.model(input_ids=ids).last_hidden_state
        found = longctx.linear_log_probs(
            hidden, model.lm_head.weight, labels, outputs=("log_probs",)
        )
        chosen, rejected = found.log_probs.sum(1) - reference
        return -logsigmoid(BETA * (chosen - rejected))

    return loss


def time_loss(case: Case, clock: Clock) -> float:
    model = make_model(case)
    loss_of = (sft_loss if case["task"] == "sft_loss" else dpo_loss)(model, case)
    loss = float("nan")
    for _ in range(1 + clock.repeats):
        model.zero_grad()
        found = loss_of()
        found.backward()
        loss = float(found.detach())
        clock.step()
    return loss


# --- trainers --------------------------------------------------------------------------------


def time_dpo(case: Case, clock: Clock) -> float:
    import datasets
    from peft import LoraConfig
    from trl import DPOConfig, DPOTrainer

    class Prepared(DPOTrainer):  # type: ignore[misc]
        def _prepare_dataset(self, dataset: Any, *rest: Any) -> Any:
            return dataset

    model = make_model(case)
    columns = {"prompt_ids": "prompt", "chosen_ids": "answer", "rejected_ids": "answer"}
    given = case["reference"] == "given"
    reference = {"ref_chosen_logps": 0.0, "ref_rejected_logps": 0.0} if given else {}
    rows = [
        {name: random_ids(model, case[kind]).tolist() for name, kind in columns.items()} | reference
        for _ in range(1 + clock.repeats)
    ]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Prepared(
            model,
            args=DPOConfig(
                **arguments(case, folder, steps=len(rows)),
                per_device_train_batch_size=1,
                max_length=None,
                beta=BETA,
                activation_offloading=(case["checkpointing"] or "").endswith("offloaded"),
            ),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer(),
            peft_config=LoraConfig(r=case["rank"], target_modules="all-linear", lora_dropout=0.0),
        )
        trainer.precompute_ref_logps = given
        if case["adapters"] == "bf16":
            cast_trained(trainer.model, torch.bfloat16)
        return train(trainer, clock)


def time_grpo(case: Case, clock: Clock) -> float:
    import datasets
    from trl import GRPOConfig, GRPOTrainer

    model = make_model(case)
    ours, answers = case["class_type"] == "custom", case["answers"]
    given = {
        "prompt_ids": random_ids(model, 1, case["prompt"]).expand(answers, -1),
        "completion_ids": random_ids(model, answers, case["answer"]),
        "advantages": torch.linspace(-1, 1, answers),
    }
    given |= {f"{name}_mask": torch.ones_like(given[f"{name}_ids"]) for name in _PARTS}
    given = {name: value.to(model.device) for name, value in given.items()}
    items = given["completion_mask"].sum()
    batches = answers // case["rows"]

    class Given(GRPOTrainer):  # type: ignore[misc]
        def _prepare_inputs(self, batch: Any) -> Any:
            first = self._step % batches * case["rows"]
            batch = {name: value[first : first + case["rows"]] for name, value in given.items()}
            return {**batch, "num_items_in_batch": items}

    optimizer = None
    if ours:
        tokens = case["prompt"] + answers * case["answer"]
        budget = case["gpu_gib"]
        optimizer = longctx.exact_adamw(model, lr=1e-6, tokens=tokens, gpu_memory_gib=budget)
        if torch.cuda.is_available():
            torch.cuda.set_per_process_memory_fraction(1.0)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Given(
            model,
            reward_funcs=lambda completions, **_: [0.0 for _ in completions],
            args=GRPOConfig(
                **arguments(case, folder, steps=1 + clock.repeats),
                per_device_train_batch_size=case["rows"],
                gradient_accumulation_steps=batches,
                num_generations=answers,
                max_completion_length=case["answer"],
            ),
            train_dataset=datasets.Dataset.from_dict({"prompt": ["<eos>"] * answers}),
            processing_class=tokenizer(),
            optimizers=(optimizer, None),
        )
        return train(trainer, clock)


_PARTS = ("prompt", "completion")
_USUAL: Case = {"reference": "computed", "adapters": "fp32"}
"""What older rows do not name."""


def arguments(case: Case, folder: str, steps: int) -> dict[str, Any]:
    return dict(
        output_dir=folder,
        max_steps=steps,
        learning_rate=1e-6,
        bf16=False,  # weights are in bf16
        gradient_checkpointing=case["class_type"] == "trl",
        gradient_checkpointing_kwargs={"use_reentrant": False},
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=not torch.cuda.is_available(),
    )


def train(trainer: Any, clock: Clock) -> float:
    trainer.add_callback(clock)
    trainer.train()
    return float([line["loss"] for line in trainer.state.log_history if "loss" in line][-1])


class Clock(TrainerCallback):
    """Seconds and memory of `repeats` steps after the first one."""

    def __init__(self, repeats: int) -> None:
        self.repeats, self.steps, self.row = repeats, 0, {}

    def step(self) -> None:
        self.steps += 1
        on_gpu = torch.cuda.is_available()
        if on_gpu:
            torch.cuda.synchronize()
        if self.steps == 1:
            self.begin = time.perf_counter()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
        elif self.steps == 1 + self.repeats:
            self.row: Row = {"step_s": (time.perf_counter() - self.begin) / self.repeats}
            self.row["host_gib"] = held_host_bytes() / GIB
            if on_gpu:
                self.row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
                self.row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.step()


TASKS: dict[str, Callable[[Case, Clock], float]] = {
    "sft_loss": time_loss,
    "dpo_loss": time_loss,
    "dpo": time_dpo,
    "grpo": time_grpo,
}


def run_case(case: Case, repeats: int, flags: list[str]) -> list[Row]:
    """One row of the results, from this process."""
    clock = Clock(repeats)
    loss = float("nan")
    with until_out_of_memory() as outcome:
        loss = TASKS[case["task"]](case, clock)
    keys = {key: value for key, value in case.items() if key not in _USUAL or value != _USUAL[key]}
    if outcome["status"] == "oom":
        return [{**keys, **outcome}]
    return [rounded({**keys, **clock.row, "loss": loss, **outcome})]


BENCH = runner.Benchmark(
    script=__file__,
    description=__doc__,
    defaults=DEFAULTS,
    published={"published": PUBLISHED, "pair_128k": PAIR_128K},
    measure=run_case,
    settle=complete,
    repeats=2,
)

if __name__ == "__main__":
    runner.main(BENCH)
