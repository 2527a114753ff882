"""Hooks of mkdocs: pages that are generated, or made from files outside docs/, and links that work here."""

from __future__ import annotations

from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files, InclusionLevel
from mkdocs.structure.pages import Page

from website import links, reference


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add pages, figures and examples, then the folders of the navigation."""
    for source, page in links.PAGES.items():
        files.append(File.generated(config, page, abs_src_path=str(links.ROOT / source)))
    linked = {
        path
        for file in files.documentation_pages()
        for path in links.linked(file.content_string, file.src_uri)
        if not path.startswith(links.DOCS)
    }
    for path in sorted(linked):
        if path.endswith(links.FIGURES) or (not config.repo_url and links.EXAMPLES.fullmatch(path)):
            source = str(links.ROOT / path)
            files.append(File.generated(config, path, abs_src_path=source, inclusion=InclusionLevel.INCLUDED))
    config.nav = _expanded(config.nav, [file.src_uri for file in files.documentation_pages()])
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001
    """Make the links of a page work in the site."""
    return reference.with_homes(links.rewritten(markdown, page.file.src_uri, config.repo_url or ""))


def _expanded(nav: Any, pages: list[str]) -> Any:
    """Replace each folder in the navigation by its pages; a folder without pages is skipped."""
    if isinstance(nav, dict):
        return {title: found for title, item in nav.items() if (found := _expanded(item, pages))}
    if isinstance(nav, list):
        expanded = [_expanded(item, pages) for item in nav]
        return [
            item for item in expanded if item and item != {} and [*getattr(item, "values", list)()] != [[]]
        ]
    if nav.endswith("/"):
        return [page for page in pages if page.startswith(nav)]
    return nav
