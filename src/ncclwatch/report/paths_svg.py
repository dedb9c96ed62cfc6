"""The picture of paths as inline SVG: boxes for hosts and routers, lines as thick as their rate, red where flows crowd."""

from __future__ import annotations

from collections import Counter

from ncclwatch.report.svg import _rect, _text, svg, text
from ncclwatch.text import fit, ranges, size
from ncclwatch.view.paths import SILENT, Edge, Picture, Place

BOX, HEIGHT, GAP, STEP = 158.0, 34.0, 16.0, 300.0
"""Width and height of a box, the gap below it, and from one column to the next."""
RED, BLUE, GREY = "#c01c28", "#3584e4", "#c0bfbc"
THICKEST = 11.0
TOP = 26.0


def paths(picture: Picture) -> str:
    """The drawing with its legend; a sentence where there is no flow."""
    if not picture.edges:
        return "<p>no flow with a known five-tuple was seen</p>"
    at = _positions(picture)
    most = max((edge.rate for edge in picture.edges.values()), default=0.0)
    parts = [
        _text(k * STEP + BOX / 2 + 4, 14, heading, anchor="middle", weight="bold") for k, heading in enumerate(picture.headings)
    ]
    for (a, b), edge in sorted(picture.edges.items(), key=lambda item: (item[1].crowded, bool(item[1].flows), item[1].rate)):
        parts.append(_line(at[a], at[b], edge, most, f"{a[1]} → {b[1]}"))
    out, into = Counter(a for a, _ in picture.edges), Counter(b for _, b in picture.edges)
    parts += [
        _label(at[a], at[b], edge, near_end=into[b] < out[a])
        for (a, b), edge in picture.edges.items()
        if edge.flows and edge.known
    ]
    parts += [_box(place, where, picture) for place, where in at.items()]
    width = (len(picture.places) - 1) * STEP + BOX + 8
    height = TOP + max(len(column) for column in picture.places) * (HEIGHT + GAP)
    drawing = svg(width, height, parts, "paths of flows: hosts and routers, lines by rate, red where flows crowd")
    return f"<div class=scroll>{drawing}</div><p class=dim>{_legend(picture)}</p>"


def _legend(picture: Picture) -> str:
    words = ["from who sends, left, to who receives; a line is as thick as its rate"]
    if any(edge.crowded for edge in picture.edges.values()):
        words.append("red: flows crowd there while other links between the same hosts are empty")
    if any(not edge.flows for edge in picture.edges.values()):
        words.append("grey: a way that probes saw and no flow takes")
    if any(not edge.known for edge in picture.edges.values()):
        words.append("dashes: which way these flows take was not asked ('ncclwatch paths probe --flows')")
    elif not picture.followed:
        words.append("which way between the hosts was not asked ('ncclwatch paths probe')")
    if picture.hidden:
        words.append(f"{picture.hidden} more flows are not drawn")
    return text("; ".join(words), 500)


def _positions(picture: Picture) -> dict[Place, tuple[float, float]]:
    """Left upper corner of each box; shorter columns are centred."""
    tallest = max(len(column) for column in picture.places)
    found = {}
    for k, column in enumerate(picture.places):
        offset = (tallest - len(column)) / 2
        for row, name in enumerate(column):
            found[k, name] = (4 + k * STEP, TOP + (row + offset) * (HEIGHT + GAP))
    return found


def _box(place: Place, where: tuple[float, float], picture: Picture) -> str:
    column, name = place
    x, y = where
    host = column in (0, len(picture.places) - 1)
    label = picture.labels.get(name, "").partition(" (netns")[0] if host or column == 1 else ""
    parts = [_rect(x, y, BOX, HEIGHT, "#f9f06b" if host else "#deddda", f"{label} {name}".strip())]
    if label:
        parts.append(_text(x + BOX / 2, y + 14, fit(label, 24), anchor="middle", weight="bold"))
        parts.append(_text(x + BOX / 2, y + 27, fit(name, 26), anchor="middle", size=10))
    else:
        parts.append(_text(x + BOX / 2, y + 21, fit(name if name != SILENT else "silent router", 26), anchor="middle"))
    return "".join(parts)


def _line(a: tuple[float, float], b: tuple[float, float], edge: Edge, most: float, name: str) -> str:
    x1, y1, x2, y2 = a[0] + BOX, a[1] + HEIGHT / 2, b[0], b[1] + HEIGHT / 2
    half = (x2 - x1) / 2
    curve = f"M{x1:.1f} {y1:.1f} C{x1 + half:.1f} {y1:.1f} {x2 - half:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
    colour = RED if edge.crowded else BLUE if edge.flows else GREY
    thick = 1.5 + (THICKEST - 1.5) * (edge.rate / most if most > 0 else 0.2) if edge.flows else 1.2
    dashes = ' stroke-dasharray="6 5"' if not edge.known else ""
    tip = f"<title>{text(name)}: {text(_words(edge), 400)}</title>"
    return (
        f'<path d="{curve}" fill="none" stroke="{colour}" stroke-width="{thick:.1f}" stroke-opacity="0.85"{dashes}>{tip}</path>'
    )


def _words(edge: Edge) -> str:
    if not edge.flows:
        return "no flow"
    flows = "; ".join(sorted({f"rank {flow.rank} → {flow.peer} channel {flow.channel}" for flow in edge.flows})[:12])
    return f"{len(edge.flows)} flows, {size(edge.rate)}/s ({flows})" + (", crowded" if edge.crowded else "")


def _label(a: tuple[float, float], b: tuple[float, float], edge: Edge, *, near_end: bool) -> str:
    """Channels and rate of a link, at that end of it where fewer lines meet."""
    channels = ranges(sorted({flow.channel for flow in edge.flows}))
    words = f"channel{'s' if len(edge.flows) > 1 else ''} {fit(channels, 10)}" + (f", {size(edge.rate)}/s" if edge.rate else "")
    x, y, anchor = (b[0] - 5, b[1], "end") if near_end else (a[0] + BOX + 5, a[1], "start")
    fill = RED if edge.crowded else "#3d3846"
    drawn = _text(x, y + HEIGHT / 2 - 9, words, anchor=anchor, size=9, fill=fill)
    return f'<g stroke="#fff" stroke-width="3" paint-order="stroke">{drawn}</g>'
