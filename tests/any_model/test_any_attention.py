"""Our attention behind transformers' interface: packed rows, padding, windows, sinks, and what it
leaves to the model."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_any import config_of, make, step
from torch import Tensor
from transformers import AutoConfig

import longctx
from longctx.any_model.masks import Seen, longctx_mask
from longctx.any_model.patch import any_attention
from longctx.any_model.probe import find_loss, why_not_our_attention
from longctx.any_model.shrunk_config import FEATURES, narrowed
from longctx.any_model.specimen import Specimen, outline
from longctx.errors import UserError
from longctx.families.classes import class_of

pytestmark = pytest.mark.usefixtures("reference_kernels")
LENGTHS = (9, 5, 10)
OURS = ("llama", "deepseek_v3", "mistral", "gemma2", "gemma4_text", "gpt_oss", "phi3", "nanochat")
THEIRS = ("bloom", "falcon", "mpt", "rwkv")


def no_dropout(family: str, **more: object) -> object:
    dropouts = ("attn_pdrop", "resid_pdrop", "embd_pdrop", "attention_dropout", "hidden_dropout")
    return make(family, **dict.fromkeys(dropouts, 0.0), **more)


def apart(model: object, ids: Tensor) -> dict[str, Tensor]:
    """The sums over documents, each in a row of its own, of loss times tokens."""
    found: dict[str, Tensor] = {}
    for document in ids.split(LENGTHS, 1):
        one = step(model, input_ids=document, labels=document, num_items_in_batch=1)
        for name, x in one.items():
            found[name] = found.get(name, 0) + x
    return found


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], most: float) -> None:
    """Gradients that are rounding noise, of a bias of keys for instance, count by the largest."""
    assert ours.keys() == theirs.keys()
    scale = max(float(x.norm()) for x in theirs.values())
    for name, x in theirs.items():
        error = float((ours[name] - x).norm())
        assert error <= most * max(float(x.norm()), 1e-4 * scale), (name, error)


@pytest.mark.parametrize("family", OURS)
def test_packed_rows_are_separate_documents(family, capsys) -> None:
    model = no_dropout(family, sliding_window=4)
    ids = torch.randint(10, 100, (1, sum(LENGTHS)), generator=torch.Generator().manual_seed(3))
    labels = ids.clone()
    starts = [sum(LENGTHS[:i]) for i in range(len(LENGTHS))]
    labels[0, starts] = -100
    alone = apart(model, ids)
    longctx.patch(model, any_model=True)
    assert ", our attention, " in capsys.readouterr().out
    positions = torch.cat([torch.arange(n) for n in LENGTHS])[None]
    given = dict(input_ids=ids, labels=labels, position_ids=positions, num_items_in_batch=1)
    close(step(model, **given), alone, 3e-5)


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(side) -> None:
    model = no_dropout("mistral", sliding_window=4)
    ids = torch.randint(10, 100, (2, 24), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    if side == "right":
        mask = mask.flip(1)
    labels = ids.masked_fill(mask == 0, -100)
    given = dict(input_ids=ids, labels=labels, attention_mask=mask)
    own = step(model, **given)
    longctx.patch(model, any_model=True)
    close(step(model, **given), own, 1e-5)


@pytest.mark.parametrize("family", THEIRS)
def test_layers_with_attention_of_their_own_keep_it(family, capsys) -> None:
    model = no_dropout(family)
    own = step(model)
    longctx.patch(model, any_model=True)
    assert "the model's own (its layers compute attention themselves" in capsys.readouterr().out
    close(step(model), own, 1e-5)
    with pytest.raises(UserError, match="use --attn_backend auto"):
        longctx.patch(longctx.unpatch(model), any_model=True, attn_backend="math")


def test_dropout_in_attention_stays_the_models() -> None:
    config, cpu = config_of("gpt2", attn_pdrop=0.1), torch.device("cpu")
    name, why = any_attention(config, type(make("gpt2")), "auto", cpu)
    assert name is None and "attn_pdrop" in why


def test_a_mask_of_another_kind_is_made() -> None:
    def both_ways(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key < 8

    def chunks(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key // 8 == query // 8)

    assert isinstance(longctx_mask(1, 16, 16, mask_function=both_ways), Tensor)
    seen = longctx_mask(2, 20, 20, mask_function=chunks, local_size=8)
    assert isinstance(seen, Seen) and seen.window is None
    assert seen.documents.lengths == (8, 8, 4, 8, 8, 4)
    assert seen[:, :, slice(0, None), :] is seen
    assert seen[:, :, -1:, :].shape == (2, 1, 1, 20)


def test_it_generates() -> None:
    model = longctx.patch(no_dropout("gemma4_text"), any_model=True).eval()
    ids = torch.randint(10, 100, (1, 12), generator=torch.Generator().manual_seed(3))
    cached, plain = (
        model.generate(ids, max_new_tokens=4, do_sample=False, use_cache=use)
        for use in (True, False)
    )
    assert torch.equal(cached, plain)


def test_a_large_model_is_tried_in_little_width() -> None:
    """Gemma 4 31B: heads by the factor that all kinds of layers share, which keep their sizes."""
    config = AutoConfig.for_model(
        "gemma4_text",
        **dict(hidden_size=5376, intermediate_size=21504, num_hidden_layers=60, vocab_size=262144),
        **dict(num_attention_heads=32, num_key_value_heads=16, hidden_size_per_layer_input=0),
    )
    narrow = narrowed(config)
    assert (narrow.hidden_size, narrow.intermediate_size) == (5376, FEATURES)
    assert (narrow.num_attention_heads, config.vocab_size) == (4, 262144)
    kind, cpu = class_of(config), torch.device("cpu")
    tried = Specimen(outline(narrow, kind, None, torch.float32), cpu).model
    assert {layer.self_attn.head_dim for layer in tried.model.layers} == {256, 512}


def test_the_probe_has_no_tf32_and_leaves_it_as_it_was() -> None:
    backends: Any = torch.backends
    seen = []

    def look(*_: object) -> None:
        seen.append((torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32))
        raise UserError("seen")

    before = torch.get_float32_matmul_precision(), backends.cudnn.allow_tf32
    torch.set_float32_matmul_precision("high")
    backends.cudnn.allow_tf32 = True
    try:
        with pytest.raises(UserError, match="seen"):
            find_loss(config_of("llama"), look, torch.device("cpu"))
        assert seen[0] == ("highest", False)
        assert torch.get_float32_matmul_precision() == "high" and backends.cudnn.allow_tf32
        assert backends.cuda.matmul.allow_tf32 and backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision(before[0])
        backends.cudnn.allow_tf32 = before[1]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["llama", "deepseek_v3", "gemma4_text"])
def test_a_gpu_finds_what_a_cpu_finds(family) -> None:
    config, cuda = AutoConfig.for_model(family, num_hidden_layers=6), torch.device("cuda")
    kind = class_of(config)
    assert why_not_our_attention(config, kind, None, cuda) is None
    assert find_loss(config, kind, cuda) == find_loss(config, kind, torch.device("cpu"))
