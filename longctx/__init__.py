"""longctx: full fine-tuning of Llama-family models at very long context on one GPU.

The public names, each imported when it is first used (torch is not loaded before):

    patch, unpatch                the schedule on one instance of a transformers model
    AutoLongctxModelForCausalLM   from_pretrained, patched
    Documents                     the documents of a row, and which of them continue a shared prompt
    exact_adamw                   AdamW with exact states wherever they fit, for one's own loop
    LongTrainer                   transformers' Trainer with exact states and whole checkpoints
    linear_cross_entropy          lm_head and cross-entropy in chunks, without the logits
    linear_log_probs              log-probabilities of labels and entropies, likewise
    linear_jsd, linear_kl         divergences from a teacher's head, likewise
    rms_norm, layer_norm, rope, swiglu, geglu     the Triton kernels as differentiable functions
    RMSNorm, LayerNorm, RotaryEmbedding, SwiGLU, GeGLU     the kernels as modules
    LinearCrossEntropyLoss, LinearLogProbs, LinearJSDLoss, LinearKLLoss     and the heads
    losses                        preference losses: DPO, ORPO, CPO, SimPO, KTO, reward models
"""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"

_HOMES = {
    "patch": "longctx.model.patch",
    "unpatch": "longctx.model.patch",
    "AutoLongctxModelForCausalLM": "longctx.model.patch",
    "Documents": "longctx.attention.documents",
    "exact_adamw": "longctx.run.loop",
    "LongTrainer": "longctx.run.trainer",
    "linear_cross_entropy": "longctx.model.loss",
    "linear_log_probs": "longctx.model.log_probs",
    "linear_jsd": "longctx.model.distillation",
    "linear_kl": "longctx.model.distillation",
    "rms_norm": "longctx.kernels.rms_norm",
    "layer_norm": "longctx.kernels.layer_norm",
    "rope": "longctx.kernels.rope",
    "swiglu": "longctx.kernels.swiglu",
    "geglu": "longctx.kernels.swiglu",
    **dict.fromkeys(
        (
            *("RMSNorm", "LayerNorm", "RotaryEmbedding", "SwiGLU", "GeGLU"),
            *("LinearCrossEntropyLoss", "LinearLogProbs", "LinearJSDLoss", "LinearKLLoss"),
        ),
        "longctx.model.nn",
    ),
}
_PACKAGES = ("losses",)
__all__ = [*_HOMES, *_PACKAGES]


def __getattr__(name: str) -> Any:
    if name in _PACKAGES:
        return importlib.import_module(f"longctx.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'longctx' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
