"""Drawings of a report as inline SVG: timeline, rank grid, delay matrix, the way to the culprit. All text is escaped here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby

from ncclwatch.report.gather import TimelinePoint
from ncclwatch.text import clean
from ncclwatch.view.frame import GridCell
from ncclwatch.view.states import BY_LETTER, URGENCY
from ncclwatch.view.waits import WaitMatrix

COLOURS = {
    "X": "#c01c28", "D": "#813d9c", "T": "#a51d2d", "?": "#9a9996", "s": "#e66100", "w": "#f5c211", ".": "#deddda",
    "i": "#99c1f1", "r": "#57e389",
}  # fmt: skip
MAX_ROWS = 96
MAX_CELLS = 4096
MAX_MATRIX = 96


def text(value: str, limit: int = 200) -> str:
    """Cleaned and escaped."""
    return escape(clean(value, limit), quote=True)


def svg(width: float, height: float, parts: Iterable[str], label: str) -> str:
    """A drawing that fills the width it is given."""
    return (
        f'<svg viewBox="0 0 {width:g} {height:g}" role="img" aria-label="{text(label)}" '
        f'style="max-width:{width:g}px;min-width:min({width:g}px,600px)" xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _rect(x: float, y: float, width: float, height: float, fill: str, title: str = "") -> str:
    tip = f"<title>{text(title)}</title>" if title else ""
    return f'<rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}" fill="{fill}">{tip}</rect>'


def _text(
    x: float, y: float, words: str, *, anchor: str = "start", size: int = 11, fill: str = "#3d3846", weight: str = ""
) -> str:
    bold = f' font-weight="{weight}"' if weight else ""
    return f'<text x="{x:.2f}" y="{y:.2f}" font-size="{size}" text-anchor="{anchor}" fill="{fill}"{bold}>{text(words)}</text>'


def timeline(rows: Sequence[tuple[str, object]], points: Sequence[TimelinePoint], event: float | None) -> str:
    """A row a rank, a column a sample, coloured by state; the event is a line. ``rows`` are (label, process key)."""
    if not points or not rows:
        return "<p>no sample lies around the event</p>"
    left, height, width = 90.0, 12.0, 1100.0
    shown = rows[:MAX_ROWS]
    begin, end = points[0].time, points[-1].time
    span = max(end - begin, 1e-3)
    step = (width - left) / len(points)
    edges = [left + (point.time - begin) / span * (width - left - step) for point in points] + [width]
    parts = []
    for i, (label, key) in enumerate(shown):
        y = 18 + i * height
        parts.append(_text(left - 6, y + 9.5, label, anchor="end"))
        # Neighbouring samples in one state are one rectangle.
        states = [(point.letters.get(key, "."), point.operations.get(key, "")) for point in points]  # type: ignore[call-overload]
        at = 0
        for (letter, operation), run in groupby(states):
            count = sum(1 for _ in run)
            title = f"{label}: {BY_LETTER[letter].word}" + (f" in {operation}" if operation else "")
            parts.append(_rect(edges[at], y, edges[at + count] - edges[at] + 0.2, height - 2, COLOURS[letter], title))
            at += count
    bottom = 18 + len(shown) * height
    for k in range(6):
        at_x = left + k / 5 * (width - left)
        since = begin + k / 5 * span - (event if event is not None else begin)
        parts.append(_text(at_x, bottom + 13, f"{since:+.0f} s", anchor="start" if k == 0 else "end" if k == 5 else "middle"))
    if event is not None and begin <= event <= end:
        x = left + (event - begin) / span * (width - left - step)
        parts.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="12" y2="{bottom:.2f}" stroke="#241f31" stroke-width="1.5"/>')
        parts.append(_text(x, 10, "event", anchor="middle", weight="bold"))
    drawing = svg(width, bottom + 20, parts, "states of ranks over time")
    more = len(rows) - len(shown)
    return drawing + (f"<p>… and {more} more ranks, less urgent</p>" if more > 0 else "")


def grid(cells: Sequence[GridCell]) -> str:
    """All ranks, coloured and lettered by state; of too many ranks a cell stands for several, the worst shown."""
    group = 1
    while len(cells) / group > MAX_CELLS:
        group *= 2
    letters = [cell.letter for cell in cells]
    shown = [min(letters[i : i + group], key=URGENCY.__getitem__) for i in range(0, len(letters), group)]
    per_line = 8 if len(shown) <= 64 else 32 if len(shown) <= 512 else 64
    size = 34.0 if per_line == 8 else 17.0 if per_line == 32 else 15.0
    left = 46.0
    parts = []
    for i, letter in enumerate(shown):
        x, y = left + i % per_line * size, i // per_line * size
        rank = cells[i * group].rank
        name = f"rank {rank}" if group == 1 else f"ranks {rank} to {cells[min((i + 1) * group, len(cells)) - 1].rank}"
        parts.append(_rect(x, y, size - 1.5, size - 1.5, COLOURS[letter], f"{name}: {BY_LETTER[letter].word}"))
        words = f"{rank} {letter}" if per_line == 8 else letter
        fill = "#ffffff" if letter in "XDT" else "#241f31"
        parts.append(_text(x + size / 2 - 0.75, y + size / 2 + 3.5, words, anchor="middle", size=10, fill=fill))
        if i % per_line == 0:
            parts.append(_text(left - 6, y + size / 2 + 3.5, str(rank), anchor="end", size=10))
    lines = -(-len(shown) // per_line)
    note = f"<p>each cell is {group} ranks, the most urgent state shown</p>" if group > 1 else ""
    return svg(left + per_line * size, lines * size, parts, "states of all ranks") + note


def legend(letters: Mapping[str, int]) -> str:
    """Which colour is which state, with the number of ranks in it."""
    found = sorted(letters, key=URGENCY.__getitem__)
    return " ".join(
        f'<span class="key"><i style="background:{COLOURS[letter]}">{text(letter)}</i> '
        f"{letters[letter]} {text(BY_LETTER[letter].word)}</span>"
        for letter in found
    )


def delay_matrix(waits: WaitMatrix, names: Mapping[int, str]) -> str:
    """Rows wait for columns; the darker, the larger the share of samples. Of many ranks only those that appear, worst first."""
    if not waits.share:
        return "<p>no rank was seen to wait for another through a network proxy or shared memory</p>"
    weight: dict[int, float] = {}
    for (waiter, other), share in waits.share.items():
        weight[waiter] = weight.get(waiter, 0.0) + share
        weight[other] = weight.get(other, 0.0) + share
    ranks = list(waits.ranks) if len(waits.ranks) <= MAX_MATRIX else sorted(sorted(weight, key=lambda r: -weight[r])[:MAX_MATRIX])
    place = {rank: i for i, rank in enumerate(ranks)}
    size = max(6.0, min(26.0, 700.0 / max(len(ranks), 1)))
    left, top = 52.0, 40.0
    parts = [_rect(left, top, len(ranks) * size, len(ranks) * size, "#f6f5f4")]
    for (waiter, other), share in sorted(waits.share.items()):
        if waiter in place and other in place:
            red = 0.15 + 0.85 * share
            colour = f"rgb({255 - int(63 * red)},{int(235 * (1 - red))},{int(225 * (1 - red))})"
            tip = (
                f"{names.get(waiter, f'rank {waiter}')} waited for {names.get(other, f'rank {other}')} in {share:.0%} of samples"
            )
            parts.append(_rect(left + place[other] * size, top + place[waiter] * size, size - 0.6, size - 0.6, colour, tip))
    step = 1 if size >= 14 else 2 if size >= 9 else 4
    for i, rank in enumerate(ranks):
        if i % step == 0:
            parts.append(_text(left - 5, top + i * size + size / 2 + 3.5, str(rank), anchor="end", size=10))
            parts.append(
                _text(left + i * size + size / 2, top - 5, str(rank), anchor="middle", size=10 if len(str(rank)) < 4 else 7)
            )
    parts.append(_text(left, 14, "waited for →", size=11, weight="bold"))
    parts.append(_text(2, top - 8, "waiting ↓", size=10, weight="bold"))
    # The heading stands above however few ranks.
    drawing = svg(left + max(len(ranks) * size, 90.0) + 4, top + len(ranks) * size + 4, parts, "who waited for whom")
    hidden = len(waits.ranks) - len(ranks)
    return drawing + (f"<p>{hidden} ranks that wait less are left out</p>" if hidden > 0 else "")


def way(culprits: Sequence[int], found: Mapping[int, tuple[int, int]], names: Mapping[int, str]) -> str:
    """The waits that lead to the culprits, drawn from the left: each box waits for the one its arrow points to."""
    columns: dict[int, list[int]] = {0: list(culprits)[:12]}
    for rank, (_, depth) in found.items():
        columns.setdefault(depth, []).append(rank)
    shown = [columns[depth] for depth in sorted(columns)][:9]
    width, height, gap_x, gap_y = 104.0, 26.0, 46.0, 10.0
    lines = max(len(column) for column in shown)
    place = {}
    for i, column in enumerate(shown):
        for k, rank in enumerate(column[:14]):
            offset = (min(lines, 14) - min(len(column), 14)) / 2
            place[rank] = (4 + i * (width + gap_x), 4 + (k + offset) * (height + gap_y))
    parts = [
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#5e5c64"/></marker></defs>'
    ]
    for rank, (other, _) in found.items():
        if rank in place and other in place:
            x1, y1 = place[rank][0], place[rank][1] + height / 2
            x2, y2 = place[other][0] + width, place[other][1] + height / 2
            curve = f"M{x1:.1f} {y1:.1f} C{x1 - 24:.1f} {y1:.1f} {x2 + 24:.1f} {y2:.1f} {x2:.1f} {y2:.1f}"
            parts.append(f'<path d="{curve}" fill="none" stroke="#5e5c64" marker-end="url(#tip)"/>')
    for rank, (x, y) in place.items():
        guilty = rank in culprits
        parts.append(_rect(x, y, width, height, "#c01c28" if guilty else "#f9f06b", names.get(rank, f"rank {rank}")))
        fill = "#ffffff" if guilty else "#241f31"
        parts.append(
            _text(x + width / 2, y + 17, f"rank {rank}", anchor="middle", size=12, fill=fill, weight="bold" if guilty else "")
        )
    drawn_width = 8 + len(shown) * (width + gap_x) - gap_x
    hidden = len(found) + len(culprits) - len(place)
    more = f"<p>… and {hidden} more ranks behind these</p>" if hidden > 0 else ""
    return svg(drawn_width, 8 + min(lines, 14) * (height + gap_y), parts, "who waits for the culprit") + more


def bars(rows: Sequence[tuple[str, int, int, str]]) -> str:
    """Progress bars: (label, done, total, what it waits for)."""
    height, left, width = 17.0, 170.0, 420.0
    parts = []
    for i, (label, done, total, waits) in enumerate(rows):
        y = i * height
        share = min(max(done / max(total, 1), 0.0), 1.0)
        parts.append(_text(left - 6, y + 12, label, anchor="end"))
        parts.append(_rect(left, y + 2, width, height - 5, "#deddda"))
        parts.append(_rect(left, y + 2, width * share, height - 5, "#3584e4"))
        parts.append(_text(left + width + 8, y + 12, f"{done}/{total}  {waits}"))
    return svg(1000, len(rows) * height + 2, parts, "progress of steps")
