"""Prepares flash-linear-attention, whose kernels run Gated DeltaNet, for a Hopper GPU.

a missing kernel    with Triton from 3.4 up to 3.7.1, which torch 2.9 to 2.12 install, the package's
                    backward raises an error, since Triton compiles one kernel to wrong numbers
                    there. Our kernel (kernels/delta_rule.py) is registered for that function, as
                    the package provides for
configurations      are given, so that the package does not search them in the first step
"""

from __future__ import annotations

import math
import sys
from functools import cache
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch import Tensor

from longctx.errors import UserError
from longctx.kernels.delta_rule import MOST, chunk_gradients
from longctx.packages import pip_install, requirements
from longctx.system import installed, version_of

PACKAGE, MODULE = "flash-linear-attention", "fla"
AFFECTED = Version("3.4"), Version("3.7.1")
"""The first version of Triton that compiles the kernel wrongly, and the first that is fixed."""
WIDEST = 128
"""Columns of the widest heads of keys for which the configurations are known to fit."""


def prepare_fla(config: Any) -> None:
    """Prepares flash-linear-attention for training a model of this configuration on this machine's
    GPU, if both exist. Raises UserError for a version that is too old."""
    found = version_of(PACKAGE)
    if not installed(MODULE) or not torch.cuda.is_available():
        return
    takes = next((line for line in requirements() if line.name == PACKAGE), Requirement(PACKAGE))
    if found is not None and found not in takes.specifier:
        raise UserError(
            f"{PACKAGE} {found}, which runs this model's mixers, is too old: {pip_install(PACKAGE)}"
        )
    if torch.cuda.get_device_capability()[0] != 9:
        return
    triton = version_of("triton")
    first, mended = AFFECTED
    if triton and first <= Version(triton) < mended:
        _register()
    if getattr(config, "linear_key_head_dim", math.inf) <= WIDEST:
        _configure()


def prepare_imported_fla(model: Any) -> None:
    """Prepares flash-linear-attention for a model in Hugging Face's layers, if transformers has
    imported it, as it does for classes that use it. Raises UserError as `prepare_fla`."""
    if MODULE in sys.modules:
        prepare_fla(model.config.get_text_config())


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
            if others.get("g") is None or others.get("g_gamma") is not None:
                return False, "ours takes a decay for each token"
            if others.get("w") is None or others.get("state_v_first"):
                return False, "ours is that of the delta rule, with states (K, V)"
            if max(h.shape[-2:]) > MOST or h.dtype != q.dtype or q.element_size() != 2:
                return False, f"ours takes 16 bits, and heads of at most {MOST}"
            return True, None

        def chunk_bwd_dqkwg(
            self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, h: Tensor, dh: Tensor, **others: Any
        ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
            scale = others.get("scale") or k.shape[-1] ** -0.5
            chunk = others.get("chunk_size", 64)
            dv, g, bounds = (others.get(name) for name in ("dv", "g", "cu_seqlens"))
            assert dv is not None and g is not None
            return chunk_gradients(q, k, v, do, dv, g, h, dh, scale, chunk, bounds)

    register("common")(Longctx)


@cache
def _configure() -> None:
    """Gives the package its kernels' configurations, unless the user has set FLA_CACHE_MODE."""
    from fla.ops.utils import cache as configs

    if configs.FLA_CACHE_MODE is not configs.FlaCacheMode.DISABLED:
        return
    configs.FLA_CACHE_MODE = configs.FlaCacheMode.FULL
    configs.load_cached_config = lambda kernel, key=None: CONFIGS.get(kernel)


def _config(num_warps: int, num_stages: int = 3, **kwargs: int) -> dict[str, Any]:
    return dict(num_warps=num_warps, num_stages=num_stages, num_ctas=1, kwargs=kwargs)


CONFIGS = {
    "l2norm_fwd_kernel": _config(8, BT=16),
    "l2norm_bwd_kernel": _config(8, BT=8),
    "chunk_local_cumsum_scalar_kernel": _config(2),
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel": _config(1, BK=64),
    "recompute_w_u_fwd_kernel": _config(4),
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64": _config(4, BV=32),
    "chunk_fwd_kernel_o": _config(4, BK=64, BV=64),
    "chunk_bwd_kernel_dv_local": _config(2),
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64": _config(4, BV=32),
    "prepare_wy_repr_bwd_kernel": _config(4),
}
"""The fastest configurations that the package's search found on an H100, or ones within 5% of them,
for 32 heads of 128 columns (h100_fla_search.json). The search compiles more than a hundred kernels
in the first step on a machine, and some of them again for rows of another length."""
