"""What a kind of mixer is: the module of a layer that runs as it is (mixer.py), how transformers
calls it, and what it holds and computes.

A family names its layers' mixers by such specs (families/hybrids.py). A new kind is a spec, its
seconds in MIXERS (cost/fitted.py) and its kernels (mixers/mixer_kernels.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from longctx.cost.dims import Mixed
from longctx.cost.fitted import MIXERS
from longctx.system import installed

WITH_KERNELS = {"fla": 3.3}
"""Maps packages of kernels to what autograd saves of a token in a mixer that runs them, in elements
for each column of the mixer's linear layers (`Mixed.columns`). That of a Gated DeltaNet with the
dimensions of Qwen3.5-9B was counted on a CPU, with a function in the place of the package's that
saves its inputs and a matrix of each chunk (tests/layer/test_mixer.py): 2.8 in transformers 5.23,
and 3.3 in 5.17, which repeats keys for the heads of values that share them."""
IN_TORCH = {"fla": 9.8, "": 1.75}
"""Maps packages to what autograd saves of a token in a mixer that runs transformers' code in torch
for want of them, in elements for each column of the mixer's linear layers. Counted for Qwen3.5-9B,
and for LFM2's convolutions, which have no recurrence and want no package. (That of Mamba 2, whose
scan is ours, stands in its specs: `MixerSpec.graph`.)"""


@dataclass(frozen=True, kw_only=True)
class MixerSpec:
    """A kind of mixer, which stands in the place of attention or beside it."""

    path: str
    """The path of the module in a layer."""
    module: str
    """The name of the module's class, without the family's prefix."""
    kind: str
    """The kind by which its seconds are planned: "delta rule", "mamba" or "convolution", the names
    of MIXERS in cost/fitted.py."""
    state: Callable[[Any], tuple[int, int]]
    """Returns the elements of its state, from the configuration: those of the recurrence, in fp32,
    and those of the convolution's last inputs."""
    cache: str = "cache_params"
    """The name under which its forward takes transformers' cache."""
    package: str = ""
    """The package whose kernels transformers takes for it, if it is there; empty where it needs
    none."""
    graph: float = 0.0
    """The elements that autograd saves of a token in the mixer, for each column of its linear
    layers; 0: those of all mixers with this package (IN_TORCH)."""
    norm: str = ""
    """The path in it of an RMSNorm with the SiLU of a gate (kernels/gated_norm.py)."""
    gate_first: bool = False
    """Whether the gated norm is of the product with the gate, not of the input."""

    @property
    def held(self) -> float:
        """What its graph holds with the kernels that are installed here, in elements of
        `Mixed.columns`."""
        if self.package and installed(self.package):
            return WITH_KERNELS[self.package]
        return max(IN_TORCH[self.package], self.graph)

    def sizes(
        self,
        shapes: Mapping[str, tuple[int, ...]],
        trained: Collection[str],
        config: Any,
        itemsize: int,
    ) -> Mixed:
        """Returns the sizes of a mixer with parameters of these shapes, PEFT's among them, of which
        those named in `trained` are trained. An adapter adds to what its linear layer gives, and
        makes no column."""
        matrices = {name: shape for name, shape in shapes.items() if len(shape) == 2}
        recurrent, convolved = self.state(config)
        return Mixed(
            columns=sum(rows for name, (rows, _) in matrices.items() if ".lora_" not in name),
            parameters=sum(rows * columns for rows, columns in matrices.values()),
            trained=sum(math.prod(shapes[name]) for name in trained),
            state_bytes=4 * recurrent + itemsize * convolved,
            graph=self.held,
            besides=MIXERS[self.kind],
        )
