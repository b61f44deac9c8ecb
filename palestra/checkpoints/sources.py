"""Sources of a checkpoint's files: a folder here, or a server that has them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from palestra.checkpoints import CheckpointError, SavedCheckpoint


@contextmanager
def saved_files(saved: SavedCheckpoint, *, server: str | None = None, key: str | None = None) -> Iterator[Path]:
    """The folder with a checkpoint's files, downloaded for as long as it is used if the run's server has them."""
    if saved.folder is not None:
        yield saved.folder
        return
    server = server or saved.server
    if server is None:
        raise CheckpointError(f"the files of {saved.name} are not here; give the address of the server with --server")
    with downloaded(saved.address, server, key) as folder:
        yield folder


@contextmanager
def downloaded(address: str, server: str, key: str | None) -> Iterator[Path]:
    """The files of a tinker:// address in a temporary folder."""
    from palestra.checkpoints.remote import ServerCheckpoints

    with TemporaryDirectory(prefix="palestra-") as temporary:
        folder = Path(temporary) / "adapter"
        ServerCheckpoints(server, key).download(address, folder)
        yield folder
