"""`palestra gym list`: which servers, environments and benchmarks lie below the search folders.

Owns: arguments and printing. Never touches: what they are.
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import rich_click as click

from palestra.cli.output import needs_extra, print_json
from palestra.cli.run.common import json_option, print_table

KINDS = ["resources-servers", "agents", "models", "environments", "benchmarks"]


@click.command("list")
@click.argument("kind", type=click.Choice(KINDS), required=False)
@click.option("--matching", metavar="TEXT", help="Only those with this in their name.")
@click.option(
    "--search-dir",
    "roots",
    multiple=True,
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="Look here first; may repeat.  [NEMO_GYM_EXTRA_ROOTS]",
)
@json_option
def list_(kind: str | None, matching: str | None, roots: tuple[Path, ...], as_json: bool) -> None:
    """Servers, environments and benchmarks that can be run, with their configs."""
    with needs_extra("gym"):
        from palestra.gym.catalog import CatalogKind, catalog
        from palestra.gym.roots import search_roots
    kinds = [CatalogKind(one) for one in ([kind] if kind else KINDS)]
    entries = [one for one in catalog(kinds, search_roots(roots)) if (matching or "").lower() in one.name.lower()]
    if as_json:
        print_json(msgspec.to_builtins(entries))
        return
    rows = [[one.kind, one.name, config] for one in entries for config in one.configs or ["-"]]
    print_table([["kind", "name", "config"], *rows])
