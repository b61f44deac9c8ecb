"""Names in the API: checkpoint paths, ids of sessions, models, samplers and requests.

Owns: parsing and formatting them. Never touches: whether what they name exists.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from palestra.server.core.wire_errors import WireError, shown
from palestra.store.records import CheckpointKind

SCHEME = "tinker://"
MAX_SEQ = 2**63 - 1

_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_RUN = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_WORD = "[A-Za-z0-9_-]{1,64}"
_NUMBER = "0|[1-9][0-9]{0,18}"
_MODEL = re.compile(f"({_WORD}):train:({_NUMBER})")
_SAMPLER = re.compile(f"({_WORD}):sample:({_NUMBER})")
_TRAIN_REQUEST = re.compile(f"train:({_WORD}:train:(?:{_NUMBER})):({_NUMBER})")
_SAMPLE_REQUEST = re.compile(f"sample:({_WORD}):({_WORD}:sample:(?:{_NUMBER})):({_NUMBER})")


@dataclass(frozen=True, slots=True)
class TinkerPath:
    model_id: str
    kind: CheckpointKind
    name: str

    @classmethod
    def parse(cls, text: str) -> TinkerPath:
        parts = text.removeprefix(SCHEME).split("/") if text.startswith(SCHEME) else []
        if len(parts) != 3:
            raise WireError(f"{shown(text)} is not a checkpoint path; write tinker://<run>/<kind>/<name>")
        run, segment, name = parts
        return cls(check_run_id(run), parse_kind(segment), check_name(name))

    @property
    def checkpoint_id(self) -> str:
        return f"{self.kind}/{self.name}"

    def __str__(self) -> str:
        return f"{SCHEME}{self.model_id}/{self.checkpoint_id}"


def parse_kind(segment: str) -> CheckpointKind:
    try:
        return CheckpointKind(segment)
    except ValueError:
        raise WireError(f"unknown checkpoint kind {shown(segment)}: one of {', '.join(CheckpointKind)}") from None


def check_name(name: str) -> str:
    """Checks a checkpoint's name, which becomes a folder."""
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise WireError(f"checkpoint name {shown(name)}: 1 to 128 of A-Z a-z 0-9 . _ - are allowed")
    return name


def check_run_id(run_id: str) -> str:
    if not _RUN.fullmatch(run_id) or run_id in (".", ".."):
        raise WireError(f"{shown(run_id)} is not the id of a training run")
    return run_id


@dataclass(frozen=True, slots=True)
class ModelId:
    session_id: str
    number: int

    @classmethod
    def parse(cls, text: str) -> ModelId:
        return cls(*_session_and_number(_MODEL, text, "model"))

    def __str__(self) -> str:
        return f"{self.session_id}:train:{self.number}"


@dataclass(frozen=True, slots=True)
class SamplerId:
    session_id: str
    number: int

    @classmethod
    def parse(cls, text: str) -> SamplerId:
        return cls(*_session_and_number(_SAMPLER, text, "sampling session"))

    def __str__(self) -> str:
        return f"{self.session_id}:sample:{self.number}"


def _session_and_number(form: re.Pattern[str], text: str, what: str) -> tuple[str, int]:
    found = form.fullmatch(text)
    if found is None or int(found[2]) > MAX_SEQ:
        raise WireError(f"{shown(text)} is not the id of a {what}")
    return found[1], int(found[2])


@dataclass(frozen=True, slots=True)
class TrainRequestId:
    """A request of a model, which is found again after any restart. `CreateModel` is number 0."""

    model_id: str
    seq_id: int

    def __str__(self) -> str:
        return f"train:{self.model_id}:{self.seq_id}"


@dataclass(frozen=True, slots=True)
class SampleRequestId:
    """A sample, known to one process of the server only; to the next one it is lost (410). `boot` tells numbers apart
    that every process gives anew."""

    boot: str
    sampler_id: str
    seq_id: int

    def __str__(self) -> str:
        return f"sample:{self.boot}:{self.sampler_id}:{self.seq_id}"

    def sequence_ids(self, num_samples: int) -> list[str]:
        return [f"{self}:{i}" for i in range(num_samples)]


def parse_request_id(text: str) -> TrainRequestId | SampleRequestId | None:
    """Parses an id; None: it is not one of ours."""
    if found := _TRAIN_REQUEST.fullmatch(text):
        request = TrainRequestId(found[1], int(found[2]))
    elif found := _SAMPLE_REQUEST.fullmatch(text):
        request = SampleRequestId(found[1], found[2], int(found[3]))
    else:
        return None
    return request if request.seq_id <= MAX_SEQ else None
