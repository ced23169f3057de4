"""Our kernels inside the modules that transformers has as mixers, while the schedule runs them.

    convolution    transformers calls causal-conv1d, which is built with nvcc, or torch's
    gated norm     some ten passes over fp32 tensors in torch
    delta rule     one of flash-linear-attention's kernels is refused on some machines

The last: on a Hopper GPU with Triton from 3.4 up to 3.7.1, as torch 2.9 to 2.12 bring it, the
package's Gated DeltaNet ends with an error in backward, since Triton compiles one of its kernels to
wrong numbers there. Ours (kernels/delta_rule.py) is registered for it as the package provides for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from packaging.requirements import Requirement
from packaging.version import Version
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from longctx.errors import UserError
from longctx.kernels.causal_conv import MOST_TAPS, causal_conv
from longctx.kernels.delta_rule import MOST, chunk_gradients
from longctx.kernels.gated_norm import gated_norm
from longctx.safety.packages import pip_install, requirements
from longctx.safety.system import installed, version_of

PACKAGE, MODULE = "flash-linear-attention", "fla"
AFFECTED = Version("3.4"), Version("3.7.1")
"""The first Triton that compiles the kernel wrongly, and the first that does not any more."""


class OurConvolution(TorchFunctionMode):
    """A context in which torch's convolution of channels with a filter each, padded so that it is
    causal, is ours. The result has the row's tokens alone; the K - 1 behind them, which torch's has
    too, a causal model cuts off."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is torch.conv1d and (y := _convolved(*args, **kwargs)) is not None:
            return y
        return func(*args, **kwargs)


def _convolved(
    input: Tensor,  # (B, C, T)
    weight: Tensor,  # (C, 1, K)
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Tensor | None:  # (B, C, T)
    """Returns what ours gives for the arguments of torch.conv1d; None if it is not for ours."""
    channels, of_group, taps = weight.shape
    how = [x[0] if isinstance(x, (tuple, list)) else x for x in (stride, padding, dilation)]
    by_channel = of_group == 1 and groups == channels == input.shape[1]
    casts = torch.is_autocast_enabled(input.device.type) or input.dtype != weight.dtype
    if not by_channel or how != [1, taps - 1, 1] or casts or taps > MOST_TAPS:
        return None
    rows = input.mT
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    return causal_conv(rows, weight[:, 0], bias).mT


@contextmanager
def our_gated_norm(norm: nn.Module | None) -> Iterator[None]:
    """A context in which a mixer's gated RMSNorm is ours, unless somebody else has exchanged its
    forward."""
    if norm is None or "forward" in vars(norm):
        yield
        return

    def forward(x: Tensor, gate: Tensor) -> Tensor:
        weight, eps = norm.weight, norm.variance_epsilon
        assert isinstance(weight, Tensor) and isinstance(eps, float)
        return gated_norm(x, gate.to(x.dtype), weight, eps)

    norm.forward = forward
    try:
        yield
    finally:
        del norm.forward


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
