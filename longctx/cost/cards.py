"""GPUs that were not measured here: their datasheets, and the shares of them that a step reaches.

Peaks are those of NVIDIA's datasheets and of its whitepapers on the architectures Ampere, Ada and
RTX Blackwell: FP16 or BF16 tensor TFLOP/s with FP32 accumulate, without sparsity, which on GeForce
cards is twice the fp32 rate at the boost clock. The link is PCIe of 16 lanes, of 8 on an RTX 4060
Ti.

A rate is a datasheet's peak times a share; shares are by kind of chip, never by card:

    matmul      the best that cuBLAS reaches in square bf16 matmuls on such cards, times 0.85. An
                H100 reaches 787 TFLOP/s alone and 665, 0.85 of it, in a step (h200_layer.json),
                where power limits the clock and shapes are less convenient. Alone, in TFLOP/s: A100
                265, RTX 3090 77, RTX 4090 165, RTX 5090 238 (179 on one), A6000 123, A40 122, L40S
                269, RTX PRO 6000 414, L4 57, H20 142, B200 1696
                (github.com/zzc0721/torch-performance-test-data).
    attention   FlashAttention-2 and 4, heads of 128. GeForce cards sum in fp32 at half the rate of
                their tensor cores, so that softmax hides and forward gets near the peak: 187 to 212
                TFLOP/s on an RTX 5090 (gau-nernst's "Speed-of-Light Flash Attention for 5090";
                SageAttention3, arXiv 2505.11594). The same chips with the full rate reach half of
                it: 242 of 504 on an RTX PRO 6000 (flash-attention#2634), 82 of 111 with heads of 64
                on an A5000 (gpu-mode/ring-attention#10). Backward has no more than 99 KB of shared
                memory on all of these. B200: flash-attention#2280 (fa4), #1589 (flash).

Measured steps of another trainer, and what they say of these shares, are in docs/plan_notes.md.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping
from typing import NamedTuple

from longctx.errors import UserError

MEMORY_SHARE, LINK_SHARE = 0.88, 0.7
"""The shares of their datasheet rates that a GPU's memory and its link to the host reach. The first
was measured on an H100 and an H200. The second is for traffic in both directions at once: servers
with PCIe 5.0 reach 0.8, desktops less."""
SPREAD, OWN_SPREAD = (0.8, 1.4), (0.7, 1.5)
"""A step may take between the first and the second number times the predicted seconds: SPREAD is
for the cards of this file, OWN_SPREAD for a card that a user gives by its numbers."""
PCIE4, PCIE5 = 31.5e9, 63e9
"""Bytes per second, each way, over 16 lanes."""
GRACE = 192e9
"""Bytes per second, each way, of NVLink-C2C to a Grace host. The link could carry 450e9, but the
host's memory moves 384e9 for both directions together."""


class Shares(NamedTuple):
    """The shares of a chip's dense bf16 peak, with sums in fp32, that matmuls and attention reach
    in a training step."""

    matmul: float
    attention: Mapping[str, tuple[float, float]]
    """Maps backends, the one that `auto` takes first, to the shares of forward and backward."""


def _torchs(forward: float, backward: float) -> dict[str, tuple[float, float]]:
    """Returns the shares of torch's own FlashAttention-2, for the backend of that name and for the
    one that Hugging Face's layers use."""
    return {"flash": (forward, backward), "cudnn": (forward, backward)}


A100 = Shares(0.72, _torchs(0.60, 0.53))
GEFORCE = Shares(0.88, _torchs(0.80, 0.48))
"""Chips whose tensor cores sum in fp32 at half their rate. The A10G is one."""
WORKSTATION = Shares(0.66, _torchs(0.50, 0.40))
"""Workstation and server cards with GeForce's chips (A40, A6000, L40S, ...), whose tensor cores sum
in fp32 at their full rate; power limits matmuls, and softmax limits attention."""
LOW_POWER = Shares(0.45, _torchs(0.40, 0.33))
"""The L4: 72 W do not feed its tensor cores."""
HOPPER = Shares(0.67, {"fa4": (0.67, 0.61), "cudnn": (0.58, 0.55), "flash": (0.40, 0.33)})
"""Hopper with all of its tensor cores: the shares that were measured on an H100 and an H200."""
H20 = Shares(0.82, {"fa4": (0.80, 0.70), "cudnn": (0.75, 0.65), "flash": (0.70, 0.60)})
"""A Hopper whose tensor cores are a seventh of an H100's."""
BLACKWELL = Shares(0.64, {"fa4": (0.56, 0.46), "cudnn": (0.54, 0.40), "flash": (0.17, 0.15)})


