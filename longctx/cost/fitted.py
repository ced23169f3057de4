"""Numbers of the cost model that were fitted or chosen, and cannot be counted.

Each says what it means and which results file (profiling/results) it was fitted to.

    python profiling/fit_rates.py

fits them again, beside the values that stand here. A number without a results file says how it was
chosen. What a machine does in a second is in machines.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from longctx.constants import GIB

# --- GPU memory ------------------------------------------------------------------------------

CONTEXT_BYTES = int(0.55 * GIB)
"""GPU bytes that CUDA and the kernels' code take before anything else. No results file gives them:
rows hold a GPU's capacity, not what CUDA calls free."""
GPU_SPARE, GPU_SPARE_BYTES, GPU_MOST_SPARED = 0.015, 3 * 2**27, 1 / 32
"""A plan leaves this share of the GPU's free memory to the allocator's rounding, at least
GPU_SPARE_BYTES, and at most the share GPU_MOST_SPARED. The numbers are chosen: no results file
separates this rounding from GAPS."""
GAPS = 0.4
"""Memory that torch's allocator has reserved at the peak but cannot hand out, in (T, D) tensors.
With 0.48 every measured run still fits with the activations that it kept (h200_longest_step.json,
h200_lora_step.json); 0.4 is a little less."""

# --- host memory -----------------------------------------------------------------------------

PROCESS_BYTES = int(1.4 * GIB)
"""Host bytes of a process with Python, torch and CUDA, without the pages of files that it maps:
measured in a run that keeps nothing on the host (h200_states_step.json, 8192 tokens)."""
ENGINE_PROCESS_GIB, ZERO_PROCESS_GIB = 2.5, 3.2
"""Host GiB of a process under FSDP2 and under ZeRO: the means of runs of two ranks that keep
nothing on the host (h200_step.json, h200_shared_step.json), whose rows counted all memory in use on
the machine."""
HOST_SPARE, HOST_MOST_SPARED_GIB = 0.1, 4
"""A run leaves this share of the host's free memory, at most HOST_MOST_SPARED_GIB, to the process
itself, to compilers, and to the block that is copied when states are saved. Chosen, not fitted."""

# --- seconds ---------------------------------------------------------------------------------

