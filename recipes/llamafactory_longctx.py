"""LLaMA-Factory's trainer, with its model on longctx's schedule.

    pip install llamafactory
    longctx recipes llamafactory_longctx.py > llamafactory_longctx.py
    python llamafactory_longctx.py train.yaml       as `llamafactory-cli train train.yaml`

Every causal language model of the families below is patched as it is built. On several GPUs start
it as `torchrun --nproc_per_node N llamafactory_longctx.py train.yaml`. Leave out what replaces the
model's forward: `enable_liger_kernel`, `use_unsloth`, `shift_attn`. LLaMA-Factory 0.9.5 takes
transformers up to 5.6, where three steps of a tiny Llama had the losses that it has alone; longctx
asks for a newer one, so it is installed there with `pip install --no-deps`.
"""

from __future__ import annotations

from llamafactory.train.tuner import run_exp

import longctx

MODEL_TYPES = ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3")


def main() -> None:
    for model_type in MODEL_TYPES:
        longctx.patch_class(model_type)  # options are those of longctx.patch
    run_exp()


if __name__ == "__main__":
    main()
