"""Runs a model's mixers, such as Gated DeltaNet or Mamba 2, for the schedule
(layer/parts/mixer.py).

transformers' mixers read the state of earlier tokens from a cache, and write theirs to it.
`Carried` stands in for that cache for one call of one module. Its tensors belong to autograd's
graph, so that gradients reach earlier segments, and nothing is written in place. It has the methods
that transformers 5.17 to 5.23 call.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from longctx.families.adapters import is_adapted
from longctx.families.families import layers_of
from longctx.families.family import Layer, part_of
from longctx.kernels.state_space import TILE, WIDEST, has_kernels
from longctx.layer.parts.mixer import State
from longctx.layer.row_documents import RowDocuments
from longctx.layer.specs.mixer_spec import MixerSpec
from longctx.packages import pip_install
from longctx.system import installed

if TYPE_CHECKING:
    from longctx.mixers.run_mixer import MixerRun


@dataclass(frozen=True, eq=False)
class ModelsMixer:
    """A module of a model as `Mixes` in layer/parts/mixer.py. It runs with all of its submodules
    and their hooks, adapters among them."""

    module: nn.Module
    spec: MixerSpec

    @cached_property
    def _run(self) -> MixerRun:
        # Here, so that models without mixers, which most are, load none of their kernels.
        from longctx.mixers.run_mixer import MixerRun

        return MixerRun(self.module, self.spec)

    @property
    def drops(self) -> bool:
        return self.module.training and any(
            type(module) is nn.Dropout and module.p > 0 for module in self.module.modules()
        )

    @property
    def packs(self) -> bool:
        """Whether it can have several documents in a row: what crosses tokens in it is ours, and
        reads where documents begin."""
        return bool(self._run.crosses) and not any(map(installed, _TAKEN))

    def facts(self) -> tuple[Any, ...]:
        """Returns what a recording of it depends on beside its parameters: its modules and their
        forwards, its own settings, its buffers, and which adapters are applied."""
        modules = [(id(module), type(module), _applied(module)) for module in self.module.modules()]
        settings = [(k, v) for k, v in vars(self.module).items() if type(v) in _PLAIN]
        buffers = [(id(x), x.data_ptr()) for x in self.module.buffers()]
        return self.spec, self.drops, modules, settings, buffers

    def __call__(
        self,
        n: Tensor,  # (rows, t, D)
        begin: State,
        parameters: Mapping[str, Tensor],
        *,
        ends: bool = True,
        packed: RowDocuments | None = None,
    ) -> tuple[Tensor, State]:
        carried = Carried(begin, ends=ends)
        z = self._run(n, carried, parameters, begins=bool(begin), packed=packed)
        return z, carried.end


_TAKEN = ("causal_conv1d", "mamba_ssm")
"""Packages whose kernels transformers takes where they are installed, and ours do not replace."""
_PLAIN = {bool, int, float, str, tuple, type(None)}


def _applied(module: Any) -> tuple[Any, ...]:
    """Returns which adapters of PEFT a linear layer applies, and their scales."""
    if not is_adapted(module):
        return ()
    off = module.disable_adapters, module.merged
    return *off, tuple(module.active_adapters), tuple(module.scaling.items())


class Carried:
    """The state of one mixer before a call, and after its last token, if `ends` asks for it: the
    last inputs of its convolution (rows, C, K - 1) and the state of its recurrence, if it has
    one."""

    record_past = True
    """Keeps the convolution off the path of generation, which writes its state in place."""

    def __init__(self, begin: State, *, ends: bool = True) -> None:
        self._begin, self.ends = begin, ends
        self._convolved: list[Tensor] = []
        self._recurrent: list[Tensor] = []

    @property
    def end(self) -> State:
        return (*self._convolved, *self._recurrent)

    def update_conv_state(
        self, x: Tensor, layer_idx: int, state_idx: int = 0, *, conv_kernel_size: int, **_: Any
    ) -> Tensor:  # (rows, C, t) -> (rows, C, K - 1 + t), or (rows, C, t) at the beginning
        """Returns the convolution's input, and keeps its last K - 1 tokens."""
        reach, rows = conv_kernel_size - 1, x.mT
        if self._begin:
            rows = torch.cat([self._begin[0].to(x.dtype).mT, rows], dim=1)
            x = rows.mT
        if not self.ends:
            return x
        last = rows[:, max(0, rows.shape[1] - reach) :]
        # A copy: a view would keep all of a segment's inputs alive until the row ends.
        self.keep_inputs(nn.functional.pad(last, (0, 0, reach - last.shape[1], 0)).clone())
        return x

    def keep_inputs(self, last: Tensor) -> None:  # (rows, K - 1, C)
        """Keeps the convolution's last inputs."""
        self._convolved.append(last.mT)

    def update_recurrent_state(self, state: Tensor, layer_idx: int, **_: Any) -> Tensor:
        if self.ends:
            self._recurrent.append(state)
        return state

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._begin[0] if self._begin else None

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> Tensor | None:
        return self._begin[1] if len(self._begin) > 1 else None

    def is_recording_past(self, layer_idx: int) -> bool:
        return self.record_past

    # --- read by transformers before 5.18 ---------------------------------------------------

    def has_previous_state(self, *_: Any, **__: Any) -> bool:
        return bool(self._begin)

    @property
    def layers(self) -> Any:
        return _Every(self)

    @property
    def conv_states(self) -> list[Tensor | None]:
        return [self.get_conv_state(0)]

    @property
    def recurrent_states(self) -> list[Tensor | None]:
        return [self.get_recurrent_state(0)]


class _Every:
    """The layers of a cache whose every layer is this one."""

    def __init__(self, layer: Carried) -> None:
        self._layer = layer

    def __getitem__(self, i: int) -> Carried:
        return self._layer


def mixer_of(layer: Any, layer_spec: Layer) -> ModelsMixer | None:
    """Returns a layer's mixer; None if the layer has none."""
    spec = layer_spec.part(MixerSpec)
    return None if spec is None else ModelsMixer(part_of(layer, spec.path), spec)


def all_pack(base: Any) -> bool:
    """Whether every mixer of a model, if it has any, can have several documents in a row."""
    mixers = (mixer_of(layer, spec) for layer, spec in layers_of(base))
    return all(mixer.packs for mixer in mixers if mixer is not None)


_KERNELS = {"fla": "flash-linear-attention"}
"""Maps modules to the packages that install them and have kernels for mixers."""


def why_slow(base: Any, device: torch.device) -> str | None:
    """Returns a line if transformers' own code runs a model's mixers on a GPU: the package with
    their kernels is not installed, or our scan has none for the sizes of a Mamba 2."""
    if device.type != "cuda":
        return None
    mixed = [(layer, spec) for layer, x in layers_of(base) if (spec := x.part(MixerSpec))]
    packages = {spec.package for _, spec in mixed}
    lacking = [_KERNELS[name] for name in sorted(packages) if name and not installed(name)]
    if lacking:
        return (
            f"mixers run without kernels of their own, in torch's: {', '.join(lacking)} is not "
            f"installed ({pip_install(*lacking)})"
        )
    modules = [part_of(layer, spec.path) for layer, spec in mixed]
    sizes = {(x.head_dim, x.ssm_state_size) for x in modules if hasattr(x, "ssm_state_size")}
    other = [(P, N) for P, N in sorted(sizes) if not has_kernels(P, N)]
    if not other:
        return None
    return (
        f"mixers run without kernels of their own, in torch's: their heads have {other[0][0]} "
        f"columns and states of {other[0][1]}, and ours take multiples of {TILE}, heads of at most "
        f"{WIDEST}"
    )
