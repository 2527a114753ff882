"""The documentation site: generated pages, links, and what every public name needs."""
