"""Files of pictures: what they become, what is refused, and what happens to the process that decodes them."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
from PIL import Image

from palestra.chat.picture_files import picture_file
from palestra.config.serve import ServeLimits
from palestra.server.core.pictures import decoding_child
from palestra.server.core.pictures.decoding import DecodeOrder
from palestra.server.core.pictures.locations import PictureError
from palestra.server.core.pictures.picture_cache import PictureCache
from palestra.server.core.pictures.reader import EncodedPicture, PictureReader
from palestra.types import Picture, VisionCard
from palestra.types.pictures import PictureSizes
from tests.pictures import data_url, drawn, file_of

T = TypeVar("T")

QWEN = PictureSizes.of_config({}, {})
GEMMA = PictureSizes.of_config({"model_type": "gemma4_vision"}, {})
CARD = VisionCard(sizes=QWEN, image_token=1)


@pytest.fixture
def reading(tmp_path: Path) -> Callable[..., Any]:
    """`reading(work, **limits)` runs `work(reader)` with a reader that is closed afterwards."""

    def run(work: Callable[[PictureReader], Coroutine[Any, Any, T]], **limits: Any) -> T:
        async def whole() -> T:
            reader = PictureReader(ServeLimits(**limits), PictureCache(tmp_path, 1 << 20))
            try:
                return await work(reader)
            finally:
                await reader.close()

        return asyncio.run(whole())

    return run


async def read(reader: PictureReader, *files: bytes, **fields: Any) -> list[Picture]:
    found = await reader.read_all("ann", {str(n): EncodedPicture(file, **fields) for n, file in enumerate(files)}, CARD)
    return list(found.values())


def decoded(image: Image.Image, form: str = "PNG", **options: Any) -> Picture:
    """In this process, without the sandbox."""
    return decoding_child.decode(order(file_of(image, form, **options)))


def order(file: bytes, **bounds: int) -> DecodeOrder:
    return DecodeOrder(file=file, sizes=QWEN, **{"max_file_pixels": 1 << 26} | bounds)


def pixels(picture: Picture) -> np.ndarray:
    return np.frombuffer(picture.pixels, np.uint8).reshape(picture.height, picture.width, 3)


def exif(orientation: int) -> Image.Exif:
    found = Image.Exif()
    found[0x0112] = orientation
    return found


# What becomes of them


@pytest.mark.parametrize(
    ("height", "width", "rows"), [(224, 224, 64), (150, 224, 70), (400, 300, 108), (8000, 7900, 16256)]
)
def test_sides_are_those_of_transformers(height: int, width: int, rows: int) -> None:
    own = QWEN.sides(height, width)
    assert own[0] * own[1] // 1024 == rows


@pytest.mark.slow
def test_pixels_are_those_of_transformers() -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    size = {"shortest_edge": 65536, "longest_edge": 16777216}
    processor = Qwen2VLImageProcessorPil(patch_size=16, size=size, do_rescale=False, do_normalize=False)
    for shape in ((224, 150), (640, 480), (64, 48)):
        image = drawn(3, *shape)
        found = processor([image], return_tensors="np")
        _, down, right = found["image_grid_thw"][0]
        squares = found["pixel_values"].reshape(down // 2, right // 2, 2, 2, 3, 2, 16, 16)[:, :, :, :, :, 0]
        theirs = squares.transpose(0, 2, 5, 1, 3, 6, 4).reshape(down * 16, right * 16, 3)
        assert np.array_equal(pixels(decoded(image)), theirs.astype(np.uint8))


@pytest.mark.parametrize(
    ("shape", "theirs"),
    [
        ((224, 150), (960, 624)),
        ((640, 480), (912, 672)),
        ((64, 48), (912, 672)),
        ((3000, 40), (6912, 48)),
        ((40, 3000), (48, 6912)),
        ((768, 768), (768, 768)),
    ],
)
def test_sides_for_gemma_are_those_of_transformers(shape: tuple[int, int], theirs: tuple[int, int]) -> None:
    assert GEMMA.sides(*shape) == theirs


@pytest.mark.slow
def test_pixels_for_gemma_are_those_of_transformers() -> None:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    processor = Gemma4ImageProcessorPil(do_rescale=False)
    for shape in ((224, 150), (640, 480), (64, 48)):
        image = drawn(3, *shape)
        found = processor([image], return_tensors="np")
        ours = decoding_child.decode(DecodeOrder(file=file_of(image), sizes=GEMMA, max_file_pixels=1 << 26))
        right, down = found["image_position_ids"][0].max(0) + 1
        patches = found["pixel_values"][0][: down * right].reshape(down, right, 16, 16, 3)
        theirs = patches.transpose(0, 2, 1, 3, 4).reshape(down * 16, right * 16, 3)
        assert np.array_equal(pixels(ours), theirs.astype(np.uint8))


@pytest.mark.parametrize("shape", [(1000, 350), (64, 3000), (480, 640)])
def test_a_picture_that_was_kept_is_read_as_it_was(shape: tuple[int, int]) -> None:
    """Gemma's sizes would grow again: what is rounded down leaves room."""
    for sizes in (GEMMA, QWEN):
        first = decoding_child.decode(DecodeOrder(file=file_of(drawn(3, *shape)), sizes=sizes, max_file_pixels=1 << 26))
        order = DecodeOrder(file=first.png(), sizes=sizes, max_file_pixels=1 << 26)
        assert decoding_child.decode(order).digest == first.digest
        card = VisionCard(sizes=sizes, image_token=1)
        assert card.rows_of_file(picture_file(first.png())) == card.rows(first)
    assert GEMMA.sides(432, 1344) == (432, 1392)


