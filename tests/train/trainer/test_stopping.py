"""What ended the trained spans is what a saved model names as its end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from datasets import Dataset
from small_tokenizer import PLAIN_CHATML, small_tokenizer
from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

from longctx.train.data.pack.packing import PackingStats, pack
from longctx.train.data.pack.packing_groups import GroupStats, pack_groups
from longctx.train.data.reading.records import as_document
from longctx.train.data.text.encoding import encode
from longctx.train.data.text.encoding_groups import encode_groups
from longctx.train.loading.stop_tokens import add_ends
from longctx.train.trainer.stopping import name_trained_ends, trained_ends

CHAT = {
    "messages": [{"role": "user", "content": "value?"}, {"role": "assistant", "content": "query"}]
}
PAIR = {"prompt": CHAT["messages"][:1], "chosen": CHAT["messages"][1:]}
PAIR["rejected"] = [{"role": "assistant", "content": "softmax"}]
END, PAD = 1, 2


def base_tokenizer(template: str = PLAIN_CHATML):
    """A base model's: <|pad|> ends its texts."""
    tokenizer = small_tokenizer(template)
    tokenizer.eos_token = "<|pad|>"
    return tokenizer


def text_rows(tokenizer, *records, seq_len=64):
    pieces = encode([as_document(record, "f:1") for record in records], tokenizer)
    stats = PackingStats()
    return [*pack(pieces, seq_len, long_documents="split", pad_token_id=0, stats=stats)]


def pair_rows(tokenizer, *records):
    groups = encode_groups([as_document(r, "f:1", rows="pairs") for r in records], tokenizer)
    options = dict(long_documents="split", pad_token_id=0, stats=GroupStats(kind="pairs"))
    return [*pack_groups(groups, 64, where=str, **options)]


@pytest.mark.parametrize(
    ("make", "records", "ends"),
    [
        (text_rows, [CHAT] * 3, [END]),
        (text_rows, [{"text": "value"}] * 3, [PAD]),
        (text_rows, [CHAT] * 3 + [{"text": "value"}], [END, PAD]),
        (text_rows, [CHAT] * 300 + [{"text": "value"}], [END]),
        (text_rows, [{"prompt": "a", "completion": "b"}] * 3, [PAD]),
        (pair_rows, [PAIR] * 3, [END]),
    ],
    ids=["chats", "texts", "both", "hardly any text", "completions", "pairs"],
)
def test_the_ends_that_were_trained_are_found_in_the_rows(make, records, ends):
    tokenizer = base_tokenizer()
    rows = make(tokenizer, *records)
    assert trained_ends(rows, tokenizer) == ends
    names = ("input_ids", "labels", "position_ids")
    lists = [{name: list(map(int, row[name])) for name in names} | {"more": [1]} for row in rows]
    stored = Dataset.from_list(lists).with_format("numpy")
    assert trained_ends(stored, tokenizer) == ends
    assert trained_ends(stored.remove_columns("labels"), tokenizer) == []


def test_the_place_where_a_row_cuts_a_text_is_no_end():
    tokenizer = base_tokenizer()
    rows = text_rows(tokenizer, {"text": "<|im_end|>" * 40}, seq_len=8)
    assert trained_ends(rows, tokenizer) == [PAD]


def test_rows_of_others_have_no_ends():
    assert trained_ends([{"input_ids": [1, 2]}], base_tokenizer()) == []
    assert trained_ends(iter([{"input_ids": [1, 2]}]), base_tokenizer()) == []


@pytest.mark.parametrize(
    ("before", "after"), [(None, 1), (1, 1), (2, [2, 1]), ([2, 3], [2, 3, 1]), ([1, 2], [1, 2])]
)
def test_an_end_is_added_and_none_replaced(before, after):
    config = GenerationConfig(eos_token_id=before)
    assert add_ends(config, [1]) == ([] if before == after else [1])
    assert config.eos_token_id == after


def saved(folder: Path, tokenizer) -> str | None:
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        eos_token_id=PAD,
    )
    model = LlamaForCausalLM(config)
    line = name_trained_ends(model, tokenizer, trained_ends(text_rows(tokenizer, CHAT), tokenizer))
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return line


def test_a_base_model_that_learned_chatml_stops(tmp_path):
    line = saved(tmp_path, base_tokenizer())
    assert line and line.startswith("what was trained ends with <|im_end|>: ")
    for name in ("config.json", "generation_config.json"):
        assert json.loads((tmp_path / name).read_text())["eos_token_id"] == [PAD, END]
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert tokenizer.eos_token == "<|im_end|>" and "<|pad|>" in tokenizer.all_special_tokens


def test_the_token_of_the_next_role_ends_no_text(tmp_path):
    """As with GLM, whose tokenizer keeps <|endoftext|>."""
    template = PLAIN_CHATML.replace("<|im_end|>", "")
    assert saved(tmp_path, base_tokenizer(template))
    assert AutoTokenizer.from_pretrained(tmp_path).eos_token == "<|pad|>"
    start = base_tokenizer().convert_tokens_to_ids("<|im_start|>")
    assert GenerationConfig.from_pretrained(tmp_path).eos_token_id == [PAD, start]


def test_an_end_that_was_named_is_not_said(tmp_path):
    assert saved(tmp_path, base_tokenizer(PLAIN_CHATML.replace("<|im_end|>", "<|pad|>"))) is None
