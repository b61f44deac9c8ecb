"""What NeMo Gym's own server folders use of it, and what of that our stand-in has.

    python -m tests.gym.stock.surface .nemo-gym        # after `make nemo-gym`

A name that the stand-in lacks is refused when a gym starts (`palestra.gym.nemo_gym_compat`). What a server uses of the
class that it derives from cannot be refused: it has to be there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from palestra.gym.nemo_gym_compat import COMPAT, missing_names
from palestra.gym.records import ServerKind
from palestra.gym.server_code import STOCK_PACKAGE, imports_of, parsed

BASES = {
    ServerKind.RESOURCES: ("SimpleResourcesServer", "BaseResourcesServerConfig"),
    ServerKind.AGENT: ("SimpleResponsesAPIAgent", "BaseResponsesAPIAgentConfig"),
    ServerKind.MODEL: ("SimpleResponsesAPIModel", "BaseResponsesAPIModelConfig"),
}
STARTS_A_SERVER = ".run_webserver()"


@dataclass(frozen=True, slots=True)
class StockServer:
    entrypoint: Path
    names: set[str]
    """All that it imports of NeMo Gym."""
    refused: set[str]
    """Those of them that the stand-in lacks."""
    members: set[str]
    """`Class.member` that it uses and the stand-in's class lacks."""


@dataclass(slots=True)
class StockClass:
    bases: list[str] = field(default_factory=list)
    members: set[str] = field(default_factory=set)


def walked(root: Path) -> Iterator[StockServer]:
    """Every server below the root, which is NeMo Gym's wheel, unpacked, or a checkout."""
    for kind in BASES:
        for entrypoint in sorted((root / kind).glob("*/*.py")):
            if STARTS_A_SERVER not in entrypoint.read_text():
                continue
            used = {one.text for one in imports_of(entrypoint) if one.package == STOCK_PACKAGE}
            refused = {one.text for one in missing_names(entrypoint)}
            yield StockServer(entrypoint, used, refused, set(_members_lacking(root, kind, entrypoint)))


def _members_lacking(root: Path, kind: ServerKind, entrypoint: Path) -> Iterator[str]:
    tree = parsed(entrypoint)
    own = {one.name for one in ast.walk(tree) if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)}
    server, config = BASES[kind]
    holders = {"self": server, "self.config": config, "config": config, "self.server_client": "ServerClient"}
    attributes = (one for one in ast.walk(tree) if isinstance(one, ast.Attribute))
    uses = {(holders.get(ast.unparse(one.value)), one.attr) for one in attributes}
    uses |= {(server, name) for name in _set_in_classes(tree)}
    for base, name in uses:
        if base is not None and name in members(root, base) - members(COMPAT, base) - own:
            yield f"{base}.{name}"


def _set_in_classes(tree: ast.Module) -> Iterator[str]:
    """Names that a class gives a value without a type: its base has to declare them."""
    statements = (one for each in tree.body if isinstance(each, ast.ClassDef) for one in each.body)
    targets = (target for one in statements if isinstance(one, ast.Assign) for target in one.targets)
    yield from (target.id for target in targets if isinstance(target, ast.Name))


@cache
def members(root: Path, name: str) -> frozenset[str]:
    """Of a class of `nemo_gym` below the root, with those that it inherits from there."""
    found = classes(root).get(name, StockClass())
    return frozenset(found.members.union(*(members(root, base) for base in found.bases if base != name)))


@cache
def classes(root: Path) -> dict[str, StockClass]:
    statements = (one for file in (root / STOCK_PACKAGE).rglob("*.py") for one in parsed(file).body)
    return {
        one.name: StockClass([ast.unparse(base).partition("[")[0] for base in one.bases], set(_declared(one)))
        for one in statements
        if isinstance(one, ast.ClassDef)
    }


def _declared(one: ast.ClassDef) -> Iterator[str]:
    for statement in one.body:
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            yield statement.name
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id


def main() -> None:
    root = Path(sys.argv[1]).absolute()
    servers = list(walked(root))
    refused = [one for one in servers if one.refused]
    lacking = [one for one in servers if one.members and not one.refused]
    names = {name for one in servers for name in one.names}
    missing = {name for one in refused for name in one.refused}
    print(f"{len(servers)} servers import {len(names)} names of NeMo Gym's; our stand-in has all but {len(missing)}.")
    print(f"{len(refused)} servers are refused when a gym starts:")
    for one in refused:
        print(f"  {one.entrypoint.relative_to(root)}: {', '.join(sorted(one.refused))}")
    for one in lacking:
        print(f"  {one.entrypoint.relative_to(root)} is not, but uses {', '.join(sorted(one.members))}")
    sys.exit(1 if lacking or not servers else 0)


if __name__ == "__main__":
    main()
