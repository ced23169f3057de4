"""Images of records: where they stand, and files of strangers."""

from __future__ import annotations

import base64
import io
import json
import random
from pathlib import Path
from typing import Any

import pytest

from longctx.errors import UserError
from longctx.train.data.reading.image_records import read_with_images
from longctx.train.data.reading.image_sources import source_of
from longctx.train.data.reading.places import MARK, in_parts
from longctx.train.data.reading.records import as_document

Image = pytest.importorskip("PIL.Image")
opened = pytest.importorskip("longctx.train.data.images.image")
rows = pytest.importorskip("longctx.train.data.images.rows")

TEXT, PLACE = {"type": "text", "text": "What?"}, {"type": "image"}
ANSWER = {"role": "assistant", "content": "A heron."}


def file_of(image: Any, kind: str = "PNG", **options: Any) -> bytes:
    found = io.BytesIO()
    image.save(found, kind, **options)
    return found.getvalue()


def halves(mode: str = "RGB", size: tuple[int, int] = (8, 4)) -> Any:
    """The left half is dark, the right half bright."""
    image = Image.new("L", size, 20)
    image.paste(220, (size[0] // 2, 0, *size))
    return image.convert(mode)


# --- where they stand --------------------------------------------------------------------------

ASKED = [PLACE, TEXT]
FORMS = {
    "a part with its image": dict(
        messages=[{"role": "user", "content": [{"type": "image", "image": "a"}, TEXT]}, ANSWER]
    ),
    "a part with a path": dict(
        messages=[{"role": "user", "content": [{"type": "image", "path": "a"}, TEXT]}, ANSWER]
    ),
    "a part without, and a column": dict(
        messages=[{"role": "user", "content": ASKED}, ANSWER], images=["a"]
    ),
    "no place": dict(messages=[{"role": "user", "content": "What?"}, ANSWER], images=["a"]),
    "one image in a column": dict(
        messages=[{"role": "user", "content": "What?"}, ANSWER], image="a"
    ),
    "LLaVA": dict(
        conversations=[
            {"from": "human", "value": "<image>What?"},
            {"from": "gpt", "value": "A heron."},
        ],
        image="a",
    ),
    "a part without a type": dict(
        messages=[{"role": "user", "content": [{"image": "a"}, {"text": "What?"}]}, ANSWER]
    ),
    "TRL's prompt and completion": dict(
        prompt=[{"role": "user", "content": ASKED}], completion=[ANSWER], images=["a"]
    ),
    "strings": dict(prompt="<image>What?", completion="A heron.", images=["a"]),
    "Alpaca": dict(instruction="<image>What?", input="", output="A heron.", images=["a"]),
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_the_same_conversation(form) -> None:
    content, images = read_with_images(FORMS[form], "text", "f:1")
    assert [*map(in_parts, content["messages"])] == [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "content": [{"type": "text", "text": "A heron."}]},
    ]
    assert images == ["a"] and "untrained" not in content


def test_openai_and_several_images_in_their_order() -> None:
    url = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
    content = [
        TEXT,
        url,
        {"type": "image", "base64": "BB=="},
        "and",
        {"type": "input_image", "url": "c"},
    ]
    turns = [
        {"role": "system", "content": "Look."},
        {"role": "user", "content": content},
        ANSWER | {"train": False},
        {"role": "user", "content": [{"type": "image", "image": "d"}]},
        ANSWER,
    ]
    content, images = read_with_images({"messages": turns}, "text", "f:1")
    assert images == [url["image_url"], "data:image;base64,BB==", "c", "d"]
    assert [part["type"] for part in in_parts(content["messages"][1])["content"]] == [
        *("text", "image", "image", "text", "image")
    ]
    assert in_parts(content["messages"][3])["content"] == [PLACE]
    assert content["untrained"] == [2]


def test_text_alone_has_none() -> None:
    record = dict(messages=[{"role": "user", "content": "Write <image>."}, ANSWER])
    content, images = read_with_images(record, "text", "f:1")
    assert content["messages"][0]["content"] == "Write <image>." and not images


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (dict(images=["a", "b"]), "f:1 has 1 image parts or <image> and 2 images"),
        (dict(images=[]), "f:1 has 1 image parts or <image> and 0 images"),
        ({}, "f:1 has 1 image parts or <image> and 0 images"),
        *(
            (
                dict(messages=[{"role": "user", "content": [{**PLACE, "image": "a", **own}]}]),
                f"f:1: turn 1 of `messages` has an image with `{[*own][0]}`, which is not read",
            )
            for own in (dict(resized_height=16), dict(max_pixels=9), dict(detail="low"))
        ),
        (dict(images=[{"path": "a", "min_pixels": 4}]), "f:1: `images` has an image with"),
        (
            dict(messages=[{"role": "user", "content": [{**PLACE, **TEXT, "type": "image"}]}]),
            "has a part with an image and `text`",
        ),
        (dict(images=["a"], image="a"), "f:1 has `images` and `image`: leave one out"),
        (dict(videos=["v"], images=["a"]), "f:1 has `videos`, which is not read: give frames"),
        (
            dict(messages=[{"role": "user", "content": [{"type": "video"}]}, ANSWER]),
            "f:1: turn 1 of `messages` has a video in a part, which is not read: give frames of it",
        ),
        (
            dict(messages=[{"role": "user", "content": f"{MARK}"}, ANSWER], images=["a"]),
            "which stands for an image here",
        ),
        (
            dict(
                messages=[{"role": "user", "content": [{"type": "image", "image": "a"}]}, ANSWER],
                images=["b"],
            ),
            "f:1 has images in turns and in a column: leave one out",
        ),
        (
            dict(messages=[ANSWER], images=["a"]),
            "f:1 has images and no turn of a user, before which they stand",
        ),
        (dict(messages=[{"role": "user", "content": [{"type": "x"}]}, ANSWER]), "not text"),
        (dict(messages=[{"role": "user", "content": ASKED}]), "no assistant turn"),
        (dict(messages="x"), "`messages` must be a list of turns"),
        (dict(messages=None), "found `messages` (null)"),
        (
            dict(messages=[{"role": "user", "content": "?"}, {**ANSWER, "content": ASKED}])
            | dict(images=["a"]),
            "f:1: answer 1 has an image: models that are trained here write text alone",
        ),
    ],
)
def test_what_is_refused(change, said) -> None:
    record = dict(messages=[{"role": "user", "content": ASKED}, ANSWER]) | change
    with pytest.raises(UserError) as error:
        as_document(record, "f:1", folder=Path("nowhere"), with_images=True)
    assert said in str(error.value) and "\n" not in str(error.value)


