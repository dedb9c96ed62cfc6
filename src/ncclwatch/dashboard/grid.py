"""The grid of ranks: one cell a rank, coloured and lettered by state; where ranks are too many a cell stands for several."""

from __future__ import annotations

import re
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from ncclwatch.view.frame import Grid, GridCell, View
from ncclwatch.view.states import BY_LETTER, STATES, URGENCY

STYLES = {state.letter: Style.parse(state.style) for state in STATES}
CURSOR = Style(reverse=True, bold=True)
_RUNS = re.compile(r"(.)\1*", re.DOTALL)
LABEL = 6
"""Cells at the left of each line for the number of its first rank."""


class Arrangement:
    """How ``count`` ranks lie in ``columns`` × ``lines`` cells of the terminal.

    ``cell`` is the width of one cell in characters, ``per_line`` cells a line, ``group`` ranks a cell.
    """

    def __init__(self, count: int, columns: int, lines: int) -> None:
        room = max(columns - LABEL, 8)
        lines = max(lines, 1)
        self.group = 1
        for self.cell in (6, 2, 1):
            self.per_line = _round(room // self.cell)
            if self.per_line * lines >= count and (self.cell < 6 or count <= 64):
                break
        else:
            self.group = -(-count // (self.per_line * lines))
            # Powers of two: a cell is then a node, or a number of nodes, more often than not.
            self.group = 1 << max(self.group - 1, 0).bit_length()
        self.cells = -(-count // self.group)
        self.lines = -(-self.cells // self.per_line)


def _round(cells: int) -> int:
    """Lines of a round number of cells: a column then is the same GPU of every node."""
    if cells >= 64:
        return cells // 64 * 64
    return max(1 << (cells.bit_length() - 1), 1)


def worst(letters: str, group: int) -> str:
    """A letter for each group of ranks: the most urgent state in it."""
    if group == 1:
        return letters
    urgency = URGENCY
    return "".join([min(letters[i : i + group], key=urgency.__getitem__) for i in range(0, len(letters), group)])


class RankGrid(Widget, can_focus=True):
    """The grid. ``Chosen`` is sent for a rank that is opened."""

    DEFAULT_CSS = "RankGrid { height: auto; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("left", "move(-1)", show=False),
        Binding("right", "move(1)", show=False),
        Binding("up", "move_line(-1)", show=False),
        Binding("down", "move_line(1)", show=False),
        Binding("home", "move(-1000000000)", show=False),
        Binding("end", "move(1000000000)", show=False),
        Binding("enter", "choose", "Open", show=False),
    ]

    class Chosen(Message):
        """A cell was opened: the most urgent rank in it."""

        def __init__(self, cell: GridCell) -> None:
            super().__init__()
            self.cell = cell

    def __init__(self, *, max_lines: int = 0, id: str | None = None) -> None:
        super().__init__(id=id)
        self.max_lines = max_lines
        self.cursor = 0
        self._cells = Grid("", (), ())
        self._letters = ""
        self._arrangement = Arrangement(0, 80, 1)
        self._shape = (0, 0, 0)

    def show(self, view: View) -> None:
        """Take the ranks of a view; redrawn only when a state changed."""
        cells = view.grid
        self._arrange(len(cells))
        letters = worst(cells.letters, self._arrangement.group)
        self._cells = cells
        if letters != self._letters:
            self._letters = letters
            self.cursor = min(self.cursor, max(len(letters) - 1, 0))
            self.refresh()

    def _arrange(self, count: int) -> None:
        lines = self.max_lines or max(self.size.height - 1, 1)
        shape = (count, self.size.width, lines)
        if shape != self._shape:
            self._shape = shape
            before = self._arrangement.lines
            self._arrangement = Arrangement(count, self.size.width or 80, lines)
            self._letters = ""
            self.refresh(layout=before != self._arrangement.lines)

    def on_resize(self) -> None:
        """Lay the ranks out anew."""
        self._arrange(len(self._cells))
        self._letters = worst(self._cells.letters, self._arrangement.group)
        self.refresh()

    def get_content_height(self, container: object, viewport: object, width: int) -> int:
        """Lines of cells and the legend."""
        count = len(self._cells)
        return Arrangement(count, width, self.max_lines).lines + 1 if self.max_lines else max(self.size.height, 2)

    def render_line(self, y: int) -> Strip:
        """One line of cells, or the legend below them."""
        width, plan = self.size.width, self._arrangement
        if y == plan.lines:
            return self._legend().adjust_cell_length(width).apply_style(self.rich_style)
        first = y * plan.per_line
        letters = self._letters[first : first + plan.per_line]
        if not letters:
            return Strip.blank(width, self.rich_style)
        # A group begins at the rank of its first cell: numbers need not be without gaps.
        number = self._cells[first * plan.group].rank if first * plan.group < len(self._cells) else None
        segments = [Segment(f"{'?' if number is None else number:>{LABEL - 1}} ", Style(dim=True))]
        if plan.cell == 6:
            segments += self._labelled(first, letters)
        else:
            for run in _RUNS.finditer(letters):
                shown = run[1].ljust(plan.cell) * len(run[0])
                segments.append(Segment(shown, STYLES[run[1]]))
            if self.has_focus and first <= self.cursor < first + len(letters):
                segments = self._with_cursor(segments, LABEL + (self.cursor - first) * plan.cell)
        return Strip(segments).adjust_cell_length(width).apply_style(self.rich_style)

    def _labelled(self, first: int, letters: str) -> list[Segment]:
        segments = []
        for i, found in enumerate(letters):
            cell = self._cells[first + i]
            style = STYLES[found]
            if self.has_focus and first + i == self.cursor:
                style += CURSOR
            segments.append(Segment(f"{'?' if cell.rank is None else cell.rank:>3} {found}", style))
            segments.append(Segment(" "))
        return segments

    @staticmethod
    def _with_cursor(segments: list[Segment], x: int) -> list[Segment]:
        parts = list(Segment.divide(segments, [x, x + 1, 1 << 16]))
        under = [Segment(s.text, (s.style or Style()) + CURSOR) for s in parts[1]]
        return [*parts[0], *under, *parts[2]]

    def _legend(self) -> Strip:
        counts = {found: self._cells.letters.count(found) for found in URGENCY}
        segments = [Segment(" " * LABEL)]
        for found, count in counts.items():
            if count:
                segments.append(Segment(f" {found} ", STYLES[found]))
                segments.append(Segment(f" {count} {BY_LETTER[found].word}  "))
        if self._arrangement.group > 1:
            segments.append(Segment(f"a cell is {self._arrangement.group} ranks, the worst shown", Style(dim=True)))
        return Strip(segments)

    # --- keys and mouse ------------------------------------------------------------------------------------------------

    def action_move(self, by: int) -> None:
        """Move the cursor by cells."""
        self.cursor = min(max(self.cursor + by, 0), max(len(self._letters) - 1, 0))
        self.refresh()

    def action_move_line(self, by: int) -> None:
        """Move the cursor by lines."""
        self.action_move(by * self._arrangement.per_line)

    def action_choose(self) -> None:
        """Open the most urgent rank of the cell under the cursor."""
        group = self._arrangement.group
        inside = self._cells[self.cursor * group : (self.cursor + 1) * group]
        if inside:
            self.post_message(self.Chosen(min(inside, key=lambda cell: URGENCY[cell.letter])))

    def on_click(self, event: events.Click) -> None:
        """Open what was clicked on."""
        event.stop()
        plan = self._arrangement
        column = (event.x - LABEL) // plan.cell
        place = event.y * plan.per_line + column
        if 0 <= column < plan.per_line and event.y < plan.lines and place < len(self._letters):
            self.cursor = place
            self.refresh()
            self.action_choose()

    def on_focus(self) -> None:
        """The cursor shows while the grid has the focus."""
        self.refresh()

    def on_blur(self) -> None:
        """See ``on_focus``."""
        self.refresh()
