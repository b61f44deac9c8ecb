"""The folders in which files and servers of a gym are searched, and the catalog of what is below them: servers,
environments and benchmarks.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from enum import StrEnum
from pathlib import Path

from msgspec import Struct

from palestra.gym.errors import GymConfigError

SHIPPED = Path(__file__).parent / "shipped"
"""Our own servers, in folders of NeMo Gym's structure: `<kind>/<implementation>/{app.py,configs,data}`."""

EXTRA_ROOTS = "NEMO_GYM_EXTRA_ROOTS"


def search_roots(extra: Iterable[Path] = ()) -> list[Path]:
    """Returns the given folders, then those of the environment, then the current folder, then ours."""
    from_environment = [Path(one) for one in os.environ.get(EXTRA_ROOTS, "").split(os.pathsep) if one]
    roots = [Path(one).absolute() for one in (*extra, *from_environment, Path.cwd(), SHIPPED)]
    return list(dict.fromkeys(roots))


def find_below(roots: Sequence[Path], relative: str | Path) -> Path | None:
    """Returns the first that exists. An absolute path is used as it is."""
    found = (root / relative for root in roots)
    return next((path for path in found if path.exists()), None)


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Returns a line for the end of a message; empty if no name is near."""
    near = get_close_matches(word, sorted({str(one) for one in known}), n=3, cutoff=0.6)
    return f"\n  did you mean: {', '.join(near)}?" if near else ""


class CatalogKind(StrEnum):
    """Kinds in the words of the command line; `folder` is where they are."""

    RESOURCES_SERVERS = "resources-servers"
    AGENTS = "agents"
    MODELS = "models"
    ENVIRONMENTS = "environments"
    BENCHMARKS = "benchmarks"

    @property
    def folder(self) -> str:
        return {"agents": "responses_api_agents", "models": "responses_api_models"}.get(self, self.replace("-", "_"))

    @property
    def is_server(self) -> bool:
        return self not in (CatalogKind.ENVIRONMENTS, CatalogKind.BENCHMARKS)


class CatalogEntry(Struct, frozen=True):
    kind: CatalogKind
    name: str
    configs: list[str]
    """Paths relative to its root, as `-c` takes them."""
    root: str


def catalog(kinds: Sequence[CatalogKind], roots: Sequence[Path]) -> list[CatalogEntry]:
    """Returns entries by kind and name. If several roots have a name, the first counts, as when it is run."""
    found: dict[tuple[CatalogKind, str], CatalogEntry] = {}
    for kind in kinds:
        for root in roots:
            for entry in _entries(kind, root):
                found.setdefault((kind, entry.name), entry)
    return sorted(found.values(), key=lambda one: (kinds.index(one.kind), one.name))


def config_named(kind: CatalogKind, name: str, roots: Sequence[Path]) -> str:
    """Returns the file for `NAME` or `NAME/FLAVOUR`. Raises GymConfigError with the nearest name."""
    plain, _, flavour = name.partition("/")
    if kind.is_server:
        candidates = [f"{kind.folder}/{plain}/configs/{flavour or plain}.yaml"]
    else:
        candidates = [f"{kind.folder}/{name}/config.yaml", f"{kind.folder}/{plain}/{flavour or 'config'}.yaml"]
    for candidate in candidates:
        if any((root / candidate).is_file() for root in roots):
            return candidate
    entries = catalog([kind], roots)
    flavours = [f"{plain}/{Path(one).stem}" for entry in entries if entry.name == plain for one in entry.configs]
    hint = did_you_mean(name, flavours or [entry.name for entry in entries])
    places = "".join(f"\n  not at {root / candidates[0]}" for root in roots)
    raise GymConfigError(f"{kind}: there is no config for {name!r}{places}{hint}")


def _entries(kind: CatalogKind, root: Path) -> Iterator[CatalogEntry]:
    folder = root / kind.folder
    if kind.is_server:
        for one in sorted(folder.glob("*/")):
            configs = [str(file.relative_to(root)) for file in sorted(one.glob("configs/*.yaml"))]
            if configs or any(one.glob("*.py")):
                yield CatalogEntry(kind, one.name, configs, str(root))
        return
    for file in sorted(folder.glob("**/config.yaml")):
        yield CatalogEntry(kind, str(file.parent.relative_to(folder)), [str(file.relative_to(root))], str(root))