class Card(NamedTuple):
    """A GPU as its datasheet describes it."""

    name: str
    device: str
    """A pattern that matches CUDA's names of the card."""
    gpu_gib: float
    """The GPU's memory as CUDA reports it, with ECC as the card is sold; drivers differ by 1%."""
    peak_flops: float
    """Dense bf16 FLOP/s, with sums in fp32."""
    memory_bytes: float
    """Bytes per second that the GPU reads from or writes to its memory."""
    link_bytes: float
    """Bytes per second from the GPU to the host, with as many at the same time from the host."""
    shares: Shares
    nvlinks: float = 0.0
    """The rate of its NVLink divided by that of an H100; 0 for a card without NVLink."""


CARDS = tuple(
    Card(name, device, gib, tflops * 1e12, gb_per_s * 1e9, link, shares, nvlinks)
    for name, device, gib, tflops, gb_per_s, link, shares, nvlinks in (
        ("h100-pcie", "H100 PCIe", 79.1, 756, 2039, PCIE5, HOPPER, 0.0),
        ("h100-nvl", "H100 NVL", 93.0, 835, 3938, PCIE5, HOPPER, 0.0),
        ("h20", "H20", 95.0, 148, 4000, PCIE5, H20, 1.0),
        ("gh200", "GH200", 94.5, 989, 4000, GRACE, HOPPER, 0.0),
        ("b200", "B200", 178.3, 2250, 8000, PCIE5, BLACKWELL, 2.0),
        ("b300", "B300", 267.0, 2250, 8000, PCIE5, BLACKWELL, 2.0),
        ("gb200", "GB200", 184.0, 2500, 8000, GRACE / 2, BLACKWELL, 2.0),
        ("a100", "A100", 79.25, 312, 2039, PCIE4, A100, 0.6),
        ("a100-40gb", "A100.*40GB", 39.4, 312, 1555, PCIE4, A100, 0.6),
        ("l40s", "L40S", 44.4, 362, 864, PCIE4, WORKSTATION, 0.0),
        ("l4", "L4", 22.0, 121, 300, PCIE4, LOW_POWER, 0.0),
        ("a10g", "A10G", 22.0, 70, 600, PCIE4, GEFORCE, 0.0),
        ("a40", "A40", 44.4, 149.7, 696, PCIE4, WORKSTATION, 0.0),
        ("a5000", "RTX A5000", 23.6, 111.1, 768, PCIE4, WORKSTATION, 0.0),
        ("a6000", "RTX A6000", 47.4, 154.8, 768, PCIE4, WORKSTATION, 0.0),
        ("rtx-6000-ada", "RTX 6000 Ada", 47.4, 364.2, 960, PCIE4, WORKSTATION, 0.0),
        ("rtx-pro-6000", "RTX PRO 6000", 94.9, 503.8, 1792, PCIE5, WORKSTATION, 0.0),
        ("rtx-3090", "RTX 3090", 23.6, 71, 936, PCIE4, GEFORCE, 0.0),
        ("rtx-4060-ti", "RTX 4060 Ti", 15.6, 44.1, 288, PCIE4 / 2, GEFORCE, 0.0),
        ("rtx-4060-ti-8gb", "RTX 4060 Ti.*8GB", 7.6, 44.1, 288, PCIE4 / 2, GEFORCE, 0.0),
        ("rtx-4070-ti", "RTX 4070 Ti", 11.6, 80.2, 504, PCIE4, GEFORCE, 0.0),
        ("rtx-4070-ti-super", "RTX 4070 Ti SUPER", 15.6, 88.2, 672, PCIE4, GEFORCE, 0.0),
        ("rtx-4080", "RTX 4080", 15.6, 97.5, 717, PCIE4, GEFORCE, 0.0),
        ("rtx-4090", "RTX 4090", 23.5, 165.2, 1008, PCIE4, GEFORCE, 0.0),
        ("rtx-5070-ti", "RTX 5070 Ti", 15.4, 87.9, 896, PCIE5, GEFORCE, 0.0),
        ("rtx-5080", "RTX 5080", 15.4, 112.6, 960, PCIE5, GEFORCE, 0.0),
        ("rtx-5090", "RTX 5090", 31.3, 209.5, 1792, PCIE5, GEFORCE, 0.0),
    )
)
ALIASES = {
    "h20": "h20-96gb",
    "gh200": "gh200-96gb gh200-480gb",
    "a100": "a100-80gb a100-sxm a100-sxm4 a100-pcie",
    "a5000": "rtx-a5000",
    "a6000": "rtx-a6000",
    "rtx-4060-ti": "rtx-4060-ti-16gb",
    "rtx-4070-ti": "rtx-4070-ti-12gb",
    "rtx-6000-ada": "a6000-ada ada-6000",
    "rtx-pro-6000": "pro-6000-blackwell rtx-pro-6000-blackwell rtx-6000-pro 6000-blackwell",
    "h100": "h100-sxm h100-80gb",
    "h200": "h200-sxm h200-141gb",
}
"""Maps a card's name to its other names."""
TOO_OLD = {
    "t4": "65 TFLOP/s in fp16, 2.3 in bfloat16",
    "v100": "125 TFLOP/s in fp16 by its datasheet, and at most its 15.7 of fp32 in bfloat16",
    "p100": "",
    "rtx-2080-ti": "",
    "titan-rtx": "",
    "quadro-rtx-8000": "",
}
"""Maps GPUs of Volta, Turing and older to what is known of their bfloat16."""

