"""`--show_example`: documents, boundaries and trained tokens of one packed row."""

from __future__ import annotations

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from rich.console import Console
from small_run import prepare
from small_tokenizer import small_tokenizer

from longctx.train.commands import train
from longctx.train.data.pack.packing import Piece, build_row
from longctx.train.data.pack.packing_groups import build_group_row
from longctx.train.data.reading.groups import AnswerGroup
from longctx.train.report import example
from longctx.train.report.example import numbered_images, show_example


def row():
    tokenizer = small_tokenizer()
    asked = tokenizer("why?")["input_ids"]
    told = tokenizer("so.<|im_end|>", add_special_tokens=False)["input_ids"]
    ids = np.asarray(asked + told, np.int32)
    piece = Piece(ids, np.arange(len(ids)) >= len(asked), 0)
    return build_row([piece, piece], 3 * len(ids), tokenizer.pad_token_id), len(ids), len(told)


def shown(**options) -> str:
    out = io.StringIO()
    packed, _, _ = row()
    console = Console(file=out, width=100, **options)
    show_example(packed, ["chats.jsonl:7", "[b].txt"], small_tokenizer(), console)
    return out.getvalue()


def test_without_colour_trained_tokens_stand_between_marks() -> None:
    _, tokens, trained = row()
    text = shown()
    assert f"one row of {3 * tokens} tokens, {2 * trained} of them trained" in text
    assert f"1 of 2: chats.jsonl:7, {tokens} tokens, {trained} trained" in text
    assert f"2 of 2: [b].txt, {tokens} tokens" in text
    assert text.count("<|bos|>why?«so.<|im_end|>»") == 2
    assert f"padding, {tokens} tokens" in text


def test_with_colour_they_are_green() -> None:
    text = shown(force_terminal=True, color_system="standard")
    assert "\x1b[1;32mso.<|im_end|>" in text and "«" not in text
    assert "\x1b[2m<|bos|>why?" in text


def test_names_are_printable() -> None:
    out = io.StringIO()
    packed, _, _ = row()
    console = Console(file=out, width=100)
    show_example(packed, ["a\nb\x1b[31m.txt", "caf\udce9.txt"], small_tokenizer(), console)
    assert r"1 of 2: a\nb\x1b[31m.txt, " in out.getvalue()
    assert r"2 of 2: caf\udce9.txt, " in out.getvalue()


def test_long_stretches_are_shortened(monkeypatch) -> None:
    monkeypatch.setattr(example, "STRETCH", 6)
    assert "<|b [... 5 characters ...] hy?" in shown()


@pytest.mark.parametrize(
    ("rows", "sides"),
    [("pairs", ("chosen", "rejected")), ("rated", ("undesirable", "mismatched"))],
)
def test_a_prompt_is_shown_once_before_its_answers(rows, sides) -> None:
    tokenizer = small_tokenizer()
    texts = ["why?", "so.<|im_end|>", "no.<|im_end|>"]
    ids = [np.array(tokenizer(t, add_special_tokens=False)["input_ids"], np.int32) for t in texts]
    group = AnswerGroup(ids[0], tuple(ids[1:]), (0, 1) if rows == "pairs" else (1, 2))
    packed = build_group_row([group, group], 3 * len(group), tokenizer.pad_token_id)
    out = io.StringIO()
    console = Console(file=out, width=100)
    show_example(packed, ["a:1", "a:2"], tokenizer, console, rows)
    lines = out.getvalue().splitlines()
    lengths = [len(part) for part in ids]
    assert lines[1:7] == [
        f"── 1 of 2: a:1, prompt, {lengths[0]} tokens",
        "why?",
        f"── 1 of 2: a:1, {sides[0]}, {lengths[1]} tokens",
        "«so.<|im_end|>»",
        f"── 1 of 2: a:1, {sides[1]}, {lengths[2]} tokens",
        "«no.<|im_end|>»",
    ]
    assert lines[7].startswith("── 2 of 2: a:2, prompt")
    assert lines[-1] == f"── padding, {len(group)} tokens"


@pytest.mark.usefixtures("reference_kernels")
def test_the_flag_prints_a_row_and_trains_nothing(tmp_path: Path, capsys) -> None:
    flags = prepare(tmp_path)
    chat = tmp_path / "chat.jsonl"
    turns = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there."}]
    chat.write_text(json.dumps({"messages": turns}))
    output = ["--output_dir", str(tmp_path / "run"), "--show_example"]
    train.main([*flags, "--train_file", str(chat), *output])
    out = capsys.readouterr().out
    assert "«Hello there.<|im_end|>»" in out and "chat.jsonl:1" in out
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("reference_kernels")
def test_the_flag_works_beside_an_earlier_run(tmp_path: Path, capsys) -> None:
    flags = [*prepare(tmp_path), "--output_dir", str(tmp_path / "run")]
    train.main([*flags, "--max_steps", "1"])
    train.main([*flags, "--show_example"])
    assert "one row of 64 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["gemma3", "llava", "qwen3_vl"])
def test_tokens_of_images_are_counted(kind, tmp_path: Path, capsys) -> None:
    small = pytest.importorskip("small_images")
    model = small.image_model(tmp_path / "model", kind)
    file = small.write(tmp_path, [small.asked("red.png", "wide.png"), small.asked()])
    flags = ["--model_name_or_path", str(model), "--train_file", str(file), "--use_cpu"]
    flags += ["--cache_dir", str(tmp_path / "cache"), "--seq_len", "256", "--show_example"]
    train.main([*flags, "--output_dir", str(tmp_path / "run")])
    out = capsys.readouterr().out
    begin, tokens, end = {
        "gemma3": ("<start_of_image>", (4, 4), "<end_of_image>"),
        "llava": ("", (16, 16), ""),  # nothing stands between its images
        "qwen3_vl": ("<|vision_start|>", (6, 16), "<|vision_end|>"),
    }[kind]
    places = [f"{begin}[image, {count} tokens]{end}" for count in tokens]
    lines = "".join(out.splitlines())
    assert lines.index(places[0]) < lines.rindex(places[1]) and lines.count("[image, ") == 2
    assert "What colour is it?" in out and out.count("«It is red.<|im_end|>»") == 2
    assert "_pad|>" not in out and "soft_token" not in out and "<image>" not in out
    assert not (tmp_path / "run").exists()


def test_each_image_of_a_row_has_its_number() -> None:
    """Two side by side, one whose lines end with a token of their own, and text around them."""

    class ImageProcessor:
        def marks(self, ids: np.ndarray) -> np.ndarray:
            return ids == 9

        def opened(self, source: int, at: str) -> Any:
            return SimpleNamespace(size=(source, 1))

        def tokens_of(self, size: tuple[int, int], at: str) -> int:
            return size[0]

    ids = [1, 9, 9, 9, 9, 9, 2, 9, 9, 8, 9, 9, 8, 0]
    found = numbered_images(ids, ImageProcessor(), [2, 3, 4])
    assert found.tolist() == [0, 1, 1, 2, 2, 2, 0, 3, 3, 3, 3, 3, 0, 0]
    assert not numbered_images([1, 2, 0], ImageProcessor(), []).any()
