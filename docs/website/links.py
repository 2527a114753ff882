"""Links of the pages: between files of the repository on GitHub, between pages of the site here.

A page links to files by paths that GitHub understands. In the site, a link to another page becomes a link to
that page, and a figure is copied. Any other file is linked in the repository if its URL is known; if not,
examples are copied, too, and other files are named.
"""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCS = "docs/"
# Files outside docs/ that are pages of the site.
PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "benchmarks/README.md": "benchmarks/index.md",
    "results/benchmarks/table.md": "benchmarks/table.md",
    "results/benchmarks-texts/table.md": "benchmarks/texts.md",
}
SOURCES = {page: source for source, page in PAGES.items()}
FIGURES = (".png", ".svg")
EXAMPLES = re.compile(r"examples/[^/]+\.(py|ipynb)")
_LINK = re.compile(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s#]*)(#[^()\s]*)?\)")


def page_of(path: str) -> str | None:
    """Return the page of the site that is made from a file of the repository, or the place of a figure."""
    if path in PAGES:
        return PAGES[path]
    if path.startswith(DOCS) and (ROOT / path).is_dir():
        path = min(file.relative_to(ROOT).as_posix() for file in (ROOT / path).glob("*.md"))
    if path.startswith(DOCS):
        return path.removeprefix(DOCS)
    return path if path.endswith(FIGURES) else None


def source_of(page: str) -> str:
    """Return the file of the repository that a page of the site is made from."""
    return SOURCES.get(page, DOCS + page)


def linked(text: str, page: str) -> Iterator[str]:
    """Yield the paths, from the root of the repository, that a page links to and that exist."""
    folder = posixpath.dirname(source_of(page))
    for _, target, _ in _LINK.findall(text):
        path = posixpath.normpath(posixpath.join(folder, target))
        if target and not path.startswith("..") and (ROOT / path).exists():
            yield path


def rewritten(text: str, page: str, repository: str = "") -> str:
    """Return the text of a page with links that work in the site.

    Args:
        text: Markdown of the page, with links that work on GitHub.
        page: the page's place in the site, such as ``guide.md``.
        repository: URL of the repository, or nothing.
    """
    folder = posixpath.dirname(source_of(page))

    def replace(match: re.Match[str]) -> str:
        words, target, anchor = match.group(1), match.group(2), match.group(3) or ""
        path = posixpath.normpath(posixpath.join(folder, target))
        if not target or not (ROOT / path).exists() or path.startswith(".."):
            return match.group()
        if (to := page_of(path)) is not None:
            return f"[{words}]({os.path.relpath(to, posixpath.dirname(page) or '.')}{anchor})"
        if repository:
            return f"[{words}]({repository.rstrip('/')}/blob/main/{path}{anchor})"
        if EXAMPLES.fullmatch(path):
            return f"[{words}]({os.path.relpath(path, posixpath.dirname(page) or '.')})"
        return words if path in words else f"{words} (`{path}`)"

    return _LINK.sub(replace, text)
