"""The process that decodes pictures: files of strangers on its standard input, pixels on its standard output.

It can do nothing but compute: no files, no network, bounded memory. Whatever a file makes it do, the server goes on.
PNG, JPEG, WebP and GIF are read. A picture is turned as its EXIF data says, laid on white where it is transparent,
converted to RGB, and resized as transformers' processors of the families do it, with Pillow's bicubic filter.
"""

from __future__ import annotations

import importlib
import io
import signal
import sys
from typing import TYPE_CHECKING

import msgspec

from palestra.sandbox.compute_only import jail
from palestra.server.core.pictures.decoding import DecodeAnswer, DecodeOrder
from palestra.types import Picture
from palestra.types.pictures import UnfitPicture
from palestra.util.answering_child import delimited, read_message
from palestra.util.png import is_resized

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = {"PNG": "PngImagePlugin", "JPEG": "JpegImagePlugin", "WEBP": "WebPImagePlugin", "GIF": "GifImagePlugin"}
SEVERAL = "MPO"
"""What Pillow calls JPEG files of cameras with several pictures in them: the first one is read."""
LATER = ("ImageOps", "MpoImagePlugin", "TiffImagePlugin")
"""Modules that Pillow would import while it reads a file; no file can be opened then."""
MEMORY_BYTES = 4 << 30
CPU_S = 24 * 3600  # of all pictures; the server limits the time of each
ENDS_AFTER = 1000  # pictures: whatever they left behind goes with the process
SIXTEEN_BITS = 257  # from 16 bits to 8: 65535 becomes 255
NEEDS_PILLOW = "Pillow is not installed on the machine that decodes pictures (pip install 'palestra[vision]')"


class Unreadable(Exception):
    pass


def decode(order: DecodeOrder) -> Picture:
    """Raises Unreadable, UnfitPicture."""
    image = _opened(order)
    image.load()
    image = _upright(image)
    height, width = order.sizes.sides(image.height, image.width, is_resized=is_resized(order.file))
    image = _in_rgb(image)
    if image.size != (width, height):
        image = image.resize((width, height), _pillow("Image").Resampling.BICUBIC)
    return Picture.of_pixels(image.tobytes(), height, width)


def _pillow(module: str):
    return importlib.import_module(f"PIL.{module}")


def _opened(order: DecodeOrder) -> Image:
    try:
        image = _pillow("Image").open(io.BytesIO(order.file), formats=list(FORMATS))
    except _pillow("Image").UnidentifiedImageError:
        raise Unreadable(f"it is no {', '.join(FORMATS)} file, or is cut short at its beginning") from None
    if image.width * image.height > order.max_file_pixels:
        raise Unreadable(
            f"it has {image.width} x {image.height} pixels; at most {order.max_file_pixels} in all are read "
            "(limits.max_picture_pixels)"
        )
    if image.format != SEVERAL and getattr(image, "is_animated", False):
        raise Unreadable("it is animated; send one of its frames as a still picture")
    return image


def _upright(image: Image) -> Image:
    return _pillow("ImageOps").exif_transpose(image)


def _in_rgb(image: Image) -> Image:
    if image.mode.startswith("I"):
        image = image.convert("I").point(lambda level: level * (1 / SIXTEEN_BITS)).convert("L")
    if image.mode == "F":
        raise Unreadable("its pixels are floating-point numbers; send 8 or 16 bits for each channel")
    if image.has_transparency_data:
        layers = image.convert("RGBA")
        white = _pillow("Image").new("RGBA", layers.size, (255, 255, 255, 255))
        image = _pillow("Image").alpha_composite(white, layers)
    return image.convert("RGB")


def answer(order: DecodeOrder) -> DecodeAnswer:
    try:
        return DecodeAnswer(picture=decode(order))
    except (Unreadable, UnfitPicture) as e:
        return DecodeAnswer(problem=str(e))
    except MemoryError:
        return DecodeAnswer(problem="it takes more memory than a picture may")
    except Exception as e:  # a decoder's, of which there are many kinds
        return DecodeAnswer(problem=f"it is damaged or cut short ({type(e).__name__}: {e})")


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the server, which closes stdin at the right time
    try:
        for module in ("Image", *LATER, *FORMATS.values()):
            _pillow(module)
        has_pillow = True
    except ImportError:
        has_pillow = False
    if has_pillow:
        vars(_pillow("Image"))["MAX_IMAGE_PIXELS"] = None  # the server's own bound is checked
    encoder, decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(DecodeOrder)
    jail.enter(MEMORY_BYTES, CPU_S)
    for _ in range(ENDS_AFTER):
        if (message := read_message(sys.stdin.buffer)) is None:
            return
        found = answer(decoder.decode(message)) if has_pillow else DecodeAnswer(problem=NEEDS_PILLOW)
        sys.stdout.buffer.write(delimited(encoder.encode(found)))
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
