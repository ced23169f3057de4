"""Documents of a call that continue others: `parents`, and the positions and labels that a call
with it must have.

A prompt of 3 tokens and answers of 2 and 1, each of which continues the prompt:

    parents           -1 0 0                    cu_seq_lens_q     0 3 5 6
    position_ids      0 1 2  3 4  3             labels            - - -  a b  -100

Labels are shifted by one token, as in any causal model: the prompt's last token predicts a. It
would have to predict the first token of the second answer as well, but has one label only.

After a prompt with images, all three rows of positions (positions.py) continue with the number
after the largest in any of them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longctx.attention.documents import Documents, Parents
from longctx.errors import UserError

PARENTS = "parents"
"""The argument of a patched model's forward with the parents of documents, as in `Documents.of`."""


def check_positions(position_ids: Tensor, documents: Documents) -> None:  # (B, S) or (3, B, S)
    """Raises UserError if a document's positions do not continue its parent's."""
    flat = position_ids.flatten(-2)
    pairs = [(prompt.stop - 1, a.start) for prompt, answers in documents.prompts for a in answers]
    last, first = flat[..., torch.tensor(pairs, device=flat.device)].unbind(-1)
    if flat.dim() > 1:  # an image may end the prompt, whose last token is not the farthest
        largest = [flat[:, prompt].max() for prompt, answers in documents.prompts for _ in answers]
        last = torch.stack(largest).expand_as(first)
    if not torch.equal(first, last + 1):
        raise UserError(
            "position_ids of a document with a parent must go on from the parent's last one: leave "
            "them out, or take those of longctx.Documents.of(lengths, parents).arguments()"
        )


def check_labels(
    labels: Tensor,  # (B, S), not shifted
    cu_seqlens: Tensor | None,  # (documents + 1,)
    parents: Parents,  # (documents,)
    ignored: int,
) -> None:
    """Raises UserError if the first token of an answer has a label although another answer is
    between it and their prompt."""
    documents, _ = Documents.of_batch(labels, None, cu_seqlens, parents)
    firsts = [answer.start for _, answers in documents.prompts for answer in answers[1:]]
    trained = labels.flatten()[torch.tensor(firsts, dtype=torch.int64, device=labels.device)]
    if bool((trained != ignored).any()):
        raise UserError(
            "the first token of a prompt's second answer, and of later ones, is predicted by the "
            f"prompt's last token, which has one label only: set its label to {ignored}, or "
            "compute the loss from the hidden states"
        )