# --- a card given by its numbers -------------------------------------------------------------

_PARTS = {
    "gib": (1, 4096, "GiB of memory"),
    "flops": (1e12, 1e17, "dense bf16 FLOP/s with sums in fp32, 165e12 for an RTX 4090"),
    "bandwidth": (1e10, 1e14, "bytes a second of the GPU's memory, 1008e9 for an RTX 4090"),
    "link": (1e9, 1e12, "bytes a second to the host, each way, 31.5e9 for PCIe 4.0 x16"),
}
"""Maps each number of a user's own card to its least value, its largest value and its meaning."""
_BALANCE = 150
"""FLOPs of the peak per byte of memory bandwidth, for a card whose bandwidth is not given: the
cards above have 75 to 420, an A100 153."""


def own_card(text: str) -> tuple[Card, str]:
    """Returns the card of `gib=24,flops=165e12[,bandwidth=1008e9][,link=31.5e9]`, numbers as
    datasheets give them, and a line that names what was assumed. Raises UserError for a number that
    is missing, unknown or out of range."""
    numbers: dict[str, float] = {}
    for part in text.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        if key not in _PARTS:
            close = difflib.get_close_matches(key, _PARTS, n=1)
            meant = f"; did you mean {close[0]}?" if close else ":"
            raise UserError(f"--gpu {text}: there is no {key or 'empty part'}{meant} {_FORM}")
        if key in numbers:
            raise UserError(f"--gpu {text}: {key} is given twice")
        numbers[key] = _number(text, key, value)
    for key in ("gib", "flops"):
        if key not in numbers:
            raise UserError(f"--gpu {text}: {key} is missing ({_PARTS[key][2]})")
    guessed = {"bandwidth": numbers["flops"] / _BALANCE, "link": PCIE4}
    assumed = [f"{key}={guessed[key] / 1e9:.4g}e9" for key in guessed if key not in numbers]
    numbers = guessed | numbers
    card = Card(
        name="your card",
        device="your card",
        gpu_gib=numbers["gib"],
        peak_flops=numbers["flops"],
        memory_bytes=numbers["bandwidth"],
        link_bytes=numbers["link"],
        shares=WORKSTATION,
    )
    return card, f"assumed: {', '.join(assumed)}" if assumed else ""


_FORM = "a card of your own is gib=24,flops=165e12, and bandwidth=1008e9,link=31.5e9 if known"


def _number(text: str, key: str, value: str) -> float:
    least, most, what = _PARTS[key]
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not least <= number <= most:
        raise UserError(
            f"--gpu {text}: {key} is {what}: a number from {least:g} to {most:g}, not {value!r}"
        )
    return number
