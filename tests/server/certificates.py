"""A private authority and a certificate of localhost, made by openssl."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from palestra.util.programs import missing

NEW_KEY = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2")


@dataclass(frozen=True, slots=True)
class Certificates:
    authority: Path
    cert: Path
    key: Path


def make_certificates(folder: Path) -> Certificates:
    if absent := missing("openssl"):
        pytest.skip(absent)
    authority, cert, key = folder / "authority.pem", folder / "cert.pem", folder / "key.pem"
    signing = (
        "-CA",
        authority,
        "-CAkey",
        folder / "authority-key.pem",
        "-addext",
        "basicConstraints=critical,CA:false",
    )
    names = ("-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1")
    _openssl(*NEW_KEY, "-subj", "/CN=Test authority", "-keyout", folder / "authority-key.pem", "-out", authority)
    _openssl(*NEW_KEY, "-subj", "/CN=localhost", "-keyout", key, "-out", cert, *signing, *names)
    return Certificates(authority, cert, key)


def _openssl(*args: str | Path) -> None:
    subprocess.run(["openssl", *map(str, args)], check=True, capture_output=True)
