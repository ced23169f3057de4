"""Rows that two, four and eight ranks share (gloo): the mean over the ranks of loss and gradients
is as exact as one process is."""

from __future__ import annotations

from typing import Any

import pytest
import small_layer
import test_every_family
import test_images
import torch
import torch.distributed as dist
from small_families import KINDS_OF_LAYERS
from small_layer import assert_exact_run, batch, run
from small_run import on_ranks
from small_vision import image_batch, packed

from longctx.attention.shards import Shards
from longctx.errors import UserError
from longctx.runtime.runtime import patched_part
from longctx.train.trainer.nonfinite import first_nonfinite

pytestmark = pytest.mark.usefixtures("reference_kernels")

ROWS = [[[60, 83, 1]], [[144]], [[10, 134], [36, 108]], [[1, 2, 3, 4, 135]]]
"""The third is a batch of two rows, the last is filled up."""
SETTINGS = [
    dict(offload_activations="all"),
    dict(offload_activations="all", keep="all", tile_tokens=7, head_groups=2),
]


def share(model):
    patched_part(model).longctx.surround(shards=Shards(dist.group.WORLD))
    return model


def own_part(inputs):
    """This rank's tokens of every row."""
    tensors = {name: x for name, x in inputs.items() if isinstance(x, torch.Tensor)}
    return inputs | Shards(dist.group.WORLD).cut(tensors)


def mean_over_ranks(found):
    """In fp32, as gradients are averaged."""
    ranks = dist.get_world_size()

    def mean(x):
        wide = x.float() if x.dtype == torch.bfloat16 else x.clone()
        dist.all_reduce(wide)
        return (wide / ranks).to(x.dtype)

    losses, grads = found
    return mean(losses), {name: mean(grad) for name, grad in grads.items()}


def check_exact(models, *batches, known: Any = None) -> Any:
    """The runs of truth and naive, unless they are `known`, are the first rank's."""
    truth, naive, ours = models
    found = mean_over_ranks(run(share(ours), *map(own_part, batches)))
    if dist.get_rank() == 0:  # the others wait
        known = known or [run(model, *batches) for model in (truth, naive)]
        assert_exact_run(found, known[1], known[0], naive.dtype)
    return known


