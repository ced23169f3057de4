"""Times steps of a vision-language model on rows with the frames of a video, one process a case.

    python profiling/bench/images_bench.py --output profiling/results/h100_images.json
    python profiling/bench/images_bench.py --case side=liger,checkpointing=selective,frames=256
    python profiling/bench/images_bench.py --cases hour --output profiling/results/h200_images.json

The model has the sizes of Qwen3-VL-8B and random weights, adapters of rank 16 on all maps of its
language model, and a tower that is frozen unless `tower=true`. With `quantize=nf4` the layers of
the language model are in 4 bits; `gpu_gib` is enforced in torch's allocator once the model is made.
`hour` is an hour of video, a frame a second. A row has `frames` frames of
`pixels` x `pixels`, two to a group of tokens, with 8 tokens of text before each group; text alone
has labels. Sides:

    custom    longctx.patch, which keeps what memory allows
    liger     Liger-Kernel's layers and loss, flash-attn-4 in the language model
    vanilla   Hugging Face's, with that attention

Peers keep what `checkpointing` says of each layer (none, layers, selective), with `offload=all` in
host memory (peers.py). Adapters are in fp32, as PEFT makes them and as ours always are;
`adapters=bf16` casts a peer's. All have torch's fused AdamW in a loop that does nothing but train
(step_clock.py), and `states=exact` gives ours longctx.exact_adamw, with which weights may wait on
the host within the budget. `step_s` is the median of `--repeats` steps after one more; `peak_gib`
and `reserved_gib` are theirs, `host_gib` is what the process then holds of the host's memory, and
`tokens` are the row's. `idle` is what two further steps show, where `--repeats` is not 1.

Predicted, on an H200: 256 frames of 448 pixels, 27K tokens, 2.4 s; of 768 pixels, 75K tokens, 13 s;
the hour, 160K tokens, 48 s in 24 GiB.
"""

from __future__ import annotations

import copy
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from longctx.constants import GIB
from longctx.memory.machine import held_host_bytes
from longctx.train.options.source import PRESETS
from profiling.bench import runner
from profiling.bench.runner import Case, Row, rounded, until_out_of_memory

TEXT = 8
"""Tokens of text before each pair of frames."""
QWEN3_VL_8B: dict[str, Any] = {k: v for k, v in PRESETS["qwen3-vl-8b"].items() if k != "model_type"}
PATCH: int = QWEN3_VL_8B["vision_config"]["patch_size"]
"""Pixels of a patch's side."""
MERGE: int = QWEN3_VL_8B["vision_config"]["spatial_merge_size"]
"""Patches of a token's side."""
DEFAULTS: Case = {
    "side": "custom",
    "checkpointing": None,
    "offload": "none",
    "adapters": "fp32",
    "frames": 256,
    "pixels": 448,
    "lora": 16,
    "tower": False,
    "quantize": "none",
    "gpu_gib": 0,
    "states": "torch",
}
PEERS: list[Case] = [
    dict(side="liger", checkpointing="selective", adapters="bf16"),
    dict(side="liger", checkpointing="layers", offload="all", adapters="bf16"),
]
"""The peer's settings for time and for memory."""
PUBLISHED = [
    {**sides, "frames": frames, "pixels": pixels}
    for frames, pixels in ((256, 448), (256, 768))
    for sides in (dict(side="custom"), *PEERS)
] + [{**sides, "frames": 64, "tower": True} for sides in (dict(side="custom"), PEERS[0])]

HOUR = {"frames": 3600, "pixels": 288, "quantize": "nf4", "gpu_gib": 24}


