"""Verdicts on standard output."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from ncclwatch.cli.output import emit
from ncclwatch.model.verdict import Verdict
from ncclwatch.text import Style, wrap
from ncclwatch.view.verdict_text import verdict_lines
from ncclwatch.view.why import why_lines


def print_verdicts(verdicts: Sequence[Verdict], *, why: bool = False) -> None:
    """Every verdict in full, an empty line between two; with ``why`` how each came about."""
    style = Style()
    for i, verdict in enumerate(verdicts):
        if i:
            emit()
        for line in (*verdict_lines(verdict, style), *(why_lines(verdict, style) if why else ())):
            # A file or a pager gets whole lines, which can be searched.
            emit("\n".join(wrap(line, shutil.get_terminal_size().columns)) if sys.stdout.isatty() else line)
