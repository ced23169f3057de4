"""A plugin of ms-swift that trains its model on longctx's schedule.

    pip install ms-swift
    longctx recipes swift_longctx.py > swift_longctx.py
    swift sft --external_plugins swift_longctx.py ...

Every causal language model of the families below is patched as it is built, before adapters and the
trainer are put around it. Leave out what replaces the model's forward: `--use_liger_kernel`,
`--tuner_backend unsloth`.
"""

from __future__ import annotations

import longctx

for model_type in ("llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3_text", "phi3"):
    longctx.patch_class(model_type)  # options are those of longctx.patch