SMALL_HEADS = 0.85
"""The share of attention's rates that heads below 128 reach: in Llama-3.2-1B 0.84 with documents of
8192 tokens and 0.88 with longer ones (h200_front.json)."""
WIDE_HEADS = {"fa4": (1.12, 0.64), "cudnn": (0.96, 0.71), "flash": (0.77, 0.81)}
"""The shares of attention's rates that heads of 256 reach, by backend, in forward and backward: one
document of 131072 tokens (h200_attention.json)."""
CAPPED_SCORES = {"fa4": {64: (0.41, 0.37), 128: (0.52, 0.67), 256: (0.64, 0.93)}}
"""The shares of the rates of heads of 64, 128 and 256 that are left with a softcap of scores, by
backend, in forward and backward (h200_attention.json)."""
WINDOW_EDGES = 350, 490
"""The keys beyond its window that flash-attn-4 computes for each query, forward and backward, in
tiles that the window covers in part: heads of 128 and of 256, windows of 1024 tokens
(h200_attention.json)."""
ATTENTION_SHARES = 0.75, 0.55
"""Attention's rates, forward and backward, as shares of the rate of matmuls, on a GPU without
measurements: about the smallest shares of the cards whose rates are estimates (cards.py)."""
NVLINK = 230e9
"""Bytes per second that an H200 gets from another, of 450 GB/s each way: two gather a layer of
Llama-3.1-8B in bf16 in 0.9 to 1.4 ms, and 128 MiB of an all-to-all take 0.5 ms. The mean of a
step's gathers, beside its computation, is 194e9 (h200_shared_trace.json)."""
CPU_ADAM = 4.3e9
"""Parameters per second that DeepSpeed's CPU AdamW updates on a host of 32 cores, those of all
ranks together: 1.62 to 2.10 s for 8.03e9 in six runs (h200_step.json, h200_states_step.json)."""
ENGINE_UPDATE_BYTES, ZERO_UPDATE_BYTES = 68, 109
"""An engine's update on the GPU, with clipping, takes as long per parameter as reading or writing
this many bytes: 40 and 54 by count, but FSDP2's update takes 65 ms for 4.0e9 parameters and
ZeRO-3's 103 ms under Liger-Kernel (h200_step.json). With our layers, whose saved activations fill
the GPU, both take 14 to 20% longer."""
HOOKS_PARAMETERS = 27e9
"""Parameters per second whose hooks ZeRO-3 runs in backward while the GPU waits: on two GPUs a
backward of 8.03e9 takes 0.29 s longer than FSDP2's, and 0.38 s under Liger-Kernel
(h200_step.json)."""
BESIDE = 3.9
"""Exchanges of shared rows lengthen the computation that runs at the same time by this factor times
what they take on a link of their own: they take multiprocessors from attention, and are packed
(h200_shared_step.json, from 131072 to 425984 tokens)."""
LAUNCHES, ADAPTER_LAUNCHES, EXPERT_LAUNCHES, LAUNCH_S = 80, 92, 32, 50e-6
"""Kernels of a layer in forward and backward of a tile; those that adapters over NF4 add (a step of
Llama-3.1-8B has 5,505 kernels, h100_qlora_kernels.json); those that experts add to an MLP's (a
layer of Qwen3-30B-A3B with adapters has 204); and the seconds in which Python launches one. The
seconds are chosen, near the rows of 87fbe29 in h100_everyday.json, whose adapters had 138 kernels
more."""
MIXER_LAUNCHES = 140
"""Kernels that a mixer adds to those of a layer with attention, for each of its segments: a trace
of 40 layers of Granite 4.0 Tiny with adapters, of which 36 have a mixer, holds 13,400 kernels (the
run of h200_granite_phases.json)."""
GAP_S, HOST_S = 0.5e-6, 5e-3
"""Seconds between two kernels of a CUDA graph, which are chosen, and the seconds of a step in which
the GPU waits for the trainer: from the norm of the gradients, for which the trainer waits, to the
next forward. The second number is what `opt_s` and `rest_s` of adapters take without the kernels of
their update (h100_everyday.json)."""
GRAPHED_TOKENS = 32768
"""Batches of at most this many tokens run as CUDA graphs: the kernels of longer batches take longer
than the Python that launches them. Chosen by count."""
GROUPED = 0.8
"""The share of the rate of matmuls that grouped matmuls of experts reach, measured for
Qwen3-30B-A3B over 8192 and 32768 tokens without the sums of weight gradients, which are counted as
bytes (h100_grouped.json)."""
MIXERS = {"delta rule": (6700, 16200), "mamba": (2550, 13900), "convolution": (1000, 2300)}
"""The cost of what a mixer computes apart from its linear layers, in forward and in backward: FLOPs
of matmuls that would take as long, per token and per column of these linear layers. An H100 and an
H200, whose memories differ, take the same seconds. The sums are fitted to two forwards and a
backward with adapters: Gated DeltaNet's to Qwen3.5-9B (h100_hybrid_phases.json,
h200_hybrid_phases.json), Mamba 2's to Granite 4.0 Tiny on an H200 (h200_granite_phases.json). Their
split between forward and backward is by a count of tensors, and so are both numbers of short
convolutions."""
TOWERS = 0.34
"""The share of the rate of matmuls that a vision tower reaches in Hugging Face's code, whose norms,
activations and fp32 RoPE take longer than its matmuls: measured for the tower of Qwen3-VL-8B,
frozen and trained, without the seconds in which the GPU is idle (h100_images.json)."""
TOWER_LAUNCHES, TOWER_GRADIENT_LAUNCHES, TOWER_LAUNCH_S = 25, 60, 67e-6
"""Kernels of a tower's layer for a group of images, in forward and in backward, by count, and the
seconds that Python and its waits take for each. The seconds make a step that trains the tower on 64
frames as long as it is on a host with 16 cores (h100_images.json, 1.18 s)."""
SHARED_LINK = 0.69
"""The share of the rate of its link to the host that each of four H100s of a host reaches when all
of them copy at once: 38 of 55 GB/s."""
DEQUANTISE = 1.45
"""Dequantising takes as long per byte of the dense weight as reading or writing this many bytes:
0.0564 ms for 14336 x 4096 on an H100 that copies 3.03 TB/s (h100_nf4.json, h100_kernels.json); 1.27
by count."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Memory and traffic of Hugging Face's layers or Liger-Kernel's: elements per token, as
    multiples of D and of F. One model was measured, so only the sums are fitted; the split between
    D and F is by count."""

    works: tuple[float, float]
    """Elements that a layer holds in backward, with its input: 31.5 and 21.5 units of Llama-3.1-8B
    (h200_layer.json, at 131072 tokens and at 32768)."""
    moves: tuple[float, float]
    """Elements that a layer's forward reads and writes (h200_layer.json)."""
    more: float
    """The traffic of backward apart from the recomputed forward, divided by `moves`."""


PEERS = {
    "vanilla": Peer(works=(7, 7), moves=(116, 5), more=1.6),
    "liger": Peer(works=(4, 5), moves=(36, 3), more=0.4),
}
"""Maps values of --class_type to the cost of their layers."""
PEERS["any"] = PEERS["vanilla"]  # the same layers
