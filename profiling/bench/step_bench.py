"""Times whole optimizer steps under each engine: forward, backward, optimizer, and where memory
peaks.

    python profiling/bench/step_bench.py --case engine=zero3_cpu,tokens=8192+131072
    python profiling/bench/step_bench.py --cases h200 --output profiling/results/h200_step.json
    python profiling/bench/step_bench.py --cases h200_x2 --output profiling/results/h200_step.json
    python profiling/bench/step_bench.py --cases x2_rows --output h200_x2_rows.json
    python profiling/bench/step_bench.py --cases x4 --repeats 1 \
        --output profiling/results/h100_x4_shared_step.json -- --lr_scheduler_type constant
    python profiling/bench/step_bench.py --cases states --output h100_states_step.json
    python profiling/bench/step_bench.py --cases lora --output profiling/results/h200_lora_step.json
    python profiling/bench/step_bench.py --cases experts --repeats 1 \
        --output profiling/results/h200_experts_step.json -- --lr_scheduler_type constant
    python profiling/bench/step_bench.py --cases published --repeats 1 \
        --output profiling/results/h200_published.json -- --lr_scheduler_type constant
    python profiling/bench/step_bench.py --cases dpo --output profiling/results/h200_dpo_step.json
    python profiling/bench/step_bench.py --cases longest \
        --output profiling/results/h200_longest_step.json

A case runs train.py's own trainer on rows of random tokens, one document a row, with the engine's
file from ds_configs/ or fsdp_configs/ (`engine=plain`: none), one process a GPU. Several lengths
(`tokens=8192+131072`) share one process, because making an 8B model and its Adam states on the host
takes two minutes. A step of at most 8192 tokens comes first and compiles the kernels; each length
then has `--repeats` steps. The first of several may compile more (`first_s`), the median of the
others is reported. vanilla and liger run as peers.py sets them: `checkpointing` none, layers or
selective; `offload=all` puts what layers keep into host memory.

`fwd_s`, `bwd_s`, `opt_s` end when the computation does (clipping counts as `opt_s`, updates that
wait for a block's next forward as `fwd_s`); `step_s` is their sum. `rows` are those of one pass, of
which a step has `passes`; `keep` is custom's, and `ladder` and `cut` what came of it (ladders.py),
with `host_free_gib` of the host free before the run, of which an engine's process may lock
`host_room_gib`; `loss` is that of the last step. `states`, `place`, `gpu_gib` and `host_memory_gib`
(0: all) are options of a run without an engine; under an engine `gpu_gib` is the most that
PyTorch's allocator may take of each GPU. `peak_gib` and `reserved_gib` are one GPU's peaks over the
steps of that length, `host_gib` what the run's processes hold of the host (memory/machine.py), in a
control group of `cgroup_gib` where it was held to one (profiling/in_cgroup.py); `alloc_retries`
counts how often in a step the allocator was full and gave back what it held without using it, which
stops the GPU. `lora` is the rank of adapters on all linear maps (0: all weights train), `quantize`
the weights under them, `packed` their format, `adapts` attention if no other linear layer has some;
such rows have no MFU. Without a GPU (`gpus=0`) there
is none either, and the only peak is the process' own (`peak_host_gib`). `tokens` counts one row,
which `sequence_parallel` GPUs share, `tokens_per_s` the tokens of all GPUs, `mfu` is of each. Peers
share rows by accelerate's Ulysses: with an engine of DeepSpeed and `backend=sdpa` or `fa2`.

`task=dpo` trains rows that are a prompt with two answers of `answer` tokens each; `reference_s` is
what a reference's pass over such a row takes, once.
What comes after `--` goes to train.py.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.constants import GIB
from profiling.bench import runner
from profiling.bench.peers import OURS, prepare_peer
from profiling.bench.runner import ROOT, Case, rounded, until_out_of_memory
from profiling.ladders import ladder_columns

WARM_UP_TOKENS = 8192
KEY = (
    *("class_type", "engine", "gpus", "rows", "tokens", "layers", "backend", "offload"),
    *("checkpointing", "keep", "passes", "states", "place", "gpu_gib", "lora", "quantize"),
    *("sequence_parallel", "host_memory_gib", "preset", "task", "answer", "adapts"),
)
SINCE = (
    *("lora", "quantize", "sequence_parallel", "host_memory_gib", "preset", "task", "answer"),
    "adapts",
)
"""Keys that rows have only where they say something."""
DEFAULTS: Case = {
    "class_type": "custom",
    "engine": "zero3_cpu",
    "gpus": 1,
    "tokens": 131072,
    "layers": 32,
    "backend": "auto",
    "offload": "all",
    "checkpointing": None,
    "keep": "auto",
    "rows": 1,
    "passes": 1,
    "states": "fp32",
    "place": "auto",
    "gpu_gib": 0,
    "host_memory_gib": 0,
    "lora": 0,
    "quantize": "none",
    "sequence_parallel": 1,
    "preset": "llama-3.1-8b",
    "task": "sft",
    "answer": 0,
    "adapts": "all",
}
ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")


LIGER = dict(class_type="liger", backend="fa4", checkpointing="selective")
EXACT = dict(engine="plain", offload="auto", backend="fa4")
LORA, NF4 = dict(lora=16), dict(lora=16, quantize="nf4")
MIXTURE = dict(**EXACT, lora=16, preset="qwen3-30b-a3b", layers=48)
PEER = dict(engine="plain", **LIGER)
OSS = dict(lora=16, preset="gpt-oss-20b")
OSS_120B = dict(lora=16, preset="gpt-oss-120b", layers=36)
ON_24_GIB = dict(tokens=32768, gpu_gib=24, host_memory_gib=60)
HYBRID = dict(lora=16, preset="qwen3.5-9b", layers=32)
ANY = dict(engine="plain", lora=16, tokens=32768)
MOONLIGHT = dict(**ANY, preset="moonlight-16b-a3b", layers=27)
GEMMA4 = dict(**ANY, preset="gemma-4-default", layers=30)
FSDP2 = dict(engine="fsdp2", backend="fa4", offload="auto")
X4 = dict(**FSDP2, gpus=4, sequence_parallel=4)
PUBLISHED: dict[str, list[Case]] = {
    "h200": [
        dict(class_type="custom", tokens="8192+131072"),
        dict(**LIGER, tokens="8192+131072"),
        dict(class_type="vanilla", backend="fa4", tokens="8192+131072"),
        dict(**EXACT, tokens="131072+196608", states="as_weights"),
        dict(**PEER, states="as_weights"),
    ],
    "h200_x2": [
        {**dict(engine=engine, gpus=2, tokens=32768, backend="fa4", offload="none"), **settings}
        for engine in ("zero3", "fsdp2")
        for settings in (dict(class_type="custom"), LIGER)
    ],
    "x2_rows": [  # four rows a GPU
        {**dict(engine="zero3_cpu", gpus=2, rows=4, tokens=20480, offload="none"), **settings}
        for settings in (
            dict(class_type="custom", backend="fa4", offload="auto"),
            LIGER,
            dict(class_type="vanilla", backend="fa4"),
        )
    ],
    "x4": [  # losses of two GPUs beside those of four
        dict(**X4, tokens="131072+524288"),
        dict(**FSDP2, gpus=2, sequence_parallel=2, tokens=131072),
        dict(**X4, tokens=524288, task="dpo", answer=1024),
        dict(**FSDP2, gpus=4, tokens=131072),
    ],
    "states": [
        dict(**EXACT, tokens=8192),
        dict(**EXACT, tokens=8192, gpu_gib=24),
        dict(**EXACT, tokens=131072),
    ],
    "states_host": [  # hosts of 256 GiB
        dict(**EXACT, tokens=131072, gpu_gib=24),
        dict(**EXACT, tokens=8192, rows=16, gpu_gib=12),
        dict(**EXACT, tokens=8192, place="host"),
        dict(**EXACT, tokens=131072, place="host"),
        dict(engine="zero3_cpu", tokens=8192),
    ],
    "lora": [
        dict(**EXACT, **LORA, gpu_gib=24),
        dict(**EXACT, **NF4, gpu_gib=24),
        dict(**EXACT, **NF4, gpu_gib=12),
        dict({**EXACT, "offload": "all"}, **NF4, place="host", gpu_gib=8),
        dict(**PEER, **LORA, offload="all"),
        dict(**PEER, **NF4, offload="all"),
        dict(**PEER, **NF4, offload="none"),
    ],
    "experts": [
        dict(**MIXTURE, tokens=8192),
        dict(**MIXTURE, tokens=131072, gpu_gib=40, host_memory_gib=150),
        dict(**MIXTURE, quantize="nf4", tokens=131072, gpu_gib=20, host_memory_gib=110),
        dict(**EXACT, **OSS, layers=24, tokens=131072),
    ],
    "published": [  # bases as they are published, and NF4; short rows are everyday_bench.py's
        dict(**EXACT, **OSS, layers=24, tokens="8192+131072", gpu_gib=24, host_memory_gib=66),
        dict(**EXACT, **OSS_120B, tokens=131072, gpu_gib=24, host_memory_gib=120),
        dict(**EXACT, **OSS_120B, **ON_24_GIB, adapts="attention"),
        dict(**EXACT, **NF4, **ON_24_GIB, preset="llama-3.3-70b", layers=80),
        dict(**EXACT, lora=16, preset="qwen3-8b-fp8", layers=36),
        dict(**EXACT, lora=16, preset="ministral-3-8b-fp8", layers=34),
        dict(**EXACT, **NF4, preset="qwen3-8b", layers=36),
    ],
    "hybrids": [  # peers' mixers run flash-linear-attention, too
        *(dict(**EXACT, **HYBRID, tokens=tokens, gpu_gib=24) for tokens in (65536, 131072)),
        dict(**EXACT, **HYBRID, quantize="nf4", tokens=131072, gpu_gib=24),
        dict(**EXACT, **HYBRID, tokens=262144),
        *({**PEER, **HYBRID, "tokens": n, "checkpointing": "layers"} for n in (65536, 131072)),
        {**PEER, **HYBRID, "tokens": 131072, "checkpointing": "layers", "offload": "all"},
        dict(**EXACT, lora=16, preset="qwen3.5-35b-a3b", layers=40, tokens=131072),
    ],
    "any": [  # beside Hugging Face's layers with their checkpointing
        {**sizes, **settings}
        for sizes in (MOONLIGHT, GEMMA4)
        for settings in (
            dict(class_type="any", offload="none"),
            dict(class_type="any", offload="all"),
            dict(class_type="vanilla", offload="none"),
        )
    ],
    "dpo": [  # beside one row of as many tokens
        dict(**EXACT, tokens=132096),
        dict(**EXACT, tokens=132096, task="dpo", answer=1024),
        dict(**EXACT, **NF4, tokens=132096, task="dpo", answer=1024, gpu_gib=16),
    ],
    "longest": [  # of docs/plan.md and docs/lora.md, with some of a card's memory in use
        dict(**EXACT, tokens=138240, gpu_gib=11.5, host_memory_gib=124),
        dict(**EXACT, tokens=180224, gpu_gib=23.5, host_memory_gib=124),
        dict(**EXACT, tokens=160256, gpu_gib=79, host_memory_gib=60),
        dict(**EXACT, **NF4, tokens=239616, gpu_gib=15.5, host_memory_gib=60),
        dict(**EXACT, **NF4, tokens=261632, gpu_gib=23.5, host_memory_gib=60),
        dict(**EXACT, **NF4, tokens=473088, gpu_gib=79, host_memory_gib=60),
    ],
}


def engine_options(engine: str) -> dict[str, str]:
    """train.py's options that ask for an engine; none for `plain`."""
    if engine == "plain":
        return {}
    if engine.startswith("fsdp"):
        return {"fsdp": "true", "fsdp_config": str(ROOT / f"fsdp_configs/{engine}.json")}
    return {"deepspeed": str(ROOT / f"ds_configs/{engine}.json")}


