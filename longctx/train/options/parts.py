"""Single parts of a decoder, by Liger-Kernel's names: what `patch(parts=...)` and `--parts` take.

    rope, rms_norm, layer_norm, swiglu, geglu     kernels in Hugging Face's layers
    cross_entropy                                 the loss over whole logits
    fused_linear_cross_entropy                    lm_head and the loss in chunks, without logits

`schedule` alone, the default, is none of them: scheduled layers and the loss in chunks.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable

from longctx.errors import UserError

SCHEDULE = "schedule"
FUSED, WHOLE = "fused_linear_cross_entropy", "cross_entropy"
LAYER_PARTS = ("rope", "rms_norm", "layer_norm", "swiglu", "geglu")
PARTS = (*LAYER_PARTS, WHOLE, FUSED)


def chosen_parts(where: str, given: str | Collection[str] | None) -> tuple[str, ...] | None:
    """Returns the parts that were given, once each; None for the schedule. `where` says who asked
    for them. Raises UserError for a word, for none and for two losses."""
    if given is None or given == SCHEDULE or list(given) == [SCHEDULE]:
        return None
    if isinstance(given, str):
        raise UserError(f"{where} takes {SCHEDULE!r} or a collection of parts, as [{given!r}]")
    parts = tuple(dict.fromkeys(given))
    if not parts:
        raise UserError(f"{where} is empty: name parts of {', '.join(PARTS)}, or leave it out")
    if SCHEDULE in parts:
        raise UserError(f"{where}: {SCHEDULE!r} has all parts and stands alone")
    if {FUSED, WHOLE} <= {*parts}:
        raise UserError(
            f"{where}: {WHOLE} computes the loss over logits, {FUSED} without them: give one"
        )
    return parts


def check_names(where: str, parts: Iterable[str], known: Collection[str]) -> None:
    """Raises UserError for a part that is not known, with the nearest that is."""
    for name in parts:
        if name not in known:
            near = difflib.get_close_matches(str(name), [*known], n=1, cutoff=0.0)[0]
            raise UserError(f"{where} has no part {name!r}; did you mean {near}?")
