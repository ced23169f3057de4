"""Checks flash-linear-attention, and gives it the one kernel that it lacks on some machines.

On a Hopper GPU with Triton from 3.4 up to 3.7.1, as torch 2.9 to 2.12 bring it, the backward pass
of its Gated DeltaNet ends with an error, since Triton compiles one of its kernels to wrong numbers
there. Ours (kernels/delta_rule.py) is registered for that function as the package provides for.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch import Tensor

from longctx.errors import UserError
from longctx.kernels.delta_rule import MOST, chunk_gradients
from longctx.safety.packages import pip_install, requirements
from longctx.safety.system import installed, version_of

PACKAGE, MODULE = "flash-linear-attention", "fla"
AFFECTED = Version("3.4"), Version("3.7.1")
"""The first Triton that compiles the kernel wrongly, and the first that does not any more."""


def prepare_mixer_kernels() -> None:
    """Makes flash-linear-attention ready to train on the GPU that is here, if there are both.
    Raises UserError for a version of it that is too old."""
    found = version_of(PACKAGE)
    if not installed(MODULE) or not torch.cuda.is_available():
        return
    takes = next((line for line in requirements() if line.name == PACKAGE), Requirement(PACKAGE))
    if found is not None and found not in takes.specifier:
        raise UserError(
            f"{PACKAGE} {found}, which runs this model's mixers, is too old: {pip_install(PACKAGE)}"
        )
    triton = version_of("triton")
    first, mended = AFFECTED
    if torch.cuda.get_device_capability()[0] == 9 and triton and first <= Version(triton) < mended:
        _register()


@cache
def _register() -> None:
    from fla.backends import BaseBackend, register

    class Longctx(BaseBackend):
        """After TileLang's kernel for the same function, which needs nvcc."""

        backend_type = "longctx"
        priority = 9

        def chunk_bwd_dqkwg_verifier(
            self, q: Tensor, v: Tensor, h: Tensor, **others: Any
        ) -> tuple[bool, str | None]:
            absent = ("g_gamma", "cu_seqlens")
            if others.get("g") is None or any(others.get(name) is not None for name in absent):
                return False, "it has a decay of each token and rows of one document"
            if others.get("w") is None or others.get("state_v_first"):
                return False, "it is that of the delta rule, with states (K, V)"
            if max(h.shape[-2:]) > MOST or h.dtype != q.dtype or q.element_size() != 2:
                return False, f"it has 16 bits, and heads of at most {MOST}"
            return True, None

        def chunk_bwd_dqkwg(
            self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, **others: Any
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            scale = others.get("scale") or k.shape[-1] ** -0.5
            chunk = others.get("chunk_size", 64)
            return chunk_gradients(q, k, v, do, others["dv"], others["g"], h, dh, scale, chunk)

    register("common")(Longctx)
