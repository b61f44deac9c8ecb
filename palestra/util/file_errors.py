"""Errors of the file system as sentences that name the file and say what to do."""

from __future__ import annotations

import errno
import os
import re
from pathlib import Path

from palestra.util.atomic_files import TEMPORARY, WITHOUT_NAME

UNFINISHED = re.compile(rf"\.(?P<name>.+)\.[0-9]+{re.escape(TEMPORARY)}")
"""What `atomic_files.replacing` calls a file before it is complete."""
CLOSED = "is closed to this user; change its rights, or name another place"
IN_THE_WAY = "exists, and is in the way"
REASONS = {
    errno.EROFS: "cannot be written: its file system is read-only; name another place",
    errno.EACCES: CLOSED,
    errno.EPERM: CLOSED,
    errno.ENOTDIR: "cannot be reached: a part of this path is a file and not a folder",
    errno.EISDIR: "is a folder, where a file is needed",
    errno.EEXIST: IN_THE_WAY,
    errno.ENOTEMPTY: IN_THE_WAY,
    errno.ENOENT: "does not exist",
    errno.ENOSPC: "cannot be written: no space is left on the disk; free some",
    errno.EDQUOT: "cannot be written: the disk quota is used up; free some space",
    errno.ENAMETOOLONG: "has a name that is too long",
    errno.ELOOP: "is a link that leads to itself",
}
"""What is wrong with a file, after its name."""


def file_error_text(error: BaseException) -> str | None:
    """Returns a sentence about an error of the file system; None for all others, such as bugs and closed sockets."""
    if not isinstance(error, OSError) or error.errno not in REASONS:
        return None
    is_copied = error.errno in WITHOUT_NAME and error.filename2 is not None
    name = error.filename2 if is_copied else error.filename
    if name is not None:
        return f"{_shown(os.fsdecode(name))} {REASONS[error.errno]}"
    return f"a file {REASONS[error.errno]}" if error.errno in WITHOUT_NAME else None


def _shown(file: str) -> str:
    """The name as the user knows it."""
    path = Path(file)
    unfinished = UNFINISHED.fullmatch(path.name)
    return str(path.with_name(unfinished["name"])) if unfinished else file
