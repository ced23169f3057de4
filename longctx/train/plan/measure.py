"""This machine as a `Machine`. Its rates are measured in about ten seconds, and kept on disk by
hardware and versions (memory/rates.py).

Attention is measured as the schedule runs it: on documents of 8192 and 32768 tokens with all heads
of Llama-3.1-8B at once, and of 131072 tokens with one of eight head groups. The backend that `auto`
takes is measured at all three lengths, the others at the middle one. If flash-attn-4 has not been
used here before, it compiles for some more seconds.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import replace
from typing import NamedTuple

import torch

from longctx.attention.backends import choose_attention
from longctx.attention.documents import Documents
from longctx.attention.protocol import QKV, Attention, AttentionCall
from longctx.constants import GIB
from longctx.cost.fitted import CONTEXT_BYTES
from longctx.cost.machines import MACHINES, AttentionRates, Machine, machine_like, peak_flops
from longctx.errors import UserError, one_line, say
from longctx.memory.machine import host_share_bytes
from longctx.memory.rates import (
    COPIED_BYTES,
    LINK_BYTES,
    LOCKED_BYTES,
    SETTLED_S,
    TILE,
    Measured,
    copies,
    link,
    lock,
    products,
    read_rates,
    seconds_of,
    write_rates,
)
from longctx.memory.store import free_gpu_bytes

DTYPE = torch.bfloat16
HEAD_DIM = 128  # of Llama and most published models
LENGTHS = {8192: (32, 8), 32768: (32, 8), 131072: (4, 1)}
"""Maps the tokens of a document to its query and key/value heads."""
MIDDLE = 32768
ATTENTION_S = 0.4
"""Seconds for which forward, or backward, of one length is repeated."""


class Gpu(NamedTuple):
    """The figures that CUDA reports of a GPU."""

    device: torch.device
    name: str
    total_bytes: int
    free_bytes: int


def gpu_here() -> Gpu | None:
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", torch.cuda.current_device())
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    return Gpu(device, torch.cuda.get_device_name(device), total_bytes, free_gpu_bytes(device))


def this_machine(*, again: bool = False) -> Machine:
    """Returns this machine. Its rates are measured, and a line reports it, unless they are kept
    from before; `again` measures them in any case. Raises UserError if there is no GPU, or if
    nothing can be measured on one that has no profile."""
    gpu = gpu_here()
    if gpu is None:
        names = ", ".join(MACHINES)
        raise UserError(f"this machine has no GPU: name the one to plan for with --gpu ({names})")
    kept = None if again else read_rates(gpu.device)
    if kept is not None:
        return measured_machine(gpu, kept)
    _say(f"measuring what this {gpu.name} does, for about ten seconds ...")
    try:
        with redirect_stdout(sys.stderr):  # stdout may be JSON
            measured = measure(gpu.device)
    except RuntimeError as error:  # torch's: its memory is taken, a library is broken
        profile = machine_like(gpu.name)
        problem = f"this {gpu.name} cannot be measured ({one_line(error, 150)})"
        if profile is None:
            raise UserError(f"{problem}: name one like it with --gpu") from error
        _say(f"{problem}: the profile {profile.name} is taken")
        return profiled_machine(gpu, profile)
    if path := write_rates(gpu.device, measured):
        _say(f"kept in {path}")
    return measured_machine(gpu, measured)


def known_machine() -> Machine | None:
    """Returns this machine without measuring anything: by the rates kept from before, else by the
    GPU's profile; None if there is neither."""
    gpu = gpu_here()
    if gpu is None:
        return None
    if kept := read_rates(gpu.device):
        return measured_machine(gpu, kept)
    profile = machine_like(gpu.name)
    return None if profile is None else profiled_machine(gpu, profile)


def _say(line: str) -> None:
    say(line, file=sys.stderr)


