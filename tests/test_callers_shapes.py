"""Errors of the public names speak of what the caller gave: a (B, S, D) input is not reported as
(T, D), and an argument of a module is not reported as one of the function behind it."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import longctx
from longctx import Documents
from longctx.errors import UserError

pytestmark = pytest.mark.usefixtures("reference_kernels")

X = torch.ones(2, 5, 8)
WEIGHT = torch.ones(11, 8)
LABELS = torch.zeros(2, 5, dtype=torch.int64)
TURNED = LABELS.view(5, 2)  # as many labels, of other tokens
Q, K, POSITIONS = torch.ones(5, 4, 8), torch.ones(5, 2, 8), torch.arange(5)

FUNCTIONS: dict[str, tuple[Callable[[], Any], str]] = {
    "a norm of a number": (
        lambda: longctx.rms_norm(torch.tensor(1.0), torch.ones(1)),
        "x must have shape (..., D), got ()",
    ),
    "rms_norm's weight": (
        lambda: longctx.rms_norm(X, torch.ones(7)),
        "weight must have shape (8,), got (7,) for x of (2, 5, 8)",
    ),
    "layer_norm's weight": (
        lambda: longctx.layer_norm(X, torch.ones(7)),
        "weight must have shape (8,), got (7,) for x of (2, 5, 8)",
    ),
    "rope of a batch": (
        lambda: longctx.rope(Q[None], K[None], POSITIONS, torch.ones(4)),
        "q must have shape (T, heads, even d), got (1, 5, 4, 8)",
    ),
    "swiglu": (
        lambda: longctx.swiglu(X, X[:1]),
        "up must have shape (2, 5, 8), got (1, 5, 8)",
    ),
    "geglu": (
        lambda: longctx.geglu(X, X[..., :4]),
        "up must have shape (2, 5, 8), got (2, 5, 4)",
    ),
    "cross_entropy's labels": (
        lambda: longctx.cross_entropy(X, TURNED),
        "labels must have shape (2, 5), got (5, 2)",
    ),
    "apply_rotary_pos_emb's tables": (
        lambda: longctx.apply_rotary_pos_emb(Q[None], K[None], X, X, unsqueeze_dim=2),
        "cos must have shape (1, 5, 8), got (2, 5, 8)",
    ),
    "linear_cross_entropy's labels": (
        lambda: longctx.linear_cross_entropy(X, WEIGHT, TURNED),
        "labels must have shape (2, 5), got (5, 2)",
    ),
    "linear_cross_entropy's count": (
        lambda: longctx.linear_cross_entropy(X, WEIGHT, LABELS, num_items=torch.ones(3)),
        "num_items must be one number, got shape (3,)",
    ),
    "a count that is a word": (
        lambda: longctx.linear_cross_entropy(X, WEIGHT, LABELS, num_items="3"),  # type: ignore[arg-type]
        "num_items must be a number, got str",
    ),
    "a smoothing that is a word": (
        lambda: longctx.linear_cross_entropy(X, WEIGHT, LABELS, label_smoothing="a"),  # type: ignore[arg-type]
        "label_smoothing must be a number, got str",
    ),
    "linear_log_probs' labels": (
        lambda: longctx.linear_log_probs(X, WEIGHT, TURNED),
        "labels must have shape (2, 5), got (5, 2)",
    ),
    "linear_jsd's teacher": (
        lambda: longctx.linear_jsd(X, WEIGHT, X[:1], WEIGHT),
        "teacher_hidden must have shape (2, 5, 8), got (1, 5, 8)",
    ),
    "linear_kl's count": (
        lambda: longctx.linear_kl(X, WEIGHT, X, WEIGHT, num_items=torch.ones(3)),
        "num_items must be one number, got shape (3,)",
    ),
}

HEADS = longctx.LinearCrossEntropyLoss, longctx.LinearLogProbs
MODULES: dict[str, tuple[Callable[[], Any], str]] = {
    **{
        name: (lambda make=make: make()(X[..., :7]), "x must have shape (..., 8), got (2, 5, 7)")
        for name, make in {
            "RMSNorm": lambda: longctx.RMSNorm(8),
            "LayerNorm": lambda: longctx.LayerNorm(8),
            "SwiGLU": lambda: longctx.SwiGLU(8, 16),
            "GeGLU": lambda: longctx.GeGLU(8, 16),
        }.items()
    },
    **{
        f"{kind.__name__}: input": (
            lambda kind=kind: kind(8, 11)(X[..., :7], LABELS),
            "input must have shape (..., 8), got (2, 5, 7)",
        )
        for kind in HEADS
    },
    **{
        f"{kind.__name__}: target": (
            lambda kind=kind: kind(8, 11)(X, TURNED),
            "target must have shape (2, 5), got (5, 2)",
        )
        for kind in HEADS
    },
    "CrossEntropyLoss": (
        lambda: longctx.CrossEntropyLoss(torch.ones(7))(X, LABELS),
        "weight must have shape (8,), got (7,)",
    ),
    "RotaryEmbedding": (
        lambda: longctx.RotaryEmbedding(6)(Q, K, POSITIONS),
        "q must have shape (..., 6), got (5, 4, 8)",
    ),
    "RotaryEmbedding: dim": (
        lambda: longctx.RotaryEmbedding(7),
        "dim must be even and positive, got 7",
    ),
    "LinearJSDLoss: teacher": (
        lambda: longctx.LinearJSDLoss(8, 11)(X, X.transpose(0, 1), nn.Linear(8, 11)),
        "teacher_input must have shape (2, 5, 8), got (5, 2, 8)",
    ),
    "LinearJSDLoss: target": (
        lambda: longctx.LinearJSDLoss(8, 11)(X, X, nn.Linear(8, 11), TURNED),
        "target must have shape (2, 5), got (5, 2)",
    ),
    "LinearKLLoss": (
        lambda: longctx.LinearKLLoss(8, 11)(X, X, nn.Linear(7, 11)),
        "teacher_input must have shape (2, 5, 7), got (2, 5, 8)",
    ),
    "Documents: positions": (
        lambda: Documents.from_position_ids(POSITIONS),
        "position_ids must have shape (B, S), got (5,)",
    ),
    "Documents: mask": (
        lambda: Documents.of_batch(POSITIONS[None], torch.ones(1, 4)),
        "attention_mask must have shape (1, 5) as position_ids has, got (1, 4)",
    ),
}
CASES = FUNCTIONS | MODULES


@pytest.mark.parametrize("case", CASES)
def test_an_error_names_the_callers_shape(case: str) -> None:
    call, message = CASES[case]
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        call()


def test_lengths_that_are_no_sequence() -> None:
    with pytest.raises(UserError, match="lengths is a sequence with an entry per document, got 3"):
        Documents.of(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", HEADS)
def test_a_head_takes_one_token_and_several_dimensions(kind: Any) -> None:
    """As torch.nn.LinearCrossEntropyLoss takes input (in_features,) with a target ()."""
    head = kind(8, 11)
    inputs, targets = torch.randn(2, 3, 5, 8), torch.randint(11, (2, 3, 5))
    flat = head(inputs.view(30, 8), targets.view(30))
    whole, one = head(inputs, targets), head(inputs[0, 0, 0], targets[0, 0, 0])
    if kind is longctx.LinearLogProbs:
        assert torch.equal(whole.log_probs, flat.log_probs.view(2, 3, 5))
        torch.testing.assert_close(one.log_probs, whole.log_probs[0, 0, 0])
    else:
        assert torch.equal(whole, flat)
        logits = head.linear(inputs[0, 0, 0])
        torch.testing.assert_close(one, nn.functional.cross_entropy(logits, targets[0, 0, 0]))


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lr": -1.0}, "lr must be a number and not negative, got -1.0"),
        ({"lr": "1e-5"}, "lr must be a number and not negative, got '1e-5'"),
        ({"eps": float("nan")}, "eps must be a number and not negative, got nan"),
        ({"weight_decay": -0.1}, "weight_decay must be a number and not negative, got -0.1"),
        ({"betas": (0.9, 1.0)}, "betas must be two numbers in [0, 1), got (0.9, 1.0)"),
    ],
)
def test_exact_adamw_refuses_the_numbers_that_torch_refuses(options: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        longctx.exact_adamw(nn.Linear(4, 4), tokens=8, **options)
    optimizer = longctx.exact_adamw(nn.Linear(4, 4), tokens=8)  # the refused one holds nothing
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], **options})
