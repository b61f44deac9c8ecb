"""The house's figures: how large it is, and what it does in more than one way.

make house                      # of the working tree
make house ARGS="--at v0.1.0"   # beside those of a commit
make house ARGS=--check         # only those over their bar, if there are any; `make check` does this

Lines are also printed by capability: a package directly under `palestra`, or an integration.
"""

from __future__ import annotations

import argparse
import ast
import io
import re
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOTS = ("palestra", "integrations")
READ = (*ROOTS, "tests")
CLONE_LINES = 8
"""So many lines in a row, the same but for spaces, are a clone where they stand in two places."""
HTTP_LIBRARIES = ("aiohttp", "http.client", "httpx", "requests", "urllib.request", "urllib3")
SHORT = 5
"""A function of so many lines or fewer, without its head, is short."""
TESTS_OF_NO_PACKAGE = {
    "tests/.",
    "tests/benchmarks",
    "tests/docs",
    "tests/examples",
    "tests/gym/stock",
    "tests/scripts",
}
"""What they test is not below `palestra`: scripts, pages, integrations."""
BARS = {
    "Any in a thousand lines": 10,
    "class names in two modules": 25,
    'docstrings with "Of" first': 20,
    "files that start processes": 2,
    "circles of files": 0,
}
SPAWNS = re.compile(r"\b(?:create_subprocess_exec|create_subprocess_shell|Popen)\(")

Sources = Mapping[str, str]
"""By path."""


def in_tree(root: Path) -> Sources:
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *READ]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()
    return {path: (root / path).read_text() for path in listed if path.endswith(".py") and (root / path).is_file()}


def at_commit(root: Path, commit: str) -> Sources:
    packed = subprocess.run(["git", "archive", commit, *READ], cwd=root, capture_output=True, check=True).stdout
    with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
        files = {one.name: archive.extractfile(one) for one in archive if one.name.endswith(".py")}
    return {path: file.read().decode() for path, file in files.items() if file is not None}


@cache
def _nodes(source: str) -> list[ast.AST]:
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.Expr)
    return [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]


