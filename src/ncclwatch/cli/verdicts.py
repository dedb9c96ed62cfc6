"""Verdicts on standard output."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence

from ncclwatch.cli.output import emit
from ncclwatch.model.verdict import Verdict
from ncclwatch.text import Style, wrap
from ncclwatch.view.verdict_text import verdict_lines


def print_verdicts(verdicts: Sequence[Verdict]) -> None:
    """Every verdict in full, an empty line between two."""
    style = Style()
    for i, verdict in enumerate(verdicts):
        if i:
            emit()
        for line in verdict_lines(verdict, style):
            # A file or a pager gets whole lines, which can be searched.
            emit("\n".join(wrap(line, shutil.get_terminal_size().columns)) if sys.stdout.isatty() else line)