# --- files of strangers ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_each_format(kind, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(file_of(halves("P" if kind == "GIF" else "RGB", (64, 32)), kind))
    source = source_of("a", tmp_path, "it")
    found = opened.open_image(source, "it")
    assert found.mode == "RGB" and found.size == (64, 32)
    assert found.getpixel((5, 5))[0] < 40 and found.getpixel((60, 5))[1] > 200


def test_bytes_urls_of_data_and_images_of_pillow() -> None:
    data = file_of(halves())
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    image = halves()
    for given in (data, url, {"url": url}, {"bytes": data, "path": "x.png"}, image):
        source = source_of(given, Path("nowhere"), "it")
        assert opened.open_image(source, "it").getpixel((7, 0)) == (220, 220, 220)
    assert opened.open_image(image, "it") is image


def test_transparent_parts_are_white() -> None:
    clear = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    clear.putpixel((0, 0), (10, 20, 30, 255))
    data = file_of(clear)
    found = opened.open_image(data, "it")
    assert found.getpixel((0, 0)) == (10, 20, 30) and found.getpixel((3, 3)) == (255, 255, 255)
    palette = Image.new("P", (4, 4), 0)
    palette.putpalette([9, 9, 9] * 256)
    data = file_of(palette, "PNG", transparency=0)
    assert opened.open_image(data, "it").getpixel((1, 1)) == (255, 255, 255)
    assert not opened.is_plain(data, "it") and opened.is_plain(file_of(halves()), "it")


