"""Serves files of a checkpoint by URLs that work for a while, without a key.

A URL contains its expiry and an HMAC over run, kind, name, folder, file and expiry: without the secret no client can
make one, change one or use one for other files, and once a checkpoint is replaced or deleted its URLs are invalid.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, urlencode

from palestra.server.core.errors import Refusal
from palestra.server.core.paths import TinkerPath

VALID_S = 3600


@dataclass(frozen=True, slots=True)
class DownloadTicket:
    """What a URL gives access to."""

    path: TinkerPath
    version: str
    """Identifies the folder that the path referred to, without saying where it is."""
    file: str
    """Path relative to that folder, with `/`."""
    expires: int
    """Seconds since the epoch."""


class DownloadSigner:
    def __init__(self, secret: str):
        self._key = hmac.digest(secret.encode(), b"palestra checkpoint files", "sha256")

    def url(self, base_url: str, ticket: DownloadTicket) -> str:
        place = f"{ticket.path.model_id}/checkpoints/{ticket.path.checkpoint_id}/files/{quote(ticket.file)}"
        query = {"version": ticket.version, "expires": ticket.expires, "signature": self._sign(ticket)}
        return f"{base_url.rstrip('/')}/api/v1/training_runs/{place}?{urlencode(query)}"

    def check(self, ticket: DownloadTicket, signature: str, now: float) -> None:
        if not hmac.compare_digest(self._sign(ticket).encode(), signature.encode()):
            raise Refusal(403, "this download URL is not valid; request new ones: external_weights_urls")
        if ticket.expires <= now:
            raise Refusal(403, "this download URL has expired; request new ones: external_weights_urls")

    def _sign(self, ticket: DownloadTicket) -> str:
        path = ticket.path
        signed = [path.model_id, path.kind.value, path.name, ticket.version, ticket.file, ticket.expires]
        return hmac.new(self._key, json.dumps(signed).encode(), hashlib.sha256).hexdigest()


def version_of(folder: str) -> str:
    return hashlib.sha256(folder.encode()).hexdigest()[:24]


def files_in(folder: str) -> dict[str, Path]:
    """Returns regular files by their path relative to the folder; links are left out, wherever they point."""
    root = Path(folder)
    found: dict[str, Path] = {}
    for here, _, names in os.walk(root, followlinks=False):
        for name in names:
            file = Path(here, name)
            if file.is_file() and not file.is_symlink():
                found[file.relative_to(root).as_posix()] = file
    return dict(sorted(found.items()))