def train_flags(case: Case, longest: int) -> list[str]:
    flags = dict(
        preset=case["preset"],
        class_type=case["class_type"],
        attn_backend=case["backend"],
        seq_len=longest,
        extend_context=True,
        log_level="error",
        per_device_train_batch_size=case["rows"],
        gradient_accumulation_steps=case["passes"],
        sequence_parallel_size=case["sequence_parallel"],
        task=case["task"],
    )
    if case["class_type"] in OURS:
        flags |= dict(offload_activations=case["offload"])
        flags |= dict(keep=case["keep"]) if case["class_type"] == "custom" else {}
    else:
        flags["gradient_checkpointing"] = False  # it is prepare_peer's
    if case["engine"] == "plain":
        flags |= dict(optimizer_states=case["states"], place=case["place"])
        budgets = dict(gpu_memory_gib=case["gpu_gib"], host_memory_gib=case["host_memory_gib"])
        flags |= {name: gib for name, gib in budgets.items() if gib}
    if case["lora"]:
        flags |= dict(lora_r=case["lora"], quantize=case["quantize"])
    targets = ["--lora_targets", *ATTENTION] if case["adapts"] == "attention" else []
    return [*(f"--{k}={v}" for k, v in (flags | engine_options(case["engine"])).items()), *targets]


