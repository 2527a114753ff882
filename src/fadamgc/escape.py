"""Make text of unknown origin (labels, titles, messages of clients) safe for the place that shows it."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd

# Control characters (ESC, line breaks), marks that change the direction of text, lone surrogates.
UNPRINTABLE = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
FORMULA = tuple("=+-@\t\r\n")  # a spreadsheet reads a text that starts with one of these as a formula

_LATEX = str.maketrans(
    {
        **{sign: f"\\{sign}" for sign in "&%$#_{}"},
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
    }
)
_MARKDOWN = str.maketrans({**{sign: f"\\{sign}" for sign in "\\|`*[]"}, "<": "&lt;"})


def printable(text: object, limit: int | None = None) -> str:
    """Return text as one line that is harmless in a terminal or a log: control characters are escaped.

    >>> printable("FedAvg\\x1b[2J\\n")
    'FedAvg\\\\x1b[2J\\\\n'
    >>> printable("no data" + 1000 * "!", limit=10)
    'no data!!!...'
    """
    full = str(text)
    start = full[:limit]
    clean = UNPRINTABLE.sub(lambda match: match[0].encode("unicode_escape").decode(), start)
    return clean if len(start) == len(full) else f"{clean}..."


def latex(text: str) -> str:
    """Escape text for LaTeX.

    >>> latex("50 % of a_1")
    '50 \\\\% of a\\\\_1'
    """
    return printable(text).translate(_LATEX)


def markdown(text: str) -> str:
    """Escape text for Markdown, also in a cell of a table; raw HTML stays text.

    >>> markdown("a|b <i>")
    'a\\\\|b &lt;i>'
    """
    return printable(text).translate(_MARKDOWN)


def csv_cell(text: str) -> str:
    """Escape text for CSV: a single quote goes before text that a spreadsheet would read as a formula.

    >>> csv_cell("=1+1"), csv_cell("FedAvg")
    ("'=1+1", 'FedAvg')
    """
    return ("'" if text.startswith(FORMULA) else "") + printable(text)


def csv_bytes(table: pd.DataFrame) -> bytes:
    """Return a table as a CSV file: numbers unchanged, text escaped by ``csv_cell``."""
    safe = table.copy()
    for name, column in table.items():
        if any(isinstance(value, str) for value in column):
            safe[name] = [csv_cell(value) if isinstance(value, str) else value for value in column]
    return safe.to_csv(index=False).encode()


def duration(seconds: float) -> str:
    """Return a time as text, rounded.

    >>> [duration(s) for s in (8, 100, 4000, 9000)]
    ['8 s', '2 min', '1.1 h', '2.5 h']
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"
