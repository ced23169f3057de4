"""Times whole steps of TRL's SFTTrainer, and of train.py's trainer, on the same packed rows.

    python profiling/bench/trl_bench.py --output profiling/results/h200_trl.json
    python profiling/bench/trl_bench.py --case class_type=trl,checkpointing=selective

A step is all that its trainer does from one step's end to the next: loader, forward, backward,
clipping, optimizer and the logged line. Each row is `tokens` long and packed from documents of 500
to 9000 random tokens; all trainers get the same rows in the same order, and the first token of a
document is no label. `step_s` is the mean of `--repeats` steps after two more, `peak_gib` and
`reserved_gib` are their peaks; `loss` and `grad_norm`, the last one's, must agree between trainers.
`idle` is the share of a step in which the GPU neither computes nor copies (step_clock.py).

class_type `trl` is SFTTrainer with packing (attention by documents over bounds that its collator
makes, with an int as the longest), flash-attn-4, and `layers_by` liger (its `use_liger_kernel`),
transformers (with its own loss in chunks) or longctx (the model is patched before). checkpointing
`selective` is its `gradient_checkpointing_kwargs={"selective": True}`, which needs attention to be
an operator of torch (peers.py); offload=all its `activation_offloading`. `liger`, `vanilla` and
`custom` are train.py's trainer, as in step_bench.py.

`gpu_gib` is custom's budget of GPU memory (0: all), `ladder` and `cut` what its layers kept and how
their work was cut (ladders.py).

states `as_weights`: weights and AdamW in bf16. `fp32`: custom, liger and vanilla have exact AdamW
over bf16 weights, TRL fp32 weights under bf16 autocast.
"""

from __future__ import annotations

import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import Dataset
from transformers import TrainerCallback

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import longctx
from longctx.constants import GIB, IGNORE_INDEX
from profiling.bench import runner
from profiling.bench.peers import FA4_BY_DOCUMENTS, attend_by_documents, prepare_peer, settled
from profiling.bench.runner import Case, Row, rounded, until_out_of_memory
from profiling.bench.step_clock import idle_column
from profiling.ladders import ladder_columns

SHORTEST, LONGEST = 500, 9000
"""Tokens of a document."""
WARM_UP_STEPS, IDLE_STEPS = 2, 4
DEFAULTS: Case = {
    "class_type": "trl",
    "layers_by": None,
    "preset": "llama-3.2-1b",
    "layers": None,
    "tokens": 32768,
    "checkpointing": None,
    "offload": None,
    "backend": "fa4",
    "states": "as_weights",
    "gpu_gib": 0,
}
PUBLISHED = [
    dict(class_type=class_type, checkpointing=checkpointing)
    for class_type in ("trl", "liger")
    for checkpointing in ("none", "layers", "selective")
] + [
    dict(class_type="custom"),
    dict(class_type="custom", gpu_gib=12),
    dict(layers_by="longctx"),
    dict(layers_by="transformers", checkpointing="none"),
    dict(layers_by="transformers", checkpointing="selective"),
]


def complete(case: Case) -> Case:
    """The case with its settings: as train.py runs custom, and a peer that keeps all on the GPU."""
    if case["class_type"] == "trl":
        case = {**case, "layers_by": case["layers_by"] or "liger"}
    ours = "custom" if case["layers_by"] == "longctx" else case["class_type"]
    case = {**settled({**case, "class_type": ours}), "class_type": case["class_type"]}
    return {**case, "offload": case["offload"] or ("auto" if ours == "custom" else "none")}


# --- rows ------------------------------------------------------------------------------------


def document_lengths(tokens: int, numbers: random.Random) -> list[int]:
    """Of the documents that fill a row: none is shorter than 500 tokens, unless the row is."""
    lengths = []
    while tokens:
        length = numbers.randint(SHORTEST, LONGEST)
        if tokens - length < SHORTEST:  # the next would be too short
            length = tokens if tokens <= LONGEST else tokens - SHORTEST
        lengths.append(length)
        tokens -= length
    return lengths


class PackedRows(Dataset[dict[str, torch.Tensor]]):
    """Rows of documents of random tokens, the same ones in every run."""

    def __init__(self, count: int, tokens: int, vocabulary: int) -> None:
        self.lengths = [document_lengths(tokens, random.Random(number)) for number in range(count)]
        self.rows = [self._row(number, vocabulary) for number in range(count)]

    def _row(self, number: int, vocabulary: int) -> dict[str, torch.Tensor]:  # each (tokens,)
        position_ids = torch.cat([torch.arange(n) for n in self.lengths[number]])
        numbers = torch.Generator().manual_seed(number)
        ids = torch.randint(vocabulary, position_ids.shape, generator=numbers)
        labels = ids.masked_fill(position_ids == 0, IGNORE_INDEX)
        return {"input_ids": ids, "labels": labels, "position_ids": position_ids}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self.rows[index]

    def for_trl(self) -> Any:
        """The dataset that SFTTrainer's own packing would make of the documents."""
        import datasets

        columns: dict[str, Any] = {
            name: [row[name].tolist() for row in self.rows] for name in ("input_ids", "labels")
        }
        return datasets.Dataset.from_dict({**columns, "seq_lengths": self.lengths})


# --- trainers --------------------------------------------------------------------------------


