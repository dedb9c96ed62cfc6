"""The paths of flows on a screen of text: a line a way, as heavy as its rate, red (and with ``!``) where flows crowd."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style

from ncclwatch.dashboard.lines import BOLD, DIM, PLAIN, Line, Span, plain
from ncclwatch.model.paths import Probe
from ncclwatch.paths.words import crowd_text
from ncclwatch.text import clean, fit, ranges, size, width, wrap
from ncclwatch.view.frame import View
from ncclwatch.view.paths import SILENT, Picture, Place, Way, picture_of_view

RED = Style.parse("bold #c01c28")
LINK = 4
"""Cells of a line between two places."""
MAX_WAYS = 200


def paths_text(probes: Sequence[Probe], view: View | None, cells: int) -> list[Line]:
    """Lines for a width of ``cells``."""
    if view is None or not view.frame.flows:
        return [plain(" no connection over a network was read")]
    picture = picture_of_view(view, probes)
    if not picture.ways:
        return [plain(" no flow whose five-tuple is known: 'ncclwatch paths' says why")]
    lines: list[Line] = []
    for one in picture.crowded:
        lines += [plain(f" {text}", RED) for text in wrap(f"CROWDED  {crowd_text(one)}", cells - 2)]
    lines += [plain("")] if picture.crowded else []
    room = (cells - 2 - LINK * (len(picture.headings) - 1)) // len(picture.headings)
    lines.append(plain(" " + (" " * LINK).join(heading.ljust(room) for heading in picture.headings), BOLD))
    most = max((way.rate for way in picture.ways), default=0.0)
    for way in picture.ways[:MAX_WAYS]:
        lines += _way(picture, way, most, room)
    if len(picture.ways) > MAX_WAYS:
        lines.append(plain(f" … and {len(picture.ways) - MAX_WAYS} more ways", DIM))
    lines.append(plain(""))
    if not picture.followed:
        advice = "which routers these flows pass was not asked: 'ncclwatch paths probe --flows', then --paths FILE here"
        lines += [plain(f" {text}", DIM) for text in wrap(advice, cells - 2)]
    return lines


def _way(picture: Picture, way: Way, most: float, room: int) -> list[Line]:
    spans: list[Span] = [(" ", PLAIN)]
    style = PLAIN if way.flows else DIM
    for number, place in enumerate(way.places):
        if number:
            before = way.places[number - 1]
            edge = picture.edges.get((before, place))
            red = edge is not None and edge.crowded and bool(way.flows)
            # Who skips columns has a longer line.
            longer = (place[0] - before[0] - 1) * (room + LINK)
            spans.append((_line(way, most, red).center(LINK - 1 + longer, _line(way, most, red)[0]) + " ", RED if red else style))
        spans.append((_name(picture, place, room), style))
    if not way.flows:
        return [tuple(spans)]
    pairs = sorted({(flow.rank, flow.peer) for flow in way.flows})
    who = ", ".join(f"{rank} → {peer}" for rank, peer in pairs[:4]) + (" …" if len(pairs) > 4 else "")
    channels = ranges(sorted({flow.channel for flow in way.flows}))
    count = f"{len(way.flows)} flow{'s' if len(way.flows) != 1 else ''}"
    rate = f", {size(way.rate)}/s" if way.rate else ""
    return [tuple(spans), plain(f"   {count}: rank {who}, channel {channels}{rate}", DIM)]


def _line(way: Way, most: float, red: bool) -> str:
    """As heavy as the rate; without colour a crowd is told by its mark."""
    if not way.flows:
        return "╌╌╌"
    heavy = "━" if most <= 0 or way.rate > most / 2 else "─"
    return f"{heavy}!{heavy}" if red else heavy * 3


def _name(picture: Picture, place: Place, room: int) -> str:
    """Host and address, or a router; always ``room`` cells."""
    column, name = place
    host = picture.labels.get(name, "").partition(" (netns")[0] if column in (0, 1, len(picture.places) - 1) else ""
    both = f"{host} {name}".strip()
    shown = "silent" if name == SILENT else both if width(both) <= room else name
    text = fit(clean(shown, 100), room)
    return text + " " * (room - width(text))
