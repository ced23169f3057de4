"""An image's file becomes an RGB image, or one line says why not.

What Pillow would open and a model would misread is refused or made plain: animations and several
pages are refused, transparent parts become white (as Qwen's own tools have them), 16 bits a channel
become 8, and an image stands as its camera was held. Its number of pixels is read from the header,
before it is decoded.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import xxhash
from PIL import Image, ImageOps, UnidentifiedImageError

from longctx.errors import UserError
from longctx.train.data.reading.image_sources import Source

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
MOST_BYTES = 2**28
"""The largest file that is opened as an image, in bytes."""
MOST_PIXELS = 2**26
"""8192 x 8192. Decoded they are 192 MiB, which a file of some kilobytes can ask for."""
MOST_TIMES_WIDER = 200
"""Towers refuse narrower ones, as a file that holds one line of pixels."""
_WIDE = ("I;16", "I;16B", "I;16L", "I;16N")
_SIMPLE = ("RGB", "L")


def held(source: Source, at: str) -> bytes | Image.Image:
    """Returns the bytes of an image's file, or the image that is in memory. Raises UserError
    starting with `at` for a file that cannot be read or is too large."""
    if isinstance(source, Image.Image):
        return source
    try:
        nbytes = len(source) if isinstance(source, bytes) else source.stat().st_size
        if nbytes > MOST_BYTES:
            raise UserError(f"{at} has {nbytes >> 20} MiB: at most {MOST_BYTES >> 20} are read")
        return source if isinstance(source, bytes) else source.read_bytes()
    except OSError as error:
        raise UserError(f"{at} cannot be read: {_said(error)}") from None


def pixels_hash(images: Sequence[bytes | Image.Image]) -> int:
    """Returns 63 bits that differ where the bytes of files do, or the pixels of images in memory;
    0 of no image. Paths and times do not count."""
    found = xxhash.xxh3_64()
    for image in images:
        if isinstance(image, Image.Image):
            image = f"{image.mode} {image.size} ".encode() + image.tobytes()
        found.update(xxhash.xxh3_64_digest(image))
    return found.intdigest() >> 1 if images else 0  # of int64


def open_image(source: Source, at: str) -> Image.Image:
    """Returns the image in RGB, 8 bits a channel. Raises UserError starting with `at`, also for a
    file that ends too early."""
    with _opened(source, at) as image, _decoding(at):
        image.load()
        upright = image if _orientation(image) == 1 else ImageOps.exif_transpose(image)
        return upright if upright.mode == "RGB" and source is image else _rgb(upright, at)


def is_plain(source: Source, at: str) -> bool:
    """Whether any reader gives what `open_image` does: nothing is turned or made opaque."""
    with _opened(source, at) as image:
        return image.mode in _SIMPLE and _orientation(image) == 1 and not _is_clear(image)


def _orientation(image: Image.Image) -> int:
    """How the camera was held, by EXIF: 1 upright, from 5 on sideways."""
    try:
        return int(image.getexif().get(0x0112, 1))
    except Exception:  # what is not understood turns nothing
        return 1


def _is_clear(image: Image.Image) -> bool:
    """Whether an image may have transparent parts."""
    return image.mode in ("RGBA", "LA", "La", "RGBa", "PA") or "transparency" in image.info


@contextmanager
def _decoding(at: str) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except UnidentifiedImageError:
        raise UserError(f"{at} is no image: {', '.join(FORMATS)} are read") from None
    except Image.DecompressionBombError:
        raise UserError(f"{at} has too many pixels: {_LIMIT}") from None
    except Exception as error:  # decoders raise whatever a broken file leads them to
        raise UserError(f"{at} is a broken image: {_said(error)}") from None


@contextmanager
def _opened(source: Source, at: str) -> Iterator[Image.Image]:
    if isinstance(source, Image.Image):
        _check(source, at)
        yield source
        return
    data = held(source, at)
    assert isinstance(data, bytes)
    with io.BytesIO(data) as file:
        with _decoding(at), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is refused below
            image = Image.open(file, formats=FORMATS)
        with image:
            _check(image, at)
            yield image


_LIMIT = f"at most {MOST_PIXELS:,} are read, as of 8192 x 8192"


def _check(image: Image.Image, at: str) -> None:
    width, height = image.size
    if width * height > MOST_PIXELS:
        raise UserError(f"{at} has {width} x {height} pixels: {_LIMIT}")
    if not width or not height or max(width, height) > MOST_TIMES_WIDER * min(width, height):
        raise UserError(
            f"{at} has {width} x {height} pixels: one side is more than {MOST_TIMES_WIDER} times "
            "the other"
        )
    with _decoding(at):
        frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    if frames > 1:  # a phone's JPEG (MPO) has others behind the image
        raise UserError(f"{at} has {frames} frames or pages: give one image")


def _rgb(image: Image.Image, at: str) -> Image.Image:
    if image.mode in _WIDE:
        image = image.point(lambda x: x / 256).convert("L")
    if image.mode in ("I", "F"):
        raise UserError(f"{at} has numbers of 32 bits for pixels: write it with 8 bits a channel")
    if _is_clear(image):
        opaque = Image.new("RGBA", image.size, "white")
        opaque.alpha_composite(image.convert("RGBA"))
        image = opaque
    return image.convert("RGB")


def _said(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]