def batch(case: Case, video: int, device: str, dtype: Any) -> dict[str, Any]:
    """A row of text and pairs of frames, whose tokens are `video`, with random pixels."""
    import torch

    torch.manual_seed(0)
    side, pairs = case["pixels"] // PATCH, case["frames"] // 2
    group = [1000] * TEXT + [video] * (side // MERGE) ** 2
    ids = torch.tensor(group * pairs + [1000] * TEXT, device=device)[None]
    seen = ids == video
    ids = torch.where(seen, ids, torch.randint_like(ids, 1000))
    pixels = torch.randn(pairs * side**2, 3 * 2 * PATCH**2, device=device, dtype=dtype)
    return {
        "input_ids": ids,
        "labels": ids.masked_fill(seen, -100),
        "mm_token_type_ids": 2 * seen.int(),
        "pixel_values_videos": pixels,
        "video_grid_thw": torch.tensor([[pairs, side, side]], device=device),
    }


def made(case: Case, sizes: dict[str, Any], device: str, dtype: Any) -> Any:
    """The model of a case, which trains adapters and, if asked for, its tower."""
    import peft
    import torch
    from transformers import AutoConfig, AutoModelForImageTextToText

    import longctx
    from longctx.families.families import base_of
    from longctx.families.vision import towers
    from longctx.train.lora.quantise import quantise_
    from profiling.bench.everyday_peers import cast_trained
    from profiling.bench.peers import attend_by_documents, keep

    config = AutoConfig.for_model("qwen3_vl", **copy.deepcopy(sizes))
    attention = "flash_attention_4" if device == "cuda" else "sdpa"
    kinds = {"": "sdpa", "text_config": attention, "vision_config": "sdpa"}
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(
            config, dtype=dtype, attn_implementation=kinds
        )
    if case["side"] == "liger":
        from liger_kernel.transformers import apply_liger_kernel_to_qwen3_vl

        apply_liger_kernel_to_qwen3_vl(model=model)
    if case["quantize"] == "nf4":
        quantise_(model, torch.device(device))
    maps = r".*language_model.*\.(q|k|v|o|gate|up|down)_proj"
    model = peft.get_peft_model(model, peft.LoraConfig(r=case["lora"], target_modules=maps))
    inner = model.get_base_model()
    for _, tower in towers(inner):
        tower.requires_grad_(case["tower"])
    if case["adapters"] == "bf16":
        cast_trained(model, dtype)
    if case["side"] == "custom":
        longctx.patch(model)
    else:
        base: Any = base_of(inner)
        base.register_forward_pre_hook(one_document, with_kwargs=True)
        attend_by_documents(base)
        keep(base, case["checkpointing"] or "none", case["offload"] != "none")
    return model.train()


def one_document(module: Any, args: Any, kwargs: Case) -> tuple[Any, Case]:
    """Adds the bounds of a row to the arguments of a language model. Positions, which have an axis
    each for frames, height and width, do not say them."""
    import torch

    tokens, device = kwargs["inputs_embeds"].shape[1], kwargs["inputs_embeds"].device
    bounds = torch.tensor([0, tokens], dtype=torch.int32, device=device)
    return args, {**kwargs, "cu_seq_lens_q": bounds, "max_length_q": tokens}


def run_case(case: Case, repeats: int, flags: list[str]) -> list[Row]:
    """One row of the results, from this process."""
    import torch

    return [measured(case, QWEN3_VL_8B, "cuda", torch.bfloat16, repeats)]


def measured(case: Case, sizes: dict[str, Any], device: str, dtype: Any, repeats: int) -> Row:
    from profiling.bench.step_clock import Clock, time_loop

    row: Row = dict(case)
    with until_out_of_memory() as outcome:
        given = batch(case, sizes["video_token_id"], device, dtype)
        clock = Clock(1, repeats, idle_steps=0 if repeats == 1 else None)
        row["tokens"] = given["input_ids"].numel()
        model = made(case, sizes, device, dtype)
        limit(case["gpu_gib"])
        seen = int((given["labels"] == -100).sum())
        optimizer = optimizer_of(case, model, row["tokens"], seen)
        time_loop(model, [given], clock, autocast=False, optimizer=optimizer)
        row |= clock.columns()
        row["tokens_per_s"] = row["tokens"] / row["step_s"]
        row["host_gib"] = held_host_bytes() / GIB
    return rounded(row | outcome)


def optimizer_of(case: Case, model: Any, tokens: int, seen: int) -> Any:
    """Our optimizer where the case asks for it; None for torch's. Of `tokens`, `seen` are of the
    video."""
    if case["states"] == "torch":
        return None
    import longctx

    counts = dict(tokens=tokens, image_tokens=seen)
    return longctx.exact_adamw(model, lr=1e-5, **counts, gpu_memory_gib=case["gpu_gib"] or None)


def limit(gib: float) -> None:
    """Enforces a budget, if there is one, from here on. It took more to make the weights."""
    import torch

    if gib:
        torch.cuda.empty_cache()
        total_bytes = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(gib * GIB / total_bytes)


BENCH = runner.Benchmark(
    script=__file__,
    description=__doc__,
    defaults=DEFAULTS,
    published={"published": PUBLISHED, "hour": [HOUR]},
    measure=run_case,
    settle=dict,
)

if __name__ == "__main__":
    runner.main(BENCH)