def test_forms_and_colours_become_rgb() -> None:
    image = drawn(1, 256, 256)
    plain = decoded(image)
    assert (plain.height, plain.width) == (256, 256)
    assert np.array_equal(pixels(plain), np.asarray(image))
    assert decoded(image.convert("RGBA")).digest == decoded(image, "WEBP", lossless=True).digest == plain.digest
    grey = decoded(image.convert("L"))
    assert np.array_equal(pixels(grey), np.asarray(image.convert("L").convert("RGB")))
    assert np.array_equal(pixels(decoded(image.convert("P"))), np.asarray(image.convert("P").convert("RGB")))
    wide = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
    assert decoded(wide).digest == grey.digest
    printed = pixels(decoded(image.convert("CMYK"), "JPEG", quality=95)).astype(int)
    assert abs(printed - np.asarray(image).astype(int)).mean() < 12


def test_what_is_transparent_is_white() -> None:
    image = Image.new("RGBA", (256, 256), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 128, 256))
    found = pixels(decoded(image))
    assert (found[0, 0].tolist(), found[0, 255].tolist()) == ([0, 0, 255], [255, 255, 255])


def test_pictures_are_turned_as_their_exif_data_says() -> None:
    image = drawn(2, 320, 256)
    turned = decoded(image, exif=exif(6))
    assert (turned.height, turned.width) == (320, 256)
    assert np.array_equal(pixels(turned), np.asarray(image.rotate(-90, expand=True)))


def test_the_first_of_a_cameras_several_pictures_is_read() -> None:
    image = drawn(4, 256, 256)
    several = decoded(image, "MPO", save_all=True, append_images=[drawn(5, 256, 256)])
    assert several.digest == decoded(image, "JPEG").digest


# What is refused


