"""Links, flows and who crowds where, in words."""

from __future__ import annotations

from collections.abc import Sequence

from ncclwatch.paths.measured import Crowded, Link, MeasuredFlow
from ncclwatch.text import clean, ranges


def crowd_text(one: Crowded) -> str:
    """``2 flows cross 10.79.0.1 → 10.80.0.2 (ranks 0 → 1, channels 0-1) while 10.79.0.1 → 10.80.1.2 carries none``."""
    others = ", ".join(link_text(link) for link in one.empty[:4]) + (" and others" if len(one.empty) > 4 else "")
    carry = "carries none" if len(one.empty) == 1 else "carry none"
    crossing = f"{len(one.flows)} flows cross {link_text(one.link)} ({who(one.flows)})"
    return f"{crossing} while {others} {carry} (confidence {one.confidence:.0%})"


def link_text(link: Link) -> str:
    """``10.79.0.1 → 10.80.0.2``; ``queued paths of 10.79.0.2 → 10.79.1.2`` where routers are silent."""
    return (
        f"{link[1]} paths of {clean(link[0], 100)}"
        if link[1] in ("queued", "empty")
        else f"{clean(link[0], 48)} → {clean(link[1], 48)}"
    )


def who(flows: Sequence[MeasuredFlow]) -> str:
    """Ranks and channels of flows."""
    pairs = sorted({(flow.rank, flow.peer) for flow in flows})
    channels = ranges(sorted({flow.channel for flow in flows}))
    shown = ", ".join(f"{rank} → {peer}" for rank, peer in pairs[:4]) + (f" and {len(pairs) - 4} more" if len(pairs) > 4 else "")
    return f"rank{'s' if len(pairs) > 1 else ''} {shown}, channel{'s' if ',' in channels or '-' in channels else ''} {channels}"
