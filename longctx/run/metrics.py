"""What a step cost: tokens/s, MFU and peak memory, from counters that never stall the GPU.

Model FLOPs of a step (forward + backward; recomputation does not count as useful work):

    6 * P * T  +  6 * H * d * sum over layers and documents of (document length)^2

with P the parameters in matmuls (lm_head included, input embedding not), T the tokens, H query
heads of size d. The second term is causal attention: 2 products of 2*L*L*d multiply-adds per head
forward, halved by causality, and twice that backward. Documents come from `position_ids`, which
restart at 0: the sum of (2*p + 1) over a document's positions 0..L-1 is L^2, so no boundary search
is needed and the sum stays on the GPU until a line is logged. In a layer with a sliding window of W
tokens a position counts 2*min(p, W-1) + 1.
"""

from __future__ import annotations

import resource
import sys
import time
from collections import Counter
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from longctx.constants import GIB
from longctx.engines.collectives import whole_numel
from longctx.model.families import head_dim, windows

# Dense bf16 peaks from the vendors' datasheets, in TFLOP/s.
_PEAK_TFLOPS = {
    "GB200": 2500.0,
    "B200": 2250.0,
    "H200": 989.0,
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "GH200": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "RTX 4090": 165.2,
    "RTX 5090": 209.5,
}


def device_peak_tflops(device: torch.device) -> float | None:
    """The device's dense bf16 peak in TFLOP/s; None where it is not known (CPUs among them)."""
    if device.type != "cuda":
        return None
    name = torch.cuda.get_device_name(device)
    return next((peak for chip, peak in _PEAK_TFLOPS.items() if chip in name), None)


def matmul_parameters(model: PreTrainedModel) -> int:
    """Parameters that multiply every token: all but the input embedding (tied lm_head counts). Two
    thirds of what is frozen: its products give no gradient of the weight."""
    embedding, lm_head = model.get_input_embeddings(), model.get_output_embeddings()
    tied = lm_head.weight is embedding.weight
    counted = [p for p in model.parameters() if tied or p is not embedding.weight]
    frozen = sum(whole_numel(p) for p in counted if not p.requires_grad)
    return sum(map(whole_numel, counted)) - frozen // 3


def squared_lengths(config: PretrainedConfig, position_ids: Tensor) -> Tensor:  # (B, S)
    """The sum over layers and documents of the module's formula."""
    total = torch.zeros((), dtype=torch.int64, device=position_ids.device)
    for window, layers in Counter(windows(config)).items():
        seen = position_ids if window is None else position_ids.clamp(max=window - 1)
        total += layers * (2 * seen + 1).sum()
    return total


def step_flops(config: PretrainedConfig, parameters: int, tokens: int, squared: int) -> float:
    """Model FLOPs of forward and backward over `tokens` tokens whose `squared_lengths` are those;
    see the module's formula."""
    attention = config.num_attention_heads * head_dim(config) * squared
    return 6.0 * parameters * tokens + 6.0 * attention


def peak_memory(device: torch.device) -> dict[str, float]:
    """Peaks since the process started, in GiB. GPU figures only where there is a GPU."""
    # ru_maxrss is in KiB on Linux and in bytes on macOS.
    unit_bytes = 1 if sys.platform == "darwin" else 1024
    peak = {"peak_host_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit_bytes / GIB}
    if device.type == "cuda":
        peak["peak_gpu_gib"] = torch.cuda.max_memory_allocated(device) / GIB
        peak["peak_reserved_gib"] = torch.cuda.max_memory_reserved(device) / GIB
    return peak


@dataclass
class Throughput:
    """Tokens and FLOPs between two logged lines, over all processes.

    Every position of a row counts as a token, padding included: it is computed like the others.
    """

    config: PretrainedConfig
    parameters: int
    world_size: int = 1
    peak_tflops: float | None = None
    ranks_a_row: int = 1
    """Processes that count the same rows."""
    _tokens: int = 0
    _squared_lengths: Tensor | int = 0
    _steps: int = 0
    _seconds: float = 0.0
    _last: float = field(default_factory=time.perf_counter)

    def count(self, position_ids: Tensor) -> None:  # (B, S)
        self._tokens += position_ids.numel()
        self._squared_lengths = self._squared_lengths + squared_lengths(self.config, position_ids)

    def start_clock(self) -> None:
        """Leaves out what lies between two steps: a checkpoint, an evaluation."""
        self._last = time.perf_counter()

    def step_done(self) -> None:
        now = time.perf_counter()
        self._seconds += now - self._last
        self._steps += 1
        self._last = now

    def read(self) -> dict[str, float]:
        """The figures since the last call; empty before the first step."""
        if not self._steps:
            return {}
        batches = self.world_size // self.ranks_a_row
        tokens = self._tokens * batches
        squared = int(self._squared_lengths) * batches
        figures = {
            "step_s": self._seconds / self._steps,
            "tokens_per_s": tokens / self._seconds,
        }
        if self.peak_tflops:
            flops = step_flops(self.config, self.parameters, tokens, squared)
            peak_flops = self.peak_tflops * 1e12 * self.world_size
            figures["mfu"] = flops / self._seconds / peak_flops
        self._tokens, self._squared_lengths, self._steps, self._seconds = 0, 0, 0, 0.0
        return figures
