"""The labels of a call of a causal model: which token each hidden state is to predict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from longctx.attention.shards import Shards
from longctx.constants import IGNORE_INDEX


@dataclass(frozen=True, kw_only=True, eq=False)
class Labels:
    """The arguments of a call that its loss and its logits are computed by."""

    labels: Tensor | None = None  # (B, S), not shifted
    shift_labels: Tensor | None = None  # (B, S), already shifted; they win over labels, as in HF
    ignore_index: int = IGNORE_INDEX
    num_items: int | Tensor | None = None
    """The labels of the whole step, by which a sum becomes a mean; None: those of this call."""
    logits_to_keep: int | Tensor = 0

    @property
    def wants_logits(self) -> bool:
        """Whether the call asks for the logits of some tokens alone."""
        return not isinstance(self.logits_to_keep, int) or self.logits_to_keep != 0

    def arguments(self) -> dict[str, Any]:
        """Returns these arguments as Hugging Face's model takes them. Those that say nothing are
        left out, since not every loss of transformers has a name for them."""
        given = dict(num_items_in_batch=self.num_items, shift_labels=self.shift_labels)
        found: dict[str, Any] = {k: v for k, v in given.items() if v is not None}
        if self.ignore_index != IGNORE_INDEX:
            found["ignore_index"] = self.ignore_index
        return found | dict(labels=self.labels, logits_to_keep=self.logits_to_keep)

    def targets(self, shards: Shards | None) -> Tensor | None:  # (B, S)
        """Returns the label of each hidden state, -100 where there is none; None without labels.
        The labels of a row that ranks share are shifted over the borders of their shards."""
        found = self.shift_labels
        if found is None and self.labels is not None and shards is not None:
            found = shards.shifted(self.labels, self.ignore_index)
        elif found is None and self.labels is not None:
            found = nn.functional.pad(self.labels[..., 1:], (0, 1), value=self.ignore_index)
        if found is None or self.ignore_index == IGNORE_INDEX:
            return found
        return found.masked_fill(found == self.ignore_index, IGNORE_INDEX)


def labels_on_padding(labels: Tensor, mask: Any) -> bool:  # (B, S)
    """Whether the output of padding is trained: of shifted labels that of the last token of padding
    on the left, too. Labels of other tokens than the mask's, as with `logits_to_keep`, may be."""
    if not isinstance(mask, Tensor):
        return False
    if mask.shape != labels.shape:
        return bool((mask == 0).any())
    return bool(((labels != IGNORE_INDEX).to(mask.device) & (mask == 0)).any())