@pytest.mark.parametrize(
    ("file", "why"),
    [
        (b"", "no PNG, JPEG, WEBP, GIF file"),
        (b"x" * 1000, "no PNG, JPEG, WEBP, GIF file"),
        (file_of(drawn(), "BMP"), "no PNG, JPEG, WEBP, GIF file"),
        (file_of(drawn())[:-30], "cut short"),
        (file_of(drawn(), "JPEG")[:-100], "cut short"),
        (file_of(drawn(), "GIF", save_all=True, append_images=[drawn(1)]), "animated"),
        (file_of(drawn(), "PNG", save_all=True, append_images=[drawn(1)]), "animated"),
        (file_of(drawn(), "WEBP", save_all=True, append_images=[drawn(1)]), "animated"),
        (file_of(Image.new("1", (9000, 9000))), "9000 x 9000 pixels; at most 67108864"),
        (file_of(Image.new("L", (3000, 2))), "may differ by a factor of 200"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_read_is_refused(file: bytes, why: str) -> None:
    answer = decoding_child.answer(order(file))
    assert answer.picture is None
    assert why in answer.problem


def test_requests_have_bounds(reading: Callable[..., Any]) -> None:
    files = [file_of(drawn(seed, 256, 256)) for seed in range(3)]
    for bound, why in (
        ({"max_pictures": 2}, "3 pictures; at most 2"),
        ({"max_picture_bytes": 100}, "is too large; at most 100 bytes"),
        ({"max_request_pixels": 140000}, "more than 140000 pixels together"),
    ):
        with pytest.raises(PictureError, match=why):
            reading(lambda reader: read(reader, *files), **bound)
    with pytest.raises(PictureError, match="Expected 65 tokens, got 64 from image"):
        reading(lambda reader: read(reader, *files, expected_rows=65))


# The process


def test_the_process_may_die(reading: Callable[..., Any]) -> None:
    async def work(reader: PictureReader) -> None:
        (first,) = await read(reader, file_of(drawn(6)))
        child = reader._decoder._child._process
        assert child is not None
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
        assert (await read(reader, file_of(drawn(6))))[0] is first  # it is known
        (second,) = await read(reader, file_of(drawn(7)))
        assert second.digest == decoded(drawn(7)).digest
        named = {"a": EncodedPicture(file_of(drawn(8))), "b": EncodedPicture(b"x")}
        with pytest.raises(PictureError) as refused:
            await reader.read_all("ann", named, CARD)
        assert refused.value.name == "b"

    reading(work)


@pytest.mark.slow
def test_the_server_needs_neither_pillow_nor_torch_to_start() -> None:
    code = "import sys, palestra.server.app; print(sorted({'PIL', 'torch'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# Kept pictures


def test_kept_pictures_are_found_again_and_bounded(tmp_path: Path) -> None:
    pictures = [decoded(drawn(seed, 256, 256)) for seed in range(3)]
    cache = PictureCache(tmp_path, 1 << 20)
    cache.keep("ann", pictures)
    assert PictureCache(tmp_path, 1 << 20).find("ann", pictures[1].digest) == pictures[1]
    size = sum(len(picture.packed) for picture in pictures)
    small = PictureCache(tmp_path, size // 2)
    small.keep("ann", [pictures[0]])
    assert small.find("ann", pictures[0].digest) == pictures[0]
    assert small.find("ann", pictures[1].digest) is None
    assert small.find("ann", "../secret") is None


def test_kept_pictures_are_counted_for_each_owner(tmp_path: Path) -> None:
    """Ann has a quota for two; Bob has one of hers, too, and has more than she when the folder is full."""
    pictures = [decoded(drawn(seed, 256, 256)) for seed in range(6)]
    digests, each = [one.digest for one in pictures], max(len(one.packed) for one in pictures) + 200
    quotas = {"ann": 2 * each}
    cache = PictureCache(tmp_path, 5 * each, quotas.get)
    for picture in pictures[:3]:
        cache.keep("ann", [picture])
    assert [cache.find("ann", digest) is not None for digest in digests[:3]] == [False, True, True]
    assert 0 < cache.used_by_owner()("ann") <= 2 * each
    assert cache.find("bob", digests[1]) is None  # another owner's
    cache.keep("bob", pictures[2:])
    files = {file.name for file in tmp_path.glob("??/*")}
    assert files == set(digests[1:])  # one file for both
    cache.keep("bob", [pictures[0]])
    assert cache.find("bob", digests[2]) is None  # his oldest made room, and not hers
    again = PictureCache(tmp_path, 5 * each, quotas.get)
    assert again.find("ann", digests[2]) == pictures[2]
    assert again.used_by_owner()("bob") == cache.used_by_owner()("bob") > again.used_by_owner()("ann")


def test_pictures_that_were_kept_without_owners_belong_to_all(tmp_path: Path) -> None:
    older = decoded(drawn(1, 256, 256))
    PictureCache(tmp_path, 1 << 20).keep("ann", [older])
    shutil.rmtree(tmp_path / "owners")
    cache = PictureCache(tmp_path, 1 << 20)
    assert cache.find("bob", older.digest) == older
    assert cache.used_by_owner()("bob") == 0


def test_pictures_stand_in_data_urls(reading: Callable[..., Any]) -> None:
    async def work(reader: PictureReader) -> None:
        file = file_of(drawn(9))
        urls = {"a": EncodedPicture(url=data_url(file)), "b": EncodedPicture(file)}
        found = await reader.read_all("ann", urls, CARD)
        assert found["a"] is found["b"]
        for url, why in (("https://example.com/a.png", "is not fetched"), ("data:image/png;base64", "no comma")):
            with pytest.raises(PictureError, match=why):
                await reader.read_all("ann", {"a": EncodedPicture(url=url)}, CARD)

    reading(work)