def test_other_colours_and_depths() -> None:
    deep = Image.new("I;16", (4, 4), 220 * 256)
    assert opened.open_image(file_of(deep), "it").getpixel((1, 1)) == (220, 220, 220)
    ink = Image.new("CMYK", (16, 16), (0, 0, 0, 0))
    assert min(opened.open_image(file_of(ink, "JPEG"), "it").getpixel((1, 1))) > 250
    one = Image.new("1", (4, 4), 1)
    assert opened.open_image(file_of(one), "it").getpixel((1, 1)) == (255, 255, 255)
    with pytest.raises(UserError, match="it has numbers of 32 bits for pixels"):
        opened.open_image(file_of(Image.new("F", (4, 4), 1.0), "TIFF"), "it")


def test_as_the_camera_was_held() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    data = file_of(halves("RGB", (64, 32)), "JPEG", exif=exif, quality=95)
    assert opened.open_image(data, "it").size == (32, 64)
    assert opened.open_image(data, "it").getpixel((5, 5))[0] < 40
    assert not opened.is_plain(data, "it")


def test_a_phones_second_image_is_left_out() -> None:
    data = file_of(halves("RGB", (64, 32)), "MPO", save_all=True, append_images=[halves()])
    assert opened.open_image(data, "it").size == (64, 32)


def refused(given: Any, folder: Path = Path("nowhere")) -> str:
    with pytest.raises(UserError) as error:
        opened.open_image(source_of(given, folder, "it"), "it")
    assert "\n" not in str(error.value) and str(error.value).startswith("it")
    return str(error.value)


def test_more_than_one_image() -> None:
    two = [halves("RGB"), halves("L").convert("RGB").rotate(180)]
    for kind in ("GIF", "TIFF", "WEBP", "PNG"):
        data = file_of(two[0], kind, save_all=True, append_images=two[1:])
        assert refused(data) == "it has 2 frames or pages: give one image"


