"""Finds the GPU that a typed name means: `RTX 4090`, `4090`, `a100-40`, CUDA's name, `2x4090`.

An unknown name is refused with advice what to plan for instead: the nearest name, or for a chip
that longctx does not run on an NVIDIA GPU with as much memory.
"""

from __future__ import annotations

import difflib
import re

from longctx.cost.cards import ALIASES, OWN_SPREAD, TOO_OLD, own_card
from longctx.cost.machines import MACHINES, Machine, estimated, machine_like
from longctx.errors import UserError

OTHERS = {
    r"mi3\d\d[ax]?": ("an AMD GPU", "b200, or b300 for one of 256 GB or more"),
    r"mi\d+[ax]?": ("an AMD GPU", "h100 or h200"),
    r"(amd|radeon).*|rx\d{4}.*": ("an AMD GPU", "rtx-4090"),
    r"apple.*|m[1-9](pro|max|ultra)?": ("a chip of Apple", "rtx-4090, or rtx-pro-6000 for 96 GB"),
    r"intel.*|arc[ab]\d+.*|gaudi\d?": ("a chip of Intel", "l4 or h100"),
    r"(google)?tpu.*|v[2-6][ep]?": ("a chip of Google", "h100"),
    r"trn\d.*|inf\d.*|trainium.*": ("a chip of Amazon", "h100"),
    r"(huawei)?ascend.*|910[abc]?": ("a chip of Huawei", "h100"),
}
"""Maps patterns of chips that longctx does not run on to what they are and what to plan for."""
_NAMES = {name: name for name in MACHINES} | {
    alias: name for name, aliases in ALIASES.items() for alias in aliases.split()
}
"""Maps the names of a card, aliases too, to its name in MACHINES."""


def several(text: str) -> tuple[int, str]:
    """Returns the count and the card of `2x4090`, `8 x H100` or `4090 x2`; 1 and the text for any
    other."""
    word = text.strip()
    if found := re.fullmatch(r"([1-9]\d{0,2})\s*[xX*]\s*([a-zA-Z\d].*)", word):
        return int(found[1]), found[2]
    if found := re.fullmatch(r"(.*[a-zA-Z\d])\s*[xX*]\s*([1-9]\d{0,2})", word):
        return int(found[2]), found[1]
    return 1, text


def machine_named(name: str) -> Machine:
    """Returns the machine of a name as people type it (`RTX 4090`, `rtx4090`, `4090`, `4090-24gb`,
    CUDA's name), or of a card given by its numbers (`gib=24,flops=165e12`). Raises UserError for
    any other text."""
    if "=" in name:
        card, assumed = own_card(name)
        return estimated(card, OWN_SPREAD, assumed)
    if machine := _known(name) or _of_size(name):
        return machine
    if name.lower().startswith("nvidia") and (machine := machine_like(name)):
        return machine
    raise UserError(f"--gpu {name}: {_why_unknown(name)}")


def _known(name: str) -> Machine | None:
    asked = _squeezed(name)
    for known, meant in _NAMES.items():
        if asked in (_squeezed(known), _squeezed(known).removeprefix("rtx")):
            return MACHINES[meant]
    return None


def _of_size(name: str) -> Machine | None:
    """Returns the card of a name that ends with its memory in GB (`a100-40`, `4090 24GB`). Raises
    UserError for a card that is known with other memory alone."""
    found = re.fullmatch(r"(.+?)[-_ ](\d{1,3})\s*(?:gi?b?)?", name.strip(), re.I)
    if not found or (base := _known(found[1])) is None:
        return None
    size_gb = int(found[2])
    kin = [
        m for m in MACHINES.values() if m.name == base.name or m.name.startswith(f"{base.name}-")
    ]
    for machine in kin:
        # CUDA shows less than the size in a card's name: 79.2 GiB of an A100 of 80 GB, 22 of an
        # A10G of 24.
        if 0.9 * size_gb <= machine.gpu_gib <= size_gb:
            return machine
    sizes = " or ".join(f"{machine.gpu_gib:g}" for machine in kin)
    raise UserError(
        f"--gpu {name}: {base.name} is known with {sizes} GiB as CUDA counts them: plan for "
        f"{base.name}, or for a card of your own (--gpu gib={size_gb},flops={base.peak_flops:.4g})"
    )


def _why_unknown(name: str) -> str:
    asked = _squeezed(name)
    for old, known in TOO_OLD.items():
        if re.fullmatch(rf"{_squeezed(old)}(sxm\d|pcie|s)?(\d+gb?)?", asked):
            of = f" ({known})" if known else ""
            return (
                f"this card computes bfloat16 without tensor cores{of}, and "
                "longctx trains in bfloat16 on Ampere GPUs or newer: plan for l4 or a10g (24 GB), "
                "or a40 (48 GB)"
            )
    for pattern, (what, instead) in OTHERS.items():
        if re.fullmatch(pattern, asked):
            return (
                f"this is {what}, and longctx plans and trains on NVIDIA alone: plan for {instead}"
            )
    names = {_squeezed(known): known for known in _NAMES}
    close = difflib.get_close_matches(asked, names, n=1)
    meant = f"; did you mean {names[close[0]]}?" if close else "."
    return (
        f"no such machine is known{meant} Those that are: {', '.join(MACHINES)}; a card of your "
        "own is --gpu gib=24,flops=165e12"
    )


def _squeezed(name: str) -> str:
    """Returns a name's letters and digits in lower case, without the names of brands."""
    letters = re.sub("[^a-z0-9]", "", name.lower())
    return re.sub("nvidia|geforce|tesla", "", letters)
