"""The line at the top."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.style import Style

from ncclwatch.dashboard.lines import BOLD, DIM, Line
from ncclwatch.dashboard.source import Source
from ncclwatch.text import clean, duration, width
from ncclwatch.view.frame import View

PAUSED = Style.parse("bold black on #f5c211")
RECORDING = Style.parse("bold white on #c01c28")


def title(view: View | None, newest: View | None, source: Source, cells: int, *, paused: bool) -> Line:
    """What is watched on the left; on the right whether it is recorded, and the moment that is shown."""
    right: list[tuple[str, Style]] = []
    if source.recording:
        right += [(f" {clean(source.recording, 60)} ", RECORDING), (" ", Style())]
    if view is not None:
        if paused and newest is not None:
            right.append((f" PAUSED {duration(newest.frame.time - view.frame.time)} ago ", PAUSED))
        else:
            right.append((source.label, BOLD))
        right.append((f" {datetime.fromtimestamp(view.frame.time):%H:%M:%S}  ?: help ", Style()))
    room = cells - sum(width(text) for text, _ in right)
    return (*_cut(_job(view), room), *right)


def _job(view: View | None) -> list[tuple[str, Style]]:
    spans = [(" ncclwatch", BOLD)]
    if view is None:
        return [*spans, ("  attaching …", Style())]
    where = clean(view.hosts[0], 30) if len(view.hosts) == 1 else f"{len(view.hosts)} hosts"
    count = len(view.frame.windows)
    versions = ", ".join(view.versions[:2]) or "?"
    spans.append((f"  {where}  {count} rank{'s' if count != 1 else ''}  NCCL {versions}", Style()))
    if view.frame.layout:
        spans.append((f"  {clean(view.frame.layout, 60)}", DIM))
    return spans


def _cut(spans: Sequence[tuple[str, Style]], cells: int) -> Iterator[tuple[str, Style]]:
    """Spans cut or filled to ``cells``."""
    left = cells
    for text, style in spans:
        if left <= 0:
            return
        shown = text[:left]
        left -= width(shown)
        yield shown, style
    if left > 0:
        yield " " * left, Style()
