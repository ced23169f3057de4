"""Medusa heads on a patched trunk: five more tokens are predicted at each place, without logits.

    longctx recipes medusa.py > medusa.py
    python medusa.py meta-llama/Llama-3.2-1B texts.jsonl runs/medusa --max_length 32768

Head n (Cai et al., arXiv 2401.10774) predicts the token n + 2 places on, by a residual block and an
output layer of its own, which begins as the model's lm_head. The trunk is frozen, or trained with
its own loss (--train_trunk). Five heads over 32768 tokens and a vocabulary of 128256 would have 39
GiB of logits in bf16; `longctx.linear_cross_entropy` makes none. The data is JSONL with a `text`.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch
from datasets import load_dataset
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn.functional import pad, silu
from transformers import AutoModelForCausalLM, AutoTokenizer

import longctx


class MedusaHead(nn.Module):
    """A residual block and an output layer, which together begin as `lm_head`."""

    def __init__(self, lm_head: nn.Linear) -> None:
        super().__init__()
        vocab, width = lm_head.weight.shape
        like = dict(device=lm_head.weight.device, dtype=lm_head.weight.dtype)
        self.block = nn.Linear(width, width, **like)
        self.lm_head = nn.Linear(width, vocab, bias=False, **like)
        with torch.no_grad():
            self.block.weight.zero_()
            self.block.bias.zero_()
            self.lm_head.weight.copy_(lm_head.weight)

    def forward(self, hidden: Tensor) -> Tensor:  # (B, S, D) -> (B, S, D)
        return hidden + silu(self.block(hidden))


def medusa_backward(
    hidden: Tensor,  # (B, S, D) of the trunk, after its final norm
    heads: nn.ModuleList,
    labels: Tensor,  # (B, S), not shifted
    lm_head: nn.Linear | None = None,  # the trunk's, where the trunk is trained
    decay: float = 0.8,
    loss_of: Any = longctx.linear_cross_entropy,  # of hidden states, a weight and labels
) -> Tensor:  # ()
    """Backward of the heads' losses, weighted by decay^(n + 1), and of the trunk's own. Returns
    their sum.

    A head's backward runs before the next head's forward: a loss keeps the gradients of its hidden
    states and of its output layer until then, 2 GiB in fp32 for a vocabulary of 128256 and a width
    of 4096, and five would be kept at once.
    """
    shared = hidden.detach().requires_grad_(hidden.requires_grad)
    total = torch.zeros((), device=hidden.device)

    def backward(states: Tensor, weight: Tensor, ahead: int) -> None:
        targets = pad(labels[:, ahead:], (0, ahead), value=-100)
        loss = decay ** (ahead - 1) * loss_of(states, weight, targets)
        loss.backward()
        total.add_(loss.detach())

    if lm_head is not None:
        backward(shared, lm_head.weight, 1)
    for n, head in enumerate(heads):
        backward(head(shared), head.lm_head.weight, n + 2)
    if hidden.requires_grad:
        hidden.backward(shared.grad)
    return total


def rows_of(path: str, tokenizer: AutoTokenizer, length: int) -> Tensor:  # (rows, length)
    """All texts, one after the other with an end between them, cut into rows."""
    ids: list[int] = []
    for text in load_dataset("json", data_files=path, split="train")["text"]:
        ids += [*tokenizer(text)["input_ids"], tokenizer.eos_token_id]
    return torch.tensor(ids[: len(ids) // length * length]).view(-1, length)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", help="a folder or a name on the hub")
    parser.add_argument("data", help="a JSONL file")
    parser.add_argument("output", help="a folder for the trained heads, and the trunk")
    parser.add_argument("--max_length", type=int, default=32768, help="tokens of a row")
    parser.add_argument("--max_steps", type=int, default=-1, help="default: one epoch")
    parser.add_argument("--heads", type=int, default=5)
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--train_trunk", action="store_true", help="by its own loss and the heads'")
    args = parser.parse_args(argv)

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.bfloat16).to(device)
    model.requires_grad_(args.train_trunk)
    longctx.patch(model, strict=True)
    heads = nn.ModuleList(MedusaHead(model.lm_head) for _ in range(args.heads))
    trained = nn.ModuleList([heads, model]) if args.train_trunk else heads
    optimizer = longctx.exact_adamw(trained, lr=args.learning_rate, tokens=args.max_length)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    rows = rows_of(args.data, tokenizer, args.max_length)
    if not len(rows):
        raise SystemExit(f"{args.data} has less than {args.max_length} tokens")
    steps = len(rows) if args.max_steps < 0 else args.max_steps
    model.train()
    for step in range(steps):
        ids = rows[step % len(rows)][None].to(device)
        with torch.set_grad_enabled(args.train_trunk):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state
        loss = medusa_backward(hidden, heads, ids, model.lm_head if args.train_trunk else None)
        optimizer.clip(1.0)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step + 1}/{steps}  loss {loss.item():.4f}")

    Path(args.output).mkdir(parents=True, exist_ok=True)
    optimizer.flush()  # ends updates that are still outstanding
    save_file(heads.state_dict(), Path(args.output) / "medusa_heads.safetensors")
    if args.train_trunk:
        model.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)


if __name__ == "__main__":
    main()
