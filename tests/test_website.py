"""The reference has every public name, once, and nothing that is gone; public names have examples."""

from __future__ import annotations

from collections import Counter

from website import links, reference


def test_every_public_name_is_documented_once():
    assert Counter(reference.documented(reference.pages())) == Counter(list(reference.public_names()))


def test_every_public_name_has_an_example():
    """Except methods, whose use is that of ``Algorithm``."""
    names = reference.public_names()
    without = [name for name, value in names.items() if not reference.has_example(name, value)]
    assert set(without) <= reference.method_names()


def test_links_between_files_become_links_between_pages():
    text = "[a](specs.md#run) [b](../README.md) [c](../src/fadamgc/task.py) [d](https://example.org)"
    assert links.rewritten(text, "guide.md") == (
        "[a](specs.md#run) [b](index.md) c (`src/fadamgc/task.py`) [d](https://example.org)"
    )
    at_home = links.rewritten(text, "guide.md", "https://example.org/us/it")
    assert "[c](https://example.org/us/it/blob/main/src/fadamgc/task.py)" in at_home
