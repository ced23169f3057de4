"""Rows with pictures: their tokens and what is trained of them, from files and from datasets."""

from __future__ import annotations

import functools
from typing import Any

import pytest

small = pytest.importorskip("small_pictures")


@pytest.fixture(scope="module")
def model_of(tmp_path_factory) -> Any:
    """The folder of a model of a kind, made once."""
    return functools.cache(lambda kind: small.seeing_model(tmp_path_factory.mktemp(kind), kind))


@pytest.mark.parametrize("kind", small.PLACES)
def test_tokens_and_masks_are_those_of_the_processor(kind, model_of, tmp_path) -> None:
    model, record = model_of(kind), small.in_turns()
    row = small.of_file(model, tmp_path, [record]).rows(one_document=True)[0]
    theirs = small.alone(kind, model, record, tmp_path)
    assert row["input_ids"].tolist() == theirs["input_ids"][0].tolist()
    assert row["labels"].tolist() == theirs["labels"][0].tolist()
