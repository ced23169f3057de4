"""Unsloth as a peer of everyday_bench.py, in a process and with versions of its own.

everyday_bench.py starts this file. Unsloth patches what is imported after it, so nothing of ours is
imported before. It reads weights from a folder, quantises them as it loads, and trains under
bf16 autocast as its own trainer does.
"""

from __future__ import annotations

import os
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from types import MethodType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
ATTENTIONS = ("flash-attn", "flash-attn-4", "xformers")
"""Packages whose attention it takes, if they are installed, before torch's."""
MAPS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""Maps with adapters; of experts, Unsloth adapts the stacked weights by these names."""
MIXER_MAPS = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")


def load(case: Any, setting: Any, folder: Path) -> Any:
    """All weights in bf16, or adapters in fp32 or bf16 over bf16 or NF4, by its own loader, with
    its own checkpointing (`unsloth`) or none."""
    import torch
    from unsloth import FastLanguageModel, FastModel

    from profiling.bench.everyday_peers import cast_trained

    kept = "unsloth" if setting.checkpointing == "unsloth" else False
    model, _ = FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=case.tokens,
        dtype=torch.bfloat16,
        load_in_4bit=case.quantize == "nf4",
        full_finetuning=not case.lora,
        use_gradient_checkpointing="unsloth",
        unsloth_tiled_mlp=setting.tiled_mlp,
    )
    if case.lora:
        model = FastLanguageModel.get_peft_model(
            model,
            r=case.lora,
            lora_alpha=case.lora,
            lora_dropout=0,
            bias="none",
            target_modules=[*MAPS, *(MIXER_MAPS if case.preset.startswith("qwen3.5") else ())],
            use_gradient_checkpointing="unsloth",
            random_state=0,
        )
        cast_trained(model, torch.float32 if setting.adapters == "fp32" else torch.bfloat16)
        if setting.tiled_mlp:
            spare_inputs(model)
    model._unsloth_gradient_checkpointing = kept  # which its trainers go by
    loader = FastLanguageModel if case.lora else FastModel
    loader.for_training(model, use_gradient_checkpointing=kept)
    return model.train()


def spare_inputs(model: Any) -> None:
    """Has the fused MLPs of a tiled model leave their inputs alone. By default their backward
    writes the input's gradient over the input, which is a view of the whole row in a tile: autograd
    refuses that (2026.10.9)."""
    for module in model.modules():
        fused = vars(module).get("_unsloth_forward")
        if isinstance(fused, MethodType):
            module._unsloth_forward = MethodType(_in_a_new_place(fused.__func__), module)


def _in_a_new_place(fused: Any) -> Any:
    def forward(module: Any, x: Any) -> Any:
        return fused(module, x, inplace=False)

    return forward


def versions() -> dict[str, str]:
    """The versions that it runs with, of attention packages those that are installed; the results
    file's own are ours."""
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for name in (*("unsloth", "unsloth_zoo", "transformers", "trl", "torch"), *ATTENTIONS):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def main(job: str, ahead: bool) -> None:
    # It would write what it compiles into the working directory.
    os.environ.setdefault("UNSLOTH_COMPILE_LOCATION", tempfile.mkdtemp(prefix="unsloth_compiled_"))
    sys.path[0] = str(ROOT)  # beside this file are names that other packages have, too
    import unsloth  # noqa: F401, I001

    from profiling.bench import everyday_bench
    from profiling.bench.everyday_peers import Peer

    peer = Peer(load=load, autocast=True)
    everyday_bench.child(job, {"unsloth": peer}, versions(), ahead)


if __name__ == "__main__":
    main(sys.argv[1], ahead="--ahead" in sys.argv)
