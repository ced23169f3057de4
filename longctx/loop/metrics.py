"""A step's tokens per second, MFU and peak memory, from counters that never stall the GPU.

The formula of model FLOPs and the chips' peaks are the count's (cost/flops.py, cost/machines.py).
Documents come from `position_ids`, which restart at 0: the sum of (2*p + 1) over a document's
positions 0..L-1 is L^2, so no boundary search is needed and the sum stays on the GPU until a line
is logged. An answer's positions continue its prompt's, so that the sum over them counts the
prompt's keys as well.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from longctx.constants import GIB
from longctx.cost.flops import matmul_parameters, mfu, step_flops
from longctx.cost.machines import peak_flops
from longctx.families.families import windows
from longctx.families.family import config_of_layers
from longctx.families.look import look
from longctx.families.matrices import active_shares
from longctx.families.vision import tower_parameters
from longctx.layer.specs.part_spec import head_dim
from longctx.loop.collectives import all_reduce_sum, whole_numel


def device_peak_flops(device: torch.device) -> float | None:
    """Returns the device's dense bf16 peak in FLOP/s; None if it is unknown, as for CPUs."""
    return peak_flops(torch.cuda.get_device_name(device)) if device.type == "cuda" else None


def parameters_in_matmuls(model: PreTrainedModel) -> int:
    """Returns the parameters that MFU counts, over all processes: those by which a token is
    multiplied. The input embedding is left out, unless it is also lm_head, and so is a vision
    tower."""
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = lm_head is not None and look(lm_head, "weight") is look(embedding, "weight")
    of_towers = tower_parameters(model)
    counted = [p for p in model.parameters() if p not in of_towers]
    counted = [p for p in counted if tied or p is not look(embedding, "weight")]
    shares = active_shares(model, model.config.get_text_config())
    active = {p: round(whole_numel(p) * shares.get(p, 1.0)) for p in counted}
    frozen = sum(numel for p, numel in active.items() if not p.requires_grad)
    return matmul_parameters(sum(active.values()), frozen)


NO_ATTENTION = ("linear_attention", "conv", "moe", "mlp")
"""transformers' names of layers without attention: with a recurrence, a convolution, or neither.
The FLOPs of a recurrence grow with the tokens alone, and are not counted."""


def attended(
    config: PretrainedConfig,
    position_ids: Tensor,  # (B, S)
    real: Tensor | None = None,  # (B, S) bool
) -> Tensor:  # () fp64
    """Returns the `attended` of `cost.flops.step_flops`. Layers with windows are counted as such.
    Layers without attention, as in hybrids, are not counted, nor is padding, where `real` is
    False."""
    total = torch.zeros((), dtype=torch.float64, device=position_ids.device)
    types = getattr(config, "layer_types", None) or [""] * config.num_hidden_layers
    columns_of = map(_columns, config_of_layers(config))
    layers_of = zip(types, columns_of, windows(config), strict=False)
    found = Counter(
        (columns, window) for name, columns, window in layers_of if name not in NO_ATTENTION
    )
    for (columns, window), layers in found.items():
        seen = position_ids if window is None else position_ids.clamp(max=window - 1)
        # A document of 3 tokens has 1 + 3 + 5 = 3^2; with a window of 2 tokens 1 + 3 + 3.
        keys = 2 * seen + 1
        total += columns * layers * (keys if real is None else keys * real).sum()
    return total


def _columns(config: PretrainedConfig) -> float:
    """Returns the columns of a layer's scores and values, over all heads: their mean if the two
    differ, as in DeepSeek-V3."""
    values, scores = (getattr(config, name, None) for name in ("v_head_dim", "qk_head_dim"))
    size = (values + scores) / 2 if values and scores else head_dim(config)
    return float(config.num_attention_heads * size)


