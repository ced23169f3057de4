"""Columns of media are read, refused, or said to be left out: in every form, by every task."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Audio, Dataset, Features, Image, Value, Video
from small_tokenizer import small_tokenizer

from longctx.errors import UserError
from longctx.train.data.packed_rows import RowOptions, build_dataset
from longctx.train.data.reading.image_sources import undecoded
from longctx.train.data.reading.media import media_held, medium_named
from longctx.train.data.reading.records import as_document
from longctx.train.data.reading.sources import read_documents
from longctx.train.data.text.remarks import media_tokens
from longctx.train.options.config import DataArguments

Q, A = {"role": "user", "content": "What?"}, {"role": "assistant", "content": "A heron."}
CHAT = {"messages": [Q, A]}
TURNS = {"prompt": [Q], "chosen": [A], "rejected": [{**A, "content": "A cat."}]}
PAIR = {"prompt": "What?", "chosen": "A heron.", "rejected": "A cat."}
RATED = {"prompt": "What?", "completion": "A heron.", "label": True}
TEXT = {"text": "A heron stands in the reeds."}
COMPLETION = {"prompt": "What?", "completion": "A heron."}
MP4 = b"\0\0\0\x18ftypisom"
PNG = b"\x89PNG\r\n\x1a\n" + bytes(20)


def asking(text: str) -> dict[str, Any]:
    return {"messages": [{**Q, "content": text}, A]}


@pytest.fixture
def folder(tmp_path) -> Path:
    for name in ("a.png", "a.mp4", "a.wav"):
        (tmp_path / name).write_bytes(PNG)
    return tmp_path


REFUSED = {
    "a file of a video": (TEXT | {"video": "no.mp4"}, "text", "has `video`, which is not read"),
    "a list of links": (PAIR | {"videos": ["https://e.org/a.webm?t=3"]}, "pairs", "has `videos`"),
    "sounds of a rated answer": (RATED | {"audios": ["a.FLAC"]}, "rated", "has `audios`"),
    "a sound as bytes": (COMPLETION | {"audio": {"bytes": b"ID3"}}, "text", "has `audio`"),
    "an array": (TEXT | {"audio": {"array": [0.0], "sampling_rate": 8}}, "text", "has `audio`"),
    "a title in a chat": (CHAT | {"video": "Herons"}, "text", "has `video`"),
    "a title in a pair of turns": (TURNS | {"video": "Herons"}, "pairs", "has `video`"),
    "a title and a place": (TEXT | {"text": "<video> of", "video": "Herons"}, "text", "`video`"),
    "a place and no video": (asking("<video>What?") | {"videos": []}, "text", "and no video"),
    "a place and null": (asking("<image>What?") | {"images": None}, "text", "and no image"),
    "a place in a pair": (
        PAIR | {"prompt": "<|image_pad|>", "image": ""},
        "pairs",
        "and no image",
    ),
    "an image beside text": (TEXT | {"image": "a.png"}, "text", "it has images"),
    "an imagefolder": (TEXT | {"file_name": "b/c.png"}, "text", "an image in `file_name`"),
    "two names of it": (TEXT | {"mask_file_name": "c.png"}, "text", "in `mask_file_name`"),
    "a struct": (TEXT | {"cover": {"bytes": PNG}}, "text", "an image in `cover`"),
    "its bytes": (TEXT | {"cover": PNG}, "text", "an image in `cover`"),
    "a file that is there": (PAIR | {"clip": "a.mp4"}, "pairs", "a video in `clip`"),
    "the file itself": (TEXT | {"x": ["data:audio/wav;base64,AA=="]}, "text", "sound in `x`"),
    "deep inside": (TEXT | {"meta": {"media": [{"path": "a.wav"}]}}, "text", "sound in `meta`"),
    "a name and a place": (asking("<video>?") | {"clip": "no.mp4"}, "text", "a video in `clip`"),
    "another image": (CHAT | {"image": "b.png", "mask": "a.png"}, "text", "image in `mask`"),
    "a key of a turn": ({"messages": [{**Q, "images": ["a.png"]}, A]}, "text", "has `images`"),
    "a sound of a turn": ({"messages": [Q, {**A, "audio": {"id": "x"}}]}, "text", "has `audio`"),
    "a part of a video": (
        {"messages": [{**Q, "content": [{"type": "video", "video": "a.mp4"}]}, A]},
        *("text", "has a video in a part, which is not read: give frames"),
    ),
    "a text that holds one": (
        {"messages": [{**Q, "content": [{"text": "What?", "image": "a.png"}]}, A]},
        *("text", "has a part with a text and `image`"),
    ),
}


@pytest.mark.parametrize("with_images", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_media_that_nobody_reads_are_refused(case, with_images, folder) -> None:
    record, rows, said = REFUSED[case]
    with pytest.raises(UserError) as error:
        as_document(record, "f:1", rows=rows, folder=folder, with_images=with_images)
    if case == "an image beside text" and with_images:
        said = "images stand in conversations"
    assert str(error.value).startswith("f:1") and said in str(error.value)


UNREAD = {
    "a title": (TEXT | {"video": "Herons, part 2"}, "text", ["video"]),
    "images' titles": (TEXT | {"image": "A heron", "audio": "no"}, "text", ["image", "audio"]),
    "beside a pair of strings": (PAIR | {"video": "Herons"}, "pairs", ["video"]),
    "a page of videos": (TEXT | {"video": "https://e.org/watch?v=a.b"}, "text", ["video"]),
}
PLAIN = {
    "empty columns": CHAT | {"images": [], "videos": None, "audio": ""},
    "a word in a text": {"text": "HTML has <video> and <image>."},
    "a word in a chat": asking("What is <image> in RSS?"),
    "other names": TEXT | {"file_name": "main.py", "url": "https://e.org/a.png", "clip": "b.mp4"},
    "other bytes": TEXT | {"hash": b"\x00\xff" * 8, "path": "x\0.png", "n": 3.5},
}


@pytest.mark.parametrize("case", UNREAD)
def test_what_only_has_the_name_is_not_read(case, folder) -> None:
    record, rows, unread = UNREAD[case]
    document = as_document(record, "f:1", rows=rows, folder=folder)
    assert document.unread == unread
    plain = {key: value for key, value in record.items() if key not in unread}
    assert document.content == as_document(plain, "f:1", rows=rows).content


@pytest.mark.parametrize("case", PLAIN)
def test_other_records_are_read_as_before(case, folder) -> None:
    document = as_document(PLAIN[case], "f:1", folder=folder)
    assert document.unread == [] and document.kind in ("text", "chat")


def test_a_second_name_of_a_image_is_no_second_image(folder) -> None:
    """As LLaVA's `id`, and a list of files beside parts."""
    for more in ({"image": "a.png"}, {"images": [{"path": "a.png"}]}):
        names = {"id": "a.png", "file_name": "a.png"}
        document = as_document(CHAT | more | names, "f:1", folder=folder, with_images=True)
        assert len(document.content["pictures"]) == 1


