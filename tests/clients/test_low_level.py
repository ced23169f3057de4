"""Models that others compose of single parts, as Liger's README shows them, beside torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, kl_div, linear, scaled_dot_product_attention
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

import longctx

pytestmark = pytest.mark.usefixtures("reference_kernels")
WIDTH, HIDDEN, HEADS, VOCAB, SIZE = 32, 48, 4, 96, 8
B, S = 2, 12


class TheirMLP(nn.Module):
    """Llama's or Gemma's in plain torch, with the names of our weights."""

    def __init__(self, gelu: bool) -> None:
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in "gu")
        self.down_proj = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.act = nn.GELU(approximate="tanh") if gelu else nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act(self.gate_proj(x)) * self.up_proj(x))


class Composed(nn.Module):
    """One block and a head: each part is torch's, or ours."""

    def __init__(self, norm: Any, mlp: nn.Module, rope: Any, loss: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.norms = nn.ModuleList(norm(WIDTH, eps=1e-5) for _ in range(3))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp, self.rope, self.loss = mlp, rope, loss
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(ids)
        parts = self.qkv(self.norms[0](x)).view(B, S, 3, HEADS, SIZE).permute(2, 0, 3, 1, 4)
        angles = torch.arange(S)[:, None] * 1e4 ** -(torch.arange(0, SIZE, 2) / SIZE)
        table = torch.cat((angles, angles), dim=-1)[None]
        q, k = self.rope(parts[0], parts[1], table.cos(), table.sin())
        mixed = scaled_dot_product_attention(q, k, parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        x = x + self.mlp(self.norms[1](x))
        return self.loss(self.norms[2](x), self.lm_head, labels)


def their_loss(x: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return cross_entropy(head(x).flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def fused_loss(x: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return longctx.linear_cross_entropy(x, head.weight, labels, label_smoothing=0.1)


def logits_loss(x: Tensor, head: nn.Linear, labels: Tensor) -> Tensor:
    return longctx.CrossEntropyLoss(label_smoothing=0.1)(head(x), labels)


@pytest.mark.parametrize("loss", [fused_loss, logits_loss])
@pytest.mark.parametrize("kind", ["RMSNorm and SwiGLU", "LayerNorm and GeGLU"])
def test_a_model_of_ones_own(kind, loss) -> None:
    """Three steps of training end with the same losses and weights."""
    torch.manual_seed(0)
    gelu = "GeGLU" in kind
    norms = (nn.LayerNorm, longctx.LayerNorm) if gelu else (nn.RMSNorm, longctx.RMSNorm)
    mlp = (longctx.GeGLU if gelu else longctx.SwiGLU)(WIDTH, HIDDEN)
    ours = Composed(norms[1], mlp, longctx.apply_rotary_pos_emb, loss)
    theirs = Composed(norms[0], TheirMLP(gelu), apply_rotary_pos_emb, their_loss)
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    losses: dict[Any, list[float]] = {ours: [], theirs: []}
    for model, found in losses.items():
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(3):
            torch.manual_seed(step)
            ids = torch.randint(VOCAB, (B, S))
            labels = ids.roll(-1, 1).masked_fill(torch.rand(B, S) < 0.2, -100)
            value = model(ids, labels)
            optimizer.zero_grad()
            value.backward()
            optimizer.step()
            found.append(value.item())
    assert losses[ours] == pytest.approx(losses[theirs], rel=1e-5)
    for our, their in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(our, their, rtol=1e-4, atol=1e-5)


def gradients(value: Tensor, *leaves: Tensor) -> tuple[Tensor, ...]:
    return value.detach(), *torch.autograd.grad(value, leaves)


def test_rope_by_positions_is_rope_by_tables() -> None:
    q, k = torch.randn(S, HEADS, SIZE), torch.randn(S, 2, SIZE)
    inv_freq = 1e4 ** -(torch.arange(0, SIZE, 2) / SIZE)
    angles = (torch.arange(S)[:, None] * inv_freq).repeat(1, 2)[None]
    tables = angles.cos(), angles.sin()
    expected = longctx.apply_rotary_pos_emb(q[None], k[None], *tables, unsqueeze_dim=2)
    found = longctx.RotaryEmbedding(SIZE)(q.clone(), k.clone(), torch.arange(S))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs[0], rtol=1e-5, atol=1e-6)


def test_fused_linear_cross_entropy_of_a_linear_layer() -> None:
    """The README's example: `loss_fn(model.weight, input, target)`."""
    model = nn.Linear(128, 256)
    input, target = torch.randn(4, 128, requires_grad=True), torch.randint(256, (4,))
    leaves = input, model.weight, model.bias
    ours = longctx.linear_cross_entropy(input, model.weight, target, bias=model.bias)
    for found, truth in zip(
        gradients(ours, *leaves),
        gradients(cross_entropy(model(input), target), *leaves),
        strict=True,
    ):
        torch.testing.assert_close(found, truth, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0])
def test_fused_linear_jsd(beta) -> None:
    """Between a student's and a teacher's head: forward KL, their middle, reverse KL."""
    student, teacher = torch.randn(6, 16, requires_grad=True), torch.randn(6, 24)
    weight, other = torch.randn(VOCAB, 16, requires_grad=True), torch.randn(VOCAB, 24)
    ours = longctx.linear_jsd(student, weight, teacher, other, beta=beta)
    p, q = linear(student, weight).log_softmax(-1), linear(teacher, other).log_softmax(-1)
    how = dict(reduction="batchmean", log_target=True)
    if beta in (0.0, 1.0):
        truth = kl_div(q, p, **how) if beta else kl_div(p, q, **how)
    else:
        m = (beta * q.exp() + (1 - beta) * p.exp()).log()
        truth = beta * kl_div(m, q, **how) + (1 - beta) * kl_div(m, p, **how)
    for found, expected in zip(
        gradients(ours, student, weight), gradients(truth, student, weight), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_fused_linear_dpo() -> None:
    """Chosen rows, then rejected ones, and a reference model's hidden states."""
    hidden, taught = torch.randn(4, 5, 16, requires_grad=True), torch.randn(4, 5, 16)
    weight, other = torch.randn(VOCAB, 16, requires_grad=True), torch.randn(VOCAB, 16)
    labels = torch.randint(VOCAB, (4, 5))
    labels[1, 3:] = -100

    def summed(x: Tensor, head: Tensor) -> Tensor:  # log-probabilities of answers, (4,)
        log_p = linear(x, head).log_softmax(-1).gather(-1, labels.clamp(min=0)[..., None])[..., 0]
        return (log_p * (labels != -100)).sum(-1)

    margins = summed(hidden, weight) - summed(taught, other)
    truth = -nn.functional.logsigmoid(0.1 * (margins[:2] - margins[2:])).mean()
    loss = longctx.losses.LinearDPOLoss(beta=0.1)
    ours = loss(hidden, weight, labels, ref_hidden=taught, ref_weight=other).loss
    for found, expected in zip(
        gradients(ours, hidden, weight), gradients(truth, hidden, weight), strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
