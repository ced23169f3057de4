"""Random packed weights, for presets whose public files hold packed ones: the same bytes, made
without a dense weight."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from longctx.families.classes import auto_class
from longctx.train.loading.packed_formats import Format, held_by, put_


def random_packed(
    config: PretrainedConfig,
    form: Format,
    device: torch.device,
    *,
    dtype: torch.dtype,
    attention: str | None,
) -> Any:
    """Returns a model in host memory, whose weights are dense in `dtype`. The bytes are drawn on
    `device`, whose generator decides them; `attention` is Hugging Face's name of it."""
    with torch.device("meta"):
        made = auto_class(config)
        model: Any = made.from_config(config, dtype=dtype, attn_implementation=attention)
    held = list(held_by(form, model))
    for packed in held:
        none = nn.Parameter(torch.empty(0, dtype=dtype), requires_grad=False)
        setattr(packed.owner, packed.name, none)
    model.to_empty(device="cpu")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Initializing zero-element tensors", UserWarning)
        model.init_weights()  # transformers' own, with the buffers that it computes
    model.tie_weights()
    for packed in held:
        shape = packed.weight.shape
        data, scale = (x.cpu() for x in form.drawn(packed.name, shape, device))
        put_(model, packed, data, form.state(shape, dtype, scale))
    return model