def imported(source: str) -> Iterator[str]:
    for node in _nodes(source):
        if isinstance(node, ast.Import):
            yield from (name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{name.name}" for name in node.names)


def circles(sources: Sources) -> int:
    """Groups of files that import each other, also inside functions and for types alone."""
    modules = (path for path in sources if not path.endswith("__init__.py"))
    names = {path.removesuffix(".py").replace("/", "."): path for path in modules}
    edges = {name: {one for one in imported(sources[path]) if one in names} - {name} for name, path in names.items()}
    reached = {name: _reached(name, edges) for name in edges}
    return len(
        {frozenset(one for one in found if name in reached[one]) for name, found in reached.items() if name in found}
    )


def _reached(name: str, edges: Mapping[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    todo = list(edges[name])
    while todo:
        one = todo.pop()
        if one not in seen:
            seen.add(one)
            todo += edges[one]
    return seen


def cloned_lines(sources: Sources) -> int:
    places: dict[tuple[str, ...], list[tuple[str, int]]] = defaultdict(list)
    for path, source in sources.items():
        lines = [line.strip() for line in source.splitlines()]
        kept = [(at, line) for at, line in enumerate(lines) if line and not line.startswith(("#", "import", "from"))]
        for first in range(len(kept) - CLONE_LINES + 1):
            window = kept[first : first + CLONE_LINES]
            places[tuple(line for _, line in window)].append((path, window[0][0]))
    return len({(path, at) for found in places.values() if len(found) > 1 for path, at in found})


def repeated_classes(sources: Sources) -> list[str]:
    """Public class names that more than one module defines."""
    modules: dict[str, set[str]] = defaultdict(set)
    for path, source in sources.items():
        for node in _nodes(source):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                modules[node.name].add(path)
    return sorted(name for name, paths in modules.items() if len(paths) > 1)


def short_called_once(source: str) -> int:
    """Counts private functions of a module that are short and named in one other place of it: each may read better
    there."""
    tree = ast.parse(source)
    named = Counter(node.id for node in ast.walk(tree) if isinstance(node, ast.Name))
    named.update(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    functions = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sum(
        one.name.startswith("_")
        and not one.name.startswith("__")
        and not one.decorator_list
        and named[one.name] == 1
        and (one.end_lineno or 0) - one.body[0].lineno < SHORT
        for one in functions
    )


def unmirrored(sources: Sources, tests: Iterable[str]) -> list[str]:
    """Capabilities without a folder of tests, and folders of tests whose package is not there. `tests`: paths."""
    packages = {str(parent) for path in sources for parent in Path(path).parents}
    tested = {str(Path(path).parent.relative_to("tests")) for path in tests if Path(path).name.startswith("test_")}
    missing = capabilities(sources).keys() - {f"palestra/{Path(one).parts[0]}" for one in tested if one != "."}
    stray = {f"tests/{one}" for one in tested if f"palestra/{one}" not in packages} - TESTS_OF_NO_PACKAGE
    return sorted(name for name in missing if name.startswith("palestra/")) + sorted(stray)


def capabilities(sources: Sources) -> Counter[str]:
    """Returns lines by capability."""
    lines: Counter[str] = Counter()
    for path, source in sources.items():
        parts = Path(path).parts
        if len(parts) > 2:
            lines["/".join(parts[:2])] += source.count("\n")
    return lines


def docstrings(source: str) -> Iterator[str]:
    """Those of modules, classes, functions and fields."""
    for node in _nodes(source):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.value.value


def over_bars(found: Mapping[str, float | str]) -> list[str]:
    """A line for each figure that is over its bar."""
    return [f"{name}: {found[name]}, may be {most}" for name, most in BARS.items() if float(found[name]) > most]


def figures(everything: Sources) -> dict[str, float | str]:
    sources = {path: source for path, source in everything.items() if path.startswith(ROOTS)}
    unmirrored_names = unmirrored(sources, everything.keys() - sources.keys())
    lines = sum(source.count("\n") for source in sources.values())
    anys = sum(len(re.findall(r"\bAny\b", source)) for source in sources.values())
    json_objects = sum(len(re.findall(r"\bJson(?:Object|Mapping)\b", source)) for source in sources.values())
    folders = Counter(str(Path(path).parent) for path in sources)
    fullest, most = folders.most_common(1)[0]
    modules = {one for source in sources.values() for one in imported(source)}
    found = [name for name in HTTP_LIBRARIES if any(f"{one}.".startswith(f"{name}.") for one in modules)]
    return {
        "lines": lines,
        "files": len(sources),
        "most files in a folder": f"{most} ({fullest})",
        "folders of 25 files or more": sum(count >= 25 for count in folders.values()),
        "Any in a thousand lines": round(1000 * anys / lines, 1),
        "with JsonObject counted": round(1000 * (anys + json_objects) / lines, 1),
        "short functions called once": sum(short_called_once(source) for source in sources.values()),
        "tests without their mirror": f"{len(unmirrored_names)} ({', '.join(unmirrored_names)})",
        "class names in two modules": len(repeated_classes(sources)),
        'docstrings with "Of" first': sum(
            text.startswith("Of ") for source in sources.values() for text in docstrings(source)
        ),
        "lines where a clone begins": cloned_lines(sources),
        "files that start processes": sum(bool(SPAWNS.search(source)) for source in sources.values()),
        "files with locks": sum("fcntl.flock" in source for source in sources.values()),
        "files with difflib": sum("difflib" in source for source in sources.values()),
        "HTTP client libraries": f"{len(found)} ({', '.join(found)})",
        "circles of files": circles(sources),
        **{f"  {name}": lines for name, lines in capabilities(sources).most_common()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--at", metavar="COMMIT", help="beside it")
    parser.add_argument("--check", action="store_true", help="fail if a figure is over its bar, and print nothing else")
    args = parser.parse_args()
    commit, root = args.at, Path(__file__).parents[1]
    if args.check:
        sys.exit("\n".join(over_bars(figures(in_tree(root)))) or None)
    columns = [figures(at_commit(root, commit))] if commit else []
    columns.append(figures(in_tree(root)))
    for name in dict.fromkeys(name for column in columns for name in column):
        print(f"{name:<28}", *(f"{column.get(name, '')!s:<70}" for column in columns))  # noqa: T201


if __name__ == "__main__":
    main()