def test_no_image_and_half_of_one() -> None:
    data = file_of(Image.effect_noise((64, 64), 90), "PNG")
    assert "is no image: PNG, JPEG" in refused(b"hello")
    assert "is no image" in refused(b"")
    assert "is no image" in refused(b"<svg xmlns='http://www.w3.org/2000/svg'/>")
    assert "is a broken image" in refused(data[: len(data) // 2])
    jpeg = file_of(Image.effect_noise((64, 64), 90), "JPEG")
    assert "is a broken image" in refused(jpeg[: len(jpeg) // 2])


def test_sizes_that_no_tower_takes(monkeypatch) -> None:
    bomb = file_of(Image.new("1", (30000, 20000)))
    assert len(bomb) < 2**18
    assert "it has 30000 x 20000 pixels: at most" in refused(bomb) or "too many" in refused(bomb)
    small = file_of(Image.new("1", (9000, 8000)))
    assert "it has 9000 x 8000 pixels: at most 67,108,864 are read" in refused(small)
    line = file_of(Image.new("L", (402, 2)))
    assert "one side is more than 200 times the other" in refused(line)
    monkeypatch.setattr(opened, "MOST_BYTES", 2**20)
    assert "it has 2 MiB: at most 1 are read" in refused(b"x" * 2**21)


def test_paths(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    (folder / "in").mkdir(parents=True)
    for path in (tmp_path / "out.png", folder / "a.png", folder / "in/b.png"):
        path.write_bytes(file_of(halves()))
    for name in ("a.png", "in/b.png", "in/../a.png", str(folder / "a.png")):
        assert source_of(name, folder, "it").is_file()
    (folder / "link.png").symlink_to("../out.png")
    (folder / "loop").symlink_to("loop")
    (folder / "near.png").symlink_to("a.png")
    assert source_of("near.png", folder, "it").is_file()
    for name in ("../out.png", "link.png", str(tmp_path / "out.png"), "/etc/hostname"):
        assert f"it, {name}, leads out of {folder}" in refused(name, folder)
    for name in ("no.png", "in", "."):
        assert "is no file in" in refused(name, folder)
    for name in ("a\0b", "x" * 5000, "loop"):
        refused(name, folder)
    for url in ("https://example.org/a.png", "file:///etc/hostname", "s3://b/a.png"):
        assert "is a URL, and nothing is fetched" in refused(url, folder)
    for data in ("data:image/png;base64,%%", "data:image/png,abc", "data:,"):
        assert "base64" in refused(data, folder)
    for other in (None, 3, [], "", {"width": 3}):
        refused(other, folder)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF"])
def test_whatever_is_written_into_a_file(kind) -> None:
    """An image, or one line."""
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {} if kind in ("BMP", "GIF") else {"exif": exif}
    whole = file_of(Image.effect_noise((24, 16), 90).convert("RGB"), kind, **options)
    draws = random.Random(kind)
    for _ in range(150):
        data = bytearray(whole)
        for _ in range(draws.choice([1, 3, 20])):
            data[draws.randrange(min(len(data), draws.choice([64, 10**6])))] = draws.randrange(256)
        data = data[: draws.choice([len(data), draws.randrange(len(data))])]
        try:
            assert opened.open_image(bytes(data), "it").mode == "RGB"
        except UserError as error:
            assert str(error).startswith("it") and "\n" not in str(error)


# --- rows for trainers -------------------------------------------------------------------------


def written(tmp_path: Path, *records: Any) -> Path:
    (tmp_path / "a.png").write_bytes(file_of(halves()))
    (tmp_path / "clear.png").write_bytes(file_of(Image.new("RGBA", (4, 4))))
    path = tmp_path / "pictures.jsonl"
    path.write_text("\n".join(map(json.dumps, records)))
    return path


def ask(*names: str) -> dict[str, Any]:
    return dict(messages=[{"role": "user", "content": "What?"}, ANSWER], images=list(names))


def test_rows_as_datasets_keeps_them(tmp_path: Path) -> None:
    from datasets import Dataset, List
    from datasets import Image as Column

    text = dict(messages=[{"role": "user", "content": "Hm?"}, ANSWER])
    found = rows.conversations(written(tmp_path, ask("a.png", "clear.png"), text))
    assert found[0]["images"][0] == {"path": str(tmp_path / "a.png"), "bytes": None}
    decoded = Dataset.from_list(found).cast_column("images", List(Column()))
    assert [image.getpixel((3, 3)) for image in decoded[0]["images"]] == [(20,) * 3, (255,) * 3]
    assert decoded[1]["images"] == [] and len(decoded[0]["messages"][0]["content"]) == 3


def test_images_in_a_folder_of_their_own(tmp_path: Path) -> None:
    path = written(tmp_path, ask("a.png"))
    (tmp_path / "lists").mkdir()
    path = path.rename(tmp_path / "lists" / "pictures.jsonl")
    found = rows.conversations(path, folder=tmp_path)
    assert found[0]["images"] == [{"path": str(tmp_path / "a.png"), "bytes": None}]


@pytest.mark.parametrize(
    ("record", "said"),
    [
        (ask("none.png"), ":2: image 1, none.png, is no file in"),
        (ask("a.png", "pictures.jsonl"), ":2: image 2 is no image"),
        ([], ":2: expected an object"),
        (
            dict(messages=[{"role": "user", "content": "?"}, ANSWER | {"train": False}, ANSWER]),
            ":2: `train` and `weight` of single turns do not reach other trainers",
        ),
    ],
)
def test_the_line_is_named(record, said, tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        rows.conversations(written(tmp_path, ask("a.png"), record))
    assert str(error.value).startswith(str(tmp_path / "pictures.jsonl") + said)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "latin.jsonl").write_bytes(b"\xff\xfe")
    for name in ("none.jsonl", "latin.jsonl"):
        with pytest.raises(UserError, match="cannot be read"):
            rows.conversations(tmp_path / name)
    (tmp_path / "bad.jsonl").write_text("{")
    with pytest.raises(UserError, match="bad.jsonl:1 is not JSON"):
        rows.conversations(tmp_path / "bad.jsonl")
