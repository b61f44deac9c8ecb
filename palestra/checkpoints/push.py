"""Publishing a checkpoint: an export with its model card, uploaded to the Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from msgspec import Struct

from palestra.checkpoints import SavedCheckpoint
from palestra.checkpoints.card import PICTURE, write_card
from palestra.checkpoints.export import base_of, export_checkpoint, portable_name
from palestra.checkpoints.hub import HubRepository
from palestra.checkpoints.sources import saved_files
from palestra.runs.export_form import ExportDtype, PublishedForm
from palestra.runs.plots import RESULTS, draw
from palestra.runs.reader import RunReader
from palestra.runs.record_files import RunError

CARD = "README.md"


class Publication(Struct, frozen=True):
    """A folder that is ready to be uploaded."""

    folder: Path
    base_name: str

    @property
    def card(self) -> str:
        return (self.folder / CARD).read_text(encoding="utf-8")

    @property
    def files(self) -> dict[str, int]:
        """Sizes in bytes by name."""
        return {file.name: file.stat().st_size for file in sorted(self.folder.iterdir())}


@contextmanager
def prepared(
    saved: SavedCheckpoint,
    repository: HubRepository,
    form: PublishedForm,
    *,
    base: str | None = None,
    base_name: str | None = None,
    dtype: ExportDtype | None = None,
    server: str | None = None,
    key: str | None = None,
) -> Iterator[Publication]:
    """The export and its card in a temporary folder. Raises CheckpointError, also if the disk has no room for it."""
    with (
        TemporaryDirectory(prefix="palestra-push-") as temporary,
        saved_files(saved, server=server, key=key) as adapter,
    ):
        folder, base_folder = Path(temporary) / "out", base_of(adapter, base)
        name = base_name or portable_name(base_folder)
        export_checkpoint(adapter, folder, form, base=base_folder, base_name=name, dtype=dtype)
        run = RunReader(saved.run)
        has_picture = _draw(run, folder / PICTURE)
        card = write_card(run, saved, form, repository=repository.name, base_name=name, has_picture=has_picture)
        (folder / CARD).write_text(card, encoding="utf-8")
        yield Publication(folder, name)


def push_saved(
    saved: SavedCheckpoint,
    target: str,
    form: PublishedForm,
    *,
    public: bool,
    update: bool,
    dtype: ExportDtype | None = None,
    **export: str | None,
) -> str:
    """Publishes a checkpoint and returns the address of the repository; `export` as for `prepared`."""
    repository = HubRepository(target)
    repository.check(update=update)
    with prepared(saved, repository, form, dtype=dtype, **export) as publication:
        repository.upload(publication.folder, public=public, message=f"Weights of {saved.name}")
    return repository.url


def _draw(run: RunReader, file: Path) -> bool:
    """Whether there is a picture: matplotlib may be missing, or there is nothing to draw."""
    try:
        draw(run, file, RESULTS)
    except (ModuleNotFoundError, RunError):
        return False
    return True
