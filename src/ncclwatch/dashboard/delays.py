"""The delay matrix as a heat map: rows wait for columns; digits are tenths of the samples, so that it reads without colour.

``l`` turns it into the matrix of completion latencies, where rows send to columns and a digit is how many times the usual one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual.binding import Binding, BindingType
from textual.strip import Strip
from textual.widget import Widget

from ncclwatch.text import time_text
from ncclwatch.view.frame import View
from ncclwatch.view.waits import Pair, WaitMatrix, matrix

MAX_SAMPLES_OF_MANY = 5
"""Samples added up where ranks are many: each costs time in proportion to ranks and channels."""
MANY = 512
LABEL = 6
DIM = Style(dim=True)
BOLD = Style(bold=True)
HEAT = [Style.parse(f"{'black' if i < 6 else 'white'} on rgb({255 - 6 * i},{235 - 24 * i},{225 - 24 * i})") for i in range(10)]


class DelayMatrix(Widget, can_focus=True):
    """The matrix over the newest samples. Of more ranks than fit, blocks of neighbouring ranks are shown, the worst of each."""

    DEFAULT_CSS = "DelayMatrix { height: 1fr; }"
    BINDINGS: ClassVar[list[BindingType]] = [Binding("l", "turn", "Latency")]

    def __init__(self, recent: Callable[[], Sequence[View]], *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._recent = recent
        self._matrix = WaitMatrix((), {}, 0)
        self._latencies: Mapping[Pair, float] = {}
        self._of_latency = False
        self._lines: list[list[Segment]] = []

    def show(self, view: View) -> None:
        """Add the waits up again."""
        views = [view for view in self._recent() if view.frame.samples]
        if len(view.frame.windows) > MANY:
            views = views[-MAX_SAMPLES_OF_MANY:]
        ranks = [window.rank for window in view.frame.windows if window.rank is not None]
        self._matrix = matrix([view.waits for view in views], ranks)
        self._latencies = view.latencies if self._of_latency else {}
        self._draw()

    def action_turn(self) -> None:
        """Waits, or how long what is sent takes to be completed."""
        self._of_latency = not self._of_latency
        recent = self._recent()
        self._latencies = recent[-1].latencies if recent and self._of_latency else {}
        self._draw()

    def on_resize(self) -> None:
        """Another size holds more or fewer ranks."""
        self._draw()

    def _draw(self) -> None:
        lines = list(self._build(self.size.width or 80, max(self.size.height, 4)))
        if lines != self._lines:
            self._lines = lines
            self.refresh()

    def _build(self, width: int, height: int) -> list[list[Segment]]:
        found = self._matrix
        if self._of_latency:
            return self._build_latencies(width, height)
        if not found.samples:
            return [[Segment(" no sample is kept here", DIM)]]
        title = [
            Segment(" rows wait for columns", BOLD),
            Segment(
                f"; a digit is tenths of the newest samples ({found.samples}), by each rank's own counters; l: latencies",
                DIM,
            ),
        ]
        if not found.share:
            return [title, [Segment(" nobody was seen to wait for another through a network proxy or shared memory", DIM)]]
        return self._cells(title, found.share, _tenths, "the longest wait", width, height)

    def _build_latencies(self, width: int, height: int) -> list[list[Segment]]:
        """How long what rows send to columns takes to be completed."""
        title = [Segment(" rows send to columns", BOLD)]
        if not self._latencies:
            return [title, [Segment(" no completion of a request, and no round trip, was seen between two known ranks", DIM)]]
        usual = median(self._latencies.values())
        slowest = max(self._latencies, key=lambda pair: self._latencies[pair])
        words = f"; a digit is how many times {time_text(usual)}, the median; slowest {slowest[0]} to {slowest[1]}: "
        title.append(Segment(f"{words}{time_text(self._latencies[slowest])}; l: waits", DIM))
        return self._cells(
            title, self._latencies, lambda ns: (round(ns / usual), ns >= 9.5 * usual), "the longest latency", width, height
        )

    def _cells(
        self,
        title: list[Segment],
        values: Mapping[Pair, float],
        level_of: Callable[[float], tuple[int, bool]],
        what: str,
        width: int,
        height: int,
    ) -> list[list[Segment]]:
        """A digit for every pair of ranks, or of blocks of them; ``level_of`` gives it, and whether it is more than that."""
        found = self._matrix
        room_x, room_y = max((width - LABEL) // 2, 1), max(height - 3, 1)
        count = len(found.ranks)
        block = 1
        while -(-count // block) > min(room_x, room_y):
            block *= 2
        size = -(-count // block)
        place = {rank: i // block for i, rank in enumerate(found.ranks)}
        worst: dict[tuple[int, int], float] = {}
        for (waiter, other), value in values.items():
            if waiter in place and other in place:
                cell = (place[waiter], place[other])
                worst[cell] = max(worst.get(cell, 0.0), value)
        lines = [title, [Segment(" " * LABEL, DIM), Segment(self._heads(found, block, size), DIM)]]
        for row in range(size):
            segments = [Segment(f"{found.ranks[row * block]:>{LABEL - 1}} ", DIM)]
            for column in range(size):
                value = worst.get((row, column), 0.0)
                if value:
                    level, beyond = level_of(value)
                    segments.append(Segment("# " if beyond else f"{min(level, 9)} ", HEAT[min(level, 9)]))
                else:
                    segments.append(Segment("· ", DIM))
            lines.append(segments)
        if block > 1:
            lines.append([Segment(f" a row or column is {block} ranks, {what} of them shown", DIM)])
        return lines

    @staticmethod
    def _heads(found: WaitMatrix, block: int, size: int) -> str:
        """Numbers of the first ranks of the columns, as many as find room."""
        heads = ""
        for column in range(size):
            if len(heads) <= 2 * column:
                heads = heads.ljust(2 * column) + f"{found.ranks[column * block]} "
        return heads[: 2 * size + 4]

    def render_line(self, y: int) -> Strip:
        """One line."""
        segments = self._lines[y] if y < len(self._lines) else []
        return Strip(segments).adjust_cell_length(self.size.width).apply_style(self.rich_style)


def _tenths(share: float) -> tuple[int, bool]:
    return int(share * 9.999), share >= 0.995
