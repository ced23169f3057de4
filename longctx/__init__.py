"""longctx: training language models of Hugging Face at very long context, on one GPU or a few.

The public names, each imported when it is first used (torch is not loaded before):

    patch, unpatch                the schedule on one instance of a transformers model
    patch_class                   on every instance of a class that is built from now on
    AutoLongctxModelForCausalLM   from_pretrained, patched
    Documents                     the documents of a row, and which of them continue a shared prompt
    exact_adamw                   AdamW with exact states wherever they fit, for one's own loop
    LongTrainer                   transformers' Trainer with exact states and whole checkpoints
    linear_cross_entropy          lm_head and cross-entropy in chunks, without the logits
    linear_log_probs              log-probabilities of labels and entropies, likewise
    linear_jsd, linear_kl         divergences from a teacher's head, likewise
    cross_entropy                 of logits that are there; its gradient takes their memory
    rms_norm, layer_norm, rope, swiglu, geglu     the Triton kernels as differentiable functions
    apply_rotary_pos_emb          RoPE in the shapes and with the arguments of Hugging Face's
    RMSNorm, LayerNorm, RotaryEmbedding, SwiGLU, GeGLU, CrossEntropyLoss     as modules
    LinearCrossEntropyLoss, LinearLogProbs, LinearJSDLoss, LinearKLLoss     and the heads
    EfficiencyCallback            logs tokens a second, MFU and peak memory of any Trainer
    losses                        preference losses: DPO, ORPO, CPO, SimPO, KTO, reward models
    conversations                 a file of conversations with images, for other trainers

Those but LongTrainer and conversations are the library's, which never imports the program
(longctx/train).
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from longctx.constants import __distribution__ as __distribution__
from longctx.constants import __version__ as __version__
from longctx.noise import quiet_imports as _quiet_imports

if TYPE_CHECKING:  # what type checkers and editors read; _HOMES below is what runs
    from longctx import losses as losses
    from longctx.attention.documents import Documents as Documents
    from longctx.head.distillation import linear_jsd as linear_jsd
    from longctx.head.distillation import linear_kl as linear_kl
    from longctx.head.log_probs import linear_log_probs as linear_log_probs
    from longctx.head.logits_loss import cross_entropy as cross_entropy
    from longctx.head.loss import linear_cross_entropy as linear_cross_entropy
    from longctx.kernels.norm import layer_norm as layer_norm
    from longctx.kernels.norm import rms_norm as rms_norm
    from longctx.kernels.rope import rope as rope
    from longctx.kernels.rope_tables import apply_rotary_pos_emb as apply_rotary_pos_emb
    from longctx.kernels.swiglu import geglu as geglu
    from longctx.kernels.swiglu import swiglu as swiglu
    from longctx.loop.efficiency import EfficiencyCallback as EfficiencyCallback
    from longctx.loop.exact_adamw import exact_adamw as exact_adamw
    from longctx.patching.nn import CrossEntropyLoss as CrossEntropyLoss
    from longctx.patching.nn import GeGLU as GeGLU
    from longctx.patching.nn import LayerNorm as LayerNorm
    from longctx.patching.nn import LinearCrossEntropyLoss as LinearCrossEntropyLoss
    from longctx.patching.nn import LinearJSDLoss as LinearJSDLoss
    from longctx.patching.nn import LinearKLLoss as LinearKLLoss
    from longctx.patching.nn import LinearLogProbs as LinearLogProbs
    from longctx.patching.nn import RMSNorm as RMSNorm
    from longctx.patching.nn import RotaryEmbedding as RotaryEmbedding
    from longctx.patching.nn import SwiGLU as SwiGLU
    from longctx.patching.patch import AutoLongctxModelForCausalLM as AutoLongctxModelForCausalLM
    from longctx.patching.patch import patch as patch
    from longctx.patching.patch import unpatch as unpatch
    from longctx.patching.patch_class import patch_class as patch_class
    from longctx.train.data.images.rows import conversations as conversations
    from longctx.train.trainer.trainer import LongTrainer as LongTrainer

_HOMES = {
    "patch": "longctx.patching.patch",
    "unpatch": "longctx.patching.patch",
    "patch_class": "longctx.patching.patch_class",
    "AutoLongctxModelForCausalLM": "longctx.patching.patch",
    "Documents": "longctx.attention.documents",
    "exact_adamw": "longctx.loop.exact_adamw",
    "LongTrainer": "longctx.train.trainer.trainer",
    "EfficiencyCallback": "longctx.loop.efficiency",
    "conversations": "longctx.train.data.images.rows",
    "linear_cross_entropy": "longctx.head.loss",
    "linear_log_probs": "longctx.head.log_probs",
    "linear_jsd": "longctx.head.distillation",
    "linear_kl": "longctx.head.distillation",
    "cross_entropy": "longctx.head.logits_loss",
    "rms_norm": "longctx.kernels.norm",
    "layer_norm": "longctx.kernels.norm",
    "rope": "longctx.kernels.rope",
    "apply_rotary_pos_emb": "longctx.kernels.rope_tables",
    "swiglu": "longctx.kernels.swiglu",
    "geglu": "longctx.kernels.swiglu",
    **dict.fromkeys(
        (
            *("RMSNorm", "LayerNorm", "RotaryEmbedding", "SwiGLU", "GeGLU", "CrossEntropyLoss"),
            *("LinearCrossEntropyLoss", "LinearLogProbs", "LinearJSDLoss", "LinearKLLoss"),
        ),
        "longctx.patching.nn",
    ),
}
_PACKAGES = ("losses",)
__all__ = [*_HOMES, *_PACKAGES]

if not TYPE_CHECKING:  # a type checker that saw it would take any name

    def __getattr__(name: str) -> object:
        if name in _PACKAGES:
            return importlib.import_module(f"longctx.{name}")
        if name not in _HOMES:
            raise AttributeError(f"module 'longctx' has no attribute {name!r}")
        with _quiet_imports():
            return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
