"""Text for people: what comes from a target is cleaned and bounded here before anybody sees it.

Process names, command lines, container ids and host names are chosen by whoever runs the job. Printed as they are they could move
the cursor, recolour the terminal, or hide text; every surface passes them through ``clean`` first.
"""

from __future__ import annotations

import os
import re
import sys
import textwrap
import unicodedata
from collections.abc import Iterable, Sequence
from itertools import groupby
from operator import sub
from typing import TextIO

# ECMA-48: CSI and two-byte escapes, OSC/DCS/PM/APC strings up to their terminator (or the end of the text).
_ESCAPES = re.compile(
    r"\x1b[\]PX^_].*?(?:\x07|\x1b\\|\x9c|$)|\x1b\[[0-?]*[ -/]*[@-~]?|\x9b[0-?]*[ -/]*[@-~]?|\x1b[ -/]*[0-~]?", re.DOTALL
)

ELLIPSIS = "…"


def clean(text: str, limit: int = 200) -> str:
    """``text`` without escape sequences, with every other control, format or unpaired surrogate character shown as ``?``.

    At most ``limit`` characters come back; a longer text ends with an ellipsis.
    """
    if len(text) <= limit and text.isprintable():
        return text
    # Bound first: a command line may hold megabytes, and the pattern need not see them.
    text = _ESCAPES.sub("", text[: 4 * limit + 64])
    shown = "".join("?" if unicodedata.category(ch)[0] == "C" or ch in "\u2028\u2029" else ch for ch in text)
    return shown if len(shown) <= limit else shown[: max(limit - 1, 0)] + ELLIPSIS


def ranges(numbers: Iterable[int]) -> str:
    """Whole numbers as ascending ranges: ``0-1, 3``; the empty string for none."""
    parts: list[str] = []
    start = last = None
    for number in sorted(set(numbers)):
        if last is not None and number == last + 1:
            last = number
            continue
        if start is not None:
            parts.append(_range(start, last))
        start = last = number
    if start is not None:
        parts.append(_range(start, last))
    return ", ".join(parts)


def _range(start: int, last: int | None) -> str:
    return f"{start}" if last is None or last == start else f"{start}-{last}"


def compressed(ranks: Iterable[int]) -> str:
    """A rank set as ``0-3,8``; a regular one as ``0-28/4`` (from, to, step); negative numbers are unknown ranks."""
    wanted = list(ranks)
    known = sorted([rank for rank in wanted if rank >= 0])
    unknown = len(wanted) - len(known)
    parts = [_run_text(run) for run in _runs(known)]
    if unknown:
        parts.append(f"{unknown} unknown" if parts else "unknown")
    return ",".join(parts)


def _runs(ranks: Sequence[int]) -> list[Sequence[int]]:
    """Greedy runs of equal distance: two neighbours or more, or three with another distance. O(ranks), few steps of Python."""
    runs, start, end = list[Sequence[int]](), 0, 0
    for distance, same in groupby(map(sub, ranks[1:], ranks)):
        end += len(list(same))
        if end - start >= (1 if distance == 1 else 2):
            runs.append(ranks[start : end + 1])
            start = end + 1
        elif end > start:
            runs.append(ranks[start:end])
            start = end
    return [*runs, ranks[start:]] if start < len(ranks) else runs


def _run_text(run: Sequence[int]) -> str:
    if len(run) == 1:
        return str(run[0])
    step = run[1] - run[0]
    return f"{run[0]}-{run[-1]}" + (f"/{step}" if step != 1 else "")


def ranks(numbers: Sequence[int]) -> str:
    """``rank 3`` or ``ranks 0-1, 3``."""
    return f"{'rank' if len(set(numbers)) == 1 else 'ranks'} {ranges(numbers)}"


def first_of(names: Iterable[str], most: int) -> str:
    """``a, b``, or of more than so many ``a, b and 3 more``."""
    found = list(names)
    return ", ".join(found[:most]) + (f" and {len(found) - most} more" if len(found) > most else "")


def bus_text(number: int) -> str:
    """``0000:07:00.0`` of NCCL's number, whose hexadecimal digits are the bus id's (``busIdToInt64``, src/misc/utils.cc)."""
    return f"{number >> 20 & 0xFFFFFFFF:04x}:{number >> 12 & 0xFF:02x}:{number >> 4 & 0xFF:02x}.{number & 0xF:x}"