def run_case(case: Case, repeats: int, flags: list[str]) -> list[dict[str, Any]]:
    """Rows of the results, a row per length, from this process (one per GPU)."""
    import torch

    from longctx.loop.states import limit_gpu
    from longctx.memory.machine import available_host_bytes
    from profiling.build import PhaseMarks, build_trainer

    if case["engine"] != "plain" and case["gpu_gib"]:
        limit_gpu(torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))), case["gpu_gib"])
    free = {"host_free_gib": round(available_host_bytes() / GIB, 1)}
    lengths = [int(n) for n in str(case["tokens"]).split("+")]
    warm_up = min(WARM_UP_TOKENS, *lengths)
    if case["class_type"] not in OURS and case["sequence_parallel"] > 1:
        warm_up = lengths[0]  # Ulysses takes rows of as many steps at a time, of one length
        if len(lengths) > 1:
            sys.exit("error: give a peer with sequence_parallel one length a case")
    schedule = [warm_up] + [n for n in lengths for _ in range(repeats)]
    steps_done: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        with until_out_of_memory():
            trainer, _ = build_trainer(
                [*train_flags(case, max(lengths)), *flags],
                steps=len(schedule),
                output_dir=Path(folder),
                layers=case["layers"],
                lengths=schedule,
                answer_tokens=case["answer"] or None,
            )
            prepare_peer(trainer.model, case)
            watch = Stopwatch(trainer.args.device, steps_done)
            trainer.add_callback(PhaseMarks(trainer, watch.mark))
            trainer.train()
            free |= reference_seconds(trainer) | packed_as(trainer.model)
    history = trainer.state.log_history if steps_done else []
    losses = [line["loss"] for line in history if "loss" in line]
    measured = list(zip(schedule, steps_done, losses, strict=False))[1:]
    by_length = {n: [m[1:] for m in measured if m[0] == n] for n in lengths}
    rows = [
        row_of(case, n, [step for step, _ in found], trainer) | {"loss": found[-1][1]} | free
        for n, found in by_length.items()
        if len(found) == repeats
    ]
    for length in lengths[len(rows) :][:1]:  # the first that failed; longer ones were not tried
        rows.append({**row_keys(case), "tokens": length, "status": "oom"})
    return rows


