"""Trains a saved model with torch's fully_shard on gloo; run by torchrun from test_engine.py.

fully_shard is applied as accelerate applies it on GPUs: every decoder layer, the embedding, final
norm with lm_head, the root. The loss is the sum over all processes' tokens over their number.
Gradients are in host memory, where longctx clips them.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("TRITON_INTERPRET", "0")

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from longctx.config import ModelArguments
from longctx.engine import clip_on_host
from longctx.model import patch

ROWS = 4


def build(folder: str, class_type: str):
    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
    patch(model, ModelArguments(class_type=class_type), torch.device("cpu"))
    options = dict(offload_policy=CPUOffloadPolicy(pin_memory=False))
    for layer in model.model.layers:
        fully_shard(layer, **options)
    tied = model.lm_head.weight is model.model.embed_tokens.weight
    head = [model.model.norm, model.lm_head]
    if tied:
        head.insert(1, model.model.embed_tokens)
    else:
        fully_shard(model.model.embed_tokens, **options)
    fully_shard(head, reshard_after_forward=False, **options)
    fully_shard(model, **options)
    assert all(isinstance(p, DTensor) for p in model.parameters())
    return model


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("output")
    parser.add_argument("--class_type", default="custom")
    parser.add_argument("--stop", type=int, required=True)
    parser.add_argument("--save")
    parser.add_argument("--resume")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model = build(args.model, args.class_type).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    step = 0
    if args.resume:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": 0}
        dcp.load(state, checkpoint_id=args.resume)
        set_state_dict(
            model, optimizer, model_state_dict=weights, optim_state_dict=state["optimizer"]
        )
        step = state["step"]
    losses = []
    while step < args.stop:
        generator = torch.Generator().manual_seed(step)
        rows = torch.randint(100, (ROWS, 96), generator=generator)
        labels = rows.clone()
        labels[0, :50] = -100  # processes have different numbers of tokens
        count = (labels[:, 1:] != -100).sum()
        mine = slice(rank * ROWS // world, (rank + 1) * ROWS // world)
        loss = model(
            input_ids=rows[mine], labels=labels[mine], num_items_in_batch=count, use_cache=False
        ).loss
        (loss * world).backward()  # fully_shard averages gradients over processes
        norms = [p.grad.full_tensor().double().norm() for p in model.parameters()]
        norm = clip_on_host(model.parameters(), max_norm=0.5)
        torch.testing.assert_close(norm, torch.stack(norms).norm(), rtol=1e-6, atol=0)
        assert norm > 0.5
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach()
        dist.all_reduce(total)
        losses.append(total.item())
        step += 1
    if args.save:
        weights, moments = get_state_dict(model, optimizer)
        state = {"model": weights, "optimizer": moments, "step": step}
        dcp.save(state, checkpoint_id=args.save)
    if rank == 0:
        with open(args.output, "w") as file:
            json.dump(losses, file)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