def check_llama(rank: int, ranks: int) -> None:
    for dtype in (torch.float32, torch.bfloat16)[: 4 // ranks]:  # two ranks round as four do
        known = None
        for settings in SETTINGS:
            models = small_layer.trio(dtype, settings, num_key_value_heads=4)
            known = check_exact(models, *(batch(rows) for rows in ROWS), known=known)


def check_a_head_each(rank: int, ranks: int) -> None:
    """A model has as many heads of queries, and of keys, as there are ranks: each rank has one."""
    models = small_layer.trio(torch.float32, SETTINGS[0], num_key_value_heads=ranks)
    check_exact(models, *(batch(rows) for rows in ROWS))


def check_families(rank: int, ranks: int) -> None:
    """A model of each kind of layer by two ranks, and two by four, in head groups. Norms that span
    heads (OLMo's) are made where a rank has all heads of its tokens. Ministral 3 scales q by its
    position, SmolLM3 has layers without RoPE, and the others have experts."""
    more = ("ministral3", "smollm3", "qwen2_moe", "gpt_oss")
    for family in (*KINDS_OF_LAYERS, *more) if ranks == 2 else ("smollm3", "olmo3"):
        settings = dict(head_groups=2, keep="x")
        models = test_every_family.trio(family, torch.float32, settings, num_key_value_heads=4)
        models[2].model.longctx.surround(strict=True)
        check_exact(models, batch([[10, 62], [36, 36]]))


def check_auxiliary_loss(rank: int, ranks: int) -> None:
    """Experts are balanced over the tokens of all ranks. Losses over the items of all ranks, as a
    Trainer asks for them, add up to the whole one; others have it as their mean."""
    changes = dict(num_key_value_heads=4, router_aux_loss_coef=0.5, output_router_logits=True)
    models = test_every_family.trio("mixtral", torch.float32, dict(tile_tokens=31), **changes)
    rows, items = batch([[10, 62], [36, 36]]), {"num_items_in_batch": 50}
    check_exact(models, rows)
    loss, grads = mean_over_ranks(run(models[2], own_part(rows) | items))
    if rank == 0:
        wanted, theirs = run(models[1], rows | items)
        torch.testing.assert_close(ranks * loss, wanted, rtol=1e-5, atol=1e-5)
        for name, grad in theirs.items():
            torch.testing.assert_close(ranks * grads[name], grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("check", "ranks"),
    [
        *((check, 2) for check in (check_llama, check_families, check_auxiliary_loss)),
        *(
            pytest.param(check, ranks, marks=pytest.mark.ci)
            for check, ranks in ((check_llama, 4), (check_families, 4), (check_a_head_each, 8))
        ),
    ],
)
def test_shared_rows_train_as_whole_ones(check, ranks, tmp_path) -> None:
    on_ranks(ranks, check, tmp_path)


def check_images(rank: int, ranks: int) -> None:
    """Two documents with images, of which one lies in both ranks' parts, and one rank has none."""
    for kind in ("llava", "qwen2_5_vl", "qwen3_vl"):
        models = test_images.trio(kind)
        both = image_batch(kind, [[46]], tokens=64), image_batch(kind, [[5]], tokens=32, seed=4)
        one = image_batch(kind, [[5, 25]], seed=5), image_batch(kind, [[]], seed=6)
        rows = [packed(models[1], documents) for documents in (both, one)]
        check_exact(models, *rows)


def check_images_that_are_refused(rank: int, ranks: int) -> None:
    ours = test_images.trio("qwen3_vl")[2]
    share(ours)
    with pytest.raises(UserError, match="with images need input_ids and position_ids"):
        ours(**own_part(image_batch("qwen3_vl")))
    ours = test_images.trio("gemma3")[2]
    inputs = own_part(packed(ours, [image_batch("gemma3")]))
    share(ours)
    with pytest.raises(UserError, match="ranks cannot share rows with images that are seen both"):
        ours(**inputs)


def check_others(rank: int, ranks: int) -> None:
    *_, model = small_layer.trio(torch.float32)
    inputs = own_part(batch([[144]]))
    whole = model(**batch([[144]])).loss
    del inputs["position_ids"]  # each rank counts on from the ones before it
    share(model)
    loss = model(**inputs).loss.detach()
    dist.all_reduce(loss)
    torch.testing.assert_close(loss / ranks, whole, rtol=1e-5, atol=0)
    with pytest.raises(UserError, match="share rows need the schedule, .* has attention_mask"):
        model(**inputs, attention_mask=torch.ones(1, 72))
    with pytest.raises(UserError, match="share rows need .* has output_attentions"):
        model(**inputs, output_attentions=True)
    odd = dict(hidden_size=96, num_attention_heads=3, num_key_value_heads=1)
    *_, model = small_layer.trio(torch.float32, {"head_groups": 1}, **odd)
    with pytest.raises(UserError, match="2 ranks cannot share a head group of 3 query and 1 key"):
        share(model)(**inputs)


def check_report(rank: int, ranks: int) -> None:
    """Of a row whose second half breaks, and with it keys and values that the first one masks."""
    *_, model = small_layer.trio(torch.float32)
    row = {name: x for name, x in batch([[143]]).items() if isinstance(x, torch.Tensor)}
    row["input_ids"][0, 100] = token = 3
    row["input_ids"][0, :100].clamp_(min=4)
    alone = first_nonfinite(model, row)
    with torch.no_grad():
        model.model.embed_tokens.weight[token] = torch.nan
    assert alone is None
    assert first_nonfinite(share(model), row) == ("model.embed_tokens", 100)


def test_the_report_of_a_step_that_is_not_finite(tmp_path) -> None:
    on_ranks(2, check_report, tmp_path)


@pytest.mark.parametrize("check", [check_images, check_images_that_are_refused])
def test_rows_with_images(check, tmp_path) -> None:
    on_ranks(2, check, tmp_path)


def test_positions_and_what_is_refused(tmp_path) -> None:
    on_ranks(2, check_others, tmp_path)
