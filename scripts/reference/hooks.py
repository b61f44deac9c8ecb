"""What MkDocs runs while it builds the site: adds the pages made from code, and resolves links into the repository.

Warnings fail the build, as `make docs` builds strictly.
"""

from __future__ import annotations

import logging

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page

from scripts.reference import commands, configs, licences, metrics, python_api, routes, tiers
from scripts.reference.links import RepositoryLinks
from scripts.reference.pages import Reference, generated

log = logging.getLogger("mkdocs.plugins.reference")

SOURCES = (commands.pages, configs.pages, routes.pages, metrics.pages, python_api.pages, licences.pages)

_links = RepositoryLinks()


def made_reference() -> Reference:
    reference = Reference()
    for pages in SOURCES:
        pages(reference)
    return reference


def on_files(files: Files, config: MkDocsConfig) -> Files:
    reference = made_reference()
    for uri, text in reference.pages.items():
        files.append(generated(config, uri, text))
    for problem in (*reference.problems, *tiers.changes(reference.names)):
        log.warning("%s", problem)
    _links.add_files(files, config)
    return files


def on_page_markdown(markdown: str, /, page: Page, config: MkDocsConfig, files: Files) -> str:
    return _links.resolve(markdown, page.file.src_uri)