def packed_as(model: Any) -> dict[str, str]:
    """The format of frozen weights that are packed; nothing for a model without any."""
    from longctx.layer.packed_weights import packed_names

    names = packed_names(model.parameters())
    return {"packed": ", ".join(names)} if names else {}


def reference_seconds(trainer: Any) -> dict[str, float]:
    """Seconds in which a row of the last length gets a reference's log-probabilities, which a run
    computes once; nothing where the task has no reference."""
    import torch

    if not trainer.task.has_reference:
        return {}
    batch = trainer.data_collator([trainer.train_dataset[len(trainer.train_dataset) - 1]])
    batch = trainer._prepare_inputs(batch)
    with torch.no_grad():
        for _ in range(2):
            begin = time.perf_counter()
            trainer.task.log_probs(trainer.model.eval(), batch).tolist()
    return {"reference_s": time.perf_counter() - begin}


class Stopwatch:
    """Seconds of each phase of each step, and what memory peaked at in it."""

    NAMES = {"forward": "fwd_s", "backward": "bwd_s", "optimizer": "opt_s"}

    def __init__(self, device: Any, steps: list[dict[str, float]]) -> None:
        self.device, self.steps = device, steps
        self.on_gpu = device.type == "cuda"
        self.phase, self.since, self.retries = "end", 0.0, 0

    def mark(self, phase: str) -> None:
        """Ends the phase that runs, with what the GPU still does for it, and begins this one."""
        import torch

        if self.on_gpu:  # updates of states on the host go on, until a forward waits for them
            torch.cuda.current_stream().synchronize()
        now = time.perf_counter()
        if self.phase == "end":
            self.step = dict.fromkeys(self.NAMES.values(), 0.0)
            if self.on_gpu:
                torch.cuda.reset_peak_memory_stats()
                self.retries = torch.cuda.memory_stats()["num_alloc_retries"]
        else:
            self.step[self.NAMES[self.phase]] += now - self.since
        self.phase, self.since = phase, now
        if phase == "end":
            self.steps.append(self.step | {"step_s": sum(self.step.values())} | self._memory())
            print(f"    {self.steps[-1]}", file=sys.stderr, flush=True)

    def _memory(self) -> dict[str, float]:
        import torch

        from longctx.loop.metrics import peak_memory
        from longctx.memory.machine import held_host_bytes

        gib = {"host_gib": held_host_bytes() / GIB}
        if self.on_gpu:
            retries = torch.cuda.memory_stats()["num_alloc_retries"]
            gib["alloc_retries"] = retries - self.retries
            gib["peak_gib"] = torch.cuda.max_memory_allocated() / GIB
            gib["reserved_gib"] = torch.cuda.max_memory_reserved() / GIB
            gib["capacity_gib"] = torch.cuda.get_device_properties(0).total_memory / GIB
        else:
            gib |= peak_memory(self.device)
        return gib