def trl_trainer(case: Case, rows: PackedRows, config: Any, folder: Path) -> Any:
    from transformers import AutoModelForCausalLM, set_seed
    from trl import SFTConfig, SFTTrainer

    on_gpu = torch.cuda.is_available()
    checkpointing = case["checkpointing"] or "none"
    ours = case["layers_by"] == "longctx"
    args = SFTConfig(
        output_dir=str(folder),
        max_steps=len(rows),
        per_device_train_batch_size=1,
        packing=True,
        max_length=case["tokens"],
        dataset_kwargs={"skip_prepare_dataset": True},  # the rows are packed
        use_liger_kernel=on_gpu and case["layers_by"] == "liger",
        bf16=case["states"] == "fp32",
        gradient_checkpointing=checkpointing != "none",
        gradient_checkpointing_kwargs={
            "use_reentrant": False,
            "selective": checkpointing == "selective",
        },
        activation_offloading=case["offload"] != "none" and not ours,
        learning_rate=5e-5,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        use_cpu=not on_gpu,
    )
    set_seed(args.seed)
    fa4 = case["backend"] == "fa4" and checkpointing != "selective" and not ours
    with args.device:
        model = AutoModelForCausalLM.from_config(
            config,
            dtype=torch.float32 if case["states"] == "fp32" else torch.bfloat16,
            attn_implementation="flash_attention_4" if fa4 else "sdpa",
        )
    if ours:
        options = dict(attn_backend=case["backend"], offload_activations=case["offload"])
        longctx.patch(model, strict=True, **options)
    elif case["backend"] == "fa4" and not fa4:
        attend_by_documents(model)
        assert model.config._attn_implementation == FA4_BY_DOCUMENTS
    return SFTTrainer(
        model=model, args=args, train_dataset=rows.for_trl(), processing_class=tokenizer()
    )


def tokenizer() -> Any:
    """SFTTrainer asks for one; the rows are tokens already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"<eos>": 0}, unk_token="<eos>"))
    return PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", pad_token="<eos>")


def long_trainer(case: Case, rows: PackedRows, folder: Path) -> Any:
    from profiling import build
    from profiling.bench import step_bench

    step_case = {**step_bench.DEFAULTS, **case, "engine": "plain"}
    flags = step_bench.train_flags(step_case, case["tokens"])
    if not torch.cuda.is_available():
        flags.append("--use_cpu")
    trainer, _ = build.build_trainer(
        [*flags, "--learning_rate=5e-5", "--logging_steps=1"],
        steps=len(rows),
        output_dir=folder,
        layers=case["layers"],
        rows=rows,
    )
    prepare_peer(trainer.model, case)
    return trainer


class StepClock(TrainerCallback):
    """Seconds and memory of `repeats` steps, and the GPU's idle time in the steps after them. No
    step of these waits for the GPU but where its trainer does."""

    reads_weights = False

    def __init__(self, repeats: int) -> None:
        self.last = WARM_UP_STEPS + repeats
        self.repeats, self.row = repeats, {}
        self.profiler = profile(activities=[ProfilerActivity.CUDA])

    def on_step_end(self, args: Any, state: Any, *rest: Any, **kwargs: Any) -> None:
        on_gpu, step = torch.cuda.is_available(), state.global_step
        if on_gpu and step in (WARM_UP_STEPS, self.last, self.last + IDLE_STEPS):
            torch.cuda.synchronize()
        if step == WARM_UP_STEPS:
            self.begin = time.perf_counter()
            if on_gpu:
                torch.cuda.reset_peak_memory_stats()
        elif step == self.last:
            self.row["step_s"] = (time.perf_counter() - self.begin) / self.repeats
            if on_gpu:
                self.row["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
                self.row["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
                self.profiler.start()
        elif on_gpu and step == self.last + IDLE_STEPS:
            self.profiler.stop()
            self.row |= idle_column(self.profiler, IDLE_STEPS, self.row["step_s"])


def run_case(case: Case, repeats: int, flags: list[str]) -> list[Row]:
    """One row of the results, from this process."""
    from longctx.runtime.runtime import patched_part
    from longctx.train.options.config import ModelArguments
    from longctx.train.start.loading import load_config
    from profiling.build import VOCABULARY

    args = ModelArguments(preset=case["preset"], seq_len=case["tokens"], extend_context=True)
    config = load_config(args, vocab_size=VOCABULARY)
    config.num_hidden_layers = case["layers"] or config.num_hidden_layers
    steps = WARM_UP_STEPS + repeats + (IDLE_STEPS if torch.cuda.is_available() else 0)
    rows = PackedRows(steps, case["tokens"], config.vocab_size)
    clock = StepClock(repeats)
    with tempfile.TemporaryDirectory() as folder, until_out_of_memory() as outcome:
        if case["class_type"] == "trl":
            trainer = trl_trainer(case, rows, config, Path(folder))
        else:
            trainer = long_trainer(case, rows, Path(folder))
        trainer.add_callback(clock)
        trainer.train()
    if outcome["status"] == "oom":
        return [{**case, **outcome}]
    row = {**case, **clock.row, "tokens_per_s": case["tokens"] / clock.row["step_s"]}
    logged = [line for line in trainer.state.log_history if line.get("step") == clock.last]
    row |= {name: logged[0][name] for name in ("loss", "grad_norm")}
    if patched := patched_part(trainer.model):
        row |= ladder_columns(patched.longctx.store.ladder, patched.longctx.adopted.cut)
    row |= outcome
    return [rounded(row)]


BENCH = runner.Benchmark(
    script=__file__,
    description=__doc__,
    defaults=DEFAULTS,
    published={"published": PUBLISHED},
    measure=run_case,
    settle=complete,
    repeats=8,
)

if __name__ == "__main__":
    runner.main(BENCH)