def measured_machine(gpu: Gpu, measured: Measured) -> Machine:
    by_length = {
        name: {tokens: AttentionRates(*rates) for tokens, rates in lengths.items()}
        for name, lengths in measured.attention.items()
    }
    longest = {name: lengths[max(lengths)] for name, lengths in by_length.items()}
    torchs = longest.get("cudnn") or longest.get("flash") or next(iter(longest.values()))
    is_limited = measured.locked_bytes < measured.tried_bytes
    profile = machine_like(gpu.name)
    return Machine(
        name=profile.name if profile else gpu.name,
        device=gpu.name,
        gpu_gib=gpu.total_bytes / GIB,
        flops=measured.flops,
        peak_flops=peak_flops(gpu.name),
        attention={**longest, "cudnn": torchs},  # with Hugging Face's layers torch takes what runs
        memory_bytes=measured.memory_bytes,
        link_bytes=measured.link.both,
        peer_bytes=profile.peer_bytes if profile else None,  # no other process runs here
        shared_link=profile.shared_link if profile else 1.0,
        measured=True,
        here=True,
        held_bytes=_held(gpu),
        started_bytes=0,
        lockable_bytes=measured.locked_bytes if is_limited else None,
        by_length=by_length,
    )


def profiled_machine(gpu: Gpu, profile: Machine) -> Machine:
    """Returns the GPU that is here, with the rates of its profile."""
    found = replace(profile, device=gpu.name, gpu_gib=gpu.total_bytes / GIB)
    return replace(found, held_bytes=_held(gpu), started_bytes=0)


def _held(gpu: Gpu) -> int:
    """Returns the bytes in use on the GPU; at least those that CUDA and all kernels will take."""
    return max(CONTEXT_BYTES, gpu.total_bytes - gpu.free_bytes)


def measure(device: torch.device) -> Measured:
    """Measures the rates of a GPU. Raises RuntimeError, or its torch.OutOfMemoryError, if the GPU
    cannot do that work."""
    tried_bytes = min(LOCKED_BYTES, host_share_bytes() // 4)
    return Measured(
        flops=products(device, DTYPE, TILE, SETTLED_S),
        memory_bytes=copies(device, COPIED_BYTES, SETTLED_S / 4),
        link=link(device, LINK_BYTES, SETTLED_S / 4),
        attention=measure_attention(device),
        tried_bytes=tried_bytes,
        locked_bytes=lock(device, tried_bytes),
    )


def measure_attention(device: torch.device) -> dict[str, dict[int, tuple[float, float]]]:
    """Returns attention's rates by backend, the one that `auto` takes first, and by the tokens of a
    document."""
    auto, attention = choose_attention("auto", device, DTYPE)
    found = {auto: {tokens: attention_rates(attention, device, tokens) for tokens in LENGTHS}}
    for name in ("cudnn", "flash"):
        if name not in found:
            try:
                other = choose_attention(name, device, DTYPE)[1]
                found[name] = {MIDDLE: attention_rates(other, device, MIDDLE)}
            except (UserError, RuntimeError):  # not for this GPU, or not in this build of torch
                continue
    return found


def attention_rates(attention: Attention, device: torch.device, tokens: int) -> tuple[float, float]:
    """Returns the FLOP/s of forward and backward of one document of L tokens, which take 2 H d L^2
    and 5 H d L^2 FLOPs."""
    heads, kv_heads = LENGTHS[tokens]

    def random_heads(heads: int) -> torch.Tensor:  # (L, heads, d)
        return torch.randn(tokens, heads, HEAD_DIM, device=device, dtype=DTYPE)

    qkv, do = (
        QKV(random_heads(heads), random_heads(kv_heads), random_heads(kv_heads)),
        random_heads(heads),
    )
    o, lse = torch.empty_like(do), torch.empty(heads, tokens, device=device)
    documents = Documents.of([tokens], device=device)
    call = AttentionCall(qkv, documents, HEAD_DIM**-0.5, o, lse)

    def rate(flops: float, work: Callable[[], object]) -> float:
        return flops / seconds_of(work, ATTENTION_S)

    flops = 2.0 * heads * HEAD_DIM * tokens**2
    return (
        rate(flops, lambda: attention.forward(call)),
        rate(2.5 * flops, lambda: attention.backward(do, call)),
    )