def row_keys(case: Case) -> dict[str, Any]:
    """What a row says of its case; older rows have none of SINCE."""
    silent = {key for key in SINCE if case[key] == DEFAULTS[key]}
    return {key: value for key, value in case.items() if key not in silent}


def row_of(case: Case, length: int, steps: list[dict[str, float]], trainer: Any) -> dict[str, Any]:
    import torch

    from longctx.cost.flops import mfu, step_flops
    from longctx.loop.metrics import attended, device_peak_flops
    from longctx.memory.machine import cgroup_limit_bytes
    from longctx.runtime.runtime import patched_part
    from profiling.build import RandomRows

    times = ("fwd_s", "bwd_s", "opt_s", "step_s")
    counted = steps[1:] or steps
    peaks = [name for name in steps[0] if name.endswith(("_gib", "_retries"))]
    row = {**row_keys(case), "tokens": length}
    row |= {name: statistics.median(step[name] for step in counted) for name in times}
    if len(steps) > 1:
        row["first_s"] = steps[0]["step_s"]
    args = trainer.args
    rows: float = args.per_device_train_batch_size * args.gradient_accumulation_steps
    rows /= case["sequence_parallel"]  # of one GPU
    row["tokens_per_s"] = args.world_size * rows * length / row["step_s"]
    peak_flops = device_peak_flops(args.device)
    one_document = isinstance(trainer.train_dataset, RandomRows)  # a row
    if peak_flops and one_document and not case["lora"]:
        config, parameters = trainer.model.config, trainer.throughput.parameters
        pairs = float(attended(config, torch.arange(length)))
        flops = step_flops(parameters=parameters, tokens=length, attended=pairs)
        row["mfu"] = mfu(rows * flops, row["step_s"], peak_flops)
    row |= {name: max(step[name] for step in steps) for name in peaks}
    row["status"] = "ok"
    if patched := patched_part(trainer.model):
        row |= ladder_columns(patched.longctx.store.ladder, patched.longctx.adopted.cut)
        if room := patched.longctx.adopted.host_room:
            row["host_room_gib"] = room / GIB
    if limit := cgroup_limit_bytes():
        row["cgroup_gib"] = limit / GIB
    return rounded(row)


BENCH = runner.Benchmark(
    script=__file__,
    description=__doc__,
    defaults=DEFAULTS,
    published=PUBLISHED,
    measure=run_case,
    key=KEY,
    takes_flags=True,
)

if __name__ == "__main__":
    runner.main(BENCH)