def test_media_by_value() -> None:
    begins = {
        b"RIFF1234WEBPVP8 ": "image",
        b"RIFF1234WAVEfmt ": "audio",
        b"\0\0\0\x18ftypisom": "video",
        b"\0\0\0\x18ftypheic": "image",
        b"\x1aE\xdf\xa3": "video",
        b"fLaC": "audio",
        b"hello": None,
    }

    def held(value: Any) -> Any:
        return next((medium for medium, _ in media_held(value, None, lambda medium: False)), None)

    assert {data: held(data) for data in begins} == begins
    for medium, data in (("image", PNG), ("audio", b"RIFF1234WAVEfmt "), ("video", MP4)):
        assert held(base64.b64encode(data + bytes(60)).decode()) == medium
    assert held(str({"bytes": PNG, "path": None})) == "image" and held("/9j/ is a path") is None
    assert medium_named({"path": "x.mkv", "bytes": None}) == "video"
    assert medium_named(["x", "x.OGG"]) == "audio" and medium_named("x.mp4 is a film") is None


@pytest.mark.parametrize(("kind", "said"), [(Audio, "`audio`"), (Video, "`video`"), (Image, "")])
def test_a_parquets_own_columns(kind, said, tmp_path) -> None:
    """Nothing is decoded: that would ask for packages, and give values without a name."""
    name = kind.__name__.lower()
    schema = Features({"text": Value("string"), name: kind()}).arrow_schema
    rows = pa.Table.from_pylist([{**TEXT, name: {"bytes": PNG, "path": "a"}}], schema=schema)
    pq.write_table(rows, tmp_path / "rows.parquet")
    with pytest.raises(UserError, match=f"row 0.*{said or 'images'}"):
        [*read_documents([tmp_path / "rows.parquet"])]
    (record,) = undecoded(Dataset(rows))
    assert set(record[name]) == {"bytes", "path"}
    pq.write_table(pa.Table.from_pylist([{**TEXT, "page": {"bytes": PNG}}]), tmp_path / "b.parquet")
    with pytest.raises(UserError, match="row 0 has an image in `page`"):
        [*read_documents([tmp_path / "b.parquet"])]


def built(tmp_path: Path, records: list[Any], **options: Any) -> Any:
    (tmp_path / "f.jsonl").write_text("\n".join(map(json.dumps, records)))
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|audio_pad|>"]})
    files = None if "dataset_name" in options else [str(tmp_path / "f.jsonl")]
    args = DataArguments(cache_dir=str(tmp_path / "cache"), **options)
    given = dict(files=files, seq_len=64, vocab_size=None, seed=0)
    return build_dataset(args, tokenizer, RowOptions(**given))


@pytest.mark.parametrize("how", ["files", "dataset", "stream"])
def test_one_line_says_what_is_not_read(how, tmp_path, capsys) -> None:
    records = [TEXT | {"video": ""}, TEXT | {"video": "Herons"}, TEXT | {"video": "Reeds"}]
    records[1]["text"] = "A <|audio_pad|> heron"
    options = {}
    if how != "files":
        Dataset.from_list(records).save_to_disk(tmp_path / "saved")
        options = dict(dataset_name=str(tmp_path / "saved"), streaming=how == "stream")
    for _ in range(2):  # the second time from the cache
        for row in built(tmp_path, records, **options):
            assert len(row["input_ids"]) == 64
        said = capsys.readouterr().out
        assert said.count("`video` names no file and its text has no place for one") == 1
        assert said.count("its text has <|audio_pad|>, a token of media, and nothing is") == 1
        assert how == "stream" or ("f.jsonl:2: its" if how == "files" else "row 1: its") in said


def test_tokens_of_media() -> None:
    tokenizer = small_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|image|>", "[IMG]", "<imp>"]})
    assert sorted(media_tokens(tokenizer).values()) == ["<|image|>", "[IMG]"]

    class Config:
        def to_dict(self) -> dict[str, Any]:
            return {"audio_token_id": tokenizer.convert_tokens_to_ids("<imp>"), "image_size": 3}

    assert "<imp>" in media_tokens(tokenizer, Config()).values()
