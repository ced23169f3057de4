"""A Llama of two layers and a packed batch, for tests of the patched model."""

from __future__ import annotations

import torch
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from longctx.train.options.source import PRESETS

CPU = torch.device("cpu")


def tiny_config(family: str = "llama", **changes) -> PretrainedConfig:
    return AutoConfig.for_model(
        family,
        **{
            "vocab_size": 331,  # prime: no chunk or block divides it
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 128,
            "pad_token_id": None,
            **changes,
        },
    )


def packed_batch(rows: int = 2) -> dict[str, Tensor]:
    """Rows of 48 tokens: documents of 20, 27 and 1 tokens, the first third of each not trained."""
    torch.manual_seed(1)
    ids = torch.randint(331, (rows, 48))
    position_ids = torch.cat([torch.arange(n) for n in (20, 27, 1)]).repeat(rows, 1)
    labels = ids.masked_fill(position_ids < 7, -100)
    return {"input_ids": ids, "labels": labels, "position_ids": position_ids, "use_cache": False}


ROPE = {
    "default": {"rope_type": "default", "rope_theta": 10000.0},
    "linear": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "llama3": {
        **PRESETS["llama-3.1-8b"]["rope_parameters"],
        "original_max_position_embeddings": 32,
    },
}
