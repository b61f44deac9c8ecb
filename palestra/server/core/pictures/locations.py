"""Where the file of a picture is: in a data: URL. What is elsewhere is not fetched.

Owns: reading these URLs. Never touches: the network, the file's content.
"""

from __future__ import annotations

import base64
import binascii
from urllib.parse import unquote_to_bytes

from palestra.server.core.pictures.reader import PictureError

SHOWN = 60


def file_at(url: str) -> bytes:
    """The file in a data: URL. Raises PictureError for any other address."""
    scheme, _, rest = url.partition(":")
    if scheme.lower() != "data":
        shown = url if len(url) <= SHOWN else f"{url[:SHOWN]}…"
        raise PictureError(
            f"a picture at {shown!r} is not fetched: this server reads pictures from data: URLs only; send "
            "data:image/png;base64,… with the file itself"
        )
    head, comma, content = rest.partition(",")
    if not comma:
        raise PictureError("a data: URL of a picture has no comma; send data:image/png;base64,…")
    if head.lower().split(";")[-1].strip() == "base64":
        return from_base64(content)
    return unquote_to_bytes(content)


def from_base64(text: str) -> bytes:
    """Raises PictureError where it is none."""
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as e:
        raise PictureError(f"a picture's data is not base64 ({e})") from None