def size(nbytes: float) -> str:
    """A number of bytes in binary units: ``512 B``, ``1.5 KiB``, ``64 MiB``."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(value) < 1000 or unit == "TiB":
            break
        value /= 1024
    if unit == "B" or abs(value) >= 100 or value == int(value):
        return f"{value:.0f} {unit}"
    return f"{value:.1f} {unit}"


def rate(per_second: float) -> str:
    """Operations a second with as many digits as mean something; ``0`` for none."""
    if per_second <= 0:
        return "0"
    if per_second < 0.1:
        return "<0.1"
    if per_second < 10:
        return f"{per_second:.1f}"
    return f"{per_second:,.0f}"


def duration(seconds: float) -> str:
    """A length of time: ``0.2s``, ``12s``, ``4m05s``, ``2h03m``, ``3d02h``."""
    if seconds < 0:
        seconds = 0.0
    if seconds < 9.95:
        return f"{seconds:.1f}s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def time_text(ns: float | None) -> str:
    """``850 ns``, ``12 µs``, ``3.4 ms``, ``1.2 s``; ``-`` for unknown."""
    if ns is None:
        return "-"
    for unit, factor in (("ns", 1.0), ("µs", 1e3), ("ms", 1e6)):
        if ns < 999.5 * factor:
            value = ns / factor
            return f"{value:.1f} {unit}" if value < 10 and unit != "ns" else f"{value:.0f} {unit}"
    return f"{ns / 1e9:.1f} s"


def share(part: float) -> str:
    """A share of one in percent, short: ``100%``, ``12%``, ``0.14%``."""
    return f"{part:.0%}" if part >= 0.0995 or part <= 0 else f"{part * 100:.2g}%"


def width(text: str) -> int:
    """Terminal cells that ``text`` takes: wide East Asian characters take two, combining marks none."""
    return sum(0 if unicodedata.combining(ch) else 2 if unicodedata.east_asian_width(ch) in ("W", "F") else 1 for ch in text)


def fit(text: str, cells: int) -> str:
    """``text`` cut to at most ``cells`` terminal cells, with an ellipsis where it was cut."""
    if width(text) <= cells:
        return text
    taken, used = [], 0
    for ch in text:
        step = width(ch)
        if used + step > cells - 1:
            break
        taken.append(ch)
        used += step
    return "".join(taken) + ELLIPSIS if cells > 0 else ""


def wrap(line: str, cells: int) -> list[str]:
    """A line as lines of at most ``cells`` cells, broken at blanks, the later ones indented two more than the first."""
    if width(line) <= cells:
        return [line]
    indent = " " * (len(line) - len(line.lstrip()) + 2)
    return textwrap.wrap(line, cells, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False) or [line]


def columns(header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), gap: int = 2) -> list[str]:
    """Lines of a table whose columns are aligned; ``right`` lists the indices aligned to the right.

    The last column is never padded, and a column that is empty in every row is left out with its heading.
    """
    body = [tuple(row) for row in rows]
    keep = [i for i in range(len(header)) if any(row[i] for row in body)]
    table = [tuple(header[i] for i in keep), *(tuple(row[i] for i in keep) for row in body)]
    widths = [max(width(line[i]) for line in table) for i in range(len(keep))]
    lines = []
    for line in table:
        cells = []
        for i, cell in enumerate(line):
            pad = " " * (widths[i] - width(cell))
            cells.append(pad + cell if keep[i] in right else cell + pad)
        lines.append((" " * gap).join(cells).rstrip())
    return lines


class Style:
    """Colours for a terminal; every method returns the text unchanged when standard output is none or does not want them."""

    def __init__(self, stream: TextIO | None = None, *, enabled: bool | None = None) -> None:
        stream = sys.stdout if stream is None else stream
        if enabled is None:
            # https://no-color.org: any non-empty value.
            enabled = stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM", "dumb") != "dumb"
        self.enabled = enabled

    def _wrap(self, code: str, text: str) -> str:
        return f"\x1b[{code}m{text}\x1b[0m" if self.enabled else text

    def bold(self, text: str) -> str:
        """Headings and what to look at first."""
        return self._wrap("1", text)

    def dim(self, text: str) -> str:
        """What matters least."""
        return self._wrap("2", text)

    def bad(self, text: str) -> str:
        """Something is wrong."""
        return self._wrap("1;31", text)

    def good(self, text: str) -> str:
        """Something is well."""
        return self._wrap("1;32", text)

    def warn(self, text: str) -> str:
        """Something is missing or uncertain."""
        return self._wrap("1;33", text)
