"""One call of a mixer's module with our kernels in it (mixer_kernels.py, gated_delta_net.py).

mixers.py imports this file with the first mixer, so that models without any load none of these
kernels.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from longctx.layer.row_documents import RowDocuments
from longctx.layer.specs.mixer_spec import MixerSpec
from longctx.mixers.gated_delta_net import can_be_ours, our_delta_net
from longctx.mixers.mixer_kernels import (
    CONVOLUTION,
    RECURRENCE,
    MixerCall,
    OurConvolution,
    our_adapters,
    our_functions,
    our_gated_norm,
    ours_in,
)

_BOTH = (CONVOLUTION, RECURRENCE)
CROSS = {"convolution": (CONVOLUTION,), "mamba": _BOTH, "delta rule": _BOTH}
"""Maps the kinds of mixers that can have several documents in a row to the operations in which a
token reads others: all of these read where documents begin."""


class MixerRun:
    """How a module runs. The linear layers in it whose adapters our kernels run are found once for
    all segments."""

    def __init__(self, module: nn.Module, spec: MixerSpec) -> None:
        self._module, self._spec, self._adapted = module, spec, ours_in(module)
        self.crosses: tuple[str, ...] = CROSS.get(spec.kind, ())

    def __call__(
        self,
        n: Tensor,  # (rows, t, D)
        carried: Any,
        parameters: Mapping[str, Tensor],
        *,
        begins: bool,
        packed: RowDocuments | None,
    ) -> Tensor:  # (rows, t, D)
        """Runs it with these parameters. `carried` has the state of earlier tokens, if they begin
        with one, and keeps theirs (mixers.Carried)."""
        module, spec = self._module, self._spec
        norm = module.get_submodule(spec.gated_norm) if spec.gated_norm else None
        call = MixerCall(begins=begins, packed=packed)
        ours: AbstractContextManager[Any] = OurConvolution(call)
        if can_be_ours(module, spec, n):
            ours = our_delta_net(module, spec, call, self._adapted)
        gated = our_gated_norm(norm, gate_first=spec.gate_first)
        how = {"hidden_states": n, spec.cache: carried}
        with ours, our_functions(module, call), gated, our_adapters(self._adapted):
            z: Tensor = functional_call(module, dict(parameters), (), how)
        call.check(self.crosses)
        return z.view(n.shape)  # Falcon-H1's norm drops a dimension if rows have one token
