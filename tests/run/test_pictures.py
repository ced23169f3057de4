"""`longctx train` on conversations with pictures: exact, resumable, and refused in one line."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from small_layer import assert_exact_run, cast, gradients
from torch import Tensor
from transformers import AutoModelForImageTextToText

import longctx

small = pytest.importorskip("small_pictures")
pytestmark = pytest.mark.usefixtures("reference_kernels")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory) -> Any:
    """The folder of a model of a kind, made once."""
    return functools.cache(lambda kind: small.seeing_model(tmp_path_factory.mktemp(kind), kind))


def summed(model: Any, documents: list[dict[str, Tensor]]) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss and gradients of documents, each run by itself, weighted by trained tokens."""
    total = sum(int(one["labels"].ne(-100).sum()) for one in documents)
    whole, grads = torch.zeros((), dtype=model.dtype), {}
    for one in documents:
        share = int(one["labels"].ne(-100).sum()) / total
        loss, found = gradients(model, one)
        whole += share * loss.detach()
        for name, grad in found.items():
            if grad is not None:  # a text reaches no tower
                grads[name] = grads.get(name, 0) + share * grad
    return whole, grads


@pytest.mark.parametrize("kind", small.PLACES)
def test_packed_rows_train_as_each_document_alone(kind, model_of, tmp_path) -> None:
    """Loss and all gradients, beside Hugging Face's model and transformers' own processor."""
    model, records = model_of(kind), [*small.about_colours(9), small.in_turns()]
    batch = small.of_file(model, tmp_path, records).batch()
    assert len(batch["input_ids"]) < len(records) / 2
    batch.pop("documents")
    naive = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).train()
    ours = longctx.patch(copy.deepcopy(naive), strict=True)
    documents = [small.alone(kind, model, record, tmp_path) for record in records]
    truth = summed(cast(copy.deepcopy(naive), torch.float64), documents)
    loss, found = gradients(ours, batch)
    assert {name for name, grad in found.items() if grad is not None} == {*truth[1]}
    for name in [name for name in truth[1] if name.endswith("k_proj.bias") and "tower" in name]:
        del truth[1][name]  # 0 but for rounding
    ours = loss.detach(), {name: found[name] for name in truth[1]}
    assert_exact_run(ours, summed(naive, documents), truth, torch.float32)
