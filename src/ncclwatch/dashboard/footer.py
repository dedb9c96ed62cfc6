"""The lines at the bottom."""

from __future__ import annotations

from rich.style import Style

from ncclwatch.dashboard.lines import BOLD, DIM, Line, plain
from ncclwatch.text import clean, rate, size, width
from ncclwatch.view.frame import View

HINTS = ("Enter open", "v verdict", "q leave", "/ filter", "s sort", "Space pause", "[ ] back", "S save", "R record")
LOST = Style.parse("bold #f5c211")


def footer(view: View | None, said: str, cells: int) -> list[Line]:
    """Two lines: which planes see the job, what was lost and what watching costs; then what was just said, or the keys."""
    planes: list[tuple[str, Style]] = [(" ", Style())]
    cost = ""
    if view is not None:
        frame = view.frame
        for plane in frame.planes:
            planes.append((plane.name + " ", Style() if plane.running else DIM))
            planes.append(("✓  " if plane.running else f"✗ {clean(plane.reason, 60)}  ", DIM))
        if frame.lost:
            planes.append((f" {frame.lost:,} records LOST ", LOST))
        elif any(plane.name == "calls" and plane.running for plane in frame.planes):
            planes.append((" nothing lost", DIM))
        spent = frame.cost
        parts = []
        if spent.probe_share is not None and spent.hits_per_s is not None:
            parts.append(f"probes {rate(spent.hits_per_s)}/s = {spent.probe_share:.3%} of a core")
        if spent.wire_share is not None and spent.wire_budget is not None:
            parts.append(f"wire {spent.wire_share:.3%} of a thread (budget {spent.wire_budget:.1%})")
        if spent.own_share is not None and spent.rss_bytes is not None:
            parts.append(f"ncclwatch {spent.own_share:.1%} of a core, {size(spent.rss_bytes)}")
        cost = "; ".join(parts)
    hints = "  ".join(HINTS[: next((n for n in range(len(HINTS), 1, -1) if len("  ".join(HINTS[:n])) < cells - 1), 1)])
    second: Line = plain(f" {said}", BOLD) if said else plain(f" {hints}", DIM)
    used = sum(width(text) for text, _ in planes)
    if cost and used + len(cost) + 2 <= cells:
        planes.append((" " * (cells - used - len(cost) - 1) + cost, DIM))
    elif cost and not said:
        second = plain(f" {cost}", DIM)
    return [tuple(planes), second]