def peak_memory(device: torch.device, held_bytes: int = 0) -> dict[str, float]:
    """Returns the peaks since the process started, in GiB; those of the GPU only if there is one.
    `held_bytes` are those of CUDA graphs, which torch's allocator does not count as allocated."""
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    peak = {"peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes / GIB}
    if device.type == "cuda":
        with_graphs = torch.cuda.memory_allocated(device) + held_bytes
        most = max(torch.cuda.max_memory_allocated(device), with_graphs if held_bytes else 0)
        peak["peak_gpu_gib"] = most / GIB
        peak["peak_reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIB
    return peak


@dataclass
class Throughput:
    """Tokens and FLOPs between two logged lines, over all processes.

    Every position of a row counts as a token. Padding counts, too, unless `real` leaves it out: it
    is computed like other tokens.
    """

    config: PretrainedConfig
    parameters: int
    world_size: int = 1
    peak_flops: float | None = None
    """The dense bf16 peak of a process's GPU, in FLOP/s; None: MFU is not computed."""
    ranks_a_row: int = 1
    """The number of processes that count the same rows."""
    _tokens: Any = 0
    _step_tokens: Any = 0
    """An int, or a tensor on the device if padding is left out."""
    _attended: Tensor | float = 0.0
    _steps: int = 0
    _seconds: float = 0.0
    _last: float = field(default_factory=time.perf_counter)

    def count(
        self,
        position_ids: Tensor,  # (B, S)
        real: Tensor | None = None,  # (B, S) bool, False for padding
    ) -> None:
        tokens = position_ids.numel() if real is None else real.sum()
        self._step_tokens = self._step_tokens + tokens
        if self.peak_flops:
            self._attended = self._attended + attended(self.config, position_ids, real)

    @property
    def pending(self) -> Tensor | None:  # () fp64
        """The attended pairs since the last logged line if the GPU has counted them; None if the
        host knows their number."""
        return self._attended if isinstance(self._attended, Tensor) else None

    def settle(self, pending: float) -> None:
        """Takes the value of `pending`, so that later reads do not wait for the GPU."""
        self._attended = pending

    @property
    def _batches(self) -> int:
        """The number of processes that have different rows."""
        return self.world_size // self.ranks_a_row

    def start_clock(self) -> None:
        """Leaves out the time since the last step: a checkpoint, an evaluation."""
        self._last = time.perf_counter()

    def step_done(self) -> Any:
        """Ends a step and returns its tokens, over all processes: an int, or a tensor if padding is
        left out."""
        now = time.perf_counter()
        self._seconds += now - self._last
        self._steps += 1
        self._last = now
        tokens, self._step_tokens = self._step_tokens * self._batches, 0
        self._tokens += tokens
        return tokens

    def add_up(self, device: torch.device) -> None:
        """Sums the counts of all processes if their rows differ in length, so that each counts its
        own rows alone (`ranks_a_row=world_size`). All processes must call it."""
        counts = all_reduce_sum([float(self._tokens), float(self._attended)], device)
        self._tokens, self._attended = round(counts[0]), counts[1]

    def cut(self) -> Throughput:
        """Returns what was counted since the last call, to be read later, and starts anew."""
        counted = replace(self)
        self._tokens, self._attended, self._steps, self._seconds = 0, 0.0, 0, 0.0
        return counted

    def read(self) -> dict[str, float]:
        """Returns the figures since the last call; empty before the first step."""
        if not self._steps:
            return {}
        counted = self.cut()
        tokens, pairs = int(counted._tokens), float(counted._attended) * self._batches
        figures = {
            "step_s": counted._seconds / counted._steps,
            "tokens_per_s": tokens / counted._seconds,
        }
        if self.peak_flops:
            flops = step_flops(parameters=self.parameters, tokens=tokens, attended=pairs)
            figures["mfu"] = mfu(flops, counted._seconds, self.peak_flops * self.world_size)
        return figures


def figures(throughput: Throughput, device: torch.device, runtime: Any) -> dict[str, float]:
    """Returns the speed and memory of a logged line; `runtime` is the patched model's, or None."""
    return throughput.read() | memory_figures(device, runtime)


def memory_figures(device: torch.device, runtime: Any) -> dict[str, float]:
    """Returns the memory of a logged line."""
    graphs = runtime and runtime.graphs
    return peak_memory(device, graphs.held_bytes if graphs else 0)
