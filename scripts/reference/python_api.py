"""The reference of the Python API: one page for each package that the README and the docs show.

The code is read, never imported.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

import griffe

from scripts.reference.links import ROOT
from scripts.reference.pages import Reference, cell, code, page, table
from scripts.reference.tiers import MARK, is_experimental

PACKAGES = {
    "palestra.model": "The compute core: load a model, train and sample LoRA adapters on it",
    "palestra.types": "Records of training and sampling requests",
    "palestra.chat": "Chat templates as tokens, tool-call parsing",
    "palestra.chat.tool_parsers": "Ways in which models write tool calls",
    "palestra.audit": "Audits of environments",
    "palestra.coding": "Coding tasks and their verifiers",
    "palestra.config": "The config system",
    "palestra.environments": "Text environments",
    "palestra.environments.fleet": "Fleet tasks",
    "palestra.environments.fleet.verifiers": "Running verifiers that came with a task",
    "palestra.environments.fleet.cookbook": "Fleet tasks for the Tinker cookbook",
    "palestra.environments.fleet.skyrl": "Fleet tasks for SkyRL",
    "palestra.environments.platform": "The local platform of task apps",
    "palestra.episodes.client": "Playing and training on episodes; also importable from `palestra.episodes`",
    "palestra.gym.servers.resources": "Resources servers of a gym",
    "palestra.gym.servers.gymnasium": "Resources servers that move by steps",
    "palestra.gym.servers.agents": "Agent servers of a gym",
    "palestra.gym.servers.responses": "Reading the Responses objects of a rollout",
    "palestra.gym.servers.states": "Sessions of a resources server",
    "palestra.gym.agents": "The agents that come with the gym",
    "palestra.gym.agents.simple": "The agent to derive one's own from",
    "palestra.gym.models": "The model servers that come with the gym",
    "palestra.gym.testing": "Tests of a gym's servers",
    "palestra.gym.nemo_rl": "A gym that NeMo RL drives, without Ray",
    "palestra.gym.nemo_rl.ray_actor": "A gym that NeMo RL drives, as a Ray actor",
    "palestra.gym.nemo_rl.result_order": "Rows and results of that gym, in order",
    "palestra.runs": "Runs and their checkpoints",
    "palestra.runs.reader": "Reading run folders",
    "palestra.sandbox": "Sandboxes for agents and programs of others",
    "palestra.training.custom_functions": "Advantages and losses of one's own",
}
PAGES = "reference/python"
IMPORT = re.compile(r"^(?:from (palestra[\w.]*) import ([\w, ]+)|import (palestra[\w.]+))", re.MULTILINE)


def pages(reference: Reference) -> None:
    palestra = griffe.load("palestra", search_paths=[ROOT], allow_inspection=False, resolve_aliases=True)
    assert isinstance(palestra, griffe.Module)
    rows = []
    for name, about in PACKAGES.items():
        module = palestra[name.removeprefix("palestra.")]
        exports = list(_exports(module))
        for export in exports:
            _check(module, export, reference)
        uri = f"{name.removeprefix('palestra.').replace('.', '-')}.md"
        reference.pages[f"{PAGES}/{uri}"] = page(name, f"{about}. Made from the code.", [_directive(name, exports)])
        mark = MARK if all(is_experimental("python", f"{name}.{export}") for export in exports) else ""
        rows.append([f"[{code(name)}]({uri})", mark + about])
    intro = (
        "Made from the code: what each of these exports is public, everything else may change without notice. What is "
        "stable and what is experimental: [Compatibility](../../compatibility.md#what-stays)."
    )
    reference.pages[f"{PAGES}/index.md"] = page("Python API", intro, [table(["package", "what it is for"], rows)])
    reference.problems += _unlisted()


def _exports(module: griffe.Object | griffe.Alias) -> Iterator[str]:
    """What `__all__` lists; without one, the functions and classes that are defined there."""
    if module.exports:
        yield from sorted(map(str, module.exports))
        return
    for name, found in module.members.items():
        if not name.startswith("_") and not found.is_alias and (found.is_class or found.is_function):
            yield name


def _check(module: griffe.Object | griffe.Alias, name: str, reference: Reference) -> None:
    found = module.members.get(name)
    if found is None:
        reference.problems.append(f"`{module.path}` exports `{name}`, which is not there")
        return
    target = found.final_target if isinstance(found, griffe.Alias) else found
    text = target.docstring.value if target.docstring else None
    reference.explained(text, f"`{module.path}.{name}`", f"its docstring in {target.relative_filepath}")
    reference.public("python", f"{module.path}.{name}", _signature(target), "")


def _signature(found: griffe.Object | griffe.Alias) -> str:
    """The parameters of a function or of a class, and what else a class has."""
    parameters = [one.name + ("=" if one.default is not None else "") for one in getattr(found, "parameters", ())]
    called = f"({', '.join(one for one in parameters if one not in ('self', 'cls'))})"
    if not found.is_class:
        return called if found.is_function else "value"
    members = [name for name, one in found.members.items() if not name.startswith("_") and not one.is_alias]
    return f"class{called} {' '.join(sorted(members))}".strip()


def _directive(name: str, exports: list[str]) -> str:
    members = "".join(f"\n        - {export}" for export in exports)
    return f"::: {name}\n    options:\n      members:{members}"


def _unlisted() -> Iterator[str]:
    """Imports of ours in the README and the docs from modules that have no page here."""
    for file in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for found in IMPORT.finditer(file.read_text(encoding="utf-8")):
            module = (found[1] or found[3]).replace("palestra.episodes", "palestra.episodes.client")
            if module not in PACKAGES:
                yield f"{file.relative_to(ROOT)} shows `{module}`, which has no page; see {cell(__name__)}"
