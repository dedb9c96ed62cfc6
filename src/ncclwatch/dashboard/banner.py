"""The verdict in a few lines: the class, who and why, the first evidence, and always the one next step."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from rich.style import Style

from ncclwatch.dashboard.lines import Line, plain
from ncclwatch.model.verdict import Verdict, VerdictClass
from ncclwatch.text import clean, fit, width
from ncclwatch.view.verdict_text import culprit_name

ACCUSES = Style.parse("bold white on #c01c28")
SLOW = Style.parse("bold black on #e5a50a")
UNKNOWN = Style.parse("bold black on #f5c211")
CALM = Style.parse("bold #33d17a")
NEXT = Style.parse("bold")
MORE = Style.parse("dim")

SUMMARY_LINES = 3
NEXT_LINES = 2


def banner(verdicts: Sequence[Verdict], cells: int, room: int) -> list[Line]:
    """At most ``room`` lines of ``cells`` cells."""
    if not verdicts:
        return [plain("LOOKING  one more sample is needed to tell running from hung", MORE)]
    verdict = verdicts[0]
    accuses = verdict.verdict_class.accuses
    unknown = verdict.verdict_class is VerdictClass.UNKNOWN
    style = SLOW if verdict.verdict_class.slow else ACCUSES if accuses else UNKNOWN if unknown else CALM
    word = str(verdict.verdict_class).upper().replace("-", " ")
    sure = f"  ({verdict.confidence:.0%} sure)" if accuses else ""
    more = [v for v in verdicts[1:] if v.verdict_class.accuses]
    others = f"  (+{len(more)} more: v)" if more else ""
    text = f" {word}  {clean(verdict.summary, 400)}{sure}{others}"
    lines: list[Line] = [plain(padded(part, cells), style) for part in wrapped(text, cells, SUMMARY_LINES)]
    if not accuses and not unknown:
        return lines[:room]
    steps = wrapped(f" next: {clean(verdict.next_steps[0], 300)}", cells, NEXT_LINES) if verdict.next_steps else []
    last: list[Line] = [plain(padded(step, cells), NEXT) for step in steps]
    between: list[Line] = []
    if len(verdict.culprits) > 1:
        between.append(plain(padded(" culprits: " + "; ".join(culprit_name(c) for c in verdict.culprits[:8]), cells)))
    between += [plain(padded(f"   {clean(line, 300)}", cells), MORE) for line in verdict.evidence]
    spare = max(room - len(lines) - len(last), 0)
    # The next step is never pushed out.
    lines = lines[: max(room - len(last), 1)]
    return [*lines, *between[:spare], *last][:room]


def wrapped(text: str, cells: int, most: int) -> list[str]:
    """At most ``most`` lines; the last ends with an ellipsis where text was left out."""
    lines = textwrap.wrap(text, max(cells - 1, 10), subsequent_indent=" ", break_on_hyphens=False, drop_whitespace=True)
    lines = [" " + line if i == 0 and not line.startswith(" ") else line for i, line in enumerate(lines)] or [""]
    if len(lines) > most:
        lines = [*lines[: most - 1], lines[most - 1] + " …"]
    return [fit(line, cells) for line in lines]


def padded(text: str, cells: int) -> str:
    """Cut or filled with blanks to ``cells``."""
    text = fit(text, cells)
    return text + " " * (cells - width(text))
