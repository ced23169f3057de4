"""Tokenizers of strangers are tried before they see data."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from small_tokenizer import small_tokenizer

from longctx.errors import UserError
from longctx.train.data.reading.records import Document
from longctx.train.data.text import tokenizer_trial as trial
from longctx.train.data.text.encoding import encode
from longctx.train.data.text.tokenizer import read_tokenizer


def replace(pattern: str, content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"Regex": pattern}, "content": content}


def saved(folder: Path, **changes: Any) -> str:
    """The small tokenizer with other parts in its tokenizer.json."""
    tokenizer = small_tokenizer()
    tokenizer.save_pretrained(folder)
    content = json.loads(tokenizer.backend_tokenizer.to_str())
    for name, part in changes.items():
        content[name] = content[name] | part if name == "model" else part
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return str(folder)


BOS = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
MANY = {"id": "<|bos|>", "ids": [0] * 150_000, "tokens": ["<|bos|>"] * 150_000}
TEXT, PAIR = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"normalizer": replace("[^y]", "x" * 1000)}, r"makes 1,\d+,\d+ characters of"),
        ({"normalizer": replace("[\u1234]", "x" * 1000)}, "makes .* characters of 150 characters"),
        ({"normalizer": {"type": "Prepend", "prepend": "x" * 10**6}}, "makes .* characters of"),
        (
            {"normalizer": {"type": "Sequence", "normalizers": [replace("[^y]", "xx")] * 9}},
            "makes .* characters of",
        ),
        (
            {
                "post_processor": {
                    "type": "TemplateProcessing",
                    "single": [BOS, TEXT],
                    "pair": [TEXT, PAIR],
                    "special_tokens": {"<|bos|>": MANY},
                }
            },
            "makes 15.* tokens of",
        ),
    ],
    ids=["each character", "a rare character", "a beginning", "nine times", "a template"],
)
def test_a_tokenizer_that_multiplies_text_is_refused(tmp_path: Path, changes, says: str) -> None:
    with pytest.raises(UserError, match=f"the tokenizer of .* {says}.*: give one with"):
        read_tokenizer(saved(tmp_path, **changes))


def test_a_tokenizer_without_an_end_is_refused(monkeypatch, tmp_path: Path) -> None:
    monkeypatch.setattr(trial, "TRIAL_S", 0.2)
    monkeypatch.setattr(trial, "_trial", lambda tokenizer: time.sleep(60))
    with pytest.raises(UserError, match="the tokenizer of .* does not end within 0 s"):
        read_tokenizer(saved(tmp_path))


def test_what_fails_on_a_text_is_one_line_there(tmp_path: Path) -> None:
    """A tokenizer of proteins has no token for other letters, and is no worse for it."""
    words = {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "[UNK]"}
    tokenizer = read_tokenizer(saved(tmp_path, model=words, pre_tokenizer=None))
    document = Document(kind="text", content="b", where="x", replaced_bytes=0)
    with pytest.raises(UserError, match="the tokenizer is damaged .*give another"):
        encode([document], tokenizer)


def test_other_tokens_each_time_are_said(tmp_path: Path, capsys) -> None:
    read_tokenizer(saved(tmp_path / "same"))
    assert "each time" not in capsys.readouterr().out
    assert trial.varies(read_tokenizer(saved(tmp_path / "other", model={"dropout": 0.5})))
    assert "other tokens of a text each time (it drops merges at random, dropout 0.5)" in (
        capsys.readouterr().out
    )
