"""An error on a full disk names what was written."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE

from palestra.util.atomic_files import folder_beside, naming, replacing
from palestra.util.file_errors import file_error_text

FULL = Path("/dev/full")
pytestmark = pytest.mark.skipif(not FULL.exists(), reason="there is no /dev/full on this system")
NO_SPACE = "No space left on device"
SENTENCE = "{} cannot be written: no space is left on the disk; free some"


def _copy_tree(folder: Path) -> None:
    (folder / "from").mkdir()
    (folder / "from" / "file").write_text("content")
    (folder / "to").mkdir()
    (folder / "to" / "file").symlink_to(FULL)
    shutil.copytree(folder / "from", folder / "to", dirs_exist_ok=True)


@pytest.mark.parametrize(
    "write",
    [
        lambda folder: FULL.write_text("content"),
        lambda folder: Tokenizer(BPE()).save(str(FULL)),
        _copy_tree,
    ],
    ids=["file", "tokenizer", "copied folder"],
)
def test_a_full_disk_is_told_with_the_name_of_what_is_written(tmp_path: Path, write: Callable[[Path], object]):
    with pytest.raises(OSError, match=NO_SPACE) as raised, naming(tmp_path / "out"):
        write(tmp_path)
    assert file_error_text(raised.value) == SENTENCE.format(tmp_path / "out")


def test_files_and_folders_that_are_written_whole_are_named(tmp_path: Path):
    for writing in (replacing(tmp_path / "out"), folder_beside(tmp_path / "out")):
        with pytest.raises(OSError, match=NO_SPACE) as raised, writing:
            FULL.write_text("content")
        assert file_error_text(raised.value) == SENTENCE.format(tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_other_errors_stay_as_they_are(tmp_path: Path):
    with pytest.raises(FileNotFoundError) as raised, naming(tmp_path / "out"):
        (tmp_path / "there" / "file").write_text("content")
    assert raised.value.filename == str(tmp_path / "there" / "file")
    with pytest.raises(ValueError, match=r"\[Errno 2\]"), naming(tmp_path / "out"):
        raise ValueError("[Errno 2] is what somebody else's text says")
    with pytest.raises(OSError, match="refused"), naming(tmp_path / "out"):
        raise ConnectionRefusedError(111, "refused")


def test_of_a_copy_the_copy_is_named():
    error = OSError(errno.ENOSPC, "no space", "from", None, "to")
    assert file_error_text(error) == SENTENCE.format("to")
