"""Sizes of picture files are those that Pillow finds, and files that are cut short or none are refused."""

from __future__ import annotations

import pytest

from palestra.util.picture_headers import BadPicture, read_header
from tests.pictures import drawn, file_of

FORMS = [
    ("PNG", {}, "image/png"),
    ("JPEG", {"quality": 80}, "image/jpeg"),
    ("JPEG", {"progressive": True}, "image/jpeg"),
    ("WEBP", {}, "image/webp"),
    ("WEBP", {"lossless": True}, "image/webp"),
    ("WEBP", {"exif": b"Exif\0\0", "lossless": True}, "image/webp"),
    ("GIF", {}, "image/gif"),
]


@pytest.mark.parametrize(("form", "options", "media_type"), FORMS)
def test_kind_and_size_are_read(form, options, media_type):
    for width, height in ((64, 48), (320, 8), (16, 1000)):
        assert read_header(file_of(drawn(1, width, height), form, **options)) == (media_type, width, height)


@pytest.mark.parametrize(("form", "options", "media_type"), FORMS[:6])
def test_files_that_are_cut_short_are_refused(form, options, media_type):
    file = file_of(drawn(1, 320, 240), form, **options)
    for length in (14, 40, len(file) // 2, len(file) - 8):
        with pytest.raises(BadPicture, match="cut short"):
            read_header(file[:length])


def test_other_files_are_refused():
    for data in (b"", b"%PDF-1.7", b"\xff\xd8\xff\xd9"):
        with pytest.raises(BadPicture):
            read_header(data)
    with pytest.raises(BadPicture, match="no marker where one should be"):
        read_header(b"\xff\xd8\xff\xe0\0\x04abXY" + b"\xff\xd9")
