"""A table of any number of rows of which only the visible ones are drawn; sort, filter, cursor, mouse (Textual's line API)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, ClassVar, Generic, TypeVar

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.binding import Binding, BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from ncclwatch.text import clean, fit, width

Row = TypeVar("Row")

HEADER = Style(bold=True, underline=True)
CURSOR = Style(reverse=True)
PLAIN = Style()


@dataclass(frozen=True, slots=True)
class Column(Generic[Row]):
    """A column: ``text`` of a row, and the value rows are sorted by (``None`` sorts last).

    ``flexible`` columns share what is left of the width. A column is shown when the table is at least ``from_width`` wide.
    """

    title: str
    width: int
    text: Callable[[Row], str]
    sort: Callable[[Row], Any] | None = None
    right: bool = False
    from_width: int = 0
    flexible: bool = False


@lru_cache(16384)
def cell(text: str, cells: int, *, right: bool) -> str:
    """``text`` cleaned, cut and padded to exactly ``cells`` terminal cells."""
    if not text.isprintable() or len(text) > 500:
        text = clean(text, 500)
    if not text.isascii():
        text = fit(text, cells)
        pad = " " * (cells - width(text))
    elif len(text) <= cells:
        pad = " " * (cells - len(text))
    else:
        return text[: cells - 1] + "…" if cells else ""
    return pad + text if right else text + pad


def sort_value(value: Any) -> tuple[bool, Any]:
    """A key under which ``None`` comes last."""
    return (value is None, 0 if value is None else value)


class RowTable(ScrollView, Generic[Row], can_focus=True):
    """Rows of ``columns``; ``identity`` keeps the cursor on the same thing while rows come and go."""

    DEFAULT_CSS = "RowTable { height: 1fr; } RowTable:focus { background-tint: $foreground 3%; }"
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("up", "move(-1)", "Up", show=False),
        Binding("down", "move(1)", "Down", show=False),
        Binding("pageup", "move_page(-1)", "Page up", show=False),
        Binding("pagedown", "move_page(1)", "Page down", show=False),
        Binding("home", "move(-1000000000)", "First", show=False),
        Binding("end", "move(1000000000)", "Last", show=False),
        Binding("enter", "choose", "Open", show=False),
        Binding("s", "next_sort", "Sort by the next column", show=False),
        Binding("r", "reverse", "Reverse the order", show=False),
    ]

    class Chosen(Message):
        """A row was opened, by Enter or a click on the row under the cursor."""

        def __init__(self, table: RowTable[Any], row: Any) -> None:
            super().__init__()
            self.table = table
            self.row = row

        @property
        def control(self) -> RowTable[Any]:
            """The table."""
            return self.table

    def __init__(
        self,
        columns: Sequence[Column[Row]],
        *,
        identity: Callable[[Row], object],
        style: Callable[[Row], Style] | None = None,
        empty: str = "nothing to show",
        id: str | None = None,
    ) -> None:
        super().__init__(id=id)
        self.columns = list(columns)
        self.empty = empty
        self.needle = ""
        self.sort_by: int | None = None
        self.descending = False
        self.cursor = 0
        self._moved = False
        """Whether the cursor was put somewhere: until then it stays at the top, where what is urgent comes up."""
        self.shown: Sequence[Row] = ()
        self._identity = identity
        self._style = style
        self._rows: Sequence[Row] = ()
        self._base_style: Style | None = None
        self._layout: tuple[int, list[tuple[Column[Row], int]]] = (-1, [])

    # --- content -------------------------------------------------------------------------------------------------------

    def show(self, rows: Sequence[Row]) -> None:
        """Take new rows; order, filter and cursor stay."""
        self._rows = rows
        self._arrange()

    def filter(self, needle: str) -> None:
        """Show only rows in which every word of ``needle`` occurs, in whatever column."""
        self.needle = needle
        self._arrange()

    def sort(self, index: int | None) -> None:
        """Order by a column; by the same one again turns the order round; ``None`` is the order rows came in."""
        self.descending = not self.descending if index is not None and index == self.sort_by else False
        self.sort_by = index
        self._arrange()

    @property
    def current(self) -> Row | None:
        """The row under the cursor."""
        return self.shown[self.cursor] if 0 <= self.cursor < len(self.shown) else None

    def select(self, identity: object) -> None:
        """Put the cursor on the row of that identity, if it is shown."""
        place = next((i for i, row in enumerate(self.shown) if self._identity(row) == identity), None)
        if place is not None:
            self._go(place)

    def _arrange(self) -> None:
        kept = self.current if self._moved else None
        wanted = self._identity(kept) if kept is not None else None
        rows = self._rows
        words = self.needle.lower().split()
        if words:
            rows = [row for row in rows if (line := self._searched(row)) is not None and all(word in line for word in words)]
        if self.sort_by is not None and (key := self.columns[self.sort_by].sort) is not None:
            chosen = key
            known = [row for row in rows if chosen(row) is not None]
            unknown = [row for row in rows if chosen(row) is None]
            rows = [*sorted(known, key=chosen, reverse=self.descending), *unknown]
        self.shown = rows
        if wanted is not None and not (self.cursor < len(rows) and self._identity(rows[self.cursor]) == wanted):
            self.cursor = next((i for i, row in enumerate(rows) if self._identity(row) == wanted), self.cursor)
        self.cursor = min(max(self.cursor, 0), max(len(rows) - 1, 0))
        size = Size(self.size.width, len(rows) + 1)
        if size != self.virtual_size:
            self.virtual_size = size
        self.refresh()

    def _searched(self, row: Row) -> str:
        return " ".join(column.text(row) for column in self.columns).lower()

    # --- drawing -------------------------------------------------------------------------------------------------------

    def visible_columns(self) -> list[tuple[Column[Row], int]]:
        """Columns that fit, each with its width; flexible ones share the rest."""
        cells = self.size.width
        if self._layout[0] != cells:
            chosen = [column for column in self.columns if cells >= column.from_width]
            spare = max(cells - sum(column.width + 1 for column in chosen), 0)
            flexible = [column for column in chosen if column.flexible]
            share = spare // len(flexible) if flexible else 0
            self._layout = (cells, [(c, c.width + (share if c.flexible else 0)) for c in chosen])
        return self._layout[1]

    def render_line(self, y: int) -> Strip:
        """One line: the heading, which stays at the top, or a row."""
        cells = self.size.width
        if y == 0:
            return Strip([Segment(self._heading(cells), self._base + HEADER)], cells)
        place = y - 1 + self.scroll_offset.y
        if place >= len(self.shown):
            text = self.empty if place == 0 and not self.needle else "nothing matches" if place == 0 else ""
            return Strip([Segment(cell(text, cells, right=False), self._base + Style(dim=bool(text)))], cells)
        row = self.shown[place]
        line = " ".join([cell(column.text(row), size, right=column.right) for column, size in self.visible_columns()])
        line = line[:cells].ljust(cells) if line.isascii() else cell(line, cells, right=False)
        style = self._style(row) if self._style is not None else PLAIN
        if place == self.cursor and self.has_focus:
            style += CURSOR
        return Strip([Segment(line, self._base + style)], cells)

    @property
    def _base(self) -> Style:
        """The style of the widget, asked for once and not for every line."""
        if self._base_style is None:
            self._base_style = self.rich_style
        return self._base_style

    def notify_style_update(self) -> None:
        """Colours changed (focus, theme)."""
        self._base_style = None
        super().notify_style_update()

    def _heading(self, cells: int) -> str:
        parts = []
        for column, size in self.visible_columns():
            mark = ""
            if self.sort_by is not None and self.columns[self.sort_by] is column:
                mark = "▼" if self.descending else "▲"
            parts.append(cell(column.title + mark, size, right=column.right))
        return cell(" ".join(parts), cells, right=False)

    # --- keys and mouse ------------------------------------------------------------------------------------------------

    def action_move(self, by: int) -> None:
        """Move the cursor."""
        self._go(self.cursor + by)

    def action_move_page(self, pages: int) -> None:
        """Move the cursor by screenfuls."""
        self._go(self.cursor + pages * max(self.size.height - 2, 1))

    def action_choose(self) -> None:
        """Open the row under the cursor."""
        row = self.current
        if row is not None:
            self.post_message(self.Chosen(self, row))

    def action_next_sort(self) -> None:
        """Sort by the next column that can be sorted by; after the last, in the order rows came."""
        able = [i for i, column in enumerate(self.columns) if column.sort is not None]
        if not able:
            return
        after = [i for i in able if self.sort_by is None or i > self.sort_by]
        self.sort_by, self.descending = (after[0] if after else None), False
        self._arrange()

    def action_reverse(self) -> None:
        """Turn the order round."""
        if self.sort_by is not None:
            self.sort(self.sort_by)

    def on_click(self, event: events.Click) -> None:
        """A click on a heading sorts; on a row it moves the cursor, and opens it when it is there already."""
        event.stop()
        if event.y == 0:
            self._sort_at(event.x)
            return
        place = event.y - 1 + self.scroll_offset.y
        if place < len(self.shown):
            if place == self.cursor or event.chain > 1:
                self.cursor = place
                self.action_choose()
            else:
                self._go(place)

    def _sort_at(self, x: int) -> None:
        at = 0
        for column, size in self.visible_columns():
            at += size + 1
            if x < at:
                if column.sort is not None:
                    self.sort(self.columns.index(column))
                return

    def on_focus(self) -> None:
        """The cursor is shown while the table has the focus."""
        self.refresh()

    def on_blur(self) -> None:
        """See ``on_focus``."""
        self.refresh()

    def on_resize(self) -> None:
        """The width is that of the window: nothing scrolls sideways."""
        self.virtual_size = Size(self.size.width, len(self.shown) + 1)

    def _go(self, place: int) -> None:
        self._moved = True
        self.cursor = min(max(place, 0), max(len(self.shown) - 1, 0))
        # The heading covers the first line of what is visible.
        top, room = self.scroll_offset.y, max(self.size.height - 1, 1)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + room:
            self.scroll_to(y=self.cursor - room + 1, animate=False)
        self.refresh(Region(0, 0, *self.size))
